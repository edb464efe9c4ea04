"""The table of GPUs: names, and the rate of every precision."""

import pytest

from eagle_kit.core.errors import UserError
from eagle_kit.core.gpus import GPUS, Gpu, find_gpu


def test_a_kind_is_found_in_any_case_and_another_refused():
    assert find_gpu("H100-80G") is find_gpu("h100-80g") is GPUS["h100-80g"]
    with pytest.raises(UserError, match="'h100' is not in the table") as error:
        find_gpu("h100")
    assert all(name in error.value.remedy for name in GPUS)


def test_every_precision_has_its_rate():
    gpu = Gpu(memory=1.0, bf16=8.0, fp32=3.0, bandwidth=1.0, link=1.0)
    assert [gpu.flops(name) for name in ("bfloat16", "tf32", "float32")] == [8.0, 4.0, 3.0]


@pytest.mark.parametrize("name", GPUS)
def test_a_kind_has_the_memory_of_its_name_and_units_of_one_scale(name):
    gpu = GPUS[name]
    size = name.partition("-")[2].removesuffix("g")
    assert not size or gpu.memory == int(size) * 1e9
    assert gpu.link < gpu.bandwidth < gpu.fp32 < gpu.bf16
