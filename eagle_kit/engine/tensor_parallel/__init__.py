"""Processes of tensor parallelism."""
