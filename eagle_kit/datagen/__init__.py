"""Training data made by the target: regenerated responses and captured hidden states."""
