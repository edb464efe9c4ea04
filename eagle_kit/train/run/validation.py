"""Validation during training: accept length of a draft head on held-out prompts, decoded and simulated."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from eagle_kit.config.engine import EngineConfig
from eagle_kit.config.train import ValidationConfig
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
class ValidationResult:
    """Result of one validation: acceptance counts of one head on this process's prompts.

    Attributes:
        decoded: counts of the engine by draft shape.
        simulated: counts of a walk along the match table, for the shapes that are chains.
        num_different: responses that differ from plain decoding; 0 in fp32.
        num_tokens: tokens of the target's own greedy responses.
        num_sayable: tokens of these responses that are in the draft vocabulary.
        by_category: counts of the engine for the first shape, by category of the prompts.
    """

    decoded: dict[str, SpecStats]
    simulated: dict[str, SpecStats]
    num_different: int
    num_tokens: int = 0
    num_sayable: int = 0
    by_category: dict[str, SpecStats] = field(default_factory=dict)

    @staticmethod
    def total(parts: Sequence["ValidationResult"]) -> "ValidationResult":
        """Sum of the validations of all processes."""
        return ValidationResult(
            decoded=_sum_stats(part.decoded for part in parts),
            simulated=_sum_stats(part.simulated for part in parts),
            num_different=sum(part.num_different for part in parts),
            num_tokens=sum(part.num_tokens for part in parts),
            num_sayable=sum(part.num_sayable for part in parts),
            by_category=_sum_stats(part.by_category for part in parts),
        )

    def row(self) -> dict[str, Any]:
        """Figures of ``validation.jsonl``.

        Acceptance per position is a share of the verifies, coverage a share of the tokens. Accept lengths by
        category are of the first shape, and left out if there is one category.
        """
        # Acceptance by shape, decoded and simulated.
        figures: dict[str, Any] = {}
        for prefix, by_shape in (("", self.decoded), ("simulated_", self.simulated)):
            lengths = {}
            per_position = {}
            for shape, stats in by_shape.items():
                lengths[shape] = stats.accept_length
                per_position[shape] = stats.acceptance_per_position
            figures[f"{prefix}accept_length"] = lengths
            figures[f"{prefix}acceptance_per_position"] = per_position

        # Accept length by category.
        if len(self.by_category) > 1:
            figures["accept_length_of"] = {
                name: stats.accept_length for name, stats in sorted(self.by_category.items())
            }

        # Counts.
        figures["num_verifies"] = {shape: stats.num_verifies for shape, stats in self.decoded.items()}
        figures["vocab_coverage"] = self.num_sayable / self.num_tokens if self.num_tokens else None
        figures["num_different_responses"] = self.num_different
        return figures


def _sum_stats(parts: Iterable[dict[str, SpecStats]]) -> dict[str, SpecStats]:
    """Sum statistics by name."""
    sums: defaultdict[str, SpecStats] = defaultdict(SpecStats)
    for part in parts:
        for name, stats in part.items():
            sums[name].add(stats)
    return dict(sums)


class Validator:
    """Validates a draft head: decodes held-out prompts with the engine.

    Args:
        target: the target. The engine packs weights, so validation uses a second model object over the same
            weights; ``target`` is not changed.
        prompts: token ids of this process's prompts; see :func:`choose_prompts`.
        config: lengths and draft shapes.
        categories: category of each prompt; None puts all prompts in one.

    Attributes:
        responses: token ids of the target's plain greedy responses; None before the first validation.
    """

    def __init__(
        self,
        target: Target,
        prompts: Sequence[list[int]],
        config: ValidationConfig,
        categories: Sequence[str] | None = None,
    ) -> None:
        self.target = share_weights(target)
        self.config = config
        self.prompts = list(prompts)
        self.categories = ["all"] * len(prompts) if categories is None else list(categories)
        self.responses: list[list[int]] | None = None

        # The context has room for the longest prompt and its response.
        longest = max((len(prompt) for prompt in self.prompts), default=1)
        context = min(target.config.max_position_embeddings, longest + config.max_tokens + 1)
        self._engine_config = EngineConfig(max_batch_size=config.batch_size, max_context=context)

    def validate(
        self, head: DraftHead, on_response: Callable[[int, int], None] | None = None
    ) -> ValidationResult:
        """Decode the prompts with ``head`` in every shape; the head is not changed.

        Args:
            head: the draft head.
            on_response: called with the number of decoded responses and the number of all, before the first
                response and after each.
        """
        shapes = {name: SpecShape.parse(name) for name in self.config.shapes}
        chains = {name: shape for name, shape in shapes.items() if shape.topk == 1}
        decoded = {name: SpecStats() for name in shapes}
        simulated = {name: SpecStats() for name in chains}
        by_category = {name: SpecStats() for name in self.categories}
        if not self.prompts:
            return ValidationResult(decoded, simulated, 0)

        # Count the responses that are decoded.
        num_passes = len(shapes) + (self.responses is None)
        total = num_passes * len(self.prompts)
        num_done = 0

        def count(*_: object) -> None:
            nonlocal num_done
            num_done += 1
            if on_response is not None:
                on_response(num_done, total)

        if on_response is not None:
            on_response(0, total)

        # Plain greedy responses, once for all validations.
        llm = LLM(self.target, head, self._engine_config)
        assert llm.head is not None
        if self.responses is None:
            self.responses = self._decode_plainly(llm, count)
        responses = self.responses

        # Decode in every shape.
        different = set()
        sampling = SamplingParams(max_tokens=self.config.max_tokens)
        for name, shape in shapes.items():
            outputs = llm.generate(self.prompts, sampling, shape=shape, on_finish=count)
            for i, output in enumerate(outputs):
                decoded[name].add(output.stats)
                if name == self.config.shapes[0]:
                    by_category[self.categories[i]].add(output.stats)
                if output.token_ids != responses[i]:
                    different.add(i)

        # Simulate the chains along the plain responses.
        if chains:
            depth = max(shape.steps for shape in chains.values())
            device = self.target.embed_tokens.weight.device
            for prompt, response in zip(self.prompts, responses, strict=True):
                ids = torch.tensor(prompt + response, device=device)
                table = match_table(self.target, llm.head, ids, len(prompt), depth)
                for name, shape in chains.items():
                    simulated[name].add(walk(table[:, : shape.steps]))

        # Count the tokens of the responses that the draft vocabulary has.
        token_ids = [token for response in responses for token in response]
        tokens = torch.tensor(token_ids, device=head.t2d.device)
        num_sayable = int(head.t2d[tokens].sum()) if len(tokens) else 0
        return ValidationResult(decoded, simulated, len(different), len(tokens), num_sayable, by_category)

    def _decode_plainly(self, llm: LLM, on_finish: Callable[..., None]) -> list[list[int]]:
        """Greedy responses of the target without speculation."""
        sampling = SamplingParams(max_tokens=self.config.max_tokens)
        outputs = llm.generate(self.prompts, sampling, shape="none", on_finish=on_finish)
        return [output.token_ids for output in outputs]


def choose_prompts(heldout: Sequence[list[int]], config: ValidationConfig, max_context: int) -> list[int]:
    """Choose the prompts that validation decodes.

    Args:
        heldout: token ids of the held-out prompts.
        config: number of prompts, and tokens of a response.
        max_context: context length of the target, in tokens.

    Returns:
        Indices into ``heldout``: the first ``config.prompts``, without prompts that leave no room for a
        response of ``config.max_tokens`` tokens. Empty if ``config.every`` is 0.

    Raises:
        UserError: ``config.every`` is set and no prompt is left.
    """
    if not config.every:
        return []
    if not heldout:
        raise UserError(
            f"validation.every is {config.every}, but no prompts are held out: data.eval_conversations is 0, "
            "or every prompt fills more than half of data.max_length.",
            "Set data.eval_conversations, raise data.max_length, or set validation.every=0.",
        )

    longest = max_context - config.max_tokens
    fitting = []
    for i, prompt in enumerate(heldout[: config.prompts]):
        if len(prompt) <= longest:
            fitting.append(i)
    if not fitting:
        raise UserError(
            f"No held-out prompt has room for {config.max_tokens} more tokens in a context of {max_context}.",
            "Lower validation.max_tokens, or set validation.every=0.",
        )
    return fitting


def share_weights(target: Target) -> Target:
    """A second model object over the weights, buffers, packed weights and ranks of ``target``."""
    shared = [*target.parameters(), *target.buffers(), *packed_parts(target), target.ranks]
    memo = {id(each): each for each in shared if each is not None}
    return copy.deepcopy(target, memo)
