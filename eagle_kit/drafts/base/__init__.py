"""Contracts of kinds, draft models and drafters, and the drafters that several algorithms share."""
