"""The engine: pool, cycle, prefill, and the ``LLM`` facade that everything above uses."""
