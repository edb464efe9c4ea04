"""Protocols of kinds, draft models and drafters, and what several algorithms share."""
