"""One process owns a vhost's directory. The lock goes with the process, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time

from warren.errors import StoreLockedError
from warren.storage.running_node import node_of_vhost

_WAITS = (0.005, 0.02)
_OWNER_BYTES = 32


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
    """Held from construction to `release`. The file says who has it, for people; that need not be safe, or succeed."""

    def __init__(self, path: str) -> None:
        self._owner = os.getpid()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not self._taken():
                owner = os.pread(self._fd, _OWNER_BYTES, 0).decode(errors="replace").strip() or "unknown"
                if owner == str(self._owner):
                    raise StoreLockedError(
                        f"{os.path.dirname(path)} is in use by process {owner}, this one. Share that store, or close it first"
                    )
                raise StoreLockedError(in_use(os.path.dirname(path), owner))
            with contextlib.suppress(OSError):  # a full disk: what is on it can be consumed all the same
                os.pwrite(
                    self._fd, f"{self._owner}\n".encode().ljust(_OWNER_BYTES), 0
                )  # over what is there: needs no room
        except BaseException:
            self.release()  # else nobody could open the directory as long as this process lives
            raise

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
        """Also where a process that was forked meanwhile has the same descriptor: its lock goes, but not by that process."""
        if self._fd >= 0:
            if os.getpid() == self._owner:
                with contextlib.suppress(OSError):
                    fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1
