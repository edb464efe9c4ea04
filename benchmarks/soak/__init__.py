"""``python benchmarks soak``: a server under hostile, slow, leaving and ordinary clients."""
