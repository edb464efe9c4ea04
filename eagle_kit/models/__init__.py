"""Targets and draft heads, each written once for capture, training and serving; and their loading."""
