"""Attention in its five forms: of windows, latents, prompts, packed rows and training-time test."""
