"""Proposals, verifiers, and sampling of the target's tokens."""
