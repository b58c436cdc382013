"""A node: listeners, handshakes, and the vhosts behind them, each in a process of its own or all inline.

broker = Broker(Config.load({"data_dir": "data", "amqp_port": 0}))
await broker.start()
broker.amqp_port
await broker.stop()
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import time
from dataclasses import asdict
from functools import partial
from typing import Any

import warren
from warren.amqp.connection import Connection
from warren.amqp.errors import AmqpError
from warren.errors import WarrenError
from warren.node.admission import Admission, Entry
from warren.node.config import Config
from warren.node.handshake import Gone, Handshake, Opened
from warren.node.status import resident_bytes, total_memory_bytes, vhost_status
from warren.node.status_page import Status
from warren.node.tls import Secured, TlsRelays
from warren.node.users import Users
from warren.vhost.grants import pack
from warren.vhost.permissions import Permissions, loopback_allowed
from warren.vhost.refused import Refused
from warren.vhost.supervisor import RUNNING, Supervisor, VhostProcess
from warren.vhost.vhost import Vhost, close_connections

log = logging.getLogger("warren.node")

_BACKLOG = 1024
_DATA_SECONDS = 120.0
_NOTHING = {"pid": 0, "connections": 0, "channels": 0, "alarms": [], "queues": []}


class Broker:
    def __init__(self, config: Config, zygote: tuple[socket.socket, int] | None = None) -> None:
        """With the socket and pid of a zygote vhosts run in processes; without one they run inline."""
        self.config = config
        self.vhosts: dict[str, Vhost] = {}  # those that run inline
        self.given_up = asyncio.Event()  # a vhost stays down, and `vhost_restart_strategy` is stop_node
        self._zygote = zygote
        self._supervisor: Supervisor | None = None
        self._processes: dict[str, VhostProcess] = {}  # vhost -> its process
        self.amqp_port = 0
        self.tls_port = 0  # 0: there is none
        self._relays: TlsRelays | None = None
        self._started = False
        self.started_at = time.time()
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._admission = Admission(config.max_handshakes, config.max_handshakes_per_address)
        self._users: Users | None = None

    @property
    def ready(self) -> bool:
        """Does it take clients, in every vhost?"""
        if self._zygote is not None:
            return self._started and all(process.state == RUNNING for process in self._processes.values())
        return self._started and all(name in self.vhosts for name in self.users.vhosts())

    @property
    def started(self) -> bool:
        return self._started

    @property
    def users(self) -> Users:
        assert self._users is not None, "the broker is not started"
        return self._users

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Recover the vhosts, then listen."""
        config = self.config
        os.makedirs(config.data_dir, exist_ok=True)
        self._users = Users(
            config.data_dir,
            default_user=config.default_user,
            default_pass=config.default_pass.get_secret_value(),
            default_vhost=config.default_vhost,
        )
        try:
            if self._zygote is not None:
                await self._start_processes(self._zygote[0])
            else:
                for name in self.users.vhosts():
                    self._start_vhost(name)
            await self._listen()
            self._spawn(self._watch_resources())
        except BaseException:
            await self.stop()
            raise
        self._started = True

    async def _start_processes(self, zygote: socket.socket) -> None:
        config = self.config
        self._supervisor = Supervisor(
            zygote,
            {
                "data_dir": str(config.data_dir),
                "durability": config.durability,
                "max_message_size": config.max_message_size,
                "consumer_timeout": config.consumer_timeout,
                "queue_type_aliases": dict(config.queue_type_aliases),
            },
            max_restarts=config.vhost_max_restarts,
            restart_period=config.vhost_restart_period,
            gave_up=self._gave_up,
            zygote_died=self.given_up.set,
        )
        names = self.users.vhosts()
        groups: dict[str, list[str]] = {name: [name] for name in names}
        if config.vhost_processes:
            groups = {f"vhosts {number}": names[number :: config.vhost_processes] for number in range(len(names))}
            groups = {name: members for name, members in groups.items() if members}
            groups = dict(list(groups.items())[: config.vhost_processes])
        for name, members in groups.items():
            process = self._supervisor.add(name, members)
            self._processes.update(dict.fromkeys(members, process))
        await asyncio.gather(*(process.ready() for process in self._supervisor.processes.values()))

    def _gave_up(self, process: VhostProcess) -> None:
        if self.config.vhost_restart_strategy == "stop_node":
            self.given_up.set()

    def _start_vhost(self, name: str) -> None:
        config = self.config
        self.vhosts[name] = Vhost(
            str(config.data_dir),
            name,
            durability=config.durability,
            max_message_size=config.max_message_size,
            consumer_timeout=config.consumer_timeout,
            queue_type_aliases=config.queue_type_aliases,
            failed=partial(self._vhost_failed, name),
        )

    def _vhost_failed(self, name: str, error: WarrenError) -> None:
        """Everything of it ends here; it comes back through recovery."""
        vhost = self.vhosts.pop(name, None)
        if vhost is None:
            return
        for connection in list(vhost.connections):
            connection.fail(AmqpError(541, f"vhost '{name}' failed: {error}"))
        self._spawn(self._restart_vhost(name, vhost))

    async def _restart_vhost(self, name: str, vhost: Vhost) -> None:
        await vhost.stop()
        try:
            self._start_vhost(name)
        except WarrenError:
            log.exception("vhost %r cannot be restarted; the others go on", name)

    async def _listen(self) -> None:
        tls = self.config.tls
        if tls.enabled:
            self._relays = TlsRelays(tls)
            await self._relays.start()
            self.tls_port = self._listen_on(tls.port, over_tls=True)
        self.amqp_port = self._listen_on(self.config.amqp_port, over_tls=False)

    def _listen_on(self, port: int, *, over_tls: bool) -> int:
        host = self.config.host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        listener.setblocking(False)
        self._listeners.append(listener)
        self._spawn(self._accept(listener, over_tls))
        return int(listener.getsockname()[1])

    async def stop(self) -> None:
        """Stop accepting, say goodbye, finish commits, write recovery terms."""
        self._started = False
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        await close_connections(self.vhosts.values())
        for vhost in list(self.vhosts.values()):
            await vhost.stop()
        self.vhosts.clear()
        if self._supervisor is not None and self._zygote is not None:
            await self._supervisor.stop()
            self._supervisor.close(self._zygote[1])
            self._supervisor = None
        if self._relays is not None:  # after the vhosts: their goodbyes go through them
            await self._relays.stop()
            self._relays = None
        if self._users is not None:
            self._users.close()
            self._users = None

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- clients -----------------------------------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket, over_tls: bool) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError as error:  # too many open files, a client that was gone: the listener lives on
                log.warning("accept: %s", error)
                await asyncio.sleep(0.1)
                continue
            entry = self._admission.enter(str(address[0]))
            if entry is None:
                sock.close()
                continue
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            entry.task = self._spawn(self._serve(sock, str(address[0]), int(address[1]), entry, over_tls))

    async def _serve(self, sock: socket.socket, address: str, port: int, entry: Entry, over_tls: bool) -> None:
        peer = f"{address}:{port}"
        config = self.config
        secured: Secured | None = None
        try:
            async with asyncio.timeout(config.handshake_timeout):
                if over_tls:
                    assert self._relays is not None
                    sock, secured = await self._relays.secure(sock, config.handshake_timeout)
                opened = await Handshake(
                    sock,
                    self,
                    peer=peer,
                    address=address,
                    certificate_user=self._known_user(secured.user) if secured is not None else None,
                    channel_max=config.channel_max,
                    frame_max=config.frame_max,
                    heartbeat=config.heartbeat,
                    working=entry.working,
                ).run()
            self._admission.leave(entry)
            opened.tls = asdict(secured) if secured is not None else None
            await self._hand_over(sock, opened)
        except (Gone, TimeoutError, OSError) as error:
            log.info("client %s: %s", peer, error or "no handshake in time")
            sock.close()
        except asyncio.CancelledError:
            sock.close()
            if not entry.is_evicted:
                raise
            log.info("client %s: others wanted to log in, and it has not for %.1f s", peer, entry.age)
        except BaseException:
            sock.close()
            raise
        finally:
            self._admission.leave(entry)

    def _known_user(self, name: str | None) -> str | None:
        return name if name is not None and self.users.user(name) is not None else None

    async def _hand_over(self, sock: socket.socket, opened: Opened) -> None:
        process = self._processes.get(opened.vhost)
        if process is not None:
            process.hand_over(sock, **asdict(opened), grant=pack(self.users.grant(opened.user, opened.vhost)))
            return
        vhost = self.vhosts[opened.vhost]
        permissions = Permissions(self.users, opened.user, opened.vhost)
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: Connection(
                vhost,
                user=opened.user,
                permissions=permissions,
                frame_max=opened.frame_max,
                channel_max=opened.channel_max,
                heartbeat=opened.heartbeat,
                client_properties=opened.client_properties,
                peer=opened.peer,
                tls=opened.tls,
            ),
            sock,
        )

    # -- the gate of handshakes ----------------------------------------------------------------------------------------

    def authenticate(self, user: str, password: str) -> bool:
        return self.users.authenticate(user, password) is not None

    def may_connect_from(self, user: str, address: str) -> bool:
        return loopback_allowed(user, address, self.config.loopback_users)

    def refusal(self, user: str, vhost: str) -> str | None:
        if not self.users.has_vhost(vhost):
            return f"vhost '{vhost}' not found"
        if not Permissions(self.users, user, vhost).vhost_allowed:
            return f"access to vhost '{vhost}' refused for user '{user}'"
        process = self._processes.get(vhost)
        if process is not None:
            return None if process.state == RUNNING else f"vhost '{vhost}' is down ({process.state})"
        return None if vhost in self.vhosts else f"vhost '{vhost}' is down"

    async def permissions_changed(self, user: str, vhost: str) -> None:
        """Call after a change in `users`: returns when the vhost's process knows."""
        process = self._processes.get(vhost)
        if process is not None and process.state == RUNNING:
            await process.ask("grants", user=user, vhost=vhost, grant=pack(self.users.grant(user, vhost)))

    # -- the data pipeline -----------------------------------------------------------------------------------------------

    async def data_request(self, name: str, user: str, vhost: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Ask a vhost; see `vhost/data_requests.py`. Raises Refused."""
        why = self.refusal(user, vhost)
        if why is not None:
            raise Refused(*((503, "unavailable") if "down" in why else (403, "forbidden")), why)
        process = self._processes.get(vhost)
        if process is None:
            permissions = Permissions(self.users, user, vhost)
            answer = await self.vhosts[vhost].data_requests.answer(name, permissions, arguments)
        else:
            try:
                answer = await process.ask(
                    "data",
                    timeout=_DATA_SECONDS,
                    name=name,
                    user=user,
                    vhost=vhost,
                    grant=pack(self.users.grant(user, vhost)),
                    arguments=arguments,
                )
            except (ConnectionError, TimeoutError):
                raise Refused(503, "unavailable", f"vhost {vhost!r} does not answer; try again") from None
        if "result" not in answer:
            raise Refused(answer["status"], answer["error"], answer["reason"])
        result: dict[str, Any] = answer["result"]
        return result

    # -- alarms ------------------------------------------------------------------------------------------------------

    async def _watch_resources(self) -> None:
        """Every second: memory of all processes and free disk, against their limits."""
        config = self.config
        limit = config.memory_high_watermark * total_memory_bytes()
        set_now: set[str] = set()
        while True:
            pids = {os.getpid(), *(process.pid for process in self._processes.values()), *self._relay_pids}
            found = set()
            if sum(map(resident_bytes, pids)) > limit:
                found.add("memory")
            if shutil.disk_usage(config.data_dir).free < config.disk_free_limit:
                found.add("disk")
            for resource in found ^ set_now:
                self._alarm(resource, resource in found)
            set_now = found
            await asyncio.sleep(1)

    @property
    def _relay_pids(self) -> list[int]:
        return self._relays.pids if self._relays is not None else []

    def _alarm(self, resource: str, is_set: bool) -> None:
        for vhost in self.vhosts.values():
            vhost.set_alarm(resource, is_set)
        for process in set(self._processes.values()):
            process.tell("alarm", resource=resource, is_set=is_set)

    # -- looking -----------------------------------------------------------------------------------------------------

    async def status(self) -> Status:
        """For the status page."""
        infos = [vhost.info() for vhost in self.vhosts.values()]
        for process in self._supervisor.processes.values() if self._supervisor is not None else ():
            try:
                infos += await process.ask("status")
            except (ConnectionError, TimeoutError):
                infos += [{**_NOTHING, "name": name, "state": process.state} for name in process.vhosts]
        pids = {os.getpid(), *(info["pid"] for info in infos if info["pid"]), *self._relay_pids}
        return {
            "node": {
                "pid": os.getpid(),
                "uptime": time.time() - self.started_at,
                "memory_bytes": sum(map(resident_bytes, pids)),
                "durability": self.config.durability,
                "version": warren.__version__,
                "alarms": [
                    f"vhost '{info['name']}' is low on {resource}: publishers wait"
                    for info in infos
                    for resource in info["alarms"]
                ],
            },
            "vhosts": [vhost_status(info) for info in infos],
        }
