"""Facts of the machine: what nvidia-smi prints is read, and names of this machine stay here."""

import getpass
import json
import socket
import subprocess
from pathlib import Path

from eagle_kit.doctor.checks import Check, Result
from eagle_kit.doctor.findings import Findings, lines_of_machine
from eagle_kit.doctor.machine import (
    SMI_FIELDS,
    commit_of_package,
    has_nvlink,
    is_throttled,
    machine_facts,
    parse_table,
    without_names,
)

GPUS = """\
0, 550.54.15, Enabled, Enabled, Disabled, Default, 0x0000000000000000, 41, 5, 16, 4 MiB
1, 550.54.15, Enabled, Enabled, Disabled, Default, 0x0000000000000048, 86, 5, 16, 70312 MiB
"""
LINKED = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\t0-55\nGPU1\tNV18\t X \t0-55\n"
APART = LINKED.replace("NV18", "SYS")


def test_a_table_of_nvidia_smi_is_read():
    first, second = parse_table([*GPUS.splitlines(), "a line with, less"], SMI_FIELDS)
    assert first["driver_version"] == "550.54.15" and second["memory.used"] == "70312 MiB"
    assert not is_throttled(first["clocks_throttle_reasons.active"])
    assert is_throttled(second["clocks_throttle_reasons.active"])
    assert not is_throttled("0x0000000000000005"), "idle, and the power limit"
    assert not is_throttled("[N/A]")


def test_links_are_read_from_the_topology():
    assert has_nvlink(LINKED.splitlines()) is True
    assert has_nvlink(APART.splitlines()) is False
    assert has_nvlink([]) is None


def test_lines_name_a_gpu_whose_clocks_are_lowered():
    facts = machine_facts()
    facts["nvidia_smi"] = {
        "gpus": parse_table(GPUS.splitlines(), SMI_FIELDS),
        "memory_of_programs": ["70300 MiB"],
        "topology": LINKED.splitlines(),
    }
    text = "\n".join(lines_of_machine(facts))
    assert "clocks are lowered, 86 C" in text and "full clocks, 41 C" in text
    assert "NVLink" in text and "70300 MiB" in text


def test_the_commit_is_that_of_the_repository():
    right = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert commit_of_package() == right.stdout.strip()


def test_names_of_the_machine_and_secrets_stay_out_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("EAGLE_KIT_DISABLE", "lag")
    monkeypatch.setenv("HOME", "/somewhere/jane")
    monkeypatch.setenv("LOGNAME", "jane")
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-box-17.example.org")
    assert getpass.getuser() == "jane"
    report = Findings(machine_facts())
    detail = "cannot open /somewhere/jane/runs/x on gpu-box-17 of jane; janets stays"
    report.results.append(Result(Check("norm, add, float32", "norm"), "failed", detail, 0.1))
    report.write(tmp_path / "report.json")
    text = (tmp_path / "report.json").read_text()
    for name in ("secret", "/somewhere", "gpu-box-17", "jane;"):
        assert name not in text
    assert "cannot open ~/runs/x on HOST of USER; janets stays" in text
    assert json.loads(text)["facts"]["variables"]["EAGLE_KIT_DISABLE"] == "lag"


def test_keys_of_mappings_are_replaced_too(monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("/somewhere/jane"))
    assert without_names({"/somewhere/jane/a": [1, None, "/somewhere/jane"]}) == {"~/a": [1, None, "~"]}
