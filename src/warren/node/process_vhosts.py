"""Vhosts in processes: each in one of its own, or all of them in `vhost_processes` many.

A vhost that is closed leaves its process, and the last one takes the process with it. One that failed too often stays in
its process, which is down, until it is opened again.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from warren.amqp.connection import turn_away
from warren.node.config import Config
from warren.node.handshake import Opened
from warren.node.running_vhosts import VhostDownError
from warren.vhost.grants import pack
from warren.vhost.permissions import GrantSource
from warren.vhost.supervisor import DOWN, RUNNING, STARTING, STOPPED, Supervisor, VhostProcess

_DATA_SECONDS = 120.0
_OPEN_SECONDS = 600.0  # a long recovery is no failure
_CLOSE_SECONDS = 600.0
_GRANT_SECONDS = 30.0


class ProcessVhosts:
    """Of `RunningVhosts`, over a zygote (`vhost/zygote.py`)."""

    def __init__(
        self,
        config: Config,
        grants: GrantSource,
        zygote: tuple[socket.socket, int],
        *,
        gave_up: Callable[[], None],
        zygote_died: Callable[[], None],
    ) -> None:
        self._most = config.vhost_processes  # 0: one for each vhost
        self._grants = grants
        self._zygote_pid = zygote[1]
        self._processes: dict[str, VhostProcess] = {}  # vhost -> its process
        self._states: dict[str, str] = {}  # of vhosts that have none
        self._alarms: set[str] = set()
        self._supervisor = Supervisor(
            zygote[0],
            {
                "data_dir": str(config.data_dir),
                "durability": config.durability,
                "max_message_size": config.max_message_size,
                "consumer_timeout": config.consumer_timeout,
                "producers_per_queue": config.producers_per_queue,
                "queue_type_aliases": dict(config.queue_type_aliases),
                "queue_decorators": list(config.queue_decorators),
                "connection_max": config.connection_max,
            },
            max_restarts=config.vhost_max_restarts,
            restart_period=config.vhost_restart_period,
            came_up=self._came_up,
            gave_up=lambda process: gave_up(),
            zygote_died=zygote_died,
        )

    async def start(self, names: list[str]) -> None:
        count = min(self._most, len(names)) or len(names)
        for number in range(count):
            members = names[number::count]
            process = self._supervisor.add(self._new_name(members[0]), members)
            self._processes.update(dict.fromkeys(members, process))
        await asyncio.gather(*(process.ready() for process in self._supervisor.processes.values()))

    def _new_name(self, vhost: str) -> str:
        if not self._most:
            return vhost
        return next(name for number in range(self._most + 1) if (name := f"vhosts {number}") not in self._known)

    @property
    def _known(self) -> dict[str, VhostProcess]:
        return self._supervisor.processes

    async def stop(self) -> None:
        await self._supervisor.stop()
        self._supervisor.close(self._zygote_pid)
        self._processes.clear()

    def state(self, name: str) -> str:
        process = self._processes.get(name)
        return self._states.get(name, STARTING) if process is None else process.state

    # -- opening and closing -------------------------------------------------------------------------------------------

    async def open(self, name: str) -> None:
        process = self._processes.get(name)
        if process is not None:  # it failed too often, with all that are in it
            await process.start_again()
        elif not self._most or len(self._known) < self._most:
            process = self._processes[name] = self._supervisor.add(self._new_name(name), [name])
            await process.ready()
        else:
            await self._open_in_another(name)
            return
        if process.state != RUNNING:
            raise VhostDownError(f"vhost {name!r} does not come up: {process.why or process.state}")
        self._states.pop(name, None)

    async def _open_in_another(self, name: str) -> None:
        """All processes that may be are there: join the one that has least to do."""
        running = [process for process in self._known.values() if process.state == RUNNING]
        if not running:
            raise VhostDownError(f"vhost {name!r} cannot be opened: all vhost processes are down")
        process = min(running, key=lambda process: len(process.vhosts))
        self._states[name] = STARTING
        try:
            said = await process.ask("open_vhost", timeout=_OPEN_SECONDS, vhost=name, alarms=sorted(self._alarms))
        except (ConnectionError, TimeoutError):
            said = {"why": f"its process {process.name!r} ended or does not answer"}
        if "why" in said:
            self._states[name] = DOWN
            raise VhostDownError(f"vhost {name!r} does not come up: {said['why']}")
        process.vhosts.append(name)
        self._processes[name] = process
        self._states.pop(name, None)

    async def close(self, name: str, why: str, *, state: str, patience: float | None = None) -> None:
        self._states[name] = state
        process = self._processes.get(name)
        if process is None:
            return
        if process.vhosts == [name]:
            await process.stop(why, patience=patience)
            self._supervisor.remove(process)
        else:
            process.vhosts.remove(name)  # first: should it die now, it comes back without this vhost
            if process.state not in (DOWN, STOPPED):
                with contextlib.suppress(ConnectionError):  # it died
                    await process.ask("close_vhost", timeout=_CLOSE_SECONDS, vhost=name, why=why)
        self._processes.pop(name, None)

    def forget(self, name: str) -> None:
        self._states.pop(name, None)

    def _came_up(self, process: VhostProcess) -> None:
        """Also one that was restarted: it knows of no alarm."""
        for resource in sorted(self._alarms):
            process.tell("alarm", resource=resource, is_set=True)

    # -- what they are asked -------------------------------------------------------------------------------------------

    async def hand_over(self, sock: socket.socket, opened: Opened) -> None:
        process = self._processes.get(opened.vhost)
        if process is None or process.state != RUNNING:
            turn_away(sock, f"vhost '{opened.vhost}' is down ({self.state(opened.vhost)})")
            return
        process.hand_over(sock, **asdict(opened), grant=pack(self._grants.grant(opened.user, opened.vhost)))

    async def grant_changed(self, user: str, vhost: str) -> None:
        process = self._processes.get(vhost)
        if process is None or process.state != RUNNING:
            return  # it gets its grants with its clients
        try:
            grant = pack(self._grants.grant(user, vhost))
            await process.ask("grants", timeout=_GRANT_SECONDS, user=user, vhost=vhost, grant=grant)
        except ConnectionError:
            return  # it died, and what it knew with it
        except TimeoutError:
            raise VhostDownError(
                f"vhost {vhost!r} does not answer: the change is made, but clients there may not feel it yet; restart it"
            ) from None

    async def data(self, vhost: str, user: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        grant = pack(self._grants.grant(user, vhost))
        return await self._ask(
            "data", vhost, timeout=_DATA_SECONDS, name=name, user=user, grant=grant, arguments=arguments
        )

    async def operate(self, vhost: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return await self._ask("operate", vhost, timeout=_DATA_SECONDS, name=name, arguments=arguments)

    async def _ask(self, what: str, vhost: str, **message: Any) -> dict[str, Any]:
        process = self._processes.get(vhost)
        if process is None or process.state != RUNNING:
            raise VhostDownError(f"vhost {vhost!r} is {self.state(vhost)}")
        try:
            answer: dict[str, Any] = await process.ask(what, vhost=vhost, **message)
        except (ConnectionError, TimeoutError):
            raise VhostDownError(f"vhost {vhost!r} does not answer; try again") from None
        return answer

    def alarm(self, resource: str, is_set: bool) -> None:
        (self._alarms.add if is_set else self._alarms.discard)(resource)
        for process in self._known.values():
            process.tell("alarm", resource=resource, is_set=is_set)

    async def infos(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for process in list(self._known.values()):
            try:
                found += await process.ask("status")
            except (ConnectionError, TimeoutError):
                continue
        return found

    def pids(self) -> set[int]:
        return {process.pid for process in self._known.values()}
