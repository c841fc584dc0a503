"""The routes, and the handling of each request: its end, errors in OpenAI's format, and metrics."""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import time
from collections.abc import Awaitable, Sequence
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config, Server

from specache_compile.errors import SpecacheError

from .answer import Question
from .generation import Generation
from .metrics import Metrics
from .questions import ServedModel, chat, completion
from .replies import ChatReply, Reply, refusal
from .requests import Body, ChatBody, CompletionBody

log = logging.getLogger(__name__)
# Bytes of a request's body, enough for a text of a million tokens.
LARGEST_BODY = 16 << 20
# nginx's status for a client that has disconnected.
CLIENT_LEFT = 499
# Seconds that requests may take to end when the server stops.
STOPPING = 5
NO_KEY = "this server requires its API key. Send Authorization: Bearer KEY"


def application(
    served: ServedModel, generation: Generation, metrics: Metrics, names: Sequence[str] | None, key: str | None = None
) -> FastAPI:
    """The server's routes.

    key: the API key that requests to /v1 must send; None: none.

    names: host names that requests may use, if the server listens for this machine only; None: any. A web page whose
        own name resolves to this machine uses another name, and is rejected.
    """
    handlers: dict[Any, Any] = dict.fromkeys((StarletteHTTPException, SpecacheError, Exception), refused)
    app = FastAPI(openapi_url=None, exception_handlers={**handlers, RequestValidationError: malformed})
    app.add_middleware(Requests, metrics=metrics, key=key)
    if names is not None:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=names)
    name, began = served.name, int(time.time())
    its_name = {"id": name, "object": "model", "created": began, "owned_by": "specache"}

    def is_here(requested: str | None) -> None:
        if requested not in (None, name):
            raise HTTPException(404, f"model {requested!r} does not exist: this server has {name!r}")

    async def replied(request: Request, body: Body, question: Question, kind: type[Reply]) -> Any:
        if body.model_extra:
            log.info("ignored: %s", ", ".join(sorted(body.model_extra)))
        request.state.answer = answer = generation.begin(question)
        reply = kind(name, answer)
        if body.stream:
            usage = body.stream_options is not None and bool(body.stream_options.include_usage)
            return StreamingResponse(reply.events(usage), media_type="text/event-stream")
        return await while_waited_for(request, reply.whole())

    @app.post("/v1/chat/completions")
    async def chatted(request: Request, body: ChatBody) -> Any:
        is_here(body.model)
        return await replied(request, body, chat(served, body), ChatReply)

    @app.post("/v1/completions")
    async def completed(request: Request, body: CompletionBody) -> Any:
        is_here(body.model)
        return await replied(request, body, completion(served, body), Reply)

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [its_name]}

    @app.get("/v1/models/{requested:path}")
    def model(requested: str) -> dict[str, Any]:
        is_here(requested)
        return its_name

    @app.post("/load_model")
    def load_model() -> Response:
        """What `transformers chat` requires before its first request."""
        return Response('data: {"status": "ready", "cached": true}\n\n', media_type="text/event-stream")

    @app.api_route("/health", methods=["GET", "HEAD"])
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    def current_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return app


async def while_waited_for(request: Request, work: Awaitable[Any]) -> Any:
    """The result of `work`, or a response that is discarded once the client has left."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else Response(status_code=CLIENT_LEFT)
    finally:
        gone.cancel()
        task.cancel()


async def disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class StoppedInTime(Server):
    """A server that ends unfinished answers with an error STOPPING seconds after its stop. uvicorn would cancel their
    tasks, which ends a stream without an error message."""

    def __init__(self, config: Config, generation: Generation) -> None:
        super().__init__(config)
        self.generation = generation

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(STOPPING, self.generation.end_all)
        await super().shutdown(sockets)
        if not self.force_exit:
            await asyncio.to_thread(self.generation.stop)


class Requests:
    """ASGI middleware: requires the key under /v1, limits a request's body, ends its answer with it, and counts and
    logs it."""

    def __init__(self, app: ASGIApp, metrics: Metrics, key: str | None) -> None:
        self.app, self.metrics, self.key = app, metrics, key

    def is_allowed(self, scope: Scope) -> bool:
        if self.key is None or not scope.get("path", "").startswith("/v1/"):
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, f"Bearer {self.key}".encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self.is_allowed(scope):
            return await refusal(HTTPException(401, NO_KEY))(scope, receive, send)
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        state, came = scope.setdefault("state", {}), time.perf_counter()
        status, received, ended = 0, 0, False

        async def bounded() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > LARGEST_BODY:
                raise HTTPException(413, f"the request's body is longer than {LARGEST_BODY:,} bytes")
            return message

        async def watched(message: Message) -> None:
            nonlocal status, ended
            status = message.get("status", status)
            await send(message)
            ended = ended or (message["type"] == "http.response.body" and not message.get("more_body"))

        try:
            await self.app(scope, bounded, watched)
        except Exception:  # an outer handler responds
            status, ended = 500, True
            raise
        finally:
            if (answer := state.get("answer")) is not None:
                answer.left.set()
            if not ended or status == CLIENT_LEFT:
                status = CLIENT_LEFT
                self.metrics.left.inc()
            else:
                self.metrics.requests.labels(status).inc()
            tokens, seconds = 0 if answer is None else answer.generated, time.perf_counter() - came
            log.info("%s %s %s %.2f s, %s tokens", scope["method"], scope["path"], status, seconds, tokens)


async def refused(request: Request, exception: Exception) -> JSONResponse:
    return refusal(exception)


async def malformed(request: Request, exception: Any) -> JSONResponse:
    """The error for a body that is not JSON or has wrong fields, each with its place."""
    faults = (f"{'.'.join(map(str, fault['loc'][1:])) or 'body'}: {fault['msg']}" for fault in exception.errors())
    return refusal(HTTPException(400, "; ".join(faults)))
