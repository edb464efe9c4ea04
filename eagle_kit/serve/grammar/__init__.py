"""Structured output: grammar compiler and the rules for schemas and patterns."""
