"""Verification kernels."""

from eagle_kit.kernels.accept.reference import Accepted, accept_greedy

__all__ = ["Accepted", "accept_greedy"]
