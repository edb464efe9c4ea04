"""Addresses that a server listens on, and the hosts and origins whose requests it answers.

A web page whose name is bound to 127.0.0.1 after it was loaded (DNS rebinding, CVE-2024-28224) is of the same
origin as a server there. Its requests name the page's host, so a server without a key answers those of its
own names only.
"""

import ipaddress
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from eagle_kit.config.server import ServerConfig
from eagle_kit.core.errors import cut
from eagle_kit.serve.api.errors import ApiError


def resolve(host: str, port: int) -> tuple[Any, ...]:
    """Family, type, protocol, canonical name and address of a socket that listens on ``host``.

    Raises:
        OSError, UnicodeError: ``host`` is no address and has none.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return found[0]


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a server on ``host``. Raises as :func:`resolve`."""
    address = resolve(host, 0)[4][0]
    return ipaddress.ip_address(address).is_loopback


def allowed_hosts(config: ServerConfig) -> frozenset[str] | None:
    """Names beside those of loopback that requests may give as their host.

    None means that every host is answered: no names were given, and a key is set or other machines reach the
    server.
    """
    if not config.host_names and (config.api_key is not None or not is_loopback(config.host)):
        return None
    return frozenset({*config.host_names, config.host.lower()})


def check_host(headers: Mapping[bytes, bytes], allowed: frozenset[str]) -> None:
    """Raise ApiError 403 for a request to another host, or from a page of one. Both headers may be absent."""
    host = headers.get(b"host")
    origin = headers.get(b"origin")
    if host is not None and not _is_allowed(_name(b"//" + host), allowed):
        raise _refusal("host", host)
    if origin is not None and not _is_allowed(_name(origin), allowed):
        raise _refusal("origin", origin)


def _name(url: bytes) -> str:
    """Lower-case host of a URL; empty where there is none, or a user beside it, which no browser sends."""
    if b"@" in url:
        return ""
    try:
        return (urlsplit(url.decode("ascii")).hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_allowed(name: str, allowed: frozenset[str]) -> bool:
    if name in allowed or name == "localhost" or name.endswith(".localhost"):
        return name != ""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _refusal(what: str, given: bytes) -> ApiError:
    return ApiError(
        403,
        f"The {what} {cut(given.decode('latin-1'))!r} is not one of this server's names. Allow its name with "
        "--allowed-host, or set an API key.",
        code=f"{what}_not_allowed",
    )
