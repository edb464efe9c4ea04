"""Options of the HTTP server. Torch-free."""

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from eagle_kit.config.loading.flags import Flag
from eagle_kit.config.options import Options
from eagle_kit.core.errors import UserError, shown

HOST_NAME = re.compile(r"[A-Za-z0-9_.-]+")
WarmUpExtent = Literal["all", "usual", "none"]
LogLevel = Literal["critical", "error", "warning", "info", "debug", "trace"]


def _lower(text: Any) -> Any:
    """A text in small letters; other values as they are."""
    return text.lower() if isinstance(text, str) else text


class ServerConfig(Options):
    """Name and limits of one server."""

    model_name: str
    """Name that /v1/models lists and requests may give; default the target's name. The path or hub id
    that was served is taken as well.
    """

    model_aliases: Annotated[tuple[str, ...], Flag(is_repeated=True, metavar="NAME")] = ()
    """Another name that requests may give; may be given several times."""

    host: str = "127.0.0.1"
    """Address to listen on."""

    allowed_host: str | None = None
    """Names, separated by commas, that the headers Host and Origin of requests may hold besides those of
    loopback. Without it the headers are checked where no key is set and the server listens on loopback.
    """

    forwarded_allow_ips: str | None = None
    """Addresses or networks of proxies, separated by commas, whose X-Forwarded-For names the client; without
    it the header is not read.
    """

    api_key: str | None = None
    """Bearer token that clients must send; default $EAGLE_KIT_API_KEY, or none. Other users of the machine
    see a key that is given here, and not one of the environment.
    """

    max_queued: int = Field(default=4096, ge=0)
    """Requests that may wait besides those that run; more get 503."""

    max_parallel_per_client: int | None = Field(default=None, ge=1)
    """Responses that one client may have in progress; more get 429."""

    max_requests_per_minute: int | None = Field(default=None, ge=1)
    """Requests of one client per minute; more get 429."""

    separate_clients: bool = False
    """Clients, who are told apart by their addresses, do not use one another's cached pages, n-grams and
    compiled grammars.
    """

    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1)
    """Size of the largest request body; larger ones get 413."""

    warm_up: WarmUpExtent = "all"
    """Batches whose graphs are captured before the first request, as far as graph_memory allows: all that
    requests may ask for (all, the default), all but logprobs and grammars (usual), or none. Kernels and
    prompts are always prepared. Other graphs are captured when they are first needed, while all requests
    wait; the table at the start says which.
    """

    reasoning_parser: str = "auto"
    """Form of the reasoning in responses, which is sent apart from the content: auto (the default, found in
    the chat template), none, think, deepseek_r1 (a thought that nothing has opened) or harmony, or a name of
    vLLM's or SGLang's.
    """

    tool_call_parser: str = "auto"
    """Form of the tool calls in responses: auto (the default, found in the chat template), none, hermes,
    llama3, mistral, deepseek or harmony, or a name of vLLM's or SGLang's.
    """

    grace_period_s: float = Field(default=30.0, ge=0.0)
    """Seconds that running responses get to finish when the server is stopped."""

    log_stats_interval_s: float = Field(default=10.0, ge=0.0)
    """Seconds between two lines of the log about throughput, requests and memory, while there is traffic; 0
    writes none.
    """

    log_level: Annotated[LogLevel, BeforeValidator(_lower)] = "warning"
    """Least level of the lines that the package and uvicorn write to standard error: critical, error, warning
    (the default), info, debug or trace, in any case. uvicorn's warnings, a line for each request that is no
    HTTP, come with info. The lines about traffic have --log-stats-interval.
    """

    profile_dir: Annotated[Path | None, Flag(metavar="DIR")] = None
    """Folder for the traces of /start_profile; without it the server makes none."""

    @field_validator("model_name")
    @classmethod
    def _name_is_given(cls, name: str) -> str:
        if not name:
            raise UserError("The served model's name is empty.", "Give some text.")
        return name

    @field_validator("allowed_host")
    @classmethod
    def _names_are_hosts(cls, text: str | None) -> str | None:
        if text is None:
            return None
        for name in text.split(","):
            if not (HOST_NAME.fullmatch(name.strip()) or _is_address(name.strip().strip("[]"))):
                raise UserError(
                    f"The allowed host {shown(name)} is no name of a host.",
                    "Give names or addresses without a scheme or a port, separated by commas.",
                )
        return text

    @field_validator("forwarded_allow_ips")
    @classmethod
    def _proxies_are_addresses(cls, text: str | None) -> str | None:
        if text is None:
            return None
        for name in text.split(","):
            try:
                ipaddress.ip_network(name.strip())
            except ValueError:
                raise UserError(
                    f"The proxy {shown(name)} is no address or network.",
                    "Give those of your proxies, such as 127.0.0.1 or 10.0.0.0/24, separated by commas.",
                ) from None
        return text

    @property
    def host_names(self) -> frozenset[str]:
        """Names of :attr:`allowed_host`, in lower case."""
        names = (self.allowed_host or "").split(",")
        return frozenset(name.strip().strip("[]").rstrip(".").lower() for name in names if name.strip())

    @field_validator("api_key")
    @classmethod
    def _key_fits_a_header(cls, key: str | None) -> str | None:
        if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key != ""):
            raise UserError(
                "The API key is empty, not ASCII, or has blanks at an end.",
                "Give letters, digits and signs; leave --api-key out and unset $EAGLE_KIT_API_KEY to serve "
                "without a key.",
            )
        return key


def _is_address(text: str) -> bool:
    """True for an IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
