"""Benchmark of the kernels against the ceilings of the machine; see :mod:`eagle_kit.bench.kernels.suite`."""
