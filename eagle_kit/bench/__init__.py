"""Benchmarks of kernels, engine, training and serving; nothing in production imports them."""
