"""Capture of the target's hidden states of all packed sequences, by the target or by another engine.

Any number of processes share the rows: row r belongs to process r mod n, and stored rows are not computed
again. A process that is killed loses the rows of its unfinished shard. Processes that share the target
(``training.target_placement=fsdp`` or ``tensor-parallel``) run it together, so each runs it equally often.
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

from eagle_kit.config.loading.yaml_file import NotYAML, parse_value
from eagle_kit.config.train import TrainConfig
from eagle_kit.core.errors import UserError
from eagle_kit.core.files import check_disk_space, check_writable, expand, nearest_folder, replacing
from eagle_kit.core.process import INTERRUPTED
from eagle_kit.data.chat.dataset import PreparedData, leave_out
from eagle_kit.data.hidden_states import manifest as state_manifest
from eagle_kit.data.hidden_states.format import bytes_per_token
from eagle_kit.data.hidden_states.store import SHARD_BYTES, StateStore
from eagle_kit.data.hidden_states.writer import writing
from eagle_kit.datagen.hidden_states.drive_vllm import compute_states
from eagle_kit.datagen.hidden_states.files import FINAL, FileLayout, FileSource, StateFiles
from eagle_kit.models.config import HeadArchitecture
from eagle_kit.models.loading.loader import load_target, target_fingerprint
from eagle_kit.objective.batch import make_micro_batch
from eagle_kit.objective.target_features import capture_features
from eagle_kit.ops.device_memory import out_of_memory
from eagle_kit.report.environment import describe_versions
from eagle_kit.report.stages import TimeLeft
from eagle_kit.train.parallel.launch import go_on
from eagle_kit.train.parallel.processes import largest, make_process_state, watching, with_precision
from eagle_kit.train.plan.costs import capture_flops, data_workload
from eagle_kit.train.plan.estimate import EXPECTED_EFFICIENCY, measure_matmul_rate
from eagle_kit.train.run.interrupt import Interrupt
from eagle_kit.train.run.new_head import head_architecture
from eagle_kit.train.run.progress import format_seconds
from eagle_kit.train.run.setup import TrainingComponents, load_components, states_manifest
from eagle_kit.train.run.state_source import state_source

if TYPE_CHECKING:
    from accelerate import PartialState

CHECKED_GAP = 0.1
"""Relative distance up to which two engines' states of a layer count as equal, in bf16 or quantised."""
ANOTHER_OUT = "Give another folder with --out."


@dataclass(frozen=True)
class CaptureOptions:
    """Settings of a capture besides the config.

    Attributes:
        out: folder of the store, which is created or continued.
        shard: ``(i, n)``: these processes take the i-th of n parts of the rows, i in [0, n).
        dry_run: print the estimate and stop.
        verify: read every byte of the store once it is complete.
        shard_bytes: maximum size of a shard that has more than one row.
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
        """Command line that continues this capture."""
        action = "capture"
        more: tuple[str, ...] = ()
        if self.other is not None:
            action = self.other.action
            more = self.other.arguments
        words = ["eagle-kit", "data", action, *self.arguments, "--out", str(self.out)]
        part, num_parts = self.shard
        if num_parts > 1:
            words += ["--shard", f"{part}/{num_parts}"]
        words += more
        return shlex.join(words)

    @property
    def training_command(self) -> str:
        """Command line of a training from the store, which has the settings of the capture."""
        config, *overrides = self.arguments or ("CONFIG",)
        # Overrides are YAML, which takes some names of folders for numbers, and "a #2" for "a" and a comment.
        folder = str(self.out)
        if not _is_plain(folder):
            folder = json.dumps(folder, ensure_ascii=False)
        return shlex.join(["eagle-kit", "train", config, *overrides, f"data.store={folder}"])


@dataclass(frozen=True)
class OtherEngine:
    """An engine that computes the hidden states in place of our own forward of the target.

    Attributes:
        action: action of ``eagle-kit data`` that was called.
        arguments: its arguments, for :attr:`CaptureOptions.command`.
        folder: folder of the engine's files; None has vLLM write them, beside the store.
        python: Python of an environment with vLLM; None reads the files in ``folder``.
        layers: layers of the states in the files, in their order; None is those that the head needs,
            ascending.
        convention: see :class:`~eagle_kit.datagen.hidden_states.files.FileLayout`.
        engine_args: further arguments of vLLM's ``LLM``.
        checks: compare the states of one packed sequence with our own forward, which loads the whole target.
        max_missing: maximum number of texts that are left out because ``folder`` has no usable states of
            them. Above 0, all files are read once more to find these texts.
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
    def origin(self) -> dict[str, Any]:
        """Fields about this engine in the section ``made`` of the manifest."""
        layers = None if self.layers is None else list(self.layers)
        return {
            "engine": "vLLM" if self.python else "unknown",
            "layers": layers,
            "convention": self.convention,
        }


def capture(config: TrainConfig, options: CaptureOptions) -> int:
    """Capture the hidden states that ``options.out`` lacks.

    Returns:
        Exit code: 0 if the rows of this process are stored, 130 if the capture was interrupted.

    Raises:
        UserError: settings or data cannot be used, ``out`` holds other states, or the disk is too small.
    """
    if config.data.store is not None:
        raise UserError(
            "data.store is set, but what is captured comes from conversations.", "Set data.store=null."
        )
    out = expand(options.out)
    _check_out(out)
    config = with_precision(config)
    process = make_process_state(config)
    remedy = "Lower data.max_length, or set training.target_placement to auto, fsdp or tensor-parallel."
    with watching(config, process), out_of_memory("capturing states", remedy):
        return _capture(config, options, process, out)


def _capture(config: TrainConfig, options: CaptureOptions, process: "PartialState", out: Path) -> int:
    """Run :func:`capture` in one of the processes."""
    other = options.other
    drives_vllm = other is not None and other.python is not None
    if drives_vllm and process.num_processes > 1:
        raise UserError(
            f"{process.num_processes} processes would each start vLLM.",
            "Start one without a launcher, on each machine with its --shard.",
        )

    # Target, data and head. Without validation, the target is not loaded a second time for it.
    without_validation = config.model_copy(
        update={"validation": config.validation.model_copy(update={"every": 0})}
    )
    components = load_components(without_validation, process, with_layers=other is None)
    draft = head_architecture(config, components.target.config, components.tokenizer)
    if other is not None and other.max_missing:
        components = _without_missing(components, draft, other)

    # The store, created or continued.
    origin: dict[str, Any] = {"engine": "eagle-kit"}
    if other is not None:
        origin = other.origin
    manifest = states_manifest(
        config,
        components,
        draft,
        command=options.command,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions=describe_versions(),
        **origin,
    )
    _check_origin(out, origin)
    store = StateStore(out, manifest, components.data.folder, shard_bytes=options.shard_bytes)

    # Rows of this process: every shard has a part of the rows, and its processes share them.
    missing = store.missing()
    part, num_parts = options.shard
    num_shares = num_parts * process.num_processes
    share = part * process.num_processes + process.process_index
    mine = [row for row in missing if row % num_shares == share]
    if process.is_main_process:
        print(_estimate(config, components, store, draft, missing, len(mine)), flush=True)
    if options.dry_run:
        return 0

    # Capture them row by row.
    if other is None:
        source = state_source(components.target, config.training.target_placement, components.cut)
    else:
        source = _file_source(config, components, draft, options, other)
    promise = "this row is finished and the shard is written first"
    announce = process.is_main_process
    with Interrupt(announce, promise) as interrupt, writing(store, process.device) as add:
        for row in _rows_to_run(mine, config.training.shares_target, interrupt, process):
            # A process without a row left runs row 0, because the others wait for its part of the target.
            number = 0 if row is None else row
            micro_batch = make_micro_batch(components.data, [number], 1, process.device)
            features = source.states(micro_batch, draft.aux_layer_ids)
            if row is not None:
                add([row], micro_batch.lengths, features.to_stored())
    return _conclude(store, options, interrupt.requested, process)


def _layout(other: OtherEngine, draft: HeadArchitecture, num_layers: int) -> FileLayout:
    """Layout of the files of ``other``. Raises UserError if they lack a layer that the head needs."""
    layers = other.layers or tuple(sorted({*draft.aux_layer_ids, num_layers}))
    layout = FileLayout(layers, other.convention)
    layout.find(draft.aux_layer_ids, num_layers)
    return layout


def _without_missing(
    components: TrainingComponents, draft: HeadArchitecture, other: OtherEngine
) -> TrainingComponents:
    """Leave out the texts without usable states. Raises UserError if they are more than ``max_missing``."""
    assert other.folder is not None
    data = components.data
    target = components.target.config
    layout = _layout(other, draft, target.num_layers)
    files = StateFiles(other.folder, skips_broken=True)

    # Read the states of every text once.
    missing: dict[int, UserError] = {}
    for documents in data.documents:
        for document in documents:
            try:
                files.read(data.chat(document).ids, len(layout.layers), target.hidden_size)
            except UserError as error:
                missing[document] = error
    if not missing:
        return components

    # Leave out what is missing.
    first = next(iter(missing.values()))
    if len(missing) > other.max_missing:
        raise UserError(
            f"The states of {len(missing)} texts cannot be used, and --max-missing is {other.max_missing}; "
            f"the first: {first.cause}",
            first.remedy,
        )
    print(f"{len(missing)} texts are left out; the first: {first.cause}", flush=True)
    return replace(components, data=leave_out(data, missing, "their states are missing or unusable"))


def _file_source(
    config: TrainConfig,
    components: TrainingComponents,
    draft: HeadArchitecture,
    options: CaptureOptions,
    other: OtherEngine,
) -> FileSource:
    """Open the files of ``other``, which vLLM writes first if ``other`` has no folder.

    Raises:
        UserError: vLLM fails, the files cannot be used, or their states are not those of the target.
    """
    target = components.target
    layout = _layout(other, draft, target.config.num_layers)
    folder = other.folder
    if folder is None:
        folder = _run_vllm(config, components, layout, options, other)
    source = FileSource(StateFiles(folder, skips_broken=other.max_missing > 0), layout, target)
    if other.checks:
        check_against_target(source, components, draft.aux_layer_ids)
    return source


def _run_vllm(
    config: TrainConfig,
    components: TrainingComponents,
    layout: FileLayout,
    options: CaptureOptions,
    other: OtherEngine,
) -> Path:
    """Have vLLM compute the states of this shard's texts; returns the folder of its files.

    Raises:
        UserError: the disk is too small, or vLLM cannot be started or fails.
    """
    assert other.python is not None
    target = components.target
    layers = [int(layer) for layer in layout.layers]
    dtype = "bfloat16" if config.training.precision == "bfloat16" else "float32"

    # A folder beside the store, for these weights and settings alone: an interrupted run continues in it.
    settings = json.dumps([target_fingerprint(components.folder), layers, dtype, other.engine_args])
    key = hashlib.sha256(settings.encode()).hexdigest()[:12]
    folder = options.out.with_name(f"{options.out.name}.vllm-{key}")

    # Texts of this shard, and room for their states.
    texts = folder.with_name(folder.name + ".texts.jsonl")
    part, num_parts = options.shard
    num_texts, longest = write_texts(components.data, texts, range(part, len(components.data), num_parts))
    state_size = target.config.hidden_size * target.head_weight.element_size()
    check_disk_space(folder, num_texts * longest * len(layers) * state_size, ANOTHER_OUT)

    # Compute them.
    print(f"vLLM writes its states to {folder}, which may be removed when the store is whole.", flush=True)
    compute_states(
        python=other.python,
        model=components.folder,
        texts=texts,
        out=folder,
        layers=layers,
        dtype=dtype,
        max_length=longest,
        num_texts=num_texts,
        engine_args=other.engine_args,
    )
    return folder


def _check_origin(out: Path, origin: dict[str, Any]) -> None:
    """Raise UserError if the states in ``out`` are of another engine, or of other layers of its files."""
    manifest = state_manifest.read_manifest(out) or {}
    before = manifest.get("made", origin)
    for name in ("engine", "layers", "convention"):
        now = origin.get(name)
        if before.get(name, now) != now:
            raise UserError(
                f"The states in {out} were made with {name} {before[name]}, and now it is {now}.",
                ANOTHER_OUT,
            )


def write_texts(data: PreparedData, path: Path, rows: Sequence[int] | None = None) -> tuple[int, int]:
    """Write every distinct text of some packed sequences as a line ``{"input_ids": [...]}``.

    Args:
        rows: numbers of the packed sequences; None is all of them.

    Returns:
        Number of texts, and tokens of the longest.
    """
    if rows is None:
        rows = range(len(data))
    written: set[bytes] = set()
    longest = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as work, work.open("w", encoding="utf-8") as file:
        for row in rows:
            packed = data.row(row)
            starts = np.unique(packed.doc_start)
            for ids in np.split(np.asarray(packed.ids), starts[1:]):
                key = ids.tobytes()
                if key in written:
                    continue
                written.add(key)
                longest = max(longest, len(ids))
                file.write(json.dumps({"input_ids": ids.tolist()}) + "\n")
    return len(written), longest


def check_against_target(
    source: FileSource, components: TrainingComponents, layer_ids: tuple[int, ...]
) -> None:
    """Compare the states of one packed sequence with those of our own forward of the target.

    Raises:
        UserError: they are states of other layers, or of another model.
    """
    config = components.target.config
    weight = components.target.embed_tokens.weight
    micro_batch = make_micro_batch(components.data, [0], 1, weight.device)
    given = source.states(micro_batch, layer_ids)

    # Inputs of all layers, by our own forward.
    target = load_target(components.folder, dtype=weight.dtype, device=weight.device)
    everything = tuple(range(config.num_layers + 1))
    teachers = micro_batch.plan.teacher_positions
    computed = capture_features(target, micro_batch.ids, micro_batch.doc_start, everything, teachers)
    inputs = computed.aux_hidden_states.split(config.hidden_size, -1)

    # Captured layers.
    for layer, state in zip(layer_ids, given.aux_hidden_states.split(config.hidden_size, -1), strict=True):
        gap = _gap(state, inputs[layer])
        if gap > CHECKED_GAP:
            raise _not_the_input(layer, state, inputs, gap)

    # Final hidden states.
    gap = _gap(given.hidden, computed.hidden)
    if gap > CHECKED_GAP:
        raise UserError(
            f"The last states are {gap:.0%} off those of the target here, behind its final norm.",
            f"Name the last layer's output as layer {config.num_layers}, or as {FINAL} where it was normed.",
        )


def _not_the_input(layer: int, state: torch.Tensor, inputs: Sequence[torch.Tensor], gap: float) -> UserError:
    """Error for states that are not the input of ``layer``; it names the layer whose input they are."""
    gaps = [_gap(state, each) for each in inputs]
    nearest = min(range(len(inputs)), key=gaps.__getitem__)
    actual = f"{gap:.0%} off those of the target here"
    remedy = "Compute them with the same weights and the same texts."
    if gaps[nearest] <= CHECKED_GAP:
        actual = f"the input of layer {nearest}"
        remedy = "Name layers and convention as the engine had them (--layers, --convention)."
    return UserError(f"The states given for the input of layer {layer} are {actual}.", remedy)


def _gap(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative distance of ``a`` from ``b``, both ``[T, H]``: the median over tokens."""
    distance = (a.float() - b.float()).norm(dim=-1) / b.float().norm(dim=-1).clamp(min=1e-12)
    return float(distance.median())


def _rows_to_run(
    mine: Sequence[int], shares_target: bool, interrupt: Interrupt, process: "PartialState"
) -> Iterator[int | None]:
    """Rows of this process, with a progress bar, until all are done or a signal arrives.

    Processes that share the target run it together, equally often: one without a row left gets None, and a
    signal to one of them stops them all.
    """
    from tqdm import tqdm

    num_idle = 0
    if shares_target:
        num_idle = int(largest(process, len(mine))) - len(mine)
    rows: list[int | None] = [*mine, *[None] * num_idle]

    shown = process.is_local_main_process
    with tqdm(total=len(mine), unit="row", desc="capturing", dynamic_ncols=True, disable=not shown) as bar:
        left = TimeLeft(len(mine))
        for row in rows:
            if shares_target:
                interrupt.requested = largest(process, interrupt.requested) > 0
            if interrupt.requested:
                return
            yield row
            bar.update(row is not None)
            if shown and row is not None:
                left.count(1)


def _conclude(store: StateStore, options: CaptureOptions, interrupted: bool, process: "PartialState") -> int:
    """Close the store if it is complete, else print how to go on; returns the exit code."""
    num_rows = store.manifest["data"]["rows"]
    num_missing = len(store.missing())
    if interrupted:
        again = go_on(options.command, os.environ)
        print(f"{num_rows - num_missing} of {num_rows} rows are in {store.folder}. {again}")
        return INTERRUPTED
    if num_missing:
        print(f"This part is done; {store.folder} waits for {num_missing} of {num_rows} rows of other parts.")
        return 0

    # All rows are there.
    store.finish()
    store = StateStore(store.folder)
    if process.is_main_process:
        if options.verify:
            verify(store)
        print(f"{summary(store)}\nTrain from it with: {options.training_command}")
    return 0


def verify(store: StateStore) -> None:
    """Read every byte of a store, with a progress bar. Raises UserError for the first shard that differs."""
    from tqdm import tqdm

    with tqdm(store.shards(), unit="shard", desc="verifying", dynamic_ncols=True) as bar:
        store.verify(bar)


def summary(store: StateStore) -> str:
    """Contents of a store as text."""
    about: dict[str, Any] = store.manifest
    data = about["data"]
    target = about["target"]
    shards = store.shards()
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
    components: TrainingComponents,
    store: StateStore,
    draft: HeadArchitecture,
    missing: Sequence[int],
    num_mine: int,
) -> str:
    """Describe rows and bytes to come over all processes, and the time of this one.

    Args:
        missing: rows that the store lacks.
        num_mine: number of them that this process computes.

    Raises:
        UserError: the disk is too small for the missing rows.
    """
    data = components.data
    training = config.training
    target = components.target

    # Disk. A new store also has a copy of the packed sequences.
    num_aux_layers = len(draft.aux_layer_ids)
    hidden_size = target.config.hidden_size
    per_token = bytes_per_token(training.state_format, training.precision, num_aux_layers, hidden_size)
    in_float32 = bytes_per_token("computed", "float32", num_aux_layers, hidden_size)
    num_bytes = sum(data.row_length(row) for row in missing) * per_token
    if not state_manifest.read_manifest(store.folder):
        num_bytes += 8 * data.num_tokens
    check_disk_space(store.folder, num_bytes + store.shard_bytes, ANOTHER_OUT)
    free = shutil.disk_usage(nearest_folder(store.folder)).free

    # Time.
    weight = target.embed_tokens.weight
    rate = measure_matmul_rate(weight.device, weight.dtype)
    flops = num_mine * capture_flops(target.config, data_workload(config, data, 1))
    time = format_seconds(flops / (rate * EXPECTED_EFFICIENCY))
    return "\n".join(
        (
            f"rows    {len(missing)} to capture, {len(data) - len(missing)} found",
            f"disk    {num_bytes / 1e9:.3f} GB to come ({per_token / in_float32:.0%} of float32), "
            f"{free / 1e9:.1f} free",
            f"time    {time} for the rows of this process, at {EXPECTED_EFFICIENCY:.0%} of "
            f"{rate / 1e9:.0f} GFLOP/s, measured now; writing is not counted",
        )
    )


def _is_plain(text: str) -> bool:
    """True if YAML reads ``text`` as itself."""
    try:
        return bool(parse_value(text) == text)
    except NotYAML:
        return False


def _check_out(out: Path) -> None:
    """Raise UserError if ``out`` is neither a store nor a place for one."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file.", ANOTHER_OUT)

    # A folder without a manifest may hold the data folder of a store that was begun, and nothing else.
    if out.exists() and not (out / state_manifest.NAME).exists():
        for path in out.iterdir():
            if path.name != state_manifest.DATA and not path.name.endswith(".partial"):
                raise UserError(f"{out} holds something else than captured states.", ANOTHER_OUT)
    check_writable(out, ANOTHER_OUT)
