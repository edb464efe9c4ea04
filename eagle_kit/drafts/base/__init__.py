"""Contracts of kinds, draft models and drafters, and the drafters that several algorithms share: of heads that
feed their output back (``autoregressive.py``: EAGLE, whole models), and of drafts in one pass.
"""
