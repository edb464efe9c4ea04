"""Drafting algorithms: one folder each, over ``base``, and a registry."""
