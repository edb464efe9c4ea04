"""Packed rows of a source, tokenised once and kept on disk.

Legend: n tokens of all conversations, T tokens of a row.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from eagle_kit.config.train import DataConfig, SourceConfig, template_variants
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import (
    cache_folder,
    expand,
    read_json,
    read_object,
    read_text,
    replacing,
    taking_turns,
    writing_remedy,
)
from eagle_kit.data.chat.forms import Conversation
from eagle_kit.data.chat.messages import ChatPrompt, Unusable
from eagle_kit.data.chat.packing import PackedRow, join, pack
from eagle_kit.data.chat.records import SkipLog, package_file_size, read_conversations, reasons_of
from eagle_kit.data.chat.rows import TokenizedChat, tokenize_chat
from eagle_kit.data.chat.template import end_names, prompt_token_ids
from eagle_kit.data.chat.variants import draw_kwargs
from eagle_kit.data.chat.vocab_map import (
    VocabMap,
    build_vocab_map,
    load_vocab_map,
    tokenizer_hash,
    vocab_map_of,
)
from eagle_kit.data.tasks.excluded import ExcludedSets

FORMAT = 6
"""Raise when the arrays or the mask change, so that old caches are made anew."""
MOST_CATEGORIES = 16
"""Categories of a source's records that are counted apart; where there are more, none is."""
LONGEST_MODE = 20
"""Characters of an argument of a chat template that tells modes apart."""
Group = tuple[str, str, str]
"""What a document is counted as: its source's name, its record's category, and its mode (:func:`_mode`)."""


@dataclass(frozen=True)
class PartRows:
    """Packed rows of a source of a mixture: ``num_rows`` from ``first``; a row is of one part."""

    name: str
    first: int
    num_rows: int
    num_tokens: int
    num_documents: int


@dataclass
class PreparedData:
    """Packed rows on disk.

    Attributes:
        folder: the cache; ``skipped.txt`` in it lists what was left out.
        vocab_map: the draft vocabulary of these replies.
        heldout_prompts: token ids of the first turns of conversations that are in no row; of a mixture, the
            sources take turns.
        heldout_groups: the group of each, as a place in ``groups``.
        groups: names of the groups that documents are counted in: their source, the ``category`` of their
            record where it has one, and the arguments of the chat template where a source has several.
        parts: rows of the sources of a mixture, or of the only one.
        excluded: evaluation sets that no conversation holds a prompt of, with their fingerprints.
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
    heldout_groups: list[int] = field(default_factory=list)
    groups: list[str] = field(default_factory=lambda: ["all"])
    parts: list[PartRows] = field(default_factory=list)
    excluded: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._ids = np.load(self.folder / "ids.npy", mmap_mode="r")
        self._reply = np.load(self.folder / "reply.npy", mmap_mode="r")
        self._starts = np.concatenate(([0], np.load(self.folder / "ends.npy")))
        self._rows = read_json(self.folder / "rows.json")
        groups = self.folder / "groups.npy"  # stores that were captured before there were groups have none
        self._groups = np.load(groups) if groups.exists() else np.zeros(len(self._starts) - 1, np.int16)
        self.heldout_groups = self.heldout_groups or [0] * len(self.heldout_prompts)
        self.parts = self.parts or [PartRows("all", 0, len(self), self.num_tokens, self.num_conversations)]

    def __len__(self) -> int:
        return len(self._rows)

    def check_rows(self, num_rows: int) -> None:
        """Raise UserError for a token that the target's embedding of ``num_rows`` rows has no row for."""
        highest = max(
            [int(self._ids.max(initial=-1)), *(max(ids, default=-1) for ids in self.heldout_prompts)]
        )
        if highest >= num_rows:
            raise UserError(
                f"The data have the token {highest}, and the target's embedding has {num_rows} rows.",
                "Use the tokenizer and the chat template that the target was trained with.",
            )

    def row(self, number: int) -> PackedRow:
        """Packed row ``number``."""
        documents = self._rows[number]
        return join([self.chat(document) for document in documents], self._groups[documents].tolist())

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

    @property
    def skip_reasons(self) -> str:
        """The most frequent reasons of skipped records, with their counts."""
        lines = read_text(self.skip_file).splitlines()
        return reasons_of(Counter(line.partition("\t")[2] for line in lines if not line.startswith("# ")))

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
    return expand(settings.cache_dir) if settings.cache_dir else cache_folder()


def prepare_dataset(
    settings: DataConfig,
    tokenizer: Any,
    draft_vocab_size: int | None,
    vocab_map: str | Path | None = None,
    *,
    progress: bool = True,
) -> PreparedData:
    """Tokenise, mask and pack the sources of ``settings``; called again, read the cache. Every source of a
    mixture is packed by itself.

    The cache is ``data/`` below :func:`cache_root`. The draft vocabulary is the tokens that replies use most,
    or the one of the file ``vocab_map``; all tokens for a ``draft_vocab_size`` of None.

    ``settings.limit`` bounds the conversations of each source. The first ``eval_conversations`` usable
    conversations that their record holds from the start are held out, of each source of a mixture an equal
    part; others that begin like one of them are skipped, so that no held-out prompt is trained on, as are
    those that hold a prompt of the evaluation sets ``settings.decontaminate``.

    Raises:
        UserError: a source that cannot be read or has no usable conversation, a mask that covers everything,
            a vocabulary map that does not fit, or a cache that cannot be written.
    """
    if not settings.sources:
        raise UserError("No conversations are named.", "Set data.source or data.mix.")
    excluded = ExcludedSets.load(settings.decontaminate)
    fingerprint = _fingerprint(settings, tokenizer, excluded)
    folder = cache_root(settings) / "data" / fingerprint
    if not (folder / "summary.json").is_file():
        _fill_cache(settings, tokenizer, excluded, folder, progress)
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
        summary["parts"] = [PartRows(**part) for part in summary.get("parts", [])]
        return PreparedData(
            folder=folder,
            vocab_map=build_vocab_map(counts, size, fingerprint, of)
            if vocab_map is None
            else load_vocab_map(expand(vocab_map), of, size, counts),
            fingerprint=fingerprint,
            **summary,
        )
    except UserError:
        raise
    except (OSError, EOFError, ValueError, TypeError) as error:
        raise UserError(
            f"The prepared data in {folder} cannot be read ({error}).", "Delete the folder, or copy it again."
        ) from error


def _fill_cache(
    settings: DataConfig, tokenizer: Any, excluded: ExcludedSets, folder: Path, progress: bool
) -> None:
    """Make ``folder``: beside it first, then renamed; in one process of several that need it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with taking_turns(folder):
            if (folder / "summary.json").is_file():
                return
            with replacing(folder) as work:
                work.mkdir()
                _build(settings, tokenizer, excluded, work, progress)
    except OSError as error:
        raise UserError(
            f"The tokenised data could not be written to {folder} ({error}).",
            writing_remedy(error, "set data.cache_dir to another folder"),
        ) from error


@dataclass(frozen=True)
class _Document:
    """A conversation to learn from: where it comes from, the key of its first turns, its group, and its
    rows."""

    where: str
    turns: str
    group: Group
    chats: list[TokenizedChat]


@dataclass
class _Reader:
    """Conversations of the sources, tokenised; the first ones held out."""

    settings: DataConfig
    tokenizer: Any
    skipped: SkipLog
    excluded: ExcludedSets
    held_turns: set[str] = field(default_factory=set)
    remarks: Counter[str] = field(default_factory=Counter)

    def read(
        self, source: SourceConfig, num_heldout: int, progress: bool
    ) -> tuple[list[_Document], list[tuple[Group, list[int]]]]:
        """Documents of a source, and the group and prompt of ``num_heldout`` others, if there are as many."""
        from tqdm import tqdm

        limit = source.limit or self.settings.limit
        found: list[_Document] = []
        heldout: list[tuple[Group, list[int]]] = []
        bar = tqdm(
            _labelled(self.settings, source, self.skipped),
            total=limit * len(source.files) if limit else None,
            desc="tokenising",
            unit="conv",
            disable=not progress,
            dynamic_ncols=True,
        )
        for label, conversation in bar:
            try:
                self.excluded.check(conversation)
                chats = tokenize_chat(self.tokenizer, conversation, self.settings.max_length, self.remarks)
                _check_length(source, max(len(chat.ids) for chat in chats))
            except Unusable as reason:
                self.skipped.add(conversation.where, str(reason))
                continue
            first = conversation.first_prompt
            group = label, conversation.category, _mode(conversation.chat_template_kwargs)
            turns = ChatPrompt(first.messages, first.tools).key()
            may_hold = len(heldout) < num_heldout and conversation.from_start
            if may_hold and turns not in self.held_turns:
                prompt = _first_prompt(self.tokenizer, first, self.settings.max_length)
                if prompt:
                    heldout.append((group, prompt))
                    self.held_turns.add(turns)
                    continue
            found.append(_Document(conversation.where, turns, group, chats))
        return found, heldout


def _labelled(
    settings: DataConfig, source: SourceConfig, skipped: SkipLog
) -> Iterator[tuple[str, Conversation]]:
    """Conversations of a source's files in turn, at most its limit of each, with the arguments of the chat
    template that the config gives them and the name of what they are counted as."""
    own = source.chat_template_kwargs
    variants = template_variants(settings.chat_template_kwargs if own is None else own)
    for file in source.files:
        label = source.name or name_of(file)
        for found in read_conversations(file, limit=source.limit or settings.limit, skipped=skipped):
            key = ChatPrompt(found.messages, found.tools).key()
            drawn = draw_kwargs(variants, settings.chat_template_seed, key)
            yield label, replace(found, chat_template_kwargs={**drawn, **found.chat_template_kwargs})


def name_of(source: str) -> str:
    """Short name of a source: of a package or data set its own, of a file that without its ending."""
    kind, _, rest = source.partition(":")
    return rest if kind in ("package", "datasets") and rest else Path(source).stem


def _same_names(sources: Sequence[SourceConfig]) -> list[str]:
    """Remarks about sources whose names do not tell them apart."""
    own = ([source.name] if source.name else map(name_of, source.files) for source in sources)
    counts = Counter(name for names in own for name in dict.fromkeys(names))
    return [
        f"{count} sources are named {name}, so that their accept lengths are one; data.mix can name them"
        for name, count in counts.items()
        if count > 1
    ]


def _check_length(source: SourceConfig, length: int) -> None:
    if source.min_tokens is not None and length < source.min_tokens:
        raise Unusable(f"fewer tokens than the source's min_tokens, {source.min_tokens}")
    if source.max_tokens is not None and length > source.max_tokens:
        raise Unusable(f"more tokens than the source's max_tokens, {source.max_tokens}")


def _build(
    settings: DataConfig, tokenizer: Any, excluded: ExcludedSets, folder: Path, progress: bool
) -> None:
    reader, sources = _Reader(settings, tokenizer, SkipLog(), excluded), settings.sources
    skipped = reader.skipped
    shares = [
        settings.eval_conversations // len(sources) + (i < settings.eval_conversations % len(sources))
        for i in range(len(sources))
    ]
    read = [reader.read(source, share, progress) for source, share in zip(sources, shares, strict=True)]
    kept: list[list[_Document]] = []
    for found, _ in read:
        for document in found:
            if document.turns in reader.held_turns:
                skipped.add(document.where, "it begins like a held-out conversation")
        kept.append([document for document in found if document.turns not in reader.held_turns])
    skipped.note_counts(reader.remarks, ", ".join(file for source in sources for file in source.files))
    names = [", ".join(source.files) for source in sources]
    skipped.notes += _same_names(sources)
    for name, documents in zip(names, kept, strict=True):
        _check_mask([chat for document in documents for chat in document.chats], name, skipped)
    heldout = [one for turn in zip_longest(*(held for _, held in read)) for one in turn if one is not None]
    documents = [document for part in kept for document in part]
    groups = _groups([*(document.group for document in documents), *(group for group, _ in heldout)])
    numbers = {name: i for i, name in enumerate(dict.fromkeys(groups.values()))}
    chats = [chat for document in documents for chat in document.chats]
    ids = np.concatenate([chat.ids for chat in chats])
    reply = np.concatenate([chat.reply for chat in chats])
    counts = np.bincount(ids[reply >= 0], minlength=len(tokenizer)).astype(np.int64)
    of_documents = [numbers[groups[document.group]] for document in documents for _ in document.chats]
    np.save(folder / "ids.npy", ids)
    np.save(folder / "reply.npy", reply)
    np.save(folder / "ends.npy", np.cumsum([len(chat.ids) for chat in chats]))
    np.save(folder / "counts.npy", counts)
    np.save(folder / "groups.npy", np.array(of_documents, dtype=np.int16))
    rows: list[list[int]] = []
    parts: list[PartRows] = []
    for source, mine in zip(sources, kept, strict=True):
        lengths = [len(chat.ids) for document in mine for chat in document.chats]
        first = sum(part.num_documents for part in parts)
        packed = [[first + number for number in row] for row in pack(lengths, settings.max_length)]
        name = source.name or ", ".join(dict.fromkeys(map(name_of, source.files)))
        parts.append(PartRows(name, len(rows), len(packed), sum(lengths), len(lengths)))
        rows += packed
    (folder / "rows.json").write_text(json.dumps(rows))
    skipped.write(folder / "skipped.txt")
    summary = {
        "heldout_prompts": [prompt for _, prompt in heldout],
        "heldout_groups": [numbers[groups[group]] for group, _ in heldout],
        "groups": list(numbers),
        "parts": [asdict(part) for part in parts],
        "num_conversations": len(documents),
        "num_skipped": len(skipped.rows),
        "num_tokens": len(ids),
        "num_supervised_tokens": int((reply >= 0).sum()),
        "notes": skipped.notes,
        "excluded": excluded.about,
    }
    (folder / "summary.json").write_text(json.dumps(summary))


def _mode(kwargs: Mapping[str, Any]) -> str:
    """The short ones of a chat template's arguments, such as ``enable_thinking=false``."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in kwargs.items()}
    return ", ".join(f"{name}={text}" for name, text in sorted(texts.items()) if len(text) <= LONGEST_MODE)


def _groups(found: list[Group]) -> dict[Group, str]:
    """Name of every group: its source, its category, and its mode where the source has several; the source
    and the mode, or the source alone, where that would be too many."""
    names: dict[Group, str] = {}
    for label in dict.fromkeys(label for label, _, _ in found):
        mine = {group: group[1:] for group in found if group[0] == label}
        if len({mode for _, mode in mine.values()}) == 1:
            mine = {group: (category, "") for group, (category, _) in mine.items()}
        if len(set(mine.values())) > MOST_CATEGORIES:
            mine = {group: ("", mode) for group, (_, mode) in mine.items()}
        if len(set(mine.values())) > MOST_CATEGORIES:
            mine = dict.fromkeys(mine, ("", ""))
        for group, told in mine.items():
            details = ", ".join(filter(None, told))
            names[group] = f"{label}: {details}" if details else label
    return names


def conversations_of(settings: DataConfig, skipped: SkipLog) -> Iterator[Conversation]:
    """Conversations of every source in turn, at most ``limit`` of each."""
    for source in settings.sources:
        for _, conversation in _labelled(settings, source, skipped):
            yield conversation


def _first_prompt(tokenizer: Any, prompt: ChatPrompt, max_length: int) -> list[int]:
    """Ids of ``prompt``, or nothing when they fill half a row."""
    ids = prompt_token_ids(tokenizer, prompt)
    return ids if len(ids) <= max_length // 2 else []


def _check_mask(chats: list[TokenizedChat], source: str, skipped: SkipLog) -> None:
    if not chats:
        reasons = skipped.reasons()
        raise UserError(
            f"No conversation of {source} can be trained on{f': {reasons}' if reasons else ''}.",
            "Look at a record with eagle-kit data preview, or hold out or decontaminate fewer conversations.",
        )
    if all((chat.reply >= 0).all() for chat in chats):
        raise UserError(
            f"The loss mask of {source} covers every token, so prompts would be learned too.",
            "Use a chat template that separates prompt and reply.",
        )


def _fingerprint(settings: DataConfig, tokenizer: Any, excluded: ExcludedSets) -> str:
    """Hash of everything the arrays depend on; files count by path, size and time of change, a package's file
    by size."""
    parts: list[Any] = [FORMAT, settings.limit, settings.max_length, settings.eval_conversations]
    parts += [source.rows_depend_on | {"name": source.name} for source in settings.sources]
    parts.append(settings.template_settings)
    parts += excluded.identity
    for file in (file for source in settings.sources for file in source.files):
        if file.startswith("package:"):
            parts.append(package_file_size(file.removeprefix("package:")))
        path = expand(file)
        if path.is_file():
            stat = path.stat()
            parts += [str(path.resolve()), stat.st_size, stat.st_mtime_ns]
    parts += [tokenizer.chat_template, tokenizer_hash(tokenizer), end_names(tokenizer)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
