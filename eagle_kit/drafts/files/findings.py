"""Checks of a draft against a target that do not depend on the draft's kind."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from eagle_kit.core.errors import TargetError, UserError
from eagle_kit.data.chat.template import set_chat_template, template_hash
from eagle_kit.drafts.files.draft_files import WEIGHTS_KEY
from eagle_kit.models.config import DecoderConfig, HeadArchitecture, TargetConfig
from eagle_kit.models.loading.loader import target_fingerprint
from eagle_kit.models.loading.source import converted_file, load_tokenizer

MATRIX_RMS, MATRIX_GAIN, NORM_RMS = 0.5, 0.01, (1e-3, 100.0)
"""Bounds on the root mean square (RMS) of a head's weights.

A linear layer of n inputs begins with 1 / sqrt(3 n), 0.024 for 576; trained ones have 0.04 to 0.17 in the
shipped head and at most 0.40 in SmolLM2-135M. Normal random numbers have 1, uniform ones 0.58, random bytes
1e37. Times sqrt(n) it is a layer's gain: 0.58 at first, 1.2 to 4.0 in the shipped head, and far below the
layer is all but zero. A norm begins with 1, or at most 0.1 of the target's; it has 0.7 to 1.0 in the
shipped head, and 0.04 to 1.8 in SmolLM2-135M.
"""
NORM = re.compile(r"norm(\.\d+)?\.weight$")
"""End of the name of a norm's weights: ``norm.weight``, and ``fc_norm.0.weight`` of EAGLE-3.1."""
TABLES = ("embed_tokens.weight", "markov_w1.weight")
TABLE_RMS = 100.0
"""Ends of names of embedding tables, and the bound on their RMS.

A table adds nothing up, so that its scale is its trainer's choice: torch's own is 1, which speculators leaves
to DSpark's table.
"""
TARGET_WEIGHTS = "target weights"
"""Subject of the finding that compares hashes of weights."""
OWN_TARGET = "Use the target that the draft was trained for, or train a draft for this one."


@dataclass(frozen=True)
class Finding:
    """One thing that was checked, in words for people; ``remedy`` is empty when all is well."""

    level: Literal["ok", "warning", "error"]
    subject: str
    cause: str
    remedy: str = ""


class TargetFolder(NamedTuple):
    """A target to check against: its folder, of which config and tokenizer are read, its sizes, and the file
    of a chat template in place of its own."""

    folder: Path
    config: TargetConfig
    chat_template: Path | None = None


def raise_on_errors(findings: Sequence[Finding]) -> None:
    """Raise UserError that names every error among ``findings``; TargetError where the target may be at
    fault."""
    errors = [finding for finding in findings if finding.level == "error"]
    if not errors:
        return
    if all(finding.subject in ("checkpoint", "weights") for finding in errors):
        raise UserError(errors[0].cause, errors[0].remedy)
    causes = "; ".join(f"{finding.subject}: {finding.cause.rstrip('.')}" for finding in errors)
    raise TargetError(f"The draft does not fit the target ({causes}).", errors[0].remedy)


def check_fit(draft: HeadArchitecture, target: TargetConfig) -> None:
    """Raise UserError for a head of other sizes than the target's, or that reads layers it does not have."""
    sizes = draft.target_hidden_size, draft.vocab_size
    if sizes != (target.hidden_size, target.vocab_size):
        raise UserError(
            f"The draft was made for hidden size {sizes[0]} and vocabulary {sizes[1]}, the target has "
            f"{target.hidden_size} and {target.vocab_size}.",
            OWN_TARGET,
        )
    if not all(0 <= layer <= target.num_layers for layer in draft.aux_layer_ids):
        raise UserError(
            f"The draft reads the inputs of layers {list(draft.aux_layer_ids)}, the target has "
            f"{target.num_layers} layers.",
            OWN_TARGET,
        )


def check_sizes(pairs: Mapping[str, tuple[int, int]]) -> list[Finding]:
    """Compare sizes, each the draft's and the target's."""
    return [
        Finding("ok", subject, f"{ours}, as the target's.")
        if ours == theirs
        else Finding("error", subject, f"the draft was made for {ours}, the target has {theirs}.", OWN_TARGET)
        for subject, (ours, theirs) in pairs.items()
    ]


def check_values(tensors: Iterable[tuple[str, torch.Tensor]], *, of_head: bool = True) -> None:
    """Raise UserError for a tensor that is not finite, or is a head's and of an impossible scale.

    Args:
        tensors: with their names, of a head dequantised; read one after another.
    """
    wrong = [f"{name} {what}" for name, tensor in tensors if (what := _wrong_value(name, tensor, of_head))]
    if wrong:
        more = f", and {len(wrong) - 1} more tensors are wrong" if len(wrong) > 1 else ""
        raise UserError(f"{wrong[0]}{more}.", "Use weights that were trained and saved whole.")


def _wrong_value(name: str, tensor: torch.Tensor, of_head: bool) -> str:
    """What is wrong with a tensor, as a predicate; empty when nothing is."""
    if not tensor.is_floating_point():
        return ""
    tensor = tensor.float() if tensor.itemsize == 1 else tensor  # fp8 has no norm
    rms = float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) / max(tensor.numel(), 1) ** 0.5
    if not math.isfinite(rms):
        places = tensor.isfinite().logical_not().nonzero()
        return f"has {len(places)} values that are not finite, the first at {places[0].tolist()}"
    gain = rms * tensor.shape[-1] ** 0.5
    is_matrix = tensor.ndim > 1 and tensor.numel() > tensor.shape[-1]  # a single row is a state
    most_rms = TABLE_RMS if name.endswith(TABLES) else MATRIX_RMS
    if of_head and is_matrix and not (rms <= most_rms and gain >= MATRIX_GAIN):
        least = MATRIX_GAIN / tensor.shape[-1] ** 0.5
        return f"has a root mean square of {rms:.3g}, and a head's lie between {least:.1g} and {most_rms:g}"
    least, most = NORM_RMS
    is_norm = NORM.search(name) is not None and not is_matrix
    if of_head and is_norm and not least <= rms <= most:
        return f"has a root mean square of {rms:.3g}, and norms' lie between {least:g} and {most:g}"
    return ""


def check_context(positions: int, target: TargetConfig) -> Finding:
    """Compare the positions that a draft knows, 0 when it does not say, with the target's."""
    theirs = target.max_position_embeddings
    if positions >= theirs:
        return Finding("ok", "context", f"{positions} positions, enough for the target's {theirs}.")
    said = f"says {positions} positions" if positions else "does not say how many positions it knows"
    return Finding(
        "warning",
        "context",
        f"the draft {said}, the target {theirs}.",
        "Expect fewer accepted tokens after them, and raise max_position_embeddings in the draft's "
        "config.json for vLLM, which sizes its RoPE cache by it.",
    )


def check_rope(draft: DecoderConfig, target: TargetConfig) -> Finding:
    """Compare rotations: a draft's RoPE is its own, since it was trained with it."""
    than = "as" if draft.rotation == target.rotation else "other than"
    return Finding("ok", "rope", f"base {draft.rope_theta:g}, {than} the target's.")


def check_template(draft: HeadArchitecture, target: TargetFolder) -> Finding:
    """Compare the chat template in use with the one that the draft was trained with."""
    subject = "chat template"
    try:
        tokenizer = load_tokenizer(target.folder)
        set_chat_template(tokenizer, target.chat_template)
    except UserError as error:
        return Finding("warning", subject, f"it cannot be compared: {error.cause}", error.remedy)
    found = template_hash(tokenizer)
    if found == draft.template_hash:
        cause = "the one the draft was trained with." if found else "neither target nor draft has one."
        return Finding("ok", subject, cause)
    if not draft.template_hash:
        return Finding(
            "warning",
            subject,
            "the draft does not say which one it was trained with.",
            "Look into its model card.",
        )
    difference = "not the one the draft was trained with"
    if not found:
        difference = "the target has none, but the draft was trained with one"
    return Finding(
        "warning",
        subject,
        f"{difference}, so fewer of its tokens may be accepted.",
        "Give the template of its training with --chat-template FILE, or train a draft on this one.",
    )


def check_target(draft: HeadArchitecture, metadata: Mapping[str, Any], target: TargetFolder) -> Finding:
    """Compare the target's weights with those of the draft's training, by their hash, where the draft has it,
    else by the target's name.

    Args:
        metadata: of the draft's ``eagle_kit.json``.
    """
    trained_for = metadata.get(WEIGHTS_KEY)
    if trained_for is None:
        return check_name(draft, target)
    if trained_for == target_fingerprint(target.folder):
        return Finding("ok", TARGET_WEIGHTS, f"{target_name(target.folder)} has the weights of the training.")
    return Finding(
        "warning",
        TARGET_WEIGHTS,
        f"{target_name(target.folder)} has other weights than {draft.target}, the target of the training.",
        "Use the very files that the draft was trained for.",
    )


def amount_of_training(metadata: Mapping[str, Any]) -> str:
    """How much a head was trained, as a sentence after another; empty where its ``eagle_kit.json`` does not
    say it."""
    seen = metadata.get("tokens_seen")
    return "" if seen is None else f" It has seen {seen:,} tokens in {metadata.get('step', 0):,} steps."


def check_name(draft: HeadArchitecture, target: TargetFolder) -> Finding:
    """Compare the target's name with the one in the draft. Names may differ for the same weights (a folder,
    a hub id), so this only warns."""
    here = target_name(target.folder)
    if not draft.target:
        return Finding(
            "warning", "target", "the draft does not name its target.", "Look into its model card."
        )
    if Path(draft.target).name.lower() == here.lower():
        return Finding("ok", "target", f"{draft.target}, by name.")
    return Finding(
        "warning",
        "target",
        f"the draft was trained for {draft.target}, and this one is called {here}.",
        "Make sure that they are the same weights.",
    )


def target_name(folder: Path) -> str:
    """The last part of a model's name, from its folder, its GGUF file or its place in a hub's cache."""
    file = converted_file(folder)
    if file is not None:
        return file.name
    for part in folder.resolve().parts[-3:]:
        if part.startswith("models--"):
            return part.rpartition("--")[2]
    return folder.resolve().name
