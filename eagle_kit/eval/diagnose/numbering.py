"""Which numbering of layer ids fits a head whose config does not state it, measured on its target's
responses.

The input of layer i + 1 is the output of layer i, so the same ids name other states in the two conventions. A
head that reads the wrong ones loads and accepts little.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.drafts.eagle3.fused_states_kind import (
    CONVENTION_OFFSETS,
    FusedStatesKind,
    layer_ids_without_convention,
)
from eagle_kit.drafts.files.draft import DraftFolder
from eagle_kit.drafts.files.draft_files import DraftFiles
from eagle_kit.engine.llm import LLM
from eagle_kit.eval.diagnose.chain import InputVariant, Source, draft_chains
from eagle_kit.eval.diagnose.row import PromptResponse, compute_states, pack
from eagle_kit.models.draft_head import DraftHead
from eagle_kit.models.loading.loader import read_target_config, weight_files
from eagle_kit.models.loading.source import resolve_target
from eagle_kit.models.targets.target import Target
from eagle_kit.server.api.startup import short_prompts

NUM_TOKENS = 32
"""Tokens of each response that is drafted."""
LEAST_ERRORS = 3.0
"""Standard errors by which one convention must be better than the other."""


class Numbering(NamedTuple):
    """Fit of both conventions, "input" and "output".

    Attributes:
        layers: inputs of the target's layers that a head reads, by convention.
        shares: share of first drafts that are the target's token, by convention.
        best: the convention that fits; None where the figures do not decide it.
        num_drafts: number of drafts in each share.
    """

    layers: Mapping[str, tuple[int, ...]]
    shares: Mapping[str, float]
    best: str | None
    num_drafts: int

    @property
    def words(self) -> str:
        """The figures as a sentence."""
        parts = [
            f"{self.shares[name]:.2f} of the first drafts are accepted with the {name}s of the layers that "
            "its config names"
            for name in self.shares
        ]
        verdict = "which does not decide it" if self.best is None else f"so they are {self.best}s"
        return f"{', and '.join(parts)} ({self.num_drafts} drafts), {verdict}."


def measure_numbering(draft: DraftFolder, target: str | Path) -> Numbering | None:
    """Compare both conventions for the layer ids of a draft.

    Returns:
        None for a draft that states its convention or names no layers, and for a target without weights at
        hand.

    Raises:
        UserError: the draft or the target cannot be read.
    """
    # Whether there is anything to decide, by the files alone.
    files = draft.files
    kind = draft.kind
    folder = resolve_target(target)
    config = read_target_config(folder)
    if not isinstance(kind, FusedStatesKind):
        return None
    ids = layer_ids_without_convention(files, kind)
    layers = layers_by_convention(ids or [], config.num_layers)
    if len(layers) < 2 or not _has_weights(folder):
        return None

    # Responses of the target, and the head over them.
    llm = LLM(folder)
    prompts = short_prompts(llm)
    responses = llm.generate(prompts, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0))
    texts = [
        PromptResponse(prompt, response.token_ids)
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    head = _head(kind, files, llm.target)
    return compare_numberings(head, llm.target, texts, layers)


def layers_by_convention(ids: Sequence[int], num_layers: int) -> dict[str, tuple[int, ...]]:
    """Inputs of layers that ``ids`` name, by convention; without a convention in which the target
    has not all of them."""
    found = {}
    for convention, offset in CONVENTION_OFFSETS.items():
        layers = tuple(layer + offset for layer in ids)
        if layers and all(0 <= layer <= num_layers for layer in layers):
            found[convention] = layers
    return found


def compare_numberings(
    head: DraftHead, target: Target, texts: Sequence[PromptResponse], layers: Mapping[str, tuple[int, ...]]
) -> Numbering:
    """Draft once at every root of ``texts`` with the states of each convention.

    Args:
        texts: prompts and greedy responses.
        layers: inputs of layers by convention, of two.
    """
    row = pack(texts).to(target.embed_tokens.weight.device)
    needed = sorted({layer for ids in layers.values() for layer in ids})
    source = Source(target, row, compute_states(target, row, needed))
    results = {name: draft_chains(head, source, 1, InputVariant(layers=ids)) for name, ids in layers.items()}
    shares = {name: float((found.num_accepted > 0).float().mean()) for name, found in results.items()}

    # The difference of log-probabilities of the target's tokens, draft by draft.
    one, other = layers
    gain = (results[one].first.label_log_prob - results[other].first.label_log_prob).double()
    count = len(gain)
    best = None
    if count > 1 and float(gain.mean().abs()) > LEAST_ERRORS * float(gain.std()) / count**0.5:
        best = one if float(gain.mean()) > 0 else other
    return Numbering(layers, shares, best, count)


def _head(kind: FusedStatesKind, files: DraftFiles, target: Target) -> DraftHead:  # type: ignore[type-arg]
    weight = target.embed_tokens.weight
    head: DraftHead = kind.read(files, target, dtype=weight.dtype, device=weight.device)
    return head.eval().requires_grad_(False)


def _has_weights(folder: Path) -> bool:
    try:
        return all(path.is_file() for path in weight_files(folder))
    except UserError:
        return False
