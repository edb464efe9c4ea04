"""Files of measurements: costs of a machine's cycles and the acceptance of a draft, in the cache or beside
the draft's weights (``tuning.json``)."""

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from eagle_kit.autotune.acceptance import AcceptanceTable
from eagle_kit.autotune.costs import CostTable, Timing
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import cache_folder, read_object, write_json_atomically
from eagle_kit.core.shape import SpecShape

SHIPPED = "tuning.json"
"""File beside a draft's weights."""
FORMAT = 1
AVERAGE = Path(__file__).with_name("average_head.json")
"""Acceptance of the head that this project ships, for heads that were not measured."""
AGAIN = "Delete it, or run `eagle-kit tune` again."

T = TypeVar("T")


@dataclass(frozen=True)
class Costs:
    """Measured costs of an engine's cycles.

    Attributes:
        key: of the engine: device, dtype, versions, models.
        table: fitted to the timings.
        timings: the measured cycles.
        date: of the measurement.
        tuned_to: largest batch size that ``eagle-kit tune`` measured, 0 for none. Larger batch sizes were
            measured when an engine started, which is shorter.
    """

    key: Mapping[str, Any]
    table: CostTable
    timings: tuple[Timing, ...]
    date: str
    tuned_to: int = 0

    @property
    def is_quick(self) -> bool:
        """True if all cycles were measured at the start of an engine."""
        return not self.tuned_to

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that :meth:`from_json` reads."""
        timings = []
        for timing in self.timings:
            seconds = float(f"{timing.seconds:.4g}")
            timings.append([timing.batch_size, str(timing.shape), timing.context, seconds])
        return {
            "key": dict(self.key),
            "date": self.date,
            "tuned_to": self.tuned_to,
            "costs": self.table.to_json(),
            "timings": timings,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Costs":
        """Make costs of :meth:`to_json`'s result. Raise ValueError, KeyError or TypeError for anything
        else."""
        timings = tuple(
            Timing(int(batch), SpecShape.parse(shape), int(context), float(seconds))
            for batch, shape, context, seconds in data["timings"]
        )
        if not all(math.isfinite(timing.seconds) and timing.seconds > 0 for timing in timings):
            raise ValueError("a measured time is no time")
        if not all(timing.batch_size > 0 and timing.context >= 0 for timing in timings):
            raise ValueError("a cycle was measured without requests or with fewer tokens than none")
        return cls(
            key=dict(data["key"]),
            table=CostTable.from_json(data["costs"]).with_residuals(timings),
            timings=timings,
            date=str(data["date"]),
            tuned_to=int(data["tuned_to"]),
        )


@dataclass(frozen=True)
class MeasuredAcceptance:
    """Acceptance of a draft.

    Attributes:
        draft: :func:`~eagle_kit.engine.calibrate.policies.draft_key` of the weights that were measured.
        table: acceptance by shape.
        about: origin of the numbers: tasks, prompts, positions, date.
    """

    draft: str
    table: AcceptanceTable
    about: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that :meth:`from_json` reads."""
        return {"draft": self.draft, "about": dict(self.about), **self.table.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "MeasuredAcceptance":
        """Make it of :meth:`to_json`'s result. Raise ValueError, KeyError or TypeError for anything else."""
        return cls(str(data["draft"]), AcceptanceTable.from_json(data), dict(data["about"]))


def digest(value: Any) -> str:
    """Short hash of JSON data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def folder() -> Path:
    """Folder of the measurements of this machine."""
    return cache_folder() / "tuning"


def costs_path(key: Mapping[str, Any]) -> Path:
    """File of an engine's costs in the cache."""
    return folder() / f"costs-{digest(dict(key))}.json"


def acceptance_path(draft: str) -> Path:
    """File of a draft's acceptance in the cache."""
    return folder() / f"acceptance-{draft}.json"


def save_costs(costs: Costs) -> Path:
    """Write costs into the cache."""
    return _save(costs_path(costs.key), costs.to_json())


def save_acceptance(acceptance: MeasuredAcceptance) -> Path:
    """Write a draft's acceptance into the cache."""
    return _save(acceptance_path(acceptance.draft), acceptance.to_json())


def find_costs(key: Mapping[str, Any], draft_folder: Path | None) -> Costs | None:
    """Find the costs of an engine: those that ``eagle-kit tune`` measured here, else shipped ones of the same
    device, dtype and models, else those that the start of an engine measured here."""
    measured = _load(costs_path(key), Costs.from_json)
    if measured is not None and not measured.is_quick:
        return measured

    # Shipped costs may be of other versions.
    same = {name: value for name, value in key.items() if name != "versions"}
    for given in _list(_shipped(draft_folder).get("costs"), draft_folder):
        shipped = _parse(given, Costs.from_json, _where(draft_folder))
        if shipped is not None and all(shipped.key.get(name) == value for name, value in same.items()):
            return shipped
    return measured


def find_acceptance(draft: str, draft_folder: Path | None) -> MeasuredAcceptance | None:
    """Find the acceptance of a draft: measured here, or shipped beside the same weights."""
    measured = _load(acceptance_path(draft), MeasuredAcceptance.from_json)
    if measured is not None:
        return measured
    given = _shipped(draft_folder).get("acceptance")
    if given is None:
        return None
    shipped = _parse(given, MeasuredAcceptance.from_json, _where(draft_folder))
    if shipped is not None and shipped.draft != draft:
        warnings.warn(f"{_where(draft_folder)} is of other weights and is not used. {AGAIN}", stacklevel=2)
        return None
    return shipped


def average_acceptance() -> MeasuredAcceptance:
    """Return the acceptance of an ordinary head."""
    return MeasuredAcceptance.from_json(read_object(AVERAGE))


def ship(draft_folder: Path, acceptance: MeasuredAcceptance | None, costs: Costs) -> Path:
    """Write ``tuning.json`` beside a draft's weights.

    Costs of other machines stay in it, unless they are of another version of the cycle. If ``acceptance`` is
    None, the acceptance in the file stays.
    """
    before = _shipped(draft_folder)
    all_costs = []
    for known in _list(before.get("costs"), draft_folder):
        key = known.get("key") if isinstance(known, dict) else None
        if not isinstance(key, dict) or key == dict(costs.key):
            continue
        if key.get("cycles") == costs.key.get("cycles"):
            all_costs.append(known)
    all_costs.append(costs.to_json())

    shipped = before.get("acceptance") if acceptance is None else acceptance.to_json()
    data = {"format": FORMAT, "acceptance": shipped, "costs": all_costs}
    return _save(draft_folder / SHIPPED, data)


def _save(path: Path, data: Mapping[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomically(path, {"format": FORMAT, **data}, indent=0)
    return path


def _where(draft_folder: Path | None) -> Path:
    """Path of the shipped file of a draft that has one."""
    assert draft_folder is not None
    return draft_folder / SHIPPED


def _shipped(draft_folder: Path | None) -> Mapping[str, Any]:
    """The shipped file of a draft; empty if there is none or it is unreadable."""
    if draft_folder is None or not (draft_folder / SHIPPED).is_file():
        return {}
    found: Mapping[str, Any] | None = _load(draft_folder / SHIPPED, dict)
    return found or {}


def _list(given: Any, draft_folder: Path | None) -> list[Any]:
    """The costs of a shipped file; empty, with a warning for anything but a list."""
    if given is not None and not isinstance(given, list):
        warnings.warn(f"{_where(draft_folder)} has no list of costs. {AGAIN}", stacklevel=3)
        return []
    return given or []


def _load(path: Path, make: Callable[[Mapping[str, Any]], T]) -> T | None:
    """Read a file; None if there is none, and with a warning if it is unreadable."""
    if not path.is_file():
        return None
    try:
        data = read_object(path)
    except UserError as error:
        warnings.warn(f"{error.cause} {AGAIN}", stacklevel=2)
        return None
    return _parse(data, make, path)


def _parse(data: Any, make: Callable[[Mapping[str, Any]], T], where: Path) -> T | None:
    """The result of ``make``; None, with a warning, for data of another format or form."""
    try:
        if data.get("format", FORMAT) != FORMAT:
            raise ValueError(f"its format is {data['format']}, not {FORMAT}")
        return make(data)
    except (ArithmeticError, AttributeError, KeyError, TypeError, UserError, ValueError) as error:
        reason = error.cause if isinstance(error, UserError) else error
        warnings.warn(f"{where} is no measurement of shapes ({reason}). {AGAIN}", stacklevel=2)
        return None
