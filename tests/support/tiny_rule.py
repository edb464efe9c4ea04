"""A tiny target and heads that have learned a rule which needs the last two tokens: of an even token the next
one follows from it, of an odd one from the token before. So both the embedding and the feature matter to a
head, and so does their place. Every fourth token of a text is random, or texts would soon run in circles."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from filelock import FileLock
from tiny import tiny_head, tiny_target
from torch.nn import functional as F

from eagle_kit.eval.diagnose.row import PromptResponse
from eagle_kit.objective.loss import TTTBatch
from eagle_kit.objective.row_plan import make_row_plan
from eagle_kit.objective.target_features import capture_features
from eagle_kit.objective.ttt import ttt_forward

shared_folder: Path | None = None
"""Where the processes of a test session keep what one of them has trained; None without any."""
VOCABULARY, LENGTH, ROWS, JUMPS, STEPS = 41, 96, 8, 0.25, 3


@cache
def rule() -> tuple[torch.Tensor, torch.Tensor]:
    """The next token after an even token, and after the token before an odd one."""
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randperm(VOCABULARY, generator=generator) for _ in range(2))


def rows_of_text(generator: torch.Generator, count: int = ROWS, length: int = LENGTH + 2) -> torch.Tensor:
    """Texts ``[count, length]`` that follow the rule where they are not random."""
    one, other = rule()
    text = [torch.randint(VOCABULARY, (count,), generator=generator) for _ in range(2)]
    while len(text) < length:
        follows = torch.where(text[-1] % 2 == 0, one[text[-1]], other[text[-2]])
        jumps = torch.rand(count, generator=generator) < JUMPS
        text.append(torch.where(jumps, torch.randint(VOCABULARY, (count,), generator=generator), follows))
    return torch.stack(text, 1)


@cache
def learned_target(steps: int = 140):
    """A target that follows the rule."""
    target = tiny_target(VOCABULARY, std=0.1)

    def loss(text: torch.Tensor) -> torch.Tensor:
        ids = text[:, : LENGTH + 1]
        out = target(ids[:, :-1].reshape(-1), _positions(), _causal)
        return F.cross_entropy(target.logits(out.hidden), ids[:, 1:].reshape(-1))

    _learn_once(f"target-{steps}", target, loss, steps)
    return target


@cache
def learned_head(
    steps: int = 120, *, make=tiny_head, late_features: int = 0, late_tokens: int = 0, **changes
):
    """A head of :func:`learned_target` by training-time test; change a copy.

    Args:
        make: of a kind; an EAGLE-3 head leaves two tokens out of its vocabulary.
        late_features, late_tokens: slots by which its inputs come late in training.
    """
    target = learned_target()
    changes = {"draft_vocab_size": VOCABULARY - 2} | changes if make is tiny_head else changes
    head = make(target, std=0.1, **changes)
    rows = target.head_weight if head.token_map is None else target.head_weight[head.token_map]
    doc_start = torch.arange(ROWS).repeat_interleave(LENGTH + 2) * (LENGTH + 2)
    place = torch.arange(len(doc_start)) - doc_start
    plan = make_row_plan(torch.where(place >= 2, doc_start, -1), doc_start, STEPS)
    weights = [torch.full((count,), 1 / count / STEPS) for count in plan.counts]

    def loss(text: torch.Tensor) -> torch.Tensor:
        ids = text.reshape(-1)
        features = capture_features(target, ids, doc_start, head.config.aux_layer_ids, plan.is_teacher)
        late = features._replace(aux_hidden_states=features.aux_hidden_states.roll(late_features, 0))
        embed = target.embed_tokens.weight
        batch = TTTBatch(ids.roll(late_tokens), plan, weights, features, embed, rows, late)
        return ttt_forward(head, batch).loss

    options = [str(value) for _, value in sorted(changes.items())]
    name = "-".join([make.__name__, str(steps), str(late_features), str(late_tokens), *options])
    _learn_once(f"head-{name}", head, loss, steps)
    return head


def texts(count: int = 32, prompt: int = 6) -> list[PromptResponse]:
    """Texts that no model learned from."""
    ids = rows_of_text(torch.Generator().manual_seed(11), count, 36).tolist()
    return [PromptResponse(row[:prompt], row[prompt:]) for row in ids]


def _learn_once(name: str, model, loss: Callable[[torch.Tensor], torch.Tensor], steps: int) -> None:
    """Train ``model``, or load what another process of this session has trained under the same name."""
    if shared_folder is None:
        _learn(model, loss, steps)
        return
    path = shared_folder / f"tiny-rule-{name}.pt"
    with FileLock(f"{path}.lock"):
        if path.exists():
            model.load_state_dict(torch.load(path))
            model.eval().requires_grad_(False)
        else:
            _learn(model, loss, steps)
            torch.save(model.state_dict(), path)


def _learn(model, loss: Callable[[torch.Tensor], torch.Tensor], steps: int) -> None:
    generator = torch.Generator().manual_seed(0)
    model.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 8e-3, total_steps=steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(rows_of_text(generator)).backward()
        optimizer.step()
        schedule.step()
    model.eval().requires_grad_(False)


def _positions() -> torch.Tensor:
    return torch.arange(LENGTH).repeat(ROWS)


def _causal(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.view(ROWS, LENGTH, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)
