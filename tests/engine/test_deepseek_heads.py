"""Heads with latents behind a DeepSeek target: the drafts of the published definitions, what their stores
hold, pools of the right size. That no draft changes a text is in `test_conformance`."""

import pytest
import torch
from sweep import sweep
from tiny import randomise, tiny_head
from tiny_engine import PROMPTS as FIVE
from tiny_engine import resolved, serve
from tiny_mixtures import YARN, run
from tiny_mtp import save_target
from torch._subclasses.fake_tensor import FakeTensorMode

from eagle_kit.autotune import files
from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.core.stats import SpecStats
from eagle_kit.drafts.eagle3.head import Eagle3Config, Eagle3Head
from eagle_kit.engine.cycle import CycleSettings, cycle
from eagle_kit.engine.engine import Engine
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.load_draft import load_draft_model
from eagle_kit.engine.memory.engine_memory import plan_memory
from eagle_kit.engine.request import Request
from eagle_kit.models.loading.loader import load_target

PROMPTS = FIVE[:4]
KINDS = ("eagle3", "eagle3-mla", "mtp", "mtp x 3")
ROPE = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}


class Models:
    """A target of 11 tokens, which lets random heads guess right, with one and with three modules."""

    def __init__(self, root) -> None:
        self.folders = {1: root / "one", 3: root / "three"}
        self.modules = {
            count: save_target(folder, modules=count, vocab_size=11, rope_parameters=ROPE)
            for count, folder in self.folders.items()
        }
        self.target = load_target(self.folders[1])
        config = Eagle3Config.for_target(self.target.config, 9, latent=True)
        latent = randomise(Eagle3Head(config), 3, 0.2)
        llama = tiny_head(self.target, draft_vocab_size=9)
        latent.set_vocab_map(llama.d2t, llama.t2d)
        self.heads = {"eagle3": llama, "eagle3-mla": latent}

    def draft(self, kind: str):
        if kind in self.heads:
            return load_draft_model(self.heads[kind], self.target)
        return load_draft_model(self.folders[3 if "3" in kind else 1], self.target, algorithm="NEXTN")

    def decode(
        self, kind, shape, batch=1, page_size=16, max_tokens=10, prompts=PROMPTS, record=None, **options
    ):
        draft = None if kind is None else self.draft(kind)
        sizes = resolved(batch, 256, **{"kv_tokens": batch * 450, "page_size": page_size, **options})
        engine = Engine(self.target, draft, sizes)
        engine.use_shape(SpecShape.parse(shape))
        if record is not None:
            record(engine)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=max_tokens > 30)
        requests = [Request(i, list(p), params) for i, p in enumerate(prompts)]
        serve(engine, requests)
        return requests


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return Models(tmp_path_factory.mktemp("targets"))


@pytest.fixture(scope="module")
def plain(models):
    return [r.token_ids for r in models.decode(None, None)]


def accept_length(parts) -> float:
    """Accept length of the statistics of several responses."""
    stats = SpecStats()
    for part in parts:
        stats.add(part)
    return stats.accept_length


def entered(models, kind, prompts, **options) -> torch.Tensor:
    """What the stores of the draft hold of the last prompt when its first draft is proposed."""
    found = {}

    def record(engine):
        drafter = engine.runner.drafter
        propose = drafter.propose

        def recorded(state, *rest):
            positions = torch.arange(int(state.seq_lens[0]) + 1)[None]
            for store in getattr(drafter, "stores", [drafter.kv]):
                rows = store.rows_of(state.page_table[:1], positions)[0, store.first_position :]
                found.setdefault(len(positions[0]), []).append(store.tensors[0][:, ..., rows, :].clone())
            return propose(state, *rest)

        drafter.propose = recorded

    models.decode(kind, "3,1,4", prompts=prompts, max_tokens=2, record=record, **options)
    count = 3 if "x 3" in kind else 1
    return torch.cat([rows.flatten() for rows in found[len(prompts[-1]) + 1][-count:]])


@pytest.mark.parametrize("kind", sweep(KINDS, fast=["eagle3-mla", "mtp x 3"]))
def test_every_slot_holds_the_same_whatever_was_cached_or_cut(models, kind):
    prompt = [(i * i) % 11 for i in range(41)]
    whole = entered(models, kind, [prompt], page_size=4, prefix_cache=False)
    assert whole.abs().amin() > 0, "a position that nothing was entered at"
    for chunk in (1, 7, 20):
        cut = entered(models, kind, [prompt], page_size=4, prefill_tokens=chunk, prefix_cache=False)
        torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-4)
    for length in (1, 2, 9, 40):
        before = [*prompt[:length], 5, 5, 5, 5, 5]
        cached = entered(models, kind, [before, prompt], page_size=1)
        torch.testing.assert_close(cached, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prompt", [[3], [1, 2], PROMPTS[1]])
@pytest.mark.parametrize("count", [1, 3])
@torch.no_grad()
def test_a_proposed_chain_is_that_of_the_published_forward(models, count, prompt):
    """After every verify the draft is computed anew, over the whole text, by transformers' decoder layer: one
    module is fed its own normed output, of three each is fed that of the one before."""
    proposals = []

    def record(engine):
        drafter = engine.runner.drafter
        propose = drafter.propose

        def recorded(state, *rest):
            proposals.append((int(state.seq_lens[0]), propose(state, *rest)))
            return proposals[-1][1]

        drafter.propose = recorded

    kind = "mtp" if count == 1 else "mtp x 3"
    request = models.decode(kind, "3,1,4", prompts=[prompt], record=record)[0]
    target = models.target
    text = torch.tensor(request.prompt_ids + request.token_ids)
    states = run(target, text).hidden
    assert len(proposals) > 3
    for length, draft in proposals:
        drafted, hidden, tokens = [], states[:length], text[1 : length + 1]
        for step in range(3):
            out = models.modules[count][min(step, count - 1)](hidden, target.embed(tokens))
            drafted.append(int(target.logits(out[-1:]).argmax()))
            following = torch.tensor(drafted[-1:])
            if count == 1:
                hidden, tokens = torch.cat((hidden, out[-1:])), torch.cat((tokens, following))
            else:
                hidden, tokens = out, torch.cat((tokens[1:], following))
        assert draft.tree.tokens[0, 1:].tolist() == drafted


@pytest.mark.parametrize("kind", ["mtp", "mtp x 3"])
def test_a_module_that_says_what_the_target_says_is_always_right(tmp_path, kind):
    """The next token is a function of the last one alone, in the target and, by hand, in the modules."""
    count = 3 if "3" in kind else 1
    save_target(tmp_path / "t", modules=count, vocab_size=11)
    target = load_target(tmp_path / "t")
    draft = load_draft_model(tmp_path / "t", target, algorithm="NEXTN")
    for layer in (*target.layers, *draft.head.layers):
        layer.self_attn.o_proj.weight.zero_()
        for name, parameter in layer.mlp.named_parameters():
            if "down_proj" in name:
                parameter.zero_()
    size = target.config.hidden_size
    for layer in draft.head.layers:  # the normed embedding of the token, nothing of the feature
        layer.eh_proj.weight.copy_(torch.eye(size, 2 * size))
        layer.enorm.weight.fill_(1.0)
        layer.shared_head.norm.weight.copy_(target.norm.weight)
    for module in (*target.modules(), *draft.head.modules()):
        module.__dict__.pop("_packed", None)
    for batch in (1, 4):
        engine = Engine(target, draft, resolved(batch, 128, kv_tokens=batch * 300, page_size=16))
        engine.use_shape(SpecShape(3, 1, 4))
        requests = [Request(i, list(p), SamplingParams(max_tokens=33)) for i, p in enumerate(PROMPTS)]
        serve(engine, requests)
        assert all(r.stats.spec.num_verifies == 8 for r in requests), "32 tokens after the first, 4 a verify"


@pytest.mark.parametrize("kind", KINDS)
def test_the_cycle_needs_no_host(models, kind):
    shape = SpecShape(3, 1, 4)
    engine = Engine(models.target, models.draft(kind), resolved(3, 128, kv_tokens=900, page_size=16))
    engine.use_shape(shape)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        state = engine.runner.slots.gather(torch.arange(3))
        out = cycle(engine.runner.models, state, CycleSettings(shape, 192))
    assert out.emitted.tokens.shape == (3, 4)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_the_pool_holds_latents_of_target_and_draft(models, kind):
    draft = models.draft(kind)
    layers = 4 + (3 if "x 3" in kind else 1)
    plan = plan_memory(models.target, draft, resolved(2, 100))
    assert plan.bytes_per_token == 4 * layers * (36 + 8)


def facade(folder, algorithm="NEXTN", **options) -> LLM:
    """A folder without a tokenizer."""
    llm = LLM(folder, algorithm=algorithm, tokenizer=object(), max_context=256, **options)
    llm.tokenizer = None
    return llm


@pytest.mark.parametrize("count", [1, 3])
def test_the_targets_own_modules_need_no_draft(models, plain, count):
    llm = facade(models.folders[count], "nextn")
    assert llm.default_shape == SpecShape(3, 1, 4)
    params = SamplingParams(max_tokens=10)
    outputs = llm.generate(PROMPTS, params, shape=llm.default_shape)
    expected = facade(models.folders[count], "auto").generate(PROMPTS, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert accept_length(output.stats for output in outputs) > 1.02


def test_shapes_of_several_modules_are_chosen(models, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "folder", lambda: tmp_path)
    llm, params = facade(models.folders[3], "nextn", max_batch_size=1), SamplingParams(max_tokens=20)
    assert llm.chooses_shapes
    chosen, expected = llm.generate(PROMPTS[:2], params), llm.generate(PROMPTS[:2], params, shape="none")
    assert [o.token_ids for o in chosen] == [o.token_ids for o in expected]
    shapes = [shape for shape in llm.engine("auto").shapes.shapes if shape.steps]
    assert shapes and max(shape.steps for shape in shapes) <= 3


def test_what_several_modules_cannot_do_is_refused(models):
    folder = models.folders[3]
    for options in ({"shape": "4,1,5"}, {"shape": "4,4,8"}, {"tree": "static"}, {"sampled_drafts": True}):
        with pytest.raises(UserError, match="3 modules|at most 3"):
            facade(folder, **options)
    with pytest.raises(UserError, match="at most 3"):
        facade(folder).generate([[1]], shape="4,1,5")
    with pytest.raises(UserError, match="target's folder"):
        LLM(models.target, algorithm="NEXTN")


def test_a_token_map_limits_what_a_module_proposes(models, plain):
    hot = torch.tensor([4, 2, 9, 0, 7])
    draft = models.draft("mtp")
    limited = type(draft)(draft.head, models.target, hot)
    engine = Engine(models.target, limited, resolved(2, 256, kv_tokens=900, page_size=16))
    engine.use_shape(SpecShape(3, 4, 8))
    requests = [Request(i, list(p), SamplingParams(max_tokens=10)) for i, p in enumerate(PROMPTS)]
    serve(engine, requests)
    assert [r.token_ids for r in requests] == plain and limited.draft_vocab_size == 5
    assert accept_length(request.stats.spec for request in requests) > 1.02


@pytest.mark.parametrize("kind", ["eagle3-mla", "mtp"])
def test_sampled_chains_work_with_these_heads_too(models, kind):
    llm = LLM(models.target, models.draft(kind), sampled_drafts=True, max_context=128, shape="3,1,4")
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=5)
    first, second = (llm.generate([[1, 2, 3], [4]], params) for _ in range(2))
    assert [o.token_ids for o in first] == [o.token_ids for o in second]
    assert accept_length(output.stats for output in first) > 1.02
