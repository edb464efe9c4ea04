"""The engine: scheduler, prefill, cycle, and the ``LLM`` facade that everything above uses."""
