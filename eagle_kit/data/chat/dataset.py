"""Packed rows of a source, tokenised once and kept on disk.

Legend: n tokens of all conversations, T tokens of a row.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eagle_kit.config.train import DataConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import read_json, read_object, replacing
from eagle_kit.data.chat.packing import PackedRow, join, pack
from eagle_kit.data.chat.records import (
    Conversation,
    ConversationMessage,
    SkipLog,
    Unusable,
    package_file_size,
    read_conversations,
)
from eagle_kit.data.chat.template import TokenizedChat, prompt_token_ids, tokenize_chat
from eagle_kit.data.chat.vocab_map import (
    VocabMap,
    build_vocab_map,
    load_vocab_map,
    tokenizer_hash,
    vocab_map_of,
)
from eagle_kit.models.loading.source import cache_folder

FORMAT = 2
"""Raise when the arrays or the mask change, so that old caches are made anew."""


@dataclass
class PreparedData:
    """Packed rows on disk.

    Attributes:
        folder: the cache; ``skipped.txt`` in it lists what was left out.
        vocab_map: the draft vocabulary of these replies.
        heldout_prompts: token ids of the first turns of conversations that are in no row.
        fingerprint: hash of data, tokenizer, template and settings.
    """

    folder: Path
    vocab_map: VocabMap
    heldout_prompts: list[list[int]]
    fingerprint: str
    num_conversations: int
    num_skipped: int
    num_tokens: int
    num_supervised_tokens: int
    notes: list[str]

    def __post_init__(self) -> None:
        self._ids = np.load(self.folder / "ids.npy", mmap_mode="r")
        self._reply = np.load(self.folder / "reply.npy", mmap_mode="r")
        self._starts = np.concatenate(([0], np.load(self.folder / "ends.npy")))
        self._rows = read_json(self.folder / "rows.json")

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int) -> PackedRow:
        """Packed row ``number``."""
        return join([self.chat(document) for document in self._rows[number]])

    def row_length(self, number: int) -> int:
        """Tokens of packed row ``number``."""
        return sum(
            int(self._starts[document + 1] - self._starts[document]) for document in self._rows[number]
        )

    def chat(self, document: int) -> TokenizedChat:
        """One tokenised conversation."""
        span = slice(int(self._starts[document]), int(self._starts[document + 1]))
        return TokenizedChat(np.asarray(self._ids[span]), np.asarray(self._reply[span]))

    def use_vocabulary(self, tokens: np.ndarray) -> None:
        """Take the target ids ``tokens``, int64 ascending, for the draft vocabulary."""
        counts, old = np.load(self.folder / "counts.npy"), self.vocab_map
        self.vocab_map = vocab_map_of(tokens, counts, old.fingerprint, old.tokenizer)

    @property
    def skip_file(self) -> Path:
        """The list of skipped records."""
        return self.folder / "skipped.txt"

    def equals(self, fingerprint: str) -> bool:
        """True when ``fingerprint`` names the same rows and prompts: by hash, or because the cache still has
        them under it and they are the same to the bit (a copied source file, a newer format)."""
        if fingerprint == self.fingerprint:
            return True
        other = self.folder.with_name(fingerprint)
        try:
            same = all(
                (other / name).read_bytes() == (self.folder / name).read_bytes()
                for name in ("rows.json", "ends.npy", "counts.npy", "ids.npy", "reply.npy")
            )
            prompts = read_json(other / "summary.json")["heldout_prompts"]
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return same and prompts == self.heldout_prompts


def cache_root(settings: DataConfig) -> Path:
    """Folder of tokenised data and captured states: ``data.cache_dir``, else the cache of targets."""
    return Path(settings.cache_dir).expanduser() if settings.cache_dir else cache_folder()


def prepare_dataset(
    settings: DataConfig,
    tokenizer: Any,
    draft_vocab_size: int | None,
    vocab_map: str | Path | None = None,
    *,
    progress: bool = True,
) -> PreparedData:
    """Tokenise, mask and pack ``settings.source``, one or several; called again, read the cache.

    The cache is ``data/`` below :func:`cache_root`. The draft vocabulary is the tokens that replies use most,
    or the one of the file ``vocab_map``; all tokens for a ``draft_vocab_size`` of None.

    ``settings.limit`` bounds the conversations of each source. The first ``eval_conversations`` usable
    conversations that their record holds from the start are held out; others that begin like one of them are
    skipped, so that no held-out prompt is trained on.

    Raises:
        UserError: a source that cannot be read or has no usable conversation, a mask that covers everything,
            a vocabulary map that does not fit, or a cache that cannot be written.
    """
    if not settings.source:
        raise UserError("No conversations are named.", "Set data.source, or data.store to captured states.")
    fingerprint = _fingerprint(settings, tokenizer)
    folder = cache_root(settings) / "data" / fingerprint
    if not (folder / "summary.json").is_file():
        _fill_cache(settings, tokenizer, folder, progress)
    return load_prepared(folder, fingerprint, tokenizer, draft_vocab_size, vocab_map)


def load_prepared(
    folder: Path,
    fingerprint: str,
    tokenizer: Any,
    draft_vocab_size: int | None,
    vocab_map: str | Path | None = None,
) -> PreparedData:
    """The packed rows in ``folder``, which is whole; the rest as for :func:`prepare_dataset`."""
    try:
        summary = read_object(folder / "summary.json")
        counts, of = np.load(folder / "counts.npy"), tokenizer_hash(tokenizer)
        size = len(counts) if draft_vocab_size is None else draft_vocab_size
        return PreparedData(
            folder=folder,
            vocab_map=build_vocab_map(counts, size, fingerprint, of)
            if vocab_map is None
            else load_vocab_map(Path(vocab_map).expanduser(), of, size, counts),
            fingerprint=fingerprint,
            **summary,
        )
    except UserError:
        raise
    except (OSError, EOFError, ValueError, TypeError) as error:
        raise UserError(
            f"The prepared data in {folder} cannot be read ({error}).", "Delete the folder, or copy it again."
        ) from error


def _fill_cache(settings: DataConfig, tokenizer: Any, folder: Path, progress: bool) -> None:
    """Make ``folder``: beside it first, then renamed."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with replacing(folder) as work:
            work.mkdir()
            _build(settings, tokenizer, work, progress)
    except OSError as error:
        if not (folder / "summary.json").is_file():  # another process may have finished first
            raise UserError(
                f"The tokenised data could not be written to {folder} ({error}).",
                "Free some space, or set data.cache_dir to another folder.",
            ) from error


def _build(settings: DataConfig, tokenizer: Any, folder: Path, progress: bool) -> None:
    from tqdm import tqdm

    skipped = SkipLog()
    found: list[tuple[str, tuple[ConversationMessage, ...], TokenizedChat]] = []
    heldout: list[list[int]] = []
    held_turns: set[tuple[ConversationMessage, ...]] = set()
    total = settings.limit * len(_sources(settings)) if settings.limit else None
    bar = tqdm(
        conversations_of(settings, skipped),
        total=total,
        desc="tokenising",
        unit="conv",
        disable=not progress,
        dynamic_ncols=True,
    )
    for conversation in bar:
        try:
            chat = tokenize_chat(tokenizer, conversation, settings.max_length)
        except Unusable as reason:
            skipped.add(conversation.where, str(reason))
            continue
        turns = _first_turns(conversation)
        may_hold = len(heldout) < settings.eval_conversations and conversation.from_start
        if may_hold and turns not in held_turns:
            prompt = _first_prompt(tokenizer, turns, settings.max_length)
            if prompt:
                heldout.append(prompt)
                held_turns.add(turns)
                continue
        found.append((conversation.where, turns, chat))
    for where, turns, _ in found:
        if turns in held_turns:
            skipped.add(where, "it begins like a held-out conversation")
    chats = [chat for _, turns, chat in found if turns not in held_turns]
    _check_mask(chats, ", ".join(_sources(settings)), skipped)
    ids = np.concatenate([chat.ids for chat in chats])
    reply = np.concatenate([chat.reply for chat in chats])
    counts = np.bincount(ids[reply >= 0], minlength=len(tokenizer)).astype(np.int64)
    np.save(folder / "ids.npy", ids)
    np.save(folder / "reply.npy", reply)
    np.save(folder / "ends.npy", np.cumsum([len(chat.ids) for chat in chats]))
    np.save(folder / "counts.npy", counts)
    rows = pack([len(chat.ids) for chat in chats], settings.max_length)
    (folder / "rows.json").write_text(json.dumps(rows))
    skipped.write(folder / "skipped.txt")
    summary = {
        "heldout_prompts": heldout,
        "num_conversations": len(chats),
        "num_skipped": len(skipped.rows),
        "num_tokens": len(ids),
        "num_supervised_tokens": int((reply >= 0).sum()),
        "notes": skipped.notes,
    }
    (folder / "summary.json").write_text(json.dumps(summary))


def _sources(settings: DataConfig) -> list[str]:
    return [settings.source] if isinstance(settings.source, str) else list(settings.source or ())


def conversations_of(settings: DataConfig, skipped: SkipLog) -> Iterator[Conversation]:
    """Conversations of every source in turn, at most ``settings.limit`` of each."""
    for source in _sources(settings):
        yield from read_conversations(source, limit=settings.limit, skipped=skipped)


def _first_turns(conversation: Conversation) -> tuple[ConversationMessage, ...]:
    """The turns up to the first user turn."""
    roles = [message.role for message in conversation.messages]
    return conversation.messages[: roles.index("user") + 1]


def _first_prompt(tokenizer: Any, turns: tuple[ConversationMessage, ...], max_length: int) -> list[int]:
    """Ids of ``turns`` and the generation prompt, or nothing when they fill half a row."""
    messages = [{"role": message.role, "content": message.content} for message in turns]
    ids = prompt_token_ids(tokenizer, messages)
    return ids if len(ids) <= max_length // 2 else []


def _check_mask(chats: list[TokenizedChat], source: str, skipped: SkipLog) -> None:
    if not chats:
        reasons = "; ".join(f"{reason} ({count})" for reason, count in skipped.counts.most_common(3))
        raise UserError(
            f"No conversation of {source} can be trained on{f': {reasons}' if reasons else ''}.",
            "Look at a record with eagle-kit data preview, or hold out fewer conversations.",
        )
    if all((chat.reply >= 0).all() for chat in chats):
        raise UserError(
            f"The loss mask of {source} covers every token, so prompts would be learned too.",
            "Use a chat template that separates prompt and reply.",
        )


def _fingerprint(settings: DataConfig, tokenizer: Any) -> str:
    """Hash of everything the arrays depend on; files count by path, size and time of change, a package's file
    by size."""
    sources = _sources(settings)
    parts: list[Any] = [FORMAT, sources, settings.limit, settings.max_length, settings.eval_conversations]
    for source in sources:
        if source.startswith("package:"):
            parts.append(package_file_size(source.removeprefix("package:")))
        path = Path(source).expanduser()
        if path.is_file():
            stat = path.stat()
            parts += [str(path.resolve()), stat.st_size, stat.st_mtime_ns]
    parts += [tokenizer.chat_template, tokenizer_hash(tokenizer)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
