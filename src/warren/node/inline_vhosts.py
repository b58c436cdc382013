"""Vhosts inside of the node's process: `warren serve --inline`, the fixture for tests."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from warren.amqp.connection import Connection, turn_away
from warren.amqp.errors import AmqpError
from warren.errors import WarrenError
from warren.node.config import Config
from warren.node.handshake import Opened
from warren.node.running_vhosts import VhostDownError
from warren.storage.settings import EngineSettings
from warren.vhost.client_limit import ClientLimit
from warren.vhost.permissions import GrantSource, Permissions
from warren.vhost.supervisor import DOWN, RESTARTING, RUNNING, STARTING
from warren.vhost.vhost import Vhost, clients_of, close_connections

log = logging.getLogger("warren.node")


class InlineVhosts:
    """Of `RunningVhosts`."""

    def __init__(self, config: Config, grants: GrantSource, gave_up: Callable[[], None] = lambda: None) -> None:
        """`gave_up` is told when one that failed too often stays down."""
        self._config = config
        self._grants = grants
        self._gave_up = gave_up
        self._failures: dict[str, deque[float]] = {}  # when each failed
        self.vhosts: dict[str, Vhost] = {}  # those that run
        self._states: dict[str, str] = {}  # of the others
        self._limit = ClientLimit(config.connection_max)
        self._arriving = 0  # clients that are no connections yet
        self._alarms: set[str] = set()
        self._restarts: set[asyncio.Task[None]] = set()

    async def start(self, names: list[str]) -> None:
        """One that cannot be opened stays down, and the others run. Raises what is wrong where that is all of them."""
        failed: Exception | None = None
        for name in names:
            try:
                self._open(name)
            except (WarrenError, OSError) as error:
                log.error("vhost %r cannot be opened and stays down: %s", name, error)
                self._states[name] = DOWN
                failed = failed or error
        if failed is not None:
            if not self.vhosts:
                raise failed
            self._gave_up()

    async def stop(self) -> None:
        for name in self._states:  # one that is just restarted is stopped, and not opened again
            self._states[name] = DOWN
        await asyncio.gather(*self._restarts, return_exceptions=True)
        await close_connections(self.vhosts.values())
        for vhost in list(self.vhosts.values()):
            await vhost.stop()
        self.vhosts.clear()

    def state(self, name: str) -> str:
        return RUNNING if name in self.vhosts else self._states.get(name, STARTING)

    async def open(self, name: str) -> None:
        self._failures.pop(name, None)  # an operator wants it: with a clean slate
        try:
            self._open(name)
        except (WarrenError, OSError) as error:
            self._states[name] = DOWN
            raise VhostDownError(f"vhost {name!r} does not come up: {error}") from error

    def _open(self, name: str) -> None:
        config = self._config
        vhost = Vhost(
            str(config.data_dir),
            name,
            durability=config.durability,
            settings=EngineSettings(producers_per_queue=config.producers_per_queue),
            max_message_size=config.max_message_size,
            consumer_timeout=config.consumer_timeout,
            queue_type_aliases=config.queue_type_aliases,
            queue_decorators=config.queue_decorators,
            failed=partial(self._failed, name),
        )
        for resource in self._alarms:
            vhost.set_alarm(resource, True)
        self.vhosts[name] = vhost
        self._states.pop(name, None)

    async def close(self, name: str, why: str, *, state: str, patience: float | None = None) -> None:
        self._states[name] = state
        vhost = self.vhosts.pop(name, None)
        if vhost is not None:
            await close_connections([vhost], why)
            await vhost.stop()

    def forget(self, name: str) -> None:
        self._states.pop(name, None)
        self._failures.pop(name, None)

    def _failed(self, name: str, error: WarrenError) -> None:
        """Everything of it ends here; it comes back through recovery."""
        vhost = self.vhosts.pop(name, None)
        if vhost is None:
            return
        self._states[name] = RESTARTING
        for connection in list(vhost.connections):
            connection.fail(AmqpError(541, f"vhost '{name}' failed: {error}"))
        task = asyncio.get_running_loop().create_task(self._restart(name, vhost))
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)

    async def _restart(self, name: str, vhost: Vhost) -> None:
        try:
            await vhost.stop()
            if self._states.get(name) != RESTARTING:  # an operator has closed it meanwhile
                return
            if not self._failed_too_often(name):
                self._open(name)
                return
            log.error("vhost %r failed %s times and stays down", name, len(self._failures[name]))
        except (WarrenError, OSError):
            log.exception("vhost %r cannot be restarted; the others go on", name)
        self._states[name] = DOWN
        self._gave_up()

    def _failed_too_often(self, name: str) -> bool:
        """As the supervisor of processes counts it."""
        now = time.monotonic()
        failures = self._failures.setdefault(name, deque())
        failures.append(now)
        while now - failures[0] > self._config.vhost_restart_period:
            failures.popleft()
        return len(failures) > self._config.vhost_max_restarts

    async def hand_over(self, sock: socket.socket, opened: Opened) -> None:
        vhost = self.vhosts.get(opened.vhost)
        if vhost is None:
            turn_away(sock, f"vhost '{opened.vhost}' is down ({self.state(opened.vhost)})")
            return
        refusal = self._limit.refusal(self._arriving + sum(map(clients_of, self.vhosts.values())), sock.fileno())
        if refusal is not None:
            log.warning("client %s: %s", opened.peer, refusal)
            turn_away(sock, refusal, 530)
            return
        self._arriving += 1
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: Connection(
                    vhost,
                    user=opened.user,
                    permissions=Permissions(self._grants, opened.user, opened.vhost),
                    frame_max=opened.frame_max,
                    channel_max=opened.channel_max,
                    heartbeat=opened.heartbeat,
                    client_properties=opened.client_properties,
                    peer=opened.peer,
                    tls=opened.tls,
                ),
                sock,
            )
        finally:
            self._arriving -= 1

    async def grant_changed(self, user: str, vhost: str) -> None:
        """The version of the users has changed, and that is all that a connection here looks at."""

    async def data(self, vhost: str, user: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        permissions = Permissions(self._grants, user, vhost)
        return await self._running(vhost).data_requests.answer(name, permissions, arguments)

    async def operate(self, vhost: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return self._running(vhost).operator_requests.answer(name, arguments)

    def _running(self, name: str) -> Vhost:
        vhost = self.vhosts.get(name)
        if vhost is None:
            raise VhostDownError(f"vhost {name!r} is {self.state(name)}")
        return vhost

    def alarm(self, resource: str, is_set: bool) -> None:
        (self._alarms.add if is_set else self._alarms.discard)(resource)
        for vhost in self.vhosts.values():
            vhost.set_alarm(resource, is_set)

    async def infos(self) -> list[dict[str, Any]]:
        return [vhost.info() for vhost in self.vhosts.values()]

    def pids(self) -> set[int]:
        return set()
