"""The node's control socket: how operators, and later the management process, change a node that runs.

It is the Unix socket `control.sock` in the data directory. The file belongs to the node's user alone, and that is the whole
question of who may: whoever can open it could as well read the password hashes beside it. Messages are those of
`vhost/control.py` (four bytes of length, then JSON): `{"what": "request", "id", "name", "arguments"}`, answered by
`{"what": "answer", "id", "result"}`, in which there is `result`, or `status`, `error` and `reason`. One table says what
there is:

    vhosts/list                                     name and state of each
    vhosts/add, delete, stop, start, restart        name
    users/list                                      name and tags of each
    users/add                                       user, password, tags
    users/delete                                    user
    users/password                                  user, password
    users/tags                                      user, tags
    permissions/list                                user or none, vhost or none
    permissions/set                                 user, vhost, configure, write, read
    permissions/clear                               user, vhost
    topic_permissions/list                          user or none, vhost or none
    topic_permissions/set                           user, vhost, exchange, write, read
    topic_permissions/clear                         user, vhost, exchange or none (all)
    policies/list                                   vhost or none, operator
    policies/set                                    vhost, operator, name, pattern, definition, apply_to, priority
    policies/clear                                  vhost, operator, name
    status                                          what the status page shows

A change is answered when it is safe on disk and holds in every process (`operations.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from warren.errors import WarrenError
from warren.vhost.control import ControlSocket, Message
from warren.vhost.refused import Refused

if TYPE_CHECKING:
    from warren.node.operations import Operations

log = logging.getLogger("warren.node")

SOCKET_NAME = "control.sock"
_LENGTH = struct.Struct(">I")
_BACKLOG = 64
_MOST_PATH_BYTES = 100  # of a Unix socket; 107 on Linux
_ANSWER_SECONDS = 660.0  # a vhost may recover for ten minutes


class NoNodeError(WarrenError):
    """No node runs in the data directory, or it may not be asked."""


@contextlib.contextmanager
def _address(data_dir: str) -> Iterator[str]:
    """A name of the socket that is short enough, however deep the data directory is."""
    path = os.path.join(data_dir, SOCKET_NAME)
    if len(os.fsencode(path)) <= _MOST_PATH_BYTES:
        yield path
        return
    directory = os.open(data_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{SOCKET_NAME}"
    finally:
        os.close(directory)


class ControlServer:
    """The node's end. Requires: the node holds the data directory (`node.db` is locked), so an old socket is a dead one."""

    def __init__(self, data_dir: str, operations: Operations) -> None:
        self._data_dir = data_dir
        self._path = os.path.join(data_dir, SOCKET_NAME)
        self._operations = operations
        self._listener: socket.socket | None = None
        self._clients: set[ControlSocket] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _address(self._data_dir) as address:
                listener.bind(address)
        except OSError as error:  # not every filesystem has sockets; clients are served all the same
            listener.close()
            log.error("no control socket in %s, so operators cannot reach this node: %s", self._data_dir, error)
            return
        os.chmod(self._path, 0o600)  # nobody can connect before `listen`
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        self._listener = listener
        self._spawn(self._accept(listener))

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in list(self._clients):
            client.close()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("control socket: %s", error)
                await asyncio.sleep(0.1)
                continue
            self._serve(sock)

    def _serve(self, sock: socket.socket) -> None:
        def received(message: Message, descriptor: int | None) -> None:
            if descriptor is not None:
                os.close(descriptor)
            if message["what"] == "request" and isinstance(message.get("id"), int):
                self._spawn(self._answer(client, message))
            else:
                client.close()

        client = ControlSocket(sock, received, lambda: self._clients.discard(client))
        self._clients.add(client)

    async def _answer(self, client: ControlSocket, message: Message) -> None:
        """Also when who asked is gone meanwhile: a change is not left half done."""
        client.answer(message, await self._operations.answer(message.get("name"), message.get("arguments")))


class ControlClient:
    """An operator's end, for commands: it blocks.

    with ControlClient("data") as node:
        node.call("vhosts/add", name="orders")
    """

    def __init__(self, data_dir: str | os.PathLike[str]) -> None:
        """Raises NoNodeError."""
        self._data_dir = os.fspath(data_dir)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.settimeout(_ANSWER_SECONDS)
        try:
            with _address(self._data_dir) as address:
                self._sock.connect(address)
        except OSError as error:
            self._sock.close()
            if isinstance(error, PermissionError):
                why = "this user may not use its control socket; ask as the user who runs it"
            else:
                why = f"start it (warren serve --data-dir {self._data_dir}), or say another --data-dir"
            raise NoNodeError(f"no node answers in data directory {self._data_dir!r}: {why}") from None

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self._sock.close()

    def call(self, name: str, /, **arguments: Any) -> Any:
        """What the node answers. Raises Refused, or NoNodeError when it goes away meanwhile."""
        request = {"what": "request", "id": 1, "name": name, "arguments": arguments}
        data = json.dumps(request).encode()
        try:
            self._sock.sendall(_LENGTH.pack(len(data)) + data)
            (size,) = _LENGTH.unpack(self._read(_LENGTH.size))
            answer = json.loads(self._read(size))["result"]
        except OSError:
            raise NoNodeError(
                f"the node in data directory {self._data_dir!r} went away before it answered {name}; look whether it was done"
            ) from None
        if "result" not in answer:
            raise Refused(answer["status"], answer["error"], answer["reason"])
        return answer["result"]

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            more = self._sock.recv(count - len(data))
            if not more:
                raise ConnectionError("the node closed the control socket")
            data += more
        return bytes(data)
