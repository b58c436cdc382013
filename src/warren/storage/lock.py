"""One process owns a vhost's directory. The lock goes with the process, however it ends."""

from __future__ import annotations

import fcntl
import os
import time

from warren.errors import StoreLockedError
from warren.storage.running_node import node_of_vhost

_WAITS = (0.005, 0.02)


def in_use(root: str, owner: str) -> str:
    """Who has a vhost's directory, and what to do about it. A broker's vhosts live in children, which come back when they
    are stopped: so it is the broker that is named."""
    node = node_of_vhost(root)
    if node is None:
        return f"{root} is in use by process {owner}. Close it there, or stop that process"
    return (
        f"{root} is in use by {node}. Stop that broker, or ask it while it runs: "
        f"`warren spark sql|report|archive --url {node.url} --user NAME`"
    )


class DirectoryLock:
    """Held from construction to `release`."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not self._taken():
            owner = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            if owner == str(os.getpid()):
                raise StoreLockedError(
                    f"{os.path.dirname(path)} is in use by process {owner}, this one. Share that store, or close it first"
                ) from None
            raise StoreLockedError(in_use(os.path.dirname(path), owner)) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def _taken(self) -> bool:
        """Tries a few times: a reader who wants to know whether there is an owner holds the lock for an instant."""
        for wait in (*_WAITS, None):
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if wait is not None:
                    time.sleep(wait)
        return False

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
