"""A tiny target and head that have learned a tiny language: every token is followed by few others."""

import torch
from tiny import tiny_head, tiny_target
from torch.nn import functional as F

LENGTH, ROWS = 24, 32


def trained_models(
    vocab_size: int = 11, draft_vocab_size: int = 9, steps: int = 80, *, train_head: bool = True
):
    """A target trained on a Markov chain, and an EAGLE-3 head trained on the target's distributions, in
    seconds."""
    generator = torch.Generator().manual_seed(0)
    chain = (2.5 * torch.randn(vocab_size, vocab_size, generator=generator)).softmax(-1)
    target = tiny_target(vocab_size, std=0.1)
    head = tiny_head(target, draft_vocab_size, std=0.1)

    def text() -> torch.Tensor:
        ids = [torch.randint(vocab_size, (ROWS,), generator=generator)]
        for _ in range(LENGTH):
            ids.append(torch.multinomial(chain[ids[-1]], 1, generator=generator)[:, 0])
        return torch.stack(ids, 1)

    positions = torch.arange(LENGTH).repeat(ROWS)

    def learn(model, loss) -> None:
        model.requires_grad_(True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        for _ in range(steps):
            optimizer.zero_grad()
            loss(text()).backward()
            optimizer.step()
        model.eval().requires_grad_(False)

    def of_target(ids: torch.Tensor) -> torch.Tensor:
        out = target(ids[:, :-1].reshape(-1), positions, _causal)
        return F.cross_entropy(target.logits(out.hidden), ids[:, 1:].reshape(-1))

    def of_head(ids: torch.Tensor) -> torch.Tensor:
        before, after = ids[:, :-1].reshape(-1), ids[:, 1:].reshape(-1)
        with torch.no_grad():
            out = target(before, positions, _causal, head.config.aux_layer_ids)
            distribution = target.logits(out.hidden)[:, head.token_map].softmax(-1).view(ROWS, LENGTH, -1)
        states = head(head.fuse(out.aux_hidden_states), target.embed(after), positions, _causal)
        logits = head.logits(states).view(ROWS, LENGTH, -1)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), distribution[:, 1:].flatten(0, 1))

    learn(target, of_target)
    if train_head:
        learn(head, of_head)
    return target, head


def _causal(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.view(ROWS, LENGTH, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)
