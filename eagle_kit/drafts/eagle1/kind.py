"""EAGLE-1/2 heads: ``fc``, one layer named ``layers.0``, no output layer.

Releases bring a copy of the target's embedding, some of its output layer too; both were frozen in training.
As in SGLang the target's own are used, and a copy that is not the target's is only reported: the head was
made for other weights then. The tensors tell which of ``fc`` and attention have biases, since many configs
do not say it.

Ours bring neither copy and are called ``LlamaForCausalLMEagle``, as SGLang wants it. SGLang's ``fc`` always
has a bias, vLLM's never; EAGLE's key for it, ``bias``, is written only where there is none, because SGLang
and vLLM take it for biases of attention.
"""

from typing import Any

import torch

from eagle_kit.config.drafts.eagle1 import Eagle1HeadConfig
from eagle_kit.core.errors import UserError
from eagle_kit.drafts.base.kind import HeadKind, HeadTensors, InitContext, describe_attention
from eagle_kit.drafts.eagle1.format import ARCHITECTURE, LAYER, Eagle1Format
from eagle_kit.drafts.eagle1.head import Eagle1Config, Eagle1Head
from eagle_kit.drafts.eagle3.head import Eagle3Config
from eagle_kit.drafts.files.config_json import LAYER_SIZES, OWN_EMBEDDING, layer_to_dict, read_layer
from eagle_kit.drafts.files.draft_files import OUTPUT, DraftFiles
from eagle_kit.drafts.files.structure import count_layers, joins_embedding
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.config_values import MAX_POSITIONS, read_flag, read_number, read_size
from eagle_kit.models.targets.target import Target

NAMES = (
    ARCHITECTURE,
    "MistralForCausalLMEagle",
    "Qwen2ForCausalLMEagle",
    "EagleLlamaForCausalLM",
    "EagleMistralForCausalLM",
)
"""SGLang's and vLLM's classes for such heads with Llama's layer."""
BIASES = {"bias": "fc.bias", "qkv_bias": f"{LAYER}self_attn.q_proj.bias"}
"""EAGLE's config keys, and the tensors that they promise."""


class Eagle1Kind(HeadKind[Eagle1Config, Eagle1Head, Eagle1HeadConfig]):
    """EAGLE-1 (arXiv 2401.15077), which EAGLE-2 (arXiv 2406.16858) serves unchanged."""

    name = "eagle1"
    title = "EAGLE-1 draft head"
    algorithms = ("EAGLE", "NEXTN")
    vllm_method = "eagle"
    config_class = Eagle1Config
    head_class = Eagle1Head
    trained_as = ("eagle1",)
    may_own_embedding = True
    format_class = Eagle1Format

    def recognises(self, files: DraftFiles) -> bool:
        """See :class:`~eagle_kit.drafts.base.kind.DraftKind`. A published head may also call itself a Llama,
        and is then known by its ``fc``, which joins state and embedding and which no whole model has."""
        return files.architecture in NAMES or joins_embedding(files)

    def read_config(self, files: DraftFiles, target: TargetConfig | None = None) -> Eagle1Config:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`; names of the tensors tell which biases there
        are."""
        raw = files.config
        where = files.where
        names = {name.removeprefix("model.") for name in files.tensors}
        for key, tensor in BIASES.items():
            if read_flag(raw, key, where) and tensor not in names:
                raise UserError(
                    f"The config.json in {where} says {key}, but {tensor} is missing in the weights.",
                    "Use config.json and weights of one checkpoint.",
                )
        layers = count_layers(files) or read_size(raw, "num_hidden_layers", where, 1)
        if layers != 1:
            raise UserError(
                f"The draft in {where} has {layers} decoder layers, and an {self.title} here has one.",
                "Use a head of one layer.",
            )
        return Eagle1Config(
            **read_layer(raw, where),
            own_embedding=read_flag(files.own, OWN_EMBEDDING, where),
            attention_bias=BIASES["qkv_bias"] in names,
            attention_out_bias=f"{LAYER}self_attn.o_proj.bias" in names,
            fc_bias=BIASES["bias"] in names,
            logit_scale=float(read_number(raw, "logit_scale", where, target.logit_scale if target else 1.0)),
            max_position_embeddings=read_size(
                raw, "max_position_embeddings", where, 0, least=0, most=MAX_POSITIONS
            ),
            **files.about,
        )

    def write_config(self, config: Eagle1Config) -> dict[str, Any]:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`."""
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "num_hidden_layers": 1,
            **layer_to_dict(config, config.rms_norm_eps),
            "attention_bias": config.attention_out_bias,
            **({} if config.fc_bias else {"bias": False}),
            **({"qkv_bias": True} if config.attention_bias else {}),
            **({"logit_scale": config.logit_scale} if config.logit_scale != 1.0 else {}),
        }

    def published_name(self, part: str) -> str:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`."""
        return part if part.startswith(("fc.", "embed_tokens.")) else LAYER + part

    def sort_tensors(self, files: DraftFiles, config: Eagle1Config, target: Target | None) -> HeadTensors:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`; vLLM lets the copy of the output layer have
        fewer rows."""
        found = super().sort_tensors(files, config, target)
        if OUTPUT in found.tensors:
            found.copies[OUTPUT] = found.tensors.pop(OUTPUT)
        return found

    def describe(self, config: Eagle1Config, dtype: str) -> str:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`."""
        fc = "a bias" if config.fc_bias else "no bias"
        return (
            f"One decoder layer of hidden size {config.hidden_size} ({describe_attention(config)}) in "
            f"{dtype}, whose `fc` has {fc}. It reads the target's last states, after their norm, and then "
            f"its own, and proposes any of {config.vocab_size} tokens through the target's output layer."
        )

    def joint_layers(self, head: Eagle1Head) -> list[str]:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`."""
        return ["fc"]

    def new_config(self, settings: Eagle1HeadConfig, target: TargetConfig) -> Eagle1Config:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`: the layer of an EAGLE-3 head over all tokens,
        after EAGLE-1's ``fc``."""
        like = Eagle3Config.for_target(target, target.vocab_size)
        sizes = {key: getattr(like, key) for key in (*LAYER_SIZES, "max_position_embeddings")}
        width = settings.intermediate_size or like.intermediate_size
        return Eagle1Config(
            **sizes | {"intermediate_size": width},
            fc_bias=settings.fc_bias,
            own_embedding=settings.own_embedding,
            logit_scale=target.logit_scale,
        )

    def new_head(self, settings: Eagle1HeadConfig, config: Eagle1Config, start: InitContext) -> Eagle1Head:
        """See :class:`~eagle_kit.drafts.base.kind.HeadKind`; an embedding of its own begins as the
        target's."""
        head = super().new_head(settings, config, start)
        if head.embed_tokens is not None:
            with torch.no_grad():
                head.embed_tokens.weight.copy_(start.target.embed_tokens.weight)
        return head


EAGLE1 = Eagle1Kind()
