"""Every loss for twenty steps on a small target that has learned a language, and the drafts it accepts."""

from dataclasses import replace
from functools import cached_property

import pytest
import torch
from tiny import tiny_head
from tiny_trained import trained_models

from eagle_kit.config.drafts.fused_states import Eagle3TrainingConfig
from eagle_kit.config.train import ValidationConfig
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.engine.llm import LLM
from eagle_kit.models.targets.llama import LlamaModel
from eagle_kit.objective.loss import Objective, TTTBatch
from eagle_kit.objective.row_plan import make_row_plan
from eagle_kit.objective.target_features import capture_features
from eagle_kit.objective.ttt import ttt_forward_backward
from eagle_kit.train.optim.optimizer import make_optimizer
from eagle_kit.train.run.validation import Validator, share_weights

PROMPT, RESPONSE, TEXTS, STEPS, SHAPE = 4, 20, 24, 3, "3,1,4"
VOCAB, DRAFT_VOCAB = 11, 9


class Language:
    """A target that learned one, responses of its own to learn from, and prompts that are held out."""

    def __init__(self) -> None:
        self.target: LlamaModel = trained_models(VOCAB, DRAFT_VOCAB, steps=50, train_head=False)[0]
        drawn = torch.randint(VOCAB, (TEXTS + 8, PROMPT), generator=torch.Generator().manual_seed(1))
        prompts = drawn.tolist()
        llm = LLM(share_weights(self.target), None, max_batch_size=16, max_context=64)
        params = SamplingParams(max_tokens=RESPONSE, temperature=1.0, seed=0)
        outputs = llm.generate(prompts[:TEXTS], params, shape="none")
        ids = [prompt + out.token_ids for prompt, out in zip(prompts[:TEXTS], outputs, strict=True)]
        self.ids = torch.tensor([token for text in ids for token in text])
        number = torch.arange(TEXTS).repeat_interleave(PROMPT + RESPONSE)
        self.doc_start = number * (PROMPT + RESPONSE)
        place = torch.arange(len(self.ids)) - self.doc_start
        self.response = torch.where(place >= PROMPT, number, -1)
        config = ValidationConfig(prompts=8, max_tokens=20, shapes=(SHAPE,))
        self.validator = Validator(self.target, prompts[TEXTS:], config)

    @cached_property
    def before(self) -> float:
        """Accept length of the head that every training begins with."""
        return self.accept_length(self.new_head())

    def new_head(self) -> torch.nn.Module:
        return tiny_head(self.target, DRAFT_VOCAB, seed=2, std=0.1)

    def accept_length(self, head: torch.nn.Module) -> float:
        return self.validator.validate(head).decoded[SHAPE].accept_length

    def train(
        self,
        head: torch.nn.Module,
        loss: str | dict[str, float],
        training: Eagle3TrainingConfig,
        steps: int = 20,
    ) -> None:
        plan = make_row_plan(self.response, self.doc_start, STEPS)
        layers = head.config.aux_layer_ids
        features = capture_features(self.target, self.ids, self.doc_start, layers, plan.is_teacher)
        rows = self.target.head_weight[head.token_map]
        weights = [torch.full((count,), 1 / count) for count in plan.counts]
        objective = Objective.of(loss, 3.0, head, self.target.head_weight)
        objective = replace(objective, dpace_alpha=training.dpace_alpha)
        optimizer = make_optimizer(head, training)
        embed = self.target.embed_tokens.weight
        for _ in range(steps):
            optimizer.zero_grad()
            ttt_forward_backward(head, TTTBatch(self.ids, plan, weights, features, embed, rows), objective)
            optimizer.step()


@pytest.fixture(scope="module")
def language() -> Language:
    return Language()


@pytest.mark.parametrize(
    ("loss", "optimizer"),
    [(loss, "adamw") for loss in ("ce", "reverse-kl", "lk-hybrid")]
    + [
        pytest.param(loss, "adamw", marks=pytest.mark.nightly) for loss in ("tv", "lk-alpha")
    ]  # parts of mixes
    + [
        ("ce", "muon"),
        pytest.param("lk-hybrid", "muon", marks=pytest.mark.nightly),
        pytest.param("kl", "adamw", marks=pytest.mark.nightly),  # has the gradient of ce
        ({"ce": 0.1, "tv": 0.9}, "adamw"),
    ],
)
def test_twenty_steps_lengthen_the_decoded_drafts(
    language: Language, loss: str | dict[str, float], optimizer: str
) -> None:
    head, before = language.new_head(), language.before
    language.train(head, loss, Eagle3TrainingConfig(optimizer=optimizer, learning_rate=5e-3))
    after = language.accept_length(head)
    print(f"{loss} by {optimizer}: {before:.2f} -> {after:.2f}")
    assert after > before + 0.4


def test_weights_that_follow_the_confidence_lengthen_them_too(language: Language) -> None:
    head, before = language.new_head(), language.before
    language.train(head, "ce", Eagle3TrainingConfig(learning_rate=5e-3, dpace_alpha=0.5))
    assert language.accept_length(head) > before + 0.4
