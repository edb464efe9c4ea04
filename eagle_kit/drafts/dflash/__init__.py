"""DFlash (arXiv 2602.06036): blocks drafted in one pass."""
