"""Responses of the target as training data: by our engine, or by any server that speaks OpenAI's protocol."""
