"""Chains without decoding: they accept what the engine accepts, to the verify, for every kind of head."""

from functools import cache

import pytest
import torch
from tiny import randomise, tiny_head, tiny_target
from tiny_engine import decode
from tiny_mtp import load_modules, save_target
from tiny_rule import learned_head, learned_target

from eagle_kit.core.stats import SpecStats
from eagle_kit.drafts.eagle1.head import Eagle1Config, Eagle1Head
from eagle_kit.drafts.eagle3.head import Eagle3Config, Eagle3Head
from eagle_kit.eval.diagnose.chain import InputVariant, Source, draft_chains
from eagle_kit.eval.diagnose.row import PromptResponse, compute_states, log_probs, pack
from eagle_kit.eval.diagnose.trials import simulate_decoding
from eagle_kit.models.loading.loader import load_target


def eagle1(target):
    sizes = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 96, "rms_norm_eps": 1e-5}
    config = Eagle1Config(hidden_size=48, vocab_size=11, rope_theta=1e4, rope_scaling=None, **sizes)
    return randomise(Eagle1Head(config), 3, 0.2).eval().requires_grad_(False).bind(target.lm_head)


def eagle3(target):
    return tiny_head(target, draft_vocab_size=9)


def latent(target):
    config = Eagle3Config.for_target(target.config, 11, latent=True)
    return randomise(Eagle3Head(config), 3, 0.2).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """By kind of head: a target of 11 tokens, which lets random heads guess right, and the head."""
    folder = tmp_path_factory.mktemp("deepseek")
    save_target(folder, modules=3, vocab_size=11)
    deepseek, llama = load_target(folder), tiny_target(11)
    modules = load_modules(folder, target=deepseek)
    return {
        "trained": (learned_target(), learned_head()),
        "eagle3": (llama, eagle3(llama)),
        "eagle1": (llama, eagle1(llama)),
        "eagle3-mla": (deepseek, latent(deepseek)),
        "mtp x 3": (deepseek, modules),
    }


@cache
def replayed(target, head, steps):
    """Statistics of the engine, and the source of the same responses, which tests do not change."""
    models = target, head
    stats, texts = SpecStats(), []
    for request in decode(models, f"{steps},1,{steps + 1}", batch=3):
        stats.add(request.stats.spec)
        texts.append(PromptResponse(list(request.prompt_ids), list(request.token_ids)))
    row = pack(texts)
    return stats, Source(models[0], row, compute_states(models[0], row, range(5)))


@pytest.mark.parametrize("kind", ["trained", "eagle3", "eagle1", "eagle3-mla", "mtp x 3"])
def test_the_chain_accepts_what_the_engine_accepts(models, kind):
    steps = 3 if kind.startswith("mtp") else 4
    stats, source = replayed(*models[kind], steps)
    predicted = simulate_decoding(draft_chains(models[kind][1], source, steps), source.row)
    assert predicted.num_accepted_at == stats.num_accepted_at and sum(stats.num_accepted_at) > 5
    assert (predicted.num_verifies, predicted.num_emitted_tokens) == (
        stats.num_verifies,
        stats.num_emitted_tokens,
    )


def test_roots_are_the_tokens_of_responses_but_the_last(models):
    row = pack([PromptResponse([1, 2, 3], [4, 5, 6]), PromptResponse([7], [8, 9]), PromptResponse([1], [2])])
    assert row.ids[row.roots].tolist() == [4, 5, 8] and row.text_index.tolist() == [0, 0, 1]
    assert row.ends.tolist() == [6, 6, 9] and row.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 1]
    three = [PromptResponse([1], [2, 3]), PromptResponse([4], [5, 6]), PromptResponse([7], [8])]
    assert pack(three, 6).positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]


def test_the_targets_probabilities_are_those_of_its_logits(models):
    target, head = models["eagle3"]
    source = replayed(target, head, 2)[1]
    found = log_probs(target, source.row, source.states, source.states.greedy)
    row = source.row
    logits = target.logits(source.states.hidden[row.roots])
    assert torch.allclose(found, logits.log_softmax(-1).amax(-1), atol=1e-5)
    assert torch.equal(source.states.greedy, row.ids[row.roots + 1]), "the responses are greedy"


def test_a_view_undoes_what_was_done_to_the_states(models):
    target, head = models["trained"]
    source = replayed(target, head, 4)[1]
    whole = draft_chains(head, source)
    rolled = {layer: state.roll(1, 0) for layer, state in source.states.inputs.items()}
    shifted = source._replace(states=source.states._replace(inputs=rolled))
    assert not torch.equal(draft_chains(head, shifted).first.label_log_prob, whole.first.label_log_prob)
    undone = draft_chains(head, shifted, 1, InputVariant(feature_shift=1))
    assert torch.allclose(undone.first.label_log_prob, whole.first.label_log_prob, atol=1e-5)


def test_what_is_not_in_the_draft_vocabulary_is_not_covered(models):
    target, head = models["eagle3"]
    source = replayed(target, head, 2)[1]
    reading = draft_chains(head, source, 2)
    assert torch.equal(reading.first.is_covered, torch.isin(source.states.greedy, head.token_map))
    assert (
        not reading.first.is_covered.all() and not (reading.num_accepted[~reading.first.is_covered] > 0).any()
    )


def test_a_nan_in_a_weight_is_seen(models):
    target, head = models["eagle3"]
    source = replayed(target, head, 2)[1]
    head = eagle3(target)
    assert draft_chains(head, source).is_finite
    head.fc.weight.data[3, 4] = float("nan")
    assert not draft_chains(head, source).is_finite
