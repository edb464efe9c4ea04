"""What each kernel takes on this machine, beside what its bytes and its arithmetic would take at best.

``python kernels bench`` measures the machine's ceilings, then every kernel against them and against torch;
see :mod:`eagle_kit.bench.kernels.command`. The benchmark of the engine uses the same timer and ceilings.
"""
