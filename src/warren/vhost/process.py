"""The process of one or several vhosts: its loop, its control socket, its end.

It is forked from a warm parent (`zygote.py`), recovers its vhosts, says "up", and takes over clients' sockets. It ends
when it is told to, when its store fails (then the supervisor starts it anew, through recovery), or when the node is gone.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import time
from typing import Any

import uvloop

from warren.amqp.connection import Connection, turn_away
from warren.errors import StoreLockedError, WarrenError
from warren.storage.settings import EngineSettings
from warren.vhost.client_limit import ClientLimit
from warren.vhost.control import ControlSocket, Message
from warren.vhost.grants import Grants
from warren.vhost.permissions import Permissions
from warren.vhost.vhost import Vhost, clients_of, close_connections

log = logging.getLogger("warren.vhost")

_LOCK_SECONDS = 15.0  # that a predecessor, whose node died, has to finish


def run(sock: socket.socket, arguments: dict[str, Any]) -> int:
    """The whole life of the process; its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the node decides
    return uvloop.run(_Process(sock, arguments).run())


class _Process:
    def __init__(self, sock: socket.socket, arguments: dict[str, Any]) -> None:
        self._sock = sock
        self._arguments = arguments
        self._vhosts: dict[str, Vhost] = {}
        self._unwanted: set[str] = set()  # vhosts that were closed, perhaps before they were open
        self._grants = Grants()
        self._limit = ClientLimit(arguments["connection_max"])
        self._arriving = 0  # clients that are no connections yet
        self._tasks: set[asyncio.Task[Any]] = set()
        self._code = 0
        self._why = ""  # it stops, as clients are told

    async def run(self) -> int:
        self._stopping = asyncio.Event()
        self._control = ControlSocket(self._sock, self._received, self._node_is_gone)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stopping.set)
        try:
            for name in self._arguments["vhosts"]:
                vhost = await self._open(name)
                if name in self._unwanted:
                    await vhost.stop()
                else:
                    self._vhosts[name] = vhost
        except (WarrenError, OSError) as error:
            log.error("%s", error)
            self._control.send("failed", why=str(error))
            return 1
        gc.freeze()  # what was recovered stays: the collector need not look at it ever again
        self._control.send("up", pid=os.getpid())
        await self._stopping.wait()
        await self._stop()
        return self._code

    async def _open(self, name: str) -> Vhost:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                return Vhost(
                    self._arguments["data_dir"],
                    name,
                    durability=self._arguments["durability"],
                    settings=EngineSettings(producers_per_queue=self._arguments["producers_per_queue"]),
                    max_message_size=self._arguments["max_message_size"],
                    consumer_timeout=self._arguments["consumer_timeout"],
                    queue_type_aliases=self._arguments["queue_type_aliases"],
                    queue_decorators=self._arguments["queue_decorators"],
                    failed=self._store_failed,
                )
            except StoreLockedError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.1)

    async def _stop(self) -> None:
        await close_connections(self._vhosts.values(), self._why)
        for vhost in self._vhosts.values():
            await vhost.stop()

    def _store_failed(self, error: WarrenError) -> None:
        self._control.send("failed", why=str(error))
        self._code = 1
        self._stopping.set()

    def _node_is_gone(self) -> None:
        if not self._stopping.is_set():
            log.info("the node is gone: process %s finishes its commits and exits", os.getpid())
        self._stopping.set()

    # -- messages ----------------------------------------------------------------------------------------------------

    def _received(self, message: Message, descriptor: int | None) -> None:
        what = message["what"]
        if "grant" in message:
            # At once, and not when the work is done that needs it: messages are in the order of changes.
            self._grants.put(message["user"], message["vhost"], message["grant"])
        if what == "hand_over":
            if descriptor is None:
                log.warning("client %s is lost: no open file is left for it; raise ulimit -Hn", message["peer"])
                return
            self._start(self._take_over(socket.socket(fileno=descriptor), message))
        elif what == "grants":
            self._control.answer(message, True)
        elif what == "open_vhost":
            self._start(self._open_vhost(message))
        elif what == "close_vhost":
            self._start(self._close_vhost(message))
        elif what == "operate":
            asked = self._vhosts.get(message["vhost"])
            self._control.answer(
                message,
                asked.operator_requests.answer(message["name"], message["arguments"]) if asked else _not_here(message),
            )
        elif what == "alarm":
            for vhost in self._vhosts.values():
                vhost.set_alarm(message["resource"], message["is_set"])
        elif what == "status":
            self._control.answer(message, [vhost.info() for vhost in self._vhosts.values()])
        elif what == "data":
            self._start(self._data(message))
        elif what == "stop":
            self._why = message["why"]
            self._stopping.set()

    async def _data(self, message: Message) -> None:
        vhost = self._vhosts.get(message["vhost"])
        if vhost is None:
            self._control.answer(message, _not_here(message))
            return
        permissions = Permissions(self._grants, message["user"], message["vhost"])
        answer = await vhost.data_requests.answer(message["name"], permissions, message["arguments"])
        self._control.answer(message, answer)

    async def _open_vhost(self, message: Message) -> None:
        name = message["vhost"]
        self._unwanted.discard(name)
        try:
            vhost = await self._open(name)
        except (WarrenError, OSError) as error:
            self._control.answer(message, {"why": str(error)})
            return
        for resource in message["alarms"]:
            vhost.set_alarm(resource, True)
        self._vhosts[name] = vhost
        self._control.answer(message, {})

    async def _close_vhost(self, message: Message) -> None:
        self._unwanted.add(message["vhost"])
        vhost = self._vhosts.pop(message["vhost"], None)
        if vhost is not None:
            await close_connections([vhost], message["why"])
            await vhost.stop()
        self._control.answer(message, {})

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _take_over(self, sock: socket.socket, opened: Message) -> None:
        vhost = self._vhosts.get(opened["vhost"])
        if vhost is None or self._stopping.is_set():
            turn_away(sock, self._why or f"vhost '{opened['vhost']}' is down")
            return
        refusal = self._limit.refusal(self._arriving + sum(map(clients_of, self._vhosts.values())), sock.fileno())
        if refusal is not None:
            log.warning("client %s: %s", opened["peer"], refusal)
            turn_away(sock, refusal, 530)
            return
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        self._arriving += 1
        try:
            await loop.connect_accepted_socket(
                lambda: Connection(
                    vhost,
                    user=opened["user"],
                    permissions=Permissions(self._grants, opened["user"], opened["vhost"]),
                    frame_max=opened["frame_max"],
                    channel_max=opened["channel_max"],
                    heartbeat=opened["heartbeat"],
                    client_properties=opened["client_properties"],
                    peer=opened["peer"],
                    tls=opened["tls"],
                ),
                sock,
            )
        except OSError as error:
            log.info("client %s: %s", opened["peer"], error)
            sock.close()
        finally:
            self._arriving -= 1


def _not_here(message: Message) -> dict[str, Any]:
    """The answer to who asked while the vhost was closed."""
    return {"status": 503, "error": "unavailable", "reason": f"vhost {message['vhost']!r} is down; try again"}
