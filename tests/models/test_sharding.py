"""A target cut by tensor parallelism: slices are the checkpoint, and ranks compute what one process does."""

import itertools
import re
import time
from dataclasses import replace

import pytest
import torch
from crossed import crossed
from families import COMMON, HYBRIDS
from live_bytes import LiveBytes
from rank_processes import run_ranks
from tiny_mixtures import randomised, v2, v3
from transformers import (
    FalconH1Config,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers import Qwen3ForCausalLM as Qwen3

from eagle_kit.core.errors import UserError
from eagle_kit.distributed.collectives import Share
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.loading.arrangement import arrangement_of
from eagle_kit.models.loading.loader import load_target, read_published, read_target_config
from eagle_kit.models.loading.published import Part
from eagle_kit.models.loading.share import load_share
from eagle_kit.models.sharding import Cut, Sharding, scale_cuts, share_heads

WHOLE = r"norm|(mlp|block_sparse_moe)\.gate\.|_a_proj|correction_bias|shared_expert_gate"
"""Names of tensors that every rank has whole."""
SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 98,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 21,
    "shared_expert_intermediate_size": 33,
}
FALCON = {key: value for key, value in HYBRIDS["falcon_h1"].items() if key not in COMMON}
ONE_GROUP = {"mamba_n_groups": 1, "mamba_rms_norm": False, "projectors_bias": True, "mamba_proj_bias": True}
TARGETS = {
    "llama, tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "llama, all biases": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"})
    ).bfloat16(),
    "qwen3": lambda: Qwen3(Qwen3Config(**SIZES)).half(),
    "mixtral": lambda: randomised(MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2)),
    "qwen3-moe": lambda: randomised(
        Qwen3MoeConfig(**SIZES, num_experts=9, num_experts_per_tok=4, moe_intermediate_size=21)
    ),
    "deepseek-v2, all biases": lambda: randomised(
        v2(vocab_size=131, q_lora_rank=None, attention_bias=True, mlp_bias=True, first_k_dense_replace=0)
    ),
    "deepseek-v3": lambda: randomised(v3(vocab_size=131)),
    "qwen3-next": lambda: randomised(Qwen3NextConfig(**SIZES, **DELTA, **EXPERTS)),
    "qwen3.5-moe": lambda: randomised(Qwen3_5MoeTextConfig(**SIZES, **DELTA, **EXPERTS)),
    "qwen3.5, tied": lambda: randomised(Qwen3_5TextConfig(**SIZES, **DELTA, tie_word_embeddings=True)),
    "falcon-h1": lambda: randomised(FalconH1Config(**SIZES, **FALCON | {"mamba_n_groups": 6})),
    "falcon-h1, one group": lambda: randomised(FalconH1Config(**SIZES, **FALCON | ONE_GROUP)),
}


@pytest.fixture(scope="module", params=TARGETS)
def folder(request, tmp_path_factory):
    torch.manual_seed(3)
    model = TARGETS[request.param]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases begin at 0, norms at 1
                parameter += 0.3 * torch.randn_like(parameter)
    place = tmp_path_factory.mktemp("target")
    model.save_pretrained(place)
    return place


@pytest.mark.parametrize("size", [2, 3, 4])
def test_slices_reassemble_the_checkpoint(folder, size):
    """Bit for bit; only keys and values, and keys of recurrent layers, may be there twice. Whole experts are
    there once."""
    config = read_target_config(folder)
    for way in ways_of(config):
        ranks = [Sharding(config, Share(rank, size), **way) for rank in range(size)]
        check_slices(ranks, config, arrangement_of(config).renamed(read_published(folder)))


def ways_of(config):
    """Everything is cut inside, or experts are shared by number, and latents by request."""
    others = {"expert_parallel": config.moe, "data_parallel_attention": config.mla}
    other = {name: True for name, part in others.items() if part is not None}
    return [{}, other] if other else [{}]


def check_slices(ranks, config, published):
    size = len(ranks)
    copied = ["k_proj", "v_proj"] if size > config.num_kv_heads else []
    if config.states is not None and size > config.states.recurrences[0].num_key_heads:
        copied += ["in_proj.", "in_proj_qkv", "conv1d"]
    for name, tensor in published.items():
        part = Part(name, tuple(tensor.shape))
        cuts = [rank.cuts(part) for rank in ranks]
        if ranks[0].expert_parallel and ".experts." in name:
            owners = [rank.has(part) for rank in ranks]
            assert owners.count(True) == 1 and cuts == [None if mine else [] for mine in owners]
            continue
        if any(cut is None for cut in cuts):
            is_whole = ranks[0].data_parallel_attention and "self_attn." in name
            assert cuts == [None] * size and (is_whole or re.search(WHOLE, name))
            continue
        whole = torch.full_like(tensor, torch.nan)
        times = torch.zeros(tensor.shape[cuts[0][0].dim])
        for cut in itertools.chain(*cuts):
            part = tensor.narrow(cut.dim, cut.start, cut.stop - cut.start)
            whole.narrow(cut.dim, cut.start, cut.stop - cut.start).copy_(part)
            times[cut.start : cut.stop] += 1
        assert torch.equal(whole, tensor)
        assert (times == 1).all() or any(each in name for each in copied)


@pytest.mark.parametrize("heads", [(9, 3), (6, 2), (8, 8), (32, 8), (5, 1), (64, 4)])
def test_every_query_head_is_once_among_the_ranks_beside_its_key_value_head(heads):
    num_heads, num_kv_heads = heads
    for size in range(1, num_heads + 1):
        if size > num_kv_heads and -(-size // num_kv_heads) > num_heads // num_kv_heads:
            continue
        mine = [share_heads(*heads, Share(rank, size)) for rank in range(size)]
        assert [head for each in mine for head in each.query] == list(range(num_heads))
        for query, kv in mine:
            assert query and len(query) % len(kv) == 0  # a smaller model of the same kind
            group, local = num_heads // num_kv_heads, len(query) // len(kv)
            assert all(head // group == kv[i // local] for i, head in enumerate(query))


def test_more_ranks_than_heads_are_refused(folder):
    config, found = read_target_config(folder), "7 ranks cannot share 6 query heads"
    if (mamba := config.mamba) is not None:
        groups = mamba.num_groups
        whole = f"7 ranks cannot share 6 value heads over {groups} key heads"
        found = f"7 ranks would cut the norms of {groups} groups" if mamba.has_norm else whole
        ranks = [Sharding(config, Share(rank, groups)).rank_config().mamba for rank in range(groups)]
        assert [each.num_groups for each in ranks] == [1] * groups
    with pytest.raises(UserError, match=found):
        for rank in range(7):
            Sharding(config, Share(rank, 7)).rank_config()


def test_what_experts_by_number_need_is_said(folder):
    config = read_target_config(folder)
    if config.moe is None:
        with pytest.raises(UserError, match="has none"):
            Sharding(config, Share(0, 2), expert_parallel=True).rank_config()
        return
    few = replace(config, moe=replace(config.moe, num_experts=3))
    with pytest.raises(UserError, match="4 ranks are too many for 3 experts"):
        Sharding(few, Share(0, 4), expert_parallel=True).rank_config()
    size = 4
    own = [Sharding(config, Share(r, size), expert_parallel=True).rank_config().moe for r in range(size)]
    assert [number for each in own for number in each.local_experts] == list(range(config.moe.num_experts))
    assert {each.intermediate_size for each in own} == {config.moe.intermediate_size}


def test_data_parallel_attention_is_for_latents(folder):
    config = read_target_config(folder)
    sharding = Sharding(config, Share(0, 2), data_parallel_attention=True)
    if config.mla is not None:
        assert sharding.rank_config().num_heads == config.num_heads
        return
    with pytest.raises(UserError, match="Data-parallel attention is for latents"):
        sharding.rank_config()


def test_inner_values_stay_in_whole_blocks_of_rows_and_of_columns():
    """Which are columns of one matrix of an MLP and rows of the others."""
    down = Part("layers.0.mlp.down_proj.weight", (48, 192))
    for block in ((16, 24), (24, 16), (48, 16)):
        mine = [Sharding.of(read_v3(), Share(rank, 2), block, False).cuts(down) for rank in range(2)]
        assert mine == [[Cut(1, 0, 96)], [Cut(1, 96, 192)]]
    with pytest.raises(UserError, match="in fp8 blocks of 48"):
        Sharding.of(read_v3(), Share(0, 3), (16, 24), False).rank_config()


def read_v3():
    config = v3(vocab_size=131).to_dict() | {"architectures": ["DeepseekV3ForCausalLM"]}
    return TargetConfig.from_dict(config)


STACKED = Part("layers.0.mlp.experts.gate_up_proj", (6, 64, 48))


def test_cuts_of_stacked_experts_and_of_scales_fit_together():
    """Of the second of two ranks: halves by inner values, or experts 3 to 5; scales go with their blocks."""
    config = replace(read_v3(), num_layers=1)
    inside, whole = (Sharding(config, Share(1, 2), each, block=16) for each in (False, True))
    assert inside.cuts(STACKED) == [Cut(1, 16, 32), Cut(1, 48, 64)]
    assert scale_cuts(STACKED, inside.cuts(STACKED), (6, 4, 3), (16, 16)) == [Cut(1, 1, 2), Cut(1, 3, 4)]
    assert scale_cuts(STACKED, inside.cuts(STACKED), (6, 64, 1), None) == inside.cuts(STACKED)
    assert scale_cuts(STACKED, inside.cuts(STACKED), (6, 1, 1), None) is None
    assert whole.cuts(STACKED) == [Cut(0, 3, 6)]
    assert scale_cuts(STACKED, whole.cuts(STACKED), (6, 4, 3), (16, 16)) == [Cut(0, 3, 6)]
    down = Part("layers.0.mlp.down_proj.weight", (48, 40))
    assert inside.cuts(down) == [Cut(1, 16, 40)]  # blocks 1 and 2, of which the last is half
    assert scale_cuts(down, inside.cuts(down), (3, 3), (16, 16)) == [Cut(1, 1, 3)]
    with pytest.raises(UserError, match="24 to 47 of o_proj, whose fp8 scales are those of blocks of 16"):
        scale_cuts(Part("o_proj", (48, 48)), [Cut(1, 24, 48)], (3, 3), (16, 16))


def _forward(ranks, folder, ids, capture, way):
    target = load_share(folder, ranks, **way)
    with torch.inference_mode():
        out = target(ids, torch.arange(len(ids)), target.causal(), capture)
        before = dict(ranks.volume)
        logits = target.logits(out.hidden)
        whole = target.with_whole_ends()
        ends = whole.embed_tokens.weight, whole.lm_head.weight
        target.take_embedding(whole.embed_tokens)
        again = target(ids, torch.arange(len(ids)), target.causal(), capture)
    assert torch.equal(out.hidden, again.hidden)
    parts = {name: tuple(tensor.shape) for name, tensor in target.named_parameters()}
    return out, logits, ends, before, parts, target.config


@crossed(("size", [2, 4]), ("folder", TARGETS), fixtures=("folder",))
def test_ranks_compute_the_logits_and_states_of_one_process(folder, size):
    """In fp64's neighbourhood: fp32 sums in another order."""
    ids = torch.randint(0, 131, (29,), generator=torch.Generator().manual_seed(1))
    whole = load_target(folder)
    with torch.inference_mode():
        out = whole(ids, torch.arange(29), whole.causal(), (1, 3))
        logits = whole.logits(out.hidden)
    for way in ways_of(whole.config):
        found = run_ranks(size, _forward, folder, ids, (1, 3), way)
        check_ranks(found, whole, out, logits, data_parallel_attention="data_parallel_attention" in way)


def _peak_of_ends(ranks, folder, dtype):
    target = load_share(folder, ranks, dtype)
    assert {parameter.dtype for parameter in target.parameters()} == {dtype}
    with LiveBytes() as live:
        whole = target.with_whole_ends()
    size = whole.embed_tokens.weight.nbytes
    ends = {whole.embed_tokens.weight.data_ptr(), whole.lm_head.weight.data_ptr()}
    wanted, end = len(ends) * size, time.monotonic() + 10
    while live.now > wanted and time.monotonic() < end:
        time.sleep(0.01)  # gloo's own thread lets go of what it exchanged after the waiting one is told
    return live.now == wanted, live.peak / size


@pytest.mark.parametrize(
    ("vocab_size", "is_tied", "most", "dtype"),
    [
        (132, False, 2, torch.bfloat16),
        (131, True, 2.6, torch.float32),
        (131, False, 5.1, torch.float32),
    ],
)
def test_whole_ends_are_gathered_beside_at_most_one_copy(vocab_size, is_tied, most, dtype, tmp_path):
    """Uneven parts are padded, half of a matrix on each of two ranks, and put together anew; what gloo still
    holds of the first matrix then may be beside the second one."""
    config = LlamaConfig(**SIZES | {"vocab_size": vocab_size, "tie_word_embeddings": is_tied})
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    for nothing_else_is_kept, peak in run_ranks(2, _peak_of_ends, tmp_path, dtype):
        assert nothing_else_is_kept and peak <= most


def check_ranks(found, whole, out, logits, *, data_parallel_attention):
    for mine, my_logits, (embedding, output), volume, parts, config in found:
        torch.testing.assert_close(my_logits, logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine.hidden, out.hidden, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine.aux_hidden_states, out.aux_hidden_states, rtol=1e-4, atol=1e-4)
        assert torch.equal(embedding, whole.embed_tokens.weight) and torch.equal(output, whole.head_weight)
        layers = whole.config.num_layers
        assert volume == {"sum": ((1 if data_parallel_attention else 2) * layers + 1) * 29 * 48 * 4}
        assert parts["layers.1.self_attn.o_proj.weight"][1] == config.num_heads * 48 // 6 or config.mla
        assert config.num_heads in (
            (6,) if data_parallel_attention else (1, 2, 3)
        ) and config.num_kv_heads == (config.num_heads if config.mla else 1)
    for each in found[1:]:  # what is whole on every rank has the same bits there
        assert torch.equal(each[0].hidden, found[0][0].hidden) and torch.equal(
            each[0].aux_hidden_states, found[0][0].aux_hidden_states
        )
        assert torch.equal(each[1], found[0][1])
