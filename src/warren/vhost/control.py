"""The control socket: how the node and its vhost processes talk.

A message is four bytes of length and JSON, over a Unix stream socket; a file descriptor may come with it, and is lost where
the receiver has no number left for it: then the message comes without. One table says what there is:

    node to vhost       hand_over   a client's socket, with what its handshake agreed on   (a descriptor; no answer)
                        grants      what a user may do has changed                         (answered when it holds)
                        open_vhost  serve one vhost more                                   (answered when it is up)
                        close_vhost tell its clients why, and serve it no more             (answered when it is closed)
                        operate     a request of an operator (`operator_requests.py`)      (answered)
                        alarm       memory or disk is short, or is not any more            (no answer)
                        status      counters of all queues                                 (answered)
                        data        a request of the data pipeline (`data_requests.py`)    (answered)
                        stop        tell clients why, finish the commits, write recovery
                                    terms, exit                                            (answered by the exit)
    vhost to node       up          recovery is done
                        answer      to the message with this id
                        failed      why it is about to exit

A vhost process lives as long as its control socket.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]

TO_VHOST = frozenset(("hand_over", "grants", "open_vhost", "close_vhost", "operate", "alarm", "status", "data", "stop"))
TO_NODE = frozenset(("up", "answer", "failed"))

_LENGTH = struct.Struct(">I")
_RECEIVE_BYTES = 65536
_MOST_DESCRIPTORS = 16
_MOST_MESSAGE_BYTES = 256 * 1024 * 1024


class ControlSocket:
    """One end, on a running loop."""

    def __init__(
        self,
        sock: socket.socket,
        received: Callable[[Message, int | None], None],
        ended: Callable[[], None],
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._received = received
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._in = bytearray()
        self._descriptors: deque[int | None] = deque()  # of messages that are not complete yet; None: it was lost
        self._out: deque[tuple[memoryview, int | None]] = deque()
        self._writing = False
        self._next_id = 1
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.closed = False
        self._loop.add_reader(sock.fileno(), self._readable)

    # -- out ---------------------------------------------------------------------------------------------------------

    def send(self, what: str, descriptor: int | None = None, **arguments: Any) -> None:
        """A descriptor is the socket's from now on: it is closed here once it is sent."""
        if self.closed:
            if descriptor is not None:
                os.close(descriptor)
            return
        data = json.dumps({"what": what, "descriptor": descriptor is not None, **arguments}, default=str).encode()
        self._out.append((memoryview(_LENGTH.pack(len(data)) + data), descriptor))
        if not self._writing:
            self._writable()

    async def ask(self, what: str, timeout: float = 5.0, **arguments: Any) -> Any:
        """Send, and return what the other side answers. Raises TimeoutError, or ConnectionError when it is gone."""
        if self.closed:
            raise ConnectionError("the control socket is closed")
        number = self._next_id
        self._next_id += 1
        future: asyncio.Future[Any] = self._loop.create_future()
        self._answers[number] = future
        try:
            self.send(what, id=number, **arguments)
            async with asyncio.timeout(timeout):
                return await future
        finally:
            self._answers.pop(number, None)

    def answer(self, message: Message, result: Any) -> None:
        self.send("answer", id=message["id"], result=result)

    def _writable(self) -> None:
        try:
            while self._out:
                data, descriptor = self._out[0]
                if descriptor is not None:
                    sent = socket.send_fds(self._sock, [data], [descriptor])
                    os.close(descriptor)
                else:
                    sent = self._sock.send(data)
                if sent < len(data):
                    self._out[0] = (data[sent:], None)
                else:
                    self._out.popleft()
        except BlockingIOError:
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._sock.fileno(), self._writable)
            return
        except OSError:
            self.close()
            return
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._sock.fileno())

    # -- in ----------------------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        try:
            data, descriptors, flags, _ = socket.recv_fds(self._sock, _RECEIVE_BYTES, _MOST_DESCRIPTORS)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors, flags = b"", [], 0
        self._descriptors.extend(descriptors)
        if flags & socket.MSG_CTRUNC:
            # This process has no number left for it, so it is closed already. One message has one, and what is received
            # at once ends with it: so it is this one that was lost, and the next must not be taken for it.
            self._descriptors.append(None)
        if not data:
            self.close()
            return
        self._in += data
        while len(self._in) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._in)
            if size > _MOST_MESSAGE_BYTES:
                self.close()
                return
            if len(self._in) < _LENGTH.size + size:
                return
            try:
                message = json.loads(bytes(self._in[_LENGTH.size : _LENGTH.size + size]))
            except ValueError:
                message = None
            del self._in[: _LENGTH.size + size]
            if not isinstance(message, dict) or "what" not in message:  # not one of us
                self.close()
                return
            self._dispatch(message)

    def _dispatch(self, message: Message) -> None:
        descriptor = self._descriptors.popleft() if message.pop("descriptor", False) and self._descriptors else None
        if message["what"] == "answer":
            future = self._answers.get(message.get("id", 0))
            if future is not None and not future.done():
                future.set_result(message.get("result"))
            return
        self._received(message, descriptor)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock.fileno())
        if self._writing:
            self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for descriptor in [*self._descriptors, *(fd for _, fd in self._out)]:
            if descriptor is not None:
                os.close(descriptor)
        self._descriptors.clear()
        self._out.clear()
        for future in self._answers.values():
            if not future.done():
                future.set_exception(ConnectionError("the other side is gone"))
        self._ended()
