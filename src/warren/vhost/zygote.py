"""The warm parent: a process that has imported everything and does nothing but fork.

A vhost process that is forked from it starts in milliseconds and shares its memory with all others. It must be started
before the node has a thread or a loop, because neither survives a fork.

Node to zygote: {"name", "arguments"} with the child's control socket. Zygote to node: {"exited", "status"}.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import struct
import sys
from typing import Any

_LENGTH = struct.Struct(">I")


def start_zygote() -> tuple[socket.socket, int]:
    """Fork it; the node's socket to it and its pid. Requires: one thread, no loop."""
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        theirs.close()
        return ours, pid
    code = 1
    try:
        ours.close()
        _Zygote(theirs).run()
        code = 0
    finally:
        os._exit(code)


class _Zygote:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._children: dict[int, str] = {}

    def run(self) -> None:
        import warren.vhost.process  # noqa: F401  # warm: what every child needs is imported once

        gc.collect()
        gc.freeze()  # what is here now is never garbage: the collector does not touch, and so not copy, shared pages
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it goes with the node's socket
        woken, wake = socket.socketpair()
        for end in (woken, wake):
            end.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        while True:
            readable, _, _ = select.select([self._sock, woken], [], [])
            if woken in readable:
                with contextlib.suppress(BlockingIOError):
                    while woken.recv(4096):
                        pass
                self._reap()
            if self._sock in readable and not self._fork_one(wake, woken):
                return

    def _fork_one(self, *others: socket.socket) -> bool:
        """False: the node is gone."""
        message, descriptor = self._read()
        if message is None or descriptor is None:
            return False
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            os.close(descriptor)
            self._children[pid] = message["name"]
            return True
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            for other in (self._sock, *others):
                other.close()
            from warren.vhost.process import run

            code = run(socket.socket(fileno=descriptor), message["arguments"])
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _read(self) -> tuple[dict[str, Any] | None, int | None]:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._sock, _LENGTH.size, 1)
            if len(data) < _LENGTH.size:
                return None, None
            (size,) = _LENGTH.unpack(data)
            parts = b""
            while len(parts) < size:
                more = self._sock.recv(size - len(parts))
                if not more:
                    return None, None
                parts += more
        except OSError:
            return None, None
        return json.loads(parts), descriptors[0] if descriptors else None

    def _reap(self) -> None:
        while self._children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            name = self._children.pop(pid, None)
            if name is not None:
                data = json.dumps({"exited": name, "pid": pid, "status": os.waitstatus_to_exitcode(status)}).encode()
                with contextlib.suppress(OSError):
                    self._sock.sendall(_LENGTH.pack(len(data)) + data)


def request(name: str, arguments: dict[str, Any]) -> bytes:
    """The message that makes the zygote fork."""
    data = json.dumps({"name": name, "arguments": arguments}).encode()
    return _LENGTH.pack(len(data)) + data
