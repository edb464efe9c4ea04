"""Models of the tests with values, made once, and the number of texts that were compared."""

import pytest

from tests.cuda_device.values.models import Models, compared


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Targets and trained drafts, each made when a test first needs it."""
    return Models(tmp_path_factory.mktemp)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many texts of the device were compared with the CPU's, and how many part at a tie."""
    if compared:
        terminalreporter.write_line(f"{compared['texts']} texts compared, {compared['ties']} part at a tie")
