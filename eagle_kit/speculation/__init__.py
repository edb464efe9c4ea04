"""Proposals of drafts, their verification, and the state between cycles."""
