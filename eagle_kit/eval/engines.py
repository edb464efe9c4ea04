"""The engines of a run: one for plain decoding and one for each setting. Settings share a copy of the target
where they load it alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from eagle_kit.config.engine import EngineConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.output import RequestOutput
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.data.chat.template import has_chat_template
from eagle_kit.data.tasks.sets import Task

if TYPE_CHECKING:
    from eagle_kit.drafts.files.draft import AnyDraft

DRAFT_OPTIONS = (
    "algorithm",
    "shape",
    "token_map",
    "tree",
    "sampled_drafts",
    "verifier",
    "accept_threshold_single",
    "accept_threshold_acc",
    "ngram",
)
"""Options of the engine that plain decoding does not have."""
TARGET_OPTIONS = (
    "dtype",
    "quantization",
    "device",
    "tensor_parallel",
    "expert_parallel",
    "data_parallel_attention",
)
"""Options of the engine that decide how a target is loaded."""


@dataclass(frozen=True)
class NamedSetting:
    """A draft and options of the engine, which are measured in one or several shapes.

    Attributes:
        name: for tables.
        draft: open, or its name; None for n-grams and for decoding without a draft.
        engine: options of the engine.
        shapes: of ``steps,topk,tokens``, tables of these by batch size, ``auto``, or ``none``.
    """

    name: str
    draft: "AnyDraft | None"
    engine: EngineConfig
    shapes: tuple[str, ...]


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
        sampling_params: Sequence[SamplingParams] | None = None,
        *,
        shape: str | None = None,
    ) -> list[RequestOutput]: ...


MakeEngines = Callable[[str, Sequence[NamedSetting]], list[EvalEngine]]
"""(target, settings) -> engines: the plain one, then one per setting."""


def open_drafts(target: str | Path, settings: Sequence[NamedSetting]) -> list[NamedSetting]:
    """Open the drafts of settings; see :meth:`~eagle_kit.drafts.files.draft.DraftFolder.open`.

    Returns:
        The settings, with open drafts. One that asks for the modules in the target's folder has this folder
        as its draft.

    Raises:
        UserError: no such draft, or the target is given as its own draft, which nobody has asked for.
    """
    from eagle_kit.drafts.files.draft import DraftFolder
    from eagle_kit.engine.options import draft_in_target
    from eagle_kit.models.loading.loader import read_target_config
    from eagle_kit.models.loading.source import resolve_target

    folder: Path = resolve_target(target)
    config = read_target_config(folder)
    opened = []
    for setting in settings:
        draft = setting.draft
        algorithm = setting.engine.algorithm
        if draft is None:
            draft = draft_in_target(None, algorithm, folder)
        if draft is not None:
            draft = DraftFolder.open(draft, config)
            is_target = draft.path.resolve() == folder.resolve()
            if is_target and algorithm not in ("NEXTN", "STANDALONE"):
                raise UserError(
                    f"The setting {setting.name} has the target as its own draft.",
                    "Give --speculative-algorithm NEXTN for the MTP modules in its folder, STANDALONE for "
                    "all of it, or another draft.",
                )
        opened.append(replace(setting, draft=draft))
    return opened


def plain_options(engine: EngineConfig) -> EngineConfig:
    """Options of plain decoding: without those of drafts."""
    defaults = EngineConfig()
    return engine.replace(**{name: getattr(defaults, name) for name in DRAFT_OPTIONS})


def make_engines(
    target: str, settings: Sequence[NamedSetting], *, config: EngineConfig, records: bool = True
) -> list[EvalEngine]:
    """Load the target and every draft, and make an engine for plain decoding and one for each setting.

    Settings that load the target alike share it. With tensor parallelism there is one engine, which decodes
    plainly and with its draft.

    Args:
        settings: with open drafts.
        config: options of plain decoding.
        records: whether cycles on a CPU are recorded, see
            :mod:`~eagle_kit.engine.graphs.cpu_graph`.

    Raises:
        UserError: a draft does not fit the target, or ranks would share several settings.
    """
    from eagle_kit.drafts.files.findings import raise_on_errors
    from eagle_kit.drafts.files.validate import validate_draft
    from eagle_kit.engine.llm import LLM
    from eagle_kit.engine.options import choose_device
    from eagle_kit.models.loading.source import resolve_target

    # Refuse drafts that do not fit before the target is loaded. Modules in the target's folder are read
    # with it.
    folder: Path = resolve_target(target)
    _check_ranks(config, settings)
    for setting in settings:
        if setting.draft is not None and setting.engine.algorithm != "NEXTN":
            raise_on_errors(validate_draft(setting.draft, folder, config.chat_template))

    # With tensor parallelism, one engine.
    if config.tensor_parallel > 1:
        draft = settings[0].draft if settings else None
        one = LLM(folder, draft, settings[0].engine if settings else config)
        return [one] * (1 + len(settings))

    # Load each form of the target once.
    def options(engine: EngineConfig) -> EngineConfig:
        has_recordings = records or choose_device(engine.device) != "cpu"
        return engine if has_recordings else engine.replace(graph_mode="off")

    plain = LLM(folder, config=options(config))
    targets = {_target_key(config): plain.target}
    engines: list[EvalEngine] = [plain]
    for setting in settings:
        key = _target_key(setting.engine)
        shared = targets.get(key, folder)
        made = LLM(shared, setting.draft, options(setting.engine), tokenizer=plain.tokenizer)
        targets[key] = made.target
        engines.append(made)
    return engines


def _target_key(engine: EngineConfig) -> tuple[object, ...]:
    """Options that settings with one copy of the target have in common."""
    return tuple(getattr(engine, name) for name in TARGET_OPTIONS)


def _check_ranks(config: EngineConfig, settings: Sequence[NamedSetting]) -> None:
    """Raise UserError where ranks share the target and there is not one engine for all."""
    ranks = {config.tensor_parallel, *(setting.engine.tensor_parallel for setting in settings)}
    if ranks == {1}:
        return
    if len(settings) > 1:
        raise UserError(
            f"With tensor parallelism an evaluation has one engine, and {len(settings)} settings were given.",
            "Evaluate one after another.",
        )
    if len(ranks) > 1:
        raise UserError(
            "A setting has another number of ranks than plain decoding.",
            "Give --tensor-parallel outside of --setting.",
        )


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
