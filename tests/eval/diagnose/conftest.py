"""Models that have learned a rule are trained once a session, by whichever process needs them first."""

import os

import pytest
import tiny_rule


@pytest.fixture(autouse=True, scope="session")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Share them in the folder of the session, which workers of pytest-xdist have a folder in."""
    place = tmp_path_factory.getbasetemp()
    tiny_rule.shared_folder = place.parent if "PYTEST_XDIST_WORKER" in os.environ else place
