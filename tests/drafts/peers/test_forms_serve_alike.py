"""One trained head in every published form: imported, each drafts the same tokens for the same text.

A form is a fixture of another project's head (``heads/*.json``). Its config is kept but for sizes, layer ids,
the mask and RoPE, which are those of a tiny head; its names of tensors are kept, and the tensors are the tiny
head's. A head is trained for every set of parts that a fixture has, such as norms of queries and keys.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conformance import Texts, make_requests, tokens_of
from crossed import crossed
from peer_files import PeerHead, peer_names, read_peer
from safetensors.torch import load_file, save_file
from tiny import randomise, tiny_dflash, tiny_dspark, tiny_head, tiny_p_eagle
from tiny_engine import resolved, serve
from tiny_mtp import save_target
from transformers import LlamaConfig, LlamaForCausalLM

from eagle_kit.config.drafts.eagle1 import Eagle1HeadConfig
from eagle_kit.core.shape import SpecShape
from eagle_kit.drafts.eagle1.head import Eagle1Head
from eagle_kit.drafts.eagle1.kind import EAGLE1
from eagle_kit.drafts.eagle3.head import Eagle3Head
from eagle_kit.drafts.files.draft import save_draft
from eagle_kit.drafts.files.draft_files import DraftFiles, open_draft
from eagle_kit.drafts.files.export import import_draft
from eagle_kit.drafts.mtp.kind import MTP
from eagle_kit.drafts.p_eagle.head import PEagleHead
from eagle_kit.engine.engine import Engine
from eagle_kit.engine.load_draft import load_draft_model
from eagle_kit.models.draft_head import DraftHead
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.targets.target import Target

WORDS = 23
DRAFT_WORDS = 17
LAYERS = 12
SIZE = 48
MASK = 22
INPUTS = (2, 6, 9)
"""The usual captured layers of a target of :data:`LAYERS` layers, by their inputs."""
FLAGS = ("norm_output", "norm_before_residual", "norm_before_fc", "fc_norm")
SHAPE = SpecShape(3, 2, 7)
LATENT = "modelopt-kimi-k2-eagle3-latent"
"""Its layer has latent attention, which the tiny target has not."""
MASK_IN_TEXT = "speculators-small-p-eagle-trained"
"""Its mask is a token of its own embedding, which texts of the tiny target have as well."""
FORMS = [
    name for name in peer_names() if read_peer(name).kind != "mtp" and name not in (LATENT, MASK_IN_TEXT)
]


class Models(NamedTuple):
    """A target, its folder, and prompts with its responses."""

    target: Target
    folder: Path
    prompts: list[list[int]]
    responses: list[list[int]]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Models:
    folder = tmp_path_factory.mktemp("forms") / "target"
    sizes = {"hidden_size": SIZE, "intermediate_size": 96, "num_hidden_layers": LAYERS, "vocab_size": WORDS}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
    config = LlamaConfig(**sizes, **heads, rms_norm_eps=1e-5, max_position_embeddings=512)
    randomise(LlamaForCausalLM(config), 0, 0.2).save_pretrained(folder)
    target = load_target(folder)
    prompts = [[(5 * i * i + 3 * i + number) % WORDS for i in range(7)] for number in range(4)]
    requests = make_requests("greedy", prompts)
    serve(Engine(target, None, resolved(4, 64, kv_tokens=400)), requests)
    return Models(target, folder, prompts, tokens_of(requests))


class Trained(NamedTuple):
    """A trained head, its folder in our layout, and what :func:`drafted` gives of it."""

    head: DraftHead
    folder: Path
    drafted: tuple[list[list[int]], list[list[int]]]


@pytest.fixture(scope="module")
def trained(models, tmp_path_factory):
    """Trained heads by kind and parts, each made when it is first needed."""

    @cache
    def make(kind: str, parts: tuple[tuple[str, Any], ...]) -> Trained:
        texts = Texts(models.target, [a + b for a, b in zip(models.prompts, models.responses, strict=True)])
        head = texts.teach_head(untrained(kind, models.target, dict(parts)))
        folder = tmp_path_factory.mktemp("heads") / "ours"
        save_draft(head, folder, metadata={})
        return Trained(head, folder, drafted(models, folder))

    return make


def untrained(kind: str, target: Target, parts: dict[str, Any]) -> DraftHead:
    """A random head with ``parts``."""
    if kind == "eagle1":
        bias = parts.pop("fc_bias")
        config = EAGLE1.new_config(Eagle1HeadConfig(fc_bias=bias), target.config)
        return randomise(Eagle1Head(config), 1, 0.1).bind(target.lm_head)
    if kind == "eagle3":
        return with_plain_map(tiny_head(target, parts.pop("draft_vocab_size"), std=0.1, **parts))
    if kind == "p-eagle":
        size = parts.pop("draft_vocab_size")
        return with_plain_map(tiny_p_eagle(target, size, std=0.1, mask_token_id=MASK, **parts))
    sizes = {"num_layers": 2, "block_size": 5, "aux_layer_ids": INPUTS, "mask_token_id": MASK}
    make = tiny_dflash if kind == "dflash" else tiny_dspark
    return make(target, std=0.1, **{**sizes, **parts})


def with_plain_map(head: Eagle3Head | PEagleHead) -> Eagle3Head | PEagleHead:
    """Number the tokens of a head that proposes all of them as its target does."""
    if head.config.draft_vocab_size == WORDS:
        head.set_vocab_map(torch.zeros(WORDS, dtype=torch.int64), torch.ones(WORDS, dtype=torch.bool))
    return head


def parts_of(peer: PeerHead) -> dict[str, Any]:
    """Parts that a fixture's head has, by its tensors and the flags of its config."""
    config = peer.config
    tables = [config, config.get("eagle_config") or {}, config.get("dflash_config") or {}]
    layer = config.get("transformer_layer_config") or config
    if peer.kind == "eagle1":
        return {"fc_bias": "fc.bias" in peer.header}
    if peer.kind in ("dflash", "dspark"):
        kinds = layer.get("layer_types") or []
        slides = tables[2].get("use_swa") or "sliding_attention" in kinds
        parts: dict[str, Any] = {}
        if slides:
            both = tables[2].get("causal") is False
            parts |= {"sliding_window": 20, "sliding_layers": (0, 1), "sliding_both": both}
        if "d2t" in peer.header:
            parts["draft_vocab_size"] = DRAFT_WORDS
        if not any("target_layer_ids" in table or "aux_hidden_state_layer_ids" in table for table in tables):
            parts["aux_layer_ids"] = (2, 10)  # what its authors read of twelve layers with a head of two
        if peer.kind == "dflash":
            parts["predicts_next"] = bool(config.get("sample_from_anchor"))
        return parts
    names = {name.removeprefix("model.") for name in peer.header}
    parts = {flag: any(bool(table.get(flag)) for table in tables) for flag in FLAGS}
    parts["draft_vocab_size"] = DRAFT_WORDS if "d2t" in names else WORDS
    if peer.kind == "p-eagle":
        parts["num_layers"] = 2 if any(name.startswith("layers.1.") for name in names) else 1
    parts["fc_norm"] |= bool({"fc_norm.0.weight", "aux_norm_low.weight"} & names)
    parts["norm_before_fc"] |= "input_norm.weight" in names
    parts["qk_norm"] = any(name.endswith("self_attn.q_norm.weight") for name in names)
    parts["attention_bias"] = any(name.endswith("self_attn.q_proj.bias") for name in names)
    if "sliding_attention" in (layer.get("layer_types") or []):
        parts["sliding_window"] = 20
    return parts


MODELOPT = {
    "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2",
    "confidence_proj": "confidence_head.proj",
}


def our_name(name: str, kind: str) -> str:
    """Our name of a tensor of a fixture."""
    name = name.removeprefix("model.")
    for theirs, ours in MODELOPT.items():
        if name.startswith(theirs):
            return name.replace(theirs, ours)
    older = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
    if name.partition(".")[0] in older:
        return f"fc_norm.{older.index(name.partition('.')[0])}.weight"
    if kind in ("eagle3", "p-eagle"):
        return name.replace("layers.0.", "midlayer.")
    return name


def tensors_in_form(peer: PeerHead, ours: dict[str, torch.Tensor], embedding: torch.Tensor):
    """Tensors of a head, under the names that a fixture has for them."""
    ours = {"embed_tokens.weight": embedding.clone(), **ours}
    mask = ours.get("mask_embedding")
    if mask is not None:
        ours["embed_tokens.weight"][MASK] = mask
        ours["mask_hidden"] = (torch.linalg.pinv(ours["fc.weight"].double()) @ mask.double()).float()[
            None, None
        ]
    found = {}
    for name in peer.header:
        number = name.partition("layers.")[2].partition(".")[0]
        if number.isdigit() and int(number) >= 2:  # the tiny head has fewer layers
            continue
        value = ours.get(our_name(name, peer.kind))
        if value is None:  # a bias behind attention, which is zeros there
            assert name.endswith("o_proj.bias"), name
            value = torch.zeros(SIZE)
        found[name] = value.clone()
    return found


def config_in_form(peer: PeerHead, ours: dict[str, Any], head: DraftHead) -> dict[str, Any]:
    """A fixture's config with the sizes of a tiny head, whose own config is ``ours``."""
    config = json.loads(json.dumps(peer.config))
    layer = config.get("transformer_layer_config") or config
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    sizes += ("vocab_size", "rms_norm_eps", "rope_theta")
    for key in sizes:
        layer[key] = ours[key]
    layer.pop("rope_scaling", None)
    if "rope_parameters" in layer:
        layer["rope_parameters"] = {"rope_type": "default", "rope_theta": ours["rope_theta"]}
    if config.get("target_hidden_size"):
        config["target_hidden_size"] = SIZE
    if config.get("draft_vocab_size"):
        config["draft_vocab_size"] = head.config.draft_vocab_size
    if peer.kind == "eagle1":
        return config
    is_block = peer.kind in ("dflash", "dspark")
    if is_block or peer.kind == "p-eagle":
        layer["num_hidden_layers"] = head.config.num_layers
    if isinstance(layer.get("layer_types"), list):
        layer["layer_types"] = layer["layer_types"][: layer["num_hidden_layers"]]
    if layer.get("sliding_window"):
        layer["sliding_window"] = 20

    # What stands in one of several tables.
    outputs = [layer_id - 1 for layer_id in INPUTS]
    named = outputs if peer.format == "sglang" else list(INPUTS)
    changes = {
        "mask_token_id": MASK,
        "ptd_token_id": MASK,
        "target_layer_ids": outputs,
        "aux_hidden_state_layer_ids": list(INPUTS),
        "eagle_aux_hidden_state_layer_ids": named,
        "block_size": 5,
        "markov_rank": 5,
        "swa_window_size": 20,
    }
    for table in (config, config.get("eagle_config"), config.get("dflash_config")):
        for key in (table or {}).keys() & changes:
            if table[key]:
                table[key] = changes[key]
    return config


def one_file(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors")


def pickled(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    torch.save(tensors, folder / "pytorch_model.bin")


def shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    halves = _halves(tensors, "model-0000{}-of-00002.safetensors")
    for file, part in halves.items():
        save_file(part, folder / file)
    _write_index(folder / "model.safetensors.index.json", halves)


def pickled_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    halves = _halves(tensors, "pytorch_model-0000{}-of-00002.bin")
    for file, part in halves.items():
        torch.save(part, folder / file)
    _write_index(folder / "pytorch_model.bin.index.json", halves)


def _halves(tensors: dict[str, torch.Tensor], pattern: str) -> dict[str, dict[str, torch.Tensor]]:
    names = list(tensors)
    return {pattern.format(i + 1): {name: tensors[name] for name in names[i::2]} for i in range(2)}


def _write_index(path: Path, halves: dict[str, dict[str, torch.Tensor]]) -> None:
    table = {name: file for file, part in halves.items() for name in part}
    path.write_text(json.dumps({"metadata": {}, "weight_map": table}))


def as_it_is(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """The form as its project writes it."""


def no_architectures(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config.pop("architectures", None)


def named_as_a_llama(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["architectures"] = ["LlamaForCausalLM"]


def layers_of_the_target(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    layer = config.get("transformer_layer_config") or config
    layer["num_hidden_layers"] = LAYERS
    if isinstance(layer.get("layer_types"), list):
        layer["layer_types"] = layer["layer_types"][:1] * LAYERS


def prefixed(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """``model.`` in front of what NeMo has it in front of."""
    for name in [name for name in tensors if name not in ("lm_head.weight", "d2t", "t2d", "mask_hidden")]:
        if not name.startswith("model."):
            tensors[f"model.{name}"] = tensors.pop(name)


def drafted(models: Models, folder: Path, algorithm: str = "auto") -> tuple[list[list[int]], list[list[int]]]:
    """Responses with the draft of a folder, and how often each depth of it was accepted."""
    draft = load_draft_model(folder, models.target, algorithm=algorithm)
    engine = Engine(models.target, draft, resolved(4, 64, kv_tokens=400))
    engine.use_shape(SHAPE)
    requests = make_requests("greedy", models.prompts)
    serve(engine, requests)
    return tokens_of(requests), [request.stats.spec.num_accepted_at for request in requests]


@crossed(
    ("name", FORMS),
    ("write", [one_file, pickled, shards, pickled_shards]),
    ("change", [as_it_is, no_architectures, named_as_a_llama, layers_of_the_target, prefixed]),
)
def test_a_trained_head_drafts_alike_in_every_form(models, trained, tmp_path, name, write, change):
    peer = read_peer(name)
    ours = trained(peer.kind, tuple(parts_of(peer).items()))
    responses, accepted = ours.drafted
    assert responses == models.responses and sum(map(sum, accepted)) > 0

    # In the form of the fixture.
    files = open_draft(ours.folder)
    config = config_in_form(peer, files.config, ours.head)
    tensors = tensors_in_form(peer, dict(files.tensors), models.target.embed_tokens.weight.detach())
    change(config, tensors)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "config.json").write_text(json.dumps(config))
    write(theirs, tensors)

    # Imported and served.
    import_draft(theirs, tmp_path / "imported", target=models.folder, format=peer.format)
    assert drafted(models, tmp_path / "imported") == ours.drafted


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """A DeepSeek target, and its trained MTP module in a folder of ours and in the target's own."""
    folder = tmp_path_factory.mktemp("modules") / "target"
    save_target(folder, copies=False, vocab_size=WORDS)
    target = load_target(folder)
    prompts = [[(5 * i * i + 3 * i + number) % WORDS for i in range(7)] for number in range(4)]
    requests = make_requests("greedy", prompts)
    serve(Engine(target, None, resolved(4, 64, kv_tokens=400)), requests)
    models = Models(target, folder, prompts, tokens_of(requests))

    texts = Texts(target, [a + b for a, b in zip(prompts, models.responses, strict=True)])
    head = texts.teach_head(MTP.read(open_draft(folder), target))
    ours = folder.parent / "ours"
    save_draft(head, ours, metadata={})
    return models, Trained(head, ours, drafted(models, ours))


def nextn(files: DraftFiles, models: Models) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """As SGLang's converter of DeepSeek's release writes them, without scales."""
    config = json.loads((models.folder / "config.json").read_text())
    config |= {"architectures": ["DeepseekV3ForCausalLMNextN"], "num_hidden_layers": 1}
    return config, dict(files.tensors)


def with_copies(files: DraftFiles, models: Models) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The same with the target's embedding and output layer, as in DeepSeek's release."""
    config, tensors = nextn(files, models)
    target = models.target
    tensors["model.layers.0.embed_tokens.weight"] = target.embed_tokens.weight.detach().clone()
    tensors["model.layers.0.shared_head.head.weight"] = target.head_weight.detach().clone()
    return config, tensors


def of_the_release(files: DraftFiles, models: Models) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Behind the last layer of the target, in its folder."""
    config = json.loads((models.folder / "config.json").read_text())
    number = config["num_hidden_layers"]
    tensors = load_file(models.folder / "model.safetensors")
    mine = {name.replace("layers.0.", f"layers.{number}."): each for name, each in files.tensors.items()}
    return config, tensors | mine


@crossed(
    ("form", [nextn, with_copies, of_the_release]),
    ("write", [one_file, shards]),
)
def test_a_trained_module_drafts_alike_in_every_form(modules, tmp_path, form, write):
    models, ours = modules
    responses, accepted = ours.drafted
    assert responses == models.responses and sum(map(sum, accepted)) > 0
    config, tensors = form(open_draft(ours.folder), models)
    (tmp_path / "config.json").write_text(json.dumps(config))
    write(tmp_path, tensors)
    algorithm = "NEXTN" if form is of_the_release else "auto"
    assert drafted(models, tmp_path, algorithm) == ours.drafted
    if form is not of_the_release:
        import_draft(tmp_path, tmp_path / "imported", target=models.folder)
        assert drafted(models, tmp_path / "imported") == ours.drafted
