"""``LLM``: a target, perhaps a draft, and ``generate``."""

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from eagle_kit.checkpoints.draft import resolve_draft
from eagle_kit.config.engine import EngineConfig, ResolvedConfig
from eagle_kit.config.server import WarmUpExtent
from eagle_kit.core.errors import RankLost, UserError
from eagle_kit.core.output import RequestOutput
from eagle_kit.core.process import warn_of_spinning
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import NO_SPECULATION, ShapeTable, SpecShape
from eagle_kit.data.chat.messages import ChatPrompt
from eagle_kit.data.chat.template import has_chat_template, prompt_token_ids, set_chat_template
from eagle_kit.kernels.backend import current_device
from eagle_kit.kernels.cpu_memory import keep_large_blocks
from eagle_kit.kernels.device_memory import out_of_memory, reserve_segment
from eagle_kit.kernels.linear import pack_weights
from eagle_kit.models.heads.draft_head import DraftHead
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.loading.share import load_share
from eagle_kit.models.targets.target import Target
from eagle_kit.serve import cpu_graph
from eagle_kit.serve.agreement import AgreedGrammars
from eagle_kit.serve.drafts import load_draft_model
from eagle_kit.serve.engine import Engine
from eagle_kit.serve.grammar.bad_words import bad_word_ids
from eagle_kit.serve.grammar.compiler import GrammarCompiler
from eagle_kit.serve.grammar.protocols import Grammars
from eagle_kit.serve.leading import Ask, LeadingEngine, Leave, Message
from eagle_kit.serve.memory import NEED_LESS, MemoryPlan, plan_memory
from eagle_kit.serve.options import (
    check_fp8,
    devices_of,
    draft_in_target,
    dtype_of,
    fit_context,
    without_graphs,
)
from eagle_kit.serve.ranks import Group, Start, follow, join_ranks
from eagle_kit.serve.request import Request
from eagle_kit.serve.text_stream import TextContext, TextStream
from eagle_kit.serve.tune import can_tune, tuned_policy
from eagle_kit.serve.warm_up import Prepared, warm_up
from eagle_kit.speculation.propose.choice import drafter_class
from eagle_kit.speculation.propose.draft_model import DraftModel
from eagle_kit.tuning.policy import ShapePolicy
from eagle_kit.tuning.shapes import MOST_STEPS

Prompt = str | list[int] | list[dict[str, Any]] | ChatPrompt
NGRAM_SHAPE = SpecShape(8, 4, 12)
TOO_LARGE = "Use a GPU with more free memory, quantization=fp8, or several GPUs with tensor_parallel."
"""Remedy where a GPU has too little memory for the weights."""


class LLM:
    """Target language model, decoded plainly or with a draft; greedy text is the same either way.

    Args:
        target: a Hugging Face folder, a hub id, a name that ``resolve_target`` knows, or a loaded model,
            which is then used as it is. Of one that processes share all make the same calls.
        draft: a draft's folder, hub id or known name, a head (which is copied), any other draft model, or
            None for ordinary decoding.
        config: options of the engine.
        tokenizer: for text prompts, in place of the one in the target's folder. Only the first rank has one.
        start: of a rank that another has started (:mod:`eagle_kit.serve.ranks`).
        options: fields of :class:`~eagle_kit.config.engine.EngineConfig`, in place of those of ``config``.

    Attributes:
        config: the options with everything filled in that the target, the draft and the device decide.
        draft, head: the draft model in use, and its head where it has one.
        group: the processes that share the target (``tensor_parallel``); None where this one has all of it.
            Under ``torchrun`` the program goes on in the first of them only.
        memory_plan: of the engine, once it has been made.

    Raises:
        UserError: a wrong option, a target that cannot be loaded, a draft that does not fit it, or too little
            memory of a GPU. Methods raise it for too little memory as well.
    """

    def __init__(
        self,
        target: str | Path | Target,
        draft: "str | Path | DraftHead | DraftModel | None" = None,
        config: EngineConfig | None = None,
        *,
        tokenizer: Any = None,
        start: Start | None = None,
        **options: Any,
    ) -> None:
        self._options = (config or EngineConfig()).replace(**options)
        keep_large_blocks()
        self.tokenizer = tokenizer
        self._target_name: str | Path | None = None
        self.group: Group | None = None
        self._engine: Engine | None = None
        self._policy: ShapePolicy | ShapeTable | None = None
        self._draft_folder: Path | None = None
        self._numbers = itertools.count()
        # The replies of one HTTP request have the same words, which are tokenised once.
        self._bad_word_ids = lru_cache(maxsize=16)(bad_word_ids)
        self.memory_plan: MemoryPlan | None = None
        self.draft: DraftModel | None = None
        self.head: DraftHead | None = None
        if isinstance(target, Target):
            self._check_loaded(target)
        else:
            from eagle_kit.models.loading.source import resolve_target

            target = self._target_name = resolve_target(str(target))
            if self._options.tensor_parallel > 1:
                self.group = join_ranks(target, draft, self._options, start)
        try:
            with out_of_memory("loading the models", TOO_LARGE), self._whole():
                self._open(target)
                self._set_draft(draft, self._options.algorithm, self._options.token_map)
        except BaseException:
            if self.group is not None:  # in which nobody listens yet
                self.group.close()
            raise
        if self.group is not None and not self.group.ranks.is_first:
            self._follow(self.group, is_launched=start is None)

    def _check_loaded(self, target: Target) -> None:
        """Raise UserError for options that a loaded model cannot follow."""
        if self._options.tensor_parallel > 1:
            raise UserError(
                "Tensor parallelism reads parts of a target from files, and a loaded model was given.",
                "Give the target as a folder or name.",
            )
        if self._options.quantization == "fp8" and not target.fp8_layers:
            raise UserError(
                "The quantization fp8 was asked for, and the target is a loaded model without it.",
                "Give the target as a folder or name, or load it with load_target(quantization='fp8').",
            )

    def _open(self, target: Target | Path) -> None:
        """Take a loaded target, or load one; the first rank, which makes the text, also its tokenizer."""
        if isinstance(target, Target):
            self.target = target
        else:
            self.target = self._load(target)
            if self.tokenizer is None and (self.group is None or self.group.ranks.is_first):
                from eagle_kit.models.loading.source import load_tokenizer

                self.tokenizer = load_tokenizer(target)
        self._set_chat_template()
        device = self.target.embed_tokens.weight.device
        if device.type == "cpu":
            warn_of_spinning(torch.get_num_threads())
        pack_weights(self.target)
        if self._options.kv_dtype == "fp8_e4m3":
            check_fp8(device)

    def _set_chat_template(self) -> None:
        """Take the chat template of the options, where they name one; a tokenizer that was given is not
        changed."""
        path = self._options.chat_template
        if path is None:
            return
        if self.tokenizer is not None:
            self.tokenizer = copy.copy(self.tokenizer)
            set_chat_template(self.tokenizer, path)
        elif self.group is None:
            raise UserError(
                "A chat template was given to a model without a tokenizer.", "Pass tokenizer= to LLM."
            )

    def _whole(self) -> AbstractContextManager[None]:
        """Context manager: what is done within is done by all ranks, or the group is lost
        (:meth:`~eagle_kit.serve.ranks.Group.whole`)."""
        return nullcontext() if self.group is None else self.group.whole()

    def _load(self, folder: Path) -> Target:
        """Load the target, or this rank's part of it."""
        options = self._options
        if self.group is not None:
            device, ranks = self.group.ranks.device, self.group.ranks
            dtype = dtype_of(options.dtype, device.type)
            target: Target = ranks.together(
                lambda: load_share(
                    folder,
                    ranks,
                    dtype,
                    device,
                    quantization=options.quantization,
                    expert_parallel=options.expert_parallel,
                    attends_whole=options.data_parallel_attention,
                )
            )
            return target
        place = str(devices_of(options.device, 1)[0])
        if place.startswith("cuda:"):
            torch.cuda.set_device(place)  # for calls of the models themselves; the engine has its own
        dtype = dtype_of(options.dtype, place)
        return load_target(folder, dtype=dtype, device=place, quantization=options.quantization)

    def _follow(self, group: Group, *, is_launched: bool) -> None:
        """Do what the first rank says until it leaves; a process of ``torchrun`` ends then."""
        try:
            follow(self, group)
        finally:
            self.close()
        if is_launched:
            raise SystemExit(0)

    def _leading(self, method: str, *args: Any) -> AbstractContextManager[None]:
        """Context manager: the other ranks, if there are any, call ``method`` as this one does within."""
        return self.telling(Ask(method, args))

    @contextmanager
    def telling(self, message: Message) -> Iterator[None]:
        """Context manager: the other ranks, if there are any, do what ``message`` says and this one does
        within."""
        engine = self._engine
        if self.group is None or not self.group.ranks.is_first:
            yield
        elif isinstance(engine, LeadingEngine):
            with engine.telling(message):
                yield
        else:
            with self._whole():
                self.group.ranks.tell([message])
                yield

    def warm_up(
        self, extent: WarmUpExtent = "all", on_step: Callable[[int, int], None] = lambda number, total: None
    ) -> Prepared:
        """Prepare the idle engine in its present shapes (:func:`~eagle_kit.serve.warm_up.warm_up`)."""
        self.engine()
        with out_of_memory("preparing the engine", NEED_LESS), self._leading("_warm_up", extent):
            return self._warm_up(extent, on_step)

    def _warm_up(
        self, extent: WarmUpExtent, on_step: Callable[[int, int], None] = lambda number, total: None
    ) -> Prepared:
        assert self._engine is not None
        return warm_up(self._engine, extent, on_step)

    def on_lost(self, call: Callable[[RankLost], None]) -> None:
        """Call ``call``, in another thread, when another rank ends too soon that this one has started, or is
        not heard from any more that ``torchrun`` has."""
        watch = None if self.group is None else self.group.workers or self.group.missed
        if watch is not None:
            watch.on_end(lambda sentence: call(RankLost(sentence)))

    def close(self) -> None:
        """End the other ranks, if there are any; the model is of no use afterwards."""
        group, self.group = self.group, None
        if group is not None:
            group.close([Leave()])

    def set_draft(
        self,
        draft: "str | Path | DraftHead | DraftModel | None",
        *,
        algorithm: str = "auto",
        token_map: str | Path | None = None,
    ) -> None:
        """Use another draft from now on. Raise UserError when it does not fit the target."""
        if self.group is not None and isinstance(draft, DraftModel):
            raise UserError(
                "With tensor parallelism every rank loads the draft, and a loaded model was given.",
                "Give it as a folder, a name or a head.",
            )
        with (
            out_of_memory("loading the draft", TOO_LARGE),
            self._leading("_set_draft", draft, algorithm, token_map),
        ):
            self._set_draft(draft, algorithm, token_map)

    def _set_draft(
        self,
        draft: "str | Path | DraftHead | DraftModel | None",
        algorithm: str,
        token_map: str | Path | None,
    ) -> None:
        """:meth:`set_draft` of this rank."""
        algorithm = algorithm.upper() if algorithm != "auto" else algorithm
        if (bundled := draft_in_target(draft, algorithm, self._target_name)) is not None:
            draft = bundled
        self._engine = self._policy = self._draft_folder = None
        self.head, self.draft = None, None
        if isinstance(draft, str | Path):
            find = partial(resolve_draft, draft, self.target.config)  # by a hub, which may fail one rank
            draft = self._draft_folder = find() if self.group is None else self.group.ranks.together(find)
        if draft is not None:
            self.draft = self._load_draft(draft, algorithm, token_map)
            self.head = self.draft.head
        self._options = self._options.replace(algorithm=algorithm, token_map=token_map)
        self.config = self._resolved()

    def _load_draft(
        self, draft: "str | Path | DraftHead | DraftModel", algorithm: str, token_map: str | Path | None
    ) -> DraftModel:
        """Load a draft, all of it on every rank, and whole ends of the target for it."""
        target = self.target.with_whole_ends()

        def load() -> DraftModel:
            name = self._target_name
            return load_draft_model(
                draft,
                target,
                target_name=name,
                algorithm=algorithm,
                token_map=token_map,
                chat_template=self._options.chat_template,
            )

        if self.group is None:
            return load()
        found: DraftModel = self.group.ranks.together(load)
        target.lm_head = self.target.lm_head  # the whole one stays with drafts that have none of their own
        if not found.is_whole_model:
            self.target.take_embedding(target.embed_tokens)
        return found

    def _resolved(self) -> ResolvedConfig:
        """Fill in what the target, the draft and the device decide. Raise UserError where they do not fit."""
        options, model = self._options, self.target.config
        if self.draft is not None:
            kind = drafter_class(self.draft, options)
            for shape in options.shape.shapes if options.shape is not None else ():
                kind.check_shape(self.draft, shape)
        if options.state_snapshots is not None and model.states is None:
            raise UserError(
                f"state_snapshots is {options.state_snapshots}, but the target has no recurrent layers.",
                "Leave it out.",
            )
        on_gpu = self.target.embed_tokens.weight.device.type == "cuda"
        if on_gpu:
            options = without_graphs(options, self.target)
        return options.replace(shape=options.shape or self._default_shape()).resolve(
            on_gpu=on_gpu,
            max_positions=model.max_position_embeddings,
            can_record=cpu_graph.available() and not options.data_parallel_attention,
        )

    def _default_shape(self) -> SpecShape:
        if self.draft is None:
            return NGRAM_SHAPE if self._options.algorithm == "NGRAM" else NO_SPECULATION
        kind = drafter_class(self.draft, self._options)
        return kind.default_shape(self.draft, self.target.config.model_type)

    @property
    def default_shape(self) -> SpecShape:
        """Shape of a single request when :meth:`generate` names none and none is chosen by measurements."""
        return self.config.shape.at(1)

    @property
    def chooses_shapes(self) -> bool:
        """True if :meth:`generate` chooses shapes by measurements when it is given none."""
        return self._options.shape is None and self.draft is not None and can_tune(self.engine())

    @property
    def max_batch_size(self) -> int:
        """Most requests decoded together."""
        return self.config.max_batch_size

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and reply."""
        return self.config.max_context

    def engine(self, shape: str | SpecShape | ShapeTable | None = None) -> Engine:
        """Return the engine, set to ``shape`` or the default ones; its memory is allocated on first use.
        ``"auto"``, the default where the options name no shape, measures the engine once in its life."""
        engine = self._allocated()
        wanted: ShapeTable | ShapePolicy
        if shape == "auto" or (shape is None and self._options.shape is None):
            with out_of_memory("measuring shapes", NEED_LESS):
                wanted = self._auto(engine, is_asked=shape == "auto")
        else:
            wanted = self.config.shape if shape is None else ShapeTable.parse(shape)
        if engine.shapes != wanted:
            engine.use_shape(wanted)
        return engine

    def _allocated(self) -> Engine:
        """Return the engine in its present shapes; its memory is allocated on first use."""
        if self._engine is None:
            with out_of_memory("allocating the engine", NEED_LESS), self._leading("_make_engine"):
                self._make_engine()
        assert self._engine is not None
        return self._engine

    @property
    def current_engine(self) -> Engine | None:
        """The engine, None before it was first used."""
        return self._engine

    def _make_engine(self) -> None:
        """Allocate the engine's memory."""
        group, chooses = self.group, self._options.shape is None and self.draft is not None
        plan = partial(plan_memory, self.target, self.draft, self.config, chooses_shapes=chooses)
        if (ranks := self.target.ranks) is None:
            self.memory_plan = plan()
        else:
            mine: MemoryPlan = ranks.together(plan)
            self.memory_plan = mine.smallest(ranks.all(mine))
        steps = 0 if self.draft is None else MOST_STEPS  # as deep as shapes are chosen
        self.config = fit_context(self.config.replace(**self.memory_plan.sizes), steps)
        parts = self.target, self.draft, self.config, self._grammars()
        if group is not None and group.ranks.is_first:
            self._engine = LeadingEngine(*parts, group=group)
        else:
            self._engine = Engine(*parts)
        reserve_segment(self.target.embed_tokens.weight.device, self.memory_plan.prefill)

    def _grammars(self) -> Callable[[], Grammars] | None:
        """What makes the compiler of grammars; None where there is no tokenizer. Ranks that are not the first
        compile nothing."""
        model, ranks = self.target.config, None if self.group is None else self.group.ranks
        own = partial(GrammarCompiler, self.tokenizer, model.vocab_size, model.eos_token_ids)
        can_compile = self.tokenizer is not None
        if ranks is None:
            return own if can_compile else None
        can_compile = ranks.agree(can_compile)
        return (lambda: AgreedGrammars(ranks, own() if ranks.is_first else None)) if can_compile else None

    def _auto(self, engine: Engine, *, is_asked: bool) -> ShapeTable | ShapePolicy:
        """Choice by measurements; the default shape for drafts whose shape cannot change between cycles, with
        a warning where it ``is_asked`` for."""
        if engine.draft is None or not can_tune(engine):
            default = self._default_shape()
            if is_asked and engine.draft is not None:
                warnings.warn(
                    f"The shape of this draft cannot change between cycles, so {default} is used in place of "
                    "auto. Give a shape to use another.",
                    stacklevel=4,
                )
            return ShapeTable.parse(default)
        if self._policy is None:
            try:
                self._policy = tuned_policy(engine, self._draft_folder)
            except UserError as error:
                warnings.warn(f"{error.cause} The default shape is used. {error.remedy}", stacklevel=4)
                self._policy = ShapeTable.parse(self._default_shape())
        return self._policy

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Tokenise a user turn (str), messages (list of dicts), or messages with tools and further arguments
        of the chat template; token ids are returned as they are.

        Without a chat template a str is a text that the reply continues, as a prompt of /v1/completions.
        """
        if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
            return list(prompt)  # type: ignore[arg-type]
        if self.tokenizer is None:
            raise UserError(
                "A text prompt was given to a model without a tokenizer.", "Pass tokenizer= to LLM."
            )
        if isinstance(prompt, str):
            if not prompt.strip():
                raise UserError("The prompt is empty.", "Give some text.")
            if not has_chat_template(self.tokenizer):
                return self.tokenizer(prompt, verbose=False)["input_ids"]
            prompt = [{"role": "user", "content": prompt}]
        return prompt_token_ids(self.tokenizer, prompt)  # type: ignore[arg-type]

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        shape: str | SpecShape | ShapeTable | None = None,
        progress: bool = False,
        on_finish: Callable[[int, RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Decode a reply to every prompt.

        Args:
            prompts: see :meth:`tokenize`.
            params: the same for all, or those of each prompt; default greedy, 256 tokens.
            shape: speculation shape of this call, several by batch size, or auto.
            progress: show a progress bar.
            on_finish: called with (index, reply) as replies finish.

        Returns:
            Replies in the order of the prompts. One that met logits that are not finite, or whose text could
            not be made, has the finish reason ``"error"`` and what was before; the log says so.

        Raises:
            UserError: an empty or too long prompt, before any work; or too little memory of the GPU. All
                requests have ended then, and the engine is as before.
        """
        if isinstance(prompts, str):
            raise UserError("generate was given one text instead of a list of prompts.", "Put it in a list.")
        given = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else params
        if len(given) != len(prompts):
            raise UserError(
                f"{len(prompts)} prompts have {len(given)} sampling parameters.", "Give one for each prompt."
            )
        requests = [self.make_request(*pair) for pair in zip(prompts, given, strict=True)]
        for request in requests:
            request.group = requests[0].number
        # Refuse bad prompts before cycles are measured. The shapes decide whether a reply fits the pool.
        engine = self._allocated()
        _check_each(requests, lambda request: engine.check_tokens(request.prompt_ids))
        self.engine(shape)
        _check_each(requests, engine.check_request)
        with out_of_memory("computing replies", NEED_LESS):
            self._run(engine, requests, progress, on_finish)
        return [request.output() for request in requests]

    def _run(
        self,
        engine: Engine,
        requests: Sequence[Request],
        progress: bool,
        on_finish: Callable[[int, RequestOutput], None] | None,
    ) -> None:
        """Step the engine until all requests have ended; after an error it holds none of them."""
        place = {request: i for i, request in enumerate(requests)}
        bar = _progress_bar(len(requests)) if progress else None
        try:
            for request in requests:
                engine.add_request(request)
            while engine.has_work:
                for request in engine.step():
                    if request.has_stops:
                        request.read()
                        engine.stop(request)
                    if request.finish_reason is None or (at := place.pop(request, None)) is None:
                        continue  # at a lag, a step tells of an end by a stop text once more
                    if bar is not None:
                        bar.update()
                    if on_finish is not None:
                        on_finish(at, request.output())
        finally:
            for request in requests:
                engine.abort(request)
            engine.drain()
            if bar is not None:
                bar.close()

    def make_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        shown_tokens: frozenset[int] = frozenset(),
        context: TextContext = TextContext(),  # noqa: B008
    ) -> Request:
        """Make a request for the engine: tokenised, and numbered in the order of the calls; special tokens of
        ``shown_tokens`` are part of its text, which continues the ``context``."""
        stream = None
        if self.tokenizer is not None:
            stream = TextStream(self.tokenizer, stop=params.stop, shown=shown_tokens, context=context)
        elif params.stop:
            raise UserError(
                "A stop text was given to a model without a tokenizer.", "Pass tokenizer= to LLM."
            )
        request = Request(next(self._numbers), self.tokenize(prompt), params, priority, stream)
        if params.bad_words and self.tokenizer is not None:
            vocab_size = self.target.config.vocab_size
            request.bad_word_ids = self._bad_word_ids(self.tokenizer, params.bad_words, vocab_size)
        return request

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Compute the target's logits ``[T, V]`` after every token of ``ids``, in one forward without a
        cache."""
        remedy = "Give fewer tokens, or use a GPU with more free memory."
        with out_of_memory("computing logits", remedy), self._leading("_logits", ids):
            return self._logits(ids)

    @torch.inference_mode()
    def _logits(self, ids: list[int]) -> torch.Tensor:
        device = self.target.embed_tokens.weight.device
        tokens = torch.tensor(ids, device=device)
        with current_device(device):
            out = self.target(tokens, torch.arange(len(ids), device=device), self.target.causal())
            return self.target.logits(out.hidden)


def _check_each(requests: Sequence[Request], check: Callable[[Request], None]) -> None:
    """Call ``check`` with every request. Its UserError is raised with the number of the prompt."""
    for i, request in enumerate(requests):
        try:
            check(request)
        except UserError as error:
            which = f"Prompt {i} of {len(requests)}: " if len(requests) > 1 else ""
            raise UserError(which + error.cause, error.remedy) from None


def _progress_bar(total: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, unit="reply", dynamic_ncols=True)
