"""Training-time test: alignment, teacher, losses, noise."""
