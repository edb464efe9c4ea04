"""Names of CPUs."""

from pathlib import Path

import pytest

from eagle_kit.report.environment import cpu_model

INTEL = "processor\t: 0\ncpu family\t: 6\nmodel\t\t: 85\nmodel name\t: Xeon(R) 8259CL CPU @ 2.50GHz\n"
CLOUD = "processor\t: 0\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n\nprocessor\t: 1\n"
ARM = "processor\t: 0\nBogoMIPS\t: 108.00\n\nHardware\t: BCM2835\n"


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        (INTEL, "Xeon(R) 8259CL CPU @ 2.50GHz"),
        (CLOUD, "AMD EPYC (family 26, model 2)"),
        (ARM, "BCM2835"),
    ],
)
def test_a_name_that_says_little_is_followed_by_family_and_model(cpuinfo, name, monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: cpuinfo)
    assert cpu_model() == name
