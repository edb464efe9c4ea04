"""A server of OpenAI's API that is only texts: metrics of vLLM or SGLang, the same response to every chat."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Metrics = Callable[[int], str]


def vllm(asked: int) -> str:
    """vLLM 0.32: 10 drafts of 4 tokens a response, of which 6, 3, 1 and 0 are accepted by depth; 21
    tokens."""
    at = [6, 3, 1, 0]
    lines = [f'vllm:spec_decode_num_drafts_total{{model_name="m"}} {100 + 10 * asked}.0']
    lines.append(f'vllm:spec_decode_num_draft_tokens_total{{model_name="m"}} {400 + 40 * asked}.0')
    lines.append(f'vllm:spec_decode_num_accepted_tokens_total{{model_name="m"}} {50 + 10 * asked}.0')
    lines.append(f'vllm:generation_tokens_total{{model_name="m"}} {900 + 21 * asked}.0')
    for depth, count in enumerate(at):
        label = f'{{model_name="m",position="{depth}"}}'
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        lines.append(f"{name}{label} {7 + count * asked}.0")
    return "\n".join(lines)


def sglang(asked: int) -> str:
    """SGLang 0.5: 20 verifies and 31 tokens a response."""
    return "\n".join(
        [
            'sglang:spec_accept_length{model_name="m"} 3.9',
            f'sglang:spec_verify_calls_total{{model_name="m"}} {500 + 20 * asked}.0',
            f'sglang:num_requests_total{{model_name="m"}} {9 + asked}.0',
            f'sglang:generation_tokens_total{{model_name="m"}} {77 + 31 * asked}.0',
        ]
    )


def sglang_gauge(asked: int) -> str:
    """An SGLang that counts no verifies."""
    return 'sglang:spec_accept_length{model_name="m"} 1.75'


@contextmanager
def fake(
    metrics: Metrics | None, response: Any = "Some text", key: str = "", **answers: Any
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Serve -> its URL, and the bodies it was sent.

    Args:
        metrics: the text after so many responses; None for a server without.
        response: text of every response (of 21 tokens, to prompts of 12), a message, an HTTP status, or what
            is no chat completion in a list.
        key: that must be sent with a chat.
        answers: to other paths, by their names.
    """
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.rpartition("/")[2]
            if name == "metrics" and metrics is not None:
                self.answer(metrics(len(bodies)).encode())
            elif name == "models" or name in answers:
                self.answer(json.dumps(answers.get(name, {"data": [{"id": "the-model"}]})).encode())
            else:
                self.answer(b"not found", 404)

        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if key and self.headers["Authorization"] != f"Bearer {key}":
                self.answer(b'{"error": "no key"}', 401)
            elif isinstance(response, int):
                self.answer(b'{"error": "it broke"}', response)
            elif isinstance(response, list):
                self.answer(json.dumps(response[0]).encode())
            else:
                message = response if isinstance(response, dict) else {"content": response}
                usage = {"prompt_tokens": 12, "completion_tokens": 21}
                self.answer(json.dumps({"choices": [{"message": message}], "usage": usage}).encode())

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
        yield f"http://127.0.0.1:{server.server_port}/v1", bodies
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
