"""A user's own head measured: speed and acceptance in this process, or as a running server counts them."""
