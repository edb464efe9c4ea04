"""The kind ``eagle3``: recognition, description, architecture and first weights of EAGLE-3 heads.

Reading, checking and writing of folders, which P-EAGLE heads share, is
:mod:`eagle_kit.drafts.eagle3.fused_states_kind`. The torch module is :mod:`eagle_kit.drafts.eagle3.head`.
"""

from dataclasses import replace
from typing import Any

import torch

from eagle_kit.config.drafts.fused_states import AnyEagle3HeadConfig, Eagle3HeadConfig
from eagle_kit.core.errors import UserError
from eagle_kit.drafts.base.conventions import Convention
from eagle_kit.drafts.base.kind import InitContext, describe_attention
from eagle_kit.drafts.eagle3.format import FusedStatesFormat
from eagle_kit.drafts.eagle3.fused_states_kind import (
    ARCHITECTURES,
    FLAGS,
    FusedStatesKind,
    config_overrides,
    describe_inputs,
    init_new_head,
)
from eagle_kit.drafts.eagle3.head import Eagle3Config, Eagle3Head
from eagle_kit.drafts.files.draft_files import DraftFiles
from eagle_kit.drafts.files.structure import fuses_states, joins_embedding
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.targets.target import Target

NORM_PLACEMENT_FLAGS = ("norm_output", "norm_before_residual")
"""Flags of :class:`Eagle3Config` that move a norm without adding a tensor. A checkpoint with the
wrong flag loads without an error, and its acceptance is low."""


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
            f"It reads {describe_inputs(config)}."
        )
        options = [flag for flag in (*FLAGS, "qk_norm", "own_embedding") if getattr(config, flag)]
        if options:
            text += f" Options: {', '.join(options)}."
        return text

    def conventions(self, head: Eagle3Head, target: TargetConfig) -> list[Convention]:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`. Each of :data:`NORM_PLACEMENT_FLAGS` is
        tried with its other value."""
        found = super().conventions(head, target)
        for flag in NORM_PLACEMENT_FLAGS:
            found.append(_flag_negated(flag, head.config))
        return found

    def new_config(self, settings: AnyEagle3HeadConfig, target: TargetConfig) -> Eagle3Config:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`."""
        if settings.start_from is not None:
            return self.start_from_config(settings, target)

        # The attention of the layer: head.kind is eagle3 or eagle3-mla.
        latent = not isinstance(settings, Eagle3HeadConfig)
        if latent and target.mla is None:
            raise UserError(
                "head.kind is eagle3-mla, but the target has no latent attention.", "Set head.kind=eagle3."
            )

        # Fields that the section ``head`` of the training config sets.
        overrides = config_overrides(settings, target)
        overrides["norm_output"] = settings.norm_output
        if isinstance(settings, Eagle3HeadConfig):
            overrides["qk_norm"] = settings.qk_norm
            overrides["sliding_window"] = settings.sliding_window
        size = settings.effective_draft_vocab_size
        return Eagle3Config.for_target(target, size, latent=latent, **overrides)

    def new_head(self, settings: AnyEagle3HeadConfig, config: Eagle3Config, start: InitContext) -> Eagle3Head:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`."""
        if settings.start_from is not None:
            return self.start_from_head(settings, config, start)
        head = init_new_head(Eagle3Head(config), settings, start)
        if settings.init == "last-layer":
            _copy_last_layer(head, start.target)
        return head


EAGLE3 = Eagle3Kind()


def _copy_last_layer(head: Eagle3Head, target: Target) -> None:
    """Start a new head as a copy of the target's last decoder layer (``head.init: last-layer``).

    The paper does not do so.

    ``fc`` returns the last captured state unchanged. The columns of ``qkv_proj`` that read the feature
    are the target's; the columns that read the embedding stay random. ``hidden_norm`` is the target's
    ``input_layernorm``, because it norms the feature.

    Raises:
        UserError: the target's last layer has other tensors or sizes than the head's layer, or the head has
            latent attention.
    """
    size = head.config.hidden_size
    layer = target.layer_state(-1)
    joint = "self_attn.qkv_proj.weight"  # [3 projections, 2 H]: embedding first, then feature
    norms_of_inputs = ("input_layernorm.weight", "hidden_norm.weight")

    refusal = UserError(
        "head.init is last-layer, but the target's last layer does not have the parts and sizes of the "
        "head's.",
        "Set head.init=random, and leave head.intermediate_size out.",
    )

    # Shapes that the target's tensors must have. Latent attention has no joint projection.
    expected = {name: tensor.shape for name, tensor in head.midlayer.state_dict().items()}
    if joint not in expected:
        raise refusal
    expected[joint] = torch.Size((expected[joint][0], size))
    names = [name for name in expected if name not in norms_of_inputs]
    copied = {}
    for name in names:
        if name in layer and layer[name].shape == expected[name]:
            copied[name] = layer[name]

    # Every tensor of the target's layer is used, and fc can return the last captured state.
    unused = layer.keys() - copied.keys()
    width = size if head.fc is None else head.fc.weight.shape[1]
    if copied.keys() != set(names) or unused != {"input_layernorm.weight"} or width % size:
        raise refusal

    with torch.no_grad():
        for name, parameter in head.midlayer.named_parameters():
            if name == joint:
                parameter[:, size:] = copied[name]
            elif name in copied:
                parameter.copy_(copied[name])
        head.midlayer.hidden_norm.weight.copy_(layer["input_layernorm.weight"])
        if head.fc is not None:
            head.fc.weight.zero_()
            head.fc.weight[:, -size:].fill_diagonal_(1.0)


def _flag_negated(flag: str, config: Eagle3Config) -> Convention:
    """The reading of a head's tensors with a flag of its architecture negated."""
    value = not getattr(config, flag)

    def change(head: Eagle3Head) -> None:
        changes: dict[str, Any] = {flag: value}
        head.config = replace(head.config, **changes)
        if flag == "norm_before_residual":
            head.midlayer.norm_before_residual = value

    # What is fed back is read at depth 2 for the first time.
    depth = 1
    if flag == "norm_output":
        depth = 2
    shown_value = str(value).lower()
    remedy = f"Set {flag} to {shown_value} in the draft's config.json."
    return Convention("norm convention", f"{flag} {shown_value}", remedy, change, depth)
