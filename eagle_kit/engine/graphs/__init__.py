"""CUDA graphs of cycles, recordings of them on a CPU, and the warm-up that makes both."""
