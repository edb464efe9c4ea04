"""Prompt sets that drafts are measured on, and that training texts should not hold."""
