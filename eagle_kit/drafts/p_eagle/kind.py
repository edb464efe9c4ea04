"""P-EAGLE heads: EAGLE-3's layout with more layers and a mask.

The mask's embedding is a parameter here, ``mask_embedding``. Other projects keep it as a row, that of
``mask_token_id`` (``ptd_token_id``, ``pard_token``), of an embedding in the head's files. Where the other
rows are not the target's, that embedding is the head's own.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from eagle_kit.config.drafts.fused_states import PEagleHeadConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.shape import SpecShape
from eagle_kit.drafts.base.kind import HeadTensors, InitContext, describe_attention
from eagle_kit.drafts.eagle3.fused_states_kind import (
    LAYERS,
    FusedStatesKind,
    config_overrides,
    describe_inputs,
    flatten_config,
    init_new_head,
    sliding_layers,
)
from eagle_kit.drafts.files.copies import other_rows
from eagle_kit.drafts.files.draft_files import EMBEDDING, DraftFiles, without_keys
from eagle_kit.drafts.files.structure import fuses_states
from eagle_kit.drafts.p_eagle.format import MASK_EMBEDDING, PEagleFormat
from eagle_kit.drafts.p_eagle.head import PEagleConfig, PEagleHead
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.config_values import wrong_value
from eagle_kit.models.targets.target import Target

MASK_KEYS = ("mask_token_id", "ptd_token_id", "pard_token")
"""Keys of configs for the token whose row is the mask's embedding; ours and speculators', vLLM's, and one
that vLLM reads too."""
MASK_HIDDEN = "mask_hidden"


class PEagleKind(FusedStatesKind[PEagleConfig, PEagleHead, PEagleHeadConfig]):
    """P-EAGLE (arXiv 2602.01469), with Llama or Qwen3 layers."""

    name = "p-eagle"
    title = "P-EAGLE draft head"
    algorithms = ("P-EAGLE",)
    vllm_method = "eagle3"
    vllm_options: ClassVar[Mapping[str, Any]] = {"parallel_drafting": True}
    config_class = PEagleConfig
    head_class = PEagleHead
    speculators_model_type = "peagle"
    has_many_layers = True
    trained_as = ("p-eagle",)
    format_class = PEagleFormat

    def recognises(self, files: DraftFiles) -> bool:
        """See :class:`~eagle_kit.drafts.base.kind.DraftKind`."""
        if files.config.get("speculators_model_type") == self.speculators_model_type:
            return True
        is_fused = fuses_states(files) or (not files.names and "Eagle" in files.architecture)
        keys = ("parallel_drafting", *MASK_KEYS)
        return is_fused and (any(files.config.get(key) for key in keys) or MASK_HIDDEN in files.names)

    def read_fields(self, files: DraftFiles, target: TargetConfig | None) -> dict[str, Any]:
        """See :class:`~eagle_kit.drafts.eagle3.fused_states_kind.FusedStatesKind`."""
        config = files.config
        where = files.where
        fields = super().read_fields(files, target)
        if fields["mla"] is not None:
            raise UserError(
                f"The P-EAGLE draft in {where} has latent attention.", "Use a head with Llama layers."
            )
        if not fields["aux_layer_ids"]:
            raise UserError(
                f"The P-EAGLE draft in {where} reads no captured states (use_aux_hidden_state is false).",
                "Use a head that reads them.",
            )
        named = {key: config[key] for key in MASK_KEYS if config.get(key) is not None}
        if not named:
            raise UserError(
                f"The P-EAGLE draft in {where} does not say which token is its mask.",
                f"Write ptd_token_id into its config.json (one of {', '.join(MASK_KEYS)}).",
            )
        key, number = next(iter(named.items()))
        if len(set(map(str, named.values()))) > 1:
            raise wrong_value(key, number, where, f"the same token as {', '.join([*named][1:])}")
        if type(number) is not int or not 0 <= number < fields["vocab_size"]:
            raise wrong_value(key, number, where, f"a token below {fields['vocab_size']}")
        flat = flatten_config(config, where, self.speculators_model_type)
        layers = self.num_layers(files, flat, target)
        own = {
            "norm_output": False,  # nothing is fed back
            "num_layers": layers,
            "mask_token_id": number,
            "sliding_layers": sliding_layers(flat, layers, where),
        }
        return fields | own

    def write_config(self, config: PEagleConfig) -> dict[str, Any]:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`."""
        raw = super().write_config(config)
        masks = {"parallel_drafting": True, "ptd_token_id": config.mask_token_id}
        return without_keys(raw, ("norm_output",)) | {LAYERS: config.num_layers, **masks}

    def sort_tensors(self, files: DraftFiles, config: PEagleConfig, target: Target | None) -> HeadTensors:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`; the mask's embedding may be a row of an
        embedding."""
        found = super().sort_tensors(files, config, target)
        tensors = found.tensors
        copies = dict(found.copies)
        if MASK_HIDDEN in tensors:  # its published shapes differ in leading ones
            tensors[MASK_HIDDEN] = tensors[MASK_HIDDEN].reshape(1, 1, -1)
        embedding = copies.get(EMBEDDING)
        row = config.mask_token_id
        if embedding is not None and row < len(embedding):
            tensors.setdefault(MASK_EMBEDDING, embedding[row].clone())
            weight = None if target is None else target.embed_tokens.weight
            if weight is not None and weight.shape == embedding.shape:  # the rest may be the target's
                _check_mask(files, row, embedding, weight)
                theirs = weight[row].to(embedding.device, embedding.dtype)
                copies[EMBEDDING] = embedding.index_copy(0, torch.tensor([row]), theirs[None])
        return found._replace(copies=copies)

    def describe(self, config: PEagleConfig, dtype: str) -> str:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`."""
        return (
            f"{config.num_layers} decoder layers of hidden size {config.hidden_size} "
            f"({describe_attention(config)}) and a draft vocabulary of {config.draft_vocab_size} of "
            f"{config.vocab_size} tokens, in {dtype}. It reads {describe_inputs(config)} and drafts all "
            f"steps in one pass, the later ones over masks (token {config.mask_token_id})."
        )

    def suggested_shape(self, config: PEagleConfig) -> SpecShape:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`: a chain."""
        return SpecShape(5, 1, 6)

    def new_config(self, settings: PEagleHeadConfig, target: TargetConfig) -> PEagleConfig:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`; the mask's token is the last one by default."""
        if settings.start_from is not None:
            return self.start_from_config(settings, target)
        mask = target.vocab_size - 1 if settings.mask_token_id is None else settings.mask_token_id
        if mask >= target.vocab_size:
            raise UserError(
                f"head.mask_token_id is {mask}, but the target has {target.vocab_size} tokens.",
                "Name a token of the target that its texts do not have.",
            )
        num_layers = 4 if settings.num_layers is None else settings.num_layers
        slides = settings.sliding_window is not None
        fields = config_overrides(settings, target) | {
            "mask_token_id": mask,
            "num_layers": num_layers,
            "qk_norm": settings.qk_norm,
            "sliding_window": settings.sliding_window,
            "sliding_layers": tuple(range(num_layers)) if slides else (),
        }
        return PEagleConfig.for_target(target, settings.effective_draft_vocab_size, **fields)

    def new_head(self, settings: PEagleHeadConfig, config: PEagleConfig, start: InitContext) -> PEagleHead:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`; the mask's embedding begins as the mean of
        all."""
        if settings.start_from is not None:
            return self.start_from_head(settings, config, start)
        head = init_new_head(PEagleHead(config), settings, start)
        with torch.no_grad():
            head.mask_embedding.copy_(start.target.embed_tokens.weight.float().mean(0))
        return head


def _check_mask(files: DraftFiles, row: int, embedding: torch.Tensor, own: torch.Tensor) -> None:
    """Raise UserError where one row alone of an ``embedding`` is not the target's ``own``, and the config
    names another ``row`` for the mask's."""
    others = other_rows(embedding, own).tolist() if embedding.shape == own.shape else []
    if len(others) == 1 and others != [row]:
        key = next(key for key in MASK_KEYS if files.config.get(key) is not None)
        raise UserError(
            f"The P-EAGLE draft in {files.where} says that token {row} is its mask, but its embedding of it "
            f"is the target's, and only that of token {others[0]} is another.",
            f"Set {key} to {others[0]} in its config.json.",
        )


P_EAGLE = PEagleKind()
