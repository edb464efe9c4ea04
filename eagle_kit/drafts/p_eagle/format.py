"""P-EAGLE heads for vLLM and speculators: EAGLE-3's layouts with a mask. Nobody else has them.

Both keep the mask's embedding as a row of an embedding of the head's own, so one is written: the target's,
with the mask's in the row of the mask's token (``ptd_token_id`` for vLLM, ``mask_token_id`` for speculators).
Both number layers as we do, by inputs.
"""

from dataclasses import replace

import torch

from eagle_kit.drafts.base.kind import EMBEDDING
from eagle_kit.drafts.eagle3.format import read_fused, write_fused
from eagle_kit.drafts.eagle3.fused_states import flatten_config, refuse_other_parts
from eagle_kit.drafts.files.config_json import OWN_EMBEDDING
from eagle_kit.drafts.files.draft_files import DraftFiles, without_keys
from eagle_kit.drafts.files.formats import Format, Served, refuse
from eagle_kit.drafts.p_eagle.kind import MASK_EMBEDDING, P_EAGLE
from eagle_kit.models.config import TargetConfig


def layout(files: DraftFiles) -> tuple[Format, str]:
    """The format of a head from elsewhere, and whose layout it is, for people. Raises UserError for a part
    that our head has not."""
    flat = flatten_config(files.config, files.where, P_EAGLE.speculators_model_type)
    refuse_other_parts(flat, files.where)
    if "speculators_model_type" in files.config:
        return "speculators", f"speculators {files.config.get('speculators_version', '')}".rstrip()
    return "vllm", "vLLM (parallel drafting)"


def write(files: DraftFiles, peer: Format, served: Served) -> DraftFiles:
    """Our layout -> that of ``peer``. Raises UserError where it has no place for the head, or the target's
    embedding is not at hand."""
    config = P_EAGLE.read_config(files)
    if peer in ("sglang", "eagle"):
        refuse(peer, "it does not draft all steps in one pass", "Export it for vllm or speculators.")
    tensors = dict(files.tensors)
    mask = tensors.pop(MASK_EMBEDDING)
    embedding = tensors.get(EMBEDDING, served.embedding())
    if embedding is None or embedding.shape != (config.vocab_size, config.hidden_size):
        refuse(peer, "it brings the target's embedding, which is not at hand", "Give it with --target.")
    row = torch.tensor([config.mask_token_id])
    tensors[EMBEDDING] = embedding.to(mask.dtype).index_copy(0, row, mask[None])
    made = write_fused(config, DraftFiles(files.config, tensors, files.metadata, files.where), peer, served)
    if peer == "vllm":
        return made
    algorithm = P_EAGLE.speculators_model_type
    raw = made.config | {
        "architectures": ["PEagleDraftModel"],
        "speculators_model_type": algorithm,
        "speculators_config": made.config["speculators_config"] | {"algorithm": algorithm},
        "mask_token_id": config.mask_token_id,
        "embed_requires_grad": True,
    }
    return DraftFiles(raw, made.tensors, made.metadata)


def read(files: DraftFiles, peer: Format, target: TargetConfig | None) -> DraftFiles:
    """The layout of ``peer`` -> ours, every tensor accounted for; errors as of EAGLE-3's."""
    ours = read_fused(P_EAGLE, files, peer, target)
    # The embedding of a head that `write` made is the target's, unless it is the head's own.
    is_written = "format" in files.own and not files.own.get(OWN_EMBEDDING)
    tensors = {name: t for name, t in ours.tensors.items() if name != EMBEDDING or not is_written}
    return replace(ours, config=without_keys(ours.config, ("mask_token_id",)), tensors=tensors)
