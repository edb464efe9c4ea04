"""Benchmark of a training step against its plain forms."""
