"""EAGLE-1 head against an independent implementation of the published forward over a whole sequence."""

import itertools
import math

import pytest
import torch
from tiny import randomise

from eagle_kit.drafts.eagle1.head import Eagle1Config, Eagle1Head
from eagle_kit.ops.attention.packed import packed_attention
from eagle_kit.ops.attention.prefill import prefill_attention

LENGTH, SIZE = 13, 48
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
VARIANTS = {
    "eagle 1": {},
    "no bias in fc, a large epsilon": {"fc_bias": False, "rms_norm_eps": 0.1},
    "biases of qwen2": {"attention_bias": True},
    "biases everywhere": {"attention_bias": True, "attention_out_bias": True},
    "wide heads": {"head_dim": 14, "num_heads": 4, "num_kv_heads": 1},
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama 3.1 rope": {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 16}},
}


def make(std: float = 0.1, **changes) -> Eagle1Head:
    sizes = {
        "hidden_size": SIZE, "num_heads": 6, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 97,
        "vocab_size": 131, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None,
    }  # fmt: skip
    head = randomise(Eagle1Head(Eagle1Config(**{**sizes, **changes})), 3, std)
    return head.eval().requires_grad_(False)


class Published:
    """EAGLE's ``cnets`` in fp64 over all rows at once, sharing no code with the package.

    q, k, v and gate, up are split again; keys are repeated for their group; the mask is added.
    """

    def __init__(self, head: Eagle1Head) -> None:
        self.c = head.config
        self.w = {name: tensor.double() for name, tensor in head.state_dict().items()}

    def linear(self, x: torch.Tensor, name: str, rows: slice = slice(None)) -> torch.Tensor:
        out = x @ self.w[f"{name}.weight"][rows].T
        bias = self.w.get(f"{name}.bias")
        return out if bias is None else out + bias[rows]

    def frequencies(self) -> torch.Tensor:
        c = self.c
        freq = [c.rope_theta ** (-2 * i / c.head_dim) for i in range(c.head_dim // 2)]
        rope = c.rope_scaling or {"rope_type": "default"}
        if rope["rope_type"] == "linear":
            freq = [f / rope["factor"] for f in freq]
        if rope["rope_type"] == "llama3":
            for i, f in enumerate(freq):
                turns = rope["original_max_position_embeddings"] * f / (2 * math.pi)
                low, high = rope["low_freq_factor"], rope["high_freq_factor"]
                keep = min(max((turns - low) / (high - low), 0.0), 1.0)
                freq[i] = keep * f + (1 - keep) * f / rope["factor"]
        return torch.tensor(freq, dtype=torch.float64)

    def turned(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate ``[heads, T, D]`` as complex numbers."""
        half = x.shape[-1] // 2
        angle = positions.double()[:, None] * self.frequencies()
        y = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((y.real, y.imag), -1)

    def __call__(
        self, hidden: torch.Tensor, embeds: torch.Tensor, positions: torch.Tensor, allowed: torch.Tensor
    ) -> torch.Tensor:
        """``hidden``, ``embeds [T, H]``; ``allowed`` bool ``[T, T]``, visible keys of each row -> ``[T,
        H]``."""
        c, t = self.c, len(hidden)
        x = self.linear(torch.cat((embeds, hidden), -1).double(), "fc")
        q_rows, kv_rows = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        ends = [0, q_rows, q_rows + kv_rows, q_rows + 2 * kv_rows]
        q, k, v = (
            self.linear(x, "self_attn.qkv_proj", slice(a, b)).view(t, -1, c.head_dim).transpose(0, 1)
            for a, b in itertools.pairwise(ends)
        )
        group = c.num_heads // c.num_kv_heads
        q, k = self.turned(q, positions), self.turned(k, positions).repeat_interleave(group, 0)
        mask = torch.zeros(t, t, dtype=torch.float64).masked_fill(~allowed, float("-inf"))
        weights = (q @ k.transpose(1, 2) / math.sqrt(c.head_dim) + mask).softmax(-1)
        seen = (weights @ v.repeat_interleave(group, 0)).transpose(0, 1).reshape(t, -1)
        h = x + self.linear(seen, "self_attn.o_proj")
        normed = h / (h.square().mean(-1, keepdim=True) + c.rms_norm_eps).sqrt()
        normed = normed * self.w["post_attention_layernorm.weight"]
        gate = self.linear(normed, "mlp.gate_up_proj", slice(0, c.intermediate_size))
        up = self.linear(normed, "mlp.gate_up_proj", slice(c.intermediate_size, None))
        return h + self.linear(gate / (1 + (-gate).exp()) * up, "mlp.down_proj")


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def causal(count: int) -> torch.Tensor:
    return torch.ones(count, count, dtype=torch.bool).tril()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_whole_sequence_is_that_of_the_published_forward(variant):
    head = make(**VARIANTS[variant])
    hidden, embeds, positions = noise(LENGTH, SIZE), noise(LENGTH, SIZE, seed=1), torch.arange(LENGTH)
    scale = head.config.head_dim**-0.5
    ours = head(hidden, embeds, positions, lambda layer, q, k, v: prefill_attention(q, k, v, scale))
    theirs = Published(head)(hidden, embeds, positions, causal(LENGTH))
    assert theirs.abs().mean() > 0.5
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_with_strong_weights_only_the_angles_of_rope_are_rounded(variant):
    """In fp32 their outputs of about 20 differ by 3e-5, as do two fp32 implementations of the formula; in
    fp64 only the angles differ, which are always fp32."""
    head = make(std=0.2, **VARIANTS[variant]).double()
    hidden, embeds = noise(LENGTH, SIZE).double(), noise(LENGTH, SIZE, seed=1).double()
    positions, scale = torch.arange(LENGTH), head.config.head_dim**-0.5
    ours = head(hidden, embeds, positions, lambda layer, q, k, v: prefill_attention(q, k, v, scale))
    theirs = Published(head)(hidden, embeds, positions, causal(LENGTH))
    assert theirs.abs().max() > 10
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("variant", ["eagle 1", "biases of qwen2", "llama 3.1 rope"])
def test_steps_that_feed_back_equal_one_long_published_sequence(variant):
    """Drafting keeps the keys of the rows before; the published forward is run anew over all of them."""
    head = make(**VARIANTS[variant])
    published, keys, values = Published(head), [], []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        assert layer == 0
        keys.append(k)
        values.append(v)
        return prefill_attention(q, torch.cat(keys), torch.cat(values), head.config.head_dim**-0.5)

    hidden, embeds = noise(LENGTH, SIZE), noise(LENGTH + 4, SIZE, seed=1)
    state = head(hidden, embeds[:LENGTH], torch.arange(LENGTH), attend)[-1:]
    features = hidden.double()
    for step in range(4):
        at = LENGTH + step
        features = torch.cat((features, published(features, embeds[:at], torch.arange(at), causal(at))[-1:]))
        torch.testing.assert_close(state.double(), features[-1:], rtol=1e-5, atol=1e-5)
        state = head(state, embeds[at : at + 1], torch.tensor([at]), attend)


def test_packed_documents_do_not_see_each_other():
    head, split = make(), 5
    hidden, embeds = noise(LENGTH, SIZE), noise(LENGTH, SIZE, seed=1)
    positions = torch.cat((torch.arange(split), torch.arange(LENGTH - split)))
    spans = [(0, split), (split, LENGTH)]
    ours = head(hidden, embeds, positions, lambda layer, q, k, v: packed_attention(q, k, v, spans, 8**-0.5))
    own = torch.arange(LENGTH) >= split
    allowed = causal(LENGTH) & (own[:, None] == own[None])
    theirs = Published(head)(hidden, embeds, positions, allowed)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


def test_a_uniform_shift_of_positions_changes_nothing():
    """Allows a store to count slots where the published head counts positions."""
    head = make()
    hidden, embeds = noise(LENGTH, SIZE), noise(LENGTH, SIZE, seed=1)
    outs = [
        head(
            hidden,
            embeds,
            torch.arange(LENGTH) + shift,
            lambda layer, q, k, v: prefill_attention(q, k, v, 8**-0.5),
        )
        for shift in (0, 1)
    ]
    assert not torch.equal(outs[0], outs[1])
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-5)


def test_half_weights_keep_exact_rope_frequencies():
    head = make(rope_theta=500000.0)
    exact = head.rope.inv_freq.clone()
    half = head.to(torch.bfloat16)
    assert torch.equal(half.rope.inv_freq, exact) and half.fc.weight.dtype == torch.bfloat16
    out = half(
        noise(3, SIZE).bfloat16(),
        noise(3, SIZE, seed=1).bfloat16(),
        torch.arange(3),
        lambda layer, q, k, v: prefill_attention(q, k, v, 8**-0.5),
    )
    assert out.dtype == torch.bfloat16 and out.isfinite().all()
