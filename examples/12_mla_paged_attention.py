"""Verify a tree of drafts with MLA attention over a paged cache, by the plan / run contract of FlashInfer.

An engine of your own can call this operation in place of ``flashinfer.mla.BatchMLAPagedAttentionWrapper``,
which takes no trees. Two requests with 5 and 3 cached tokens verify a tree of four nodes each:

    node 0 is the last token, nodes 1 and 2 are two candidates for the next one, node 3 follows node 1.
"""

import torch

from eagle_kit.ops.attention.mla.paged_wrapper import BatchMLAPagedAttention, verify_arrays
from eagle_kit.ops.tree_build.masks import tree_mask

PARENTS = [-1, 0, 0, 1]
NUM_HEADS = 4
LATENT_DIM = 32
ROPE_DIM = 8
PAGE_SIZE = 4


def main() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    num_nodes = len(PARENTS)
    seq_lens = torch.tensor([5, 3])
    page_table = torch.tensor([[2, 0, 5], [4, 1, -1]])

    # Bit j of a node is set if the node attends to node j of its own tree.
    ancestors = torch.zeros(num_nodes, dtype=torch.int64)
    for node, parent in enumerate(PARENTS):
        ancestors[node] = 1 << node
        if parent >= 0:
            ancestors[node] |= ancestors[parent]

    # The cache holds the latent and the rotated part of every token, the nodes' own included.
    cache = torch.randn(6, PAGE_SIZE, LATENT_DIM + ROPE_DIM, generator=generator)
    queries = torch.randn(2 * num_nodes, NUM_HEADS, LATENT_DIM + ROPE_DIM, generator=generator)

    # Plan once per step, run once per layer.
    arrays = verify_arrays(num_nodes, seq_lens, page_table, PAGE_SIZE)
    attention = BatchMLAPagedAttention()
    attention.plan(
        arrays.qo_indptr,
        arrays.kv_indptr,
        arrays.kv_indices,
        arrays.kv_len_arr,
        NUM_HEADS,
        LATENT_DIM,
        ROPE_DIM,
        PAGE_SIZE,
        arrays.causal,
        sm_scale=(LATENT_DIM + ROPE_DIM) ** -0.5,
        q_data_type=queries.dtype,
        ancestors=ancestors.repeat(2),
    )
    out = attention.run(
        queries[..., :LATENT_DIM],
        queries[..., LATENT_DIM:],
        cache[..., :LATENT_DIM],
        cache[..., LATENT_DIM:],
    )
    print(f"output of {out.shape[0]} nodes, {out.shape[1]} heads of {out.shape[2]} values")

    # The same tree as the mask that SGLang calls FULL_MASK: prefix and nodes, one request after the other.
    mask = tree_mask(ancestors.repeat(2, 1), "full", prefix=seq_lens.tolist())
    print("mask of the first request:")
    for row in mask[: num_nodes * (5 + num_nodes)].view(num_nodes, -1).int().tolist():
        print(" ", *row)
    return out


if __name__ == "__main__":
    main()
