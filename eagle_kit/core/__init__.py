"""Plain data shared by every layer: errors, sampling parameters, outputs, shapes, statistics. No models."""
