"""Measure drafts: runner, summary, table and plots. Reaches the engine through ``LLM`` only."""
