"""`eagle-kit data capture`: the target runs over every packed row, and its states go into a store to keep.

Any number of processes share the rows, row r belongs to process r mod n; what is stored already is not done
again. A process that is killed loses the rows of the shard it was at. A target that is sharded over the
processes (``training.target_placement=fsdp``) runs in all of them or in none, so they keep step.
"""

import datetime
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_kit.config.train import TrainConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import check_disk_space, check_writable, nearest_folder
from eagle_kit.core.process import INTERRUPTED
from eagle_kit.data.states import manifest as state_manifest
from eagle_kit.data.states.format import bytes_per_token
from eagle_kit.data.states.store import SHARD_BYTES, StateStore
from eagle_kit.train.algorithm.batch import make_forward
from eagle_kit.train.algorithm.teacher import capture_features
from eagle_kit.train.parallel.launch import launch_words, parent_commands
from eagle_kit.train.parallel.placement import place_target
from eagle_kit.train.parallel.processes import largest, make_process_state
from eagle_kit.train.plan.estimate import EXPECTED_EFFICIENCY, Workload, capture_flops, measure_matmul_rate
from eagle_kit.train.run.folder import versions
from eagle_kit.train.run.interrupt import Interrupt
from eagle_kit.train.run.new_head import draft_config
from eagle_kit.train.run.progress import format_seconds
from eagle_kit.train.run.setup import TrainingComponents, gather, states_manifest

if TYPE_CHECKING:
    from accelerate import PartialState

ANOTHER_OUT = "Give another folder with --out."


@dataclass(frozen=True)
class CaptureOptions:
    """What the command line asks besides the config.

    Attributes:
        out: the store, made or continued.
        shard: ``(i, n)``: these processes take the i-th of n parts of the rows, i in [0, n).
        dry_run: print the estimate and stop.
        verify: read every byte of the store when it is whole.
        shard_bytes: most bytes of a shard that has more than one row.
        arguments: the command line behind ``eagle-kit data capture``, for the manifest.
    """

    out: Path
    shard: tuple[int, int] = (0, 1)
    dry_run: bool = False
    verify: bool = False
    shard_bytes: int = SHARD_BYTES
    arguments: str = ""

    def __post_init__(self) -> None:
        part, parts = self.shard
        if not 0 <= part < parts:
            raise UserError(f"shard is {part}/{parts}.", "Count the shards of n from 0/n to (n-1)/n.")


def capture(config: TrainConfig, options: CaptureOptions) -> int:
    """Capture what ``options.out`` lacks; returns 0 when this process's part is there, 130 when interrupted.

    Raises:
        UserError: settings or data that cannot be used, a store of other states in ``out``, too little room.
    """
    if config.data.store is not None:
        raise UserError(
            "data.store is set, but what is captured comes from conversations.", "Set data.store=null."
        )
    out = options.out.expanduser()
    _check_out(out)
    process = make_process_state(config)
    found = gather(config, process)
    unjudged = config.judge.model_copy(update={"every": 0})
    place_target(found.target, config.model_copy(update={"judge": unjudged}), process)
    draft = draft_config(config, found.target.config, found.tokenizer)
    manifest = states_manifest(
        config,
        found,
        draft,
        command=_command(options),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions=versions(),
    )
    store = StateStore(out, manifest, found.data.folder, shard_bytes=options.shard_bytes)
    missing = store.missing()
    part, parts = (
        options.shard[0] * process.num_processes + process.process_index,
        options.shard[1] * process.num_processes,
    )
    mine = [row for row in missing if row % parts == part]
    if process.is_main_process:
        print(_estimate(config, found, draft.aux_layer_ids, store, missing, len(mine)).report(), flush=True)
    if options.dry_run:
        return 0
    with Interrupt(
        announce=process.is_main_process, promise="this row is finished and the shard is written first"
    ) as interrupt:
        _capture_rows(config, found, draft.aux_layer_ids, store, mine, interrupt, process)
        store.flush()
    return _conclude(store, options, interrupt.requested, process)


def _capture_rows(
    config: TrainConfig,
    found: TrainingComponents,
    layer_ids: tuple[int, ...],
    store: StateStore,
    rows: Sequence[int],
    interrupt: Interrupt,
    process: "PartialState",
) -> None:
    """Run the target over ``rows``, one after the other, until all are done or a signal came. Where all
    processes are needed for a row, those that have none left run over the first one, and a signal to one is
    a signal to all."""
    from tqdm import tqdm

    keeps_step = config.training.target_placement == "fsdp"
    rounds = int(largest(process, len(rows))) if keeps_step else len(rows)
    with tqdm(
        total=len(rows), unit="row", dynamic_ncols=True, disable=not process.is_local_main_process
    ) as bar:
        tokens = 0
        for number in range(rounds):
            if keeps_step:
                interrupt.requested = largest(process, interrupt.requested) > 0
            if interrupt.requested:
                return
            row = rows[number] if number < len(rows) else 0
            forward = make_forward(found.data, [row], 1, process.device)
            features = capture_features(
                found.target, forward.ids, forward.doc_start, layer_ids, forward.plan.needed
            )
            if number >= len(rows):
                continue
            store.add([row], forward.lengths, features._asdict())
            tokens += len(forward.ids)
            bar.set_postfix_str(f"{tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tok/s", refresh=False)
            bar.update(1)


def _command(options: CaptureOptions) -> str:
    """A command that does what this one does."""
    door = launch_words(parent_commands(2)) or ["eagle-kit", "data"]
    return f"{shlex.join(door)} capture {options.arguments}".rstrip()


def _conclude(store: StateStore, options: CaptureOptions, interrupted: bool, process: "PartialState") -> int:
    """Close the store when it is whole; say how to go on when it is not."""
    again = _command(options)
    total = store.manifest["data"]["rows"]
    missing = store.missing()
    if interrupted:
        print(f"{total - len(missing)} of {total} rows are in {store.folder}. Go on with: {again}")
        return INTERRUPTED
    if missing:
        print(f"This part is done; {store.folder} waits for {len(missing)} of {total} rows of other parts.")
        return 0
    store.finish()
    store = StateStore(store.folder)
    if options.verify and process.is_main_process:
        verify(store)
    if process.is_main_process:
        print(f"{summary(store)}\nTrain from it with: eagle-kit train CONFIG data.store={store.folder}")
    return 0


def verify(store: StateStore) -> None:
    """Read every byte of a store, with a progress bar. Raises UserError for the first that differs."""
    from tqdm import tqdm

    store.verify(tqdm(store.shards(), unit="shard", desc="verifying", dynamic_ncols=True))


def summary(store: StateStore) -> str:
    """What is in a store, for people."""
    about: dict[str, Any] = store.manifest
    data, target, shards = about["data"], about["target"], store.shards()
    tokens = sum(shard.tokens for shard in shards)
    revision = f" at {target['revision']}" if target["revision"] else ""
    return "\n".join(
        (
            f"store   {store.folder}: {len(store.rows())} of {data['rows']} rows, {tokens} tokens, "
            f"{store.num_bytes / 1e6:.1f} MB in {len(shards)} shards",
            f"states  {about['layer_ids_are']} {about['layer_ids']} and the last one "
            f"{about['last_hidden_state']}, {about['precision']}, format {about['format']}",
            f"target  {target['name']}{revision}, weights {target['weights']}",
            f"data    {data['source']}, rows of at most {data['max_length']} tokens, "
            f"{data['supervised_tokens']} supervised",
        )
    )


@dataclass(frozen=True)
class CaptureEstimate:
    """Before the first byte: rows and bytes to come over all processes, seconds of this one."""

    num_found: int
    num_missing: int
    num_bytes: int
    share_of_fp32: float
    free_bytes: int
    seconds: float
    flops_per_s: float

    def report(self) -> str:
        """Three lines for people."""
        return "\n".join(
            (
                f"rows    {self.num_missing} to capture, {self.num_found} found",
                f"disk    {self.num_bytes / 1e9:.3f} GB to come ({self.share_of_fp32:.0%} of float32), "
                f"{self.free_bytes / 1e9:.1f} free",
                f"time    {format_seconds(self.seconds)} for the rows of this process, at "
                f"{EXPECTED_EFFICIENCY:.0%} of {self.flops_per_s / 1e9:.0f} GFLOP/s, measured now; "
                "writing is not counted",
            )
        )


def _estimate(
    config: TrainConfig,
    found: TrainingComponents,
    layer_ids: tuple[int, ...],
    store: StateStore,
    missing: Sequence[int],
    num_mine: int,
) -> CaptureEstimate:
    """Count and measure. Raises UserError when the disk has no room for all missing rows."""
    data, training, target = found.data, config.training, found.target.config
    tokens = sum(data.row_length(row) for row in missing)
    sizes = len(layer_ids), target.hidden_size
    per_token = bytes_per_token(training.state_format, training.precision, *sizes)
    work = Workload(
        tokens=round(data.num_tokens / len(data)),
        rows=round(data.num_supervised_tokens / len(data)),
        steps=1,
        mean_context=min(config.data.max_length, data.num_tokens / max(1, data.num_conversations)) / 2,
    )
    place = found.target.embed_tokens.weight
    rate = measure_matmul_rate(place.device, place.dtype)
    num_bytes = tokens * per_token + (
        0 if state_manifest.read_manifest(store.folder) else 8 * data.num_tokens
    )
    check_disk_space(store.folder, num_bytes + store.shard_bytes, ANOTHER_OUT)
    return CaptureEstimate(
        num_found=len(data) - len(missing),
        num_missing=len(missing),
        num_bytes=num_bytes,
        share_of_fp32=per_token / bytes_per_token("computed", "float32", *sizes),
        free_bytes=shutil.disk_usage(nearest_folder(store.folder)).free,
        seconds=num_mine * capture_flops(target, work) / (rate * EXPECTED_EFFICIENCY),
        flops_per_s=rate,
    )


def _check_out(out: Path) -> None:
    """Raise UserError when ``out`` is something else than a store or a place for one."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file.", ANOTHER_OUT)
    visible = [path for path in out.iterdir() if not path.name.endswith(".partial")] if out.exists() else []
    is_store = (out / state_manifest.NAME).exists() or all(p.name == state_manifest.DATA for p in visible)
    if not is_store:
        raise UserError(f"{out} holds something else than captured states.", ANOTHER_OUT)
    check_writable(out, ANOTHER_OUT)
