"""Tensor parallelism: the processes that share a target, and the calls that rank 0 broadcasts to them."""
