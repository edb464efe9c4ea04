"""Generated responses read into reasoning, content and tool calls."""
