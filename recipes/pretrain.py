"""A small model from nothing, or from some layers of a target.

The first is for architectures whose public models are too large to try; its tokenizer is a byte-level BPE of
the text itself. The second drafts for its target where no smaller model of the family is at hand. Model and
optimisation are those of ``transformers``, and the result is a Hugging Face folder like any other target.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import (
    ANOTHER_FOLDER,
    CHOOSE_ANOTHER,
    read_object,
    remove,
    replacing,
    sole_writer,
    write_json_atomically,
    writing_remedy,
)
from eagle_kit.data.chat.forms import Conversation
from eagle_kit.data.chat.messages import ChatPrompt
from eagle_kit.data.chat.renderer import ChatRenderer
from eagle_kit.models.loading.source import load_tokenizer, resolve_target
from eagle_kit.train.run.interrupt import Interrupt
from recipes.pretrain_config import PretrainConfig, StartConfig, TextConfig

START, END = "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML."""
MIN_ASCII = 0.99
"""Least share of ASCII characters of a conversation: a small vocabulary has no room for many scripts."""
TOKENIZER_CHARS = 20_000_000
"""Characters that the tokenizer is learned from."""
TOKENIZER_FILE = "tokenizer.json"
IDS_FILE = "tokens.npy"
STATE_FILE = "trainer_state.json"
"""What ``transformers`` writes last of a checkpoint."""


def pretrain(config: PretrainConfig, *, resume: bool = False) -> bool:
    """Make a tokenizer and a model, train it, write ``output_dir``.

    Args:
        resume: go on from the last save in ``output_dir``.

    Returns:
        False when Ctrl-C or SIGTERM stopped the run before its end, having saved.

    Raises:
        UserError: an unknown model type or source, a run that is there or is not, or a folder that cannot be
            written to or that another process writes to.
    """
    folder = Path(config.output_dir)
    run = folder / "training"
    with sole_writer(folder, folder / ".lock"), _writing(run):
        saved = _saved_checkpoints(run)
        if saved and not resume:
            raise UserError(f"There is a run in {run}.", "Go on with --resume, or choose another output_dir.")
        if resume and not saved:
            raise UserError(f"There is no saved run in {run}.", "Leave --resume out.")
        is_ours = (run / TOKENIZER_FILE).is_file()
        if run.exists() and not is_ours and (not run.is_dir() or any(run.iterdir())):
            raise UserError(f"There is something else than a run in {run}.", "Choose another output_dir.")
        _remove_unfinished(run, saved)
        return _train(config, folder, run, saved[-1] if saved else None)


def _saved_checkpoints(run: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    found = {}
    for path in run.glob("checkpoint-*"):
        number = path.name.removeprefix("checkpoint-")
        try:
            read_object(path / STATE_FILE)
        except UserError:  # of a process that was killed while it wrote or deleted
            continue
        if number.isdecimal():
            found[int(number)] = path
    return [found[number] for number in sorted(found)]


def _remove_unfinished(run: Path, saved: list[Path]) -> None:
    """Delete half-written checkpoints, and without a whole one the text that was read, which may be of other
    settings."""
    for path in run.glob("checkpoint-*"):
        if path not in saved:
            remove(path)
    if not saved:
        remove(run / IDS_FILE)


@contextmanager
def _writing(run: Path) -> Iterator[None]:
    """Turn what ``transformers`` raises inside where the disk refuses a file into a UserError."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"The run in {run} could not be written: {error}.", writing_remedy(error, CHOOSE_ANOTHER)
        ) from error
    except RuntimeError as error:
        if "inline_container" not in str(error):  # the source file in torch that writes a checkpoint
            raise
        raise UserError(f"A checkpoint in {run} could not be written whole.", ANOTHER_FOLDER) from error


def _train(config: PretrainConfig, folder: Path, run: Path, checkpoint: Path | None) -> bool:
    """Train from ``checkpoint``, or from nothing, and write the target; False when a signal stopped it."""
    import torch
    import transformers

    wanted = config.training
    transformers.set_seed(config.seed)
    run.mkdir(parents=True, exist_ok=True)
    if config.start_from is None:
        tokenizer = _made_tokenizer(config.text, run)
        chats = _chats(config.text)
        model = transformers.AutoModelForCausalLM.from_config(
            _model_config(config, tokenizer), trust_remote_code=False
        )
    else:
        tokenizer, model = _from_layers(config.start_from, run)
        chats = _templated_chats(config.text, tokenizer)
    ids = _read_text(chats, tokenizer, config.text.max_tokens, run)
    tokenizer.save_pretrained(folder)
    model.config.architectures = [type(model).__name__]
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{size / 1e6:.1f} M parameters, {len(ids) / 1e6:.1f} M tokens")
    has_gpu = torch.cuda.is_available()
    has_bf16 = has_gpu and torch.cuda.is_bf16_supported()
    in_bf16 = wanted.precision == "bfloat16" or (wanted.precision == "auto" and has_bf16)
    arguments = transformers.TrainingArguments(
        output_dir=str(run),
        per_device_train_batch_size=wanted.rows,
        max_steps=wanted.steps,
        learning_rate=wanted.learning_rate,
        warmup_steps=wanted.warmup_steps,
        weight_decay=0.1,
        adam_beta2=0.95,
        lr_scheduler_type="cosine",
        save_steps=wanted.save_every,
        save_total_limit=1,
        logging_steps=20,
        report_to="none",
        seed=config.seed,
        data_seed=config.seed,
        use_cpu=in_bf16 and not has_gpu,
        bf16=in_bf16,
    )
    whole = len(ids) // wanted.length * wanted.length
    rows = torch.from_numpy(ids[:whole].astype(np.int64)).view(-1, wanted.length)
    with Interrupt() as interrupt:

        class StopOnSignal(transformers.TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if interrupt.requested:
                    control.should_save = control.should_training_stop = True

        trainer = transformers.Trainer(
            model,
            arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            callbacks=[StopOnSignal()],
        )
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if trainer.state.global_step < wanted.steps:
        print(f"Stopped at step {trainer.state.global_step} of {wanted.steps}; --resume goes on.")
        return False
    model.save_pretrained(folder)
    log = {"config": config.model_dump(), "log": trainer.state.log_history}
    write_json_atomically(folder / "training.json", log, indent=1)
    return True


def _model_config(config: PretrainConfig, tokenizer: Any) -> Any:
    import transformers

    sizes = dict(config.model or {})
    kind = sizes.pop("model_type", "none given")
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    try:
        return transformers.AutoConfig.for_model(kind, **sizes, vocab_size=len(tokenizer), **ends)
    except ValueError as error:
        raise UserError(
            f"transformers has no model of the type {kind} with these sizes ({error}).",
            "Correct `model`, whose `model_type` is one such as deepseek_v3.",
        ) from None


def _from_layers(start: StartConfig, run: Path) -> tuple[Any, Any]:
    """The target's tokenizer, which is also kept in ``run``, and the fp32 target with ``start.layers`` alone.

    Raises:
        UserError: the target has no such layer, or the layer is a recurrent one.
    """
    import torch
    from transformers import AutoModelForCausalLM

    # Load the whole target.
    folder = resolve_target(start.target)
    tokenizer = load_tokenizer(folder)
    tokenizer.save_pretrained(run)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    whole = getattr(model.base_model, "layers", ())
    if start.layers[-1] >= len(whole):
        raise UserError(
            f"start_from.layers names layer {start.layers[-1]}, and {start.target} has {len(whole)}.",
            "Number its layers from 0.",
        )

    # Keep the layers. Their numbers are places in a cache of keys and values.
    layers = [whole[number] for number in start.layers]
    for place, layer in enumerate(layers):
        if not hasattr(layer, "self_attn"):
            raise UserError(
                f"Layer {start.layers[place]} of {start.target} has no attention.",
                "Name layers that attend: a model with others cannot draft.",
            )
        layer.self_attn.layer_idx = place
    model.base_model.layers = torch.nn.ModuleList(layers)
    model.config.num_hidden_layers = len(layers)
    if types := getattr(model.config, "layer_types", None):
        model.config.layer_types = [types[number] for number in start.layers]

    # The draft's embedding and output layer stay those of the target.
    model.get_input_embeddings().requires_grad_(False)
    model.get_output_embeddings().requires_grad_(False)
    return tokenizer, model


def _made_tokenizer(text: TextConfig, run: Path) -> Any:
    """A tokenizer that is learned from the text, once a run."""
    from transformers import PreTrainedTokenizerFast

    tokenizer_file = run / TOKENIZER_FILE
    if not (run / IDS_FILE).exists():
        print("Making the tokenizer ...")
        _make_tokenizer(text).save(str(tokenizer_file))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file), eos_token=END, pad_token=END)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _read_text(chats: Iterator[str], tokenizer: Any, most: int, run: Path) -> np.ndarray:
    """At most ``most`` tokens of the rendered conversations ``chats``, unsigned integers ``[n]``, read once a
    run."""
    ids_file = run / IDS_FILE
    if not ids_file.exists():
        print("Reading the text ...")
        dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
        parts: list[np.ndarray] = []
        size = 0
        while size < most and (batch := list(islice(chats, 256))):
            for encoding in tokenizer.backend_tokenizer.encode_batch(batch, add_special_tokens=False):
                parts.append(np.array(encoding.ids, dtype=dtype))
                size += len(encoding.ids)
        with replacing(ids_file) as work, work.open("wb") as file:  # given a name, numpy would add an ending
            np.save(file, np.concatenate(parts)[:most])
    return np.load(ids_file, mmap_mode="r")


def _make_tokenizer(text: TextConfig) -> Any:
    """Learn a byte-level BPE from the beginning of the text."""
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
    some: list[str] = []
    chars = 0
    for chat in _chats(text):
        some.append(chat)
        chars += len(chat)
        if chars > TOKENIZER_CHARS:
            break
    if not some:
        raise UserError(f"{text.source} has no text for a tokenizer.", "Use another source.")
    tokenizer.train_from_iterator(some, trainer)
    return tokenizer


def _chats(text: TextConfig) -> Iterator[str]:
    """Conversations in ChatML, those of other scripts left out."""
    for chat in _conversations(text):
        rendered = "".join(f"{START}{m['role']}\n{m['content']}{END}\n" for m in chat.messages)
        if sum(map(str.isascii, rendered)) >= MIN_ASCII * len(rendered):
            yield rendered


def _templated_chats(text: TextConfig, tokenizer: Any) -> Iterator[str]:
    """Conversations by the chat template of ``tokenizer``."""
    renderer = ChatRenderer(tokenizer)
    for chat in _conversations(text):
        prompt = ChatPrompt(chat.messages, chat.tools, chat.chat_template_kwargs)
        yield renderer.render(prompt, generation_prompt=False)


def _conversations(text: TextConfig) -> Iterator[Conversation]:
    """Conversations of all sources of the text."""
    from eagle_kit.data.chat.records import SkipLog, read_conversations

    sources = (text.source,) if isinstance(text.source, str) else text.source
    for source in sources:
        yield from read_conversations(source, skipped=SkipLog())
