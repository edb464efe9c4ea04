"""Plans of an engine's device memory."""
