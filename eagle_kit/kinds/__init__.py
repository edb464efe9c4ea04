"""Kinds of drafts: one file each, behind one protocol (``kind``) and one registry."""
