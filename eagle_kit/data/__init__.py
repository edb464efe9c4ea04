"""Conversations -> tokens and loss mask -> packed sequences, vocabulary map and held-out prompts."""
