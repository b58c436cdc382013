"""HTTP: whether the node lives, whether it is ready, how it is in JSON, and a page that shows it to people.

| path | answers |
|---|---|
| `/` | one page of HTML that asks `/api/status` every second; it loads nothing else, from nowhere |
| `/api/status` | `Status` as JSON; 503 when it cannot be had |
| `/health/live` | 200 as long as the event loop turns |
| `/health/ready` | 200 when the node takes clients, in all vhosts that were not stopped; else 503 and what is down |

Rules:

1. Names come from clients, so each is hostile. The server puts none into HTML; the page puts them into text only; and the
   Content-Security-Policy allows the page's own script, by its hash, and no other.
2. The server shares its loop with the broker. One answer of `status` serves everybody who asks within half a second, so
   ten open pages cost as much as one.
3. Nobody is asked who he is, and nothing can be changed here. The default address is the machine's own.
4. Signals belong to the node: the HTTP server neither catches them nor ends the process.
5. Clients that keep us waiting are ended, see `warren.http_server`: they share descriptors with the broker's.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import inspect
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NotRequired, TypedDict

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from warren.errors import WarrenError
from warren.http_server import HttpServer, http_config
from warren.node.status_html import PAGE, SCRIPT, STYLE

logger = logging.getLogger(__name__)

_FRESH_SECONDS = 0.5
_STOP_SECONDS = 2  # that answers under way get when the server stops


class QueueStatus(TypedDict):
    """One queue. Rates are messages a second; q1 to q4 and delta are counts, see `storage/variable_queue.py`."""

    name: str
    durable: bool
    messages_ready: int
    messages_unacknowledged: int
    consumers: int
    publish_rate: float
    deliver_rate: float
    ack_rate: float
    q1: int
    q2: int
    delta: int
    q3: int
    q4: int
    ram_bytes: int
    state: NotRequired[str]  # shown beside the name, unless it is "running"


class VhostStatus(TypedDict):
    """One vhost; `state` is "running", or what it is instead: "starting", "restarting", "down", "stopped"."""

    name: str
    state: str
    pid: int
    connections: int
    channels: int
    memory_bytes: int
    queues: list[QueueStatus]


class NodeStatus(TypedDict):
    """The node's own process, and what holds for all."""

    pid: int
    uptime: float  # seconds
    memory_bytes: int  # of all processes of the node
    durability: str
    version: NotRequired[str]
    alarms: NotRequired[list[str]]  # a sentence each; shown on top


class Status(TypedDict):
    """What `/api/status` answers."""

    node: NodeStatus
    vhosts: list[VhostStatus]


class ListenError(WarrenError):
    """The address cannot be listened on."""


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


_HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {_hash(SCRIPT)}; style-src {_hash(STYLE)}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class _Server(HttpServer):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # rule 4


class StatusServer:
    """The HTTP server, inside of the running loop.

    `status` returns a `Status`, or something to await that does; `ready` says whether the node takes clients, `down` which
    vhosts keep it from that, and what they are.

    >>> async def main():
    ...     server = StatusServer("127.0.0.1", 0, status=lambda: {"node": {}, "vhosts": []}, ready=lambda: True)
    ...     await server.start()
    ...     assert server.port > 0
    ...     await server.stop()
    >>> asyncio.run(main())
    """

    def __init__(
        self,
        host: str,
        port: int,
        status: Callable[[], Status | Awaitable[Status]],
        ready: Callable[[], bool],
        *,
        down: Callable[[], dict[str, str]] = dict,
        routes: Sequence[Route] = (),
        certificate: tuple[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.host = host
        self.port = port  # 0 until `start` has chosen one
        self._status = status
        self._ready = ready
        self._down = down
        self._clock = clock
        self._routes = routes  # of others on the same port
        self._certificate = certificate  # certificate and key, for https
        self._answer: Response | None = None
        self._answered_at = 0.0
        self._asking: asyncio.Lock = asyncio.Lock()
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen. Raises ListenError."""
        assert self._task is None, "started twice"
        listener = _listen(self.host, self.port)
        self.port = listener.getsockname()[1]
        config = http_config(self._application(), self._certificate, timeout_graceful_shutdown=_STOP_SECONDS)
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve([listener]), name="warren-status-page")
        listening = asyncio.create_task(self._server.listening.wait())
        await asyncio.wait({self._task, listening}, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            listening.cancel()
            listener.close()
            self._task.result()
            raise ListenError(f"the HTTP server on {self.host}:{self.port} ended as it started; the log says why")

    async def stop(self) -> None:
        """Answer what was asked, then close. Not started, or stopped before: does nothing."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await self._task
            self._server = self._task = None

    def _application(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/", self._page),
                Route("/api/status", self._api_status),
                Route("/health/live", self._live),
                Route("/health/ready", self._is_ready),
                *self._routes,
            ]
        )

    async def _page(self, request: Request) -> Response:
        return HTMLResponse(PAGE, headers=_HEADERS)

    async def _live(self, request: Request) -> Response:
        return JSONResponse({"status": "live"}, headers=_HEADERS)

    async def _is_ready(self, request: Request) -> Response:
        if self._ready():
            return JSONResponse({"status": "ready"}, headers=_HEADERS)
        down = self._down()
        answer = {"status": "vhosts are down", "vhosts": down} if down else {"status": "starting"}
        return JSONResponse(answer, 503, _HEADERS)

    async def _api_status(self, request: Request) -> Response:
        # Those who ask meanwhile wait here and get the same answer.
        async with self._asking:
            if self._answer is None or self._clock() - self._answered_at >= _FRESH_SECONDS:
                self._answer = await self._ask()
                self._answered_at = self._clock()
            return self._answer

    async def _ask(self) -> Response:
        try:
            status = self._status()
            if inspect.isawaitable(status):
                status = await status
            return JSONResponse(status, headers=_HEADERS)
        except Exception:
            logger.exception("the status cannot be had")
            return JSONResponse({"error": "the status cannot be had; the log says why"}, 503, _HEADERS)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server((str(address[0]), port), family=family, backlog=128)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ListenError(
            f"cannot listen for HTTP on {host}:{port}: {reason}; choose another host or http_port, or stop who has it"
        ) from None
    listener.setblocking(False)
    return listener
