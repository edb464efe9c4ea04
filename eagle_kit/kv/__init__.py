"""Key-value cache: page pool and paged stores of keys and values or latents."""
