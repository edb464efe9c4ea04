"""The training loss: linear layer and soft cross-entropy, fused."""

from eagle_kit.kernels.soft_cross_entropy.reference import SoftCrossEntropy, linear_soft_cross_entropy

__all__ = ["SoftCrossEntropy", "linear_soft_cross_entropy"]
