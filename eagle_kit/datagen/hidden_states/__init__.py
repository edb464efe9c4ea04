"""The target's states of all packed rows, computed here or by another engine, into a store."""
