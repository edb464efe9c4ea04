"""The facade: a target, perhaps a draft, and ``generate``."""

import copy
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from eagle_kit.core.errors import UserError
from eagle_kit.core.request import RequestOutput, SamplingParams
from eagle_kit.core.shape import NO_SPECULATION, SpecShape
from eagle_kit.data.template import prompt_token_ids
from eagle_kit.kernels.cpu_memory import keep_large_blocks
from eagle_kit.kernels.linear import Linear, pack_linears
from eagle_kit.kernels.prefill_attention import prefill_attention
from eagle_kit.models.eagle3 import Eagle3Head
from eagle_kit.models.llama import LlamaModel
from eagle_kit.serve.engine import Engine, Request

Prompt = str | list[int] | list[dict[str, Any]]
DEFAULT_SHAPE = SpecShape(4, 1, 5)
DEFAULT_MAX_CONTEXT = 8192


class LLM:
    """A target LLM, decoded plainly or with an EAGLE-3 draft; the text is the same either way.

    Args:
        target: a Hugging Face folder, a hub id, a name that ``resolve_target`` knows, or a loaded model,
            which is then used as it is.
        draft: a draft checkpoint folder or a head, which is copied; None for ordinary decoding.
        shape: ``steps,topk,tokens``; default 4,1,5 with a draft. :meth:`generate` may choose another.
        max_batch_size: most requests decoded together.
        max_context: most tokens of prompt and reply; default the target's context, at most 8,192.
        page_size: tokens per page of the key-value pool.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"``, or ``"auto"``: fp32 on a CPU, bf16 on a GPU.
        device: ``"cpu"``, ``"cuda"`` or ``"auto"``.
        tokenizer: needed for text prompts when ``target`` is a loaded model.
    """

    def __init__(
        self,
        target: str | Path | LlamaModel,
        draft: str | Path | Eagle3Head | None = None,
        *,
        shape: str | SpecShape | None = None,
        max_batch_size: int = 8,
        max_context: int | None = None,
        page_size: int = 16,
        dtype: str = "auto",
        device: str = "auto",
        tokenizer: Any = None,
    ) -> None:
        for name, value in (("max_batch_size", max_batch_size), ("page_size", page_size)):
            if value < 1:
                raise UserError(f"{name} is {value}.", "Give at least 1.")
        if max_context is not None and max_context < 2:
            raise UserError(f"max_context is {max_context}.", "Give room for a prompt and a reply.")
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise UserError(f"The device {device} was asked for, but CUDA is not there.", "Use cpu or auto.")
        keep_large_blocks()
        self.tokenizer = tokenizer
        self._target_name: str | Path | None = None
        if isinstance(target, LlamaModel):
            self.target = target
        else:
            from eagle_kit.models.loader import load_target
            from eagle_kit.models.source import load_tokenizer, resolve_target

            folder = resolve_target(str(target))
            self._target_name = folder
            place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
            self.target = load_target(folder, dtype=_dtype(dtype, place), device=place)
            if tokenizer is None:
                self.tokenizer = load_tokenizer(folder)
        pack_linears(self.target)
        self.config = self.target.config
        self.max_context = min(max_context or DEFAULT_MAX_CONTEXT, self.config.max_position_embeddings)
        self.max_batch_size, self.page_size = max_batch_size, page_size
        self._engine: Engine | None = None
        self.head: Eagle3Head | None = None
        self.default_shape = NO_SPECULATION
        self.set_draft(draft)
        if shape is not None:
            self.default_shape = SpecShape.parse(shape)

    def set_draft(self, draft: str | Path | Eagle3Head | None) -> None:
        """Use another draft from now on. Raises UserError when it does not fit the target."""
        self._engine = None
        if draft is None:
            self.head, self.default_shape = None, NO_SPECULATION
            return
        weight = self.target.embed_tokens.weight
        if isinstance(draft, Eagle3Head):
            packed = (module._packed for module in draft.modules() if isinstance(module, Linear))
            head = copy.deepcopy(draft, {id(tensor): None for tensor in packed if tensor is not None})
        else:
            from eagle_kit.checkpoints.draft import load_draft
            from eagle_kit.checkpoints.validate import raise_on_errors, validate_draft

            if self._target_name is not None:
                raise_on_errors(validate_draft(draft, self._target_name))
            head = load_draft(draft, target=self.target)
        if (
            head.config.target_hidden_size != self.config.hidden_size
            or head.config.vocab_size != self.config.vocab_size
        ):
            raise UserError(
                f"The draft was made for hidden size {head.config.target_hidden_size} and vocabulary "
                f"{head.config.vocab_size}, the target has {self.config.hidden_size} and "
                f"{self.config.vocab_size}.",
                "Use the draft's own target, or train a draft for this one.",
            )
        if max(head.config.aux_layer_ids) > self.config.num_layers:
            raise UserError(
                f"The draft reads the inputs of layers {list(head.config.aux_layer_ids)}, the target has "
                f"{self.config.num_layers} layers.",
                "Use the draft's own target.",
            )
        self.head = head.to(device=weight.device, dtype=weight.dtype).eval().requires_grad_(False)
        pack_linears(self.head)
        if self.default_shape == NO_SPECULATION:
            self.default_shape = DEFAULT_SHAPE

    def engine(self, shape: SpecShape) -> Engine:
        """The engine, set to ``shape``; its memory is taken on first use."""
        if self._engine is None:
            self._engine = Engine(
                self.target,
                self.head,
                max_batch_size=self.max_batch_size,
                max_context=self.max_context,
                page_size=self.page_size,
            )
        self._engine.use_shape(shape)
        return self._engine

    def tokenize(self, prompt: Prompt) -> list[int]:
        """A user turn (str), messages (list of dicts) or token ids (as they are) -> token ids."""
        if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
            return list(prompt)  # type: ignore[arg-type]
        if self.tokenizer is None:
            raise UserError(
                "A text prompt was given to a model without a tokenizer.", "Pass tokenizer= to LLM."
            )
        if isinstance(prompt, str):
            if not prompt.strip():
                raise UserError("The prompt is empty.", "Give some text.")
            prompt = [{"role": "user", "content": prompt}]
        return prompt_token_ids(self.tokenizer, prompt)  # type: ignore[arg-type]

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        shape: str | SpecShape | None = None,
        progress: bool = False,
        on_finish: Callable[[int, RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Decode a reply to every prompt.

        Args:
            prompts: see :meth:`tokenize`.
            params: the same for all; default greedy, 256 tokens.
            shape: speculation shape of this call.
            progress: show a progress bar.
            on_finish: called with (index, reply) as replies finish.

        Returns:
            Replies in the order of the prompts. Raises UserError for an empty or too long prompt before any
            work.
        """
        if isinstance(prompts, str):
            raise UserError("generate was given one text instead of a list of prompts.", "Put it in a list.")
        params = params or SamplingParams()
        engine = self.engine(self.default_shape if shape is None else SpecShape.parse(shape))
        waiting = deque(Request(i, self.tokenize(prompt), params) for i, prompt in enumerate(prompts))
        for request in waiting:
            engine.check_request(request.prompt_ids)
        outputs: list[RequestOutput | None] = [None] * len(waiting)
        bar = _progress_bar(len(waiting)) if progress else None
        try:
            while waiting or engine.running:
                finished = []
                if waiting and not engine.running and not engine.has_room(waiting[0]):
                    raise UserError(
                        f"Prompt {waiting[0].number} and its reply do not fit the pool.", "Lower max_tokens."
                    )
                while waiting and engine.has_room(waiting[0]):
                    request = waiting.popleft()
                    engine.add(request)
                    if request.finish_reason is not None:
                        finished.append(request)
                finished += engine.step()
                for request in finished:
                    output = outputs[request.number] = self._output(request)
                    if bar is not None:
                        bar.update()
                    if on_finish is not None:
                        on_finish(request.number, output)
        finally:
            for request in list(engine.running):
                engine.abort(request)
            if bar is not None:
                bar.close()
        return [output for output in outputs if output is not None]

    def _output(self, request: Request) -> RequestOutput:
        text = ""
        if self.tokenizer is not None:
            text = self.tokenizer.decode(request.token_ids, skip_special_tokens=True)
        return RequestOutput(
            prompt_ids=request.prompt_ids,
            token_ids=request.token_ids,
            text=text,
            finish_reason=request.finish_reason or "",
            stats=request.stats,
            prefill_s=request.first_token_at - request.admitted_at,
            decode_s=request.last_token_at - request.first_token_at,
        )

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """The target's logits after every token of ``ids`` -> ``[T, V]``, in one forward without a cache."""
        device = self.target.embed_tokens.weight.device
        tokens = torch.tensor(ids, device=device)
        scale = self.config.head_dim**-0.5
        out = self.target(
            tokens,
            torch.arange(len(ids), device=device),
            lambda layer, q, k, v: prefill_attention(q, k, v, scale),
        )
        return self.target.logits(out.hidden)


def _dtype(name: str, device: str) -> torch.dtype:
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    if name not in dtypes:
        raise UserError(f"The dtype {name!r} is not known.", f"Use auto, {', '.join(dtypes)}.")
    return dtypes[name]


def _progress_bar(total: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, unit="reply", dynamic_ncols=True)
