"""The FastAPI application: routes, their documentation, errors, and the engine's life."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from eagle_kit import __version__
from eagle_kit.config.server import ServerConfig
from eagle_kit.core.errors import UserError, cut
from eagle_kit.ops.cpu.memory import release_free_memory
from eagle_kit.server.api.errors import ApiError
from eagle_kit.server.api.hosts import allowed_hosts
from eagle_kit.server.api.middleware import RequestContext
from eagle_kit.server.api.routes_generate import add_generation_routes
from eagle_kit.server.api.routes_operate import add_operation_routes
from eagle_kit.server.api.routes_tokens import add_token_routes
from eagle_kit.server.api.service import Service
from eagle_kit.server.stats_log import log_stats

if TYPE_CHECKING:
    from fastapi import FastAPI

    from eagle_kit.engine.engine import Engine
    from eagle_kit.engine.llm import LLM

TRIM_EVERY_S = 10.0
NEEDED = ("fastapi", "uvicorn", "prometheus_client")


def check_packages() -> None:
    """Raise UserError that names the first missing package."""
    from importlib.util import find_spec

    for name in NEEDED:
        if find_spec(name) is None:
            raise UserError(
                f"The package {name} is not installed.", "Install it with pip install 'eagle_kit[serve]'."
            )


def create_app(llm: "LLM", engine: "Engine", config: ServerConfig) -> "FastAPI":
    """Make an application that serves one model.

    The engine's thread runs from the application's start to its end; the routes use ``app.state.service``.

    Args:
        llm: tokenizer and templates.
        engine: made by ``llm.engine(shape)``; from now on the application's alone.
        config: name and limits.
    """
    check_packages()
    from fastapi import FastAPI
    from starlette.exceptions import HTTPException

    service = Service(llm, engine, config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        tasks = [asyncio.create_task(_return_memory())]
        if config.log_stats_interval_s > 0:
            tasks.append(asyncio.create_task(log_stats(service.engine, config.log_stats_interval_s)))
        yield
        for task in tasks:
            task.cancel()
        await service.engine.shutdown()
        service.close()

    app = FastAPI(
        title="eagle_kit",
        version=__version__,
        lifespan=lifespan,
        redirect_slashes=False,
        # Their pages would run scripts of other hosts in this server's origin.
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    add_generation_routes(app, service)
    add_token_routes(app, service)
    add_operation_routes(app, service)
    # Everything is raised up to the outermost layer, which writes errors in one place.
    app.add_exception_handler(HTTPException, _raise_in_our_shape)
    app.add_middleware(
        RequestContext,
        draining=service.engine.draining,
        count=service.count,
        api_key=config.api_key,
        allowed_hosts=allowed_hosts(config),
    )
    return app


async def _return_memory() -> None:
    """Return freed memory to the system from time to time: the engine keeps its own blocks, and with them
    those of every large body and grammar that there ever was."""
    while True:
        await asyncio.sleep(TRIM_EVERY_S)
        await asyncio.to_thread(release_free_memory)


async def _raise_in_our_shape(request: Any, error: Any) -> Any:
    """Convert errors of the framework: unknown paths and methods."""
    # A URL of the framework would be made with what the client gives as its host.
    path = request.scope["path"]
    message = f"{cut(request.method)} {cut(path)}: {error.detail}."
    if error.status_code == 404:
        paths = [route.path for route in request.app.routes if route.include_in_schema]
        message += f" Use one of {', '.join(dict.fromkeys(paths))}."
    raise ApiError(error.status_code, message, headers=error.headers)
