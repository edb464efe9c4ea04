"""The load generator: requests to any OpenAI-compatible endpoint, and what they took."""
