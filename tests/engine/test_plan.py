"""`serve --plan` against the ranks that it speaks of: the same modules, made without weights."""

import itertools

import pytest
import torch
from families import family_config, family_model
from rank_processes import run_ranks
from sweep import sweep
from tiny import tiny_head
from tiny_mixtures import GROUPED, MIXTURES, randomised, v3
from transformers import MixtralConfig

from eagle_kit.cli.app import main
from eagle_kit.config.engine import EngineConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.gpus import GPUS, RUNTIME_BYTES, Gpu
from eagle_kit.drafts.files.draft import save_draft
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.memory.engine_memory import FREE_SHARE, free_memory
from eagle_kit.engine.memory.rank_memory import PARTS, Planner
from eagle_kit.engine.tensor_parallel.ranks import WorkerArgs
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.loading.share import load_share

OPTIONS = EngineConfig(dtype="float32", max_context=96, max_batch_size=3, page_size=4, lag=0)
TARGETS = {
    "deepseek-v3": v3(moe_intermediate_size=21),
    "mixtral": MIXTURES["mixtral"],
    "qwen3-next": family_config("qwen3_next"),
}

NINE_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}


@pytest.fixture(scope="module", params=TARGETS)
def folder(request, tmp_path_factory):
    place = tmp_path_factory.mktemp("target")
    randomised(TARGETS[request.param]).save_pretrained(place)
    return place


def bytes_of_rank(ranks, folder, options):
    target = load_share(folder, ranks, **options)
    shapes = {name: tuple(parameter.shape) for name, parameter in target.named_parameters()}
    return sum(parameter.nbytes for parameter in target.parameters()), shapes, target.config


@pytest.mark.parametrize(
    ("expert_parallel", "quantization"),
    sweep(itertools.product((False, True), ("none", "fp8")), fast=[(False, "none"), (True, "fp8")]),
)
def test_the_planned_rank_is_the_largest_of_those_that_are_loaded(folder, expert_parallel, quantization):
    planner = Planner(str(folder), None, OPTIONS.replace(quantization=quantization))
    plan = planner.plan(4, expert_parallel=expert_parallel)
    options = {"expert_parallel": expert_parallel, "quantization": quantization}
    found = run_ranks(4, bytes_of_rank, folder, options)
    size, shapes, config = found[plan.sharding.share.rank]
    assert {name: tuple(each.shape) for name, each in plan.target.named_parameters()} == shapes
    assert plan.target.config == config
    assert sum(plan.weights.values()) == plan.all_weights == size == max(size for size, *_ in found)
    kinds = [part for part in PARTS if "MLP" not in part and (config.states or "recurrent" not in part)]
    assert plan.weights["draft"] == 0 and all(plan.weights[part] for part in kinds)


def test_the_largest_rank_may_be_any(tmp_path):
    """Of 9 query heads over 3 key-value heads four ranks have 3, 3, 1 and 2."""
    config = MixtralConfig(**GROUPED | NINE_HEADS, num_local_experts=5, num_experts_per_tok=2)
    randomised(config).save_pretrained(tmp_path)
    plan = Planner(str(tmp_path), None, OPTIONS).plan(4)
    sizes = [size for size, *_ in run_ranks(4, bytes_of_rank, tmp_path, {})]
    assert plan.all_weights == sizes[plan.sharding.share.rank] == max(sizes) > sizes[-1]
    assert plan.target.config.num_heads == 3


def test_no_number_of_ranks_is_planned_that_a_rank_refuses(tmp_path):
    """The first of three has one head of four, half a block of its output projection; the last has whole
    blocks."""
    sizes = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "num_attention_heads": 4}
    config = v3(**sizes, num_key_value_heads=4, intermediate_size=96, moe_intermediate_size=96)
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    config.architectures = ["DeepseekV3ForCausalLM"]
    config.save_pretrained(tmp_path)
    planner = Planner(str(tmp_path), None, OPTIONS)
    assert planner.plan(2).target.config.num_heads == 2
    with pytest.raises(UserError, match=r"0 to 15 of layers.0.self_attn.o_proj.weight.* blocks of 32"):
        planner.plan(3)


def engine_of_rank(ranks, folder, draft, **choices):
    worker = WorkerArgs(ranks.rank, None, folder, None, None)
    options = OPTIONS.replace(device="cpu", tensor_parallel=ranks.size, shape="none", **choices)
    llm = LLM(folder, draft, options, worker=worker, tokenizer=None if ranks.rank else object())
    llm.engine("none")
    llm.close()  # where the other rank ends
    return llm.memory_plan, llm.draft.cache.values_per_token


def test_a_draft_and_its_pool_are_planned_as_they_are_made(folder, tmp_path):
    """The planned GPU has what a CPU that makes the same engine has, less the packed copies."""
    save_draft(tiny_head(load_target(folder)), tmp_path / "draft", metadata={})
    plan = Planner(str(folder), str(tmp_path / "draft"), OPTIONS.replace(shape="none")).plan(2)
    memory = plan.on(GPUS["h100-80g"])
    real, of_draft = run_ranks(2, engine_of_rank, folder, tmp_path / "draft")[0]
    assert memory.bytes_per_token == real.bytes_per_token
    assert memory.draft_bytes_per_token == 4 * of_draft
    assert memory.kv_tokens == real.kv_tokens and memory.logits == real.logits
    assert memory.states == real.states and memory.state_snapshots == real.state_snapshots
    assert plan.weights["draft"] > 0
    chooses = Planner(str(folder), str(tmp_path / "draft"), OPTIONS).plan(2)
    assert chooses.chooses_shapes and not plan.chooses_shapes
    assert chooses.config.shape.at(1).steps > 0


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss", "gpt2"])
def test_layers_of_transformers_are_planned_for_one_gpu_as_they_are_loaded(tmp_path, kind, capsys):
    model = family_model(kind)
    model.save_pretrained(tmp_path)
    plan = Planner(str(tmp_path), None, OPTIONS).plan(1)
    loaded = load_target(tmp_path)
    assert plan.all_weights == sum(parameter.nbytes for parameter in loaded.parameters())
    assert plan.weights["embedding and output layer"] >= loaded.embed_tokens.weight.nbytes
    memory = plan.on(GPUS["h100-80g"])
    assert memory.bytes_per_token == 4 * loaded.config.cache.values_per_token
    with pytest.raises(UserError, match="which ranks do not share"):
        Planner(str(tmp_path), None, OPTIONS).plan(2)
    with pytest.raises(UserError, match="not cast to fp8"):
        Planner(str(tmp_path), None, OPTIONS.replace(quantization="fp8")).plan(1)
    assert main(["serve", str(tmp_path), "--plan"]) == 0
    assert "not with 2: The layers of" in capsys.readouterr().out


def test_what_fits_is_what_is_free(folder):
    planner = Planner(str(folder), None, OPTIONS)
    plan, gpu = planner.plan(2), Gpu(RUNTIME_BYTES + 5e8, 1e15, 1e15, 1e12, 1e11)
    memory = plan.on(gpu)
    needed = memory.scratch + memory.logits + memory.activations + memory.graphs.bytes
    if planner.config.states is not None:  # beside the states and their snapshots
        needed += memory.states
    room = FREE_SHARE["cuda"] * (5e8 - plan.all_weights) - needed
    assert plan.tokens(gpu) == room // memory.bytes_per_token > memory.kv_tokens
    assert plan.on(Gpu(RUNTIME_BYTES + plan.all_weights, 1e15, 1e15, 1e12, 1e11)) is None


def test_what_torch_keeps_of_freed_tensors_is_free(monkeypatch):
    """Loading leaves gigabytes there, of what was gathered for a draft."""
    kept = [3e9]
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8e9 - sum(kept), 8e9))
    assert free_memory(torch.device("cuda", 1)) == 8e9


def own_latents_of_rank(ranks, folder, draft):
    return engine_of_rank(ranks, folder, draft, data_parallel_attention=True)


def test_latents_by_request_are_planned_as_they_are_made(folder, tmp_path):
    """A token takes its latents on one of the ranks, and its entries of the draft on all."""
    save_draft(tiny_head(load_target(folder)), tmp_path / "draft", metadata={})
    planner = Planner(str(folder), str(tmp_path / "draft"), OPTIONS.replace(shape="none"))
    if planner.config.mla is None:
        with pytest.raises(UserError, match="Data-parallel attention is for latents, and this .* has keys"):
            planner.plan(2, data_parallel_attention=True)
        return
    plan, replica = (planner.plan(2, data_parallel_attention=own) for own in (True, False))
    assert plan.weights["attention"] == planner.plan(1).weights["attention"]
    memory, whole = (each.on(GPUS["h100-80g"]) for each in (plan, replica))
    real, of_draft = run_ranks(2, own_latents_of_rank, folder, tmp_path / "draft")[0]
    latents = 4 * planner.config.cache.values_per_token
    assert memory.bytes_per_token == real.bytes_per_token == latents // 2 + 4 * of_draft
    assert whole.bytes_per_token == latents + 4 * of_draft
    assert memory.kv_tokens == real.kv_tokens and memory.scratch < whole.scratch
    assert plan.tokens(GPUS["h100-80g"]) > 1.3 * replica.tokens(GPUS["h100-80g"])


def test_a_plan_is_printed_without_weights_or_a_network(capsys):
    words = ("--plan", "--gpu", "a100-40g", "--max-running-requests", "4")
    assert main(["serve", "Qwen/Qwen3-30B-A3B", *words]) == 0
    text = capsys.readouterr().out
    table = {line[:30].strip(): line[30:].split() for line in text.splitlines()}
    assert table["GB of each rank on a100-40g"] == ["1", "2", "2e", "4", "4e", "8", "8e", "16", "16e"]
    assert table["head room"][:2] == ["no", "fit"]
    assert float(table["head room"][-1]) == 4.0, "a tenth of the GPU"
    assert table["requests of a batch"][-1] == "4" and table["context"][-1] == "40,960"
    # 48 layers of 128 experts with three matrices of 768 x 2048 in bf16
    assert table["routed experts"][1:3] == [f"{48 * 128 * 3 * 768 * 2048 * 2 / 2 / 1e9:.2f}"] * 2
    assert table["kB of a token"][-1] == f"{48 * 2 * 128 * 2 / 1e3:.1f}"  # one key-value head of four


def test_ways_to_share_are_those_of_all_numbers_of_ranks(tmp_path, capsys):
    v3(architectures=["DeepseekV3ForCausalLM"], kv_lora_rank=512).save_pretrained(tmp_path)

    def table(*flags):
        words = ("--plan", "--speculative-algorithm", "NONE", "--max-running-requests", "64", *flags)
        assert main(["serve", str(tmp_path), *words]) == 0
        text = capsys.readouterr().out
        return text, {line[:30].strip(): line[30:].split() for line in text.splitlines()}

    names = "GB of each rank on h100-80g", "kB of a token", "tokens, a replica of all"
    text, whole = table("--enable-expert-parallel")
    assert whole[names[0]] == ["1", "2e", "4e"] and "not with 8e: 8 ranks cannot share 6 query" in text
    text, own = table("--enable-expert-parallel", "--enable-dp-attention")
    assert own[names[0]] == ["1", "2e", "4e", "8e"] and "not with 16e: 16 ranks are too many for 12" in text
    assert "latents of a request on one of several ranks (--enable-dp-attention)" in text
    assert own[names[2]] == [*whole[names[2]], "-"]  # whose heads are not cut
    assert whole[names[1]] == [own[names[1]][0]] * 3 and len(set(own[names[1]])) == 4
    _, only = table("--enable-dp-attention", "--tensor-parallel", "2")
    assert only[names[0]] == ["2", "2e"] and only[names[1]] == [own[names[1]][1]] * 2


def test_what_cannot_be_planned_is_said(capsys):
    def error(*words):
        assert main(["serve", *words]) == 2
        return capsys.readouterr().err

    assert "The GPU 'h99' is not in the table" in error("Qwen/Qwen3-8B", "--plan", "--gpu", "h99")
    assert "--gpu is of --plan" in error("Qwen/Qwen3-8B", "--gpu", "h200")
    assert "64 ranks cannot share 32 query heads" in error(
        "Qwen/Qwen3-8B", "--plan", "--tensor-parallel", "64"
    )
    assert main(["serve", "smollm2-135m-instruct", "--plan"]) == 0
    text = capsys.readouterr().out
    assert "not with 16: 16 ranks cannot share 9 query heads over 3 key-value heads." in text
    columns = next(line for line in text.splitlines() if line.startswith("GB of each rank"))
    assert columns.split()[-4:] == ["1", "2", "4", "8"]
