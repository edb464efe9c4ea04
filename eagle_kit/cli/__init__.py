"""The command line: one module per command, each importing what it runs only when it runs."""

from eagle_kit.cli.app import main

__all__ = ["main"]
