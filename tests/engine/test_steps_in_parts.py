"""A step that a GPU has too little memory for runs in parts, and its texts are those of a whole step.

Operations of a CPU raise torch's error of a GPU here, but not where slots and recurrent states are
written and results are sent. On a GPU those are single kernels and copies to the host, which need no
memory.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from families import family_model
from tiny import tiny_head, tiny_target
from tiny_engine import PROMPTS, make_engine
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import ShapeTable
from eagle_kit.engine import cycle
from eagle_kit.engine.graphs.cuda_graph import HostCopy
from eagle_kit.engine.llm import LLM
from eagle_kit.engine.request import Request
from eagle_kit.engine.runner import Runner
from eagle_kit.engine.scheduler import Chunk
from eagle_kit.engine.slots import Slots

ERROR = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which "
    "1.00 GiB is free."
)


class Failing(TorchDispatchMode):
    """Operations fail by the function ``fails``, but not while the mode is paused."""

    def __init__(self, fails) -> None:
        super().__init__()
        self.fails = fails
        self.is_paused = False
        self.num_failures = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not self.is_paused and self.fails(out):
            self.num_failures += 1
            raise torch.OutOfMemoryError(ERROR)
        return out


@contextmanager
def failing(monkeypatch, fails, begins=lambda work: None) -> Iterator[Failing]:
    """Within, launches of cycles and prompts fail; ``begins`` is called with the requests or the chunks when
    one begins."""
    mode = Failing(fails)

    def paused(function):
        def call(*args, **kwargs):
            before = mode.is_paused
            mode.is_paused = True
            try:
                return function(*args, **kwargs)
            finally:
                mode.is_paused = before

        return call

    def launched(function):
        def call(self, work, *rest):
            begins(work)
            with mode:
                return function(self, work, *rest)

        return call

    with monkeypatch.context() as patches:
        for name in ("scatter", "append_pending", "drop_pending", "keep_last_pending"):
            patches.setattr(Slots, name, paused(getattr(Slots, name)))
        patches.setattr(HostCopy, "__init__", paused(HostCopy.__init__))
        patches.setattr(cycle, "commit_states", paused(cycle.commit_states))
        patches.setattr(Runner, "decode", launched(Runner.decode))
        patches.setattr(Runner, "prefill", launched(Runner.prefill))
        yield mode


def requests_of(prompts=PROMPTS, **params) -> list[Request]:
    return [
        Request(i, list(prompt), SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **params}))
        for i, prompt in enumerate(prompts)
    ]


def served(engine, requests) -> list[list[int]]:
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        engine.step()
        engine.check()
    assert engine.page_pool.num_available == engine.page_pool.num_pages
    return [request.token_ids for request in requests]


def hybrid():
    from eagle_kit.models.loading.loaded import loaded_target

    return loaded_target(family_model("qwen3_next"))


CASES = {
    "plain": ("none", {}, {}),
    "chain": ("3,1,4", {}, {}),
    "tree, lag 1": ("3,2,6", {"lag": 1}, {}),
    "tree or plain by batch size": ("3,2,6 3:none", {"lag": 1}, {}),
    "penalties, drawn": (
        "3,1,4",
        {"lag": 1},
        {"temperature": 1.0, "repetition_penalty": 1.2, "seed": 3},
    ),
    "recurrent": ("none", {"lag": 1}, {}),
    "n-grams": ("3,2,6", {"algorithm": "NGRAM"}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_texts_are_those_of_whole_steps(case, monkeypatch):
    shape, options, params = CASES[case]
    target = hybrid() if case == "recurrent" else tiny_target(vocab_size=11)
    head = None if case in ("recurrent", "n-grams") else tiny_head(target, 11)

    def engine_of():
        engine = make_engine((target, head), 3, 4, prefill_tokens=24, **options)
        engine.use_shape(ShapeTable.parse(shape))
        return engine

    expected = served(engine_of(), requests_of(**params))

    # Every other launch fails, at a random operation, but not the smallest parts, nor with recurrent layers
    # prompts on their own.
    rng = random.Random(0)
    left = [0]
    safe = [0]

    def begins(work):
        left[0] = 0
        is_prefill = isinstance(work[0], Chunk)
        if is_prefill and safe[0]:
            safe[0] -= 1
            return
        is_large = len(work) > 1
        if is_prefill:
            is_large = sum(chunk.stop - chunk.start for chunk in work) > 4
        if is_large and rng.random() < 0.5:
            left[0] = rng.randint(1, 150)
            if is_prefill and case == "recurrent":
                safe[0] = len(work)

    def fails(out):
        left[0] -= 1
        return left[0] == 0

    engine = engine_of()
    with failing(monkeypatch, fails, begins) as mode:
        found = served(engine, requests_of(**params))
    assert mode.num_failures >= 10 and engine.totals.num_steps_in_parts >= 8
    assert found == expected
    assert engine.totals.num_finished["length"] == len(PROMPTS), "nobody was given up"


def too_large(most: int):
    """Tensors of more than ``most`` rows of the target's hidden states do not fit."""

    def fails(out):
        return isinstance(out, torch.Tensor) and out.dim() == 2 and out.shape[1] == 32 and len(out) > most

    return fails


def test_prompts_are_computed_one_by_one_and_then_by_halves(monkeypatch):
    target = tiny_target(vocab_size=11, hidden_size=32)
    prompts = [[i % 11 for i in range(length)] for length in (5, 60, 9)]
    expected = served(make_engine((target, None), 3, 4), requests_of(prompts))
    engine = make_engine((target, None), 3, 4, prefill_tokens=96, mixed_prefill_tokens=96)
    with failing(monkeypatch, too_large(20)) as mode:
        assert served(engine, requests_of(prompts)) == expected
    assert mode.num_failures == 4, "all together, 60 tokens, and twice 30"


def test_the_longest_request_is_given_up_and_no_other(monkeypatch):
    target = tiny_target(vocab_size=11, hidden_size=32)
    prompts = [[i % 11 for i in range(length)] for length in (5, 60, 9)]
    expected = served(make_engine((target, None), 3, 4, prefix_cache=False), requests_of(prompts))

    # Keys of more than 40 positions do not fit.
    engine = make_engine((target, None), 3, 4, prefix_cache=False)
    requests = requests_of(prompts)
    decode = Runner.decode
    prefill = Runner.prefill

    def check(lengths):
        if max(lengths) > 40:
            raise torch.OutOfMemoryError(ERROR)

    def decode_short(self, requests, *rest):
        check([request.num_tokens for request in requests])
        return decode(self, requests, *rest)

    def prefill_short(self, chunks):
        check([chunk.stop for chunk in chunks])
        return prefill(self, chunks)

    monkeypatch.setattr(Runner, "decode", decode_short)
    monkeypatch.setattr(Runner, "prefill", prefill_short)
    found = served(engine, requests)
    assert [request.finish_reason for request in requests] == ["length", "error", "length"]
    assert [found[0], found[2]] == [expected[0], expected[2]]
    failure = requests[1].response.failure
    assert "out of memory while computing a step: 2.00 GiB were asked for" in failure.cause
    assert "max_context" in failure.remedy


def test_responses_that_grow_too_long_are_given_up_one_after_another(monkeypatch):
    """The longest goes first, at each step that needs it, and tokens so far stay."""
    target = tiny_target(vocab_size=11, hidden_size=32)
    engine = make_engine((target, tiny_head(target, 11)), 3, 4, lag=1)
    engine.use_shape(ShapeTable.parse("3,1,4"))
    decode = Runner.decode

    def decode_few(self, requests, *rest):
        if sum(request.num_tokens for request in requests) > 30:
            raise torch.OutOfMemoryError(ERROR)
        return decode(self, requests, *rest)

    monkeypatch.setattr(Runner, "decode", decode_few)
    requests = requests_of([[1, 2], [3, 4, 5], [6]], max_tokens=60)
    served(engine, requests)
    assert {request.finish_reason for request in requests} == {"error"}
    assert all(27 <= request.num_tokens <= 40 for request in requests)


def test_a_call_of_python_raises_the_error_of_the_request_that_did_not_fit(monkeypatch):
    llm = LLM(
        tiny_target(vocab_size=11, hidden_size=32),
        max_context=128,
        max_batch_size=2,
        graph_mode="off",
    )
    llm.generate([[1, 2]], max_tokens=2)
    prefill = Runner.prefill

    def prefill_short(self, chunks):
        if max(chunk.stop for chunk in chunks) > 40:
            raise torch.OutOfMemoryError(ERROR)
        return prefill(self, chunks)

    monkeypatch.setattr(Runner, "prefill", prefill_short)
    with pytest.raises(UserError, match="out of memory while computing a step"):
        llm.generate([[1] * 60, [2, 3]], max_tokens=4)
    assert not llm.engine().has_work
    assert len(llm.generate([[1, 2, 3]], max_tokens=4)[0].token_ids) == 4


def test_a_copy_of_pages_that_fails_is_made_again(monkeypatch):
    """The host's record of a page table changes only when the device's has."""
    from eagle_kit.engine import slots

    target = tiny_target(vocab_size=11)
    expected = served(make_engine((target, None), 2, 4), requests_of(PROMPTS[:2]))
    engine = make_engine((target, None), 2, 4)
    to_device = slots.to_device
    fails = iter([True, False] * 1000)

    def sent(*args):
        if next(fails):
            raise torch.OutOfMemoryError(ERROR)
        return to_device(*args)

    monkeypatch.setattr(slots, "to_device", sent)
    assert served(engine, requests_of(PROMPTS[:2])) == expected
