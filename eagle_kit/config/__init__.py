"""Configuration: pydantic schemas and their loading. YAML, then command line, then validation; torch-free."""

from eagle_kit.config.loading.loader import load_config

__all__ = ["load_config"]
