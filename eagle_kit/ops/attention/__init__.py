"""Attention in its five forms: of windows, latents, prompts, packed sequences and training-time test."""
