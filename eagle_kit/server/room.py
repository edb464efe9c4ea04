"""Room that clients share, with some for those that have little."""

import math

SPARE = 1 / 4
"""Room beside that for all, as a part of it, for clients that have little."""
FEW = 1 / 16
"""Most that is little, as a part of the room for all."""


def has_room(count: int, *, held: int, own: int, most: int) -> bool:
    """Return whether a client may take ``count`` units more.

    Args:
        held: units that all clients have.
        own: units that the client has.
        most: units of the room for all.
    """
    if held + count <= most:
        return True
    has_few = own + count <= math.ceil(FEW * most)
    return has_few and held + count <= most + math.ceil(SPARE * most)
