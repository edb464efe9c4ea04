"""The guards refuse what they are for, so that a trace that passes means something."""

import pytest
import torch
from fake_cuda import CUDA, Copies, Device, Refused, fake_gpu

from eagle_kit.kernels.backend import current_device
from eagle_kit.kernels.capability import device_facts
from eagle_kit.kernels.transfer import to_device

FAULTS = {
    "a number is read": lambda x: x.sum().item(),
    "indices of a mask": lambda x: x[x > 0],
    "assignment by a mask": lambda x: x.index_put_((x > 0,), x.clone()),
    "nonzero": lambda x: x.nonzero(),
    "a copy to the host": lambda x: x.cpu(),
    "a copy from pageable memory": lambda x: torch.zeros(3).to(CUDA),
    "a 0-dim tensor of the host": lambda x: x + torch.tensor(1.0),
    "indices of the host": lambda x: x[torch.tensor([0, 1])],
    "a number assigned by indices": lambda x: x.__setitem__(x.long(), 0.0),
    "a number assigned to an element": lambda x: x.__setitem__(1, 2.0),
    "counts": lambda x: x.long().bincount(),
    "repetition without a size": lambda x: x.repeat_interleave(x.long()),
}


@pytest.mark.parametrize("guard", [Copies, Device])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refused(fault, guard):
    with fake_gpu(), pytest.raises(Refused), guard():
        FAULTS[fault](torch.ones(3, device=CUDA))


def test_what_is_refused_in_cycles_only():
    with fake_gpu():
        with Copies() as guard:
            found = to_device([1, 2], CUDA)
        assert found.is_cuda and guard.used == {"eagle_kit.kernels.transfer.to_device"}
        with pytest.raises(Refused, match=r"transfer\.to_device"), Device():
            to_device([1, 2], CUDA)


def test_numbers_fills_and_sizes_are_no_waits():
    with fake_gpu():
        x = torch.ones(3, device=CUDA)
        with Copies():
            x[:2] = 2.0
        with Device():
            ones = torch.ones(3, dtype=torch.int64, device=CUDA)
            y = (x.masked_fill(x > 0, 0.0) * 2.0 + 1).repeat_interleave(ones, output_size=3)
    assert y.shape == (3,)


def test_the_seam_names_the_gpu_and_ends_with_the_trace():
    with fake_gpu("8.0"):
        assert device_facts(CUDA).capability == 80
        with current_device(CUDA):
            pass
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AssertionError)):
            device_facts(CUDA)
