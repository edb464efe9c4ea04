"""N-gram drafting, without a model."""
