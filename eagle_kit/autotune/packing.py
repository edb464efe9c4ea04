"""Numbers of drafts of a batch that are verified together, when not all of them are: few, since each is one
more kind of cycle to record and to know the time of."""

PARTS = 4


def packed_counts(batch_size: int, num_drafts: int) -> list[int]:
    """Numbers of drafts to choose from for a batch whose windows have ``num_drafts`` each, beside all of
    them: none and its quarters."""
    most = batch_size * num_drafts
    return sorted({part * most // PARTS for part in range(PARTS)})


def packed_rows(batch_size: int, num_drafts: int, total: int) -> int | None:
    """Rows of a forward over the roots of a batch and ``total`` of its drafts, perhaps with rows to spare;
    None where whole windows are read."""
    room = [count for count in packed_counts(batch_size, num_drafts) if count >= total]
    return batch_size + room[0] if room else None
