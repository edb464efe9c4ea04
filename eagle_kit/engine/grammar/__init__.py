"""Structured output: the grammar compiler and the bounds of its work."""
