"""Names of servers in tables: those given, else host and port."""

from collections.abc import Sequence
from urllib.parse import urlsplit

from eagle_kit.core.errors import UserError
from eagle_kit.eval.counters import root_of
from eagle_kit.eval.servers.measured_server import MeasuredServer


def name_servers(
    base_urls: Sequence[str], given: Sequence[str] | None = None, key: str = ""
) -> list[MeasuredServer]:
    """A server for each URL, named by its host and port unless names are ``given``.

    Args:
        key: sent to each of them.

    Raises:
        UserError: what is no URL, two servers are the same, or there are not as many names as servers.
    """
    urls = [root_of(url) for url in base_urls]
    if len(set(urls)) < len(urls):
        raise UserError("A server was given twice.", "Give every --base-url once.")
    names = list(given) if given is not None else [urlsplit(url).netloc for url in urls]
    if len(names) != len(urls) or len(set(names)) < len(names):
        raise UserError(
            f"{len(names)} names were given for {len(urls)} servers.",
            "Give each draft and then each server a name of its own.",
        )
    return [MeasuredServer(name, url, key) for name, url in zip(names, urls, strict=True)]
