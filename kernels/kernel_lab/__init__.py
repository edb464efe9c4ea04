"""The laboratory of the kernels: compiled without a GPU, read, counted and checked; no package imports it.

It lies in ``kernels/`` under a name of its own, since ``kernels`` is the name of a package of Hugging Face.
"""
