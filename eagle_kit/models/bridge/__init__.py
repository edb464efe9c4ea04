"""Targets that are not written here: models of transformers whose attention is ours."""
