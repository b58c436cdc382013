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
from typing import Any

import warren
from warren.errors import StorePathError
from warren.node.admission import Admission, Entry
from warren.node.config import Config
from warren.node.control import ControlServer
from warren.node.handshake import Gone, Handshake, LoginRefused
from warren.node.inline_vhosts import InlineVhosts
from warren.node.logins import Logins
from warren.node.operations import Operations
from warren.node.process_vhosts import ProcessVhosts
from warren.node.running_vhosts import RunningVhosts, VhostDownError
from warren.node.status import resident_bytes, total_memory_bytes, vhost_status
from warren.node.status_page import ListenError, Status
from warren.node.tls import Secured, TlsRelays
from warren.node.users import Users
from warren.node.vhost_directories import finish_deletions
from warren.queueing.decorators import load_decorators
from warren.storage.running_node import running_node
from warren.vhost.permissions import Permissions, loopback_allowed
from warren.vhost.refused import Refused
from warren.vhost.supervisor import RUNNING, STOPPED
from warren.vhost.vhost import Vhost

log = logging.getLogger("warren.node")

_BACKLOG = 1024
_NOTHING = {"pid": 0, "connections": 0, "channels": 0, "alarms": [], "queues": []}


class Broker:
    def __init__(self, config: Config, zygote: tuple[socket.socket, int] | None = None) -> None:
        """With the socket and pid of a zygote vhosts run in processes; without one they run inline."""
        self.config = config
        self.given_up = asyncio.Event()  # a vhost stays down, and `vhost_restart_strategy` is stop_node
        self._zygote = zygote
        self._running: RunningVhosts | None = None
        self._control: ControlServer | None = None
        self.operations = Operations(self)
        self.amqp_port = 0
        self.tls_port = 0  # 0: there is none
        self._relays: TlsRelays | None = None
        self._started = False
        self.started_at = time.time()
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._admission = Admission(config.max_handshakes, config.max_handshakes_per_address)
        self._users: Users | None = None
        self._logins: Logins | None = None

    @property
    def ready(self) -> bool:
        """Does it take clients, in every vhost but those that an operator has stopped?"""
        return self._started and not self.vhosts_down()

    @property
    def started(self) -> bool:
        return self._started

    @property
    def users(self) -> Users:
        assert self._users is not None, "the broker is not started"
        return self._users

    @property
    def logins(self) -> Logins:
        assert self._logins is not None, "the broker is not started"
        return self._logins

    @property
    def running(self) -> RunningVhosts:
        assert self._running is not None, "the broker is not started"
        return self._running

    @property
    def vhosts(self) -> dict[str, Vhost]:
        """Those that run inline."""
        return self._running.vhosts if isinstance(self._running, InlineVhosts) else {}

    def vhosts_down(self) -> dict[str, str]:
        """Those that should run and do not, and what they are instead."""
        states = {name: self.running.state(name) for name in self.users.vhosts()}
        return {name: state for name, state in states.items() if state not in (RUNNING, STOPPED)}

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Recover the vhosts, then listen."""
        config = self.config
        load_decorators(config.queue_decorators)  # rather no node than vhosts that do not come up
        self._make_data_dir()
        self._users = Users(
            config.data_dir,
            default_user=config.default_user,
            default_pass=config.default_pass.get_secret_value(),
            default_vhost=config.default_vhost,
        )
        self._logins = Logins(self._users, self._admission)
        try:
            await asyncio.to_thread(finish_deletions, self._users, str(config.data_dir))
            self._running = self._vhosts_of(self._users)
            self._control = ControlServer(str(config.data_dir), self.operations)
            self._control.start()
            await self._running.start(self._users.vhosts())
            await self._listen()
            self._spawn(self._watch_resources())
        except BaseException:
            await self.stop()
            raise
        self._started = True

    def _make_data_dir(self) -> None:
        path = self.config.data_dir
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            why = "it is a file" if os.path.isfile(path) else error.strerror or str(error)
            raise StorePathError(
                f"data_dir {path} cannot be the data directory: {why}; give a directory that this user may write to, or "
                "one that can be made"
            ) from None
        node = running_node(str(path))
        if node is not None and node.pid != os.getpid():
            log.info("%s may be in use by %s; waiting, in case that one is about to stop", path, node)

    def _vhosts_of(self, users: Users) -> RunningVhosts:
        if self._zygote is None:
            return InlineVhosts(self.config, users, self._gave_up)
        return ProcessVhosts(self.config, users, self._zygote, gave_up=self._gave_up, zygote_died=self.given_up.set)

    def _gave_up(self) -> None:
        if self.config.vhost_restart_strategy == "stop_node":
            self.given_up.set()

    async def _listen(self) -> None:
        tls = self.config.tls
        if tls.enabled:
            self._relays = TlsRelays(tls, self.config.connection_max)
            await self._relays.start()
            self.tls_port = self._listen_on(tls.port, over_tls=True)
        self.amqp_port = self._listen_on(self.config.amqp_port, over_tls=False)

    def _listen_on(self, port: int, *, over_tls: bool) -> int:
        host = self.config.host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            what, key = ("AMQP over TLS", "tls.port") if over_tls else ("AMQP", "amqp_port")
            raise ListenError(
                f"cannot listen for {what} on {host}:{port}: {os.strerror(error.errno) if error.errno else error}; "
                f"choose another host or {key}, or stop who has it"
            ) from None
        listener.setblocking(False)
        self._listeners.append(listener)
        self._spawn(self._accept(listener, over_tls))
        return int(listener.getsockname()[1])

    async def stop(self) -> None:
        """Stop accepting, say goodbye, finish commits, write recovery terms."""
        self._started = False
        if self._control is not None:
            await self._control.stop()
            self._control = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        if self._running is not None:
            await self._running.stop()
            self._running = None
        if self._relays is not None:  # after the vhosts: their goodbyes go through them
            await self._relays.stop()
            self._relays = None
        if self._logins is not None:
            await self._logins.stop()
            self._logins = None
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
            await self.running.hand_over(sock, opened)
        except LoginRefused:
            sock.close()
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

    # -- the gate of handshakes ----------------------------------------------------------------------------------------

    async def authenticate(self, user: str, password: str, address: str) -> bool:
        return await self.logins.of_client(user, password, address)

    def knows(self, user: str) -> bool:
        return self.users.user(user) is not None

    def stamp_of(self, user: str, vhost: str | None = None) -> str | None:
        """See `Users.stamp` and `Users.stamp_in`."""
        return self.users.stamp(user) if vhost is None else self.users.stamp_in(vhost, user)

    def may_connect_from(self, user: str, address: str) -> bool:
        return loopback_allowed(user, address, self.config.loopback_users)

    def refusal(self, user: str, vhost: str) -> str | None:
        if not self.users.has_vhost(vhost):
            return f"vhost '{vhost}' not found"
        if not Permissions(self.users, user, vhost).vhost_allowed:
            return f"access to vhost '{vhost}' refused for user '{user}'"
        state = self.running.state(vhost)
        return None if state == RUNNING else f"vhost '{vhost}' is down ({state})"

    # -- the data pipeline -----------------------------------------------------------------------------------------------

    async def data_request(self, name: str, user: str, vhost: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Ask a vhost; see `vhost/data_requests.py`. Raises Refused."""
        why = self.refusal(user, vhost)
        if why is not None:
            is_down = self.users.grant(user, vhost) is not None and self.users.has_vhost(vhost)
            raise Refused(*((503, "unavailable") if is_down else (403, "forbidden")), why)
        try:
            answer = await self.running.data(vhost, user, name, arguments)
        except VhostDownError as error:
            raise Refused(503, "unavailable", str(error)) from None
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
            pids = {os.getpid(), *self.running.pids(), *self._relay_pids}
            found = set()
            if sum(map(resident_bytes, pids)) > limit:
                found.add("memory")
            if shutil.disk_usage(config.data_dir).free < config.disk_free_limit:
                found.add("disk")
            for resource in found ^ set_now:
                self.running.alarm(resource, resource in found)
            set_now = found
            await asyncio.sleep(1)

    @property
    def _relay_pids(self) -> list[int]:
        return self._relays.pids if self._relays is not None else []

    # -- looking -----------------------------------------------------------------------------------------------------

    async def status(self) -> Status:
        """For the status page."""
        infos: list[dict[str, Any]] = []
        if self._running is not None:  # else it is starting
            running = self._running
            infos = await running.infos()
            seen = {info["name"] for info in infos}
            rest = [name for name in self.users.vhosts() if name not in seen]
            infos += [{**_NOTHING, "name": name, "state": running.state(name)} for name in rest]
            infos.sort(key=lambda info: str(info["name"]))
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
