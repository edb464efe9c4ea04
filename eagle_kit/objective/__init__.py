"""What trainings of several kinds share: alignment, teacher, losses, noise, training-time test."""
