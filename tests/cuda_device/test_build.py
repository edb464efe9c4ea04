"""The libraries have what installed libraries import, and nothing else; settings are in the environment."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda_device import device
from tests.cuda_device.build import LIBRARIES, build, defined_symbols, imported_symbols

OURS = ("device_", "cublas_routine")
"""What the libraries offer to each other and to Python."""
ASKED_BY_NAME = frozenset({"cuGetExportTable", "cuGetProcAddress_v2"})
"""Functions of the driver that are asked for by a name that is put together or stands in another library."""
OF_HEADERS = frozenset(
    {
        "cublasGetStream_v2",
        "cuDeviceGetCount",
        "cuDeviceGetUuid_v2",
        "cuGetErrorName",
        "cuInit",
        "cuDriverGetVersion",
    }
)
"""Functions without which a library would be odd, whoever calls them."""


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.file)
def test_a_library_has_what_is_imported_of_it_and_no_body_in_vain(library):
    path = build() / library.file
    defined = {name for name in defined_symbols(path) if not name.startswith(OURS)}
    imported = imported_symbols(library)
    assert imported and imported <= defined
    in_vain = defined - imported - ASKED_BY_NAME - OF_HEADERS - {library.file}
    assert not in_vain


def test_routines_of_cublas_are_launches_and_other_missing_functions_are_not():
    table = (build() / "libcublas.so.13.table.h").read_text()
    assert "ROUTINE(cublasSgemm_v2)" in table and "ROUTINE(cublasGemmEx)" in table
    assert "ABSENT(cublasXtCreate)" in table and "ROUTINE(cublasSet" not in table


def test_capability_memory_and_number_of_devices_are_settings():
    settings = {
        "EAGLE_KIT_DEVICE_MEMORY_GB": "141",
        "EAGLE_KIT_DEVICE_CAPABILITY": "8.0",
        "EAGLE_KIT_DEVICE_COUNT": "2",
    }
    script = (
        "import torch; print(torch.cuda.device_count(), torch.cuda.get_device_capability(1),"
        " torch.cuda.mem_get_info(1)[1], torch.cuda.get_device_properties(0).multi_processor_count);"
        " torch.empty(1 << 30, dtype=torch.uint8, device='cuda:1');"
        " print(torch.cuda.memory_reserved(0), torch.cuda.memory_reserved(1))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=device.environment(settings),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["2 (8, 0) 141000000000 108", f"0 {1 << 30}"]
