"""OpenAI's API over HTTP, and the engine's thread behind it."""
