"""Proposal types and the choice of a verifier."""
