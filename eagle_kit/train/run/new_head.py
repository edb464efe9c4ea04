"""The head that a run starts from: its architecture by the config, its first weights.

Legend: H hidden.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eagle_kit.checkpoints.draft import load_draft, read_draft_config
from eagle_kit.checkpoints.formats.recognise import recognise
from eagle_kit.checkpoints.layout import CONVENTION, LAYER_IDS
from eagle_kit.checkpoints.mtp import check_family, has_modules, load_mtp
from eagle_kit.config.train import HeadConfig, TrainConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import SpecShape
from eagle_kit.data.chat.template import template_hash
from eagle_kit.data.chat.vocab_map import VocabMap
from eagle_kit.models.blocks.moe import Experts
from eagle_kit.models.config import DraftConfig, TargetConfig
from eagle_kit.models.heads.draft_head import DraftHead
from eagle_kit.models.heads.eagle1 import Eagle1Config, Eagle1Head
from eagle_kit.models.heads.eagle3 import Eagle3Head
from eagle_kit.models.heads.mtp import MTPConfig, MTPHead, MTPModule
from eagle_kit.models.loading.loader import read_json
from eagle_kit.models.targets.llama import LlamaModel
from eagle_kit.train.plan.sizes import HeadArchitecture

FIRST_NORM = 0.1
"""Share of the target's final norm that a head with the target's output layer starts with."""


def draft_config(config: HeadConfig, target: TargetConfig, *, name: str, tokenizer: Any) -> HeadArchitecture:
    """The head's architecture. Raises UserError when the target has no use for it."""
    about: dict[str, Any] = {"target": name, "template_hash": template_hash(tokenizer)}
    if config.kind == "mtp":
        check_family(target)
        return MTPConfig(target, config.num_modules or target.num_mtp_layers or 1, **about)
    if config.kind == "eagle1":
        return replace(_eagle1_config(config, target), **about)
    if config.start_from is not None:
        return replace(_old_config(config, target), **about)
    if config.kind == "eagle3-mla" and target.mla is None:
        raise UserError(
            "head.kind is eagle3-mla, but the target has no latent attention.", "Set head.kind=eagle3."
        )
    return replace(_eagle3_config(config, target), **about)


def _old_config(config: HeadConfig, target: TargetConfig) -> DraftConfig:
    """The architecture of the head that ``start_from`` names."""
    assert config.start_from is not None
    found = read_draft_config(config.start_from, target)
    _check_numbering(config.start_from)
    for name, has, needs in (
        ("kind", "eagle3" if found.mla is None else "eagle3-mla", config.kind),
        ("target_hidden_size", found.target_hidden_size, target.hidden_size),
        ("vocab_size", found.vocab_size, target.vocab_size),
    ):
        if has != needs:
            raise UserError(
                f"The head of head.start_from, {config.start_from}, has the {name} {has}, and this run needs "
                f"{needs}.",
                "Name a head of this target and kind, or leave head.start_from out.",
            )
    return found


def _check_numbering(folder: str) -> None:
    """Raise UserError for a head that names layers without saying whether their inputs or outputs are meant,
    and does not look as if inputs were."""
    eagle = read_json(Path(folder) / "config.json").get("eagle_config") or {}
    if eagle.get(LAYER_IDS) and CONVENTION not in eagle and recognise(folder).format in (None, "sglang"):
        raise UserError(
            f"The head of head.start_from, {folder}, numbers the layers it reads as other projects do.",
            f"Give the folder that eagle-kit import {folder} --out DIR writes.",
        )


def _eagle3_config(config: HeadConfig, target: TargetConfig) -> DraftConfig:
    flags = ("fc_norm", "norm_output", "norm_before_residual")
    overrides: dict[str, Any] = {name: getattr(config, name) for name in flags}
    if config.intermediate_size is not None:
        overrides["intermediate_size"] = config.intermediate_size
    if config.aux_layer_ids is not None:
        if not config.aux_layer_ids or not all(0 <= i <= target.num_layers for i in config.aux_layer_ids):
            raise UserError(
                f"head.aux_layer_ids is {list(config.aux_layer_ids)}, but the target has layers 0 to "
                f"{target.num_layers - 1}.",
                f"Name inputs of layers, for example {list(target.default_aux_layer_ids)}.",
            )
        overrides["aux_layer_ids"] = config.aux_layer_ids
    if config.draft_vocab_size > target.vocab_size:
        raise UserError(
            f"head.draft_vocab_size is {config.draft_vocab_size}, but the target has {target.vocab_size}.",
            "Lower it.",
        )
    latent = config.kind == "eagle3-mla"
    return DraftConfig.for_target(target, config.draft_vocab_size, latent=latent, **overrides)


def _eagle1_config(config: HeadConfig, target: TargetConfig) -> Eagle1Config:
    """The layer of an EAGLE-3 head over all tokens, behind EAGLE-1's ``fc``."""
    like = DraftConfig.for_target(target, target.vocab_size)
    return Eagle1Config(
        hidden_size=like.hidden_size,
        num_heads=like.num_heads,
        num_kv_heads=like.num_kv_heads,
        head_dim=like.head_dim,
        intermediate_size=config.intermediate_size or like.intermediate_size,
        vocab_size=like.vocab_size,
        rms_norm_eps=like.rms_norm_eps,
        rope_theta=like.rope_theta,
        rope_scaling=like.rope_scaling,
        fc_bias=config.fc_bias,
        max_position_embeddings=like.max_position_embeddings,
    )


def check_steps(config: TrainConfig, draft: HeadArchitecture) -> None:
    """Raise UserError when several modules are to be trained or judged for other steps than they have."""
    modules = draft.num_modules if isinstance(draft, MTPConfig) else 1
    if modules == 1:
        return
    if config.training.ttt_length != modules:
        raise UserError(
            f"training.ttt_length is {config.training.ttt_length}, but each of the {modules} MTP modules is "
            "trained for one step.",
            f"Set training.ttt_length={modules}, or head.num_modules=1.",
        )
    shapes = [SpecShape.parse(shape) for shape in config.judge.shapes]
    if config.judge.every and any(shape.topk > 1 or shape.steps > modules for shape in shapes):
        raise UserError(
            f"judge.shapes asks for more than a chain of {modules} steps, what {modules} MTP modules draft.",
            f"Set judge.shapes to {SpecShape(modules, 1, modules + 1)}.",
        )


def new_head(
    config: TrainConfig,
    draft: HeadArchitecture,
    target: LlamaModel,
    folder: Path,
    vocab: VocabMap,
    device: torch.device,
) -> DraftHead:
    """A head with seeded weights, in fp32.

    Args:
        folder: the target's.
        vocab: what an EAGLE-3 head can say.
    """
    torch.manual_seed(config.seed)
    if isinstance(draft, MTPConfig):
        return freeze(_new_modules(config.head, draft, target, folder, device))
    if isinstance(draft, Eagle1Config):
        return Eagle1Head(draft).to(device=device, dtype=torch.float32).bind(target.lm_head)
    if config.head.start_from is not None:
        old = load_draft(config.head.start_from, torch.float32, device, target=target)
        assert isinstance(old, Eagle3Head)
        old.config = draft
        return old
    head = Eagle3Head(draft)
    # A target may have more rows than its tokenizer has tokens.
    in_draft = torch.zeros(draft.vocab_size, dtype=torch.bool)
    in_draft[: len(vocab.t2d)] = torch.as_tensor(vocab.t2d)
    head.set_vocab_map(torch.as_tensor(vocab.d2t), in_draft)
    head.to(device=device, dtype=torch.float32)
    if config.head.lm_head_init == "target":
        with torch.no_grad():
            rows = head.target_ids.to(target.head_weight.device)
            head.lm_head.weight.copy_(target.head_weight[rows])
            _soften(head.norm, target)
    return head


def freeze(head: DraftHead) -> DraftHead:
    """Leave out of training what a gradient says nothing about: the biases by which experts are chosen."""
    for name, parameter in head.named_parameters():
        parameter.requires_grad_(not name.endswith("e_score_correction_bias"))
    return head


def _new_modules(
    config: HeadConfig, draft: MTPConfig, target: LlamaModel, folder: Path, device: torch.device
) -> MTPHead:
    """MTP modules of the target's checkpoint, copied from its last layer, or at random."""
    has, init = target.config.num_mtp_layers, config.init
    if has and not has_modules(folder):
        has = 0
    if init == "auto":
        init = "checkpoint" if has else "last-layer"
    if init == "checkpoint":
        if draft.num_modules > has:
            raise UserError(
                f"head.num_modules is {draft.num_modules}, but the target's checkpoint has {has}.",
                "Lower it, or set head.init=last-layer.",
            )
        head = load_mtp(folder, torch.float32, device, target=target)
        head.layers = head.layers[: draft.num_modules]
        head.config = replace(draft, own_head=head.config.own_head)
        return head
    head = MTPHead(draft).bind(target.lm_head)
    for module in head.layers:
        assert isinstance(module, MTPModule)
        if init == "last-layer":
            _copy_last_layer(module, target)
        else:
            _randomise_experts(module)
        _soften(module.shared_head.norm, target)
    return head.to(device=device, dtype=torch.float32)


def _copy_last_layer(module: MTPModule, target: LlamaModel) -> None:
    """The target's last layer behind ``eh_proj``, which begins as the sum of its two inputs."""
    state = target.layers[-1].state_dict()
    try:
        module.load_state_dict(state, strict=False)
    except RuntimeError:
        state = {}
    if not state.keys() <= module.state_dict().keys() or not state:
        raise UserError(
            "head.init is last-layer, but the target's last layer is of another kind than its MTP module.",
            "Set head.init=random.",
        )
    size = target.config.hidden_size
    with torch.no_grad():
        module.eh_proj.weight += torch.cat((torch.eye(size), torch.eye(size)), 1)


def _randomise_experts(module: nn.Module) -> None:
    """Experts start as linear layers do."""
    for child in module.modules():
        if isinstance(child, Experts):
            for stack in (child.gate_up_proj, child.down_proj):
                bound = stack.shape[-1] ** -0.5
                nn.init.uniform_(stack, -bound, bound)


def _soften(norm: nn.Module, target: LlamaModel) -> None:
    """Start a final norm at a tenth of the target's: a new layer says nothing yet, and at full size its first
    logits would be confidently wrong (loss 15 where guessing evenly costs 9)."""
    with torch.no_grad():
        norm.weight.copy_(target.norm.weight * FIRST_NORM)  # type: ignore[operator]
