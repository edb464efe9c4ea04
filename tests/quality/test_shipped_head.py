"""The shipped head accepts what it accepted when it was published.

Greedy text is the target's own with any draft, so a fault that costs accepted tokens changes no response:
wrong positions, lost features, another layer, another vocabulary map. Only these counts fall. They were
measured by ``tests/support/pinned_quality.py``, which also says what may differ between machines.
"""

import json
import re
from dataclasses import replace
from typing import Any

import pinned_quality as pinned
import pytest
import torch
from pinned_quality import (
    FEW_SHAPE,
    FEW_TOKENS,
    HEAD,
    LEAST_LEAD,
    NUM_DRAFTED_TOKENS,
    NUM_TOKENS,
    SHAPES,
    TARGET,
)

from eagle_kit.config.eval import EvalConfig
from eagle_kit.core.stats import SpecStats
from eagle_kit.drafts.eagle3.head import Eagle3Head
from eagle_kit.drafts.files.draft import load_draft
from eagle_kit.eval.runner import run_eval
from eagle_kit.eval.summary import find_row

pytestmark = pytest.mark.real

RATIO = 0.02
"""Relative tolerance of an accept length."""
SHARE = 0.02
"""Absolute tolerance of the share of verifies that accept a depth."""
FEW_VERIFIES = 2
"""Verifies that the cheap regime may need more or fewer: one in 37 is more than :data:`RATIO`."""


@pytest.fixture(scope="module")
def pins() -> pinned.Pins:
    return pinned.read_pins()


@pytest.fixture(scope="module")
def llm():
    return pinned.open_engine()


def check_few(stats: SpecStats, pins: pinned.Pins) -> None:
    """Raise AssertionError unless the cheap regime accepts what is pinned."""
    assert abs(stats.num_verifies - pins.few["num_verifies"]) <= FEW_VERIFIES
    first = pins.few["num_accepted_at"][0]
    assert abs(stats.num_accepted_at[0] - first) <= FEW_VERIFIES


def decode_few(llm) -> tuple[dict[str, list[int]], SpecStats]:
    """Tokens by prompt, and acceptance, of the cheap regime."""
    prompts = pinned.pinned_prompts()
    names = pinned.few_of(prompts)
    outputs = pinned.decode(llm, [prompts[name] for name in names], FEW_SHAPE, FEW_TOKENS)
    tokens = {name: list(output.token_ids) for name, output in zip(names, outputs, strict=True)}
    return tokens, pinned.sum_of(outputs)


@pytest.mark.essential
def test_two_prompts_give_the_pinned_tokens_and_acceptance(llm, pins):
    tokens, stats = decode_few(llm)
    assert tokens == {name: pins.tokens[name][:FEW_TOKENS] for name in tokens}
    check_few(stats, pins)


def test_plain_decoding_gives_the_pinned_tokens(llm, pins):
    """No exception is made for another machine: no two logits were closer than the lead that is pinned."""
    assert pins.least_lead >= LEAST_LEAD
    prompts = pinned.pinned_prompts()
    outputs = pinned.decode(llm, prompts.values(), "none", NUM_TOKENS)
    assert {name: output.token_ids for name, output in zip(prompts, outputs, strict=True)} == pins.tokens


@pytest.mark.parametrize("shape", SHAPES)
def test_sixteen_prompts_are_accepted_as_pinned(llm, pins, shape):
    prompts = pinned.pinned_prompts()
    assert len(prompts) == 16
    outputs = pinned.decode(llm, prompts.values(), shape, NUM_DRAFTED_TOKENS)

    # Text first: without it the counts mean nothing.
    tokens = {name: output.token_ids for name, output in zip(prompts, outputs, strict=True)}
    assert tokens == {name: ids[:NUM_DRAFTED_TOKENS] for name, ids in pins.tokens.items()}

    stats = pinned.sum_of(outputs)
    want = pins.shapes[shape]
    assert stats.num_emitted_tokens == want["num_emitted_tokens"]
    assert stats.accept_length == pytest.approx(want["accept_length"], rel=RATIO)
    shares = [count / want["num_verifies"] for count in want["num_accepted_at"]]
    assert stats.acceptance_per_position == pytest.approx(shares, abs=SHARE)


def test_more_candidates_accept_more(pins):
    """Figures of a healthy head have this order; a refresh that breaks it is no refresh."""
    lengths = [pins.shapes[shape]["accept_length"] for shape in SHAPES]
    assert lengths == sorted(lengths)
    for figure in pins.shapes.values():
        assert figure["num_accepted_at"] == sorted(figure["num_accepted_at"], reverse=True)


# Faults that leave text as it is. A neighbouring layer in place of the middle one is none of them: it costs
# no tokens here (1 % more are accepted), as neighbouring layers are much alike.


def another_last_layer(head: Eagle3Head) -> None:
    first, middle, last = head.config.aux_layer_ids
    head.config = replace(head.config, aux_layer_ids=(first, middle, last + 2))


def map_one_entry_off(head: Eagle3Head) -> None:
    head.d2t.copy_(head.token_map.roll(1) - torch.arange(len(head.d2t)))


def tokens_one_off(head: Eagle3Head) -> None:
    """Every offset is one too small, so that the token before the right one is proposed."""
    head.d2t.sub_(1).clamp_(min=0)


@pytest.mark.nightly
@pytest.mark.parametrize("fault", [another_last_layer, map_one_entry_off, tokens_one_off])
def test_a_fault_of_the_head_changes_the_counts_and_no_token(pins, fault):
    head = load_draft(HEAD)
    fault(head)
    tokens, stats = decode_few(pinned.open_engine(draft=head))
    assert tokens == {name: pins.tokens[name][:FEW_TOKENS] for name in tokens}
    with pytest.raises(AssertionError):
        check_few(stats, pins)


# The model card


def card_rows() -> dict[tuple[str, str], float]:
    """Accept lengths of the card's table, by task and shape."""
    card = (HEAD / "README.md").read_text(encoding="utf-8")
    row = re.compile(r"^\| (\w[\w-]*) \| (\d+,\d+,\d+) \| ([\d.]+) \| .* \| (\d+) \|$", re.MULTILINE)
    return {(task, shape): float(length) for task, shape, length, _ in row.findall(card)}


def card_settings() -> dict[str, Any]:
    """Most tokens of a response, and the batch size, that the card's figures were measured with."""
    card = (HEAD / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^\* settings: max_tokens (\d+), batch_size (\d+)", card, re.MULTILINE)
    assert found is not None
    return {"max_tokens": int(found[1]), "batch_size": int(found[2])}


def test_the_card_has_figures_of_the_tasks_in_the_package():
    rows = card_rows()
    assert {task for task, _ in rows} == {"all", "human_eval", "ours", "held-out"}
    assert {shape for _, shape in rows} == {"4,1,5", "5,4,16"}
    about = json.loads((HEAD / "eagle_kit.json").read_text(encoding="utf-8"))
    for shape, length in about["accept_length"].items():
        # Of other prompts and shorter responses; a card of another head would be far off.
        assert length == pytest.approx(rows["all", shape], rel=0.1)


@pytest.mark.nightly
def test_all_prompts_of_the_package_are_accepted_as_the_card_says(tmp_path):
    """The two tasks that need no file besides: 230 of the card's 293 prompts, about ten minutes."""
    settings = card_settings()
    tasks = ("human_eval", "ours")
    shapes = ("4,1,5", "5,4,16")
    config = EvalConfig(
        tasks=tasks,
        shapes=shapes,
        max_tokens=settings["max_tokens"],
        plots=False,
        engine={"max_batch_size": settings["batch_size"], "dtype": "float32", "device": "cpu"},
    )
    summary = run_eval(TARGET, {"head": HEAD}, config, out=tmp_path / "eval", quiet=True)
    assert summary["greedy_identical"]
    for task in tasks:
        for shape in shapes:
            found = find_row(summary, "head", shape, task)["accept_length"]
            assert found == pytest.approx(card_rows()[task, shape], rel=RATIO), (task, shape)
