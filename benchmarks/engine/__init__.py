"""Benchmark of whole decode cycles against the memory floor, with random weights."""
