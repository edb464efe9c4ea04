"""Memory that is reserved on a GPU, with a device that is made up."""

import pytest
import torch

from eagle_kit.ops.device_memory import UNRESERVED_BYTES, reserve_segment

GB = 1 << 30


@pytest.mark.parametrize(
    ("free", "asked", "reserved"),
    [
        (80 * GB, 3 * GB, [3 * GB]),
        (3 * GB, 3 * GB, [3 * GB - UNRESERVED_BYTES]),
        (2 * GB, 3 * GB, [2 * GB - UNRESERVED_BYTES]),
        (UNRESERVED_BYTES, 3 * GB, []),
        (80 * GB, 0, []),
    ],
)
def test_libraries_with_allocators_of_their_own_keep_some_memory(monkeypatch, free, asked, reserved):
    sizes = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * GB))
    monkeypatch.setattr(torch, "empty", lambda size, **options: sizes.append(size))
    reserve_segment(torch.device("cuda", 0), asked)
    assert sizes == reserved
