"""Room that clients share: requests of an engine, or bytes of bodies. Clients with little have a reserve."""

import math

SPARE = 1 / 4
"""Size of the reserve for clients with little, as a share of the room for all."""
FEW = 1 / 16
"""Most that a client with little has, as a share of the room for all."""


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
