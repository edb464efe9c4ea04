"""Precision in which cuBLAS adds up the parts of a product whose inner dimension it splits."""

import torch


def add_up_in_fp32() -> None:
    """Let this process's products of bf16 and fp16 be added up in fp32; by default torch lets cuBLAS round
    the parts of a split product first.

    It is set once for a process, and at its start, so that no product of a run depends on what ran before. A
    split itself stays allowed: its parts have an order, and without it few rows would not fill a GPU.
    """
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False
