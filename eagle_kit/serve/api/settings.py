"""How a server is run."""

from dataclasses import dataclass

from eagle_kit.core.errors import UserError


@dataclass(frozen=True)
class ServerSettings:
    """Limits and names of one server.

    Attributes:
        model_name: what ``/v1/models`` lists and requests may name.
        api_key: what clients must send as bearer token; None lets everybody in.
        max_queued: requests that may wait besides those that run; more are answered 503.
        max_parallel_per_client: choices one client may have in the works; more are answered 429. None: no
            limit.
        max_requests_per_minute: of one client; more are answered 429. None: no limit.
        max_body_bytes: largest body of a request; larger ones are answered 413.
        grace_period_s: seconds that running requests get to finish when the server is stopped.
    """

    model_name: str
    api_key: str | None = None
    max_queued: int = 256
    max_parallel_per_client: int | None = None
    max_requests_per_minute: int | None = None
    max_body_bytes: int = 8 * 1024 * 1024
    grace_period_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("max_parallel_per_client", "max_requests_per_minute", "max_body_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}.", "Give at least 1, or leave it out.")
        for name in ("max_queued", "grace_period_s"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} is {getattr(self, name)}.", "Give 0 or more.")
        if not self.model_name:
            raise UserError("The served model's name is empty.", "Give some text.")
        if self.api_key is not None and (not self.api_key or not self.api_key.isascii()):
            raise UserError("The API key is empty or not ASCII.", "Give letters, digits and signs, or none.")
