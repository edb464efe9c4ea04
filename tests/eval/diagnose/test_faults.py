"""The table of faults on tiny models: what was injected is named first, and a head that fits has no cause."""

import copy
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from tiny import tiny_dflash, tiny_dspark, tiny_head, tiny_target
from tiny_rule import learned_head, learned_target, texts

from eagle_kit.core.shape import SpecShape
from eagle_kit.engine.load_draft import copy_head
from eagle_kit.eval.diagnose.causes import Cause, Measured, name_causes
from eagle_kit.eval.diagnose.chain import Source, draft_chains
from eagle_kit.eval.diagnose.context import measure_context
from eagle_kit.eval.diagnose.fit import measure_fit
from eagle_kit.eval.diagnose.hypotheses import hypotheses, layers_needed, mask_tokens
from eagle_kit.eval.diagnose.models import Models
from eagle_kit.eval.diagnose.row import compute_states, pack
from eagle_kit.eval.diagnose.run import Basis, likely_misreading
from eagle_kit.eval.diagnose.server import ServerResult
from eagle_kit.eval.diagnose.trials import STEPS, run_hypothesis, run_trials, simulate_decoding
from eagle_kit.models.blocks.layers import RMSNorm


def diagnosed(head, target=None, late: int = 0) -> list[Cause]:
    """Causes of a head over texts; ``late``: slots by which the target's states come late."""
    target = target or learned_target()
    tried, row = hypotheses(head, target.config, masks=(3, 5, 17, 40)), pack(texts())
    states = compute_states(target, row, layers_needed(tried, head, target.config))
    if late:
        states = states._replace(inputs={i: state.roll(late, 0) for i, state in states.inputs.items()})
    source = Source(target, row, states)
    fit = measure_fit(head, source, draft_chains(head, source, STEPS))
    found = name_causes(Measured(fit, run_trials(head, source, tried), ()))
    print(f"{fit.reach[0].mean:.2f} accepted:", *(f"\n  {each.subject}: {each.evidence}" for each in found))
    return found


def copied(inject):
    head = copy.deepcopy(learned_head())
    inject(head)
    return head


def other_layers(head):
    head.config = replace(head.config, aux_layer_ids=head.config.aux_layer_ids[::-1])


def swapped_chunks(head):
    head.fc.weight.data = torch.cat(head.fc.weight.data.chunk(3, 1)[::-1], 1)


def swapped_inputs(head):
    layer = head.midlayer.self_attn.qkv_proj
    layer.weight.data = torch.cat(layer.weight.data.chunk(2, 1)[::-1], 1)


def rolled_map(head):
    head.d2t.copy_(head.token_map.roll(1) - torch.arange(len(head.d2t)))


def norm_before_residual(head):
    head.midlayer.norm_before_residual = True
    head.config = replace(head.config, norm_before_residual=True)


def norms_without_one(head):
    for module in head.modules():
        if isinstance(module, RMSNorm):
            module.weight.data -= 1.0


def nan(head):
    head.midlayer.mlp.down_proj.weight.data[3, 5] = float("nan")


def few_tokens(head):
    kept = torch.arange(0, len(head.d2t), 3)
    ids = head.token_map[kept]
    head.config = replace(head.config, draft_vocab_size=len(kept))
    head.lm_head.weight.data = head.lm_head.weight.data[kept]
    head.d2t, head.t2d = ids - torch.arange(len(kept)), torch.isin(torch.arange(41), ids)


FAULTS = {
    other_layers: "layer ids",
    swapped_chunks: "layer ids",
    swapped_inputs: "order of inputs",
    rolled_map: "vocabulary map",
    norm_before_residual: "norm convention",
    norms_without_one: "norm convention",
    few_tokens: "vocabulary coverage",
    nan: "NaN",
}


@pytest.mark.parametrize("inject", FAULTS, ids=lambda inject: inject.__name__)
def test_the_fault_that_was_injected_is_named_first(inject):
    assert diagnosed(copied(inject))[0].subject == FAULTS[inject]


def test_a_head_that_fits_has_no_cause():
    assert diagnosed(learned_head()) == []


def test_a_modest_head_has_no_cause():
    head = learned_head(15)
    assert diagnosed(head) == []


def test_a_new_head_has_learned_too_little():
    head = tiny_head(learned_target(), 39, std=0.02)
    head.norm.weight.data *= 0.1
    assert [cause.subject for cause in diagnosed(head)] == ["too little training"]


def test_a_head_of_another_target_is_surer_than_it_may_be():
    target, generator = copy.deepcopy(learned_target()), torch.Generator().manual_seed(0)
    for name, weight in target.named_parameters():
        if name.startswith("layers.") and weight.ndim == 2:
            weight.data += 0.5 * weight.data.std() * torch.randn(weight.shape, generator=generator)
    assert [cause.subject for cause in diagnosed(learned_head(), target)] == ["another target"]


BLOCKS = {
    "dflash": (tiny_dflash, {"block_size": 4, "num_layers": 1}, 70),
    "dspark": (tiny_dspark, {"block_size": 3, "num_layers": 1}, 70),
}
MISREAD = {
    "what rows predict": lambda config: {"predicts_next": not config.predicts_next},
    "mask token": lambda config: {"mask_token_id": 17},
    "layer ids": lambda config: {"aux_layer_ids": (0, 1, 2)},
}
OF_BLOCKS = {"mask_token_id": 5, "aux_layer_ids": (1, 2, 3)}


def misread(head, fault):
    other = copy_head(head).bind(head.bound)
    other.config = replace(other.config, **MISREAD[fault](other.config))
    return other


@pytest.mark.parametrize("fault", MISREAD)
@pytest.mark.parametrize("kind", BLOCKS)
def test_some_reading_is_the_right_one_of_a_head_of_blocks_whose_config_is_wrong(kind, fault):
    make, changes, _ = BLOCKS[kind]
    target = tiny_target(41)
    head = make(target, **OF_BLOCKS, **changes).eval().requires_grad_(False)
    wrong, row = misread(head, fault), pack(texts(4))
    tried = [each for each in hypotheses(wrong, target.config, masks=range(9)) if each.subject == fault]
    source = Source(target, row, compute_states(target, row, range(5)))
    right, served = (draft_chains(each, source, 2).first.label_log_prob for each in (head, wrong))
    assert not torch.equal(served, right)
    undone = [
        each
        for each in tried
        if torch.equal(run_hypothesis(wrong, source, each, 2).first.label_log_prob, right)
    ]
    remedies = {
        "what rows predict": f"sample_from_anchor to {str(head.config.predicts_next).lower()}",
        "mask token": "mask_token_id to 5",
        "layer ids": "[0, 1, 2], their outputs, as target_layer_ids",
    }
    assert len(undone) == 1 and remedies[fault] in undone[0].remedy
    assert wrong.config != head.config


@pytest.mark.nightly
@pytest.mark.parametrize("fault", MISREAD)
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_what_a_config_says_wrong_of_a_head_of_blocks_is_named_first(kind, fault):
    make, changes, steps = BLOCKS[kind]
    head = learned_head(steps, make=make, **OF_BLOCKS, **changes)
    assert diagnosed(head) == []
    assert diagnosed(misread(head, fault))[0].subject == fault


def test_tokens_that_may_be_a_mask_are_few_and_the_usual_ones():
    class Tokenizer(NamedTuple):
        pad_token_id: int
        added_tokens_decoder: dict[int, str]

        def __len__(self) -> int:
            return 160

    tokenizer = Tokenizer(7, dict.fromkeys(range(100, 160), ""))
    assert mask_tokens(tokenizer, 200)[:4] == [7, 160, 199, 100]
    assert len(mask_tokens(tokenizer, 200)) == 32
    assert 160 not in mask_tokens(tokenizer, 160)


@pytest.mark.nightly
def test_tokens_that_came_a_slot_late_in_training_are_named():
    assert diagnosed(learned_head(60, late_tokens=1))[0].subject == "one-slot shift"


@pytest.mark.nightly
def test_features_that_came_a_slot_early_in_training_are_named():
    assert diagnosed(learned_head(60, late_features=-1))[0].subject == "one-slot shift"


def test_copies_of_a_chat_in_long_texts_are_no_new_observations():
    one, two = (measure_context(learned_head(), learned_target(), texts(n), 512, []) for n in (1, 2))
    assert one.near.served.error == float("inf"), "one chat, however often it is read"
    assert two.near.served.error < float("inf") and two.near.served.mean > 0.2


def test_a_server_that_reads_the_head_otherwise_is_told_by_what_it_accepts():
    head, target = learned_head(), learned_target()
    tried, row = hypotheses(head, target.config), pack(texts())
    source = Source(target, row, compute_states(target, row, layers_needed(tried, head, target.config)))
    basis = Basis(tried, source, draft_chains(head, source, STEPS))
    there = simulate_decoding(draft_chains(copied(swapped_inputs), source, STEPS), row)
    shape = SpecShape(STEPS, 1, STEPS + 1)
    seen = ServerResult("vLLM", [], there.accept_length, False, (), there.num_verifies, shape)
    models = Models(None, head)
    assert there.accept_length < simulate_decoding(basis.served, row).accept_length - 0.2
    likeness = likely_misreading(models, basis, seen, shape)
    assert likeness.startswith("feature before embedding") and f"({there.accept_length:.2f})" in likeness
    unlike = seen._replace(accept_length=STEPS + 1.0)
    assert likely_misreading(models, basis, unlike, shape) == "", "no reading accepts every draft"
