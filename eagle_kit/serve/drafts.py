"""From what a user calls a draft to a model that drafts."""

import copy
import warnings
from pathlib import Path

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.kernels.linear import Linear, pack_linears
from eagle_kit.models.eagle3 import Eagle3Head
from eagle_kit.models.llama import LlamaModel
from eagle_kit.speculation.draft_model import (
    DraftModel,
    Eagle1Draft,
    Eagle3Draft,
    StandaloneDraft,
    load_standalone,
)


def load_draft_model(
    draft: "str | Path | Eagle3Head | DraftModel",
    target: LlamaModel,
    *,
    target_name: str | Path | None = None,
    algorithm: str = "auto",
    token_map: str | Path | None = None,
) -> DraftModel:
    """Load a draft for ``target``, in its dtype and on its device.

    Args:
        draft: a checkpoint folder, a head (copied), or a draft model (used as it is).
        target_name: where the target came from; a folder is checked against it as ``validate`` does.
        algorithm: ``"auto"``, or what the draft is insisted to be.
        token_map: a file of the target ids that an EAGLE or STANDALONE draft may propose.

    Raises:
        UserError: it does not fit the target, or is not what ``algorithm`` says.
    """
    if isinstance(draft, Eagle3Head):
        return _eagle3(_copy(draft), target)
    if not isinstance(draft, str | Path):
        return draft
    from eagle_kit.checkpoints.kind import algorithm_of

    kind = algorithm_of(draft)
    if algorithm not in ("auto", kind):
        raise UserError(
            f"The draft {draft} is for the algorithm {kind}, and {algorithm} was asked for.",
            f"Ask for {kind}, or give another draft.",
        )
    hot = None
    if token_map is not None:
        if kind == "EAGLE3":
            raise UserError(
                "A token map was given, but an EAGLE-3 head brings its own (d2t).", "Leave the map out."
            )
        from eagle_kit.checkpoints.token_map import load_token_map

        hot = load_token_map(token_map, target.config.vocab_size)
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
    from eagle_kit.checkpoints.draft import load_draft

    return _eagle3(load_draft(draft, target=target), target)


def _eagle1(draft: str | Path, target: LlamaModel, hot: torch.Tensor | None) -> Eagle1Draft:
    from eagle_kit.checkpoints.eagle1 import load_eagle1

    weight = target.embed_tokens.weight
    head = load_eagle1(draft, target).to(device=weight.device, dtype=weight.dtype)
    pack_linears(head.eval().requires_grad_(False))
    return Eagle1Draft(head, target, hot)


def _standalone(draft: str | Path, target: LlamaModel, hot: torch.Tensor | None) -> StandaloneDraft:
    weight = target.embed_tokens.weight
    model = load_standalone(draft, target, weight.dtype, weight.device)
    pack_linears(model)
    return StandaloneDraft(model, hot)


def _eagle3(head: Eagle3Head, target: LlamaModel) -> Eagle3Draft:
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
    pack_linears(head)
    return Eagle3Draft(head, target)


def _copy(head: Eagle3Head) -> Eagle3Head:
    """A copy that shares nothing, without the packed weights of an earlier use."""
    packed = (module._packed for module in head.modules() if isinstance(module, Linear))
    return copy.deepcopy(head, {id(tensor): None for tensor in packed if tensor is not None})
