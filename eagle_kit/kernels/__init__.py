"""Operations, one folder each: ``reference.py`` in torch, faster forms beside it, one dispatching
function."""
