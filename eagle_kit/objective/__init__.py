"""What trainings of all kinds share: alignment, teacher, losses, noise, training-time test."""
