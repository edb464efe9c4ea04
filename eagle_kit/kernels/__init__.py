"""Operations, one folder each: a torch ``reference.py``, faster implementations beside it, and one function
that dispatches between them."""
