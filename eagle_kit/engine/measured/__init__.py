"""Choices between implementations by measured times."""
