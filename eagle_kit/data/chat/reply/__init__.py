"""Generated replies read into reasoning, content and tool calls."""
