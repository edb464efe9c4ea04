"""Check of a window for tests."""

import torch


def check_distinct_siblings(tokens: torch.Tensor, parents: torch.Tensor) -> None:
    """Check that no node of a window has two children of one token; for tests, since it reads tensors on the
    host.

    Args:
        tokens, parents: int64 ``[B, N]``; -1 is an unused node.

    Raises:
        ValueError: two siblings are the same token.
    """
    for b, (row, above) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
        first: dict[tuple[int, int], int] = {}
        for node in range(1, len(row)):
            other = first.setdefault((above[node], row[node]), node)
            if other != node and row[node] >= 0:
                raise ValueError(
                    f"Request {b}: nodes {other} and {node}, children of node {above[node]}, are both token "
                    f"{row[node]}. Siblings must be sampled without replacement."
                )
