"""Measurements of an engine for the choice of speculation shapes."""
