"""accelerate's launcher with the files in train/accelerate: a process for each GPU of the machine."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda_device.device import ROOT, environment

SCRIPT = """
import os, sys
from pathlib import Path
Path(sys.argv[1], os.environ["RANK"]).write_text(os.environ["LOCAL_RANK"] + " of " + os.environ["WORLD_SIZE"])
"""


@pytest.mark.parametrize("num_gpus", [2, 3])
@pytest.mark.parametrize("launch", ["multi-gpu.yaml", "fsdp2.yaml", "no file"])
def test_as_many_processes_start_as_there_are_gpus(launch: str, num_gpus: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    out = tmp_path / "out"
    out.mkdir()
    words = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    if launch != "no file":
        words += ["--config_file", str(ROOT / "train" / "accelerate" / launch)]
    done = subprocess.run(
        [*words, str(script), str(out)],
        cwd=tmp_path,
        env=environment({"EAGLE_KIT_DEVICE_COUNT": str(num_gpus), "HF_HOME": str(tmp_path)}),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found = {path.name: path.read_text() for path in out.iterdir()}
    assert found == {str(rank): f"{rank} of {num_gpus}" for rank in range(num_gpus)}
