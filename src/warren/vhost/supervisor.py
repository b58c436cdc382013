"""Starts, watches and restarts the processes of vhosts.

A process that dies is started again, through recovery; its clients reconnect, those of other vhosts do not notice. One
that dies too often (`vhost_max_restarts` in `vhost_restart_period` seconds) stays down, or takes the node with it:
`vhost_restart_strategy`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from warren.vhost.control import ControlSocket, Message
from warren.vhost.zygote import request

log = logging.getLogger("warren.node")

STARTING, RUNNING, RESTARTING, DOWN, STOPPED = "starting", "running", "restarting", "down", "stopped"
_LENGTH = struct.Struct(">I")
_START_SECONDS = 600.0  # a long recovery is no failure
_STOP_SECONDS = 600.0


class VhostProcess:
    """One process, and the vhosts in it."""

    def __init__(self, supervisor: Supervisor, name: str, vhosts: list[str]) -> None:
        self.name = name
        self.vhosts = vhosts
        self.state = STARTING
        self.pid = 0
        self._supervisor = supervisor
        self._control: ControlSocket | None = None
        self._deaths: deque[float] = deque()
        self._up = asyncio.Event()
        self._gone = asyncio.Event()
        self.why = ""  # of the last failure

    def start(self) -> None:
        ours, theirs = socket.socketpair()
        self._up.clear()
        self._gone.clear()
        self._control = ControlSocket(ours, self._received, self._ended)
        self._supervisor.fork(self.name, {**self._supervisor.arguments, "vhosts": self.vhosts}, theirs)

    async def ready(self) -> None:
        """Return when it is up, or known to stay down."""
        async with asyncio.timeout(_START_SECONDS):
            await self._up.wait()

    def hand_over(self, sock: socket.socket, **opened: Any) -> None:
        """The client is the process's from now on."""
        assert self._control is not None
        self._control.send("hand_over", sock.detach(), **opened)

    def tell(self, what: str, **arguments: Any) -> None:
        if self._control is not None:
            self._control.send(what, **arguments)

    async def ask(self, what: str, **arguments: Any) -> Any:
        if self._control is None:
            raise ConnectionError(f"vhost process {self.name!r} is down")
        return await self._control.ask(what, **arguments)

    async def stop(self, why: str = "", *, patience: float | None = None) -> None:
        """Have it finish, clients are told why, and return when it is gone. With `patience` it is killed after so many
        seconds: that is for what is deleted anyway."""
        if self.state in (DOWN, STOPPED):
            return
        self.state = STOPPED
        if self._control is not None:
            self._control.send("stop", why=why)
        try:
            async with asyncio.timeout(_STOP_SECONDS if patience is None else patience):
                await self._gone.wait()
        except TimeoutError:
            if patience is None or not self.pid:
                raise
            log.error("vhost process %r (pid %s) does not stop and is killed", self.name, self.pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            async with asyncio.timeout(_STOP_SECONDS):
                await self._gone.wait()

    async def start_again(self) -> None:
        """After `stop`, or when it failed too often: with a clean slate. Returns as `ready` does.
        Requires: it is stopped or down."""
        assert self.state in (DOWN, STOPPED)
        self._deaths.clear()
        self.why = ""
        self.state = STARTING
        self.start()
        await self.ready()

    def _ended(self) -> None:
        """Its socket is closed. Its exit is the zygote's to tell, where there is one."""
        if not self._supervisor.has_zygote:
            self._gone.set()

    def _received(self, message: Message, descriptor: int | None) -> None:
        if message["what"] == "up":
            self.pid = message["pid"]
            if self.state != STOPPED:
                self.state = RUNNING
            self._supervisor.came_up(self)
            self._up.set()
        elif message["what"] == "failed":
            self.why = message["why"]

    def exited(self, pid: int, status: int) -> None:
        """The zygote saw it end."""
        if self._control is not None:
            self._control.close()
            self._control = None
        self._gone.set()
        if self.state == STOPPED:
            self._up.set()
            return
        log.error("vhost process %r (pid %s) ended with %s. %s", self.name, pid, status, self.why)
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths and now - self._deaths[0] > self._supervisor.restart_period:
            self._deaths.popleft()
        if len(self._deaths) > self._supervisor.max_restarts:
            self.state = DOWN
            self._up.set()
            log.error("vhost process %r failed %s times and stays down", self.name, len(self._deaths))
            self._supervisor.gave_up(self)
            return
        self.state = RESTARTING
        self.start()


class Supervisor:
    """All of them, over the zygote."""

    def __init__(
        self,
        zygote: socket.socket,
        arguments: dict[str, Any],
        *,
        max_restarts: int = 3,
        restart_period: float = 300.0,
        came_up: Callable[[VhostProcess], None] = lambda process: None,
        gave_up: Callable[[VhostProcess], None] = lambda process: None,
        zygote_died: Callable[[], None] = lambda: None,
    ) -> None:
        self._zygote_died = zygote_died
        self.arguments = arguments
        self.max_restarts = max_restarts
        self.restart_period = restart_period
        self.came_up = came_up
        self.gave_up = gave_up
        self.processes: dict[str, VhostProcess] = {}
        self.has_zygote = True
        self._zygote = zygote
        self._in = b""
        zygote.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(zygote.fileno(), self._readable)

    def add(self, name: str, vhosts: list[str]) -> VhostProcess:
        process = self.processes[name] = VhostProcess(self, name, vhosts)
        process.start()
        return process

    def remove(self, process: VhostProcess) -> None:
        """Forget it. Requires: it is gone."""
        self.processes.pop(process.name, None)

    def fork(self, name: str, arguments: dict[str, Any], control: socket.socket) -> None:
        # Small and rare: a blocking send is simpler than a queue.
        self._zygote.setblocking(True)
        try:
            socket.send_fds(self._zygote, [request(name, arguments)], [control.fileno()])
        finally:
            self._zygote.setblocking(False)
            control.close()

    def _readable(self) -> None:
        try:
            data = self._zygote.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._zygote.fileno())
            log.error("the parent of the vhost processes is gone; none can be restarted, so the node stops")
            self.has_zygote = False
            self._zygote_died()
            return
        self._in += data
        while len(self._in) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._in)
            if len(self._in) < _LENGTH.size + size:
                return
            message = json.loads(self._in[_LENGTH.size : _LENGTH.size + size])
            self._in = self._in[_LENGTH.size + size :]
            process = self.processes.get(message["exited"])
            if process is not None:
                process.exited(message["pid"], message["status"])

    async def stop(self) -> None:
        await asyncio.gather(*(process.stop() for process in self.processes.values()))
        self._loop.remove_reader(self._zygote.fileno())

    def close(self, zygote_pid: int) -> None:
        """After `stop`: the zygote goes with its socket."""
        self._zygote.close()
        os.waitpid(zygote_pid, 0)
