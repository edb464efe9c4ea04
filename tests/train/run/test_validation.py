"""The trainer's simulated accept length is the engine's decoded one, on a head that was really trained."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny_head, tiny_target
from tiny_run import PackedRows, packed_row_of

from eagle_kit.config.train import DataConfig, TrainConfig, TrainingConfig, ValidationConfig
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.drafts.eagle3.head import Eagle3Head
from eagle_kit.engine.llm import LLM
from eagle_kit.models.targets.llama import LlamaModel
from eagle_kit.train.optim.schedule import Schedule
from eagle_kit.train.parallel.processes import make_accelerator
from eagle_kit.train.run.checkpoint import TrainState
from eagle_kit.train.run.setup import TrainingComponents
from eagle_kit.train.run.simulate import match_table, walk
from eagle_kit.train.run.step import Stepper
from eagle_kit.train.run.validation import ValidationResult, Validator

SHAPES = ("1,1,2", "3,1,4", "5,1,6", "3,2,6")


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 131, size=rng.integers(1, 12)).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def target() -> LlamaModel:
    return tiny_target(std=0.15, eos_token_ids=(2,))


@pytest.fixture(scope="module")
def trained_head(target: LlamaModel) -> Eagle3Head:
    """A head that learned the target's own greedy responses for a few seconds."""
    asked = prompts(12, seed=1)
    outputs = LLM(target, max_batch_size=8, max_context=80).generate(asked, SamplingParams(max_tokens=32))
    pairs = zip(asked, outputs, strict=True)
    data = PackedRows([packed_row_of(prompt, output.token_ids) for prompt, output in pairs])
    config = TrainConfig(
        target="tiny",
        output_dir="unused",
        data=DataConfig(source="unused"),
        training=TrainingConfig(
            ttt_length=4, sequences_per_step=4, gradient_accumulation=1, learning_rate=2e-2, max_steps=100
        ),
    )
    head = tiny_head(target, draft_vocab_size=110)
    with torch.no_grad():
        head.lm_head.weight.copy_(target.head_weight[head.token_map])
    schedule = Schedule.from_config(config.training, len(data))
    stepper = Stepper(
        config, make_accelerator(config), TrainingComponents(target, Path(), "", None, data), head, schedule
    )
    state = TrainState()
    for _ in range(100):
        stepper.step(state)
    return head


@pytest.fixture(scope="module")
def validator(target: LlamaModel) -> Validator:
    config = ValidationConfig(max_tokens=24, shapes=SHAPES, batch_size=3)
    return Validator(target, prompts(7, seed=1) + prompts(4, seed=9), config)


def test_simulated_equals_decoded_for_every_chain(validator: Validator, trained_head: Eagle3Head) -> None:
    validation = validator.validate(trained_head)
    assert set(validation.simulated) == {"1,1,2", "3,1,4", "5,1,6"}
    for shape, simulated in validation.simulated.items():
        assert simulated == validation.decoded[shape]
    assert 1.2 < validation.decoded["3,1,4"].accept_length < 3.9
    assert validation.num_different == 0


def test_validating_leaves_head_and_its_gradients_alone(
    validator: Validator, trained_head: Eagle3Head
) -> None:
    before = {name: value.clone() for name, value in trained_head.state_dict().items()}
    validator.validate(trained_head)
    for name, value in trained_head.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(parameter.requires_grad for parameter in trained_head.parameters())


def test_plain_responses_are_decoded_once(
    target: LlamaModel, trained_head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes, generate = [], LLM.generate

    def watched(self: LLM, *args: Any, **options: Any) -> Any:
        shapes.append(str(options["shape"]))
        return generate(self, *args, **options)

    monkeypatch.setattr(LLM, "generate", watched)
    validator = Validator(target, prompts(2, seed=3), ValidationConfig(max_tokens=6, shapes=("3,1,4",)))
    assert validator.validate(trained_head) == validator.validate(trained_head)
    assert (
        shapes == ["none", "3,1,4", "3,1,4"]
        and validator.responses is not None
        and len(validator.responses) == 2
    )


def test_a_validation_says_how_many_of_its_responses_are_decoded(
    target: LlamaModel, trained_head: Eagle3Head
) -> None:
    """Three prompts, plainly at first, and in two shapes."""
    config = ValidationConfig(max_tokens=6, shapes=("3,1,4", "3,2,6"))
    validator = Validator(target, prompts(3, seed=3), config)
    for total in (9, 6):
        counts: list[tuple[int, int]] = []
        validator.validate(trained_head, lambda done, of, counts=counts: counts.append((done, of)))
        assert counts == [(done, total) for done in range(total + 1)]


def test_match_table_equals_a_first_verify_at_every_row(target: LlamaModel, trained_head: Eagle3Head) -> None:
    """A response cut to one verify, started at every row, accepts as far as the row of the table says."""
    prompt = prompts(1, seed=1)[0]
    response = LLM(target, max_context=80).generate([prompt], SamplingParams(max_tokens=20))[0].token_ids
    table = match_table(target, trained_head, torch.tensor(prompt + response), len(prompt), 3)
    assert table.shape == (len(response) - 1, 3)
    llm = LLM(target, trained_head, max_context=80)
    for row in range(len(response) - 4):
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        stats = llm.generate([prompt + response[:row]], params, shape=SpecShape(3, 1, 4))[0].stats
        accepted = table[row].tolist().index(False) if not table[row].all() else 3
        assert (accepted == 3) == (stats.num_verifies == 1)
        assert stats.num_accepted_at[accepted - 1] >= 1 if accepted else stats.num_verifies > 1


def test_walk_counts_as_the_decoder_does() -> None:
    yes, no = True, False
    stats = walk(torch.tensor([[yes, yes], [no, no], [no, no], [no, yes], [yes, yes]]))
    assert (stats.num_verifies, stats.num_emitted_tokens) == (3, 5)
    assert stats.histogram == [0, 2, 0, 1]
    assert stats.num_accepted_at == [2, 1]


def test_response_of_one_token_has_no_verify(target: LlamaModel, trained_head: Eagle3Head) -> None:
    stats = walk(match_table(target, trained_head, torch.tensor([5, 6, 7]), 2, 3))
    assert stats.num_verifies == 0 and stats.accept_length == 0.0


def test_responses_that_differ_from_plain_decoding_are_counted_once_each(
    target: LlamaModel, trained_head: Eagle3Head
) -> None:
    config = ValidationConfig(max_tokens=8, shapes=("3,1,4", "1,1,2"), batch_size=2)
    validator = Validator(target, prompts(4, seed=1), config)
    first = validator.validate(trained_head)
    assert first.num_different == 0 and first.num_tokens == sum(map(len, validator.responses or []))
    assert validator.responses is not None
    for number in (1, 3):
        validator.responses[number] = [*validator.responses[number][:-1], 0]
    assert validator.validate(trained_head).num_different == 2, "of two shapes"


def test_prompts_are_counted_by_category_too(target: LlamaModel, trained_head: Eagle3Head) -> None:
    config, found = ValidationConfig(max_tokens=16, shapes=("3,1,4", "1,1,2")), prompts(6, seed=1)
    names = ["a", "b", "b", "a", "b", "a"]
    both = Validator(target, found, config, names).validate(trained_head)
    assert set(both.by_category) == {"a", "b"}
    for name, counts in both.by_category.items():
        mine = [prompt for prompt, of in zip(found, names, strict=True) if of == name]
        assert counts == Validator(target, mine, config).validate(trained_head).decoded["3,1,4"]
    total = ValidationResult.total([both, both])
    assert total.row()["accept_length_of"] == {n: c.accept_length for n, c in both.by_category.items()}
    assert "accept_length_of" not in Validator(target, found, config).validate(trained_head).row()
