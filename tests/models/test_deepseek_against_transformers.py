"""DeepSeek-V2, V3 and their kin compute what transformers computes, on tiny random models of each config."""

import pytest
import torch
from tiny_mixtures import DEEPSEEK
from transformers import AutoModelForCausalLM

from eagle_kit.kernels.prefill_attention import prefill_attention
from eagle_kit.models.llama import LlamaModel, TargetOutput
from eagle_kit.models.loader import load_target


def run(model: LlamaModel, ids: torch.Tensor, capture: tuple[int, ...] = ()) -> TargetOutput:
    """One document through a target."""
    scale = model.config.attention_scale

    def attend(layer, q, k, v):
        return prefill_attention(q, k, v, scale)

    return model(ids, torch.arange(len(ids)), attend, capture=capture)


def randomised(config) -> torch.nn.Module:
    """A model of which everything is random: norms, biases, and the gates, which transformers starts at 0."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(torch.rand_like(tensor))
            elif name.endswith("gate.weight"):
                tensor.normal_(std=0.3)
            elif tensor.ndim == 1 and "inv_freq" not in name:
                tensor.add_(torch.randn_like(tensor) * 0.3)
    return model


@pytest.mark.parametrize("name", DEEPSEEK)
def test_logits_and_captured_states_equal_those_of_transformers(name, tmp_path):
    theirs = randomised(DEEPSEEK[name])
    theirs.save_pretrained(tmp_path)
    ours = load_target(tmp_path)
    layers = theirs.config.num_hidden_layers
    for length in (1, 37, 201):
        ids = torch.randint(0, 271, (length,), generator=torch.Generator().manual_seed(length))
        with torch.no_grad():
            want = theirs(ids[None], output_hidden_states=True)
            got = run(ours, ids, capture=tuple(range(layers)))
            logits = ours.logits(got.hidden)
        scale = want.logits.abs().max()
        assert scale > 1
        assert (logits - want.logits[0]).abs().max() < 2e-5 * scale
        for i, state in enumerate(got.aux.chunk(layers, -1)):
            expected = want.hidden_states[i][0]
            assert (state - expected).abs().max() < 2e-5 * expected.abs().max(), f"input of layer {i}"
