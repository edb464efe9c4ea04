"""The engine with mixtures of experts behind grouped-query attention."""

import pytest
import torch
from tiny import tiny_head
from tiny_engine import PROMPTS, decode
from tiny_mixtures import GROUPED, randomised
from transformers import MixtralConfig, Qwen3MoeConfig

from eagle_kit.models.loading.loader import load_target

SMALL = GROUPED | {"vocab_size": 11, "num_hidden_layers": 3}
TARGETS = {
    "mixtral": MixtralConfig(**SMALL, num_local_experts=5, num_experts_per_tok=2),
    "qwen3-moe": Qwen3MoeConfig(
        **SMALL, num_experts=9, num_experts_per_tok=4, moe_intermediate_size=20, head_dim=12, eos_token_id=2
    ),
}


@pytest.mark.parametrize("name", TARGETS)
def test_mixtures_say_what_transformers_generates_whatever_is_drafted(name, tmp_path):
    theirs = randomised(TARGETS[name])
    theirs.save_pretrained(tmp_path)
    target = load_target(tmp_path)
    models = target, tiny_head(target, draft_vocab_size=9)
    plain = [r.token_ids for r in decode(models, max_tokens=20)]
    speculated = decode(models, "4,4,16", batch=5, page_size=3, max_tokens=20)
    assert [r.token_ids for r in speculated] == plain
    for prompt, response in zip(PROMPTS, plain, strict=True):
        ids = torch.tensor([prompt])
        said = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=20,
            eos_token_id=2,
            pad_token_id=0,
        )
        assert response == said[0, len(prompt) :].tolist()
