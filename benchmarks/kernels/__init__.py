"""Benchmark of the kernels against the ceilings of the machine; see :mod:`benchmarks.kernels.suite`."""
