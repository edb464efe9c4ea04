"""EAGLE-3 heads: how they are described, what else their tensors may mean, and how a new one begins."""

from dataclasses import replace
from typing import Any

import torch

from eagle_kit.config.drafts.fused_states import AnyEagle3HeadConfig, Eagle3HeadConfig
from eagle_kit.core.errors import UserError
from eagle_kit.drafts.base.conventions import Convention
from eagle_kit.drafts.base.kind import InitContext, describe_attention
from eagle_kit.drafts.eagle3.format import FusedStatesFormat
from eagle_kit.drafts.eagle3.fused_states import (
    ARCHITECTURES,
    FLAGS,
    FusedStatesKind,
    chosen_fields,
    read_states,
    start_new_head,
)
from eagle_kit.drafts.eagle3.head import Eagle3Config, Eagle3Head
from eagle_kit.drafts.files.draft_files import DraftFiles
from eagle_kit.drafts.files.structure import fuses_states, joins_embedding
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.targets.target import Target

PLACES = ("norm_output", "norm_before_residual")
"""Flags that say where a norm stands, and not whether there is one."""


class Eagle3Kind(FusedStatesKind[Eagle3Config, Eagle3Head, AnyEagle3HeadConfig]):
    """EAGLE-3 (arXiv 2503.01840), with a Llama layer or latent attention."""

    name = "eagle3"
    title = "EAGLE-3 draft head"
    algorithms = ("EAGLE3",)
    vllm_method = "eagle3"
    config_class = Eagle3Config
    head_class = Eagle3Head
    speculators_model_type = "eagle3"
    trained_as = ("eagle3", "eagle3-mla")
    format_class = FusedStatesFormat

    def recognises(self, files: DraftFiles) -> bool:
        """See :class:`~eagle_kit.drafts.base.kind.DraftKind`."""
        is_named = files.architecture in ARCHITECTURES or "Eagle3" in files.architecture
        return fuses_states(files) or (is_named and not joins_embedding(files))

    def describe(self, config: Eagle3Config, dtype: str) -> str:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`."""
        text = (
            f"One decoder layer of hidden size {config.hidden_size} ({describe_attention(config)}) and a "
            f"draft vocabulary of {config.draft_vocab_size} of {config.vocab_size} tokens, in {dtype}. "
            f"It reads {read_states(config)}."
        )
        variant = [flag for flag in (*FLAGS, "qk_norm", "own_embedding") if getattr(config, flag)]
        return text + (f" Options: {', '.join(variant)}." if variant else "")

    def conventions(self, head: Eagle3Head, target: TargetConfig) -> list[Convention]:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`; the flags that say where a norm stands, too."""
        return [*super().conventions(head, target), *(_flipped(flag, head.config) for flag in PLACES)]

    def new_config(self, settings: AnyEagle3HeadConfig, target: TargetConfig) -> Eagle3Config:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`."""
        if settings.start_from is not None:
            return self.old_config(settings, target)
        latent = not isinstance(settings, Eagle3HeadConfig)
        if latent and target.mla is None:
            raise UserError(
                "head.kind is eagle3-mla, but the target has no latent attention.", "Set head.kind=eagle3."
            )
        overrides = chosen_fields(settings, target)
        overrides["norm_output"] = settings.norm_output
        if isinstance(settings, Eagle3HeadConfig):
            overrides["qk_norm"] = settings.qk_norm
            overrides["sliding_window"] = settings.sliding_window
        return Eagle3Config.for_target(target, settings.num_draft_tokens, latent=latent, **overrides)

    def new_head(self, settings: AnyEagle3HeadConfig, config: Eagle3Config, start: InitContext) -> Eagle3Head:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`."""
        if settings.start_from is not None:
            return self.old_head(settings, config, start)
        head = start_new_head(Eagle3Head(config), settings, start)
        if settings.init == "last-layer":
            _copy_last_layer(head, start.target)
        return head


EAGLE3 = Eagle3Kind()


def _copy_last_layer(head: Eagle3Head, target: Target) -> None:
    """Put the target's last layer behind the last captured state: ``fc`` begins as that state, attention
    reads it as the target does, and the embedding through random weights. Raises UserError where the layer
    has other parts or sizes than the head's."""
    layer, size = target.layers[-1].state_dict(), head.config.hidden_size
    ours, columns = head.midlayer, "self_attn.qkv_proj.weight"
    wanted = {name: tensor.shape for name, tensor in ours.state_dict().items()}
    wanted[columns] = torch.Size((wanted[columns][0], size)) if columns in wanted else torch.Size()
    names = [name for name in wanted if name not in ("input_layernorm.weight", "hidden_norm.weight")]
    named = {name: layer[name] for name in names if name in layer and layer[name].shape == wanted[name]}
    others = layer.keys() - named.keys()
    width = size if head.fc is None else head.fc.weight.shape[1]
    if named.keys() != set(names) or others != {"input_layernorm.weight"} or width % size:
        raise UserError(
            "head.init is last-layer, but the target's last layer has not the parts and sizes of the head's.",
            "Set head.init=random, and leave head.intermediate_size out.",
        )
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name == columns:
                parameter[:, size:] = named[name]
            elif name in named:
                parameter.copy_(named[name])
        ours.hidden_norm.weight.copy_(layer["input_layernorm.weight"])
        if head.fc is not None:
            head.fc.weight.zero_()[:, -size:].fill_diagonal_(1.0)


def _flipped(flag: str, config: Eagle3Config) -> Convention:
    """A flag of the architecture the other way."""
    value = not getattr(config, flag)

    def change(head: Eagle3Head) -> None:
        changes: dict[str, Any] = {flag: value}
        head.config = replace(head.config, **changes)
        if flag == "norm_before_residual":
            head.midlayer.norm_before_residual = value

    said, depth = str(value).lower(), 2 if flag == "norm_output" else 1
    remedy = f"Set {flag} to {said} in the draft's config.json."
    return Convention("norm convention", f"{flag} {said}", remedy, change, depth)
