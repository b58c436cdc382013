"""The vhosts that a node runs, whichever way it runs them: each in a process of its own (`process_vhosts.py`) or all in the
node's (`inline_vhosts.py`). They can be opened and closed at any time; the others do not notice.
"""

from __future__ import annotations

import socket
from typing import Any, Protocol

from warren.errors import WarrenError
from warren.node.handshake import Opened


class VhostDownError(WarrenError):
    """The vhost does not come up, or does not answer."""


class RunningVhosts(Protocol):
    async def start(self, names: list[str]) -> None:
        """All of them, when the node starts. One that does not come up is no error: its state says so."""

    async def stop(self) -> None:
        """All of them, when the node stops."""

    def state(self, name: str) -> str:
        """A word of `vhost/supervisor.py`: running, starting, restarting, down, stopped."""

    async def open(self, name: str) -> None:
        """Serve it. Requires: it is closed or down. Raises VhostDownError with the reason when it does not come up."""

    async def close(self, name: str, why: str, *, state: str, patience: float | None = None) -> None:
        """Serve it no more: its clients are told why, its commits are finished. `state` is what it is from now on. With
        `patience` it is ended by force after so many seconds, where that can be done. Closed already: only the state."""

    def forget(self, name: str) -> None:
        """It was closed, and is deleted."""

    async def hand_over(self, sock: socket.socket, opened: Opened) -> None:
        """A client is the vhost's from now on."""

    async def grant_changed(self, user: str, vhost: str) -> None:
        """Returns when no older answer is used there. Raises VhostDownError when that cannot be said."""

    async def data(self, vhost: str, user: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """A request of the pipeline (`vhost/data_requests.py`). Raises VhostDownError."""

    async def operate(self, vhost: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """A request of an operator (`vhost/operator_requests.py`). Raises VhostDownError."""

    def alarm(self, resource: str, is_set: bool) -> None:
        """Memory or disk is short, or is not any more; also for vhosts that are opened later."""

    async def infos(self) -> list[dict[str, Any]]:
        """`Vhost.info` of all that run."""

    def pids(self) -> set[int]:
        """Of their processes, without the node's own."""
