"""Capture of the target's states over every packed row into a store, by its own forward or by another engine.

Any number of processes share the rows, row r belongs to process r mod n; what is stored already is not done
again. A process that is killed loses the rows of the shard it was at. A target that processes share
(``training.target_placement=fsdp`` or ``tensor-parallel``) runs in all of them or in none, so they keep step.
"""

import datetime
import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from eagle_kit.config.train import TrainConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import check_disk_space, check_writable, expand, nearest_folder, replacing
from eagle_kit.core.process import INTERRUPTED
from eagle_kit.data.chat.dataset import PreparedData, leave_out
from eagle_kit.data.hidden_states import manifest as state_manifest
from eagle_kit.data.hidden_states.format import bytes_per_token
from eagle_kit.data.hidden_states.store import SHARD_BYTES, StateStore
from eagle_kit.datagen.hidden_states.drive_vllm import compute_states
from eagle_kit.datagen.hidden_states.files import FINAL, FileLayout, FileSource, StateFiles
from eagle_kit.models.loading.loader import load_target, target_fingerprint
from eagle_kit.objective.batch import make_micro_batch
from eagle_kit.objective.target_features import capture_features
from eagle_kit.ops.device_memory import out_of_memory
from eagle_kit.report.environment import describe_versions
from eagle_kit.report.stages import TimeLeft
from eagle_kit.train.parallel.launch import go_on
from eagle_kit.train.parallel.placement import place_target
from eagle_kit.train.parallel.processes import largest, make_process_state, watching, with_precision
from eagle_kit.train.plan.costs import capture_flops, data_workload
from eagle_kit.train.plan.estimate import EXPECTED_EFFICIENCY, measure_matmul_rate
from eagle_kit.train.plan.sizes import HeadArchitecture
from eagle_kit.train.run.interrupt import Interrupt
from eagle_kit.train.run.new_head import head_architecture
from eagle_kit.train.run.progress import format_seconds
from eagle_kit.train.run.setup import TrainingComponents, load_components, states_manifest
from eagle_kit.train.run.state_source import state_source

if TYPE_CHECKING:
    from accelerate import PartialState

CHECKED_GAP = 0.1
"""Relative distance up to which two engines' states of a layer are the same, in bf16 or quantised."""
ANOTHER_OUT = "Give another folder with --out."


@dataclass(frozen=True)
class CaptureOptions:
    """Settings of a capture besides the config.

    Attributes:
        out: the store, made or continued.
        shard: ``(i, n)``: these processes take the i-th of n parts of the rows, i in [0, n).
        dry_run: print the estimate and stop.
        verify: read every byte of the store when it is whole.
        shard_bytes: most bytes of a shard that has more than one row.
        arguments: config file and overrides, for :attr:`command`.
        other: engine that computes the states; None computes them here.
    """

    out: Path
    shard: tuple[int, int] = (0, 1)
    dry_run: bool = False
    verify: bool = False
    shard_bytes: int = SHARD_BYTES
    arguments: tuple[str, ...] = ()
    other: "OtherEngine | None" = None

    @property
    def command(self) -> str:
        """Command that goes on with this capture."""
        part, parts = self.shard
        shard = ("--shard", f"{part}/{parts}") if parts > 1 else ()
        action, more = ("capture", ()) if self.other is None else (self.other.action, self.other.arguments)
        words = ["eagle-kit", "data", action, *self.arguments, "--out", str(self.out), *shard, *more]
        return shlex.join(words)


@dataclass(frozen=True)
class OtherEngine:
    """An engine that computes the states in place of the target's forward here.

    Attributes:
        action: of ``eagle-kit data``, and its ``arguments``.
        folder: files with states; None computes them by vLLM, beside the store.
        python: of an environment with vLLM; None reads what is in ``folder``.
        layers: what lies beside one another in the files; None is what the head needs, in ascending order.
        convention: of :class:`~eagle_kit.datagen.hidden_states.files.FileLayout`.
        engine_args: further arguments of vLLM's ``LLM``.
        checks: compare one text with the target's forward here, which takes all its weights.
        max_missing: texts whose states may be missing or unusable in ``folder``; they are left out. All
            files are read once more to find them.
    """

    action: str
    arguments: tuple[str, ...]
    folder: Path | None = None
    python: str | None = None
    layers: tuple[int | str, ...] | None = None
    convention: str = "inputs"
    engine_args: dict[str, Any] = field(default_factory=dict)
    checks: bool = True
    max_missing: int = 0

    @property
    def made(self) -> dict[str, Any]:
        """What is kept of it beside the states."""
        layers = None if self.layers is None else list(self.layers)
        return {
            "engine": "vLLM" if self.python else "unknown",
            "layers": layers,
            "convention": self.convention,
        }


def capture(config: TrainConfig, options: CaptureOptions) -> int:
    """Capture what ``options.out`` lacks; returns 0 when this process's part is there, 130 when interrupted.

    Raises:
        UserError: settings or data that cannot be used, a store of other states in ``out``, too little room.
    """
    if config.data.store is not None:
        raise UserError(
            "data.store is set, but what is captured comes from conversations.", "Set data.store=null."
        )
    out = expand(options.out)
    _check_out(out)
    config, process = with_precision(config), make_process_state(config)
    remedy = "Lower data.max_length, or set training.target_placement to auto, fsdp or tensor-parallel."
    with watching(config, process), out_of_memory("capturing states", remedy):
        return _capture(config, options, process, out)


def _capture(config: TrainConfig, options: CaptureOptions, process: "PartialState", out: Path) -> int:
    """:func:`capture` in each of the processes."""
    drives_engine = options.other is not None and options.other.python is not None
    if drives_engine and process.num_processes > 1:
        raise UserError(
            f"{process.num_processes} processes would each start vLLM.",
            "Start one without a launcher, on each machine with its --shard.",
        )
    made = {"engine": "eagle-kit"} if options.other is None else options.other.made
    unjudged = config.model_copy(update={"judge": config.judge.model_copy(update={"every": 0})})
    found = load_components(unjudged, process, with_layers=options.other is None)
    place_target(found.target, unjudged, process)
    draft = head_architecture(config, found.target.config, found.tokenizer)
    if options.other is not None and options.other.max_missing:
        found = _without_missing(found, draft, options.other)
    manifest = states_manifest(
        config,
        found,
        draft,
        command=options.command,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions=describe_versions(),
        **made,
    )
    _check_engine(out, made)
    store = StateStore(out, manifest, found.data.folder, shard_bytes=options.shard_bytes)
    missing, (part, parts) = store.missing(), options.shard
    count = process.num_processes
    mine = [row for row in missing if row % (parts * count) == part * count + process.process_index]
    if process.is_main_process:
        print(_estimate(config, found, store, draft, missing, len(mine)), flush=True)
    if options.dry_run:
        return 0
    if options.other is None:
        source = state_source(found.target, config.training.target_placement, found.cut)
    else:
        source = _foreign(config, found, draft, options)
    promise = "this row is finished and the shard is written first"
    with Interrupt(announce=process.is_main_process, promise=promise) as interrupt:
        keeps_step = config.training.shares_target
        for row in _rows_to_run(mine, keeps_step, interrupt, process):
            micro_batch = make_micro_batch(found.data, [0 if row is None else row], 1, process.device)
            features = source.states(micro_batch, draft.aux_layer_ids)
            if row is not None:
                store.add([row], micro_batch.lengths, features.to_stored())
        store.flush()
    return _conclude(store, options, interrupt.requested, process)


def _layout(other: OtherEngine, draft: HeadArchitecture, last: int) -> FileLayout:
    """What lies in the files of an engine. Raises UserError where they lack a layer that the head needs."""
    layers = other.layers or tuple(sorted({*draft.aux_layer_ids, last}))
    layout = FileLayout(layers, other.convention)
    layout.places(draft.aux_layer_ids, last)
    return layout


def _without_missing(
    found: TrainingComponents, draft: HeadArchitecture, other: OtherEngine
) -> TrainingComponents:
    """The data without the texts whose states cannot be had. Raises UserError for more than are allowed."""
    assert other.folder is not None
    layout = _layout(other, draft, found.target.config.num_layers)
    files = StateFiles(other.folder, skips_broken=True)
    missing: dict[int, UserError] = {}
    for document in (document for row in found.data.documents for document in row):
        try:
            files.read(found.data.chat(document).ids, len(layout.layers), found.target.config.hidden_size)
        except UserError as error:
            missing[document] = error
    if not missing:
        return found
    first = next(iter(missing.values()))
    if len(missing) > other.max_missing:
        raise UserError(
            f"The states of {len(missing)} texts cannot be used, and --max-missing is {other.max_missing}; "
            f"the first: {first.cause}",
            first.remedy,
        )
    print(f"{len(missing)} texts are left out; the first: {first.cause}", flush=True)
    return replace(found, data=leave_out(found.data, missing, "their states are missing or unusable"))


def _foreign(
    config: TrainConfig, found: TrainingComponents, draft: HeadArchitecture, options: CaptureOptions
) -> FileSource:
    """Files of another engine, computed now if it is to be driven; one text of them is checked."""
    other, target = options.other, found.target
    assert other is not None
    last = target.config.num_layers
    layout = _layout(other, draft, last)
    layers = layout.layers
    folder = other.folder
    if folder is None:
        assert other.python is not None
        numbers = [int(layer) for layer in layers]
        dtype = "bfloat16" if config.training.precision == "bfloat16" else "float32"
        made = json.dumps([target_fingerprint(found.folder), numbers, dtype, other.engine_args])
        folder = options.out.with_name(
            f"{options.out.name}.vllm-{hashlib.sha256(made.encode()).hexdigest()[:12]}"
        )
        texts = folder.with_name(folder.name + ".texts.jsonl")
        part, parts = options.shard
        count, longest = write_texts(found.data, texts, range(part, len(found.data), parts))
        bytes_ahead = (
            count * longest * len(numbers) * target.config.hidden_size * target.head_weight.element_size()
        )
        check_disk_space(folder, bytes_ahead, ANOTHER_OUT)
        print(
            f"vLLM writes its states to {folder}, which may be removed when the store is whole.", flush=True
        )
        where = other.python, found.folder, texts, folder
        compute_states(*where, numbers, dtype, longest, count, engine_args=other.engine_args)
    source = FileSource(StateFiles(folder, skips_broken=other.max_missing > 0), layout, target)
    if other.checks:
        check_against_target(source, found, draft.aux_layer_ids)
    return source


def _check_engine(out: Path, made: dict[str, Any]) -> None:
    """Raise UserError where ``out`` holds states that another engine, or this one otherwise, has made."""
    before = (state_manifest.read_manifest(out) or {}).get("made", made)
    for name in ("engine", "layers", "convention"):
        if before.get(name, made.get(name)) != made.get(name):
            raise UserError(
                f"The states in {out} were made with {name} {before[name]}, and now it is {made.get(name)}.",
                ANOTHER_OUT,
            )


def write_texts(data: PreparedData, path: Path, rows: Sequence[int] | None = None) -> tuple[int, int]:
    """Write every text of packed ``rows`` (default all) once, as lines of ``{"input_ids"}`` -> their number
    and the tokens of the longest."""
    seen: set[bytes] = set()
    longest = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as work, work.open("w", encoding="utf-8") as file:
        for row in range(len(data)) if rows is None else rows:
            packed = data.row(row)
            starts = np.unique(packed.doc_start)
            for ids in np.split(np.asarray(packed.ids), starts[1:]):
                if (key := ids.tobytes()) not in seen:
                    seen.add(key)
                    longest = max(longest, len(ids))
                    file.write(json.dumps({"input_ids": ids.tolist()}) + "\n")
    return len(seen), longest


def check_against_target(source: FileSource, found: TrainingComponents, layer_ids: tuple[int, ...]) -> None:
    """Compare the states of one packed row with those of the target's forward here.

    Raises:
        UserError: they are other layers' states, or another model's.
    """
    config = found.target.config
    device, dtype = found.target.embed_tokens.weight.device, found.target.embed_tokens.weight.dtype
    batch = make_micro_batch(found.data, [0], 1, device)
    theirs = source.states(batch, layer_ids)
    target = load_target(found.folder, dtype=dtype, device=device)
    everything = tuple(range(config.num_layers + 1))
    ours = capture_features(target, batch.ids, batch.doc_start, everything, batch.plan.teacher_positions)
    states = ours.aux_hidden_states.split(config.hidden_size, -1)
    for layer, state in zip(layer_ids, theirs.aux_hidden_states.split(config.hidden_size, -1), strict=True):
        if (gap := _gap(state, states[layer])) > CHECKED_GAP:
            nearest = min(everything, key=lambda other: _gap(state, states[other]))
            is_other = _gap(state, states[nearest]) <= CHECKED_GAP
            raise UserError(
                f"The states given for the input of layer {layer} are "
                + (f"the input of layer {nearest}" if is_other else f"{gap:.0%} off those of the target here")
                + ".",
                "Name layers and convention as the engine had them (--layers, --convention)."
                if is_other
                else "Compute them with the same weights and the same texts.",
            )
    if (gap := _gap(theirs.hidden, ours.hidden)) > CHECKED_GAP:
        raise UserError(
            f"The last states are {gap:.0%} off those of the target here, behind its final norm.",
            f"Name the last layer's output as layer {config.num_layers}, or as {FINAL} where it was normed.",
        )


def _gap(a: torch.Tensor, b: torch.Tensor) -> float:
    """Distance of ``a`` from ``b`` beside the size of ``b``, the median over tokens."""
    distance = (a.float() - b.float()).norm(dim=-1) / b.float().norm(dim=-1).clamp(min=1e-12)
    return float(distance.median())


def _rows_to_run(
    mine: Sequence[int], keeps_step: bool, interrupt: Interrupt, process: "PartialState"
) -> Iterator[int | None]:
    """Rows of this process, with a progress bar, until all are done or a signal came.

    With ``keeps_step``, every process runs for every row: those that have none left get None, and a signal to
    one is a signal to all.
    """
    from tqdm import tqdm

    idle = int(largest(process, len(mine))) - len(mine) if keeps_step else 0
    shown = process.is_local_main_process
    with tqdm(total=len(mine), unit="row", desc="capturing", dynamic_ncols=True, disable=not shown) as bar:
        left = TimeLeft(len(mine))
        for row in (*mine, *[None] * idle):
            if keeps_step:
                interrupt.requested = largest(process, interrupt.requested) > 0
            if interrupt.requested:
                return
            yield row
            bar.update(row is not None)
            if shown and row is not None:
                left.count(1)


def _conclude(store: StateStore, options: CaptureOptions, interrupted: bool, process: "PartialState") -> int:
    """Close the store when it is whole; say how to go on when it is not."""
    total = store.manifest["data"]["rows"]
    missing = store.missing()
    if interrupted:
        again = go_on(options.command, os.environ)
        print(f"{total - len(missing)} of {total} rows are in {store.folder}. {again}")
        return INTERRUPTED
    if missing:
        print(f"This part is done; {store.folder} waits for {len(missing)} of {total} rows of other parts.")
        return 0
    store.finish()
    store = StateStore(store.folder)
    if process.is_main_process:
        if options.verify:
            verify(store)
        print(f"{summary(store)}\nTrain from it with: eagle-kit train CONFIG data.store={store.folder}")
    return 0


def verify(store: StateStore) -> None:
    """Read every byte of a store, with a progress bar. Raises UserError for the first that differs."""
    from tqdm import tqdm

    with tqdm(store.shards(), unit="shard", desc="verifying", dynamic_ncols=True) as bar:
        store.verify(bar)


def summary(store: StateStore) -> str:
    """Contents of a store, for people."""
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


def _estimate(
    config: TrainConfig,
    found: TrainingComponents,
    store: StateStore,
    draft: HeadArchitecture,
    missing: Sequence[int],
    num_mine: int,
) -> str:
    """Rows and bytes to come over all processes, and the time of this one. Raises UserError when the disk has
    no room for all missing rows."""
    data, training, target = found.data, config.training, found.target
    sizes = len(draft.aux_layer_ids), target.config.hidden_size
    per_token = bytes_per_token(training.state_format, training.precision, *sizes)
    num_bytes = sum(data.row_length(row) for row in missing) * per_token
    if not state_manifest.read_manifest(store.folder):
        num_bytes += 8 * data.num_tokens
    check_disk_space(store.folder, num_bytes + store.shard_bytes, ANOTHER_OUT)
    free = shutil.disk_usage(nearest_folder(store.folder)).free
    weight = target.embed_tokens.weight
    rate = measure_matmul_rate(weight.device, weight.dtype)
    flops = num_mine * capture_flops(target.config, data_workload(config, data, 1))
    time = format_seconds(flops / (rate * EXPECTED_EFFICIENCY))
    share = per_token / bytes_per_token("computed", "float32", *sizes)
    return "\n".join(
        (
            f"rows    {len(missing)} to capture, {len(data) - len(missing)} found",
            f"disk    {num_bytes / 1e9:.3f} GB to come ({share:.0%} of float32), {free / 1e9:.1f} free",
            f"time    {time} for the rows of this process, at {EXPECTED_EFFICIENCY:.0%} of "
            f"{rate / 1e9:.0f} GFLOP/s, measured now; writing is not counted",
        )
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
