"""Drafting behind one interface, and the key-value store that drafting and verification share."""
