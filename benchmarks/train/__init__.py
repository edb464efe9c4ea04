"""Benchmark of a training step: its rate, and its time and memory against plain forms."""
