"""Servers that speak as vLLM 0.32 and SGLang 0.5 do: metrics, models, tokens and streams of completions.

Names and labels of vLLM's metrics are those that its server wrote. Those of SGLang are read from the source
of 0.5.23 (``srt/observability/metrics_collector.py``), as no server of it has run here: it adds a response's
counts when the response ends, and has no sample of verify calls before the first one. What the servers
generate is a table; counters follow from it.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STEPS = 3
"""Length of the chains that are drafted."""
PER_STEP = 2
"""Tokens of every step after the first token: one accepted draft and the bonus token."""
Generated = tuple[str, list[int]]
"""Text and token ids of a response."""


@dataclass
class RecordedEngine:
    """What a server does and has counted.

    Attributes:
        generate: (prompt ids, most tokens) -> the response.
        style: "vllm" or "sglang".
        drafts: whether it drafts.
        models: what ``/v1/models`` lists.
        tokenize: (text) -> token ids; None for a server without that path.
        gives_ids: whether it knows ``return_token_ids``; None for one that refuses what it does not know.
        others: tokens that others generate meanwhile, for each response.
        undrafted: tokens of each response, besides the first, that came without a draft.
        late: reads of the metrics by which its counters are late.
        extra_prompt_tokens: that it counts in every prompt.
        broken: an event that ends a stream in place of its last one; "cut" ends it without.
        fails_at: number of the response, from 1, that is refused with HTTP 500.
        server_info: options that SGLang shows.
        metrics_text: metrics in place of its own; empty where it has no such path.
        key: that requests need, except for the metrics; empty for none.
    """

    generate: Callable[[list[int], int], Generated]
    style: str = "vllm"
    drafts: bool = True
    models: list[dict[str, Any]] = field(default_factory=lambda: [{"id": "the-model", "max_model_len": 4096}])
    tokenize: Callable[[str], list[int]] | None = None
    gives_ids: bool | None = True
    others: int = 0
    undrafted: int = 0
    late: int = 0
    extra_prompt_tokens: int = 0
    broken: Any = None
    fails_at: int = 0
    server_info: dict[str, Any] | None = None
    metrics_text: str | None = None
    key: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("prompt", "tokens", "verifies"), 7))
    stale: tuple[int, str] = (0, "")
    lock: Any = field(default_factory=threading.Lock)

    def count(self, num_prompt_tokens: int, num_tokens: int) -> None:
        """Count a response."""
        with self.lock:
            self.stale = (self.late, self._metrics())
            self.counts["prompt"] += num_prompt_tokens
            self.counts["tokens"] += num_tokens + self.others
            if self.drafts:
                self.counts["verifies"] += -(-(num_tokens - 1 - self.undrafted) // PER_STEP)

    def metrics(self) -> str:
        """The metrics now, or those before the last response while they are late."""
        if self.metrics_text is not None:
            return self.metrics_text
        with self.lock:
            left, text = self.stale
            self.stale = (left - 1, text)
            return text if left > 0 else self._metrics()

    def _metrics(self) -> str:
        lines = self._sglang_lines() if self.style == "sglang" else self._vllm_lines()
        return "\n".join(lines) + "\n"

    def _vllm_lines(self) -> list[str]:
        label = '{engine="0",model_name="the-model"}'
        verifies = self.counts["verifies"]
        lines = [
            "# HELP vllm:prompt_tokens_total Number of prefill tokens processed.",
            "# TYPE vllm:prompt_tokens_total counter",
            f"vllm:prompt_tokens_total{label} {self.counts['prompt']}.0",
            "# HELP vllm:generation_tokens_total Number of generation tokens processed.",
            "# TYPE vllm:generation_tokens_total counter",
            f"vllm:generation_tokens_total{label} {self.counts['tokens']}.0",
            f"vllm:generation_tokens_created{label} 1.7960807292545455e+09",
        ]
        if self.drafts:
            name = "vllm:spec_decode_num"
            lines += [
                f"{name}_drafts_total{label} {verifies}.0",
                f"{name}_draft_tokens_total{label} {STEPS * verifies}.0",
                f"{name}_accepted_tokens_total{label} {verifies}.0",
            ]
            for depth, count in enumerate((verifies, 0, 0)):
                place = f'{{engine="0",model_name="the-model",position="{depth}"}}'
                lines.append(f"{name}_accepted_tokens_per_pos_total{place} {count}.0")
        return lines

    def _sglang_lines(self) -> list[str]:
        common = 'engine_type="unified",model_name="the-model"'
        streamed = f'{{{common},is_streaming="true"}}'
        of_rank = f'{{{common},moe_ep_rank="0",pp_rank="0",tp_rank="0"}}'
        interval = 3.75 if self.drafts else 0.0
        lines = [
            "# HELP sglang:spec_accept_length Mean acceptance length of speculative decoding.",
            "# TYPE sglang:spec_accept_length gauge",
            f"sglang:spec_accept_length{of_rank} {interval}",
            "# HELP sglang:prompt_tokens_total Number of prefill tokens processed.",
            "# TYPE sglang:prompt_tokens_total counter",
            f"sglang:prompt_tokens_total{streamed} {self.counts['prompt']}.0",
            "# HELP sglang:generation_tokens_total Number of generation tokens processed.",
            "# TYPE sglang:generation_tokens_total counter",
            f"sglang:generation_tokens_total{streamed} {self.counts['tokens']}.0",
            "# HELP sglang:num_requests_total Number of requests processed.",
            "# TYPE sglang:num_requests_total counter",
            f"sglang:num_requests_total{streamed} {len(self.bodies)}.0",
            "# HELP sglang:spec_verify_calls_total Number of speculative decoding verification calls.",
            "# TYPE sglang:spec_verify_calls_total counter",
        ]
        if self.drafts:
            lines.append(f"sglang:spec_verify_calls_total{{{common}}} {self.counts['verifies']}.0")
        return lines

    def events(self, body: dict[str, Any]) -> Iterator[Any]:
        """Events of a stream: the first token, then steps, then the usage."""
        text, ids = self.generate(body["prompt"], body["max_tokens"])
        num_prompt_tokens = len(body["prompt"]) + self.extra_prompt_tokens
        # Counted before the last event is sent, so that only ``late`` makes the counters late.
        self.count(num_prompt_tokens, len(ids))
        ends = [1, *range(1 + PER_STEP, len(ids), PER_STEP), len(ids)]
        start = 0
        for end in dict.fromkeys(min(end, len(ids)) for end in ends):
            is_last = end == len(ids)
            piece = text if is_last else ""
            choice: dict[str, Any] = {"index": 0, "text": piece, "logprobs": None, "finish_reason": None}
            if is_last:
                choice["finish_reason"] = "length"
            if self.gives_ids and body.get("return_token_ids"):
                choice["token_ids"] = ids[start:end]
            usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": end}
            start = end
            if is_last and self.broken is not None:
                if self.broken != "cut":
                    yield self.broken
                return
            yield {"choices": [choice], "usage": usage}
        yield {"choices": [], "usage": {"prompt_tokens": num_prompt_tokens, "completion_tokens": len(ids)}}


@contextmanager
def recorded(engine: RecordedEngine) -> Iterator[str]:
    """Serve -> its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics" and engine.metrics_text != "":
                self.answer(engine.metrics().encode())
            elif not self.has_key():
                self.answer(b'{"error": "Unauthorized"}', 401)
            elif self.path == "/v1/models":
                self.answer(json.dumps({"object": "list", "data": engine.models}).encode())
            elif self.path == "/version" and engine.style == "vllm":
                self.answer(b'{"version": "0.32.0"}')
            elif self.path == "/server_info" and engine.server_info is not None:
                self.answer(json.dumps(engine.server_info).encode())
            else:
                self.answer(b'{"detail": "Not Found"}', 404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize" and engine.tokenize is not None:
                tokens = engine.tokenize(body["prompt"])
                self.answer(json.dumps({"count": len(tokens), "tokens": tokens}).encode())
            elif self.path == "/v1/completions" and isinstance(body["prompt"], str):
                usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": 1}
                self.answer(json.dumps({"choices": [{"text": ""}], "usage": usage}).encode())
            elif self.path == "/v1/completions":
                self.complete(body)
            else:
                self.answer(b'{"detail": "Not Found"}', 404)

        def has_key(self) -> bool:
            return not engine.key or self.headers["Authorization"] == f"Bearer {engine.key}"

        def complete(self, body: dict[str, Any]) -> None:
            with engine.lock:
                engine.bodies.append(body)
                number = len(engine.bodies)
            if engine.gives_ids is None and "return_token_ids" in body:
                self.answer(b'{"error": {"message": "return_token_ids is not known"}}', 400)
            elif number == engine.fails_at:
                self.answer(b'{"error": {"message": "it broke"}}', 500)
            else:
                lines = [f"data: {json.dumps(event)}\n\n" for event in engine.events(body)]
                self.answer("".join([*lines, "data: [DONE]\n\n"]).encode())

        def answer(self, data: bytes, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
