"""P-EAGLE (arXiv 2602.01469): all steps in one pass over masks."""
