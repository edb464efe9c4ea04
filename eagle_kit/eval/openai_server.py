"""The part of OpenAI's API that is common to servers of ours, vLLM and SGLang: models, requests, errors."""

import json
from contextlib import suppress
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from eagle_kit.core.errors import UserError
from eagle_kit.core.files import parse_json
from eagle_kit.core.shape import SpecShape
from eagle_kit.eval.counters import DRAFTED, DRAFTS, Snapshot, root_of

RESPONSE_TIMEOUT_S = 600
"""Seconds that a server may take for a response."""
TIMEOUT_S = 10
"""Seconds that a server may take for anything else."""
SGLANG_SHAPE = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
"""Options of SGLang that are the numbers of a shape."""


class RefusedRequest(UserError):
    """An answer with an HTTP ``status`` of 400 or more."""

    def __init__(self, cause: str, remedy: str, status: int) -> None:
        super().__init__(cause, remedy)
        self.status = status


class OpenAIServer:
    """A client of OpenAI's API.

    Args:
        base_url: with ``/v1`` at its end or not.
        key: sent as a bearer token; empty sends none.
    """

    def __init__(self, base_url: str, key: str = "") -> None:
        self.url = root_of(base_url)
        self.headers = {"Content-Type": "application/json"}
        if key:
            self.headers["Authorization"] = f"Bearer {key}"
        self._opener = build_opener(ProxyHandler({}))

    def model_card(self) -> dict[str, Any]:
        """The record of the server's first model. Raises UserError."""
        models = self.request("/v1/models").get("data")
        if not isinstance(models, list) or not models or not isinstance(models[0], dict):
            raise self.not_openai("/v1/models", models)
        return models[0]

    def model_name(self) -> str:
        """Name of the server's first model. Raises UserError."""
        return str(self.model_card().get("id"))

    def shape_of(self, counted: Snapshot) -> SpecShape | None:
        """The speculation shape by the counts between two snapshots; None where there were several, or
        where it is not known."""
        with suppress(UserError):  # of a shape that is not possible here
            # Ours counts cycles by shape.
            ran = [shape for shape, cycles in counted.cycles.items() if cycles]
            if ran:
                drafting = [shape for shape in map(SpecShape.parse, ran) if shape.steps]
                return drafting[0] if len(drafting) == 1 else None
            # vLLM counts drafted tokens.
            drafts = counted.count(DRAFTS)
            if drafts:
                steps = round(counted.count(DRAFTED) / drafts)
                return SpecShape.parse(f"{steps},1,{steps + 1}")

        # SGLang shows its options, under a path that has been renamed.
        if counted.engine == "SGLang":
            for path in ("/server_info", "/get_server_info"):
                with suppress(UserError):
                    options = self.request(path)
                    return SpecShape.parse(",".join(str(options.get(name)) for name in SGLANG_SHAPE))
        return None

    def request(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Get ``path``, or post ``body`` to it. Raises UserError."""
        data = None if body is None else json.dumps(body).encode()
        timeout = TIMEOUT_S if body is None else RESPONSE_TIMEOUT_S
        request = Request(self.url + path, data, self.headers)
        try:
            with self._opener.open(request, timeout=timeout) as http_response:
                answer = parse_json(http_response.read(), self.url + path, "Check --base-url.")
        except HTTPError as error:
            reason = error.read(300).decode("utf-8", "replace")
            raise self.refusal(path, error.code, reason) from None
        except (OSError, HTTPException) as error:
            raise UserError(
                f"{self.url}{path} does not answer ({error}).", "Start the server, or check --base-url."
            ) from None
        if not isinstance(answer, dict):
            raise self.not_openai(path, answer)
        return answer

    def refusal(self, path: str, status: int, reason: str) -> "RefusedRequest":
        """Error for an answer with an HTTP status of 400 or more."""
        cause = f"{self.url}{path} answers {status} ({reason})."
        return RefusedRequest(cause, "Check --base-url and the server's key.", status)

    def not_openai(self, path: str, answer: object) -> UserError:
        """Error for an answer that is not of OpenAI's API."""
        return UserError(
            f"{self.url}{path} answers {str(answer)[:80]!r}, which is not OpenAI's API.", "Check --base-url."
        )
