"""Replies to learn from: of the target in our engine, or of any server that speaks OpenAI's protocol."""
