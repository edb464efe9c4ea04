"""Hidden states of all packed sequences in a store, captured by the target or by another engine."""
