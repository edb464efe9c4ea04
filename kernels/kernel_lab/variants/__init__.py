"""Configurations of the Triton kernels that ship, to compile ahead of time; a module for a file of kernels.

A module has ``variants() -> list[Variant]``; where blocks depend on the device it takes its facts.
"""
