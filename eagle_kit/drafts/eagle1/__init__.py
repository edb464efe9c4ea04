"""EAGLE-1 (arXiv 2401.15077) and EAGLE-2 (arXiv 2406.16858)."""
