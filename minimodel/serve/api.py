"""The HTTP API: OpenAI's routes, so that any client of theirs is a client of ours.

    POST /v1/completions          a text to go on with
    POST /v1/chat/completions     a conversation
    GET  /v1/models               the one model there is
    GET  /health, /metrics        how the server is; these need no key

A handler reads and checks the request, submits a job, and passes on what the job's inbox
brings, as one JSON object or as a stream of server-sent events. Until the first token is there,
an error is a status of its own; later, in a stream, it is an event. If the client leaves, at any
moment, the job is closed, and nothing more is computed for it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from .errors import ApiError, ClientLeftError, bad_request
from .job import Job, News
from .messages import Body, ChatBody, ChatReply, CompletionBody, Reply, event, parse
from .service import Service
from .tenants import Tenant, Tenants

MAX_BODY_BYTES = 1 << 20


@dataclass(frozen=True)
class Site:
    """What the routes need to know: whom they ask, the model's name, who may come in."""

    service: Service
    model: str = "toy"
    tenants: Tenants = field(default_factory=Tenants)
    max_body_bytes: int = MAX_BODY_BYTES

    def card(self) -> dict:
        """The model as the list of models has it."""
        return {"id": self.model, "object": "model", "created": 0, "owned_by": "second-send"}


async def site_of(request: Request) -> Site:
    return request.app.state.site


async def caller(request: Request) -> Tenant:
    return request.app.state.site.tenants.of(request.headers.get("authorization"))


At = Annotated[Site, Depends(site_of)]
Caller = Annotated[Tenant, Depends(caller)]
routes = APIRouter()


# --- routes ----------------------------------------------------------------------------------


@routes.post("/v1/completions")
async def completions(request: Request, site: At, tenant: Caller) -> Response:
    return await answer(request, site, tenant, CompletionBody, Reply)


@routes.post("/v1/chat/completions")
async def chat_completions(request: Request, site: At, tenant: Caller) -> Response:
    return await answer(request, site, tenant, ChatBody, ChatReply)


@routes.get("/v1/models")
async def models(site: At, tenant: Caller) -> dict:
    return {"object": "list", "data": [site.card()]}


@routes.get("/v1/models/{name}")
async def model(name: str, site: At, tenant: Caller) -> dict:
    require_model(site, name)
    return site.card()


@routes.get("/health")
async def health(site: At) -> JSONResponse:
    serves, state = site.service.health()
    return JSONResponse(state, 200 if serves else 503)


@routes.get("/metrics")
async def metrics(site: At) -> PlainTextResponse:
    service = site.service
    page = await service.bridge.result_of(partial(service.metrics, dict(service.refused)))
    return PlainTextResponse(page, media_type="text/plain; version=0.0.4")


# --- a request's way -------------------------------------------------------------------------


async def answer(request: Request, site: Site, tenant: Tenant, kind: type[Body],
                 reply_kind: type[Reply]) -> Response:
    """Read a request, have it served, and answer, whole or as a stream.

    Whatever happens, the job is closed in the end: here, or by the stream that takes it over.
    """
    body = parse(kind, await read(request, site.max_body_bytes))
    require_model(site, body.model)
    with_usage = body.stream_options is not None and body.stream_options.include_usage
    reply = reply_kind(site.model, site.service.fingerprint[:12], with_usage)
    with ExitStack() as until_closed:
        job = site.service.submit(job_of(body, tenant, site.service.context))
        until_closed.callback(site.service.close, job)
        async with noticing_who_leaves(request, job):
            first = await job.inbox.get()
            headers = {"x-replica": job.replica, "cache-control": "no-store"}
            if not body.stream:
                return JSONResponse(await complete(first, job, reply), headers=headers)
        return EventStream(events(first, job, reply), headers, until_closed.pop_all())


async def read(request: Request, limit: int) -> bytes:
    """The request's body. What is too much is read, and thrown away, up to sixteen times the
    limit: a client that is still sending does not hear us."""
    kept, num_bytes = bytearray(), 0
    try:
        async for chunk in request.stream():
            num_bytes += len(chunk)
            if num_bytes <= limit:
                kept += chunk
            elif num_bytes > 16 * limit:
                break
    except ClientDisconnect:
        raise ClientLeftError from None
    if num_bytes > limit:
        raise ApiError(413, f"a body of {num_bytes} bytes or more is over the limit of {limit}: "
                       "shorten the prompt", "body_too_large")
    return bytes(kept)


def require_model(site: Site, name: str) -> None:
    if name != site.model:
        raise ApiError(404, f"model={name!r} is not here: this server has {site.model!r}",
                       "model_not_found", "model")


def job_of(body: Body, tenant: Tenant, context: int) -> Job:
    """A job from a request. Raises ApiError if it is too long for the model."""
    tokens = body.tokens()
    sampling = body.sampling(room=context - len(tokens))
    if len(tokens) + sampling.max_tokens > context:
        raise bad_request(
            f"{len(tokens)} tokens of prompt and {sampling.max_tokens} of answer go beyond the "
            f"context of {context}: shorten the prompt, or lower max_tokens",
            code="context_length_exceeded")
    stops = [stop.encode() for stop in body.stop]
    return Job(tokens, sampling, stops, body.n, tenant)


@asynccontextmanager
async def noticing_who_leaves(request: Request, job: Job) -> AsyncIterator[None]:
    """In here, it comes as news to the job's inbox if the client leaves."""
    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        job.inbox.put(ClientLeftError())
    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()


# --- answers ---------------------------------------------------------------------------------


async def all_news(first: News, job: Job) -> AsyncIterator[News]:
    news = first
    yield news
    while news.usage is None:
        news = await job.inbox.get()
        yield news


async def complete(first: News, job: Job, reply: Reply) -> dict:
    """The whole answer in one object."""
    texts, reasons = [""] * job.num_answers, [""] * job.num_answers
    async for news in all_news(first, job):
        for piece in news.pieces:
            texts[piece.index] += piece.text
            reasons[piece.index] = piece.reason
    return reply.complete(texts, reasons, news.usage)


async def events(first: News, job: Job, reply: Reply) -> AsyncIterator[str]:
    """The answer as server-sent events, each as soon as its text is there."""
    try:
        async for news in all_news(first, job):
            for piece in news.pieces:
                if piece.text or piece.reason:
                    yield reply.piece(piece.index, piece.text, piece.reason)
        yield reply.end(news.usage)
    except ApiError as error:
        yield event(error.body())
    except ClientLeftError:         # noticed just before this began
        return


class EventStream(StreamingResponse):
    """Closes the job when the stream ends: when all is said, or nobody listens."""

    media_type = "text/event-stream"

    def __init__(self, content: AsyncIterator[str], headers: dict[str, str], job: ExitStack):
        super().__init__(content, headers=headers)
        self.job = job

    async def __call__(self, *connection: object) -> None:
        with self.job:
            await super().__call__(*connection)


# --- the application -------------------------------------------------------------------------


def make_app(site: Site) -> FastAPI:
    """The ASGI application. The service must be running when requests come."""
    app = FastAPI(openapi_url=None)
    app.state.site = site
    app.include_router(routes)
    app.add_exception_handler(ApiError, tell)
    app.add_exception_handler(HTTPException, tell_of_http)
    app.add_exception_handler(ClientLeftError, tell_nobody)
    app.add_exception_handler(Exception, tell_of_our_mistake)
    return app


async def tell(request: Request, error: ApiError) -> Response:
    request.app.state.site.service.refused[error.code] += 1
    return JSONResponse(error.body(), error.status, error.headers)


async def tell_of_http(request: Request, error: HTTPException) -> Response:
    """No such path, or a method that it does not have."""
    message = f"{request.method} {request.url.path}: {error.detail}"
    return await tell(request, ApiError(error.status_code, message, "no_such_route",
                                        headers=error.headers))


async def tell_nobody(request: Request, error: ClientLeftError) -> Response:
    return Response(status_code=499)            # as nginx notes it


async def tell_of_our_mistake(request: Request, error: Exception) -> Response:
    return await tell(request, ApiError(500, "the server made a mistake; its log says more",
                                        "internal_error", kind="server_error"))
