"""Addresses that a server listens on, and the hosts and origins whose requests it answers.

A web page whose name is bound to 127.0.0.1 after it was loaded (DNS rebinding, CVE-2024-28224) is of the same
origin as a server there. Its requests name the page's host, so a server without a key answers those of its
own names only.
"""

import ipaddress
import re
import socket
from collections.abc import Mapping
from typing import Any

from eagle_kit.config.server import ServerConfig
from eagle_kit.core.errors import cut
from eagle_kit.server.api.errors import ApiError

AUTHORITY = re.compile(rb"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]*)?")
"""Host and port, RFC 3986, section 3.2, without a user and without escapes."""


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
    """Lower-case host of a URL without a path, as browsers send it; empty where it is no such URL."""
    found = AUTHORITY.fullmatch(url.partition(b"//")[2])
    if found is None:
        return ""
    return found["host"].decode("ascii").strip("[]").lower().rstrip(".")


def _is_allowed(name: str, allowed: frozenset[str]) -> bool:
    if name in allowed or name == "localhost" or name.endswith(".localhost"):
        return name != ""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _refusal(what: str, given: bytes) -> ApiError:
    return ApiError(
        403,
        f"The {what} {cut(given.decode('latin-1'))!r} is not one of this server's names. Allow its name with "
        "--allowed-host, or set an API key.",
        code=f"{what}_not_allowed",
    )
