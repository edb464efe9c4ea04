"""EAGLE-3 head against an independent implementation of the published forward over a whole sequence."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_head, tiny_target

from eagle_kit.drafts.eagle3.head import Eagle3Head
from eagle_kit.drafts.files.draft import load_draft, save_draft

LENGTH = 13
VARIANTS = {
    "eagle 3": {},
    "fc norm": {"fc_norm": True},
    "norm output": {"norm_output": True},
    "norm before residual": {"norm_before_residual": True},
    "all of them, with a large epsilon": {
        "fc_norm": True,
        "norm_output": True,
        "norm_before_residual": True,
        "rms_norm_eps": 0.1,
    },
    "one norm before fc": {"norm_before_fc": True},
    "both norms before fc": {"norm_before_fc": True, "fc_norm": True},
    "norms of queries and keys": {"qk_norm": True},
    "half of a head rotated": {"rotary_dim": 4},
    "half of a head rotated, with norms": {"rotary_dim": 4, "qk_norm": True, "rope_theta": 1e6},
    "wide heads": {"head_dim": 14, "num_heads": 4, "num_kv_heads": 1},
    "two aux states of another width": {"aux_layer_ids": (1, 3), "target_hidden_size": 40},
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
}


class Published:
    """Published forward as matrices over all rows at once, in fp64, from the published names alone."""

    def __init__(self, folder: Path) -> None:
        self.c: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.w = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}

    def rms(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return (
            x * (x.pow(2).mean(-1, keepdim=True) + self.c["rms_norm_eps"]).rsqrt() * self.w[name + ".weight"]
        )

    def heads(self, x: torch.Tensor, name: str, count: int, positions: torch.Tensor | None) -> torch.Tensor:
        """``[T, 2H]`` -> ``[heads, T, D]``, turned by complex numbers when there are positions."""
        size = self.c["head_dim"]
        y = (x @ self.w[f"midlayer.self_attn.{name}.weight"].T).view(len(x), count, size).transpose(0, 1)
        norm = f"midlayer.self_attn.{name.replace('proj', 'norm')}"
        if f"{norm}.weight" in self.w:
            y = self.rms(y, norm)
        if positions is None:
            return y
        rope = self.c["rope_parameters"]
        turns = int(size * rope.get("partial_rotary_factor", 1.0))
        y, rest = y[..., :turns], y[..., turns:]
        freq = rope["rope_theta"] ** -(torch.arange(turns // 2).double() * 2 / turns)
        turned = torch.complex(y[..., : turns // 2], y[..., turns // 2 :]) * torch.exp(
            1j * positions.double()[:, None] * freq / rope.get("factor", 1.0)
        )
        return torch.cat((turned.real, turned.imag, rest), -1)

    def qkv(
        self, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hq, hkv = self.c["num_attention_heads"], self.c["num_key_value_heads"]
        k = self.heads(x, "k_proj", hkv, positions).repeat_interleave(hq // hkv, 0)
        v = self.heads(x, "v_proj", hkv, None).repeat_interleave(hq // hkv, 0)
        return self.heads(x, "q_proj", hq, positions), k, v

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        if self.c.get("norm_before_fc"):
            aux = self.rms(aux, "input_norm")
        if self.c["fc_norm"]:
            parts = aux.split(self.c["target_hidden_size"], -1)
            aux = torch.cat([self.rms(part, f"fc_norm.{i}") for i, part in enumerate(parts)], -1)
        return aux @ self.w["fc.weight"].T

    def layer_input(self, hidden: torch.Tensor, embeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.rms(hidden, "midlayer.hidden_norm")
        x = torch.cat((self.rms(embeds, "midlayer.input_layernorm"), normed), -1)
        return x, normed if self.c["norm_before_residual"] else hidden

    def finish(self, residual: torch.Tensor, probs: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """``probs [Hq, T, S]``, ``v [Hq, S, D]`` -> the state for the next step ``[T, H]``."""
        mixed = (probs @ v).transpose(0, 1).flatten(1)
        h = residual + mixed @ self.w["midlayer.self_attn.o_proj.weight"].T
        x = self.rms(h, "midlayer.post_attention_layernorm")
        gate = x @ self.w["midlayer.mlp.gate_proj.weight"].T
        up = x @ self.w["midlayer.mlp.up_proj.weight"].T
        h = h + (gate * gate.sigmoid() * up) @ self.w["midlayer.mlp.down_proj.weight"].T
        return self.rms(h, "norm") if self.c["norm_output"] else h

    def logits(self, fed_back: torch.Tensor) -> torch.Tensor:
        normed = fed_back if self.c["norm_output"] else self.rms(fed_back, "norm")
        return normed @ self.w["lm_head.weight"].T

    def two_steps(self, aux: torch.Tensor, embeds: torch.Tensor) -> list[torch.Tensor]:
        """Training-time test: row i of step 1 attends to step 0's keys up to i and its own step-1 key."""
        rows = torch.arange(LENGTH)
        x, residual = self.layer_input(self.fuse(aux), embeds[:LENGTH])
        q, k0, v0 = self.qkv(x, rows)
        causal = torch.full((LENGTH, LENGTH), -math.inf, dtype=torch.float64).triu(1)
        scale = 1 / math.sqrt(self.c["head_dim"])
        first = self.finish(residual, (q @ k0.transpose(1, 2) * scale + causal).softmax(-1), v0)
        x, residual = self.layer_input(first, embeds[1:])
        q, k1, v1 = self.qkv(x, rows + 1)
        own = torch.full((LENGTH, LENGTH), -math.inf, dtype=torch.float64).fill_diagonal_(0.0)
        scores = q @ torch.cat((k0, k1), 1).transpose(1, 2) * scale + torch.cat((causal, own), 1)
        second = self.finish(residual, scores.softmax(-1), torch.cat((v0, v1), 1))
        return [first, second]


def run(head: Eagle3Head, aux: torch.Tensor, embeds: torch.Tensor) -> list[torch.Tensor]:
    """The same two steps through the head, with the test's attention, keys of both steps kept."""
    stored: list[tuple[torch.Tensor, torch.Tensor]] = []
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        assert layer == 0
        stored.append((k, v))
        group = q.shape[1] // k.shape[1]
        keys, values = (torch.cat(part).repeat_interleave(group, 1) for part in zip(*stored, strict=True))
        mask = torch.cat((causal, *[torch.eye(LENGTH, dtype=torch.bool)] * (len(stored) - 1)), 1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) * q.shape[-1] ** -0.5
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -math.inf).softmax(-1), values)

    rows = torch.arange(LENGTH)
    first = head(head.fuse(aux), embeds[:LENGTH], rows, attend)
    return [first, head(first, embeds[1:], rows + 1, attend)]


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    def save(**changes: Any) -> Path:
        save_draft(tiny_head(tiny_target(), **changes), tmp_path / "draft", metadata={})
        return tmp_path / "draft"

    return save


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_steps_equal_the_published_forward(saved: Callable[..., Path], variant: str) -> None:
    folder = saved(**VARIANTS[variant])
    head, published = load_draft(folder).eval(), Published(folder)
    generator = torch.Generator().manual_seed(3)
    width = len(head.config.aux_layer_ids) * head.config.target_hidden_size
    aux = torch.randn(LENGTH, width, generator=generator)
    embeds = torch.randn(LENGTH + 1, 48, generator=generator)
    with torch.no_grad():
        ours = run(head, aux, embeds)
        logits = [head.logits(out) for out in ours]
    want = published.two_steps(aux.double(), embeds.double())
    for step in (0, 1):
        expected = published.logits(want[step])
        assert expected.abs().max() > 0.5
        assert (ours[step] - want[step]).abs().max() < 1e-5 * want[step].abs().max(), f"step {step}"
        assert (logits[step] - expected).abs().max() < 1e-5 * expected.abs().max(), f"step {step}"
    assert (want[0] - want[1]).abs().max() > 0.1  # the steps are not the same by accident


def test_every_variant_computes_something_else(saved: Callable[..., Path]) -> None:
    aux, embeds = torch.randn(LENGTH, 144), torch.randn(LENGTH + 1, 48)
    plain = Published(saved()).two_steps(aux.double(), embeds.double())[1]
    changes = [{flag: True} for flag in ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc")]
    for change in (*changes, {"qk_norm": True}, {"rotary_dim": 4}):
        other = Published(saved(**change)).two_steps(aux.double(), embeds.double())[1]
        assert (plain - other).abs().max() > 0.01, change


def test_draft_ids_become_target_ids() -> None:
    head = tiny_head(tiny_target())
    ids = torch.tensor([[0, 66], [5, 5]])
    assert torch.equal(head.to_target(ids), head.token_map[ids])
    assert head.token_map.unique().numel() == 67 and head.t2d[head.token_map].all()
    assert int(head.t2d.sum()) == 67 and not torch.equal(head.token_map, head.token_map.sort().values)


def test_an_empty_batch_of_rows_gives_empty_outputs() -> None:
    head = tiny_head(tiny_target())
    out = head(head.fuse(torch.zeros(0, 144)), torch.zeros(0, 48), torch.arange(0), lambda layer, q, k, v: q)
    assert out.shape == (0, 48) and head.logits(out).shape == (0, 67)


def test_gradients_reach_every_parameter() -> None:
    head = tiny_head(tiny_target(), fc_norm=True, norm_before_fc=True, qk_norm=True)
    outs = run(head, torch.randn(LENGTH, 144), torch.randn(LENGTH + 1, 48))
    sum(head.logits(out).logsumexp(-1).sum() for out in outs).backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in head.parameters())
