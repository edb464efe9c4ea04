"""The targets in ``configs/`` by the tensors that their repositories publish: all are taken, none is missing.

A fixture (``tests/models/loading/targets/*.json``) has names, shapes and dtypes, and no weights. Its sum is
the published one. Tensors are on the meta device, so that a model of 671 B needs no memory.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from peer_files import BYTES, DTYPES, Header, read_header

from eagle_kit.core.errors import UserError
from eagle_kit.models.bridge.config import BridgedConfig
from eagle_kit.models.bridge.load import load_ends
from eagle_kit.models.config import FAMILIES
from eagle_kit.models.loading.fp8_layout import read_fp8_layout
from eagle_kit.models.loading.known_targets import KNOWN_TARGETS
from eagle_kit.models.loading.loader import LAYER_NAME, assemble

FILES = Path(__file__).parent / "targets"
FIXTURES = {}
for _path in sorted(FILES.glob("*.json")):
    _fixture = json.loads(_path.read_text(encoding="utf-8"))
    FIXTURES[_fixture["target"]] = _fixture
CONFIGS = Path(__file__).parents[3] / "configs"
OURS = [name for name in FIXTURES if KNOWN_TARGETS[name].config["architectures"][0] in FAMILIES]
THEIRS = [name for name in FIXTURES if name not in OURS]
LARGE = ("deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V3", "Qwen/Qwen3-Next-80B-A3B-Instruct")
"""Of 75,000 to 92,000 tensors."""


def header_of(name: str) -> Header:
    return read_header(FIXTURES[name]["tensors"])


def tensors_of(header: Header) -> dict[str, torch.Tensor]:
    """Tensors without values, by name without ``model.``, as the loader reads them."""
    return {
        name.removeprefix("model."): torch.empty(shape, dtype=DTYPES[dtype], device="meta")
        for name, (dtype, shape) in header.items()
    }


def assembled(name: str, tensors: dict[str, torch.Tensor]):
    config = KNOWN_TARGETS[name].config
    layout = read_fp8_layout(config, name)
    return assemble(KNOWN_TARGETS[name].architecture, layout, tensors, name, torch.bfloat16, "meta")


def of_the_hub() -> set[str]:
    """Targets that the shipped configs name by their hub id."""
    found = set()
    for path in CONFIGS.glob("*.yaml"):
        for line in path.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key == "target" and value.strip() in KNOWN_TARGETS:
                found.add(value.strip())
    return found


def test_every_target_of_the_configs_has_its_tensors_here() -> None:
    targets = of_the_hub()
    assert len(targets) > 15
    assert targets <= FIXTURES.keys()


@pytest.mark.parametrize("name", FIXTURES)
def test_sums_are_those_that_the_repository_publishes(name: str) -> None:
    fixture = FIXTURES[name]
    num_parameters = 0
    num_bytes = 0
    for dtype, shape in header_of(name).values():
        num_parameters += math.prod(shape)
        num_bytes += BYTES[dtype] * math.prod(shape)
    assert fixture.get("num_parameters", num_parameters) == num_parameters
    assert fixture.get("num_bytes", num_bytes) == num_bytes


def marked(names: list[str]) -> list:
    return [pytest.param(name, marks=[pytest.mark.nightly] * (name in LARGE)) for name in names]


@pytest.mark.parametrize("name", marked(OURS))
def test_our_layers_take_every_published_tensor(name: str) -> None:
    model = assembled(name, tensors_of(header_of(name)))
    counted = {id(parameter): parameter.numel() for parameter in model.parameters()}
    assert sum(counted.values()) == KNOWN_TARGETS[name].num_parameters


@pytest.mark.parametrize("name", [name for name in OURS if name not in LARGE])
def test_a_tensor_that_is_missing_is_named(name: str) -> None:
    """The last one of the first layer, without whose check a target would have random weights."""
    tensors = tensors_of(header_of(name))
    last = max(key for key in tensors if key.removeprefix("language_model.").startswith("layers.0."))
    del tensors[last]
    with pytest.raises(UserError, match="missing"):
        assembled(name, tensors)


@pytest.mark.parametrize("name", THEIRS)
def test_embedding_norm_and_output_layer_are_found_without_layers(name: str) -> None:
    outside = {key: spec for key, spec in header_of(name).items() if not LAYER_NAME.search(key)}
    config = KNOWN_TARGETS[name].architecture
    assert isinstance(config, BridgedConfig)
    ends = load_ends(Path(name), config, tensors_of(outside), torch.bfloat16)
    assert ends.embed_tokens.weight.shape == (config.vocab_size, config.hidden_size)
    assert ends.lm_head.weight.shape == (config.vocab_size, config.hidden_size)
    is_tied = ends.lm_head.weight is ends.embed_tokens.weight
    assert is_tied == config.tie_word_embeddings
