"""P-EAGLE heads for vLLM and speculators: EAGLE-3's layouts with a mask. Nobody else has them.

Both keep the mask's embedding as a row of an embedding of the head's own, so one is written: the target's,
with the mask's in the row of the mask's token (``ptd_token_id`` for vLLM, ``mask_token_id`` for speculators).
Both number layers as we do, by inputs.
"""

from dataclasses import replace

import torch

from eagle_kit.drafts.eagle3.format import FusedStatesFormat
from eagle_kit.drafts.eagle3.fused_states_kind import flatten_config, refuse_unused_layer_ids
from eagle_kit.drafts.files.config_json import OWN_EMBEDDING
from eagle_kit.drafts.files.draft_files import EMBEDDING, DraftFiles, without_keys
from eagle_kit.drafts.files.formats import Format, Served, refuse
from eagle_kit.models.config import TargetConfig

MASK_EMBEDDING = "mask_embedding"
"""The mask's embedding, by the name of our tensor."""


class PEagleFormat(FusedStatesFormat):
    """Between our layout of P-EAGLE heads and the others'."""

    def layout(self, files: DraftFiles) -> tuple[Format, str]:
        """See :class:`~eagle_kit.drafts.files.formats.DraftFormat`."""
        flat = flatten_config(files.config, files.where, self.kind.speculators_model_type)
        refuse_unused_layer_ids(flat, files.where)
        if "speculators_model_type" in files.config:
            return "speculators", f"speculators {files.config.get('speculators_version', '')}".rstrip()
        return "vllm", "vLLM (parallel drafting)"

    def write(self, files: DraftFiles, peer: Format, served: Served) -> DraftFiles:
        """See :class:`~eagle_kit.drafts.files.formats.DraftFormat`; the target's embedding must be at
        hand for a head without its own."""
        config = self.kind.read_config(files)
        if peer in ("sglang", "eagle"):
            refuse(peer, "it does not draft all steps in one pass", "Export it for vllm or speculators.")
        tensors = dict(files.tensors)
        mask = tensors.pop(MASK_EMBEDDING)
        embedding = tensors.get(EMBEDDING, served.embedding())
        if embedding is None or embedding.shape != (config.vocab_size, config.hidden_size):
            refuse(peer, "it brings the target's embedding, which is not at hand", "Give it with --target.")
        row = torch.tensor([config.mask_token_id])
        tensors[EMBEDDING] = embedding.to(mask.dtype).index_copy(0, row, mask[None])
        with_mask = DraftFiles(files.config, tensors, files.metadata, files.where)
        made = self.write_fused(config, with_mask, peer, served)
        if peer == "vllm":
            return made
        algorithm = self.kind.speculators_model_type
        raw = made.config | {
            "architectures": ["PEagleDraftModel"],
            "speculators_model_type": algorithm,
            "speculators_config": made.config["speculators_config"] | {"algorithm": algorithm},
            "mask_token_id": config.mask_token_id,
            "embed_requires_grad": True,
        }
        return DraftFiles(raw, made.tensors, made.metadata)

    def read(self, files: DraftFiles, peer: Format, target: TargetConfig | None) -> DraftFiles:
        """See :class:`~eagle_kit.drafts.files.formats.DraftFormat`."""
        ours = super().read(files, peer, target)
        # The embedding of a head that `write` made is the target's, unless it is the head's own.
        is_written = "format" in files.own and not files.own.get(OWN_EMBEDDING)
        tensors = {name: t for name, t in ours.tensors.items() if name != EMBEDDING or not is_written}
        return replace(ours, config=without_keys(ours.config, ("mask_token_id",)), tensors=tensors)
