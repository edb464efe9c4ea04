"""Does this draft fit this target? Every mismatch by name, before any weight of the target is read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eagle_kit.checkpoints.draft import CONFIG, read_draft_config, read_state
from eagle_kit.checkpoints.formats.recognise import recognise, refuse_other_heads
from eagle_kit.checkpoints.kind import algorithm_of
from eagle_kit.checkpoints.layout import CONVENTION, LAYER_IDS, flatten_config
from eagle_kit.checkpoints.mtp import read_mtp, read_mtp_config
from eagle_kit.core.errors import UserError
from eagle_kit.data.chat.template import template_hash
from eagle_kit.models.config import DraftConfig, TargetConfig
from eagle_kit.models.heads.eagle1 import Eagle1Config
from eagle_kit.models.heads.mtp import MTPConfig
from eagle_kit.models.loading.loader import read_json, read_target_config
from eagle_kit.models.loading.source import load_tokenizer, resolve_target

OWN_TARGET = "Use the target that the draft was trained for, or train a draft for this one."


@dataclass(frozen=True)
class Finding:
    """One thing that was checked, in words for people; ``remedy`` is empty when all is well."""

    level: Literal["ok", "warning", "error"]
    subject: str
    cause: str
    remedy: str = ""


def validate_draft(draft_folder: str | Path, target: str | Path) -> list[Finding]:
    """Check a draft of any kind against a target.

    EAGLE-3: sizes, vocabulary, layer ids, context, RoPE, template, name, weights. EAGLE: sizes, vocabulary,
    context, RoPE, weights. MTP modules: the same, template and name. A whole model: vocabulary, tokenizer,
    context.

    Args:
        draft_folder: a checkpoint; when it cannot be read, that is a finding too.
        target: anything that ``resolve_target`` knows; only its config and tokenizer are read.

    Raises:
        UserError: the target cannot be found or read.
    """
    folder = resolve_target(target)
    target_config = read_target_config(folder)
    try:
        algorithm = algorithm_of(draft_folder)
        refuse_other_heads(read_json(Path(draft_folder) / CONFIG), Path(draft_folder))
        match algorithm:
            case "EAGLE3":
                return _with_layout(_eagle3(Path(draft_folder), folder, target_config), draft_folder)
            case "EAGLE":
                from eagle_kit.checkpoints.eagle1 import validate_eagle1

                return _with_layout(validate_eagle1(draft_folder, folder), draft_folder)
            case "NEXTN":
                return _with_layout(_mtp(Path(draft_folder), folder, target_config), draft_folder)
            case "STANDALONE":
                return _standalone(Path(draft_folder), folder, target_config)
    except UserError as error:
        return [Finding("error", "checkpoint", error.cause, error.remedy)]


def _with_layout(findings: list[Finding], draft_folder: str | Path) -> list[Finding]:
    """Whose layout it is, in front of the other findings, unless the draft could not be read. Raises
    UserError, with the reason, for heads of a kind that we do not have."""
    if [finding.subject for finding in findings] == ["checkpoint"]:
        return findings
    return [Finding("ok", "layout", f"{recognise(draft_folder).maker}."), *findings]


def _eagle3(draft_folder: Path, folder: Path, target_config: TargetConfig) -> list[Finding]:
    raw = flatten_config(read_json(draft_folder / CONFIG), str(draft_folder))
    draft = read_draft_config(draft_folder, target_config)
    return [
        *_sizes(draft, target_config),
        _layers(draft, target_config, raw.get("eagle_config") or {}),
        _context(draft, target_config),
        _rope(draft, target_config),
        check_template(draft, folder),
        check_name(draft, folder),
        _weights(draft, draft_folder),
    ]


def _mtp(draft_folder: Path, folder: Path, target: TargetConfig) -> list[Finding]:
    """MTP modules; theirs are the target's sizes."""
    draft = read_mtp_config(draft_folder)
    sizes = {
        "hidden size": (draft.hidden_size, target.hidden_size),
        "vocabulary": (draft.vocab_size, target.vocab_size),
    }
    findings = [*_same(sizes), _context(draft.layer, target), _rope(draft.layer, target)]
    findings += [check_template(draft, folder), check_name(draft, folder)]
    try:
        read_mtp(draft_folder)
    except UserError as error:
        return [*findings, Finding("error", "weights", error.cause, error.remedy)]
    return [*findings, Finding("ok", "weights", "every tensor is there and has its shape.")]


def _standalone(draft_folder: Path, folder: Path, target: TargetConfig) -> list[Finding]:
    """A whole model that drafts has to speak in the target's ids."""
    draft = read_target_config(draft_folder)
    if draft.vocab_size != target.vocab_size:
        cause = f"the draft model has a vocabulary of {draft.vocab_size}, the target one of"
        cause = f"{cause} {target.vocab_size}."
        return [Finding("error", "vocabulary", cause, "Use a smaller model of the target's own family.")]
    findings = [Finding("ok", "vocabulary", f"{draft.vocab_size}, as the target's.")]
    try:
        same = load_tokenizer(draft_folder).get_vocab() == load_tokenizer(folder).get_vocab()
    except UserError:
        findings.append(Finding("warning", "tokenizer", "a tokenizer is missing.", "Compare them by hand."))
    else:
        cause = (
            "its ids mean what the target's mean." if same else "its ids mean other texts than the target's."
        )
        remedy = "" if same else "Use a smaller model of the target's own family."
        findings.append(Finding("ok" if same else "warning", "tokenizer", cause, remedy))
    ours, theirs = draft.max_position_embeddings, target.max_position_embeddings
    if ours >= theirs:
        findings.append(Finding("ok", "context", f"{ours} positions, enough for the target's {theirs}."))
    else:
        cause = f"the draft model has {ours} positions, the target {theirs}."
        remedy = "Expect fewer accepted tokens behind the draft model's last position."
        findings.append(Finding("warning", "context", cause, remedy))
    return findings


def raise_on_errors(findings: Sequence[Finding]) -> None:
    """Raises UserError that names every error among ``findings``."""
    errors = [finding for finding in findings if finding.level == "error"]
    if not errors:
        return
    if all(finding.subject in ("checkpoint", "weights") for finding in errors):
        raise UserError(errors[0].cause, errors[0].remedy)
    causes = "; ".join(f"{finding.subject}: {finding.cause.rstrip('.')}" for finding in errors)
    raise UserError(f"The draft does not fit the target ({causes}).", errors[0].remedy)


def _sizes(draft: DraftConfig, target: TargetConfig) -> list[Finding]:
    pairs = {
        "hidden size": (draft.target_hidden_size, target.hidden_size),
        "embedding size": (draft.hidden_size, target.hidden_size),
        "vocabulary": (draft.vocab_size, target.vocab_size),
    }
    return _same(pairs)


def _same(pairs: dict[str, tuple[int, int]]) -> list[Finding]:
    """Whether the draft's and the target's sizes are equal."""
    return [
        Finding("ok", subject, f"{ours}, as the target's.")
        if ours == theirs
        else Finding("error", subject, f"the draft was made for {ours}, the target has {theirs}.", OWN_TARGET)
        for subject, (ours, theirs) in pairs.items()
    ]


def _layers(draft: DraftConfig, target: TargetConfig, eagle: dict[str, Any]) -> Finding:
    """Ids in range, and not the usual ones in the other numbering, which fails silently."""
    ids, count, usual = list(draft.aux_layer_ids), target.num_layers, list(target.default_aux_layer_ids)
    if not all(0 <= layer <= count for layer in ids):
        cause = f"the draft reads the inputs of layers {ids}, the target has {count} layers."
        return Finding("error", "layer ids", cause, OWN_TARGET)
    if eagle.get(LAYER_IDS) is None:
        cause = (
            f"the draft does not say which layers it reads, so the usual inputs of layers {usual} are taken."
        )
        return Finding("warning", "layer ids", cause, f"Add eagle_config.{LAYER_IDS} to its config.json.")
    if CONVENTION not in eagle and ids != usual and [layer + 1 for layer in ids] == usual:
        cause = (
            f"the draft reads the inputs of layers {ids}, which look like the usual {usual} in the numbering "
            "'output of layer i' that SpecForge and ModelOpt write."
        )
        remedy = (
            f'If the accept length is about 1.0, add "{CONVENTION}": "output" to its eagle_config, or import '
            "it with --format sglang."
        )
        return Finding("warning", "layer ids", cause, remedy)
    return Finding("ok", "layer ids", f"inputs of layers {ids} of {count}.")


def _context(draft: DraftConfig | TargetConfig, target: TargetConfig) -> Finding:
    ours, theirs = draft.max_position_embeddings, target.max_position_embeddings
    if ours >= theirs:
        return Finding("ok", "context", f"{ours} positions, enough for the target's {theirs}.")
    return Finding(
        "warning",
        "context",
        f"the draft says {ours} positions, the target {theirs}.",
        "Raise max_position_embeddings in the draft's config.json, because vLLM sizes its RoPE cache by it.",
    )


def _rope(draft: DraftConfig | TargetConfig, target: TargetConfig) -> Finding:
    """A draft's RoPE is its own, since it was trained with it."""
    same = (draft.rope_theta, draft.rope_scaling) == (target.rope_theta, target.rope_scaling)
    return Finding("ok", "rope", f"base {draft.rope_theta:g}, {'as' if same else 'other than'} the target's.")


def check_template(draft: DraftConfig | MTPConfig | Eagle1Config, target_folder: Path) -> Finding:
    """Whether the target's chat template is the one that the draft was trained with."""
    subject = "chat template"
    if not draft.template_hash:
        return Finding(
            "warning",
            subject,
            "the draft does not say which one it was trained with.",
            "Look into its model card.",
        )
    try:
        found = template_hash(load_tokenizer(target_folder))
    except UserError as error:
        return Finding("warning", subject, f"it cannot be compared: {error.cause}", error.remedy)
    if found == draft.template_hash:
        return Finding("ok", subject, "the one the draft was trained with.")
    return Finding(
        "warning",
        subject,
        "not the one the draft was trained with, so fewer of its tokens may be accepted.",
        "Serve with the template of its training, or train a draft on this one.",
    )


def check_name(draft: DraftConfig | MTPConfig | Eagle1Config, target_folder: Path) -> Finding:
    """Whether the target has the name of the draft's. Names may differ for the same weights (a folder, a hub
    id), so this only warns."""
    here = target_name(target_folder)
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
    """The last part of a model's name, from its folder or from its place in a hub's cache."""
    for part in folder.resolve().parts[-3:]:
        if part.startswith("models--"):
            return part.rpartition("--")[2]
    return folder.resolve().name


def _weights(draft: DraftConfig, folder: str | Path) -> Finding:
    try:
        read_state(folder, draft)
    except UserError as error:
        return Finding("error", "weights", error.cause, error.remedy)
    return Finding("ok", "weights", "every tensor is there and has its shape.")
