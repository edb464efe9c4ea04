"""Draft proposal: chains, trees, static trees, MTP modules, n-grams."""
