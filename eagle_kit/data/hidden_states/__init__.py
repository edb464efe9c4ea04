"""Captured hidden states on disk: store, shards, manifest, prefetch."""
