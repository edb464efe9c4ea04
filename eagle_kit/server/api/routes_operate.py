"""Routes for operators: models, health, metrics, abort, profiles."""

import asyncio
from typing import TYPE_CHECKING, Any

from eagle_kit.server.api.body import body_of, optional_body_of
from eagle_kit.server.api.documented import body_schema, error_responses
from eagle_kit.server.api.protocol import AbortRequest, ProfileRequest
from eagle_kit.server.api.responses import Aborted, HealthReport, ModelCard, ModelList, ProfileReport
from eagle_kit.server.api.service import Service
from eagle_kit.server.response_stream import EngineFailed, Overloaded

if TYPE_CHECKING:
    from fastapi import FastAPI


def add_operation_routes(app: "FastAPI", service: Service) -> None:
    """`/v1/models`, `/health`, `/health/ready`, `/health/live`, `/health_generate`, `/metrics`, `/abort`,
    `/start_profile`, `/stop_profile`."""
    from fastapi import Depends, Request, Response

    model = ModelCard(
        id=service.config.model_name, created=service.started_at, max_model_len=service.llm.max_context
    )
    ill: dict[int | str, dict[str, Any]] = {
        503: {"model": HealthReport, "description": "It cannot serve now."}
    }

    @app.get("/v1/models", responses=error_responses(401, 403, 429))
    async def list_models() -> ModelList:
        """The one model that is served."""
        return ModelList(data=[model])

    @app.get("/v1/models/{name:path}", responses=error_responses(401, 403, 404, 429))
    async def retrieve_model(name: str) -> ModelCard:
        """The model by its name."""
        service.check_model(name)
        return model

    @app.get("/health", responses=ill)
    @app.get("/health/ready", responses=ill)
    async def ready(response: Response) -> HealthReport:
        """Readiness: 503 as soon as new requests are refused; needs no key."""
        status = service.engine.health
        response.status_code = 200 if status == "ok" else 503
        return HealthReport(status=status)

    @app.get("/health/live", responses=ill)
    async def live(response: Response) -> HealthReport:
        """Liveness: 503 once only a restart helps, not while running responses finish; needs no key."""
        status = service.engine.health
        response.status_code = 503 if status == "unhealthy" else 200
        return HealthReport(status=status)

    @app.get("/health_generate", responses={**ill, **error_responses(401, 403, 429)})
    async def health_generate(response: Response) -> HealthReport:
        """Health, tested by one generated token within the last second or from now on."""
        try:
            await service.probe()
            return HealthReport(status="ok")
        except (Overloaded, TimeoutError):
            response.status_code = 503
            return HealthReport(status="draining" if service.engine.health == "draining" else "busy")
        except EngineFailed:
            response.status_code = 503
            return HealthReport(status="unhealthy")

    @app.get("/metrics", responses={200: {"content": {"text/plain": {}}}}, response_class=Response)
    async def metrics() -> Response:
        """Prometheus text; needs no key."""
        from prometheus_client import CONTENT_TYPE_LATEST

        # In another thread: the driver of a GPU that hangs may not answer, and the event loop must.
        text = await asyncio.to_thread(service.metrics.text)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    @app.post(
        "/abort",
        responses=error_responses(400, 401, 403, 408, 413, 415, 429, 503),
        openapi_extra=body_schema(app, AbortRequest),
    )
    async def abort(
        http: Request,
        body: AbortRequest = Depends(body_of(AbortRequest, service)),  # noqa: B008
    ) -> Aborted:
        """End the client's responses early, or any by an id that the server made; their readers get what
        there is, with the finish reason `abort`."""
        return Aborted(num_aborted=service.abort(http, body.request_id))

    @app.post(
        "/start_profile",
        responses=error_responses(400, 401, 403, 404, 408, 409, 413, 415, 429, 500, 503),
        openapi_extra=body_schema(app, ProfileRequest, is_required=False),
    )
    async def start_profile(
        body: ProfileRequest = Depends(optional_body_of(ProfileRequest, service)),  # noqa: B008
    ) -> ProfileReport:
        """Profile the next steps, where the server has a `--profile-dir`. The body may be left out."""
        return await service.profiles.start(body)

    @app.post("/stop_profile", responses=error_responses(401, 403, 404, 409, 429, 500))
    async def stop_profile() -> ProfileReport:
        """End the profile, if it has not ended by itself, and wait for its file; takes no body."""
        return await service.profiles.stop()
