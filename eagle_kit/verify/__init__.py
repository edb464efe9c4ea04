"""Verifiers, and the sampling and acceptance of a window."""
