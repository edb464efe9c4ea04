"""Targets and draft heads, each defined once for capture, training and serving; and their loading."""
