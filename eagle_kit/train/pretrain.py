"""A small target from nothing: for architectures whose public models are too large to try.

The model and its optimisation are those of ``transformers``; the tokenizer is a byte-level BPE of the text
itself. The result is a Hugging Face folder like any other target.
"""

import json
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from eagle_kit.config.pretrain import PretrainConfig, TextConfig
from eagle_kit.core.errors import UserError
from eagle_kit.train.run.interrupt import Interrupt

START, END = "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML."""


def pretrain(config: PretrainConfig, *, resume: bool = False, minutes: float | None = None) -> Path | None:
    """Make a tokenizer and a model, train it, write the folder.

    Args:
        resume: go on from the last save in ``output_dir``.
        minutes: save and stop after them; a later call with ``resume`` goes on.

    Returns:
        The folder; None when the run was stopped before its end, having saved.

    Raises:
        UserError: an unknown model type or source, or a run that is there or is not.
    """
    import torch
    import transformers

    folder = Path(config.output_dir)
    run = folder / "training"
    if run.exists() and not resume:
        raise UserError(f"There is a run in {run}.", "Go on with --resume, or choose another output_dir.")
    if resume and not any(run.glob("checkpoint-*")):
        raise UserError(f"There is no saved run in {run}.", "Leave --resume out.")
    transformers.set_seed(config.seed)
    run.mkdir(parents=True, exist_ok=True)
    tokenizer, ids = _text(config.text, run)
    tokenizer.save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(_model_config(config, tokenizer))
    model.config.architectures = [type(model).__name__]
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {len(ids) / 1e6:.1f} M tokens"
    )
    wanted = config.training
    arguments = transformers.TrainingArguments(
        output_dir=str(run),
        per_device_train_batch_size=wanted.rows,
        max_steps=wanted.steps,
        learning_rate=wanted.learning_rate,
        warmup_steps=wanted.warmup_steps,
        weight_decay=wanted.weight_decay,
        adam_beta2=0.95,
        lr_scheduler_type="cosine",
        save_steps=wanted.save_every,
        save_total_limit=1,
        logging_steps=20,
        report_to="none",
        seed=config.seed,
        data_seed=config.seed,
        bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
    )
    with Interrupt() as interrupt:
        stop = _Stop(interrupt, minutes)
        trainer = transformers.Trainer(
            model, arguments, train_dataset=_Rows(ids, wanted.length), callbacks=[stop.callback()]
        )
        trainer.train(resume_from_checkpoint=resume or None)
    if trainer.state.global_step < wanted.steps:
        print(f"Stopped at step {trainer.state.global_step} of {wanted.steps}; --resume goes on.")
        return None
    model.save_pretrained(folder)
    (folder / "training.json").write_text(
        json.dumps({"config": config.model_dump(), "log": trainer.state.log_history}, indent=1) + "\n",
        encoding="utf-8",
    )
    return folder


def _model_config(config: PretrainConfig, tokenizer: Any) -> Any:
    import transformers

    sizes = dict(config.model)
    kind = sizes.pop("model_type", None)
    if kind is None:
        raise UserError("`model` has no `model_type`.", "Write one, such as deepseek_v3.")
    try:
        return transformers.AutoConfig.for_model(
            kind,
            **sizes,
            vocab_size=len(tokenizer),
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=None,
        )
    except ValueError as error:
        raise UserError(
            f"transformers has no model of the type {kind} with these sizes ({error}).", "Correct `model`."
        ) from None


class _Rows:
    """Pieces of ``length`` tokens, for a causal language model."""

    def __init__(self, ids: np.ndarray, length: int) -> None:
        self._ids, self._length = ids, length

    def __len__(self) -> int:
        return len(self._ids) // self._length

    def __getitem__(self, row: int) -> dict[str, Any]:
        import torch

        piece = self._ids[row * self._length : (row + 1) * self._length]
        ids = torch.from_numpy(piece.astype(np.int64))
        return {"input_ids": ids, "labels": ids}


class _Stop:
    """Ends a run, saved, when its time is over or a signal came."""

    def __init__(self, interrupt: Interrupt, minutes: float | None) -> None:
        self._interrupt = interrupt
        self._end = float("inf") if minutes is None else time.monotonic() + 60 * minutes

    def callback(self) -> Any:
        import transformers

        outer = self

        class Callback(transformers.TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if outer._interrupt.requested or time.monotonic() > outer._end:
                    control.should_save = control.should_training_stop = True

        return Callback()


def _text(text: TextConfig, run: Path) -> tuple[Any, np.ndarray]:
    """The tokenizer and the tokens, uint16 ``[n]``, made once a run."""
    from transformers import PreTrainedTokenizerFast

    tokenizer_file, ids_file = run / "tokenizer.json", run / "tokens.npy"
    if not ids_file.exists():
        print("Reading the text, making the tokenizer ...")
        _make_tokenizer(text).save(str(tokenizer_file))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file), eos_token=END, pad_token=END)
    tokenizer.chat_template = CHAT_TEMPLATE
    if not ids_file.exists():
        parts, size = [], 0
        for chats in _batches(text, 256):
            for encoding in tokenizer.backend_tokenizer.encode_batch(chats):
                parts.append(np.array(encoding.ids, dtype=np.uint16))
                size += len(encoding.ids)
            if size >= text.max_tokens:
                break
        np.save(ids_file, np.concatenate(parts)[: text.max_tokens])
    return tokenizer, np.load(ids_file, mmap_mode="r")


def _make_tokenizer(text: TextConfig) -> Any:
    """A byte-level BPE, learned from the beginning of the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=text.vocab_size,
        special_tokens=[END, START],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    chars, some = 0, []
    for chat in chain.from_iterable(_batches(text, 256)):
        some.append(chat)
        chars += len(chat)
        if chars > 20_000_000:
            break
    if not some:
        raise UserError(
            f"{text.source} has no text for a tokenizer.", "Lower text.min_ascii, or use another source."
        )
    tokenizer.train_from_iterator(some, trainer)
    return tokenizer


def _batches(text: TextConfig, size: int) -> Iterator[list[str]]:
    """Rendered conversations, some at a time."""
    from eagle_kit.data.chat.records import SkipLog, read_conversations

    batch: list[str] = []
    for chat in read_conversations(text.source, limit=text.limit, skipped=SkipLog()):
        rendered = "".join(f"{START}{m.role}\n{m.content}{END}\n" for m in chat.messages)
        if sum(map(str.isascii, rendered)) < text.min_ascii * len(rendered):
            continue
        batch.append(rendered)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
