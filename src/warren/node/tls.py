"""TLS as the node sees it: processes that end it (`tls_relay.py`), and clients that come back from them with a plain socket.

A relay that dies takes its own clients with it and nothing else; a new one takes its place at once. Clients that come
meanwhile wait for it, as long as they may take to log in.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

from warren.errors import WarrenError
from warren.node.config import Tls
from warren.node.tls_relay import context_for
from warren.vhost.control import ControlSocket, Message

log = logging.getLogger("warren.node")

_START_SECONDS = 60.0
_STOP_SECONDS = 12.0  # the relay gives what is on its way a little less
_SILENT_SECONDS = 30.0  # over the time of a client's: every relay answers before
_RESTART_SECONDS = 1.0  # between two starts, when a relay dies as soon as it lives


@dataclass(frozen=True, slots=True)
class Secured:
    """What the TLS handshake said of a client."""

    user: str | None  # the CN of its certificate, that somebody we trust signed
    server_name: str | None  # whom it wanted to talk to (SNI)
    protocol: str | None  # "TLSv1.3"
    cipher: str | None


class TlsRelay:
    """One process, started again whenever it ends."""

    def __init__(self, files: dict[str, Any], connection_max: int) -> None:
        self._files = files
        self._connection_max = connection_max
        self._process: asyncio.subprocess.Process | None = None
        self._control: ControlSocket | None = None
        self._waiting: dict[int, asyncio.Future[tuple[socket.socket, Secured]]] = {}
        self._numbers = itertools.count(1)
        self._why = ""  # it does not start
        self._stopping = False
        self._lives = 0  # that have ended
        self.up = asyncio.Event()
        self._life: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def start(self) -> None:
        """Returns when it takes clients. Raises WarrenError when it does not."""
        self._life = asyncio.ensure_future(self._live())
        up = asyncio.ensure_future(self.up.wait())
        await asyncio.wait((up, self._life), timeout=_START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        if not self.up.is_set():
            raise WarrenError(f"the TLS relay does not start: {self._why or 'the log says why'}")

    async def _live(self) -> None:
        while True:
            started = time.monotonic()
            await self._start()
            assert self._process is not None
            status = await self._process.wait()
            was_up = self.up.is_set()
            self._forget()
            self._lives += 1
            if self._stopping or (self._lives == 1 and not was_up):
                return
            log.error(
                "TLS relay (pid %s) ended with %s, and its clients with it; a new one is started. %s",
                self._process.pid,
                status,
                self._why,
            )
            if not was_up or time.monotonic() - started < _RESTART_SECONDS:
                await asyncio.sleep(_RESTART_SECONDS)

    async def _start(self) -> None:
        self._why = ""
        ours, theirs = socket.socketpair()
        self._control = ControlSocket(ours, self._received, lambda: None)
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "warren.node.tls_relay",
                str(theirs.fileno()),
                json.dumps(self._files),
                str(self._connection_max),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )

    def _forget(self) -> None:
        self.up.clear()
        if self._control is not None:
            self._control.close()
            self._control = None
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(ConnectionError("its TLS relay ended"))

    async def secure(self, sock: socket.socket, seconds: float) -> tuple[socket.socket, Secured]:
        """Do the TLS handshake: the plain end. The socket is the relay's from now on. Raises ConnectionError."""
        await self.up.wait()
        assert self._control is not None
        loop = asyncio.get_running_loop()
        number = next(self._numbers)
        future: asyncio.Future[tuple[socket.socket, Secured]] = loop.create_future()
        self._waiting[number] = future
        self._control.send("client", sock.detach(), id=number, seconds=seconds)
        loop.call_later(seconds + _SILENT_SECONDS, self._overdue, number)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result()[0].close()  # it came just when nobody waited any more
            raise

    def _overdue(self, number: int) -> None:
        if number in self._waiting and self._process is not None and self._process.returncode is None:
            log.error("TLS relay (pid %s) does not answer, and is killed", self.pid)
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def _received(self, message: Message, descriptor: int | None) -> None:
        what = message["what"]
        if what == "up":
            self.up.set()
        elif what == "failed":
            self._why = message["why"]
        elif what == "refused":
            future = self._waiting.pop(message["id"], None)
            if future is not None and not future.done():
                future.set_exception(ConnectionError(message["why"]))
        elif what == "plain":
            future = self._waiting.pop(message["id"], None)
            if descriptor is None:
                if future is not None and not future.done():
                    future.set_exception(ConnectionError("no open file is left for it; raise ulimit -Hn"))
                return
            sock = socket.socket(fileno=descriptor)
            if future is None or future.done():
                sock.close()
                return
            sock.setblocking(False)
            told = Secured(message["user"], message["server_name"], message["protocol"], message["cipher"])
            future.set_result((sock, told))

    async def stop(self) -> None:
        """Let what is on its way go out, then end it. Requires: the vhosts have closed their ends."""
        self._stopping = True
        if self._control is not None:
            self._control.close()
        if self._life is None:
            return
        await asyncio.wait((self._life,), timeout=_STOP_SECONDS)
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        self._life.cancel()
        await asyncio.gather(self._life, return_exceptions=True)
        self._forget()


class TlsRelays:
    """All of a node: clients go to one after the other."""

    def __init__(self, tls: Tls, connection_max: int) -> None:
        files: dict[str, Any] = {
            "certfile": str(tls.certfile),
            "keyfile": str(tls.keyfile),
            "cafile": str(tls.cafile) if tls.cafile is not None else None,
            "verify": tls.verify,
        }
        context_for(**files)  # what is wrong with the files is told here, before anything is started
        self._relays = [TlsRelay(files, connection_max) for _ in range(tls.relays)]
        self._turn = itertools.cycle(self._relays)

    @property
    def pids(self) -> list[int]:
        return [relay.pid for relay in self._relays if relay.up.is_set()]

    async def start(self) -> None:
        await asyncio.gather(*(relay.start() for relay in self._relays))

    async def secure(self, sock: socket.socket, seconds: float) -> tuple[socket.socket, Secured]:
        """See `TlsRelay.secure`; one that is up is preferred."""
        relay = next(self._turn)
        if not relay.up.is_set():
            relay = next((one for one in self._relays if one.up.is_set()), relay)
        return await relay.secure(sock, seconds)

    async def stop(self) -> None:
        await asyncio.gather(*(relay.stop() for relay in self._relays))
