"""Checks of a GPU that end in a file for a bug report: `eagle-kit doctor --gpu`."""
