"""The engines of a run: one for plain decoding and one for each draft, around one copy of the target."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from eagle_kit.config.engine import EngineConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.output import RequestOutput
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.data.chat.template import has_chat_template
from eagle_kit.data.tasks.sets import Task

if TYPE_CHECKING:
    from eagle_kit.drafts.files.draft import AnyDraft, DraftFolder

Messages = list[dict[str, str]]


class EvalEngine(Protocol):
    """The part of ``LLM`` that evaluation uses."""

    tokenizer: Any
    target: Any

    @property
    def max_context(self) -> int: ...

    def tokenize_task(self, prompt: Any) -> list[int]: ...

    def close(self) -> None: ...

    def logits(self, ids: list[int]) -> Any: ...

    def chat(
        self,
        conversations: Sequence[list[int]],
        sampling_params: SamplingParams | None = None,
        *,
        shape: str | None = None,
    ) -> list[RequestOutput]: ...


MakeEngines = Callable[[str, Sequence["AnyDraft"]], list[EvalEngine]]
"""(target, drafts) -> engines: the plain one, then one per draft."""


def open_drafts(target: str | Path, drafts: Mapping[str, str | Path]) -> "dict[str, DraftFolder]":
    """Open drafts, by the same names; see :meth:`~eagle_kit.drafts.files.draft.DraftFolder.open`."""
    from eagle_kit.drafts.files.draft import DraftFolder
    from eagle_kit.models.loading.loader import read_target_config
    from eagle_kit.models.loading.source import resolve_target

    config = read_target_config(resolve_target(target))
    return {name: DraftFolder.open(draft, config) for name, draft in drafts.items()}


def make_engines(
    target: str, drafts: Sequence["AnyDraft"], *, config: EngineConfig, records: bool = True
) -> list[EvalEngine]:
    """Load the target once and every draft, and make an engine for plain decoding and one for each
    draft.

    With tensor parallelism there is one engine, which decodes plainly and with its draft.

    Args:
        records: whether cycles on a CPU are recorded, see
            :mod:`~eagle_kit.engine.graphs.cpu_graph`.
    """
    from eagle_kit.drafts.files.findings import raise_on_errors
    from eagle_kit.drafts.files.validate import validate_draft
    from eagle_kit.engine.llm import LLM
    from eagle_kit.engine.options import choose_device
    from eagle_kit.models.loading.source import resolve_target

    # Refuse drafts that do not fit before the target is loaded.
    folder: Path = resolve_target(target)
    if config.tensor_parallel > 1 and len(drafts) > 1:
        raise UserError(
            f"With tensor parallelism an evaluation has one engine, and {len(drafts)} drafts were given.",
            "Evaluate one after another.",
        )
    for draft in drafts:
        raise_on_errors(validate_draft(draft, folder, config.chat_template))

    # Load the target once.
    if not records and choose_device(config.device) == "cpu":
        config = config.replace(graph_mode="off")
    if config.tensor_parallel > 1:
        one = LLM(folder, drafts[0] if drafts else None, config)
        return [one] * (1 + len(drafts))
    plain = LLM(folder, config=config)
    drafting = [LLM(plain.target, draft, config, tokenizer=plain.tokenizer) for draft in drafts]
    return [plain, *drafting]


def check_prompts(engine: EvalEngine, tasks: Sequence[Task]) -> None:
    """Refuse prompts that cannot be decoded, before anything is.

    Raises:
        UserError: a first turn that leaves no room for a response, or turns without a chat template.
    """
    needs_template = not has_chat_template(engine.tokenizer)
    for task in tasks:
        for prompt in task.prompts:
            if needs_template and len(prompt.turns) > 1:
                raise UserError(
                    f"The prompt {prompt.id} of {task.name} has {len(prompt.turns)} turns, and the target "
                    "has no chat template.",
                    "Give one with --chat-template FILE, or a file of single prompts with --tasks.",
                )
            length = len(engine.tokenize_task(prompt.given()))
            if length >= engine.max_context:
                raise UserError(
                    f"The prompt {prompt.id} of {task.name} has {length} tokens, and the context holds "
                    f"{engine.max_context}.",
                    "Take it out of the task, or give a larger --max-context if the target allows it.",
                )
