"""Named ranges of a step in traces."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from eagle_kit.core.errors import UserError
from eagle_kit.ops.step_ranges import NOTHING, StepRanges


def names_within(ranges: StepRanges) -> set[str]:
    """Names of ours in a profile of a few nested ranges."""
    cpu = [ProfilerActivity.CPU]
    with profile(activities=cpu) as profiled, ranges("step"), ranges("cycle", "4,1,5", "batch", 3):
        torch.ones(3).sum()
    return {event.name for event in profiled.events() if event.name.startswith("eagle_kit.")}


def test_ranges_are_in_a_profile_only_while_they_are_on():
    ranges = StepRanges()
    assert names_within(ranges) == set()
    ranges.is_profiled = True
    assert names_within(ranges) == {"eagle_kit.step", "eagle_kit.cycle 4,1,5 batch 3"}
    ranges.is_profiled = False
    assert names_within(ranges) == set()


class Unprintable:
    """A detail that must not become text."""

    def __str__(self) -> str:
        raise AssertionError("its text was made")


def test_a_range_that_is_off_makes_no_object_and_no_text():
    assert StepRanges()("cycle", Unprintable()) is NOTHING


def test_a_range_may_end_after_the_profile_has_ended():
    ranges = StepRanges()
    ranges.is_profiled = True
    with ranges("text"):
        ranges.is_profiled = False
    assert ranges("text") is NOTHING


@pytest.mark.skipif(torch.version.cuda is not None, reason="this build of torch has NVTX")
def test_nvtx_needs_a_torch_that_has_it():
    with pytest.raises(UserError, match="no NVTX"):
        StepRanges(has_nvtx=True)
