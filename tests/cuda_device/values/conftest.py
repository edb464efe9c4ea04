"""Models of the tests with values, made once."""

import pytest

from tests.cuda_device.values.models import Models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Targets and trained drafts, each made when a test first needs it."""
    return Models(tmp_path_factory.mktemp)
