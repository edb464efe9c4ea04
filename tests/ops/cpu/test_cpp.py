"""Operations in C++: against fp64, and to the bit against themselves in other windows, batches, pages, chunks
and threads; and what is said where they cannot be compiled."""

import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tiny_engine import PROMPTS
from tiny_trained import trained_models

from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.engine.llm import LLM
from eagle_kit.ops.accept import most_likely
from eagle_kit.ops.attention.mla import mla_window_attention
from eagle_kit.ops.attention.prefill import PrefillPlan, chunk_attention, paged_prefill_attention
from eagle_kit.ops.attention.variant import AttentionVariant, Limits
from eagle_kit.ops.attention.window import WindowPlan, ancestor_bits, compiled, window_attention
from eagle_kit.ops.commit import commit_path
from eagle_kit.ops.cpu import cpp
from eagle_kit.ops.draft_topk import reference, topk_of_logits
from eagle_kit.ops.linear import panels
from eagle_kit.ops.norm import add_rms_norm, rms_norm
from eagle_kit.ops.rope import Rotation, rope_store
from eagle_kit.ops.swiglu import swiglu

needs_compiler = pytest.mark.skipif(not cpp.available(), reason=f"no C++ here: {cpp.problem()}")
PAGE, SCRATCH, DUMMY = 4, 160, 200
VARIANTS = {
    "plain": AttentionVariant(0.2),
    "window, cap, sinks": AttentionVariant(0.2, Limits(window=5), 2.0, torch.linspace(-1, 1, 6)),
    "chunks": AttentionVariant(0.2, Limits(chunk=8)),
}


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@needs_compiler
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (5, 33), (16, 8), (71, 130), (960, 576)])
def test_linear_is_that_of_fp64_and_a_row_has_the_same_bits_in_any_company(outputs, inputs, bias):
    x, weight = drawn(401, inputs), drawn(outputs, inputs, seed=1)
    biases = drawn(outputs, seed=2) if bias else None
    packed = panels.pack(weight)
    together = panels.matmul(x, packed, biases)
    exact = torch.nn.functional.linear(
        x.double(), weight.double(), None if biases is None else biases.double()
    )
    torch.testing.assert_close(together.double(), exact, atol=3e-6 * inputs**0.5, rtol=1e-4)
    for rows in range(1, 31):
        assert torch.equal(panels.matmul(x[7 : 7 + rows], packed, biases), together[7 : 7 + rows]), rows
    assert panels.matmul(x[:0], packed, biases).shape == (0, outputs)


@needs_compiler
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (31, 33), (64, 8), (71, 130), (960, 576)])
def test_weights_of_bfloat16_take_half_the_memory_and_change_no_bit(outputs, inputs):
    x, weight = drawn(70, inputs), drawn(outputs, inputs, seed=1).bfloat16().float()
    packed, in_full = panels.pack(weight), panels.pack(torch.cat([weight, torch.full((1, inputs), 1 / 3)]))
    assert packed.panels.dtype == torch.bfloat16 and in_full.panels.dtype == torch.float32
    for rows in (1, 2, 7, 12, 13, 14, 15, 29, 60, 70):
        got, want = (panels.matmul(x[:rows], each) for each in (packed, in_full))
        assert torch.equal(got, want[:, :outputs]), rows


@needs_compiler
def test_threads_change_no_bit(two_threads):
    x, packed = drawn(9, 576), panels.pack(drawn(1000, 576, seed=1))
    shared = panels.matmul(x, packed)
    for threads in (1, 4, 3, 1, 2):
        torch.set_num_threads(threads)
        for count in range(200):
            assert torch.equal(panels.matmul(x, packed), shared), threads
            time.sleep(0.001 * (count % 20 == 0))  # by then threads have gone to sleep


@needs_compiler
@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "OMP_PROC_BIND"])
def test_threads_that_may_not_spin_or_are_bound_change_no_bit(name):
    code = (
        "import torch; torch.set_num_threads(2)\n"
        "from eagle_kit.ops.cpu import cpp\n"
        "from eagle_kit.ops.linear import panels\n"
        "assert cpp.available()\n"
        "draw = torch.Generator().manual_seed(0)\n"
        "x, weight = torch.randn(9, 576, generator=draw), torch.randn(500, 576, generator=draw)\n"
        "packed = panels.pack(weight)\n"
        "shared = [panels.matmul(x, packed) for _ in range(50)]\n"
        "torch.set_num_threads(1)\n"
        "assert all(torch.equal(panels.matmul(x, packed), each) for each in shared)\n"
    )
    values = {"OMP_WAIT_POLICY": "passive", "OMP_PROC_BIND": "true"}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OMP_")}
    subprocess.run([sys.executable, "-c", code], env=environment | {name: values[name]}, check=True)


@needs_compiler
def test_callers_at_the_same_time_change_no_bit(two_threads):
    packed = panels.pack(drawn(500, 200, seed=1))
    inputs = [drawn(9, 200, seed=seed) for seed in range(4)]
    expected = [panels.matmul(x, packed) for x in inputs]

    def call(number):
        return all(torch.equal(panels.matmul(inputs[number], packed), expected[number]) for _ in range(500))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(4)))


@needs_compiler
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_waits_for_no_thread_that_it_lacks(two_threads):
    x, packed = drawn(9, 576), panels.pack(drawn(1000, 576, seed=1))
    expected = panels.matmul(x, packed)
    child = os.fork()
    if not child:
        signal.alarm(60)  # ends it where it waits for threads that it does not have
        code = 1
        try:
            code = int(not (panels.matmul(x, packed) == expected).all())
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(panels.matmul(x, packed), expected)


class Text:
    """Keys and values of two texts of 60 tokens in pages, with room for a window behind the pages."""

    def __init__(self, size=24, page_size=PAGE, seed=3):
        pages = torch.randperm(SCRATCH // page_size, generator=torch.Generator().manual_seed(seed))
        each = -(-60 // page_size)
        self.table, self.page_size = pages[: 2 * each].view(2, each), page_size
        self.keys, self.values = drawn(2, 2, 60, size), drawn(2, 2, 60, size, seed=1)  # [B, Hkv, C, D]
        self.queries = drawn(2, 60, 6, size, seed=2)
        self.k, self.v = torch.zeros(2, DUMMY + 1, size), torch.zeros(2, DUMMY + 1, size)
        for b in range(2):
            rows = self.rows(b, torch.arange(60))
            self.k[:, rows], self.v[:, rows] = self.keys[b], self.values[b]

    def rows(self, b, positions):
        size = self.page_size
        return self.table[b, positions // size] * size + positions % size

    def plan(self, places, prefix, parents):
        """Put the keys of windows behind ``prefix`` tokens, whose node j is the token at ``places[j]``, in
        place."""
        count = len(places)
        for b in range(2):
            at = torch.arange(SCRATCH + 16 * b, SCRATCH + 16 * b + count)
            self.k[:, at], self.v[:, at] = self.keys[b][:, places], self.values[b][:, places]
        return WindowPlan(
            page_table=self.table,
            page_size=self.page_size,
            prefix_lens=torch.full((2,), prefix),
            first_position=0,
            scratch_start=SCRATCH,
            scratch_stride=16,
            num_keys=count,
            ancestors=ancestor_bits(torch.tensor(parents).expand(2, -1), count),
            num_columns=64,
            dummy_row=DUMMY,
            dtype=torch.float32,
        )

    def attend(self, places, prefix, parents, variant, backend=None):
        """Attention of such windows."""
        plan, q = self.plan(places, prefix, parents), self.queries[:, places]
        return window_attention(q, self.k, self.v, plan, variant, backend=backend)


@needs_compiler
@torch.no_grad()
@pytest.mark.parametrize("size", [8, 24, 64, 33])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_windows_are_those_of_the_reference(variant, size):
    text = Text(size)
    for places, prefix, parents in (([20], 20, [0]), ([37, 38, 38, 39, 39, 40], 37, [0, 0, 0, 1, 2, 3])):
        got = text.attend(places, prefix, parents, variant)
        torch.testing.assert_close(got, text.attend(places, prefix, parents, variant, "reference"))


@needs_compiler
@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_a_token_has_the_same_bits_in_chains_trees_prompts_and_alone(variant):
    """Token 43 is the last of: itself, a chain of six, a branch of a tree, and a chunk of a prompt."""
    text = Text()
    alone = text.attend([43], 43, [0], variant)[:, -1]
    assert torch.equal(text.attend([*range(38, 44)], 38, [0, 0, 1, 2, 3, 4], variant)[:, -1], alone)
    places, parents = [40, 50, 41, 51, 42, 52, 43], [0, 0, 0, 1, 2, 3, 4]
    assert torch.equal(text.attend(places, 40, parents, variant)[:, -1], alone)
    for page_size in (1, 16):
        assert torch.equal(Text(page_size=page_size).attend([43], 43, [0], variant)[:, -1], alone)
    for starts in ([0, 0], [40, 30], [43, 43]):
        sizes = [44 - start for start in starts]
        q = torch.cat([text.queries[b, start:44] for b, start in enumerate(starts)])
        borders = torch.tensor([0, sizes[0], sum(sizes)])
        plan = PrefillPlan(text.table, PAGE, borders, torch.tensor(starts), 0, max(sizes))
        out = paged_prefill_attention(q, text.k, text.v, plan, variant)
        assert torch.equal(out[borders[1:] - 1], alone)
        chunk = chunk_attention(q[: sizes[0]], text.keys[0], text.values[0], variant, start=starts[0])
        assert torch.equal(chunk[-1], alone[0])


@needs_compiler
@torch.no_grad()
@pytest.mark.parametrize("size", [1, 7, 8, 33, 1001])
def test_the_most_likely_token_is_that_of_torch(size, two_threads):
    logits = (2 * drawn(3, 40, size)).round()  # equals: the lowest of them
    logits[0, 1] = float("-inf")
    logits[0, 2, size // 2] = float("inf")
    logits[1, 3, size - 1] = float("nan")
    logits[1, 4, size // 2 :] = float("nan")
    logits[1, 5] = torch.tensor(-0.0)
    for given in (logits, logits.transpose(0, 1), logits[0, 0]):
        got, want = most_likely(given), most_likely(given, backend="reference")
        assert torch.equal(want.tokens, given.argmax(-1))
        assert torch.equal(got.tokens, want.tokens)
        torch.testing.assert_close(got.values, given.amax(-1), rtol=0, atol=0, equal_nan=True)


@needs_compiler
@torch.no_grad()
@pytest.mark.parametrize(("size", "topk"), [(1, 1), (16, 16), (17, 3), (700, 8), (8192, 4), (150_000, 2)])
def test_the_most_likely_tokens_are_those_of_the_reference(size, topk, two_threads):
    exact, coarse = 3 * drawn(9, size), drawn(9, size, seed=1).round()  # many equals
    zeros = torch.where(drawn(9, size) < 0, 0.0, -0.0)
    for logits in (exact, coarse, zeros, -coarse.abs() - 1, torch.arange(9.0 * size).view(9, size)):
        ids, scores = topk_of_logits(logits, topk)
        want_ids, _ = reference.topk_of_logits(logits, topk)
        assert torch.equal(ids, want_ids)
        torch.testing.assert_close(scores, logits.double().log_softmax(-1).gather(1, ids).float())
        unranked, none = topk_of_logits(logits, topk, normalized=False)
        assert torch.equal(unranked, ids) and not none.any()
    odd = exact.clone()
    odd[:, ::3] = float("nan")
    odd[0], odd[1] = float("nan"), float("-inf")
    for row in topk_of_logits(odd, topk)[0].tolist():
        assert len(set(row)) == topk and 0 <= min(row) <= max(row) < size
    finite = odd[2:].nan_to_num(nan=float("-inf"))
    kept = min(topk, int(finite[0].isfinite().sum()))
    assert torch.equal(topk_of_logits(odd[2:], topk)[0][:, :kept], topk_of_logits(finite, topk)[0][:, :kept])


@needs_compiler
@torch.no_grad()
def test_threads_and_long_windows_change_no_bit_of_attention(two_threads):
    text, variant = Text(), VARIANTS["plain"]
    places, parents = [*range(40, 56)], [0, *range(15)]
    shared = text.attend(places, 40, parents, variant)
    torch.set_num_threads(1)
    assert torch.equal(text.attend(places, 40, parents, variant), shared)


@needs_compiler
@torch.no_grad()
def test_latents_have_the_same_bits_in_any_window():
    """One key for 16 heads, whose first 32 numbers are the value."""
    rows, q = drawn(300, 48), drawn(1, 6, 16, 48, seed=1)

    def attend(nodes, prefix, parents):
        rows[200 : 200 + len(nodes)] = rows[100 + torch.tensor(nodes)]
        plan = WindowPlan(
            page_table=torch.arange(50)[None],
            page_size=4,
            prefix_lens=torch.tensor([prefix]),
            first_position=0,
            scratch_start=200,
            scratch_stride=8,
            num_keys=len(nodes),
            ancestors=ancestor_bits(torch.tensor([parents]), len(nodes)),
            num_columns=64,
            dummy_row=299,
            dtype=torch.float32,
        )
        return mla_window_attention(q[:, [node % 6 for node in nodes]], rows, plan, 0.1, latent_dim=32)

    rows[40:46] = rows[140:146]
    chain = attend([*range(40, 46)], 40, [0, 0, 1, 2, 3, 4])
    tree = attend([40, 49, 41, 48, 42, 43], 40, [0, 0, 0, 1, 2, 4])
    assert torch.equal(tree[0, [0, 2, 4, 5]], chain[0, :4])
    assert torch.equal(attend([43], 43, [0])[0, 0], chain[0, 3])


@needs_compiler
@torch.no_grad()
def test_a_nan_is_handed_on_to_those_who_see_it():
    text = Text()
    text.keys[0, :, 41] = float("nan")
    out = text.attend([40, 41, 41, 42], 40, [0, 0, 0, 1], VARIANTS["plain"])
    assert out[0, 0].isfinite().all() and out[1].isfinite().all() and out[0, 3].isnan().all()


@needs_compiler
@torch.no_grad()
@pytest.mark.parametrize("size", [1, 7, 8, 576, 1001])
def test_norms_and_swiglu_are_those_of_fp64(size):
    x, residual, weight = drawn(5, size), drawn(5, size, seed=1), drawn(size, seed=2)
    total = (x + residual).double()
    exact = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    got, summed = add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(summed, x + residual)
    assert torch.equal(got, rms_norm(x + residual, weight, 1e-5))
    gate, up = 20 * drawn(5, size, seed=3), drawn(5, size, seed=4)
    gate[0, 0], gate[1, 0], gate[2, 0] = 100.0, -100.0, float("nan")
    exact = gate.double() / (1 + (-gate.double()).exp()) * up.double()
    got = swiglu(torch.cat((gate, up), -1))
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-6, equal_nan=True)


@needs_compiler
@torch.no_grad()
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(("size", "rotated"), [(24, 24), (24, 8), (64, 64)])
def test_heads_are_rotated_normed_and_stored_as_in_torch(size, rotated, has_norms, interleaved):
    qkv = drawn(7, 10, size)
    rotation = Rotation(torch.tensor([0, 5, 9, 131071, 2, 3, 4]), drawn(rotated // 2).abs(), 1.2)
    norms = {"q_norm": drawn(size, seed=5), "k_norm": drawn(size, seed=6), "eps": 1e-5} if has_norms else {}
    for returns_kv in (True, False):
        found = []
        for backend in ("cpp", "reference"):
            k_rows, v_rows = torch.zeros(2, 2, 30, size)
            rows = torch.tensor([20, 3, 4, 9, 1, 0, 29])
            stores = {"k_rows": k_rows, "v_rows": v_rows, "rows": rows, "returns_kv": returns_kv}
            options = norms | stores | {"interleaved": interleaved, "backend": backend}
            found.append([*rope_store(qkv, rotation, num_heads=6, **options), k_rows, v_rows])
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@needs_compiler
def test_a_table_of_rotations_is_that_of_fp64(two_threads):
    positions = torch.arange(3000) * 43
    rotation = Rotation(positions, 1e6 ** -(torch.arange(32) / 32), 1.25)
    angle = (positions.float()[:, None] * rotation.inv_freq).double()
    cos, sin = 1.25 * angle.cos(), 1.25 * angle.sin()
    expected = torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)
    for mine, wanted in zip(rotation.compiled_table, expected, strict=True):
        assert mine.shape == (3000, 1, 64)
        assert torch.allclose(mine[:, 0].double(), wanted, atol=2e-7, rtol=0)


@needs_compiler
@pytest.mark.parametrize("heads", [(3, 2), (7,)])
def test_a_path_is_committed_as_by_the_reference(heads, two_threads):
    store, b = drawn(*heads, 300, 64), 5
    expected = store.clone()
    table = torch.randperm(50, generator=torch.Generator().manual_seed(1)).view(b, 10)
    nodes = torch.tensor([[0, 2, 3, 3], [0, 1, 0, 0], [0, 0, 0, 0], [0, 1, 2, 3], [0, 0, 0, 0]])
    first, counts = torch.tensor([0, 7, 38, 13, 40]), torch.tensor([3, 2, 1, 4, 0])
    given = table, 4, nodes, first, counts, 240, 4
    values, expected_values = 2 * store, 2 * expected
    commit_path(expected, expected_values, *given, backend="reference")
    commit_path(store, values, *given)
    assert torch.equal(store, expected) and torch.equal(values, expected_values)
    with pytest.raises(RuntimeError, match="has no page"):
        commit_path(store, None, table, 4, nodes, first, counts + 1, 240, 4)
    with pytest.raises(RuntimeError, match="not in the store"):
        commit_path(store, None, *given[:-2], 290, 4)
    assert torch.equal(store, expected)


@needs_compiler
@torch.no_grad()
@pytest.mark.parametrize("first_position", [0, 1, 3])
def test_full_windows_unused_slots_and_queries_at_the_end_are_those_of_the_reference(first_position):
    generator = torch.Generator().manual_seed(first_position)
    k, v = drawn(2, 300, 24), drawn(2, 300, 24, seed=1)
    for nodes, keys in ((64, 64), (5, 9), (1, 64)):
        parents = torch.zeros(2, keys, dtype=torch.int64)
        for node in range(1, keys):
            parents[:, node] = torch.randint(0, node, (2,), generator=generator)
        plan = WindowPlan(
            page_table=torch.randperm(20, generator=generator).view(10, 2).t(),  # of other strides
            page_size=8,
            prefix_lens=torch.tensor([first_position, 71]),
            first_position=first_position,
            scratch_start=160,
            scratch_stride=64,
            num_keys=keys,
            ancestors=ancestor_bits(parents, keys)[:, -nodes:],
            num_columns=160,
            dummy_row=299,
            dtype=torch.float32,
        )
        q = drawn(2, nodes, 6, 24, seed=4)
        for variant in (VARIANTS["plain"], VARIANTS["window, cap, sinks"]):
            got = window_attention(q, k, v, plan, variant)
            torch.testing.assert_close(got, window_attention(q, k, v, plan, variant, backend="reference"))


@needs_compiler
@torch.no_grad()
@pytest.mark.parametrize("first_position", [0, 2])
@pytest.mark.parametrize("variant", [VARIANTS["plain"], VARIANTS["window, cap, sinks"]], ids=str)
def test_prompts_are_those_of_the_reference(variant, first_position):
    text = Text(33)
    q = torch.cat((text.queries[0, :30], text.queries[1, 17:60]))
    plan = PrefillPlan(text.table, PAGE, torch.tensor([0, 30, 73]), torch.tensor([0, 17]), first_position, 43)
    got = paged_prefill_attention(q, text.k, text.v, plan, variant)
    want = paged_prefill_attention(q, text.k, text.v, plan, variant, backend="reference")
    torch.testing.assert_close(got, want)


@needs_compiler
@torch.no_grad()
@pytest.mark.parametrize("group", [1, 5, 7])
def test_groups_of_heads_that_no_number_of_rows_is_a_multiple_of(group):
    """Query rows are computed 48 at a time, which begins within a group; each head has a sink of its own."""
    # Prompts.
    text = Text()
    count = 40
    variant = AttentionVariant(0.2, Limits(window=30), 2.0, drawn(2 * group, seed=7))
    queries = drawn(2, count, 2 * group, 24, seed=4)
    prompts = PrefillPlan(
        text.table, PAGE, torch.tensor([0, count, 2 * count]), torch.zeros(2).long(), 0, count
    )
    chunk = queries.flatten(0, 1)
    got, want = (
        paged_prefill_attention(chunk, text.k, text.v, prompts, variant, backend=backend)
        for backend in (None, "reference")
    )
    torch.testing.assert_close(got, want)

    # Windows that are chains.
    parents = torch.arange(-1, count - 1).clamp(min=0).expand(2, -1)
    k = drawn(2, 300, 24)
    v = drawn(2, 300, 24, seed=1)
    windows = WindowPlan(
        page_table=torch.randperm(20, generator=torch.Generator().manual_seed(1)).view(2, 10),
        page_size=8,
        prefix_lens=torch.tensor([3, 71]),
        first_position=0,
        scratch_start=160,
        scratch_stride=64,
        num_keys=count,
        ancestors=ancestor_bits(parents, count),
        num_columns=160,
        dummy_row=299,
        dtype=torch.float32,
    )
    got, want = (
        window_attention(queries, k, v, windows, variant, backend=name) for name in (None, "reference")
    )
    torch.testing.assert_close(got, want)


@needs_compiler
@torch.no_grad()
def test_what_does_not_fit_is_refused():
    packed = panels.pack(drawn(32, 16))
    for x in (drawn(3, 8), drawn(3, 16).double(), drawn(3, 16).bfloat16(), drawn(2, 3, 16)):
        with pytest.raises(RuntimeError, match="fit|fp32"):
            panels.matmul(x, packed)
    with pytest.raises(RuntimeError, match="fit"):
        torch.ops.eagle_kit_cpp.rms_norm(drawn(4, 64), drawn(32), 1e-5)
    text = Text()
    with pytest.raises(RuntimeError, match="fit"):
        text.attend([20], 20, [0], AttentionVariant(0.2, sinks=drawn(5)))
    for k, logits in ((6, drawn(2, 5)), (17, drawn(2, 50)), (0, drawn(2, 5))):
        with pytest.raises(RuntimeError, match="not rows"):
            torch.ops.eagle_kit_cpp.draft_topk(logits, k, True)
    plan = text.plan([20, 21], 20, [0, 0])
    with pytest.raises(RuntimeError, match="fp32"):
        half = drawn(4, 6, 24).bfloat16()
        compiled.window_attention(half, text.k, text.v, plan, VARIANTS["plain"])
    qkv, rotation = drawn(3, 10, 24), Rotation(torch.arange(3), drawn(12).abs())
    stores = {"k_rows": torch.zeros(2, 9, 24), "v_rows": torch.zeros(2, 9, 24)}
    with pytest.raises(RuntimeError, match="not in the store"):
        rope_store(qkv, rotation, num_heads=6, rows=torch.tensor([0, 9, 1]), **stores)


QKV = drawn(3, 10, 24)
TABLE = drawn(3, 1, 24)
ROWS = torch.tensor([0, 2, 1])
STORE = torch.zeros(2, 9, 24)
ONE = torch.ones(1, dtype=torch.int64)
QUERIES = drawn(2, 6, 24)
NODES = torch.zeros(1, 1, dtype=torch.int64)
BITS = torch.ones(1, 2, 1, dtype=torch.int64)
BORDERS = torch.tensor([0, 2])
TABLES = ONE[None]
START = ONE - 1
"""Arguments that fit: keys of 9 rows, and a window or a prompt of two queries."""


def stored(ops, k_rows=STORE, v_rows=STORE, rows=ROWS, norms=(None, None), table=TABLE):
    return ops.rope_store(QKV, table, table, 6, *norms, 1e-5, False, k_rows, v_rows, rows, True)


def committed(ops, table=TABLES, first=ONE, counts=ONE):
    return ops.commit_rows(STORE, table, 4, NODES, first, counts, 8, 1)


def attended(ops, q=QUERIES, v=STORE, table=TABLES, lens=ONE, keys=2, words=1):
    sizes = [4, 0, 5, 2, keys, 0, 0]
    bits = BITS.repeat(1, 1, words)
    return ops.window_attention(q, STORE, v, table, lens, bits, sizes, 0.2, 0.0, None)


def prompted(ops, q=QUERIES, table=TABLES, borders=BORDERS):
    return ops.prompt_attention(q, STORE, STORE, table, borders, START, [4, 0, 0, 0], 0.2, 0.0, None)


@needs_compiler
@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda ops: ops.linear(drawn(3, 8), drawn(1, 8, ops.panel_width()), 5, drawn(4)), "do not fit"),
        (lambda ops: ops.linear(drawn(3, 8), drawn(2, 8, ops.panel_width()), 5, None), "do not fit"),
        (lambda ops: ops.add_rms_norm(drawn(3, 8), drawn(2, 8), drawn(8), 1e-5), "differ in size"),
        (lambda ops: ops.add_rms_norm(drawn(3, 8), drawn(3, 8), drawn(4), 1e-5), "do not fit"),
        (lambda ops: ops.swiglu(drawn(3, 7)), "not gate and up"),
        (lambda ops: ops.swiglu(drawn(2, 3, 8)), "not gate and up"),
        (lambda ops: ops.most_likely(drawn(8)), "not rows"),
        (lambda ops: ops.most_likely(drawn(3, 0)), "not rows"),
        (lambda ops: stored(ops, table=TABLE[:2]), "do not fit"),
        (lambda ops: stored(ops, table=drawn(3, 1, 26)), "do not fit"),
        (lambda ops: stored(ops, norms=(drawn(8), drawn(24))), "do not fit"),
        (lambda ops: stored(ops, norms=(drawn(24), drawn(8))), "do not fit"),
        (lambda ops: stored(ops, rows=None), "given together"),
        (lambda ops: stored(ops, v_rows=torch.zeros(3, 9, 24)), "do not fit their store"),
        (lambda ops: stored(ops, k_rows=torch.zeros(2, 9, 32)), "do not fit their store"),
        (lambda ops: stored(ops, k_rows=STORE.bfloat16()), "do not fit their store"),
        (lambda ops: stored(ops, rows=ROWS[:2]), "do not fit their store"),
        (lambda ops: stored(ops, rows=ROWS - 1), "not in the store"),
        (lambda ops: committed(ops, table=TABLES.repeat(2, 1)), "do not fit"),
        (lambda ops: committed(ops, first=ONE.repeat(2)), "do not fit"),
        (lambda ops: committed(ops, counts=ONE[:0]), "do not fit"),
        (lambda ops: committed(ops, first=-ONE), "has no page"),
        (lambda ops: attended(ops, lens=ONE[:0]), "does not fit its plan"),
        (lambda ops: attended(ops, table=TABLES.repeat(2, 1)), "does not fit its plan"),
        (lambda ops: attended(ops, keys=1), "does not fit its plan"),
        (lambda ops: attended(ops, keys=65), "does not fit its plan"),
        (lambda ops: attended(ops, keys=129, words=3), "does not fit its plan"),
        (lambda ops: attended(ops, q=drawn(3, 6, 24)), "does not fit its plan"),
        (lambda ops: attended(ops, q=drawn(2, 5, 24)), "do not fit"),
        (lambda ops: attended(ops, q=drawn(2, 6, 16)), "do not fit"),
        (lambda ops: attended(ops, v=STORE[:1]), "do not fit"),
        (lambda ops: attended(ops, v=STORE.double()), "not fp32 rows"),
        (lambda ops: prompted(ops, borders=torch.tensor([0, 1, 2])), "do not fit their plan"),
        (lambda ops: prompted(ops, borders=torch.tensor([0, 3])), "do not fit their plan"),
        (lambda ops: prompted(ops, table=TABLES.repeat(2, 1)), "do not fit their plan"),
        (lambda ops: prompted(ops, q=drawn(12, 24)), "are not"),
    ],
)
def test_arguments_of_other_sizes_are_refused(run, message):
    ops = torch.ops.eagle_kit_cpp
    for each in (stored, committed, attended, prompted):
        each(ops)
    with pytest.raises(RuntimeError, match=message):
        run(ops)


def test_without_them_the_engine_says_the_same(monkeypatch):
    """With packed weights, as ``LLM`` has them."""
    target, head = trained_models(steps=30)
    prompts = [prompt[:40] for prompt in PROMPTS]
    said = []
    for is_there in (cpp.available(), False):
        monkeypatch.setattr(cpp, "available", lambda is_there=is_there: is_there)
        llm = LLM(target, head, shape="4,1,5", max_batch_size=3, max_context=256)
        said.append([response.token_ids for response in llm.generate(prompts, SamplingParams(max_tokens=16))])
    assert said[0] == said[1]


def test_cpp_is_refused_where_it_is_not_at_hand(monkeypatch):
    monkeypatch.setattr(cpp, "available", lambda: False)
    with pytest.raises(UserError, match="not available"):
        rms_norm(drawn(3, 8), drawn(8), 1e-5, backend="cpp")


def failing(monkeypatch, error):
    """Every compilation raises ``error``."""

    def compile_(command, library):
        raise error

    monkeypatch.setattr(cpp, "_compile", compile_)
    monkeypatch.setattr(cpp, "_run", lambda command: "1")
    monkeypatch.setattr(cpp, "_key", lambda command: "key")


def planted(monkeypatch, folder):
    """Put a library into ``folder``; returns the bytes of what is loaded instead of loading it."""
    loads = []
    folder.mkdir(mode=0o700)
    (folder / "key.so").write_bytes(b"planted")
    (folder / "key.so").chmod(0o755)
    monkeypatch.setattr(cpp, "_compile", lambda command, library: library.write_bytes(b"compiled"))
    monkeypatch.setattr(cpp, "_run", lambda command: "1")
    monkeypatch.setattr(cpp, "_key", lambda command: "key")
    monkeypatch.setattr(cpp.torch.ops, "load_library", lambda path: loads.append(Path(path).read_bytes()))
    return loads


class TestCompiling:
    """As a process does that has not loaded the operations."""

    @pytest.fixture(autouse=True)
    def fresh(self, monkeypatch, tmp_path):
        monkeypatch.setenv("EAGLE_KIT_CACHE", str(tmp_path))
        monkeypatch.delenv("EAGLE_KIT_CPP", raising=False)
        monkeypatch.setattr(cpp.torch.ops, "eagle_kit_cpp", object())

    @pytest.mark.parametrize(
        ("compiler", "found"),
        [("false", "false fails"), ("a-compiler-that-is-not-there", "No such file"), ("'", "No closing")],
    )
    def test_it_is_said_why_they_are_not_at_hand(self, compiler, found, monkeypatch, tmp_path):
        monkeypatch.setenv("CXX", compiler)
        assert found in cpp.problem.__wrapped__().cause
        assert not [*tmp_path.rglob("*.so")]

    def test_a_compiler_that_fails_is_not_asked_again(self, monkeypatch, tmp_path):
        """It has an argument, says its version, complains in Latin-1, and counts its calls."""
        script = tmp_path / "compiler"
        script.write_text(
            '#!/bin/sh\n[ "$2" = --version ] && echo 1 && exit\n'
            f"echo . >> {tmp_path}/calls; printf 'x.cpp:1:2: error: \\351\\n' >&2; exit 1\n"
        )
        script.chmod(0o755)
        monkeypatch.setenv("CXX", f"{script} -w")
        calls = tmp_path / "calls"
        assert "error" in cpp.problem.__wrapped__().cause
        asked = calls.read_text()  # as many times as there are sources, or fewer: the first failure ends it
        assert asked
        assert "error" in cpp.problem.__wrapped__().cause
        assert calls.read_text() == asked

    @pytest.mark.parametrize(
        "ending",
        [
            "echo 'x.cpp:9:1: fatal error: error writing to x.s: No space left on device' >&2; exit 1",
            "echo 'virtual memory exhausted: Cannot allocate memory' >&2; exit 1",
            "echo 'x.cpp:9:1: internal compiler error: Killed (program cc1plus)' >&2; exit 4",
            "echo 'x.cpp:1:9: fatal error: bit: No such file or directory' >&2; exit 1",
            "echo 'x.cpp:9:1: error: half a line' >&2; kill -9 $$",
            "exit 1",
        ],
    )
    def test_a_failure_that_may_not_come_again_is_not_remembered(self, ending, monkeypatch, tmp_path):
        """A disk that was full, memory that was short, a compiler that was killed, a header now installed."""
        script = tmp_path / "compiler"
        script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit\n{ending}\n')
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        assert str(script) in cpp.problem.__wrapped__().cause
        assert not [*(tmp_path / "cpp").iterdir()]

    def test_a_remembered_failure_says_the_file_that_remembers_it(self, monkeypatch, tmp_path):
        failing(monkeypatch, cpp.SourceError("x.cpp:1:2: error: y"))
        first = cpp.problem.__wrapped__()
        again = cpp.problem.__wrapped__()
        assert str(first) == str(again) and str(tmp_path / "cpp" / "key.failed") in again.remedy
        assert (tmp_path / "cpp").stat().st_mode & 0o777 == 0o700

    def test_a_failure_that_cannot_be_noted_is_told_as_it_is(self, monkeypatch, tmp_path):
        def full(path, text):
            raise OSError(28, "No space left on device")

        failing(monkeypatch, cpp.SourceError("x.cpp:1:2: error: y"))
        monkeypatch.setattr(cpp, "write_text_atomically", full)
        assert "x.cpp:1:2: error: y" in cpp.problem.__wrapped__().cause
        assert not [*(tmp_path / "cpp").iterdir()]

    @pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777, 0o722])
    def test_a_folder_in_which_others_can_write_is_not_loaded_from(self, mode, monkeypatch, tmp_path):
        loads = planted(monkeypatch, tmp_path / "cpp")
        (tmp_path / "cpp").chmod(mode)
        found = cpp.problem.__wrapped__()
        assert str(tmp_path / "cpp") in found.cause and "EAGLE_KIT_CPP" in found.remedy
        assert not loads

    def test_a_folder_below_one_in_which_others_can_rename_it_is_not_loaded_from(self, monkeypatch, tmp_path):
        loads = planted(monkeypatch, tmp_path / "cpp")
        tmp_path.chmod(0o777)
        assert str(tmp_path) in cpp.problem.__wrapped__().cause and not loads
        tmp_path.chmod(0o1777)
        cpp._load(["c++"])
        assert loads

    @pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
    @pytest.mark.parametrize("kind", ["folder", "library", "failure"])
    def test_what_another_user_wrote_is_not_loaded(self, kind, monkeypatch, tmp_path):
        """A failure that another user notes is not believed either."""
        loads = planted(monkeypatch, tmp_path / "cpp")
        if kind == "failure":
            (tmp_path / "cpp" / "key.so").rename(tmp_path / "cpp" / "key.failed")
        place = {"folder": "", "library": "key.so", "failure": "key.failed"}[kind]
        os.chown(tmp_path / "cpp" / place, 65534, 65534)
        if kind == "folder":
            assert "another user" in cpp.problem.__wrapped__().cause and not loads
            return
        cpp._load(["c++"])
        assert loads == [b"compiled"]

    @pytest.mark.parametrize("mode", [0o777, 0o664, 0o646])
    def test_a_library_that_others_can_write_is_compiled_again(self, mode, monkeypatch, tmp_path):
        loads = planted(monkeypatch, tmp_path / "cpp")
        (tmp_path / "cpp" / "key.so").chmod(mode)
        cpp._load(["c++"])
        assert loads == [b"compiled"]
        assert (tmp_path / "cpp" / "key.so").stat().st_mode & 0o777 == 0o755

    def test_a_library_that_does_not_load_is_compiled_again(self, monkeypatch, tmp_path):
        loads = []

        def load(path):
            loads.append(Path(path).read_bytes())
            if len(loads) == 1:
                raise OSError("cut off")

        def compile_(command, library):
            library.write_bytes(b"whole")

        monkeypatch.setattr(cpp, "_compile", compile_)
        monkeypatch.setattr(cpp, "_run", lambda command: "1")
        monkeypatch.setattr(cpp, "_key", lambda command: "key")
        monkeypatch.setattr(cpp.torch.ops, "load_library", load)
        (tmp_path / "cpp").mkdir()
        (tmp_path / "cpp" / "key.so").write_bytes(b"cut")
        cpp._load(["c++"])
        assert loads == [b"cut", b"whole"]

    @pytest.mark.parametrize(
        "change",
        [
            lambda patch, folder: patch.setattr(cpp, "_processor", lambda: "flags: none"),
            lambda patch, folder: patch.setattr(cpp.torch, "__version__", "1.0"),
            lambda patch, folder: patch.setattr(cpp.platform, "machine", lambda: "another"),
            lambda patch, folder: patch.setattr(cpp.platform, "libc_ver", lambda: ("libc", "1")),
            lambda patch, folder: patch.setattr(cpp, "_run", lambda command: "2"),
            *(
                lambda patch, folder, name=name: (folder / name).write_text("// another")
                for name in (*cpp.SOURCES, *cpp.HEADERS)
            ),
        ],
        ids=["processor", "torch", "machine", "libc", "compiler", *cpp.SOURCES, *cpp.HEADERS],
    )
    def test_what_was_compiled_for_something_else_is_not_loaded(self, monkeypatch, tmp_path, change):
        """Homes are shared by machines, and torch, compilers and sources are upgraded."""
        sources = tmp_path / "csrc"
        loads = []
        shutil.copytree(cpp.FOLDER, sources)
        monkeypatch.setattr(cpp, "FOLDER", sources)
        monkeypatch.setattr(cpp, "_run", lambda command: "1")
        monkeypatch.setattr(cpp, "_compile", lambda command, library: library.write_bytes(b"whole"))
        monkeypatch.setattr(cpp.torch.ops, "load_library", loads.append)
        cpp._load(["c++"])
        cpp._load(["c++"])
        change(monkeypatch, sources)
        cpp._load(["c++"])
        assert loads[0] == loads[1] != loads[2]


def test_they_can_be_refused(monkeypatch):
    monkeypatch.setenv("EAGLE_KIT_CPP", "0")
    assert cpp.problem.__wrapped__().cause == "EAGLE_KIT_CPP is 0."


def test_it_is_warned_once_that_they_are_missing(monkeypatch):
    monkeypatch.delenv("EAGLE_KIT_CPP", raising=False)
    monkeypatch.setattr(cpp, "problem", lambda: "there is no C++ compiler")
    with pytest.warns(UserWarning, match="there is no C"):
        assert not cpp.available.__wrapped__()
