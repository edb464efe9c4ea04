"""Estimates before a run: sizes, activations, memory, time."""
