"""A whole small model that drafts: it reads no states of the target and speaks in its ids."""

from pathlib import Path

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.drafts.base.draft_model import StandaloneDraftModel
from eagle_kit.drafts.base.kind import DraftKind
from eagle_kit.drafts.files.draft_files import DraftFiles
from eagle_kit.drafts.files.findings import Finding, TargetFolder, check_context, check_values
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.loading.loader import load_target, read_target_config
from eagle_kit.models.loading.source import load_tokenizer
from eagle_kit.models.targets.target import Target
from eagle_kit.ops.linear import pack_weights

OTHER_FAMILY = "Use a smaller model of the target's own family."


class StandaloneKind(DraftKind):
    """Any model that is a target too."""

    name = "standalone"
    algorithms = ("STANDALONE",)
    is_whole_model = True

    def recognises(self, files: DraftFiles) -> bool:
        """See :class:`~eagle_kit.drafts.base.kind.DraftKind`: everything that is no head."""
        return True

    def validate(self, files: DraftFiles, target: TargetFolder) -> list[Finding]:
        """See :class:`~eagle_kit.drafts.base.kind.DraftKind`: vocabulary, tokenizer, context."""
        folder = Path(files.where)
        draft = read_target_config(folder)
        try:
            _check_layers(draft, target.config)
        except UserError as error:
            return [Finding("error", "layers", error.cause, error.remedy)]
        vocabulary = _check_vocabulary(folder, draft, target)
        if vocabulary.level == "error":
            return [vocabulary]
        return [
            vocabulary,
            _check_tokenizer(folder, target.folder),
            check_context(draft.max_position_embeddings, target.config),
            _check_weights(files),
        ]

    def draft_model(
        self, files: DraftFiles, target: Target, token_map: torch.Tensor | None = None
    ) -> StandaloneDraftModel:
        """See :class:`~eagle_kit.drafts.base.kind.DraftKind`. Tokenizers are not compared: ids that mean
        other tokens keep the output right and are hardly ever accepted."""
        weight = target.embed_tokens.weight
        config = read_target_config(Path(files.where))
        _check_layers(config, target.config)
        model = load_target(files.where, weight.dtype, weight.device)
        pack_weights(model)
        return StandaloneDraftModel(model, token_map, target.config.vocab_size)


STANDALONE = StandaloneKind()


def _check_weights(files: DraftFiles) -> Finding:
    try:
        check_values(files.tensors.items(), of_head=False)
    except UserError as error:
        return Finding("error", "weights", error.cause, error.remedy)
    return Finding("ok", "weights", "every tensor is finite.")


def _check_layers(draft: TargetConfig, target: TargetConfig) -> None:
    if draft.states is not None:
        raise UserError(
            "The draft model has recurrent layers, and a draft's steps are windows that grow.",
            "Use a draft head, or a model whose layers all attend.",
        )


def _check_vocabulary(folder: Path, draft: TargetConfig, target: TargetFolder) -> Finding:
    """Compare the numbers of tokens. Another number is the padding of one tokenizer where the ids that both
    have are the same tokens."""
    own = draft.vocab_size
    others = target.config.vocab_size
    if own == others:
        return Finding("ok", "vocabulary", f"{own}, as the target's.")
    cause = f"The draft model has a vocabulary of {own}, the target one of {others}"
    try:
        ids = [_ids_below(min(own, others), model) for model in (folder, target.folder)]
    except UserError:
        return Finding("error", "vocabulary", f"{cause}, and a tokenizer is missing.", OTHER_FAMILY)
    if ids[0] != ids[1]:
        return Finding("error", "vocabulary", f"{cause}, and their ids are other tokens.", OTHER_FAMILY)
    return Finding("ok", "vocabulary", f"{own}, the target's {others}; the ids of both are the same tokens.")


def _ids_below(count: int, folder: Path) -> dict[str, int]:
    """Tokens of a tokenizer with an id below ``count``."""
    return {token: number for token, number in load_tokenizer(folder).get_vocab().items() if number < count}


def _check_tokenizer(draft: Path, target: Path) -> Finding:
    count = min(read_target_config(draft).vocab_size, read_target_config(target).vocab_size)
    try:
        same = _ids_below(count, draft) == _ids_below(count, target)
    except UserError:
        return Finding("warning", "tokenizer", "a tokenizer is missing.", "Compare them by hand.")
    if same:
        return Finding("ok", "tokenizer", "its ids mean what the target's mean.")
    return Finding("warning", "tokenizer", "its ids mean other texts than the target's.", OTHER_FAMILY)
