"""Budgets of waits: no part of a trainer's step or of a prefill has the host wait more often."""

import json

import pytest
import torch

from benchmarks import waits
from eagle_kit.kv import keys_values


def test_a_trainers_step_and_a_prefill_are_within_their_budgets(triton_device, capsys):
    """By the lines that `python kernels check` makes its table of."""
    assert waits.main() == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["what"], line["part"]) for line in lines] == [
        (what, part) for what, parts in waits.BUDGETS.items() for part in parts
    ]
    assert all(line["waits"] <= line["budget"] for line in lines), lines
    waiting = {line["part"]: line["waits"] for line in lines if line["waits"]}
    assert waiting == {"figures": 1, "update": 1}, "a budget that is not needed is lowered"


@pytest.mark.nightly
def test_a_pageable_copy_of_a_prompt_exceeds_the_budget(triton_device, monkeypatch):
    def to_device(numbers, device, dtype=torch.int64):
        return torch.as_tensor(numbers, dtype=dtype).to(device)

    monkeypatch.setattr(keys_values, "to_device", to_device)
    gpu = waits.count_prefill()
    assert gpu.phases == {"prompts": 4, "draft and verify": 0}, "one a forward of target and of draft"
    assert {what for what, _ in gpu.waits} == {"copy from pageable memory"}
