"""Heads that draft blocks, for SGLang, vLLM and speculators: what DFlash and DSpark share.

SGLang and vLLM serve the layouts of their authors, which are ours: layers by their outputs, which both of
them turn into inputs. Speculators keeps the decoder layer's config in a table of its own and names layers by
their inputs. The proposal of a DFlash block of B is B tokens for SGLang, which counts the sampled one, and
B - 1 for the others.
"""

from typing import Any, ClassVar

from eagle_kit.drafts.dflash.block_kind import NESTED_IDS, ROWS, SLIDING_BOTH, TABLE, BlockKind
from eagle_kit.drafts.files.config_json import layer_to_dict
from eagle_kit.drafts.files.draft_files import EMBEDDING, OUTPUT, OWN, DraftFiles, without_keys
from eagle_kit.drafts.files.formats import (
    CHECKED_VERSIONS,
    DraftFormat,
    Format,
    Served,
    refuse,
    with_dtype,
)
from eagle_kit.models.config import TargetConfig

LAYER = ("model_type", "num_hidden_layers", "attention_bias", "layer_types")
WINDOW = ("sliding_window", "use_sliding_window")
FACTS = ("dtype", "torch_dtype")


class BlockFormat(DraftFormat):
    """Between our layout of heads that draft blocks and the others'.

    Attributes:
        authors: whose layout ours is, for people.
    """

    kind: BlockKind[Any, Any, Any]
    authors: ClassVar[str] = "DFlash's authors"

    def layout(self, files: DraftFiles) -> tuple[Format, str]:
        """See :class:`~eagle_kit.drafts.files.formats.DraftFormat`."""
        if "speculators_model_type" in files.config:
            return "speculators", f"speculators {files.config.get('speculators_version', '')}".rstrip()
        return "sglang", f"{self.authors}, as SGLang and vLLM serve it"

    def check_served(self, config: Any, peer: Format) -> None:
        """Raise UserError for a head that ``peer``, which serves the authors' layout, has no place for."""
        if config.predicts_next:
            refuse(peer, f"its DFlash classes know no rows that predict the next token ({ROWS})")
        if config.owns_output and peer == "sglang":
            refuse(peer, "it serves DFlash heads with the target's output layer only", "Export it for vllm.")

    def write(self, files: DraftFiles, peer: Format, served: Served) -> DraftFiles:
        """See :class:`~eagle_kit.drafts.files.formats.DraftFormat`."""
        config = self.kind.read_config(files)
        raw = files.config
        name = self.kind.name
        if peer == "eagle":
            refuse(peer, f"it has no class for {name} heads", "Export it for sglang, vllm or speculators.")
        own = {**raw[OWN], "format": peer}
        if peer != "speculators":
            self.check_served(config, peer)
            return DraftFiles({**raw, OWN: own}, files.tensors, files.metadata)
        if config.target_hidden_size != config.hidden_size:
            refuse(peer, "its fc reads states of the head's own width only")
        layer = [*layer_to_dict(config, config.rms_norm_eps), *LAYER, *WINDOW]
        known = {*layer, *FACTS, "architectures", "target_hidden_size", "draft_vocab_size", "block_size"}
        known |= {ROWS, SLIDING_BOTH, TABLE, OWN, *self.kind.own_keys(config)}
        if extra := without_keys(raw, known):
            own |= {"extra": extra}
        proposal = {"proposal_type": "greedy", "speculative_tokens": config.most_steps}
        proposal |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
        made = {
            "architectures": [self.kind.speculator],
            "speculators_model_type": name,
            "speculators_version": CHECKED_VERSIONS["speculators"],
            "speculators_config": {
                "algorithm": name,
                "proposal_methods": [proposal],
                "default_proposal_method": "greedy",
                "verifier": {
                    "name_or_path": served.name or config.target,
                    "architectures": list(served.architectures),
                },
            },
            "transformer_layer_config": {key: raw[key] for key in layer if key in raw and key != OWN},
            "draft_vocab_size": config.draft_vocab_size,
            "block_size": config.block_size,
            NESTED_IDS: list(config.aux_layer_ids),
            "mask_token_id": config.mask_token_id,
            ROWS: config.predicts_next,
            **self.kind.part_keys(config),
            # To vLLM that of every layer.
            **({SLIDING_BOTH: config.sliding_both} if config.sliding_layers else {}),
            "tie_word_embeddings": False,
            **{key: raw[key] for key in FACTS if key in raw},
            OWN: own,
        }
        return DraftFiles(made, files.tensors, files.metadata)

    def read(self, files: DraftFiles, peer: Format, target: TargetConfig | None) -> DraftFiles:
        """See :class:`~eagle_kit.drafts.files.formats.DraftFormat`."""
        config = self.kind.read_config(files, target)
        found = self.kind.weights(files, config)
        own = files.own
        is_ours = own.pop("format", None) is not None
        ours: dict[str, Any] = self.kind.write_config(config)
        if is_ours and peer != "speculators":  # keys that we do not know were ours already
            ours = without_keys(files.config, ours) | ours
        elif is_ours:
            ours = (
                own.pop("extra", {}) | {key: files.config[key] for key in FACTS if key in files.config} | ours
            )
        if is_ours:
            ours[OWN] = {**own, **ours[OWN]}
        copies = {name: tensor for name, tensor in found.copies.items() if name in (EMBEDDING, OUTPUT)}
        tensors = found.tensors | copies | (found.buffers if config.owns_output else {})
        return DraftFiles(with_dtype(ours, tensors["fc.weight"]), tensors, files.metadata, files.where)
