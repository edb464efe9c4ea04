"""``metrics.md``: every metric of the server with its type, labels and help."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

from eagle_kit.core.shape import NO_SPECULATION
from eagle_kit.core.stats import SpecStats
from eagle_kit.engine.engine import EngineTotals
from eagle_kit.ops.device_memory import GpuMemory
from eagle_kit.server.api.metrics import PREFIX, Metrics
from generate.markdown import table, wrapped

PROCESS = {
    "process_virtual_memory_bytes": "Virtual memory size in bytes.",
    "process_resident_memory_bytes": "Resident memory size in bytes.",
    "process_start_time_seconds": "Start time of the process since unix epoch in seconds.",
    "process_cpu_seconds_total": "Total user and system CPU time spent in seconds.",
    "process_open_fds": "Number of open file descriptors.",
    "process_max_fds": "Maximum number of open file descriptors.",
}
"""Metrics of prometheus_client's collector on Linux. The collector has none on other systems."""


def metrics_page() -> str:
    """Metrics of the engine and of the process."""
    written = (
        "Written by `make reference` from `eagle_kit/server/api/metrics.py`. A server has these metrics at "
        "`/metrics`, in Prometheus' text format. The names are vLLM's, with another prefix."
    )
    memory = GpuMemory(total=0, free=0, reserved=0, allocated=0)
    metrics = Metrics(_engine(), "MODEL", read_memory=lambda: memory)
    rows = []
    histograms = []
    for family in metrics.registry.collect():
        if not family.name.startswith(PREFIX):
            continue
        name = family.name
        if family.type == "counter":
            name += "_total"
        labels = {label for sample in family.samples for label in sample.labels}
        shown = ", ".join(f"`{label}`" for label in sorted(labels - {"le"}))
        rows.append((f"`{name}`", family.type, shown, family.documentation))
        if family.type == "histogram":
            bounds = [sample.labels["le"] for sample in family.samples if "le" in sample.labels]
            histograms.append((f"`{name}`", ", ".join(bounds)))

    lines = ["# Metrics", "", *wrapped(written), "", "## Engine and requests", ""]
    lines += table(("metric", "type", "labels", "help"), rows)
    lines += ["", "## Buckets of histograms", ""]
    lines += table(("metric", "upper bounds, in seconds or tokens"), histograms)
    lines += ["", "## Process", "", "On Linux, from `prometheus_client`:", ""]
    lines += table(("metric", "help"), [(f"`{name}`", text) for name, text in PROCESS.items()])
    return "\n".join(lines) + "\n"


def _engine() -> Any:
    """The attributes of an engine that metrics read, with one sample for each label."""
    totals = EngineTotals(
        num_finished=Counter(stop=1), spec=SpecStats(num_accepted_at=[1]), shapes=Counter({NO_SPECULATION: 1})
    )
    return SimpleNamespace(
        totals=totals,
        num_running=0,
        num_waiting=0,
        kv_usage=0.0,
        num_graphs=0,
        num_grammars=0,
        runner=SimpleNamespace(graphs=SimpleNamespace(node_bytes=0)),
        config=SimpleNamespace(
            max_context=8192, page_size=16, num_pages=1, kv_dtype="auto", prefix_cache=True
        ),
        choices=lambda: [SimpleNamespace(batch_size=1, gain=1.0)],
    )
