"""The one-shot all-reduce needs NVLink between all GPUs, and all ranks decide alike."""

from itertools import product

import pytest
from disabled import disabled
from rank_processes import run_ranks

from eagle_kit.distributed import collectives, nvlink
from eagle_kit.distributed.nvlink import GPULinks, missing_nvlink


def connected(names, links=4, without=()):
    """GPUs with ``links`` to each other, but for the pairs ``without``."""
    return [
        GPULinks(name, {other: 0 if (name, other) in without or name == other else links for other in names})
        for name in names
    ]


def test_gpus_of_one_switch_are_connected():
    assert missing_nvlink(connected("abcd")) is None


@pytest.mark.parametrize("pair", [pair for pair in product("abc", repeat=2) if pair[0] != pair[1]])
def test_one_missing_link_of_all_is_named(pair):
    reason = missing_nvlink(connected("abc", without=[pair]))
    one, other = ("abc".index(name) for name in pair)
    assert reason is not None and f"rank {one} and of rank {other}" in reason


def test_gpus_on_pcie_have_no_links():
    assert missing_nvlink(connected("ab", links=0)) is not None


def test_gpus_of_two_machines_do_not_see_each_other():
    assert missing_nvlink([*connected("ab"), *connected("cd")]) is not None


def test_what_is_not_known_counts_as_no_link():
    assert missing_nvlink([connected("ab")[0], None]) == nvlink.UNKNOWN
    assert missing_nvlink([None, None]) == nvlink.UNKNOWN


def decide(ranks, links, parts=((), ())):
    """Reason of a rank whose GPU has the ``links`` of its number, with the switches of its number."""
    collectives.links_of = lambda device: links[ranks.rank]
    with disabled(*parts[ranks.rank]):
        return ranks.why_no_one_shot()


@pytest.mark.parametrize(
    ("links", "parts", "reason"),
    [
        (connected("ab"), ((), ()), None),
        ([connected("ab")[0], None], ((), ()), nvlink.UNKNOWN),
        (connected("ab"), ((), ("one-shot-all-reduce",)), "EAGLE_KIT_DISABLE has one-shot-all-reduce."),
    ],
    ids=["connected", "unknown to one", "disabled on one"],
)
def test_all_ranks_decide_alike(links, parts, reason):
    assert run_ranks(2, decide, links, parts) == [reason, reason]


def test_a_machine_without_nvml_has_no_links():
    """As this one, unless it has GPUs with NVLink."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert nvlink.links_of(torch.device("cuda", 0)) is None
