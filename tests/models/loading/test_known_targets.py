"""The table of public targets gives models of the published sizes."""

import json

import pytest
import torch

from eagle_kit.core.errors import UserError
from eagle_kit.models.bridge.config import BridgedConfig, decoder_of, new_model, transformers_config
from eagle_kit.models.count import layer_weights
from eagle_kit.models.loading.fp8_layout import FP8Layout
from eagle_kit.models.loading.known_targets import (
    KNOWN_TARGETS,
    known_target,
    target_architecture,
    target_fp8_layout,
)
from eagle_kit.models.targets.llama import LlamaModel
from eagle_kit.train.plan.sizes import num_weights

ACTIVE = {  # as the model cards round them, in billions
    "Qwen/Qwen3-30B-A3B": (3.3, 0.06),
    "deepseek-ai/DeepSeek-V2-Lite-Chat": (2.4, 0.3),
    "deepseek-ai/DeepSeek-V3": (37, 1),
    "openai/gpt-oss-20b": (3.6, 0.6),
    "openai/gpt-oss-120b": (5.1, 0.7),
    "zai-org/GLM-4.5-Air": (12, 1.5),
    "MiniMaxAI/MiniMax-M2": (10, 1.1),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": (17, 0.3),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": (12.9, 0.05),
}


def one_of_an_architecture():
    """Names of known targets; those of an architecture that another before them has are nightly."""
    names, seen = [], set()
    for name, known in KNOWN_TARGETS.items():
        kind = known.config["architectures"][0]
        names.append(pytest.param(name, marks=[pytest.mark.nightly] * (kind in seen)))
        seen.add(kind)
    return names


@pytest.mark.parametrize("name", one_of_an_architecture())
def test_modules_have_the_published_number_of_parameters(name: str) -> None:
    known = KNOWN_TARGETS[name]
    architecture = known.architecture
    if isinstance(architecture, BridgedConfig):
        model = new_model(transformers_config(known.config, name), name)
        parts = {*decoder_of(model).parameters(), *model.get_output_embeddings().parameters()}
        assert sum(parameter.numel() for parameter in parts) == known.num_parameters
    else:
        with torch.device("meta"):
            model = LlamaModel(architecture)
        assert sum(parameter.numel() for parameter in model.parameters()) == known.num_parameters
        matrices = (p.numel() for key, p in model.named_parameters() if p.ndim > 1 and "layers" in key)
        assert layer_weights(architecture, active=False) == sum(matrices)
    assert layer_weights(known.architecture, active=True) == num_weights(known.architecture)[0]


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_those_of_the_model_card(name: str) -> None:
    target = KNOWN_TARGETS[name].architecture
    published, slack = ACTIVE[name]
    layers, _ = num_weights(target)
    embeddings = 2 * target.vocab_size * target.hidden_size
    assert (layers + embeddings) / 1e9 == pytest.approx(published, abs=slack)


def test_names_are_found_whatever_their_capitals() -> None:
    assert known_target("qwen/qwen3-8b") is KNOWN_TARGETS["Qwen/Qwen3-8B"]
    assert known_target("Qwen/Qwen3-9B") is None


def test_scales_of_a_known_target_are_those_of_its_config(tmp_path) -> None:
    assert target_fp8_layout("deepseek-ai/DeepSeek-V3@main") == FP8Layout("_scale_inv", (128, 128))
    assert target_fp8_layout("Qwen/Qwen3-8B") is None
    config = known_target("Qwen/Qwen3-8B").config | {"quantization_config": {"quant_method": "fbgemm_fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert target_fp8_layout(str(tmp_path)) == FP8Layout("_scale")
    with pytest.raises(UserError, match="are not known without a network"):
        target_fp8_layout("org/nobody-has-it")


def test_a_config_in_the_hubs_cache_is_found_by_name_and_revision(tmp_path, monkeypatch) -> None:
    """As ``huggingface_hub`` lays it out, without a network."""
    commit = "0123456789" * 4
    repo = tmp_path / "models--org--own"
    (repo / "snapshots" / commit).mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    config = known_target("Qwen/Qwen3-8B").config | {"num_hidden_layers": 7}
    (repo / "snapshots" / commit / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in ("org/own", f"org/own@{commit}"):
        found, source = target_architecture(name)
        assert (found.num_layers, source) == (7, "its config.json in the hub's cache")
    with pytest.raises(UserError, match="are not known without a network"):
        target_architecture("org/own@another")


def test_a_revision_does_not_hide_a_known_target() -> None:
    named, plain = (target_architecture(f"Qwen/Qwen3-8B{revision}") for revision in ("@main", ""))
    assert named == plain


def test_an_architecture_is_read_once() -> None:
    known = KNOWN_TARGETS["openai/gpt-oss-20b"]
    assert known.architecture is known.architecture
