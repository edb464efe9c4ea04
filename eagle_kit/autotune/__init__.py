"""Choice of the shape of speculation: what it accepts, what it costs, what is best."""
