"""Collectives of tensor parallelism, and the heartbeat of its processes."""
