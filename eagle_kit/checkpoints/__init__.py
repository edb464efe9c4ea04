"""Draft checkpoints in Hugging Face shape: save, load, validate, export."""
