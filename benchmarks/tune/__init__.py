"""``python benchmarks tune``: shapes chosen by measurements against plain decoding, against every fixed shape
and beside other engines."""
