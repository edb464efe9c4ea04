"""Names of machines, and the command as it was typed."""

import sys
from pathlib import Path

import pytest

from eagle_kit.report.environment import (
    command_line,
    cpu_model,
    describe_machine,
    describe_versions,
    machine_title,
    now,
    package_versions,
)

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


def test_a_machine_is_titled_by_what_decodes():
    cpu = {"cpu": "EPYC", "threads": 1, "gpu": None}
    assert machine_title(cpu) == "EPYC, 1 thread"
    assert machine_title({**cpu, "threads": 4}) == "EPYC, 4 threads"
    assert machine_title({**cpu, "gpu": "H100"}) == "H100"
    described = describe_machine("cpu")
    assert described["gpu"] is None and described["memory_gb"] > 0.5
    assert machine_title(described).startswith(cpu_model())


@pytest.mark.parametrize("program", ["/usr/bin/eagle-kit", "/x/eagle_kit/cli/__main__.py"])
def test_a_command_line_can_be_typed_again(program, monkeypatch):
    monkeypatch.setattr(sys, "argv", [program, "eval", "--tasks", "a b", "x"])
    assert command_line() == "eagle-kit eval --tasks 'a b' x"


def test_versions_are_those_of_what_is_installed():
    import torch

    found = describe_versions()
    assert found["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert set(package_versions(["torch", "no-such-package"])) == {"torch"}
    assert len(now()) == len("2026-01-02T03:04:05+00:00")
