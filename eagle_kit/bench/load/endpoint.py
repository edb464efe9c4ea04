"""What an endpoint is before it is measured: its model, and the extensions it takes."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from eagle_kit.bench.load.client import Client, ClientSettings, HttpError, import_httpx
from eagle_kit.bench.load.reply import BadEvent, Recorder
from eagle_kit.bench.load.workload import LoadRequest
from eagle_kit.core.errors import UserError

USAGE = {"stream_options": {"include_usage": True}}
CONTINUOUS_USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
"""Of vLLM and SGLang: usage in every event, which tells how many tokens a chunk holds."""
SPECULATION = {"return_speculation": True}
"""Of this project's server: the acceptance of each response."""
STEPS = (USAGE, CONTINUOUS_USAGE, SPECULATION)
REFUSED = (400, 422)
NOT_FOUND = 404


@dataclass(frozen=True)
class Endpoint:
    """What was found out.

    Attributes:
        settings: with the model, and the extensions that the server takes.
        server: ``owned_by`` of its model, such as "vllm"; "unknown" when it does not say.
    """

    settings: ClientSettings
    server: str


async def explore(settings: ClientSettings) -> Endpoint:
    """Find the model, then send the smallest request with each extension to learn which ones are taken.

    Args:
        settings: without a model, the server is asked for its only one.

    Raises:
        UserError: nobody answers, the key is refused, the model is not there, or a plain request is refused.
    """
    async with Client(settings) as client:
        served = await _list_models(client)
        if not settings.model:
            if len(served) != 1:
                raise UserError(
                    f"{settings.base_url} serves {len(served)} models{_named(served)}.",
                    "Name one with --model.",
                )
            settings = replace(settings, model=next(iter(served)))
        try:
            await _probe(client, settings)
            for step in STEPS:
                wider = replace(settings, extensions={**settings.extensions, **step})
                if await _takes(client, wider):
                    settings = wider
        except HttpError as error:
            raise _refusal(settings, error, served) from None
    return Endpoint(settings, served.get(settings.model, "unknown"))


async def _list_models(client: Client) -> dict[str, str]:
    """Model -> owner, empty when the server keeps no list. Raises UserError when nobody answers."""
    httpx = import_httpx()
    base_url = client.settings.base_url
    try:
        response = await client.get("/v1/models")
    except (httpx.RequestError, httpx.InvalidURL) as error:
        raise UserError(
            f"Nobody answers at {base_url} ({str(error) or type(error).__name__}).",
            "Start the server, or check --base-url.",
        ) from None
    if response.status_code in (401, 403):
        raise UserError(f"{base_url} refuses the API key (HTTP {response.status_code}).", "Check --api-key.")
    try:
        models = response.json()["data"] if response.status_code == 200 else []
        return {str(each["id"]): str(each.get("owned_by") or "unknown") for each in models}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


async def _takes(client: Client, settings: ClientSettings) -> bool:
    try:
        await _probe(client, settings)
    except HttpError as error:
        if error.status not in REFUSED:
            raise
        return False
    return True


async def _probe(client: Client, settings: ClientSettings) -> None:
    """Ask for one token. Raises HttpError, or UserError when no stream of events comes back."""
    httpx = import_httpx()
    content = (
        {"messages": [{"role": "user", "content": "Hi"}]} if settings.api == "chat" else {"prompt": "Hi"}
    )
    body = settings.body(LoadRequest(0, content, 1, 0 if settings.temperature > 0 else None))
    try:
        await client.stream(body, Recorder(0, 0.0, 0.0))
    except (httpx.RequestError, BadEvent, TimeoutError) as error:
        raise UserError(
            f"A first request to {settings.base_url} failed: {client.reason(error)}.",
            "Check that it is an OpenAI-compatible server, and its log.",
        ) from None


def _refusal(settings: ClientSettings, error: HttpError, served: Iterable[str]) -> UserError:
    where = settings.base_url
    if error.status == NOT_FOUND and settings.model not in served:
        return UserError(
            f"{where} has no model {settings.model!r} ({error}).",
            f"Give one that is served{_named(served)}, or leave --model out.",
        )
    if error.status in (401, 403):
        return UserError(f"{where} refuses the API key ({error}).", "Check --api-key.")
    return UserError(
        f"{where} refuses a first request of one token ({error}).",
        "Check --endpoint, --extra-body and the server's log.",
    )


def _named(models: Iterable[str]) -> str:
    names = [repr(model) for model in models]
    return f": {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}" if names else ""
