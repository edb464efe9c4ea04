"""Operations, one folder each: torch reference, faster implementations beside it, and the dispatch."""
