"""Versions of packages, for tests of what the oldest supported ones cannot do."""

from importlib.metadata import version

import pytest
from packaging.version import Version


def needs(package: str, oldest: str, reason: str) -> pytest.MarkDecorator:
    """Mark that skips a test where ``package`` is older than ``oldest``."""
    return pytest.mark.skipif(
        Version(version(package)) < Version(oldest), reason=f"{package} {oldest}: {reason}"
    )
