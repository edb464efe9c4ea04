"""Training: capture of hidden states, training-time test, runs, plans."""
