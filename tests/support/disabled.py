"""Switches of ``EAGLE_KIT_DISABLE`` within a test, as if the process had begun with them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from eagle_kit.core import switches


@contextmanager
def disabled(*parts: str) -> Iterator[None]:
    """Within, these parts are disabled, and no others."""
    with mock.patch.dict(os.environ, {switches.VARIABLE: ",".join(parts)}):
        switches.disabled_parts.cache_clear()
        try:
            yield
        finally:
            switches.disabled_parts.cache_clear()
