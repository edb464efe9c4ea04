"""Conversations -> tokens and loss mask -> packed rows, vocabulary map and held-out prompts."""
