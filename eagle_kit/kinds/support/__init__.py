"""Shared by the kinds: draft files, compatibility findings, config.json, vocabulary maps."""
