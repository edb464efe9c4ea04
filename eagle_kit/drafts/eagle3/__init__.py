"""EAGLE-3 (arXiv 2503.01840), with a Llama layer or latent attention."""
