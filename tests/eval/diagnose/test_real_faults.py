"""The table of faults on the shipped head and its target: what was injected is named first.

Responses and the target's states are computed once; every fault is a copy of the head, of the states, or of
the target. Behind the check of the files: what that sees of a map is tried with the command.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_kit.config.diagnose import DiagnoseConfig
from eagle_kit.drafts.eagle3.head import Eagle3Head
from eagle_kit.drafts.files.draft import load_draft
from eagle_kit.drafts.files.findings import Finding
from eagle_kit.engine.llm import LLM
from eagle_kit.eval.diagnose.causes import name_causes
from eagle_kit.eval.diagnose.chain import Source, draft_chains
from eagle_kit.eval.diagnose.hypotheses import hypotheses
from eagle_kit.eval.diagnose.models import Models
from eagle_kit.eval.diagnose.replay import decode_responses
from eagle_kit.eval.diagnose.row import compute_states, pack
from eagle_kit.eval.diagnose.run import Basis, diagnose, make_basis, measure
from eagle_kit.eval.diagnose.trials import STEPS, simulate_decoding
from eagle_kit.models.blocks.layers import RMSNorm, Rope
from eagle_kit.models.loading.loader import load_target
from eagle_kit.report.stages import Stages

pytestmark = [pytest.mark.nightly, pytest.mark.real]
TARGET, HEAD = "smollm2-135m-instruct", Path(__file__).parents[3] / "checkpoints" / "smollm2-135m-eagle3"
CONFIG = DiagnoseConfig(limit=24, max_tokens=64, context=0)
LONG = CONFIG.replace(context=4096)
KNOWN = [Finding("ok", "chat template", "the one the draft was trained with.")]
QUIET = Stages({}, is_quiet=True)


class World:
    """The shipped head, its target, and responses of 24 prompts with the states of every layer."""

    def __init__(self) -> None:
        llm = LLM(TARGET, max_batch_size=8)
        self.models = Models(llm, self.head())
        self.responses = decode_responses(llm, CONFIG, QUIET)
        row = pack(self.responses.texts)
        self.source = Source(llm.target, row, compute_states(llm.target, row, range(31)))

    def head(self) -> Eagle3Head:
        return load_draft(HEAD).eval().requires_grad_(False)

    def causes(self, head: Eagle3Head, source: Source | None = None, config=CONFIG, findings=KNOWN):
        """Causes of a head, or of states, with a fault."""
        source = source or self.source
        models = replace(self.models, head=head)
        tried = hypotheses(head, source.target.config)
        basis = Basis(tried, source, draft_chains(head, source, STEPS))
        measured = measure(models, self.responses, basis, findings, config, QUIET)
        length = simulate_decoding(basis.served, source.row).accept_length
        found = name_causes(measured)
        print(f"{length:.2f} tokens per verify:", *(f"\n  {each.subject}: {each.evidence}" for each in found))
        return found


@pytest.fixture(scope="module")
def world() -> World:
    return World()


def layer_ids(*ids: int):
    def inject(head: Eagle3Head) -> None:
        head.config = replace(head.config, aux_layer_ids=ids)

    return inject


def fc_swapped(head: Eagle3Head) -> None:
    head.fc.weight.data = torch.cat(head.fc.weight.data.chunk(3, 1)[::-1], 1)


def inputs_swapped(head: Eagle3Head) -> None:
    layer = head.midlayer.self_attn.qkv_proj
    layer.weight.data = torch.cat(layer.weight.data.chunk(2, 1)[::-1], 1)


def gates_swapped(head: Eagle3Head) -> None:
    layer = head.midlayer.mlp.gate_up_proj
    layer.weight.data = torch.cat(layer.weight.data.chunk(2)[::-1])


def remapped(change):
    def inject(head: Eagle3Head) -> None:
        head.d2t.copy_(change(head.token_map) - torch.arange(len(head.d2t)))

    return inject


def other_map(ids: torch.Tensor) -> torch.Tensor:
    """The map of a head of another vocabulary."""
    return torch.randperm(49152, generator=torch.Generator().manual_seed(0))[: len(ids)]


def norm_before_residual(head: Eagle3Head) -> None:
    head.config = replace(head.config, norm_before_residual=True)
    head.midlayer.norm_before_residual = True


def norm_output(head: Eagle3Head) -> None:
    head.config = replace(head.config, norm_output=True)


def norms_without_one(head: Eagle3Head) -> None:
    for module in head.modules():
        if isinstance(module, RMSNorm):
            module.weight.data -= 1.0


def rope(theta: float, scaling: dict | None = None):
    def inject(head: Eagle3Head) -> None:
        head.config = replace(head.config, rope_theta=theta, rope_scaling=scaling)
        head.rope = Rope(head.config.head_dim, theta, scaling)

    return inject


def interleaved(head: Eagle3Head) -> None:
    """Rows of q and k in the order of Meta's weights: rotated pairs side by side."""
    config, weight = head.config, head.midlayer.self_attn.qkv_proj.weight.data
    rotated = (config.num_heads + config.num_kv_heads) * config.head_dim
    heads = weight[:rotated].view(-1, 2, config.head_dim // 2, weight.shape[1])
    weight[:rotated] = heads.transpose(1, 2).reshape(rotated, -1)


def few_tokens(head: Eagle3Head) -> None:
    kept = torch.randperm(8192, generator=torch.Generator().manual_seed(0))[:512].sort().values
    ids = head.token_map[kept]
    head.config = replace(head.config, draft_vocab_size=512)
    head.lm_head.weight.data = head.lm_head.weight.data[kept]
    head.d2t, head.t2d = ids - torch.arange(512), torch.isin(torch.arange(49152), ids)


def nan_in_a_weight(head: Eagle3Head) -> None:
    head.midlayer.mlp.down_proj.weight.data[7, 9] = float("nan")


HEADS = {
    "layer ids, outputs for inputs": (layer_ids(1, 14, 26), "layer ids"),
    "layer ids, inputs for outputs": (layer_ids(3, 16, 28), "layer ids"),
    "layer ids, in another order": (layer_ids(27, 15, 2), "layer ids"),
    "one layer id": (layer_ids(2, 15, 29), "layer ids"),
    "fc, low and high swapped": (fc_swapped, "layer ids"),
    "embedding and feature swapped": (inputs_swapped, "order of inputs"),
    "gate and up swapped": (gates_swapped, "order of inputs"),
    "d2t one entry off": (remapped(lambda ids: ids.roll(1)), "vocabulary map"),
    "d2t left out": (remapped(lambda ids: torch.arange(len(ids))), "vocabulary map"),
    "d2t of another head": (remapped(other_map), "vocabulary map"),
    "norm_before_residual": (norm_before_residual, "norm convention"),
    "norm_output": (norm_output, "norm convention"),
    "norm weights without one": (norms_without_one, "norm convention"),
    "RoPE base 100": (rope(100.0), "RoPE"),
    "RoPE base 1,000": (rope(1_000.0), "RoPE"),
    "RoPE base 10,000": (rope(10_000.0), "RoPE"),
    "RoPE scaled by 1/4": (rope(100_000.0, {"rope_type": "linear", "factor": 0.25}), "RoPE"),
    "RoPE scaled by 1/16": (rope(100_000.0, {"rope_type": "linear", "factor": 1 / 16}), "RoPE"),
    "RoPE pairs of neighbours": (interleaved, "RoPE"),
    "512 tokens to propose": (few_tokens, "vocabulary coverage"),
    "NaN in a weight": (nan_in_a_weight, "NaN"),
}


@pytest.mark.parametrize("fault", HEADS)
def test_a_fault_of_the_head_is_named_first(world, fault):
    inject, subject = HEADS[fault]
    head = world.head()
    inject(head)
    assert world.causes(head, config=LONG if subject == "RoPE" else CONFIG)[0].subject == subject


MAPS = {
    "one entry off": lambda ids: ids.roll(1),
    "left out": lambda ids: torch.arange(len(ids)),
    "of another head": other_map,
}
KNOWN_MAPS = [*((fault, True) for fault in MAPS), ("one entry off", False), ("of another head", False)]


@pytest.mark.parametrize(("fault", "is_known"), KNOWN_MAPS)
def test_another_map_in_the_files_is_named_first_by_the_command(tmp_path, fault, is_known):
    """The check of the files sees it by the fingerprint of our exports; without, it is undone."""
    draft = tmp_path / "head"
    shutil.copytree(HEAD, draft)
    tensors = load_file(draft / "model.safetensors")
    numbers = torch.arange(len(tensors["d2t"]))
    other = MAPS[fault](tensors["d2t"] + numbers)
    tensors |= {"d2t": other - numbers}
    tensors.pop("t2d", None)
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    if not is_known:
        config = json.loads((draft / "config.json").read_text())
        del config["eagle_kit"]["vocab_map"]
        (draft / "config.json").write_text(json.dumps(config))
    found = diagnose(draft, TARGET, CONFIG, is_quiet=True)
    print(*found.causes, sep="\n")
    assert found.causes[0].subject == ("weights" if is_known else "vocabulary map")
    assert (found.measured is None) == is_known


def test_the_shipped_head_is_healthy(world):
    assert world.causes(world.head(), config=LONG) == []


def test_features_that_come_a_slot_late_are_named_first(world):
    states = world.source.states
    late = {layer: state.roll(1, 0) for layer, state in states.inputs.items()}
    source = world.source._replace(states=states._replace(inputs=late))
    assert world.causes(world.head(), source)[0].subject == "one-slot shift"


def test_a_context_beyond_its_training_is_named_first(world):
    """It was trained on texts of at most 1,024 tokens, and stands 4,096. A larger base would help it there
    nearly as much as a shorter context does, and is not the cause."""
    causes = world.causes(world.head(), config=CONFIG.replace(context=8192))
    assert causes[0].subject == "context" and "context cut to each chat" in causes[0].evidence


def quantised(target, bits: int):
    """Round every matrix of the layers to ``bits``, by rows."""
    for name, parameter in target.named_parameters():
        if parameter.ndim == 2 and name.startswith("layers."):
            most = 2 ** (bits - 1) - 1
            scale = parameter.data.abs().amax(1, keepdim=True) / most
            parameter.data = (parameter.data / scale).round().clamp(-most, most) * scale
    return target


@pytest.mark.parametrize(("bits", "subject"), [(8, None), (4, "another target")])
def test_a_target_rounded_to_four_bits_is_another_one_and_to_eight_bits_is_not(world, bits, subject):
    target = quantised(load_target(TARGET), bits)
    llm = LLM(target, tokenizer=world.models.llm.tokenizer, max_batch_size=8)
    models = Models(llm, world.head())
    responses = decode_responses(llm, CONFIG, QUIET)
    measured = measure(models, responses, make_basis(models, responses), KNOWN, CONFIG, QUIET)
    assert [cause.subject for cause in name_causes(measured)] == ([subject] if subject else [])


def test_a_new_head_is_trained_too_little(world):
    """As training begins it, with rows of the output layer of the target."""
    head = world.head()
    new = Eagle3Head(head.config)
    target = world.source.target
    new.set_vocab_map(head.d2t, head.t2d)
    with torch.no_grad():
        new.lm_head.weight.copy_(target.head_weight[head.token_map])
        new.norm.weight.copy_(target.norm.weight * 0.1)
    found = world.causes(new.eval().requires_grad_(False))
    assert found[0].subject == "too little training"
