"""Training of the other heads against dense oracles: every loss and every gradient. The oracles attend
through transformers' layers, under T x (T + k) masks."""

import copy

import pytest
import torch
from tiny import packed_row, randomise
from tiny_mixtures import YARN, v3
from tiny_mtp import PublishedModule, random_module
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)

from eagle_kit.drafts.eagle3.head import Eagle3Config, Eagle3Head
from eagle_kit.drafts.mtp.head import MTPConfig, MTPHead
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.targets.llama import LlamaModel
from eagle_kit.objective.loss import TTTBatch
from eagle_kit.objective.row_plan import make_row_plan
from eagle_kit.objective.step_parts import step_attention
from eagle_kit.objective.target_features import capture_features
from eagle_kit.objective.ttt import ttt_forward_backward
from eagle_kit.ops.attention.ttt import plan_queries

V = 131
THEIRS = v3(vocab_size=V, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0})


@pytest.fixture(scope="module")
def target() -> LlamaModel:
    config = TargetConfig.from_dict(THEIRS.to_dict() | {"architectures": ["DeepseekV3ForCausalLM"]})
    return randomise(LlamaModel(config), 0, 0.2).eval().requires_grad_(False)


def ours(head, target, steps: int, weights):
    ids, response, doc_start = packed_row()
    plan = make_row_plan(response, doc_start, steps)
    features = capture_features(target, ids, doc_start, head.capture, plan.is_teacher)
    rows = target.head_weight if head.token_map is None else target.head_weight[head.token_map]
    row_weights = [torch.full((n,), w) for n, w in zip(plan.counts, weights, strict=True)]
    batch = TTTBatch(ids, plan, row_weights, features, target.embed_tokens.weight, rows)
    result = ttt_forward_backward(head, batch)
    return result, features, plan.counts


def loss_of(logits, target, features, step, allowed):
    """The published loss of one step, row by row: soft targets over what the head can say."""
    _, response, _ = packed_row()
    full = (features.hidden @ target.head_weight.t()).double()
    total, hits, count = logits.new_zeros((), dtype=torch.float64), 0, 0
    for i in range(len(response) - 2 - step):
        if response[i + 1] >= 0 and response[i + 1] == response[i + 2 + step]:
            count += 1
            teacher = full[i + 1 + step]
            if (allowed == teacher.argmax()).any():
                log_q = logits[i].double().log_softmax(-1)
                total = total - (teacher[allowed].softmax(-1) * log_q).sum()
                hits += int(allowed[log_q.argmax()] == teacher.argmax())
    return total, hits, count


def shifted(ids, by):
    return ids[(torch.arange(len(ids)) + by).clamp(max=len(ids) - 1)]


class MaskedMLA(torch.nn.Module):
    """transformers' MLA over an input of any width, which attends to keys of earlier steps as well."""

    def __init__(self, config, width: int) -> None:
        super().__init__()
        config = copy.deepcopy(config)
        self.inner = DeepseekV3Attention(config, 0)
        if width != config.hidden_size:
            rope = config.qk_rope_head_dim
            self.inner.q_a_proj = torch.nn.Linear(width, config.q_lora_rank, bias=False)
            self.inner.kv_a_proj_with_mqa = torch.nn.Linear(width, config.kv_lora_rank + rope, bias=False)
        self.rope = DeepseekV3RotaryEmbedding(config)

    def forward(self, inputs: list[torch.Tensor], masks: list[torch.Tensor], positions) -> torch.Tensor:
        """The last of ``inputs [T, W]`` attends to all of them: they are laid behind one another, and what is
        computed for the earlier ones is thrown away."""
        x, count = torch.cat(inputs)[None], len(inputs)
        t = len(inputs[0])
        mask = torch.full((count * t, count * t), float("-inf"))
        mask.fill_diagonal_(0.0)
        mask[-t:] = torch.cat(masks, 1)
        where = torch.cat([positions + k for k in range(count)])[None]
        out = self.inner(
            x, position_embeddings=self.rope(x, where), attention_mask=mask[None, None], position_ids=where
        )
        return out[0][0, -t:]


def masks_of(doc_start, count):
    """Causal in the document over the first step, then each row its own."""
    t = len(doc_start)
    seen = (doc_start[:, None] == doc_start[None]) & torch.ones(t, t).tril().bool()
    causal = torch.zeros(t, t).masked_fill(~seen, float("-inf"))
    own = torch.full((t, t), float("-inf")).fill_diagonal_(0.0)
    return [causal, *[own] * (count - 1)]


def compare(named, theirs, rename=lambda name: name):
    assert named and all(p.grad is not None for _, p in named if p.requires_grad)
    for name, parameter in named:
        if parameter.requires_grad:
            want = theirs[rename(name)].grad
            torch.testing.assert_close(
                parameter.grad,
                want.reshape(parameter.shape),
                rtol=1e-3,
                atol=2e-4 * max(1.0, float(want.abs().max())),
                msg=lambda m, n=name: f"{n}: {m}",
            )


def test_an_eagle3_head_with_latent_attention_learns_as_the_dense_oracle(target):
    steps, weights = 4, [0.8**k for k in range(4)]
    head = randomise(Eagle3Head(Eagle3Config.for_target(target.config, 101, latent=True)), 1, 0.2)
    hot = torch.randperm(V, generator=torch.Generator().manual_seed(1))[:101]
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[hot] = True
    head.set_vocab_map(hot - torch.arange(101), t2d)
    result, features, counts = ours(head, target, steps, weights)

    oracle = copy.deepcopy(head)
    oracle.zero_grad()
    attention = MaskedMLA(THEIRS, 2 * 48)
    attention.inner.load_state_dict(oracle.midlayer.self_attn.state_dict())
    ids, _, doc_start = packed_row()
    positions = torch.arange(len(ids)) - doc_start
    hidden, layer, inputs, total = oracle.fc(features.aux_hidden_states), oracle.midlayer, [], 0.0
    for step in range(steps):
        normed = layer.hidden_norm(hidden)
        embeds = layer.input_layernorm(target.embed(shifted(ids, 1 + step)))
        inputs.append(torch.cat((embeds, normed), -1))
        h = hidden + attention(inputs, masks_of(doc_start, step + 1), positions)
        hidden = h + layer.mlp(layer.post_attention_layernorm(h))
        logits = oracle.norm(hidden) @ oracle.lm_head.weight.t()
        loss, hits, count = loss_of(logits, target, features, step, oracle.token_map)
        assert (counts[step], int(result.matches[step])) == (count, hits) and count > 5
        assert float(result.losses[step]) == pytest.approx(float(loss.detach()), rel=1e-5)
        total = total + weights[step] * loss
    total.backward()
    assert float(result.loss) == pytest.approx(float(total.detach()), rel=1e-5)
    theirs = dict(oracle.named_parameters())
    theirs |= {f"midlayer.self_attn.{n}": p for n, p in attention.inner.named_parameters()}
    compare(list(head.named_parameters()), theirs)


def loaded(module: PublishedModule, target) -> dict[str, torch.Tensor]:
    """A published module's tensors by our names."""
    state = {}
    for name, tensor in module.state_dict().items():
        if name.startswith("rope."):
            continue
        state[{"norm.weight": "shared_head.norm.weight"}.get(name, name.removeprefix("layer."))] = tensor
    for prefix in ("mlp.", "mlp.shared_experts."):
        if f"{prefix}gate_proj.weight" in state:
            parts = [state.pop(f"{prefix}{part}_proj.weight") for part in ("gate", "up")]
            state[f"{prefix}gate_up_proj.weight"] = torch.cat(parts)
    return state


def their_name(name: str) -> str:
    """Our name of a module's parameter -> transformers'."""
    if name.startswith(("enorm", "hnorm", "eh_proj")):
        return name
    return "norm.weight" if name.startswith("shared_head") else f"layer.{name}"


@pytest.mark.parametrize("count", [1, 3])
def test_mtp_modules_learn_as_the_dense_oracle(target, count):
    """One module on its own normed output, keys of all its steps; of three each over all rows."""
    steps, weights = 3, [1.0, 0.6, 0.3]
    modules = [random_module(THEIRS, 20 + i) for i in range(count)]
    head = MTPHead(MTPConfig(target.config, count)).bind(target.lm_head)
    for mine, module in zip(head.layers, modules, strict=True):
        mine.load_state_dict(loaded(module, target))
    result, features, counts = ours(head, target, steps, weights)
    ids, _, doc_start = packed_row()
    positions = torch.arange(len(ids)) - doc_start
    hidden, inputs, total = features.hidden, [], 0.0
    for step in range(steps):
        module = modules[min(step, count - 1)]
        x = module.eh_proj(
            torch.cat((module.enorm(target.embed(shifted(ids, 1 + step))), module.hnorm(hidden)), -1)
        )
        attention = MaskedMLA(THEIRS, 48)
        attention.inner = module.layer.self_attn
        inputs = (
            [*inputs, module.layer.input_layernorm(x)] if count == 1 else [module.layer.input_layernorm(x)]
        )
        h = x + attention(inputs, masks_of(doc_start, len(inputs)), positions)
        mlp = module.layer.mlp(module.layer.post_attention_layernorm(h)[None])
        hidden = module.norm(h + mlp[0])
        logits = hidden @ target.head_weight.t()
        loss, hits, rows = loss_of(logits, target, features, step, torch.arange(V))
        assert (counts[step], int(result.matches[step])) == (rows, hits) and rows > 5
        assert float(result.losses[step]) == pytest.approx(float(loss.detach()), rel=1e-5)
        total = total + weights[step] * loss
    total.backward()
    assert float(result.loss) == pytest.approx(float(total.detach()), rel=1e-5)
    for mine, module in zip(head.layers, modules, strict=True):
        theirs = dict(module.named_parameters())
        gate, up = (theirs.get(f"layer.mlp.shared_experts.{part}_proj.weight") for part in ("gate", "up"))
        fused = torch.nn.Parameter(torch.cat((gate, up)))
        fused.grad = torch.cat((gate.grad, up.grad))
        theirs["layer.mlp.shared_experts.gate_up_proj.weight"] = fused
        compare(list(mine.named_parameters()), theirs, their_name)
    assert target.head_weight.grad is None and not target.head_weight.requires_grad


def test_narrow_values_are_attended_to_exactly():
    """Zeros beside values change nothing: the reference over unequal sizes, head by head."""
    generator = torch.Generator().manual_seed(0)
    rows, doc_start = torch.tensor([2, 3, 7, 9]), torch.tensor([0] * 5 + [5] * 6)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float32).requires_grad_()

    q, k, v = draw(4, 6, 20), draw(11, 6, 20), draw(11, 6, 10)
    own_k, own_v = draw(4, 6, 2, 20), draw(4, 6, 2, 10)
    got = step_attention(q, k, v, own_k, own_v, plan_queries(rows, doc_start), 0.3)
    expected = []
    for i, row in enumerate(rows.tolist()):
        first = int(doc_start[row])
        keys = torch.cat((k[first : row + 1].transpose(0, 1), own_k[i]), 1)
        values = torch.cat((v[first : row + 1].transpose(0, 1), own_v[i]), 1)
        p = (torch.einsum("hd,hjd->hj", q[i], keys) * 0.3).softmax(-1)
        expected.append(torch.einsum("hj,hjd->hd", p, values))
    want = torch.stack(expected)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    inputs = (q, k, v, own_k, own_v)
    noise = torch.randn(want.shape, generator=generator)
    for mine, theirs in zip(
        torch.autograd.grad((got * noise).sum(), inputs),
        torch.autograd.grad((want * noise).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
