"""The routes, and what surrounds each request: its ticket, its errors in OpenAI's form, the count of its status.

The handlers are those of `transformers serve`. Its own application is left aside: it loads any model that a client
names, and unloads all, for whoever asks.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from jinja2 import TemplateError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specache_compile.errors import SpecacheError

from .generation import Generation, OneQueue, Ticket
from .metrics import Metrics
from .model import ServedModel
from .requests import Body, ChatBody, ChatCompletions, CompletionBody, Completions

# Bytes of a request's body: text of a million tokens, and more.
LARGEST_BODY = 16 << 20
# nginx's status for what nobody waited for.
CLIENT_LEFT = 499
# How the handlers begin the event that says why a stream has failed. Text within events has its quotes escaped.
STREAM_ERROR = 'data: {"error": "'


def application(served: ServedModel, generation: Generation, metrics: Metrics, names: Sequence[str] | None) -> FastAPI:
    """The server's routes. names: its own, where it listens for this machine alone; None: any. Requests to another name
    are refused, as a web page would send them that has its own name resolve to this machine."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(generation.stop)

    app = FastAPI(title="specache", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Tickets, metrics=metrics)
    if names is not None:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=names)
    queue = OneQueue(generation)
    chats, completions = ChatCompletions(served, queue), Completions(served, queue)
    name = str(served.force_model)
    began = int(time.time())

    async def answered(request: Request, body: Body, handler: Any) -> Any:
        if body.model not in (None, name):
            raise HTTPException(404, f"no model {body.model!r} here: this server has {name!r}")
        ticket: Ticket = request.state.ticket
        ticket.seed = body.seed
        generation.tickets[ticket.id] = ticket
        given = body.model_dump(exclude_none=True)
        response = await while_waited_for(request, handler.handle_request(given, ticket.id))
        if isinstance(response, StreamingResponse):
            response.body_iterator = with_errors(response.body_iterator)
        return response

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatBody) -> Any:
        if not getattr(processor, "chat_template", None):
            raise HTTPException(400, f"{name} has no chat template: ask /v1/completions")
        return await answered(request, body, chats)

    @app.post("/v1/completions")
    async def complete(request: Request, body: CompletionBody) -> Any:
        return await answered(request, body, completions)

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {
            "object": "list",
            "data": [{"id": name, "object": "model", "created": began, "owned_by": "specache"}],
        }

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    def tell() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    _, processor = served.one()
    app.add_exception_handler(StarletteHTTPException, refused)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(TemplateError, unfit)
    app.add_exception_handler(SpecacheError, failed)  # without a traceback: it says all
    app.add_exception_handler(Exception, failed)
    return app


async def while_waited_for(request: Request, work: Awaitable[Any]) -> Any:
    """What `work` returns, or a response to nobody as soon as the client has left."""
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


async def with_errors(events: AsyncIterable[Any]) -> AsyncIterator[Any]:
    """A stream's events, an error in the form that OpenAI's clients read."""
    async for event in events:
        before, begun, message = event.rpartition(STREAM_ERROR)
        if not begun:
            yield event
            continue
        told = json.loads(STREAM_ERROR.removeprefix("data: ") + message)["error"]
        yield f"{before}data: {json.dumps(described(500, told))}\n\n"


class Tickets:
    """ASGI middleware: a ticket for each request, which is over when its answer is, however that ends; and a bound for
    its body."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        ticket = Ticket()
        scope.setdefault("state", {})["ticket"] = ticket
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
        except Exception:  # answered outside of here
            status, ended = 500, True
            raise
        finally:
            ticket.left.set()
            if not ended or status == CLIENT_LEFT:
                self.metrics.left.inc()
            else:
                self.metrics.requests.labels(status).inc()


def described(status: int, message: str) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "code": status}}


async def refused(request: Request, exception: Any) -> JSONResponse:
    told = described(exception.status_code, str(exception.detail))
    return JSONResponse(told, exception.status_code, exception.headers)


async def malformed(request: Request, exception: Any) -> JSONResponse:
    """A body that is no JSON, or whose fields are not what they should be: each by its place."""
    faults = (f"{'.'.join(map(str, fault['loc'][1:])) or 'body'}: {fault['msg']}" for fault in exception.errors())
    return JSONResponse(described(400, "; ".join(faults)), 400)


async def unfit(request: Request, exception: Exception) -> JSONResponse:
    """Messages that the chat template does not take, in its words."""
    return JSONResponse(described(400, f"the chat template: {exception}"), 400)


async def failed(request: Request, exception: Exception) -> JSONResponse:
    return JSONResponse(described(500, str(exception) or type(exception).__name__), 500)
