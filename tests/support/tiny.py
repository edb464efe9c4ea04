"""Tiny random models for tests. Sizes are odd on purpose."""

import torch

from eagle_kit.drafts.dflash.head import DFlashConfig, DFlashHead
from eagle_kit.drafts.dspark.head import DSparkConfig, DSparkHead
from eagle_kit.drafts.eagle3.head import Eagle3Config, Eagle3Head
from eagle_kit.drafts.p_eagle.head import PEagleConfig, PEagleHead
from eagle_kit.models.config import TargetConfig
from eagle_kit.models.layer_configs import DeltaConfig
from eagle_kit.models.targets.llama import LlamaModel


def tiny_target(
    vocab_size: int = 131, num_layers: int = 4, seed: int = 0, std: float = 0.2, **changes
) -> LlamaModel:
    """A random Llama: hidden 48, 6 / 2 heads of 8."""
    sizes = {
        "model_type": "llama",
        "hidden_size": 48,
        "num_layers": num_layers,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 96,
        "vocab_size": vocab_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    return randomise(LlamaModel(TargetConfig(**{**sizes, **changes})), seed, std).eval().requires_grad_(False)


def tiny_hybrid(vocab_size: int = 131, num_layers: int = 4, seed: int = 0, **changes) -> LlamaModel:
    """The same with the gated delta rule in three of four layers, gated attention in the fourth, and decays
    that let tokens be remembered for a while."""
    delta = DeltaConfig(
        tuple(i for i in range(num_layers) if (i + 1) % 4), 2, 4, key_dim=8, value_dim=6, conv_width=4
    )
    sizes = {"delta": delta, "gates_attention": True, "qk_norm": True, "rotary_dim": 4, **changes}
    target = tiny_target(vocab_size, num_layers, seed, **sizes)
    for layer in target.layers:
        if layer.is_recurrent:
            layer.linear_attn.A_log.fill_(-2.5)
    return target


def tiny_head(
    target: LlamaModel, draft_vocab_size: int = 67, seed: int = 1, std: float = 0.2, **changes
) -> Eagle3Head:
    """A random head for ``target`` with a random, unsorted hot-token map."""
    config = Eagle3Config.for_target(target.config, draft_vocab_size, **changes)
    return with_random_map(randomise(Eagle3Head(config), seed, std), seed)


def tiny_dflash(target: LlamaModel, seed: int = 1, std: float = 0.2, **changes) -> DFlashHead:
    """The same of DFlash, bound to the target."""
    sizes = {"num_layers": 3, "block_size": 6, "aux_layer_ids": (0, 1, 2, 3, 4), **changes}
    config = DFlashConfig.for_target(target.config, **sizes)
    head = randomise(DFlashHead(config), seed, std)
    return (with_random_map(head, seed) if config.owns_output else head).bind(target.lm_head)


def tiny_dspark(target: LlamaModel, seed: int = 1, std: float = 0.2, **changes) -> DSparkHead:
    """The same of DSpark, with a Markov head that changes most picks."""
    sizes = {"num_layers": 3, "block_size": 6, "aux_layer_ids": (0, 1, 2, 3, 4), "markov_rank": 5, **changes}
    config = DSparkConfig.for_target(target.config, **sizes)
    head = randomise(DSparkHead(config), seed, std)
    with torch.no_grad():
        if head.markov_head is not None:
            head.markov_head.markov_w2.weight.mul_(2)
    return (with_random_map(head, seed) if config.owns_output else head).bind(target.lm_head)


def tiny_p_eagle(
    target: LlamaModel, draft_vocab_size: int = 67, seed: int = 1, std: float = 0.2, **changes
) -> PEagleHead:
    """The same of P-EAGLE."""
    sizes = {"num_layers": 3, "mask_token_id": 7, **changes}
    config = PEagleConfig.for_target(target.config, draft_vocab_size, **sizes)
    return with_random_map(randomise(PEagleHead(config), seed, std), seed)


def with_random_map(head: Eagle3Head, seed: int) -> Eagle3Head:
    """Give a head a random, unsorted hot-token map."""
    size, vocab_size = head.config.draft_vocab_size, head.config.vocab_size
    hot = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))[:size]
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[hot] = True
    head.set_vocab_map(hot - torch.arange(size), t2d)
    return head


def randomise(model, seed: int, std: float):
    """Fill every matrix with normal numbers from ``seed``, and jitter every norm around one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * std
            parameter.copy_(noise if parameter.ndim > 1 else 1 + 0.5 * noise)
    return model


def packed_row(length: int = 61):
    """Three documents: prompt + response; two turns; a response cut off by the end of the row."""
    response = torch.full((length,), -1)
    doc_start = torch.zeros(length, dtype=torch.int64)
    doc_start[17:44], doc_start[44:] = 17, 44
    response[6:17] = 0
    response[20:27], response[31:44] = 1, 2
    response[49:] = 3
    ids = torch.randint(0, 131, (length,), generator=torch.Generator().manual_seed(5))
    return ids, response, doc_start
