"""Layers that targets and heads are built from."""
