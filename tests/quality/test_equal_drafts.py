"""A draft that is its target loses no token: every verify accepts all of it.

The accept length is then ``steps + 1`` but for the last verify, which ``max_tokens`` cuts. Whatever a chain
gets wrong (a position, a key-value entry, a map, a random number) costs tokens here and changes no text.
"""

import pytest
import torch
from tiny import tiny_head, tiny_target, with_random_map

from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.stats import SpecStats
from eagle_kit.drafts.base.draft_model import StandaloneDraftModel
from eagle_kit.drafts.eagle1.head import Eagle1Config, Eagle1Head
from eagle_kit.drafts.eagle3.head import Eagle3Head
from eagle_kit.engine.llm import LLM
from eagle_kit.models.targets.llama import LlamaModel

VOCAB = 131
PROMPTS = [[(11 * i + 7 * j * j) % VOCAB for j in range(2 + 9 * i)] for i in range(3)]
NUM_TOKENS = 38
SHARPNESS = 24.0
"""Value of the biases that make a head attend to its own row: the score of any other is 40 below."""


def target_of_one_token() -> LlamaModel:
    """A target whose next token depends on the last one alone: layers add nothing to the embedding, whose
    rows have a root mean square of one."""
    target = tiny_target(VOCAB, tie_word_embeddings=False)
    for layer in target.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    rows = target.embed_tokens.weight
    rows.div_(rows.square().mean(-1, keepdim=True).sqrt())
    target.norm.weight.fill_(1.0)
    return target


def eagle1_equal_to(target: LlamaModel) -> Eagle1Head:
    """An EAGLE-1 head that gives the state of the token it embeds, normed as the target's."""
    names = (
        "hidden_size",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "intermediate_size",
        "vocab_size",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "max_position_embeddings",
    )
    config = Eagle1Config(**{name: getattr(target.config, name) for name in names}, fc_bias=False)
    head = Eagle1Head(config).requires_grad_(False)
    for parameter in head.parameters():
        parameter.zero_()
    size = config.hidden_size
    head.fc.weight[:, :size] = torch.eye(size) / (1 + target.config.rms_norm_eps) ** 0.5
    return head.bind(target.lm_head)


def eagle3_equal_to(target: LlamaModel) -> Eagle3Head:
    """An EAGLE-3 head of the same effect: its attention hands on the embedding of its own row. Draft ids are
    target ids in another order."""
    size = target.config.hidden_size
    heads = {"num_heads": 6, "num_kv_heads": 6, "head_dim": 8, "norm_before_residual": True}
    head = tiny_head(target, VOCAB, attention_bias=True, **heads).requires_grad_(False)
    for parameter in head.parameters():
        parameter.zero_()

    # Queries and keys are the same at every row, so that the rotation alone ranks rows.
    attention = head.midlayer.self_attn
    own = torch.zeros(6, 8)
    own[:, :4] = SHARPNESS
    attention.qkv_proj.bias[: 2 * size] = own.flatten().repeat(2)

    # Values are the embedding; the residual, which is the feature, is nothing.
    attention.qkv_proj.weight[2 * size :, :size] = torch.eye(size)
    attention.o_proj.weight.copy_(torch.eye(size))
    for norm in (head.midlayer.input_layernorm, head.midlayer.post_attention_layernorm, head.norm):
        norm.weight.fill_(1.0)

    with_random_map(head, seed=3)
    head.lm_head.weight.copy_(target.head_weight[head.token_map])
    return head


@pytest.fixture(scope="module")
def pairs() -> dict:
    """A target and a draft that computes the same, by kind of draft."""
    deep = tiny_target(VOCAB)
    flat = target_of_one_token()
    return {
        "small model": (deep, StandaloneDraftModel(tiny_target(VOCAB))),
        "eagle1": (flat, eagle1_equal_to(flat)),
        "eagle3": (flat, eagle3_equal_to(flat)),
    }


def decode(target, draft, shape: str, params: dict, **options) -> tuple[list[list[int]], SpecStats]:
    """Tokens of every response, and acceptance over all of them."""
    sizes = {"max_batch_size": 2, "max_context": 128, "page_size": 4}
    llm = LLM(target, draft, shape=shape, **sizes, **options)
    given = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **params)
    outputs = llm.generate(PROMPTS, given)
    total = SpecStats()
    for output in outputs:
        total.add(output.stats)
    return [output.token_ids for output in outputs], total


def check_whole(stats: SpecStats, steps: int) -> None:
    """Raise AssertionError unless every verify but the last of a response emitted ``steps + 1`` tokens."""
    left = NUM_TOKENS - 1
    verifies = -(-left // (steps + 1))
    last = left - (verifies - 1) * (steps + 1)
    want = SpecStats()
    want.observe(steps + 1, steps, times=len(PROMPTS) * (verifies - 1))
    want.observe(last, min(last, steps), times=len(PROMPTS))
    assert stats == want


@pytest.mark.parametrize("shape", ["1,1,2", "4,1,5", "7,1,8"])
@pytest.mark.parametrize("kind", ["small model", "eagle1", "eagle3"])
def test_a_greedy_chain_is_accepted_whole(pairs, kind, shape):
    target, draft = pairs[kind]
    tokens, stats = decode(target, draft, shape, {})
    plain, _ = decode(target, None, "none", {})
    assert tokens == plain
    check_whole(stats, int(shape[0]))


@pytest.mark.parametrize("verifier", ["rejection", "block"])
@pytest.mark.parametrize("kind", ["small model", "eagle1", "eagle3"])
def test_a_chain_sampled_from_the_targets_own_distribution_is_accepted_whole(pairs, kind, verifier):
    """With p = q both verifiers accept with probability one."""
    target, draft = pairs[kind]
    params = {"temperature": 1.0, "seed": 5}
    tokens, stats = decode(target, draft, "4,1,5", params, sampled_drafts=True, verifier=verifier)
    again, _ = decode(target, draft, "4,1,5", params, sampled_drafts=True, verifier=verifier)
    assert tokens == again
    assert len({tuple(response) for response in tokens}) == len(PROMPTS)
    check_whole(stats, 4)


@pytest.mark.parametrize("kind", ["small model", "eagle1", "eagle3"])
def test_the_first_token_of_a_tree_is_always_accepted(pairs, kind):
    """Deeper greedy tokens may lie outside of a tree, which keeps the likeliest paths."""
    target, draft = pairs[kind]
    tokens, stats = decode(target, draft, "4,3,9", {})
    plain, _ = decode(target, None, "none", {})
    assert tokens == plain
    assert stats.num_accepted_at[0] == stats.num_verifies
