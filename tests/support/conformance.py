"""One table of what must not change a text: kinds of targets, kinds of drafts, and options of an engine.

A case names a value of every axis. Its texts are those that the same target decodes alone, without a draft.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from families import family_config
from pairwise import Case, covering_values, pairwise
from restless import Restless
from tiny import randomise, tiny_dflash, tiny_dspark, tiny_head, tiny_hybrid, tiny_p_eagle, tiny_target
from tiny_engine import resolved, serve
from tiny_mixtures import GROUPED, YARN, untrained, v3
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from uncaptured import UncapturedGraphs

from eagle_kit.config.drafts.eagle1 import Eagle1HeadConfig
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import ShapeTable, SpecShape
from eagle_kit.core.stats import SpecStats
from eagle_kit.drafts.base.draft_model import DraftModel, HeadDraftModel, StandaloneDraftModel
from eagle_kit.drafts.eagle1.head import Eagle1Head
from eagle_kit.drafts.eagle1.kind import EAGLE1
from eagle_kit.drafts.eagle1.static_tree import StaticDrafter
from eagle_kit.drafts.eagle3.head import Eagle3Config, Eagle3Head
from eagle_kit.drafts.mtp.head import MTPConfig, MTPHead
from eagle_kit.engine.engine import Engine
from eagle_kit.engine.graphs.cpu_graph import CpuGraphs
from eagle_kit.engine.request import Request
from eagle_kit.models.draft_head import DraftHead
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.targets.target import Target
from eagle_kit.objective.loss import TTTBatch
from eagle_kit.objective.row_plan import make_row_plan
from eagle_kit.objective.target_features import capture_features
from eagle_kit.objective.ttt import ttt_forward_backward

VOCABULARY = 11
MAX_TOKENS = 16
MAX_CONTEXT = 96

SHAPES = {
    "eagle3": ("1,1,2", "4,1,5", "5,4,16", "10,8,60"),
    "eagle1": ("1,1,2", "4,1,5", "3,2,6", "6,8,60"),
    "p-eagle": ("1,1,2", "5,1,6", "4,3,14", "3,8,40"),
    "dflash": ("1,1,2", "5,1,6", "4,3,14", "3,8,40"),
    "dspark": ("1,1,2", "5,1,6", "4,3,14", "3,8,40"),
    "one module": ("1,1,2", "3,1,4", "4,4,16", "10,8,60"),
    "three modules": ("1,1,2", "3,1,4", "3,4,14", "2,8,40"),
    "n-grams": ("1,1,2", "4,1,5", "5,4,16", "8,4,12"),
    "whole model": ("1,1,2", "4,1,5", "5,4,16", "10,8,60"),
    "static tree": (str(StaticDrafter.topology.shape),) * 4,
    "none": ("none",) * 4,
}
"""By kind of draft: a single token, a chain, a tree, and a wide tree; the draft runs 72 nodes in 10,8,60."""

TEXTS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{}],
    "seeded": [{"temperature": 0.9, "seed": 3}],
    "filtered": [{"temperature": 1.2, "top_k": 7, "top_p": 0.9, "min_p": 0.02, "seed": 6}],
    "penalised": [
        {
            "temperature": 0.7,
            "seed": 4,
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.3,
            "presence_penalty": -0.2,
            "logit_bias": {3: 1.5, 4: -100.0},
        }
    ],
}
TEXTS["mixed"] = [each for (each,) in TEXTS.values()]
"""Sampling parameters of the requests, which take them in turn."""

AXES = {
    "target": ("grouped queries", "latents", "recurrent layers", "experts", "sliding windows"),
    "draft": tuple(SHAPES),
    "shape": ("token", "chain", "tree", "wide tree"),
    "text": tuple(TEXTS),
    "policy": ("one shape", "shape by batch", "shapes and windows that change"),
    "graphs": ("off", "replayed", "recorded"),
    "page_size": (1, 3, 16, 64),
    "batch": (1, 3, 5),
    "lag": (0, 1),
    "prefill_tokens": (512, 7),
    "prefix_cache": (True, False),
    "pool": ("ample", "small"),
}

PAIRWISE = pairwise(AXES)
COSTS = {"latents": 2.0, "sliding windows": 1.5, "recorded": 1.0, "shapes and windows that change": 1.0}
DIAGONAL = covering_values(PAIRWISE, AXES, COSTS)

FIRST = [(3 * i * i + i) % VOCABULARY for i in range(22)]
PROMPTS = [
    FIRST,
    [4],
    [(7 * i) % VOCABULARY for i in range(12)],
    [*FIRST[:18], 9, 2, 9, 2, 5],
    [1, 2, 3],
]
"""One of a single token, and two that begin alike."""


def name_of(case: Case) -> str:
    """Name of a case in pytest's output."""
    return "-".join(str(value).replace(" ", "_") for value in case.values())


def sampling_of(text: str, number: int) -> SamplingParams:
    """Sampling parameters of a request by its number."""
    kinds = TEXTS[text]
    return SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, **kinds[number % len(kinds)])


def make_requests(text: str, prompts: list[list[int]], first: int = 0) -> list[Request]:
    """Requests for ``prompts``, numbered from ``first`` on."""
    return [Request(i, list(prompt), sampling_of(text, i)) for i, prompt in enumerate(prompts, first)]


def tokens_of(requests: list[Request]) -> list[list[int]]:
    """Responses of requests."""
    return [request.token_ids for request in requests]


def make_target(kind: str, folder: Path) -> Target:
    """A random target of a kind; ``folder`` is for one that is loaded through transformers."""
    if kind == "grouped queries":
        return tiny_target(VOCABULARY)
    if kind == "recurrent layers":
        return tiny_hybrid(VOCABULARY)
    if kind == "latents":
        rope = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
        return randomise(untrained(v3(vocab_size=VOCABULARY, rope_parameters=rope)), 0, 0.2)
    if kind == "experts":
        sizes = {"num_experts": 9, "num_experts_per_tok": 4, "moe_intermediate_size": 20, "head_dim": 12}
        config = Qwen3MoeConfig(**GROUPED | {"vocab_size": VOCABULARY}, **sizes)
        return randomise(untrained(config), 0, 0.2)
    assert kind == "sliding windows"
    config = family_config("gemma2")
    config.vocab_size = VOCABULARY
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomise(theirs, 0, 0.15).save_pretrained(folder)
    return load_target(folder)


def untrained_head(kind: str, target: Target) -> DraftHead:
    """A random head of a kind."""
    config = target.config
    if kind in ("eagle3", "static tree"):
        if config.mla is None:
            return tiny_head(target, 9, std=0.1)
        latent = randomise(Eagle3Head(Eagle3Config.for_target(config, 9, latent=True)), 1, 0.1)
        other = tiny_head(target, 9)
        latent.set_vocab_map(other.d2t, other.t2d)
        return latent
    if kind == "eagle1":
        head = randomise(Eagle1Head(EAGLE1.new_config(Eagle1HeadConfig(), config)), 1, 0.1)
        return head.bind(target.lm_head)
    if kind == "p-eagle":
        return tiny_p_eagle(target, 9, std=0.1, num_layers=2)
    if kind == "dflash":
        return tiny_dflash(target, std=0.1, num_layers=2)
    if kind == "dspark":
        return tiny_dspark(target, std=0.1, num_layers=2, block_size=5)
    assert kind in ("one module", "three modules")
    # Modules have the target's own attention where it is of latents, and else grouped queries.
    decoder = config if config.mla is not None else tiny_target(VOCABULARY).config
    count = 3 if kind == "three modules" else 1
    return randomise(MTPHead(MTPConfig(decoder, num_modules=count)), 1, 0.1).bind(target.lm_head)


class Texts:
    """Responses that drafts learn from, packed into one row."""

    def __init__(self, target: Target, texts: list[list[int]]) -> None:
        self.target = target
        lengths = torch.tensor([len(text) for text in texts])
        starts = lengths.cumsum(0) - lengths
        self.ids = torch.cat([torch.tensor(text) for text in texts])
        self.doc_start = starts.repeat_interleave(lengths)
        self.number = torch.arange(len(texts)).repeat_interleave(lengths)
        self.spans = [(int(a), int(a + n)) for a, n in zip(starts, lengths, strict=True)]

    def teach_head(self, head: DraftHead, num_updates: int = 10) -> DraftHead:
        """Train a head on the target's distributions by training-time test."""
        target = self.target
        plan = make_row_plan(self.number, self.doc_start, 3)
        weights = [torch.full((count,), 1 / count) for count in plan.counts]
        features = capture_features(target, self.ids, self.doc_start, head.capture, plan.is_teacher)
        rows = target.head_weight if head.token_map is None else target.head_weight[head.token_map]
        batch = TTTBatch(self.ids, plan, weights, features, target.embed_tokens.weight, rows)

        head.requires_grad_(True)
        optimizer = torch.optim.AdamW(head.parameters(), lr=2e-2)
        for _ in range(num_updates):
            optimizer.zero_grad()
            ttt_forward_backward(head, batch)
            optimizer.step()
        return head.eval().requires_grad_(False)

    def teach_model(self, model: Target, num_updates: int = 10) -> Target:
        """Train a whole model on the next tokens."""
        positions = torch.arange(len(self.ids)) - self.doc_start
        has_next = torch.arange(1, len(self.ids))[self.doc_start[1:] == self.doc_start[:-1]]

        model.requires_grad_(True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
        for _ in range(num_updates):
            optimizer.zero_grad()
            hidden = model(self.ids, positions, model.packed(self.spans)).hidden
            F.cross_entropy(model.logits(hidden[has_next - 1]), self.ids[has_next]).backward()
            optimizer.step()
        return model.eval().requires_grad_(False)


class Plain(NamedTuple):
    """Plain decoding of a target: ``responses`` to the ``prompts``, of which the last goes on behind the
    response to the first."""

    prompts: list[list[int]]
    responses: list[list[int]]


class Conformance:
    """Targets, trained drafts and expected texts, each made when it is first needed.

    Args:
        make_folder: makes an empty folder for a name.
    """

    def __init__(self, make_folder: Callable[[str], Path]) -> None:
        self.make_folder = make_folder
        self.target = cache(self._target)
        self.plain = cache(self._plain)
        self.texts = cache(self._texts)
        self.draft = cache(self._draft)
        self.stats_alone = cache(self._stats_alone)

    def _target(self, kind: str) -> Target:
        return make_target(kind, self.make_folder("target"))

    def _plain(self, target: str, text: str) -> Plain:
        """Responses of plain decoding, without any option."""
        config = resolved(len(PROMPTS), MAX_CONTEXT, kv_tokens=500, prefix_cache=False)
        engine = Engine(self.target(target), None, config)
        first = make_requests(text, PROMPTS)
        serve(engine, first)
        prompts = [*PROMPTS, [*PROMPTS[0], *first[0].token_ids, 9]]
        last = make_requests(text, prompts[-1:], len(PROMPTS))
        serve(engine, last)
        responses = tokens_of([*first, *last])
        if text == "greedy":
            self.check_greedy(target, prompts, responses)
        return Plain(prompts, responses)

    @torch.no_grad()
    def check_greedy(self, target: str, prompts: list[list[int]], responses: list[list[int]]) -> None:
        """Check that every token of the responses is the most likely one by a forward over the whole text."""
        model = self.target(target)
        for prompt, response in zip(prompts, responses, strict=True):
            ids = torch.tensor([*prompt, *response])
            hidden = model(ids, torch.arange(len(ids)), model.causal()).hidden
            best = model.logits(hidden).argmax(-1).tolist()
            assert best[len(prompt) - 1 : -1] == response, "the engine's plain text is not the target's"

    def _texts(self, target: str) -> Texts:
        """What drafts of a target learn from."""
        plain = self.plain(target, "greedy")
        return Texts(
            self.target(target), [prompt + response for prompt, response in zip(*plain, strict=True)]
        )

    def _draft(self, target: str, kind: str) -> DraftModel | None:
        """A draft that has learned the target's responses; None where there is no model."""
        if kind in ("none", "n-grams"):
            return None
        texts = self.texts(target)
        model = self.target(target)
        if kind == "whole model":
            small = tiny_target(VOCABULARY, num_layers=2, seed=5, std=0.1)
            return StandaloneDraftModel(texts.teach_model(small))
        if kind == "static tree":
            return self.draft(target, "eagle3")
        return HeadDraftModel(texts.teach_head(untrained_head(kind, model)), model)

    def engine(self, case: Case) -> Engine:
        """The engine of a case."""
        batch = case["batch"]
        page_size = case["page_size"]
        graphs = case["graphs"]
        draft = case["draft"]
        options = {name: case[name] for name in ("page_size", "lag", "prefill_tokens", "prefix_cache")}
        if draft == "n-grams":
            options["algorithm"] = "NGRAM"
        if draft == "static tree":
            options["tree"] = "static"
        if graphs == "replayed":  # batches are padded
            options["batch_sizes"] = tuple(sorted({1, 2, batch}))

        options["shape"] = str(shape_of(case))
        config = resolved(batch, MAX_CONTEXT, **options)
        shapes = shapes_of(case)
        longest = max(len(prompt) for prompt in self.plain(case["target"], case["text"]).prompts)
        pages = config.num_pages_of(longest + MAX_TOKENS + config.num_lookahead_tokens(max_steps(shapes)))
        pages = pages if case["pool"] == "small" else pages * batch + 4
        config = resolved(batch, MAX_CONTEXT, **options, kv_tokens=pages * page_size)

        engine = Engine(self.target(case["target"]), self.draft(case["target"], draft), config)
        if graphs == "replayed":
            engine.runner.graphs = UncapturedGraphs()
        if graphs == "recorded":
            engine.runner.graphs = CpuGraphs(1)
        engine.use_shape(shapes)
        return engine

    def run(self, case: Case) -> tuple[Engine, list[Request]]:
        """Serve the requests of a case, and then one that goes on behind the first -> its engine and all
        requests."""
        prompts = self.plain(case["target"], case["text"]).prompts
        engine = self.engine(case)
        first = make_requests(case["text"], prompts[:-1])
        serve(engine, first)
        last = make_requests(case["text"], prompts[-1:], len(first))
        serve(engine, last)
        return engine, [*first, *last]

    def _stats_alone(self, target: str, draft: str, shape: str, text: str) -> list[SpecStats]:
        """Statistics of requests that are served one by one, without any option."""
        case = {"target": target, "draft": draft, "shape": shape, "text": text}
        _, requests = self.run(DEFAULTS | case)
        return [request.stats.spec for request in requests]

    def check(self, case: Case) -> int:
        """Check the texts of a case, and that its options did what they are for -> the number of accepted
        drafts."""
        target = case["target"]
        draft = case["draft"]
        text = case["text"]
        engine, requests = self.run(case)
        assert tokens_of(requests) == self.plain(target, text).responses
        num_accepted = check_drafts(case, engine)
        check_options(case, engine, requests)

        # What is accepted depends on no option but the shape. With a lag a request that is sent back loses
        # the cycle that is on its way.
        is_sent_back_amid = case["lag"] == 1 and case["pool"] == "small"
        has_model = draft not in ("none", "n-grams")
        if has_model and case["policy"] == "one shape" and not is_sent_back_amid:
            stats = [request.stats.spec for request in requests]
            assert stats == self.stats_alone(target, draft, case["shape"], text)
        return num_accepted


DEFAULTS = {
    "policy": "one shape",
    "graphs": "off",
    "page_size": 16,
    "batch": 1,
    "lag": 0,
    "prefill_tokens": 512,
    "prefix_cache": False,
    "pool": "ample",
}
"""Options of an engine that serves one request after the other."""


def shape_of(case: Case) -> SpecShape:
    """Shape of a case for its kind of draft."""
    return SpecShape.parse(SHAPES[case["draft"]][AXES["shape"].index(case["shape"])])


def shapes_of(case: Case) -> SpecShape | ShapeTable | Restless:
    """What the engine of a case speculates with. A static tree has one shape or none, and plain decoding has
    no other."""
    shape = shape_of(case)
    policy = case["policy"]
    draft = case["draft"]
    if draft == "none" or policy == "one shape":
        return shape
    if draft == "static tree":
        return ShapeTable.parse(f"{shape} 3:none")
    if policy == "shape by batch":
        return ShapeTable.parse(f"{shape} 2:2,1,3 4:none")
    return Restless(0, (shape, SpecShape(2, 1, 3)), most_plain=4)


def max_steps(shapes: SpecShape | ShapeTable | Restless) -> int:
    """Steps of the deepest shape."""
    if isinstance(shapes, SpecShape):
        return shapes.steps
    return max(shape.steps for shape in shapes.shapes)


def check_drafts(case: Case, engine: Engine) -> int:
    """Check that drafts were refused, or that there were none -> how many were accepted."""
    totals = engine.totals
    if case["draft"] == "none":
        assert totals.num_draft_tokens == 0
        return 0
    num_accepted = sum(totals.spec.num_accepted_at)
    assert num_accepted < totals.num_draft_tokens, "nothing was refused, so nothing was tested"
    return num_accepted


def check_options(case: Case, engine: Engine, requests: list[Request]) -> None:
    """Check that the options of a case had their effects."""
    graphs = engine.runner.graphs
    if case["graphs"] != "off":
        assert graphs.num_graphs > 0
    if case["graphs"] == "recorded" and engine.target.host_read() is None:
        assert not graphs._refused
    if not case["prefix_cache"]:
        assert engine.totals.num_cached_prompt_tokens == 0
    elif case["pool"] == "ample" and case["page_size"] < len(PROMPTS[0]):
        # States of the first prompt stay where there is one of every request.
        page_pool = engine.scheduler.page_pool
        if not page_pool.has_snapshots or page_pool.num_snapshots >= len(requests):
            assert requests[-1].stats.num_cached_tokens > 0
    if case["pool"] == "small" and case["batch"] > 1 and case["page_size"] < 16:
        assert engine.totals.num_preemptions > 0
