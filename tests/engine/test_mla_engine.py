"""The engine with DeepSeek targets: a pool of latents, absorbed windows, prompts with and without prefix."""

import pytest
import torch
from tiny import randomise, tiny_head
from tiny_engine import PROMPTS, decode, make_engine, resolved, serve
from tiny_mixtures import LITE_YARN, YARN, randomised, v2, v3
from torch._subclasses.fake_tensor import FakeTensorMode

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.core.stats import SpecStats
from eagle_kit.drafts.base.draft_model import HeadDraftModel, StandaloneDraftModel
from eagle_kit.engine.cycle import CycleSettings, cycle
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.memory.engine_memory import plan_memory
from eagle_kit.engine.request import Request
from eagle_kit.kv.latents import PagedLatents
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.targets.llama import LlamaModel
from eagle_kit.ops.attention.window import chain_bits

TARGETS = {
    "v2": v2(vocab_size=11, q_lora_rank=None, rope_parameters=LITE_YARN),
    "v3": v3(vocab_size=11, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}),
}


@pytest.fixture(scope="module", params=TARGETS)
def theirs(request):
    """A tiny random DeepSeek of transformers; a vocabulary of 11 lets random heads guess right."""
    return randomised(TARGETS[request.param])


@pytest.fixture(scope="module")
def models(theirs, tmp_path_factory):
    """The same as our target, and a random EAGLE-3 head with a Llama layer."""
    folder = tmp_path_factory.mktemp("target")
    theirs.save_pretrained(folder)
    target = load_target(folder)
    return target, tiny_head(target, draft_vocab_size=9)


@pytest.fixture(scope="module")
def plain(models):
    """What ordinary decoding says to every prompt."""
    return [r.token_ids for r in decode(models, max_tokens=20)]


def test_plain_decoding_says_what_transformers_generates(theirs, plain):
    for prompt, response in zip(PROMPTS, plain, strict=True):
        ids = torch.tensor([prompt])
        out = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=20,
            eos_token_id=theirs.config.eos_token_id,
            pad_token_id=0,
        )
        assert response == out[0, len(prompt) :].tolist()
    assert max(map(len, plain)) == 20


def test_what_a_rejected_token_left_behind_is_never_read(models):
    engine = make_engine(models, max_context=64)
    latents = engine.runner.kv
    assert isinstance(latents, PagedLatents)
    latents.rows[:, latents.trash_row] = float("nan")
    engine.use_shape(SpecShape(4, 4, 16))
    request = Request(0, [1, 2, 3], SamplingParams(max_tokens=20))
    serve(engine, [request])
    assert request.token_ids == decode(models, prompts=[[1, 2, 3]], max_tokens=20)[0].token_ids


def test_a_whole_model_with_latents_of_its_own_drafts(models, plain):
    target = models[0]
    engine = make_engine((target, None), batch=3)
    engine = type(engine)(target, StandaloneDraftModel(target), engine.config)
    assert isinstance(engine.runner.drafter.kv, PagedLatents)
    engine.use_shape(SpecShape(4, 1, 5))
    requests = [Request(i, list(p), SamplingParams(max_tokens=20)) for i, p in enumerate(PROMPTS)]
    serve(engine, requests)
    assert [r.token_ids for r in requests] == plain
    stats = SpecStats()
    for request in requests:
        stats.add(request.stats.spec)
    assert stats.accept_length > 4, "the target agrees with itself"


@pytest.mark.parametrize("shape", ["none", "4,1,5", "4,4,16"])
def test_the_cycle_needs_no_host(models, shape):
    engine, shape = make_engine(models, batch=3), SpecShape.parse(shape)
    engine.use_shape(shape)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        state = engine.runner.slots.gather(torch.arange(3))
        out = cycle(engine.runner.models, state, CycleSettings(shape, 192))
    assert out.emitted.tokens.shape == (3, shape.steps + 1)


def test_the_pool_holds_latents_and_the_drafts_keys(models):
    target, head = models
    draft = HeadDraftModel(head, target)
    plan = plan_memory(target, draft, resolved(2, 100))
    latents, keys = 4 * (36 + 8), 2 * head.config.num_kv_heads * head.config.head_dim
    assert plan.bytes_per_token == 4 * (latents + keys)
    engine = make_engine(models)
    assert engine.runner.kv.bytes_per_token == 4 * latents
    assert engine.runner.drafter.kv.bytes_per_token == 4 * keys


def test_deepseek_v3_keeps_576_values_a_layer():
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 61}
    config = TargetConfig.from_dict(v3(**sizes).to_dict() | {"architectures": ["DeepseekV3ForCausalLM"]})
    assert config.cache.values_per_token == 61 * 576


def test_the_facade_serves_a_folder_and_its_logits_agree(models):
    target, head = models
    llm = LLM(target, head, max_batch_size=2, max_context=128)
    assert llm.default_shape == SpecShape(3, 1, 4)
    output = llm.generate([PROMPTS[1]], SamplingParams(max_tokens=8), shape=llm.default_shape)[0]
    ids = PROMPTS[1] + output.token_ids
    best = llm.logits(ids).argmax(-1).tolist()
    assert best[len(PROMPTS[1]) - 1 : -1] == output.token_ids


@torch.no_grad()
def test_a_window_of_one_equals_larger_windows_bit_for_bit_on_packed_weights():
    config = v3(
        vocab_size=61,
        hidden_size=384,
        moe_intermediate_size=96,
        num_hidden_layers=2,
        kv_lora_rank=128,
        q_lora_rank=96,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
    )
    target = LlamaModel(
        TargetConfig.from_dict(config.to_dict() | {"architectures": ["DeepseekV3ForCausalLM"]})
    )
    llm = LLM(randomise(target, 0, 0.05).eval().requires_grad_(False), max_batch_size=1, max_context=64)
    engine = llm.engine(SpecShape.parse(None))
    first = []
    for n in (1, 2, 5, 16):
        bits = chain_bits(n, torch.device("cpu"))[None]
        table = torch.arange(engine.config.max_pages)[None]
        attend = engine.runner.kv.window_attend(table, torch.tensor([0]), bits, n, 64)
        first.append(llm.target.logits(llm.target(torch.arange(n) + 3, torch.arange(n), attend).hidden)[0])
    assert all(torch.equal(logits, first[0]) for logits in first[1:])
