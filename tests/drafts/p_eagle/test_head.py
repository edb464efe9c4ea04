"""P-EAGLE head against the published forward in fp64."""

import pytest
import torch
from published_p_eagle import PublishedPEagle
from tiny import tiny_p_eagle, tiny_target

from eagle_kit.drafts.files.draft import write_draft
from eagle_kit.drafts.files.draft_files import open_draft
from eagle_kit.drafts.p_eagle.kind import P_EAGLE
from eagle_kit.models.draft_chain import ChainRows

LENGTH, DEPTHS = 11, 4


class Dense:
    """Attention under a dense mask, in fp64; layers with a window see positions in it alone."""

    def __init__(self, seen: torch.Tensor, positions: torch.Tensor, windows: list[int | None]) -> None:
        self.seen = seen
        self.positions = positions
        self.windows = windows

    def __call__(self, layer, q, k, v):
        window = self.windows[layer]
        distance = self.positions[:, None] - self.positions
        seen = self.seen if window is None else self.seen & (distance < window)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
        return torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_layers": 1},
        {"norm_before_residual": True, "num_layers": 2, "rms_norm_eps": 0.1},
        {"norm_before_fc": True, "qk_norm": True},
        {"sliding_window": 5, "sliding_layers": (0, 1, 2)},
        {"sliding_window": 5, "sliding_layers": (1,), "qk_norm": True},
    ],
)
def test_logits_of_all_depths_equal_the_published_forward(tmp_path, changes):
    target = tiny_target()
    head = tiny_p_eagle(target, **changes)
    files = P_EAGLE.write(head, torch.float32)
    write_draft(tmp_path / "head", files.tensors, files.config, metadata={})
    read = P_EAGLE.read(open_draft(tmp_path / "head"), target)
    assert read.config == head.config
    ids = torch.randint(0, 131, (LENGTH,), generator=torch.Generator().manual_seed(3))
    aux = torch.randn(LENGTH, 3 * 48, generator=torch.Generator().manual_seed(4))
    rows = [torch.arange(LENGTH)] + [torch.tensor([2, 5, 9])] * (DEPTHS - 1)
    expected = PublishedPEagle(tmp_path / "head", target.embed_tokens.weight)(
        aux, ids, torch.zeros(LENGTH, dtype=torch.int64), rows
    )
    row = torch.cat(rows)
    depth = torch.cat([torch.full_like(r, d) for d, r in enumerate(rows)])
    seen = ((depth[None] == 0) & (row[None] <= row[:, None])) | (
        (row[None] == row[:, None]) & (depth[None] <= depth[:, None])
    )
    read = read.double()
    parts = read.midlayer.inputs(read.fuse(aux.double()), target.embed(ids).double())
    masks = len(row) - LENGTH
    inputs = [
        torch.cat((part, mask.expand(masks, -1)))
        for part, mask in zip(parts, read.mask_inputs(), strict=True)
    ]
    attend = Dense(seen, row + depth, head.config.windows)
    out = read.step((inputs[0], inputs[1]), row + depth, attend)
    torch.testing.assert_close(
        read.logits(out.fed_back), expected, rtol=1e-4, atol=1e-5
    )  # angles of RoPE are fp32
    some = torch.tensor([1, 12, 19])
    again = read.step((inputs[0], inputs[1]), row + depth, attend, output_rows=some)
    torch.testing.assert_close(again.lm_head_input, out.lm_head_input[some])
    given = ChainRows(
        read.fuse(aux.double()),
        lambda rows, step: ids[rows + step],
        lambda rows, step: target.embed(ids[rows + step]).double(),
        lambda token: target.embed(torch.tensor([token])).double(),
        rows[1],
        torch.zeros(LENGTH, dtype=torch.int64),
    )
    chains = read.chain(given, DEPTHS)
    torch.testing.assert_close(chains[0], out.fed_back[rows[1]], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat(chains[1:]), out.fed_back[LENGTH:], rtol=1e-4, atol=1e-5)


def test_the_cache_has_every_layer():
    assert tiny_p_eagle(tiny_target(), num_layers=3).cache.num_layers == 3
