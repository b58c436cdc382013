"""A broker in a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import uvloop

from warren.node.broker import Broker
from warren.node.config import Config

if TYPE_CHECKING:
    from warren.node.http import HttpServer

T = TypeVar("T")
_START_SECONDS = 30


class RunningBroker:
    """A broker that runs. `url` is for any AMQP client."""

    def __init__(self, config: Config, *, http: bool = False) -> None:
        self._with_http = http
        self.broker = Broker(config)
        self._loop = uvloop.new_event_loop()
        self._stopping: asyncio.Event | None = None
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self.http: HttpServer | None = None
        self._thread = threading.Thread(target=self._run, name="warren broker", daemon=True)

    @property
    def host(self) -> str:
        return self.broker.config.host

    @property
    def port(self) -> int:
        return self.broker.amqp_port

    @property
    def url(self) -> str:
        """amqp://guest:guest@127.0.0.1:40123/%2F"""
        return self.vhost_url("/")

    def vhost_url(self, vhost: str, user: str = "guest", password: str = "guest") -> str:
        return f"amqp://{quote(user)}:{quote(password)}@{self.host}:{self.port}/{quote(vhost, safe='')}"

    @property
    def http_url(self) -> str:
        """http://127.0.0.1:40124, for Spark's option url; only with `running_broker(http=True)`."""
        if self.http is None:
            raise RuntimeError("this broker has no HTTP; ask for it: running_broker(http=True)")
        return self.http.url

    def call(self, work: Callable[[], T | Awaitable[T]]) -> T:
        """Do something on the broker's loop, and return its result: for looking into it."""

        async def run() -> T:
            result = work()
            return await result if isinstance(result, Awaitable) else result

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(_START_SECONDS)

    def queue_info(self, queue: str, vhost: str = "/") -> dict[str, Any]:
        return self.call(lambda: self.broker.vhosts[vhost].queues[queue].info())

    def queue_names(self, vhost: str = "/") -> list[str]:
        return self.call(lambda: list(self.broker.vhosts[vhost].queues))

    def peers(self, vhost: str = "/") -> dict[str, int]:
        """The addresses of all clients, and their heartbeats in seconds."""
        return self.call(lambda: {one.peer: one.heartbeat for one in self.broker.vhosts[vhost].connections})

    def start(self) -> None:
        self._thread.start()
        self._started.wait(_START_SECONDS)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        if self._thread.is_alive() and self._stopping is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._failure = error
        finally:
            self._started.set()
            self._loop.close()

    async def _serve(self) -> None:
        self._stopping = asyncio.Event()
        await self.broker.start()
        if self._with_http:
            from warren.node.http import HttpServer  # takes longer than a broker does

            self.http = HttpServer(self.broker)
            await self.http.start()
            self.http.announce()
        self._started.set()
        await self._stopping.wait()
        if self.http is not None:
            await self.http.stop()
        await self.broker.stop()


@contextlib.contextmanager
def running_broker(data_dir: str | None = None, *, http: bool = False, **flags: Any) -> Iterator[RunningBroker]:
    """A broker for the `with` block. Without a directory it keeps everything in a temporary one; `flags` are keys of the
    configuration. With `http` it also answers Spark. Confirms do not wait for a disk unless durability="fsync"."""
    with contextlib.ExitStack() as stack:
        if data_dir is None:
            data_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="warren-"))
        settings = {"durability": "os", "amqp_port": 0, "http_port": 0, "inline": True, **flags}
        running = RunningBroker(Config.load({"data_dir": data_dir, **settings}, environ={}), http=http)
        running.start()
        stack.callback(running.stop)
        yield running
