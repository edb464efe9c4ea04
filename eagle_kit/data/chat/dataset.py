"""Packed sequences of a source, tokenised once and kept on disk.

Legend: n tokens of all conversations, T tokens of a row.
"""

import hashlib
import json
import shutil
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from eagle_kit.config.train import DataConfig, SourceConfig, template_variants
from eagle_kit.core.errors import UserError, shown
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
from eagle_kit.data.chat.documents import Tokenized, Tokenizing
from eagle_kit.data.chat.forms import Conversation, Record
from eagle_kit.data.chat.held_out import Candidate, choose_held_out
from eagle_kit.data.chat.hub_sets import DataSet
from eagle_kit.data.chat.messages import ChatPrompt
from eagle_kit.data.chat.packing import PackedRow, join, pack
from eagle_kit.data.chat.records import (
    SkipLog,
    estimated_records,
    package_file_size,
    read_records,
    reasons_of,
)
from eagle_kit.data.chat.renderer import ChatRenderer, TokenizedChat
from eagle_kit.data.chat.row_files import RESPONSE, RowFiles, read_integers, token_blocks
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
"""Most categories of a source's records that are counted separately. If there are more, none is."""
LONGEST_MODE = 20
"""Most characters of an argument of a chat template that is a mode, such as thinking on or off."""
Count = Annotated[int, Field(ge=0)]


class Group(NamedTuple):
    """Group in which a document is counted.

    Attributes:
        source: name of its source.
        category: of its record, or empty.
        mode: short arguments of its chat template (:func:`_mode`), or empty.
    """

    source: str
    category: str
    mode: str


@dataclass(frozen=True)
class PartRows:
    """Packed sequences of one source of a mixture. They follow each other, and a row is of one source.

    Attributes:
        first: index of the first row.
    """

    name: str
    first: int
    num_rows: int
    num_tokens: int
    num_documents: int


class _Part(BaseModel):
    """A :class:`PartRows` on the disk."""

    name: str
    first: Count
    num_rows: Count
    num_tokens: Count
    num_documents: Count


class _Summary(BaseModel):
    """``summary.json``: attributes of :class:`PreparedData`."""

    heldout_prompts: list[Annotated[list[Count], Field(min_length=1)]]
    heldout_groups: list[Count] = []
    groups: list[str] = ["all"]
    parts: list[_Part] = []
    num_conversations: Count
    num_skipped: Count
    num_tokens: Count
    num_supervised_tokens: Count
    notes: list[str]
    excluded: dict[str, str] = {}


@dataclass
class PreparedData:
    """Packed sequences on disk.

    Attributes:
        folder: the cache; ``skipped.txt`` in it lists the records that were left out.
        vocab_map: the draft vocabulary of these responses.
        heldout_prompts: token ids of the prompts of conversations that are in no row. Those of a mixture come
            from its sources in turn.
        heldout_groups: the group of each prompt, as an index into ``groups``.
        groups: names of the groups in which documents are counted: their source, the ``category`` of their
            record if it has one, and the arguments of the chat template if a source has several.
        parts: rows of each source of a mixture, or of the only source.
        excluded: evaluation sets whose prompts are in no conversation, with their fingerprints.
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
        """Open the files. Raises OSError or ValueError if they cannot be read or do not fit together."""
        self._ids = read_integers(self.folder / "ids.npy")
        self._response = read_integers(self.folder / RESPONSE)
        self._starts = np.concatenate(([0], read_integers(self.folder / "ends.npy")))
        self._rows = read_json(self.folder / "rows.json")

        # Stores that were captured before there were groups and parts have one of each.
        groups = self.folder / "groups.npy"
        if groups.exists():
            self._groups = read_integers(groups)
        else:
            self._groups = np.zeros(len(self._starts) - 1, np.int16)
        self.heldout_groups = self.heldout_groups or [0] * len(self.heldout_prompts)
        self.parts = self.parts or [PartRows("all", 0, len(self), self.num_tokens, self.num_conversations)]
        self._check()

    def _check(self) -> None:
        """Raise ValueError unless rows, parts and groups name documents, rows and groups that exist."""
        # Documents follow one another in the tokens.
        num_documents = len(self._starts) - 1
        if len(self._ids) != len(self._response) or self._starts[-1] > len(self._ids):
            raise ValueError("the files of tokens are of different lengths")
        if not (np.diff(self._starts) > 0).all():
            raise ValueError("ends.npy does not ascend")

        # Rows are of documents, and parts of rows.
        is_list = isinstance(self._rows, list) and all(isinstance(row, list) and row for row in self._rows)
        if not is_list or not self._rows:
            raise ValueError("rows.json is not a list of rows")
        for row in self._rows:
            if not all(type(number) is int and 0 <= number < num_documents for number in row):
                raise ValueError("rows.json has a document that is not there")
        if any(part.first + part.num_rows > len(self) for part in self.parts):
            raise ValueError("summary.json has a part of rows that are not there")

        # Every document and prompt has a group, and every group a name.
        if len(self._groups) != num_documents or len(self.heldout_groups) != len(self.heldout_prompts):
            raise ValueError("a document or a prompt has no group")
        numbers = [*self.heldout_groups, int(self._groups.min(initial=0)), int(self._groups.max(initial=0))]
        if not all(0 <= number < len(self.groups) for number in numbers):
            raise ValueError("a group has no name")

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def documents(self) -> list[list[int]]:
        """Numbers of the documents of every packed sequence."""
        return [list(row) for row in self._rows]

    def check_rows(self, num_rows: int) -> None:
        """Raise UserError for a token id outside the ``num_rows`` rows of the target's embedding."""
        highest = int(self._ids.max(initial=-1))
        for ids in self.heldout_prompts:
            highest = max(highest, *ids)
        if self._ids.min(initial=0) < 0:
            raise UserError(
                f"The prepared data in {self.folder} have a token below 0.",
                "Delete the folder, or copy it again.",
            )
        if highest >= num_rows:
            raise UserError(
                f"The data have the token {highest}, and the target's embedding has {num_rows} rows.",
                "Use the tokenizer and the chat template that the target was trained with.",
            )

    def row(self, number: int) -> PackedRow:
        """Packed sequence ``number``."""
        documents = self._rows[number]
        return join([self.chat(document) for document in documents], self._groups[documents].tolist())

    def row_length(self, number: int) -> int:
        """Tokens of packed sequence ``number``."""
        length = 0
        for document in self._rows[number]:
            length += int(self._starts[document + 1] - self._starts[document])
        return length

    def chat(self, document: int) -> TokenizedChat:
        """One tokenised conversation."""
        span = slice(int(self._starts[document]), int(self._starts[document + 1]))
        return TokenizedChat(np.asarray(self._ids[span]), np.asarray(self._response[span]))

    def use_vocabulary(self, tokens: np.ndarray) -> None:
        """Use the target ids ``tokens``, int64 ascending, as the draft vocabulary."""
        counts = np.load(self.folder / "counts.npy")
        replaced = self.vocab_map
        self.vocab_map = vocab_map_of(tokens, counts, replaced.fingerprint, replaced.tokenizer)

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
        """True if ``fingerprint`` names the same rows and prompts.

        Another fingerprint does so if the cache has data under it whose files are the same to the bit, as
        after a source file was copied or the format was raised.
        """
        if fingerprint == self.fingerprint:
            return True
        other = self.folder.with_name(fingerprint)
        try:
            prompts = read_json(other / "summary.json")["heldout_prompts"]
            for name in ("rows.json", "ends.npy", "counts.npy", "ids.npy", RESPONSE):
                if (other / name).read_bytes() != (self.folder / name).read_bytes():
                    return False
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return bool(prompts == self.heldout_prompts)


def leave_out(data: PreparedData, documents: Collection[int], reason: str) -> PreparedData:
    """The packed sequences without some documents, in a folder of their own beside those of ``data``.

    Raises:
        UserError: nothing is left, or the folder cannot be written.
    """
    digest = hashlib.sha256(json.dumps([data.fingerprint, sorted(documents)]).encode())
    fingerprint = digest.hexdigest()[:16]
    folder = data.folder.with_name(fingerprint)
    try:
        with taking_turns(folder):
            if not (folder / "summary.json").is_file():
                with replacing(folder) as work:
                    shutil.copytree(data.folder, work)
                    _write_without(data, frozenset(documents), reason, work)
    except OSError as error:
        raise UserError(
            f"The packed sequences could not be written to {folder} ({error}).",
            writing_remedy(error, "set data.cache_dir to another folder"),
        ) from error
    summary = read_object(folder / "summary.json")
    summary["parts"] = [PartRows(**part) for part in summary["parts"]]
    return PreparedData(folder=folder, vocab_map=data.vocab_map, fingerprint=fingerprint, **summary)


def _write_without(data: PreparedData, documents: frozenset[int], reason: str, folder: Path) -> None:
    """Write rows, parts, counts and summary without ``documents``. Their tokens stay in the files, unused."""
    # Rows of each part, and counts of the tokens of responses.
    rows: list[list[int]] = []
    parts: list[PartRows] = []
    counts = np.zeros_like(np.load(data.folder / "counts.npy"))
    for part in data.parts:
        first = len(rows)
        num_tokens = 0
        num_documents = 0
        for row in data.documents[part.first : part.first + part.num_rows]:
            left = [document for document in row if document not in documents]
            if left:
                rows.append(left)
            for document in left:
                chat = data.chat(document)
                counts += np.bincount(chat.ids[chat.response >= 0], minlength=len(counts))
                num_tokens += len(chat.ids)
                num_documents += 1
        parts.append(PartRows(part.name, first, len(rows) - first, num_tokens, num_documents))
    if not rows:
        raise UserError(f"No text is left to learn: {reason}.", "Allow none to be missing, and see why.")

    # The number of conversations stays: documents are parts of them.
    summary = read_object(data.folder / "summary.json") | {
        "parts": [asdict(part) for part in parts],
        "num_tokens": sum(part.num_tokens for part in parts),
        "num_supervised_tokens": int(counts.sum()),
        "notes": [*data.notes, f"{reason}: {len(documents)} texts"],
    }
    np.save(folder / "counts.npy", counts)
    (folder / "rows.json").write_text(json.dumps(rows))
    (folder / "summary.json").write_text(json.dumps(summary))


def cache_root(settings: DataConfig) -> Path:
    """Folder of tokenised data and captured states: ``data.cache_dir``, or the package's cache folder."""
    if settings.cache_dir:
        return expand(settings.cache_dir)
    return cache_folder()


def prepare_dataset(
    settings: DataConfig,
    tokenizer: Any,
    draft_vocab_size: int | None,
    vocab_map: str | Path | None = None,
    *,
    progress: bool = True,
) -> PreparedData:
    """Tokenise, mask and pack the sources of ``settings``, or read the cache of an earlier call.

    The cache is ``data/`` below :func:`cache_root`. Every source of a mixture is packed by itself.

    Conversations that hold a prompt of the evaluation sets ``settings.decontaminate`` are skipped. Of those
    that begin with their first turn, ``settings.eval_conversations`` are held out, an equal number of each
    source (:func:`eagle_kit.data.chat.held_out.choose_held_out`). Other conversations that begin with the
    prompt of one that is held out are skipped, so that no held-out prompt is trained on.

    Args:
        settings: the section ``data`` of a config; its ``limit`` bounds the records of each source.
        draft_vocab_size: tokens of the draft vocabulary, those that responses use most; None for all tokens.
        vocab_map: file of another draft vocabulary.
        progress: show a progress bar.

    Raises:
        UserError: a source that cannot be read or has no usable conversation, a mask that covers everything,
            a vocabulary map that does not fit, or a cache that cannot be written.
    """
    if not settings.sources:
        raise UserError("No conversations are named.", "Set data.source or data.mix.")
    excluded = ExcludedSets.load(settings.decontaminate)
    renderer = ChatRenderer(tokenizer)
    fingerprint = _fingerprint(settings, renderer, excluded)
    folder = cache_root(settings) / "data" / fingerprint
    if not (folder / "summary.json").is_file():
        _fill_cache(settings, renderer, excluded, folder, progress)
    return load_prepared(folder, fingerprint, tokenizer, draft_vocab_size, vocab_map)


def load_prepared(
    folder: Path,
    fingerprint: str,
    tokenizer: Any,
    draft_vocab_size: int | None,
    vocab_map: str | Path | None = None,
) -> PreparedData:
    """Load the packed sequences in ``folder``. Other arguments and errors are those of
    :func:`prepare_dataset`."""
    try:
        # The summary.
        found = _Summary.model_validate(read_object(folder / "summary.json"), strict=True)
        summary = found.model_dump()
        summary["parts"] = [PartRows(**part) for part in summary["parts"]]

        # The draft vocabulary.
        counts = read_integers(folder / "counts.npy")
        tokenizer_id = tokenizer_hash(tokenizer)
        size = len(counts) if draft_vocab_size is None else draft_vocab_size
        if vocab_map is None:
            vocabulary = build_vocab_map(counts, size, fingerprint, tokenizer_id)
        else:
            vocabulary = load_vocab_map(expand(vocab_map), tokenizer_id, size, counts)
        return PreparedData(folder=folder, vocab_map=vocabulary, fingerprint=fingerprint, **summary)
    except UserError:
        raise
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        problem = f"summary.json: {shown(where)}: {first['msg']}"
    except (OSError, EOFError, ValueError) as error:
        problem = str(error)
    raise UserError(
        f"The prepared data in {folder} cannot be read ({problem}).", "Delete the folder, or copy it again."
    )


def _fill_cache(
    settings: DataConfig, renderer: ChatRenderer, excluded: ExcludedSets, folder: Path, progress: bool
) -> None:
    """Make ``folder`` in one of the processes that need it; the others wait. Raises UserError."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with taking_turns(folder):
            if (folder / "summary.json").is_file():
                return
            with replacing(folder) as work:
                work.mkdir()
                _build(settings, renderer, excluded, work, progress)
    except OSError as error:
        raise UserError(
            f"The tokenised data could not be written to {folder} ({error}).",
            writing_remedy(error, "set data.cache_dir to another folder"),
        ) from error


@dataclass(frozen=True)
class _Document(Candidate):
    """A record to learn from, whose tokens are on the disk.

    Attributes:
        where: names file and record for people.
        group: group in which it is counted.
        rows: numbers of its rows.
        num_learnable: tokens that a head can learn to draft (:func:`_num_learnable`).
        covers_all: the loss mask covers its prompt too.
    """

    where: str
    group: Group
    rows: range
    num_learnable: int
    covers_all: bool


class _Documents:
    """Documents of all sources, in order.

    Attributes:
        found: the documents.
        remarks: counts of remarks about parts of records that were left out.
    """

    def __init__(self, rows: RowFiles, skipped: SkipLog) -> None:
        self.found: list[_Document] = []
        self.remarks: Counter[str] = Counter()
        self._rows = rows
        self._skipped = skipped
        self._groups: dict[Group, Group] = {}

    def add(self, tokenized: Tokenized, source: SourceConfig, part: int) -> None:
        """Write the rows of a record of ``source``, or log why it is skipped."""
        record = tokenized.record
        self.remarks.update(tokenized.remarks.keys())
        reason = tokenized.reason or _length_reason(source, max(len(row.ids) for row in tokenized.rows))
        if reason:
            self._skipped.add(record.where, reason)
            return

        # Texts and rows of tokens have no chat template, and begin at their beginning.
        mode = ""
        may_be_held_out = True
        covers_all = False
        if isinstance(record, Conversation):
            mode = _mode(record.chat_template_kwargs)
            may_be_held_out = record.from_start
            covers_all = all((row.response >= 0).all() for row in tokenized.rows)

        # Documents of a group share one object.
        group = Group(tokenized.label, record.category, mode)
        group = self._groups.setdefault(group, group)
        numbers = [self._rows.add(row) for row in tokenized.rows]
        self.found.append(
            _Document(
                part=part,
                keys=array("Q", tokenized.keys),
                prompts=tuple(tokenized.prompts) if may_be_held_out else (),
                where=record.where,
                group=group,
                rows=range(numbers[0], numbers[-1] + 1),
                num_learnable=sum(map(_num_learnable, tokenized.rows)),
                covers_all=covers_all,
            )
        )


def _num_learnable(row: TokenizedChat) -> int:
    """Number of tokens that a head can learn to draft: those whose predecessor is of the same response."""
    response = row.response[1:]
    return int(((response[:-1] >= 0) & (response[:-1] == response[1:])).sum())


def _labelled(settings: DataConfig, source: SourceConfig, skipped: SkipLog) -> Iterator[tuple[str, Record]]:
    """Records of a source's files in turn, at most its limit of each, with the name under which they are
    counted. Conversations get the arguments of the chat template that the config has for them."""
    kwargs = source.chat_template_kwargs
    if kwargs is None:
        kwargs = settings.chat_template_kwargs
    variants = template_variants(kwargs)
    for file in source.files:
        label = source.name or name_of(file)
        for found in read_records(file, limit=source.limit or settings.limit, skipped=skipped):
            if not isinstance(found, Conversation):
                yield label, found
                continue
            key = ChatPrompt(found.messages, found.tools).key()
            drawn = draw_kwargs(variants, settings.chat_template_seed, key)
            yield label, replace(found, chat_template_kwargs={**drawn, **found.chat_template_kwargs})


def name_of(source: str) -> str:
    """Short name of a source: the name of a package or data set, or of a file without its ending."""
    kind, _, rest = source.partition(":")
    if kind in ("package", "datasets", "preset") and rest:
        return rest
    return Path(source.removesuffix(".gz")).stem


def _same_names(sources: Sequence[SourceConfig]) -> list[str]:
    """Remarks about names that several sources have."""
    counts: Counter[str] = Counter()
    for source in sources:
        names = [source.name] if source.name else map(name_of, source.files)
        counts.update(dict.fromkeys(names).keys())
    remarks = []
    for name, count in counts.items():
        if count > 1:
            remarks.append(
                f"{count} sources are named {name}, so that their accept lengths are one; data.mix can name "
                "them"
            )
    return remarks


def _length_reason(source: SourceConfig, length: int) -> str:
    """Reason to skip a document of ``length`` tokens; empty if there is none."""
    if source.min_tokens is not None and length < source.min_tokens:
        return f"fewer tokens than the source's min_tokens, {source.min_tokens}"
    if source.max_tokens is not None and length > source.max_tokens:
        return f"more tokens than the source's max_tokens, {source.max_tokens}"
    return ""


def _build(
    settings: DataConfig, renderer: ChatRenderer, excluded: ExcludedSets, folder: Path, progress: bool
) -> None:
    """Write the prepared data of ``settings`` into ``folder``."""
    skipped = SkipLog(max_broken_lines=settings.max_broken_lines)
    rows = RowFiles(folder)
    try:
        documents = _read_all(settings, renderer, excluded, rows, skipped, progress)
        _finish(settings, len(renderer.tokenizer), excluded, folder, rows, documents, skipped)
    finally:
        rows.close()


def _read_all(
    settings: DataConfig,
    renderer: ChatRenderer,
    excluded: ExcludedSets,
    rows: RowFiles,
    skipped: SkipLog,
    progress: bool,
) -> _Documents:
    """Tokenise the records of all sources and write their tokens."""
    from tqdm import tqdm

    documents = _Documents(rows, skipped)
    with Tokenizing(renderer, excluded, settings.max_length, settings.num_workers) as tokenizing:
        for part, source in enumerate(settings.sources):
            with tqdm(
                total=_num_records(source, source.limit or settings.limit),
                desc="tokenising",
                unit="conv",
                disable=not progress,
                dynamic_ncols=True,
            ) as bar:
                records = _counted(_labelled(settings, source, skipped), bar)
                for tokenized in tokenizing.run(records):
                    documents.add(tokenized, source, part)

                # The total was an estimate.
                bar.total = bar.n
                bar.refresh()
    return documents


def _counted(records: Iterator[tuple[str, Record]], bar: Any) -> Iterator[tuple[str, Record]]:
    """The same records; each advances the bar when it is read."""
    for record in records:
        bar.update()
        yield record


def _num_records(source: SourceConfig, limit: int | None) -> int | None:
    """About how many records of a source are read; None where no limit and no size is known."""
    total = 0
    for file in source.files:
        count = estimated_records(file)
        if count is None:
            count = limit
        if count is None:
            return None
        total += min(count, limit) if limit else count
    return total


def _finish(
    settings: DataConfig,
    vocab_size: int,
    excluded: ExcludedSets,
    folder: Path,
    row_files: RowFiles,
    documents: _Documents,
    skipped: SkipLog,
) -> None:
    """Hold documents out, pack the others, and write everything but their tokens."""
    sources = settings.sources
    found = documents.found

    # Hold documents out, an equal number of each source. The first sources have the remainder.
    share, remainder = divmod(settings.eval_conversations, len(sources))
    shares = [share + (i < remainder) for i in range(len(sources))]
    held = choose_held_out(found, shares)
    heldout_keys = {prompt.key for part in held for prompt in part.values()}
    heldout: list[tuple[Group, list[int]]] = []
    for round_of_sources in zip_longest(*(part.items() for part in held)):
        for number, prompt in filter(None, round_of_sources):
            ids = row_files.ids(found[number].rows[prompt.row])[: prompt.length]
            heldout.append((found[number].group, ids.tolist()))

    # Skip documents that begin like one that is held out.
    learned_parts: list[list[_Document]] = [[] for _ in sources]
    for number, document in enumerate(found):
        if number in held[document.part]:
            continue
        if heldout_keys.isdisjoint(document.keys):
            learned_parts[document.part].append(document)
        else:
            skipped.add(document.where, "it begins like a held-out conversation")
    skipped.note_counts(documents.remarks, ", ".join(file for source in sources for file in source.files))
    skipped.notes += _same_names(sources)
    for source, part, held_part in zip(sources, learned_parts, held, strict=True):
        _check_documents(part, ", ".join(source.files), skipped, len(held_part), settings.eval_conversations)

    # Keep the tokens of the others, and count those of responses.
    learned = [document for part in learned_parts for document in part]
    lengths = row_files.keep([number for document in learned for number in document.rows])
    row_files.close()
    counts = np.zeros(vocab_size, dtype=np.int64)
    num_supervised = 0
    for ids, response in token_blocks(folder):
        counts += np.bincount(ids[response >= 0], minlength=vocab_size)
        num_supervised += int((response >= 0).sum())

    # Number the groups of all documents by their names.
    all_groups = [document.group for document in learned]
    all_groups += [group for group, _ in heldout]
    names = _group_names(all_groups)
    group_names = list(dict.fromkeys(names.values()))
    group_numbers = {name: number for number, name in enumerate(group_names)}
    of_documents: list[int] = []
    for document in learned:
        of_documents += [group_numbers[names[document.group]]] * len(document.rows)
    np.save(folder / "ends.npy", np.cumsum(lengths, dtype=np.int64))
    np.save(folder / "counts.npy", counts)
    np.save(folder / "groups.npy", np.array(of_documents, dtype=np.int16))

    # Pack the documents of each source.
    rows: list[list[int]] = []
    parts: list[PartRows] = []
    first = 0
    for source, part in zip(sources, learned_parts, strict=True):
        num_documents = sum(len(document.rows) for document in part)
        part_lengths = lengths[first : first + num_documents]
        first_row = len(rows)
        for packed in pack(part_lengths, settings.max_length):
            rows.append([first + number for number in packed])
        name = source.name or ", ".join(dict.fromkeys(map(name_of, source.files)))
        num_rows = len(rows) - first_row
        parts.append(PartRows(name, first_row, num_rows, sum(part_lengths), num_documents))
        first += num_documents

    # Write everything else.
    (folder / "rows.json").write_text(json.dumps(rows))
    skipped.write(folder / "skipped.txt")
    summary = {
        "heldout_prompts": [prompt for _, prompt in heldout],
        "heldout_groups": [group_numbers[names[group]] for group, _ in heldout],
        "groups": group_names,
        "parts": [asdict(part) for part in parts],
        "num_conversations": len(learned),
        "num_skipped": len(skipped.rows),
        "num_tokens": sum(lengths),
        "num_supervised_tokens": num_supervised,
        "notes": skipped.notes,
        "excluded": excluded.about,
    }
    (folder / "summary.json").write_text(json.dumps(summary))


def _mode(kwargs: Mapping[str, Any]) -> str:
    """The short arguments of a chat template as text, such as ``enable_thinking=false``."""
    shown_kwargs = []
    for name, value in sorted(kwargs.items()):
        text = value if isinstance(value, str) else json.dumps(value)
        if len(text) <= LONGEST_MODE:
            shown_kwargs.append(f"{name}={text}")
    return ", ".join(shown_kwargs)


def _group_names(groups: list[Group]) -> dict[Group, str]:
    """Name of every group: its source, its category, and its mode if the source has several. If that makes
    too many names, the category is left out, and then the mode too."""
    names: dict[Group, str] = {}
    for source in dict.fromkeys(group.source for group in groups):
        details = {group: group for group in groups if group.source == source}
        if len({group.mode for group in details}) == 1:
            details = {group: detail._replace(mode="") for group, detail in details.items()}
        if len(set(details.values())) > MOST_CATEGORIES:
            details = {group: detail._replace(category="") for group, detail in details.items()}
        if len(set(details.values())) > MOST_CATEGORIES:
            details = {group: detail._replace(mode="") for group, detail in details.items()}
        for group, detail in details.items():
            text = ", ".join(filter(None, (detail.category, detail.mode)))
            names[group] = f"{source}: {text}" if text else source
    return names


def records_of(settings: DataConfig, skipped: SkipLog) -> Iterator[Record]:
    """Records of every source in turn, at most ``limit`` of each."""
    for source in settings.sources:
        for _, record in _labelled(settings, source, skipped):
            yield record


def _check_documents(
    documents: list[_Document], source: str, skipped: SkipLog, num_held: int, num_asked: int
) -> None:
    """Raise UserError if nothing can be learned from a source, or its prompts would be learned."""
    if not documents:
        reasons = skipped.reasons()
        if num_held:
            others = f"; others: {reasons}" if reasons else ""
            raise UserError(
                f"No conversation of {source} is left to train on: {num_held} are held out, since "
                f"data.eval_conversations is {num_asked}{others}.",
                "Lower data.eval_conversations, or give more conversations.",
            )
        why = f": {reasons}" if reasons else ""
        raise UserError(
            f"No conversation of {source} can be trained on{why}.",
            "Look at a record with eagle-kit data preview, or decontaminate with fewer sets.",
        )
    if all(document.covers_all for document in documents):
        raise UserError(
            f"The loss mask of {source} covers every token, so prompts would be learned too.",
            "Use a chat template that separates prompt and response.",
        )
    if not any(document.num_learnable for document in documents):
        raise UserError(
            f"No response of {source} has two tokens, so there is nothing to learn.",
            "Give longer responses, or raise data.max_length if it cuts them.",
        )


def _fingerprint(settings: DataConfig, renderer: ChatRenderer, excluded: ExcludedSets) -> str:
    """Hash of everything that decides the arrays. Files count by path, size and time of change, the file of a
    package by its size."""
    # Settings.
    parts: list[Any] = [FORMAT, settings.limit, settings.max_length, settings.eval_conversations]
    parts += [source.rows_depend_on | {"name": source.name} for source in settings.sources]
    parts.append(settings.template_settings)
    parts += excluded.identity

    # Files.
    for source in settings.sources:
        for file in source.files:
            if file.startswith("package:"):
                parts.append(package_file_size(file.removeprefix("package:")))
            for path in _files_of(file):
                stat = path.stat()
                parts += [str(path.resolve()), stat.st_size, stat.st_mtime_ns]

    # The tokenizer.
    parts += [renderer.tokenizer.chat_template, tokenizer_hash(renderer.tokenizer), renderer.end_names]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _files_of(source: str) -> list[Path]:
    """Local files of a source: the file that it names, or those of the folder of a data set."""
    if source.startswith("datasets:"):
        folder = DataSet.parse(source.removeprefix("datasets:")).folder
        if folder is None:
            return []
        return sorted(path for path in folder.rglob("*") if path.is_file())
    path = expand(source)
    return [path] if path.is_file() else []
