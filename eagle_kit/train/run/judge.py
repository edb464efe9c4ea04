"""Judging a head by its accept length on held-out prompts, decoded by the engine and simulated."""

import copy
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle_kit.config.engine import EngineConfig
from eagle_kit.config.train import JudgeConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import write_text_atomically
from eagle_kit.core.request import SamplingParams
from eagle_kit.core.shape import SpecShape
from eagle_kit.core.stats import SpecStats
from eagle_kit.kernels.linear import packed_parts
from eagle_kit.models.heads.draft_head import DraftHead
from eagle_kit.models.targets.llama import LlamaModel
from eagle_kit.serve.llm import LLM
from eagle_kit.train.run.simulate import match_table, walk
from eagle_kit.train.run.state import FREE_SPACE_AND_RESUME


@dataclass(frozen=True)
class Judgement:
    """Accept lengths of one head on this process's prompts.

    Attributes:
        decoded: what the engine counted, by shape.
        simulated: the match table walked, for the shapes that are chains.
        num_different: replies that differ from plain decoding; 0 in fp32.
        num_tokens: of the target's own greedy replies.
        num_sayable: those of them that are in the draft vocabulary.
    """

    decoded: dict[str, SpecStats]
    simulated: dict[str, SpecStats]
    num_different: int
    num_tokens: int = 0
    num_sayable: int = 0

    def add_up(self, add: Callable[[Sequence[float]], list[float]]) -> "Judgement":
        """The judgement of all processes.

        Args:
            add: sums numbers over the processes; called once, with as many by each. Histograms are left out.
        """
        own = [*self.decoded.items(), *self.simulated.items()]
        depths = [SpecShape.parse(shape).steps for shape, _ in own]
        numbers = [float(self.num_different), float(self.num_tokens), float(self.num_sayable)]
        for (_, stats), depth in zip(own, depths, strict=True):
            reached = stats.num_accepted_at[:depth]
            numbers += [
                stats.num_verifies,
                stats.num_emitted_tokens,
                *reached,
                *[0.0] * (depth - len(reached)),
            ]
        different, tokens, sayable, *rest = (int(number) for number in add(numbers))
        total: list[tuple[str, SpecStats]] = []
        for (shape, _), depth in zip(own, depths, strict=True):
            (verifies, emitted, *reached), rest = rest[: 2 + depth], rest[2 + depth :]
            total.append((shape, SpecStats(verifies, emitted, [], reached)))
        first = len(self.decoded)
        return Judgement(dict(total[:first]), dict(total[first:]), different, tokens, sayable)

    def row(self) -> dict[str, Any]:
        """The figures as ``judge.jsonl`` has them; shares of verifies, of tokens for the coverage."""
        figures: dict[str, Any] = {}
        for prefix, found in (("", self.decoded), ("simulated_", self.simulated)):
            figures |= {
                f"{prefix}accept_length": {shape: stats.accept_length for shape, stats in found.items()},
                f"{prefix}acceptance_per_position": {
                    shape: stats.acceptance_per_position for shape, stats in found.items()
                },
            }
        return {
            **figures,
            "num_verifies": {shape: stats.num_verifies for shape, stats in self.decoded.items()},
            "vocab_coverage": self.num_sayable / self.num_tokens if self.num_tokens else None,
            "num_different_replies": self.num_different,
        }


class Judge:
    """Decodes held-out prompts with the engine. The continuations of plain decoding are kept in a file.

    Args:
        target: the target; the engine packs weights, so it gets a view that training does not notice.
        prompts: token ids of the prompts, this process's share; see :func:`choose_prompts`.
        config: lengths and shapes.
        cache: file for the plain continuations.
    """

    def __init__(
        self, target: LlamaModel, prompts: Sequence[list[int]], config: JudgeConfig, cache: Path
    ) -> None:
        self.target, self.config, self.cache = share_weights(target), config, cache
        self.prompts = list(prompts)
        longest = max((len(prompt) for prompt in self.prompts), default=1)
        context = min(target.config.max_position_embeddings, longest + config.max_tokens + 1)
        self._engine_config = EngineConfig(max_batch_size=config.batch_size, max_context=context)

    def judge(self, head: DraftHead) -> Judgement:
        """Decode with ``head`` as it is now, in every shape; the head is not changed."""
        shapes = [SpecShape.parse(shape) for shape in self.config.shapes]
        decoded = {str(shape): SpecStats() for shape in shapes}
        simulated = {str(shape): SpecStats() for shape in shapes if shape.topk == 1}
        if not self.prompts:
            return Judgement(decoded, simulated, 0)
        llm = LLM(self.target, head, self._engine_config)
        assert llm.head is not None
        replies = self._continuations(llm)
        different = set()
        for shape in shapes:
            outputs = llm.generate(
                self.prompts, SamplingParams(max_tokens=self.config.max_tokens), shape=shape
            )
            for i, output in enumerate(outputs):
                decoded[str(shape)].add(output.stats)
                if output.token_ids != replies[i]:
                    different.add(i)
        if simulated:
            depth = max(shape.steps for shape in shapes if shape.topk == 1)
            device = self.target.embed_tokens.weight.device
            for prompt, reply in zip(self.prompts, replies, strict=True):
                ids = torch.tensor(prompt + reply, device=device)
                table = match_table(self.target, llm.head, ids, len(prompt), depth)
                for name, stats in simulated.items():
                    stats.add(walk(table[:, : SpecShape.parse(name).steps]))
        said = torch.tensor([token for reply in replies for token in reply], device=head.t2d.device)
        return Judgement(
            decoded, simulated, len(different), len(said), int(head.t2d[said].sum()) if len(said) else 0
        )

    def _continuations(self, llm: LLM) -> list[list[int]]:
        """Plain greedy replies, from the file when it was written for these prompts."""
        asked = json.dumps([self.prompts, self.config.max_tokens])
        key = hashlib.sha256(asked.encode()).hexdigest()
        kept = self._read_cache()
        if kept.get("key") == key and "replies" in kept:
            return kept["replies"]
        outputs = llm.generate(self.prompts, SamplingParams(max_tokens=self.config.max_tokens), shape="none")
        replies = [output.token_ids for output in outputs]
        try:
            write_text_atomically(self.cache, json.dumps({"key": key, "replies": replies}))
        except OSError as error:
            raise UserError(
                f"{self.cache} could not be written: {error.strerror or error}.", FREE_SPACE_AND_RESUME
            ) from error
        return replies

    def _read_cache(self) -> dict[str, Any]:
        """What is in the file; nothing when it is missing or damaged, since it can be made again."""
        try:
            kept = json.loads(self.cache.read_bytes())
        except (OSError, ValueError):
            return {}
        return kept if isinstance(kept, dict) else {}


def choose_prompts(heldout: Sequence[list[int]], config: JudgeConfig, max_context: int) -> list[list[int]]:
    """The prompts that are decoded: the first ``config.prompts`` of ``heldout``, less those that have no room
    for ``config.max_tokens`` more in ``max_context`` tokens; none when nothing is judged.

    Raises:
        UserError: judging is asked for and no prompt is left.
    """
    if not config.every:
        return []
    if not heldout:
        raise UserError(
            "judge.every asks for decoding, but no prompts are held out.",
            "Raise data.eval_conversations, or set judge.every=0.",
        )
    longest = max_context - config.max_tokens
    fitting = [prompt for prompt in heldout[: config.prompts] if len(prompt) <= longest]
    if not fitting:
        raise UserError(
            f"No held-out prompt has room for {config.max_tokens} more tokens in a context of {max_context}.",
            "Lower judge.max_tokens, or set judge.every=0.",
        )
    return fitting


def share_weights(target: LlamaModel) -> LlamaModel:
    """A second model object over the same weights."""
    tensors = (*target.parameters(), *target.buffers(), *packed_parts(target))
    return copy.deepcopy(target, {id(tensor): tensor for tensor in tensors})
