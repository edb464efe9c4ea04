"""DSpark (arXiv 2607.05147): DFlash with a correction by the token before."""
