"""From what a user calls a draft to a model that drafts."""

import copy
import warnings
from pathlib import Path

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.kernels.linear import pack_weights, packed_parts
from eagle_kit.models.heads.draft_head import DraftHead, TiedHead
from eagle_kit.models.heads.eagle1 import Eagle1Head
from eagle_kit.models.heads.eagle3 import Eagle3Head
from eagle_kit.models.heads.mtp import MTPHead
from eagle_kit.models.loading.loader import in_dtype
from eagle_kit.models.targets.llama import LlamaModel
from eagle_kit.speculation.propose.draft_model import (
    DraftModel,
    Eagle1DraftModel,
    Eagle3DraftModel,
    HeadDraftModel,
    MTPDraftModel,
    StandaloneDraftModel,
    TiedDraftModel,
    load_standalone,
)


def load_draft_model(
    draft: "str | Path | DraftHead | DraftModel",
    target: LlamaModel,
    *,
    target_name: str | Path | None = None,
    algorithm: str = "auto",
    token_map: str | Path | None = None,
) -> DraftModel:
    """Load a draft for ``target``, in its dtype and on its device.

    Args:
        draft: a checkpoint folder, a head (copied), or a draft model (used as it is). With ``"NEXTN"`` it may
            be the target's own folder.
        target_name: where the target came from; a folder is checked against it as ``validate`` does.
        algorithm: ``"auto"``, or what the draft is insisted to be.
        token_map: a file of the target ids that an EAGLE, NEXTN or STANDALONE draft may propose.

    Raises:
        UserError: it does not fit the target, or is not what ``algorithm`` says.
    """
    if isinstance(draft, DraftHead):
        return _head(_copy(draft), target)
    if not isinstance(draft, str | Path):
        return draft
    from eagle_kit.checkpoints.kind import algorithm_of

    kind = algorithm_of(draft)
    if algorithm == "NEXTN" and kind == "STANDALONE":
        return _nextn(draft, target, _token_map(token_map, target))
    if algorithm not in ("auto", kind) and {algorithm, kind} != {"EAGLE", "NEXTN"}:
        raise UserError(
            f"The draft {draft} is for the algorithm {kind}, and {algorithm} was asked for.",
            f"Ask for {kind}, or give another draft.",
        )
    if token_map is not None and kind == "EAGLE3":
        raise UserError(
            "A token map was given, but an EAGLE-3 head brings its own (d2t).", "Leave the map out."
        )
    hot = _token_map(token_map, target)
    if target_name is not None:
        from eagle_kit.checkpoints.validate import raise_on_errors, validate_draft

        findings = validate_draft(draft, target_name)
        raise_on_errors(findings)
        for finding in findings:
            if finding.level == "warning":
                warnings.warn(f"{finding.subject}: {finding.cause} {finding.remedy}", stacklevel=4)
    if kind == "STANDALONE":
        return _standalone(draft, target, hot)
    if kind == "EAGLE":
        return _eagle1(draft, target, hot)
    if kind == "NEXTN":
        return _nextn(draft, target, hot)
    from eagle_kit.checkpoints.draft import load_draft

    return _head(load_draft(draft, target=target), target)


def _token_map(file: str | Path | None, target: LlamaModel) -> torch.Tensor | None:
    if file is None:
        return None
    from eagle_kit.checkpoints.token_map import load_token_map

    return load_token_map(file, target.config.vocab_size)


def _nextn(folder: str | Path, target: LlamaModel, hot: torch.Tensor | None) -> TiedDraftModel:
    from eagle_kit.checkpoints.mtp import load_mtp

    weight = target.embed_tokens.weight
    return _tied(load_mtp(folder, weight.dtype, weight.device, target=target), target, hot)


def _eagle1(folder: str | Path, target: LlamaModel, hot: torch.Tensor | None) -> TiedDraftModel:
    from eagle_kit.checkpoints.eagle1 import load_eagle1

    return _tied(load_eagle1(folder, target), target, hot)


def _standalone(draft: str | Path, target: LlamaModel, hot: torch.Tensor | None) -> StandaloneDraftModel:
    weight = target.embed_tokens.weight
    model = load_standalone(draft, target, weight.dtype, weight.device)
    pack_weights(model)
    return StandaloneDraftModel(model, hot)


def _head(head: DraftHead, target: LlamaModel) -> HeadDraftModel:
    if isinstance(head, TiedHead):
        return _tied(head.bind(target.lm_head), target, None)
    assert isinstance(head, Eagle3Head)
    theirs, ours = head.config, target.config
    if (theirs.target_hidden_size, theirs.vocab_size) != (ours.hidden_size, ours.vocab_size):
        raise UserError(
            f"The draft was made for hidden size {theirs.target_hidden_size} and vocabulary "
            f"{theirs.vocab_size}, the target has {ours.hidden_size} and {ours.vocab_size}.",
            "Use the draft's own target, or train a draft for this one.",
        )
    if max(theirs.aux_layer_ids) > ours.num_layers:
        raise UserError(
            f"The draft reads the inputs of layers {list(theirs.aux_layer_ids)}, the target has "
            f"{ours.num_layers} layers.",
            "Use the draft's own target.",
        )
    weight = target.embed_tokens.weight
    head = head.to(device=weight.device, dtype=weight.dtype).eval().requires_grad_(False)
    pack_weights(head)
    return Eagle3DraftModel(head, target)


def _tied(head: TiedHead, target: LlamaModel, hot: torch.Tensor | None) -> TiedDraftModel:
    theirs, ours = head.config, target.config
    if (theirs.hidden_size, theirs.vocab_size) != (ours.hidden_size, ours.vocab_size):
        raise UserError(
            f"The draft was made for hidden size {theirs.hidden_size} and vocabulary {theirs.vocab_size}, "
            f"the target has {ours.hidden_size} and {ours.vocab_size}.",
            "Use the draft's own target, or train a draft for this one.",
        )
    weight = target.embed_tokens.weight
    head = in_dtype(head.to(device=weight.device), weight.dtype).eval().requires_grad_(False)
    pack_weights(head)
    if isinstance(head, Eagle1Head):
        return Eagle1DraftModel(head, target, hot)
    assert isinstance(head, MTPHead)
    return MTPDraftModel(head, target, hot)


def _copy(head: DraftHead) -> DraftHead:
    """A copy that shares nothing, without the packed weights of an earlier use and without a target's
    layer."""
    left_out = (*packed_parts(head), getattr(head, "bound", None))
    return copy.deepcopy(head, {id(part): None for part in left_out if part is not None})
