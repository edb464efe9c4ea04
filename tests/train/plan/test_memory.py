"""What a training step keeps: no scores of T x T, and with gradient checkpointing a fraction of the rest."""

import json
import os
import subprocess
import sys
from typing import Literal

import pytest
import torch

from eagle_kit.drafts.eagle3.head import Eagle3Config, Eagle3Head
from eagle_kit.models.config import TargetConfig
from eagle_kit.objective.loss import TTTBatch
from eagle_kit.objective.row_plan import make_row_plan
from eagle_kit.objective.target_features import TargetFeatures
from eagle_kit.objective.ttt import ttt_forward

LONG = """
import json, sys
import torch
torch.set_num_threads(1)
sys.path.insert(0, "tests/train/plan")
from test_memory import make_head, one_step, rows_of
from eagle_kit.ops.attention.ttt import cpu
from eagle_kit.ops.attention.ttt import reference
from eagle_kit.report.environment import peak_memory_gb

if sys.argv[1] == "scores":  # what must not happen: one softmax over all keys, with its scores kept
    def attend(q, k, v, own_k, own_v, blocks, scale):
        out = []
        for start, stop, key_start, key_stop, mask in blocks:
            s = torch.einsum("rhd,thd->rht", q[start:stop], k[key_start:key_stop]) * scale + mask[:, None]
            s = torch.cat((s, torch.einsum("rhd,rhjd->rhj", q[start:stop], own_k[start:stop]) * scale), -1)
            p, n = s.softmax(-1), key_stop - key_start
            out.append(torch.einsum("rht,thd->rhd", p[..., :n], v[key_start:key_stop])
                       + torch.einsum("rhj,rhjd->rhd", p[..., n:], own_v[start:stop]))
        return torch.cat(out)
    cpu.TTTAttention.apply = attend
head = make_head(heads=1)
one_step(head, *rows_of(512, 256), recompute=False)  # what torch sets up once
before = peak_memory_gb("cpu")
one_step(head, *rows_of(32768, 3072), recompute=False)
print(json.dumps((peak_memory_gb("cpu") - before) * 1e9 / 2**20))
"""


def make_head(heads: int = 2) -> Eagle3Head:
    target = TargetConfig.from_dict(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 128,
            "hidden_size": 16 * heads,
            "intermediate_size": 48,
            "num_hidden_layers": 6,
            "num_attention_heads": heads,
            "num_key_value_heads": 1,
            "max_position_embeddings": 65536,
            "rms_norm_eps": 1e-5,
        }
    )
    torch.manual_seed(0)
    return Eagle3Head(Eagle3Config.for_target(target, 96))


def rows_of(length: int, supervised: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``response`` and ``doc_start`` of one document that ends in a response."""
    response = torch.full((length,), -1)
    response[-supervised:] = 0
    return response, torch.zeros(length, dtype=torch.int64)


def one_step(
    head: Eagle3Head, response: torch.Tensor, doc_start: torch.Tensor, *, recompute: bool, steps: int = 2
) -> dict[str, torch.Tensor]:
    """Forward and backward over one packed sequence; the gradients."""
    generator = torch.Generator().manual_seed(1)
    length, size = len(response), head.config.hidden_size
    embed, target_head = (
        torch.randn(128, size, generator=generator),
        torch.randn(96, size, generator=generator),
    )
    ids = torch.randint(96, (length,), generator=generator)
    features = TargetFeatures(
        torch.randn(length, 3 * size, generator=generator),
        torch.randn(length, size, generator=generator),
        torch.randint(96, (length,), generator=generator),
    )
    plan = make_row_plan(response, doc_start, steps)
    weights = [torch.full(rows.shape, 1.0 / max(1, len(rows))) for rows in plan.rows]
    out = ttt_forward(head, TTTBatch(ids, plan, weights, features, embed, target_head), recompute=recompute)
    out.loss.backward()
    gradients = {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}
    head.zero_grad()
    return gradients


def peak_mib(kind: str) -> float:
    """By how much the largest size of a process grows in a step of 32 K tokens, 3 K of them with loss."""
    done = subprocess.run(
        [sys.executable, "-c", LONG, kind],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.nightly
def test_a_step_of_32k_tokens_has_bounded_memory() -> None:
    scores = 3072 * (32768 - 1536) * 4 / 2**20  # of one head and one step, 366 MiB
    assert peak_mib("ours") < 1.5 * scores  # 177 or 387 MiB, as the allocator likes
    assert peak_mib("scores") > 4 * scores  # or the measurement sees nothing


def kept_bytes(head: Eagle3Head, recompute: bool, steps: int) -> int:
    """Bytes of the tensors that autograd keeps for a backward pass, weights and inputs not counted."""
    seen: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in head.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        one_step(head, *rows_of(1024, 768), recompute=recompute, steps=steps)
    return sum(seen.values())


@pytest.mark.parametrize("steps", [1, 4])
def test_checkpointed_steps_have_the_same_gradients(steps: int) -> None:
    head = make_head()
    kept, again = (one_step(head, *rows_of(96, 70), recompute=flag, steps=steps) for flag in (False, True))
    assert kept.keys() == again.keys() == {name for name, _ in head.named_parameters()}
    for name, gradient in kept.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-5, atol=1e-7)


def test_checkpointed_steps_keep_less() -> None:
    head = make_head()
    kept, again = kept_bytes(head, False, 7), kept_bytes(head, True, 7)
    assert again < 0.6 * kept, (kept, again)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_attention_keeps_no_scores_in_any_form(backend: Literal["cpu", "reference"]) -> None:
    """Twice the row, twice the bytes: with scores or masks it would be four times."""
    from eagle_kit.ops.attention.ttt import plan_queries, ttt_attention

    def kept(length: int) -> int:
        seen: dict[int, int] = {}
        doc_start = torch.zeros(length, dtype=torch.int64)
        q, k, v = (torch.randn(length, 2, 8, requires_grad=True) for _ in range(3))
        own = torch.randn(length, 2, 1, 8, requires_grad=True)

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        plan = plan_queries(torch.arange(length), doc_start)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            ttt_attention(q, k, v, own, own, plan, 0.3, backend=backend).sum().backward()
        return sum(seen.values())

    assert kept(2048) < 2.5 * kept(1024)
