"""Judging a head by its accept length on held-out prompts, decoded by the engine and simulated."""

import copy
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from eagle_kit.config.engine import EngineConfig
from eagle_kit.config.train import JudgeConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.core.stats import SpecStats
from eagle_kit.engine.llm import LLM
from eagle_kit.models.draft_head import DraftHead
from eagle_kit.models.targets.target import Target
from eagle_kit.ops.linear import packed_parts
from eagle_kit.train.run.simulate import match_table, walk


@dataclass(frozen=True)
class Judgement:
    """Accept lengths of one head on this process's prompts.

    Attributes:
        decoded: counts of the engine, by shape.
        simulated: counts of a walk along the match table, for the shapes that are chains.
        num_different: replies that differ from plain decoding; 0 in fp32.
        num_tokens: of the target's own greedy replies.
        num_sayable: those of them that are in the draft vocabulary.
        by_category: counts of the engine for the first shape, by category of the prompts.
    """

    decoded: dict[str, SpecStats]
    simulated: dict[str, SpecStats]
    num_different: int
    num_tokens: int = 0
    num_sayable: int = 0
    by_category: dict[str, SpecStats] = field(default_factory=dict)

    @staticmethod
    def total(parts: Sequence["Judgement"]) -> "Judgement":
        """Sum of the judgements of all processes."""

        def add(stats: Iterable[dict[str, SpecStats]]) -> dict[str, SpecStats]:
            sums: defaultdict[str, SpecStats] = defaultdict(SpecStats)
            for one in stats:
                for shape, counts in one.items():
                    sums[shape].add(counts)
            return dict(sums)

        return Judgement(
            add(part.decoded for part in parts),
            add(part.simulated for part in parts),
            sum(part.num_different for part in parts),
            sum(part.num_tokens for part in parts),
            sum(part.num_sayable for part in parts),
            add(part.by_category for part in parts),
        )

    def row(self) -> dict[str, Any]:
        """Figures of ``judge.jsonl``: shares of verifies, of tokens for the coverage; accept lengths of the
        first shape by category where there are several."""
        figures: dict[str, Any] = {}
        lengths = {name: stats.accept_length for name, stats in sorted(self.by_category.items())}
        for prefix, found in (("", self.decoded), ("simulated_", self.simulated)):
            figures |= {
                f"{prefix}accept_length": {shape: stats.accept_length for shape, stats in found.items()},
                f"{prefix}acceptance_per_position": {
                    shape: stats.acceptance_per_position for shape, stats in found.items()
                },
            }
        return {
            **figures,
            **({"accept_length_of": lengths} if len(lengths) > 1 else {}),
            "num_verifies": {shape: stats.num_verifies for shape, stats in self.decoded.items()},
            "vocab_coverage": self.num_sayable / self.num_tokens if self.num_tokens else None,
            "num_different_replies": self.num_different,
        }


class Judge:
    """Decodes held-out prompts with the engine.

    Args:
        target: the target; the engine packs weights, so it gets a view that training does not notice.
        prompts: token ids of the prompts, this process's share; see :func:`choose_prompts`.
        config: lengths and shapes.
        categories: of the prompts; None counts them as one.

    Attributes:
        replies: token ids of the target's plain greedy replies; None before the first judgement.
    """

    def __init__(
        self,
        target: Target,
        prompts: Sequence[list[int]],
        config: JudgeConfig,
        categories: Sequence[str] | None = None,
    ) -> None:
        self.target, self.config, self.prompts = share_weights(target), config, list(prompts)
        self.categories = ["all"] * len(prompts) if categories is None else list(categories)
        self.replies: list[list[int]] | None = None
        longest = max((len(prompt) for prompt in self.prompts), default=1)
        context = min(target.config.max_position_embeddings, longest + config.max_tokens + 1)
        self._engine_config = EngineConfig(max_batch_size=config.batch_size, max_context=context)

    def judge(self, head: DraftHead) -> Judgement:
        """Decode with ``head`` as it is now, in every shape; the head is not changed."""
        shapes = {shape: SpecShape.parse(shape) for shape in self.config.shapes}
        decoded = {name: SpecStats() for name in shapes}
        simulated = {name: SpecStats() for name, shape in shapes.items() if shape.topk == 1}
        by_category = {name: SpecStats() for name in self.categories}
        if not self.prompts:
            return Judgement(decoded, simulated, 0)
        llm = LLM(self.target, head, self._engine_config)
        assert llm.head is not None
        if self.replies is None:
            self.replies = self._decode_plainly(llm)
        replies = self.replies
        different = set()
        for name, shape in shapes.items():
            outputs = llm.generate(
                self.prompts, SamplingParams(max_tokens=self.config.max_tokens), shape=shape
            )
            for i, output in enumerate(outputs):
                decoded[name].add(output.stats)
                if name == self.config.shapes[0]:
                    by_category[self.categories[i]].add(output.stats)
                if output.token_ids != replies[i]:
                    different.add(i)
        if simulated:
            depth = max(shapes[name].steps for name in simulated)
            device = self.target.embed_tokens.weight.device
            for prompt, reply in zip(self.prompts, replies, strict=True):
                ids = torch.tensor(prompt + reply, device=device)
                table = match_table(self.target, llm.head, ids, len(prompt), depth)
                for name, stats in simulated.items():
                    stats.add(walk(table[:, : shapes[name].steps]))
        said = torch.tensor([token for reply in replies for token in reply], device=head.t2d.device)
        sayable = int(head.t2d[said].sum()) if len(said) else 0
        return Judgement(decoded, simulated, len(different), len(said), sayable, by_category)

    def _decode_plainly(self, llm: LLM) -> list[list[int]]:
        """Plain greedy replies."""
        outputs = llm.generate(self.prompts, SamplingParams(max_tokens=self.config.max_tokens), shape="none")
        return [output.token_ids for output in outputs]


def choose_prompts(heldout: Sequence[list[int]], config: JudgeConfig, max_context: int) -> list[int]:
    """Places of the prompts that are decoded: the first ``config.prompts`` of ``heldout``, less those that
    have no room for ``config.max_tokens`` more in ``max_context`` tokens; none when nothing is judged.

    Raises:
        UserError: judging is asked for and no prompt is left.
    """
    if not config.every:
        return []
    if not heldout:
        raise UserError(
            "judge.every asks for decoding, but no prompts are held out: data.eval_conversations is 0, or "
            "every prompt fills more than half of data.max_length.",
            "Set data.eval_conversations, raise data.max_length, or set judge.every=0.",
        )
    longest = max_context - config.max_tokens
    fitting = [i for i, prompt in enumerate(heldout[: config.prompts]) if len(prompt) <= longest]
    if not fitting:
        raise UserError(
            f"No held-out prompt has room for {config.max_tokens} more tokens in a context of {max_context}.",
            "Lower judge.max_tokens, or set judge.every=0.",
        )
    return fitting


def share_weights(target: Target) -> Target:
    """A second model object over the same weights, and of the same ranks."""
    shared = (*target.parameters(), *target.buffers(), *packed_parts(target), target.ranks)
    return copy.deepcopy(target, {id(each): each for each in shared if each is not None})
