"""The optimiser of a head."""

import torch

from eagle_kit.config.train import TrainingConfig
from eagle_kit.models.draft_head import DraftHead


def make_optimizer(head: DraftHead, training: TrainingConfig) -> torch.optim.AdamW:
    """AdamW over what is trained, with weight decay on matrices only."""
    trained = [p for p in head.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=training.learning_rate, betas=training.betas, eps=training.eps, fused=True
    )
