"""A whole small model as the draft."""
