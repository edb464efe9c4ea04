"""``LLM``: a target, perhaps a draft, and what can be asked of them in Python."""

import copy
import itertools
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from eagle_kit.autotune.acceptance import DraftRecording
from eagle_kit.autotune.ngram import NgramPolicy
from eagle_kit.autotune.policy import ShapePolicy
from eagle_kit.autotune.shapes import MOST_STEPS
from eagle_kit.config.engine import EngineConfig, ResolvedConfig
from eagle_kit.config.server import WarmUpExtent
from eagle_kit.core.errors import RankLost, UserError, shown
from eagle_kit.core.output import RequestOutput, ResponseDelta
from eagle_kit.core.process import warn_of_spinning
from eagle_kit.core.sampling_params import SamplingParams
from eagle_kit.core.shape import NGRAM_SHAPE, NO_SPECULATION, ShapeTable, SpecShape
from eagle_kit.core.stats import SpecStats
from eagle_kit.data.chat.renderer import ChatRenderer
from eagle_kit.data.chat.template import has_chat_template, set_chat_template
from eagle_kit.drafts.base.draft_model import DraftModel
from eagle_kit.drafts.choose_drafter import drafter_class
from eagle_kit.drafts.files.draft import AnyDraft, DraftFolder
from eagle_kit.engine.calibrate.policies import can_tune, chooses_ngram, tuned_policy
from eagle_kit.engine.calibrate.record_drafts import record_drafts
from eagle_kit.engine.engine import Engine
from eagle_kit.engine.grammar.bad_words import bad_word_ids
from eagle_kit.engine.grammar.compiler import GrammarCompiler
from eagle_kit.engine.grammar.protocols import Grammars
from eagle_kit.engine.graphs import cpu_graph
from eagle_kit.engine.graphs.warm_up import Prepared, warm_up
from eagle_kit.engine.load_draft import load_draft_model
from eagle_kit.engine.memory.engine_memory import NEED_LESS, MemoryPlan, Place, fit_sizes, plan_memory
from eagle_kit.engine.options import (
    check_fp8,
    devices_of,
    draft_in_target,
    dtype_of,
    fit_context,
    is_ngram,
    without_graphs,
)
from eagle_kit.engine.prompt_forms import Conversation, is_token_ids, read_chats, read_texts, with_arguments
from eagle_kit.engine.request import Request
from eagle_kit.engine.tensor_parallel.agreement import AgreedGrammars
from eagle_kit.engine.tensor_parallel.leading import (
    Follower,
    Leader,
    LeadingEngine,
    RequestData,
    follow,
    rank_call,
)
from eagle_kit.engine.tensor_parallel.ranks import RankGroup, WorkerArgs, join_ranks
from eagle_kit.engine.text_forwards import (
    TextStates,
    check_layers,
    check_text,
    text_logits,
    text_states,
)
from eagle_kit.engine.text_stream import TextContext, TextStream, text_context
from eagle_kit.models.draft_head import DraftHead
from eagle_kit.models.loading.loaded import loaded_target
from eagle_kit.models.loading.loader import load_target
from eagle_kit.models.loading.share import load_share
from eagle_kit.models.targets.target import Target
from eagle_kit.ops.cpu.memory import keep_large_blocks
from eagle_kit.ops.device_memory import out_of_memory, reserve_segment
from eagle_kit.ops.linear import pack_weights

TOO_LARGE = "Use a GPU with more free memory, quantization=fp8, or several GPUs with tensor_parallel."
"""Remedy where a GPU has too little memory for the weights."""
FEWER_TOKENS = "Give fewer tokens, or use a GPU with more free memory."
"""Remedy where a GPU has too little memory for a forward without a cache."""


class LLM:
    """Target language model, decoded plainly or with a draft; greedy text is the same either way.

    ``generate`` continues texts and ``chat`` answers conversations, both in one batch; ``stream`` and
    ``stream_chat`` are the same piece by piece. ``acceptance`` measures the draft, ``hidden_states`` runs the
    target over texts, ``set_draft`` takes another draft. One thread makes all calls.

    Args:
        target: a Hugging Face folder, a hub id, a name that ``resolve_target`` knows, a loaded causal
            language model of transformers, whose weights are shared, or a
            :class:`~eagle_kit.models.targets.target.Target`, which is used as it is. Of one that processes
            share all make the same calls.
        draft: a draft's folder, hub id or known name, a draft that is open
            (:class:`~eagle_kit.drafts.files.draft.DraftFolder`), a head (which is copied), any other draft
            model, ``"NGRAM"`` for drafts out of earlier text, or None for ordinary decoding.
        config: options of the engine.
        tokenizer: for text prompts, in place of the one in the target's folder: a tokenizer, or the folder,
            hub id or known name of one. A loaded model has none of its own. Only the first rank has one.
        worker: arguments of a rank that rank 0 has started (:mod:`eagle_kit.engine.tensor_parallel.worker`).
        options: fields of :class:`~eagle_kit.config.engine.EngineConfig`, in place of those of ``config``.

    Attributes:
        config: the options with everything filled in that the target, the draft and the device decide.
        target: the target.
        tokenizer: its tokenizer, with the chat template of the options where they name one; None without any.
        draft: the draft model in use; None without one.
        head: the head of the draft model; None if it has none.
        draft_folder: folder of the draft in use; None where it came from no files.
        group: the processes that share the target (``tensor_parallel``); None where this one has all of it.
            Under ``torchrun`` the program goes on in the first of them only.
        memory_plan: of the engine, once it has been made.

    Raises:
        UserError: a wrong option, a target that cannot be loaded, a draft that does not fit it, or too little
            memory of a GPU. Methods raise it for too little memory as well.
    """

    def __init__(
        self,
        target: str | Path | Target | nn.Module | None = None,
        draft: "AnyDraft | DraftHead | DraftModel | None" = None,
        config: EngineConfig | None = None,
        *,
        tokenizer: Any = None,
        worker: WorkerArgs | None = None,
        **options: Any,
    ) -> None:
        self._options = (config or EngineConfig()).replace(**options)
        if target is None:
            raise UserError("No target was given.", "Write LLM(TARGET), or LLM(TARGET, draft=DRAFT).")
        keep_large_blocks()
        self.tokenizer = _as_tokenizer(tokenizer)
        self._target_name: str | Path | None = None
        self.group: RankGroup | None = None
        self._leader: Leader | None = None
        self._engine: Engine | None = None
        self._policy: ShapePolicy | ShapeTable | None = None
        self.draft_folder: Path | None = None
        self._numbers = itertools.count()
        # The responses of one HTTP request have the same words, which are tokenised once.
        self._bad_word_ids = lru_cache(maxsize=16)(bad_word_ids)
        self.memory_plan: MemoryPlan | None = None
        self.draft: DraftModel | None = None
        self.head: DraftHead | None = None
        if isinstance(target, nn.Module):
            target = loaded_target(target)
            self._check_loaded(target)
        else:
            from eagle_kit.models.loading.source import resolve_target

            target = self._target_name = resolve_target(str(target))
            if self._options.tensor_parallel > 1:
                draft = _named(draft)
                self.group = join_ranks(target, draft, self._options, worker)
                if self.group.ranks.is_first:
                    self._leader = Leader(self.group)
        try:
            with out_of_memory("loading the models", TOO_LARGE), self._in_step():
                self._open(target)
                self._set_draft(draft, self._options.algorithm, self._options.token_map)
        except BaseException:
            # The other ranks do not execute calls yet, so none is sent to them.
            if self.group is not None:
                self.group.close()
            raise
        if self.group is not None and not self.group.ranks.is_first:
            self._follow(self.group, is_launched=worker is None)

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

    def _in_step(self) -> AbstractContextManager[None]:
        """Context manager for work that all ranks do; an error within gives the group up
        (:meth:`~eagle_kit.engine.tensor_parallel.ranks.RankGroup.keep_in_step`)."""
        return nullcontext() if self.group is None else self.group.keep_in_step()

    def _load(self, folder: Path) -> Target:
        """Load the target, or this rank's part of it."""
        options = self._options
        if self.group is not None:
            device = self.group.ranks.device
            ranks = self.group.ranks
            dtype = dtype_of(options.dtype, device.type)
            target: Target = ranks.together(
                lambda: load_share(
                    folder,
                    ranks,
                    dtype,
                    device,
                    quantization=options.quantization,
                    expert_parallel=options.expert_parallel,
                    data_parallel_attention=options.data_parallel_attention,
                )
            )
            return target
        place = str(devices_of(options.device, 1)[0])
        if place.startswith("cuda:"):
            torch.cuda.set_device(place)  # for calls of the models themselves; the engine has its own
        dtype = dtype_of(options.dtype, place)
        return load_target(folder, dtype=dtype, device=place, quantization=options.quantization)

    def _follow(self, group: RankGroup, *, is_launched: bool) -> None:
        """Execute the calls of rank 0 until it leaves; a process of ``torchrun`` ends then."""
        follower = Follower(self.target, lambda: self._engine, self._make_engine, self._set_draft)
        try:
            follow(follower, group)
        finally:
            self.close()
        if is_launched:
            raise SystemExit(0)

    def _on_all_ranks(self, name: str, *args: Any) -> AbstractContextManager[None]:
        """Context manager: the other ranks, if there are any, execute the call ``name`` while this one does
        the same work within (:meth:`~eagle_kit.engine.tensor_parallel.leading.Leader.call`)."""
        return nullcontext() if self._leader is None else self._leader.call(name, *args)

    def warm_up(
        self, extent: WarmUpExtent = "all", on_step: Callable[[int, int], None] = lambda number, total: None
    ) -> Prepared:
        """Prepare the idle engine in its present shapes
        (:func:`~eagle_kit.engine.graphs.warm_up.warm_up`)."""
        engine = self.engine()
        with out_of_memory("preparing the engine", NEED_LESS), self._on_all_ranks("warm_up", extent):
            return warm_up(engine, extent, on_step)

    def on_lost(self, call: Callable[[RankLost], None]) -> None:
        """Call ``call``, in another thread, when another rank is lost: a process that this one has started
        exits too early, or one of ``torchrun`` has no heartbeat."""
        if self.group is not None:
            self.group.on_lost(lambda message: call(RankLost(message)))

    def close(self) -> None:
        """End the other ranks, if there are any; the model is of no use afterwards."""
        group = self.group
        self.group = None
        self._leader = None
        if group is not None:
            group.close([rank_call("leave")])

    def set_draft(
        self,
        draft: "AnyDraft | DraftHead | DraftModel | None",
        *,
        algorithm: str = "auto",
        token_map: str | Path | None = None,
    ) -> None:
        """Use another draft from now on: a folder, hub id or name, a head, a draft model, ``"NGRAM"``, or
        None. Raise UserError when it does not fit the target."""
        if self.group is not None and isinstance(draft, DraftModel):
            raise UserError(
                "With tensor parallelism every rank loads the draft, and a loaded model was given.",
                "Give it as a folder, a name or a head.",
            )
        if self.group is not None:
            draft = _named(draft)
        with (
            out_of_memory("loading the draft", TOO_LARGE),
            self._on_all_ranks("set_draft", draft, algorithm, token_map),
        ):
            self._set_draft(draft, algorithm, token_map)

    def _set_draft(
        self,
        draft: "AnyDraft | DraftHead | DraftModel | None",
        algorithm: str,
        token_map: str | Path | None,
    ) -> None:
        """:meth:`set_draft` of this rank."""
        algorithm = algorithm.upper() if algorithm != "auto" else algorithm
        if is_ngram(draft) and algorithm in ("auto", "NGRAM"):
            draft = None
            algorithm = "NGRAM"
        if (bundled := draft_in_target(draft, algorithm, self._target_name)) is not None:
            draft = bundled
        self._engine = self._policy = self.draft_folder = None
        self.head = None
        self.draft = None
        if isinstance(draft, AnyDraft):
            find = partial(DraftFolder.open, draft, self.target.config)  # by a hub, which may fail one rank
            opened = find() if self.group is None else self.group.ranks.together(find)
            self.draft_folder = opened.path
            draft = opened
        if draft is not None:
            self.draft = self._load_draft(draft, algorithm, token_map)
            self.head = self.draft.head
        self._options = self._options.replace(algorithm=algorithm, token_map=token_map)
        self.config = self._resolved()

    def _load_draft(
        self, draft: "DraftFolder | DraftHead | DraftModel", algorithm: str, token_map: str | Path | None
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
        options = self._options
        model = self.target.config
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
        if options.gpu_memory_utilization is not None and not on_gpu:
            raise UserError(
                f"gpu_memory_utilization is {options.gpu_memory_utilization}, and the engine runs on a CPU.",
                "Leave it out, or give kv_memory, the size of the key-value pool.",
            )
        if on_gpu:
            options = without_graphs(options, self.target)
        # With auto this is the shape where none is chosen; `engine` then takes a policy.
        return options.replace(shape=options.shape or self._default_shape()).resolve(
            on_gpu=on_gpu,
            max_positions=model.max_position_embeddings,
            can_record=cpu_graph.available() and not options.data_parallel_attention,
        )

    def _default_shape(self) -> SpecShape:
        """Shape of the draft where the options name none and none is chosen by measurements."""
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
        """True if :meth:`generate` chooses shapes by measurements when it is given none. With a draft or
        n-grams, the engine's memory is allocated on first use; nothing is measured."""
        if not self._options.has_auto_shape:
            return False
        if self.draft is None and self.config.algorithm != "NGRAM":
            return False
        engine = self._allocated()
        return chooses_ngram(engine) or (self.draft is not None and can_tune(engine))

    @property
    def max_batch_size(self) -> int:
        """Most requests decoded together."""
        return self.config.max_batch_size

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and response."""
        return self.config.max_context

    def engine(self, shape: str | SpecShape | ShapeTable | None = None) -> Engine:
        """Return the engine, set to ``shape``; its memory is allocated on first use.

        Args:
            shape: None for those of the options. ``"auto"``, the default where the options name no shape,
                lets a policy choose, which measures the engine once in its life. A shape whose draft runs
                more nodes than any before, and more than 64, makes a new engine with memory for them.
        """
        wanted: ShapeTable | ShapePolicy
        if shape == "auto" or (shape is None and self._options.has_auto_shape):
            engine = self._allocated()
            with out_of_memory("measuring shapes", NEED_LESS):
                wanted = self._auto(engine, is_asked=shape == "auto")
        else:
            wanted = self.config.shape if shape is None else ShapeTable.parse(shape)
            engine = self._allocated(wanted.num_draft_nodes)
        if engine.shapes != wanted:
            engine.use_shape(wanted)
        return engine

    def _allocated(self, num_draft_nodes: int = 0) -> Engine:
        """Return the engine in its present shapes; its memory is allocated on first use, or anew where the
        draft's scratch has no room for ``num_draft_nodes``."""
        is_too_small = self.draft is not None and num_draft_nodes > self.config.draft_scratch
        if self._engine is None or is_too_small:
            nodes = max(num_draft_nodes, self.config.draft_scratch)
            with out_of_memory("allocating the engine", NEED_LESS), self._on_all_ranks("make_engine", nodes):
                self._make_engine(nodes)
        assert self._engine is not None
        return self._engine

    @property
    def current_engine(self) -> Engine | None:
        """The engine, None before it was first used."""
        return self._engine

    def _make_engine(self, draft_scratch: int) -> None:
        """Allocate the engine's memory, with so many scratch rows of the draft for each request."""
        # A smaller engine gives its memory back, and its pool is planned anew.
        if self._engine is not None:
            self._engine = self._policy = None
            self.config = self._resolved()
        self.config = self.config.replace(draft_scratch=draft_scratch)

        # The batch and the context, where memory decides them, and the pool.
        chooses = self._options.has_auto_shape and self.draft is not None
        place = Place.of(self.target.embed_tokens.weight.device)
        plan = partial(plan_memory, self.target, self.draft, chooses_shapes=chooses, place=place)
        self.config = self._fitted(plan)
        if (ranks := self.target.ranks) is None:
            self.memory_plan = plan(self.config)
        else:
            mine: MemoryPlan = ranks.together(partial(plan, self.config))
            self.memory_plan = mine.smallest(ranks.all(mine))
        steps = 0 if self.draft is None else MOST_STEPS  # as deep as shapes are chosen
        config = self.config.replace(**self.memory_plan.sizes)
        self.config = fit_context(config, steps, warns=not self.has_context_of_pool)

        # The engine.
        parts = self.target, self.draft, self.config, self._grammars()
        if self._leader is None:
            self._engine = Engine(*parts)
        else:
            self._engine = LeadingEngine(*parts, leader=self._leader)
        reserve_segment(self.target.embed_tokens.weight.device, self.memory_plan.prefill)

    @property
    def has_context_of_pool(self) -> bool:
        """True if the context is what the target and the memory allow, because the options name none."""
        return self._options.gpu_memory_utilization is not None and self._options.max_context is None

    def _fitted(self, plan: Callable[[ResolvedConfig], MemoryPlan]) -> ResolvedConfig:
        """Lower the batch and the context to what the memory holds, on all ranks alike, where the options
        leave them to it."""
        takes_gpu = self._options.gpu_memory_utilization is not None
        lowers_batch = takes_gpu and self._options.max_batch_size is None
        if not (lowers_batch or self.has_context_of_pool):
            return self.config
        fit = partial(
            fit_sizes, plan, self.config, lowers_batch=lowers_batch, lowers_context=self.has_context_of_pool
        )
        ranks = self.target.ranks
        if ranks is None:
            return fit()
        mine: ResolvedConfig = ranks.together(fit)
        of_all = ranks.all((mine.max_batch_size, mine.max_context))
        fitted = mine.replace(max_context=min(context for _, context in of_all))
        return fitted.with_batch_size(min(size for size, _ in of_all))

    def _grammars(self) -> Callable[[], Grammars] | None:
        """What makes the compiler of grammars; None where there is no tokenizer. Ranks that are not the first
        compile nothing."""
        model = self.target.config
        ranks = None if self.group is None else self.group.ranks
        own = partial(GrammarCompiler, self.tokenizer, model.vocab_size, model.eos_token_ids)
        can_compile = self.tokenizer is not None
        if ranks is None:
            return own if can_compile else None
        can_compile = ranks.agree(can_compile)
        return (lambda: AgreedGrammars(ranks, own() if ranks.is_first else None)) if can_compile else None

    def _auto(self, engine: Engine, *, is_asked: bool) -> ShapeTable | ShapePolicy:
        """Return the policy that chooses shapes by measurements, made at first use.

        Drafts whose shape cannot change between cycles get the default shape, with a warning if ``is_asked``:
        the call said ``"auto"``.
        """
        if chooses_ngram(engine):
            if self._policy is None:
                self._policy = NgramPolicy(self._default_shape(), engine.config.batch_sizes)
            return self._policy
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
                self._policy = tuned_policy(engine, self.draft_folder)
            except UserError as error:
                warnings.warn(f"{error.cause} The default shape is used. {error.remedy}", stacklevel=4)
                self._policy = ShapeTable.parse(self._default_shape())
        return self._policy

    def tokenize(self, prompt: str | Sequence[int]) -> list[int]:
        """Tokenise a text as it stands, behind the special tokens that the tokenizer puts before every text;
        token ids are returned as they are."""
        if not isinstance(prompt, str):
            return list(prompt)
        ids: list[int] = self._tokenizer_for_text()(prompt, verbose=False)["input_ids"]
        return ids

    def tokenize_chat(self, conversation: Conversation) -> list[int]:
        """Tokenise a user turn (str), messages, or messages with tools and further arguments, by the chat
        template and with the beginning of the assistant's turn; token ids are returned as they are.

        Raises:
            UserError: there is no chat template, or it refuses the messages.
        """
        if isinstance(conversation, list) and is_token_ids(conversation):
            return [int(token) for token in conversation]  # type: ignore[arg-type]
        if isinstance(conversation, str):
            if not conversation.strip():
                raise UserError("The prompt is empty.", "Give some text.")
            conversation = [{"role": "user", "content": conversation}]
        return self.renderer.prompt_token_ids(conversation)  # type: ignore[arg-type]

    def tokenize_task(self, prompt: Conversation) -> list[int]:
        """Tokenise a task that has to be asked of any model: as :meth:`tokenize_chat`, but a single user turn
        is a text to continue where there is no chat template."""
        if isinstance(prompt, str) and not has_chat_template(self._tokenizer_for_text()):
            return self.tokenize(prompt)
        return self.tokenize_chat(prompt)

    @cached_property
    def renderer(self) -> ChatRenderer:
        """Renders messages by the chat template, for requests and for the reading of responses. Raises
        UserError where there is no tokenizer."""
        return ChatRenderer(self._tokenizer_for_text())

    def _tokenizer_for_text(self) -> Any:
        """The tokenizer. Raises UserError where there is none."""
        if self.tokenizer is None:
            raise UserError(
                "A text prompt was given to a model without a tokenizer.", "Pass tokenizer= to LLM."
            )
        return self.tokenizer

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Mapping[str, Any] | Sequence[Any] | None = None,
        *,
        shape: str | SpecShape | ShapeTable | None = None,
        progress: bool = False,
        on_finish: Callable[[int, RequestOutput], None] | None = None,
        **fields: Any,
    ) -> list[RequestOutput]:
        """Continue one text or several, as they stand; :meth:`chat` answers messages.

        Args:
            prompts: a text or its token ids (a list, an array or a tensor), or a list of these.
            sampling_params: the same for all, or those of each prompt; default greedy, 256 tokens. A mapping
                of fields will do.
            shape: speculation shape of this call, several by batch size, or auto.
            progress: show a progress bar.
            on_finish: called with (index of the prompt, output) when all responses to a prompt have finished.
            fields: of :class:`~eagle_kit.core.sampling_params.SamplingParams`, in place of those of
                ``sampling_params``.

        Returns:
            An output for every prompt, in their order, also for a single one. A response that met logits that
            are not finite, or whose text could not be made, has the finish reason ``"error"`` and what was
            before; the log says so.

        Raises:
            UserError: an empty or too long prompt, before any work; or too little memory of the GPU. All
                requests have ended then, and the engine is as before.
        """
        asked = self._read_texts(prompts, sampling_params, fields)
        return self._decode(asked, shape, progress, on_finish)

    def chat(
        self,
        conversations: Any,
        sampling_params: SamplingParams | Mapping[str, Any] | Sequence[Any] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        shape: str | SpecShape | ShapeTable | None = None,
        progress: bool = False,
        on_finish: Callable[[int, RequestOutput], None] | None = None,
        **fields: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, rendered by the chat template.

        The arguments that are not listed are those of :meth:`generate`.

        Args:
            conversations: messages (dicts with role and content), a user turn (str), a
                :class:`~eagle_kit.data.chat.messages.ChatPrompt`, the token ids of a rendered conversation,
                or a list of these.
            tools: definitions of tools, as OpenAI has them, for the chat template.
            chat_template_kwargs: arguments of the chat template, such as ``{"enable_thinking": False}``.

        Returns:
            As :meth:`generate`.

        Raises:
            UserError: there is no chat template, or it refuses the messages; and as :meth:`generate`.
        """
        chats = [with_arguments(each, tools, chat_template_kwargs) for each in read_chats(conversations)]
        asked = self._read_chats(chats, sampling_params, fields)
        return self._decode(asked, shape, progress, on_finish)

    def stream(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Mapping[str, Any] | Sequence[Any] | None = None,
        *,
        shape: str | SpecShape | ShapeTable | None = None,
        **fields: Any,
    ) -> Generator[ResponseDelta, None, None]:
        """Continue one text or several, and iterate over the additions to their responses as they come.

        The model serves nothing else until the iterator has ended; closing it, or leaving a loop over it,
        ends the responses. The arguments are those of :meth:`generate`.

        Raises:
            UserError: as :meth:`generate`, or ``prompt_logprobs`` are asked for.
        """
        return self._stream(self._read_texts(prompts, sampling_params, fields), shape)

    def stream_chat(
        self,
        conversations: Any,
        sampling_params: SamplingParams | Mapping[str, Any] | Sequence[Any] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        shape: str | SpecShape | ShapeTable | None = None,
        **fields: Any,
    ) -> Generator[ResponseDelta, None, None]:
        """Answer one conversation or several, and iterate over the additions to the answers as they come; the
        arguments are those of :meth:`chat`, the rest is as in :meth:`stream`."""
        chats = [with_arguments(each, tools, chat_template_kwargs) for each in read_chats(conversations)]
        return self._stream(self._read_chats(chats, sampling_params, fields), shape)

    def acceptance(
        self,
        conversations: Any,
        sampling_params: SamplingParams | Mapping[str, Any] | Sequence[Any] | None = None,
        *,
        shape: str | SpecShape | ShapeTable | None = None,
        **fields: Any,
    ) -> SpecStats:
        """Measure how much of what the draft proposes is accepted in answers to conversations of yours.

        The arguments that are not listed are those of :meth:`chat`.

        Args:
            conversations: as in :meth:`chat`. Texts are continued, as by :meth:`generate`, where there is no
                chat template.
            shape: speculation shape; default the draft's, :attr:`default_shape`, in every cycle.

        Returns:
            The sum over all responses, with ``accept_length``.

        Raises:
            UserError: there is no draft; and as :meth:`chat`.
        """
        if self.draft is None and self.config.algorithm != "NGRAM":
            raise UserError("There is no draft whose acceptance could be measured.", "Give one to LLM.")
        used = self.default_shape if shape is None else shape
        total = SpecStats()
        prompts = conversations if isinstance(conversations, list | tuple) else [conversations]
        are_texts = all(isinstance(prompt, str) for prompt in prompts)
        continues = are_texts and not has_chat_template(self._tokenizer_for_text())
        response_to = self.generate if continues else self.chat
        for output in response_to(conversations, sampling_params, shape=used, **fields):
            for response in output.outputs:
                total.add(response.stats)
        return total

    def hidden_states(self, texts: Any, layers: Sequence[int] = ()) -> list[TextStates]:
        """Compute the target's hidden states of one text or several, in a forward of each without a cache.

        Args:
            texts: as the prompts of :meth:`generate`.
            layers: whose inputs to return besides the states behind the final norm; the number of layers for
                the last one's output.

        Returns:
            The states of every text, in their order, also of a single one.

        Raises:
            UserError: an empty or too long text, a layer that the target does not have, or too little memory
                of the GPU.
        """
        layers = check_layers(self.target, layers)
        prompts = [self.tokenize(text) for text in read_texts(texts)]
        _check_each(prompts, lambda ids: check_text(self.target, ids))
        found = []
        for ids in prompts:
            with (
                out_of_memory("computing hidden states", FEWER_TOKENS),
                self._on_all_ranks("text_states", ids, layers),
            ):
                found.append(text_states(self.target, ids, layers))
        return found

    def _read_texts(self, prompts: Any, sampling_params: Any, fields: dict[str, Any]) -> list[list[Request]]:
        """Requests of the responses to each text."""
        texts = read_texts(prompts)
        params = _params_of_each(len(texts), sampling_params, fields)
        ids_of_each = [self.tokenize(text) for text in texts]
        _check_each(ids_of_each, self._allocated().check_tokens)

        # A response is decoded behind the end of its prompt, whose last tokens may begin a character.
        asked = []
        for text, ids, given in zip(texts, ids_of_each, params, strict=True):
            context = TextContext()
            if self.tokenizer is not None:
                context = text_context(self.tokenizer, ids, is_text=isinstance(text, str))
            responses = self._responses(ids, given, context)
            for request in responses:
                request.prompt = text if isinstance(text, str) else None
            asked.append(responses)
        return asked

    def _read_chats(
        self, conversations: Sequence[Conversation], sampling_params: Any, fields: dict[str, Any]
    ) -> list[list[Request]]:
        """Requests of the responses to each conversation."""
        params = _params_of_each(len(conversations), sampling_params, fields)
        ids_of_each = [self.tokenize_chat(conversation) for conversation in conversations]
        _check_each(ids_of_each, self._allocated().check_tokens)
        asked = []
        for ids, given in zip(ids_of_each, params, strict=True):
            asked.append(self._responses(ids, given, TextContext()))
        return asked

    def _responses(self, ids: list[int], params: SamplingParams, context: TextContext) -> list[Request]:
        """Requests of the ``n`` responses to a prompt."""
        return [self.make_request(ids, params.of_response(i), context=context) for i in range(params.n)]

    def _check_call(
        self, asked: list[list[Request]], shape: str | SpecShape | ShapeTable | None
    ) -> list[Request]:
        """Check the responses to every prompt of a call, and return them all."""
        requests = [request for responses in asked for request in responses]
        for request in requests:
            request.group = requests[0].number

        # The shapes decide whether a response fits the pool.
        engine = self._idle_engine(shape)
        _check_each([responses[0] for responses in asked], engine.check_request)
        return requests

    def _idle_engine(self, shape: str | SpecShape | ShapeTable | None) -> Engine:
        """The engine, set to a shape. Raises UserError where it serves another call."""
        if self._allocated().has_work:
            raise UserError(
                "The model still serves another call.", "Read its stream to the end first, or close it."
            )
        return self.engine(shape)

    def _serve(
        self, requests: Sequence[Request], shape: str | SpecShape | ShapeTable | None
    ) -> Generator[Request, None, None]:
        """Serve requests of a call -> each of them whenever it has new tokens; the last time is its end."""
        engine = self._idle_engine(shape)
        live = set(requests)
        try:
            for request in requests:
                engine.add_request(request)
            while engine.has_work:
                with out_of_memory("computing responses", NEED_LESS):
                    updated = engine.step()
                for request in updated:
                    if request.response.failure is not None:
                        raise request.response.failure
                    if request.has_stops:
                        request.decode_text()
                        engine.stop(request)
                    if request not in live:
                        continue  # at a lag, a step tells of an end by a stop text once more
                    if request.finish_reason is not None:
                        live.remove(request)
                    yield request
        finally:
            for request in requests:
                engine.abort(request)
            engine.drain()

    def _decode(
        self,
        asked: list[list[Request]],
        shape: str | SpecShape | ShapeTable | None,
        progress: bool,
        on_finish: Callable[[int, RequestOutput], None] | None,
    ) -> list[RequestOutput]:
        """Serve the requests of every prompt to their ends."""
        requests = self._check_call(asked, shape)

        # Of each request its prompt, and of each prompt the responses that have not finished.
        prompt_of = {request: at for at, responses in enumerate(asked) for request in responses}
        num_open = [len(responses) for responses in asked]
        bar = _progress_bar(len(requests)) if progress else None
        try:
            with closing(self._serve(requests, shape)) as updates:
                for request in updates:
                    if request.finish_reason is None:
                        continue
                    at = prompt_of[request]
                    num_open[at] -= 1
                    if bar is not None:
                        bar.update()
                    if on_finish is not None and num_open[at] == 0:
                        on_finish(at, _output(asked[at]))
        finally:
            if bar is not None:
                bar.close()
        return [_output(responses) for responses in asked]

    def _stream(
        self, asked: list[list[Request]], shape: str | SpecShape | ShapeTable | None
    ) -> Generator[ResponseDelta, None, None]:
        """Check the requests of every prompt, and iterate over what is added to their responses."""
        if any(responses[0].params.prompt_logprobs is not None for responses in asked):
            raise UserError("A stream has no log-probabilities of the prompt.", "Use generate or chat.")
        requests = self._check_call(asked, shape)
        return self._deltas(requests, asked, shape)

    def _deltas(
        self,
        requests: list[Request],
        asked: list[list[Request]],
        shape: str | SpecShape | ShapeTable | None,
    ) -> Generator[ResponseDelta, None, None]:
        """Serve requests, and iterate over what is added to their responses."""
        place = {}
        for at, responses in enumerate(asked):
            for number, request in enumerate(responses):
                place[request] = at, number
        num_chars = dict.fromkeys(requests, 0)
        num_tokens = dict.fromkeys(requests, 0)
        with closing(self._serve(requests, shape)) as updates:
            for request in updates:
                text = request.decode_text()
                token_ids = list(request.token_ids)
                yield ResponseDelta(
                    *place[request],
                    text=text[num_chars[request] :],
                    token_ids=token_ids[num_tokens[request] :],
                    finish_reason=request.reason,
                )
                num_chars[request] = len(text)
                num_tokens[request] = len(token_ids)

    def make_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        shown_tokens: frozenset[int] = frozenset(),
        context: TextContext = TextContext(),  # noqa: B008
    ) -> Request:
        """Make a request for the engine: tokenised, and numbered in the order of the calls; special tokens of
        ``shown_tokens`` are part of its text, which continues the ``context``."""
        stream = None
        if self.tokenizer is not None:
            stream = TextStream(
                self.tokenizer,
                stop=params.stop,
                included_special_tokens=shown_tokens,
                context=context,
                min_tokens=params.min_tokens,
                includes_stop=params.include_stop_str_in_output,
            )
        elif params.stop:
            raise UserError(
                "A stop text was given to a model without a tokenizer.", "Pass tokenizer= to LLM."
            )
        request = Request(next(self._numbers), self.tokenize(prompt), params, priority, stream)
        if params.bad_words and self.tokenizer is not None:
            vocab_size = self.target.config.vocab_size
            words = tuple(params.bad_words)
            request.bad_word_ids = self._bad_word_ids(self.tokenizer, words, vocab_size)
        return request

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Compute the target's logits ``[T, V]`` after every token of ``ids``, in one forward without a
        cache."""
        with out_of_memory("computing logits", FEWER_TOKENS), self._on_all_ranks("text_logits", ids):
            return text_logits(self.target, ids)

    def record_drafts(
        self, requests: Sequence[Request], shape: SpecShape, on_finish: Callable[[], None]
    ) -> DraftRecording:
        """Record what the draft proposes at every position of the responses to ``requests``
        (:func:`~eagle_kit.engine.calibrate.record_drafts.record_drafts`, which has the arguments)."""
        engine = self._allocated()
        assert engine.draft is not None
        copies = [RequestData.of(request) for request in requests]
        with self._on_all_ranks("record_drafts", copies, shape):
            return record_drafts(
                engine.target, engine.draft, engine.config, requests, shape=shape, on_finish=on_finish
            )


def _as_tokenizer(given: Any) -> Any:
    """A tokenizer, or the one of a folder, hub id or known name. Raises UserError where there is none."""
    if not isinstance(given, str | Path):
        return given
    from eagle_kit.models.loading.source import load_tokenizer, resolve_model

    return load_tokenizer(given if Path(given).is_dir() else resolve_model(given, "tokenizer"))


_Checked = TypeVar("_Checked")


def _check_each(prompts: Sequence[_Checked], check: Callable[[_Checked], None]) -> None:
    """Call ``check`` with every prompt. Its UserError is raised with the number of the prompt."""
    for i, prompt in enumerate(prompts):
        try:
            check(prompt)
        except UserError as error:
            which = f"Prompt {i} of {len(prompts)}: " if len(prompts) > 1 else ""
            raise UserError(which + error.cause, error.remedy) from None


def _params_of_each(
    count: int,
    given: SamplingParams | Mapping[str, Any] | Sequence[Any] | None,
    fields: dict[str, Any],
) -> list[SamplingParams]:
    """Sampling parameters of ``count`` prompts: those given, or the default, with ``fields`` replaced.

    Raises:
        UserError: another number of parameters than of prompts, or a value out of range.
    """
    if given is None:
        given = SamplingParams()
    if isinstance(given, SamplingParams | Mapping):
        return [_with_fields(given, fields)] * count
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise UserError(f"The sampling parameters are {shown(given)}.", "Give SamplingParams(...).")
    if len(given) != count:
        raise UserError(
            f"{count} prompts have {len(given)} sampling parameters.", "Give one for each prompt."
        )
    return [_with_fields(params, fields) for params in given]


def _with_fields(params: SamplingParams | Mapping[str, Any], fields: dict[str, Any]) -> SamplingParams:
    """Sampling parameters, given as such or as a mapping of their fields, with ``fields`` replaced.

    Raises:
        UserError: something else was given, or a value out of range.
    """
    if isinstance(params, Mapping):
        return SamplingParams(**{**params, **fields})
    if not isinstance(params, SamplingParams):
        raise UserError(f"The sampling parameters are {shown(params)}.", "Give SamplingParams(...).")
    return replace(params, **fields)


def _named(draft: Any) -> Any:
    """The folder of a draft that is open, which every rank opens by itself; anything else as it is."""
    return draft.path if isinstance(draft, DraftFolder) else draft


def _output(responses: Sequence[Request]) -> RequestOutput:
    """Output of a prompt: its first response, with the others."""
    outputs = [request.output() for request in responses]
    for index, output in enumerate(outputs):
        output.index = index
        output.prompt_logprobs = outputs[0].prompt_logprobs
    outputs[0].others = outputs[1:]
    return outputs[0]


def _progress_bar(total: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, unit="response", dynamic_ncols=True)
