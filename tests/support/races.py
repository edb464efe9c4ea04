"""Races between the programs of a launch, found under the interpreter.

A launch must not have memory that one program reads and another writes without order between them, nor memory
to which two write different values. Order comes from atomics: what a program did before a releasing atomic of
an address lies before what another does after a later acquiring atomic of that address (the memory model of
PTX, without its scopes). Within a program, order is taken for granted.

Accesses of a launch are remembered with the program's clock, as of Lamport (1978) and Fidge (1988), and
compared at its end: since programs run one after another, every access is seen, whatever the order was.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from hardened import KernelFault, Place, place

READ, WRITE, ATOMIC = range(3)


class _Access(NamedTuple):
    """One instruction of one program: ``addresses`` of elements of ``size`` bytes, ``values`` uint8 ``[n,
    size]`` where it writes; ``clock`` is the number of releases before it, ``seen`` what it has acquired."""

    kind: int
    addresses: np.ndarray
    size: int
    values: np.ndarray | None
    program: int
    clock: int
    seen: dict[int, int]
    place: Place


class RaceDetector:
    """Accesses of the launch that is running. ``seen`` are the releases of other programs that the running
    one has acquired, ``released`` what an acquire of an address brings."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget the launch before."""
        self.accesses: list[_Access] = []
        self.released: dict[int, dict[int, int]] = {}

    def enter(self, program: int) -> None:
        """Begin a program."""
        self.program, self.clock, self.seen = program, 0, dict[int, int]()

    def access(self, kind: int, pointers: Any, mask: Any, value: Any = None) -> None:
        """Remember an instruction over pointers, as handles of the interpreter."""
        shape = np.broadcast_shapes(pointers.data.shape, mask.data.shape)
        where = np.broadcast_to(mask.data, shape).astype(bool)
        addresses = np.broadcast_to(pointers.data, shape)[where].astype(np.int64)
        if not addresses.size:
            return
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        values = None
        if value is not None:
            written = np.ascontiguousarray(np.broadcast_to(value.data, shape)[where])
            values = written.view(np.uint8).reshape(len(addresses), -1)[:, :size]
        self.accesses.append(
            _Access(kind, addresses, size, values, self.program, self.clock, self.seen, place())
        )

    def atomic(self, pointers: Any, mask: Any, order: str) -> None:
        """Remember an atomic; ``order`` is its name in PTX, with "acq" or "acquire", "rel" or "release"."""
        if "acq" in order:
            seen = dict(self.seen)
            for address in np.ravel(pointers.data).tolist():
                for program, clock in self.released.get(address, {}).items():
                    seen[program] = max(seen.get(program, 0), clock)
            self.seen = seen
        self.access(ATOMIC, pointers, mask)
        if "rel" in order and "relaxed" not in order:
            self.clock += 1
            for address in np.ravel(pointers.data).tolist():
                known = self.released.setdefault(address, {})
                for program, clock in (*self.seen.items(), (self.program, self.clock)):
                    known[program] = max(known.get(program, 0), clock)

    def check(self, kernel: str) -> None:
        """Raise :class:`KernelFault` if two accesses of the launch of ``kernel`` race."""
        written = [access for access in self.accesses if access.kind != READ]
        if not written:
            return
        unit = min(access.size for access in self.accesses)
        every = np.unique(np.concatenate([_units(access, unit) for access in written]))
        owners = np.full(len(every), -1)
        shared = np.zeros(len(every), bool)
        found = []
        for access in self.accesses:
            units = _units(access, unit)
            at = np.minimum(np.searchsorted(every, units), len(every) - 1)
            hit = every[at] == units
            at = at[hit]
            found.append((access, hit, at))
            shared[at] |= (owners[at] >= 0) & (owners[at] != access.program)
            owners[at] = access.program
        if not shared.any():
            return
        groups: dict[int, dict[tuple[Any, ...], _Access]] = {}
        for access, hit, at in found:
            values = None if access.values is None else access.values.reshape(-1, unit)[hit]
            for i in np.flatnonzero(shared[at]):
                value = None if values is None else values[i].tobytes()
                key = (access.kind, access.program, access.clock, id(access.seen), value)
                groups.setdefault(int(at[i]), {}).setdefault(key, access)
        for group in groups.values():
            for (one, first), (other, second) in combinations(group.items(), 2):
                if _race(first, second, one[-1] == other[-1]):
                    raise KernelFault(_say(kernel, first, second))


def _units(access: _Access, unit: int) -> np.ndarray:
    if access.size == unit:
        return access.addresses
    return (access.addresses[:, None] + np.arange(0, access.size, unit)).ravel()


def _race(a: _Access, b: _Access, same_value: bool) -> bool:
    if a.program == b.program or a.kind == b.kind != WRITE:
        return False
    if a.kind == b.kind == WRITE and same_value:
        return False
    return a.seen.get(b.program, 0) <= b.clock and b.seen.get(a.program, 0) <= a.clock


def _say(kernel: str, a: _Access, b: _Access) -> str:
    a, b = sorted((a, b), key=lambda access: -access.kind)
    verb = {READ: "reads", WRITE: "writes", ATOMIC: "changes by an atomic"}
    return (
        f"race in {kernel}: program {a.program} {verb[a.kind]} what program {b.program} {verb[b.kind]}, "
        f"without order between them: {a.place} and {b.place}"
    )


@contextmanager
def detect_races() -> Iterator[None]:
    """Context manager: launches of the hardened interpreter that race raise at their end."""
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    detector = RaceDetector()
    names = (
        "set_grid_idx",
        "create_masked_load",
        "create_masked_store",
        "create_atomic_rmw",
        "create_atomic_cas",
    )
    plain = {name: getattr(builder, name) for name in names}
    plain_call = executor.__call__

    def set_grid_idx(self: Any, *at: int) -> None:
        plain["set_grid_idx"](self, *at)
        _, ny, nz = self.grid_dim
        x, y, z = self.grid_idx
        detector.enter((x * ny + y) * nz + z)

    def load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        detector.access(READ, pointers, mask)
        return plain["create_masked_load"](self, pointers, mask, *rest)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        detector.access(WRITE, pointers, mask, value)
        return plain["create_masked_store"](self, pointers, value, mask, *rest)

    def rmw(self: Any, op: Any, pointers: Any, value: Any, mask: Any, order: Any, scope: Any) -> Any:
        detector.atomic(pointers, mask, str(order).lower())
        return plain["create_atomic_rmw"](self, op, pointers, value, mask, order, scope)

    def cas(self: Any, pointers: Any, expected: Any, value: Any, order: Any, scope: Any) -> Any:
        every = interpreter.TensorHandle(np.ones_like(pointers.data, dtype=bool), interpreter.tl.int1)
        detector.atomic(pointers, every, str(order).lower())
        return plain["create_atomic_cas"](self, pointers, expected, value, order, scope)

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        detector.begin()
        plain_call(self, *args, **kwargs)
        detector.check(self.fn.__name__)

    try:
        for name, hook in zip(names, (set_grid_idx, load, store, rmw, cas), strict=True):
            setattr(builder, name, hook)
        executor.__call__ = call
        yield
    finally:
        for name, method in plain.items():
            setattr(builder, name, method)
        executor.__call__ = plain_call
