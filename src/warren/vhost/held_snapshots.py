"""Snapshots that readers far away hold: each has a time to live, which heartbeats renew, and goes when that is over.

They are hard links below `snapshots/` of the vhost, so they cost the disk space of what is deleted meanwhile. They outlive
a restart of the vhost: whoever reads goes on reading.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import time
from typing import TYPE_CHECKING, Any

from warren.vhost.chosen_queues import choose
from warren.vhost.permissions import Permissions
from warren.vhost.refused import Refused, bad_request, forbidden, not_found

if TYPE_CHECKING:
    from warren.vhost.vhost import Vhost

PREFIX = "held-"
_NOTE = "held.json"
_MOST_SECONDS = 7 * 86_400
_SWEEP_SECONDS = 5.0
_MOST_HELD = 256  # by one user
_MOST_GROUP = 120


class HeldSnapshots:
    """The snapshots of one vhost that its pipeline holds."""

    def __init__(self, vhost: Vhost) -> None:
        self._vhost = vhost
        self._disk = vhost.store.disk
        self._directory = os.path.join(vhost.store.root, "snapshots")
        self._held: dict[str, dict[str, Any]] = {}
        self._task: asyncio.Task[None] | None = None
        for name in self._disk.listdir(self._directory):
            if name.startswith(PREFIX):
                self._find(name)

    def _find(self, name: str) -> None:
        """One that an earlier process took; without its note it was never finished."""
        try:
            self._held[name] = json.loads(self._disk.read(os.path.join(self._directory, name, _NOTE)))
            self._watch()
        except (OSError, ValueError):
            self._drop(name)

    def _drop(self, name: str) -> None:
        """The files; what cannot be removed now is found by the next process, without its note."""
        path = os.path.join(self._directory, name)
        with contextlib.suppress(OSError):
            self._disk.unlink(os.path.join(path, _NOTE))
        with contextlib.suppress(OSError):
            self._disk.remove_tree(path)

    async def take(
        self,
        permissions: Permissions,
        *,
        queues: list[str] | None = None,
        pattern: str | None = None,
        ttl: float = 3600.0,
        group: str | None = None,
    ) -> dict[str, Any]:
        """A snapshot of the queues that the user may read, of this instant. Those of a group may be released together."""
        if group is not None and not 0 < len(group) <= _MOST_GROUP:
            raise bad_request(f"snapshotGroup is {group!r}; it is a name of 1 to {_MOST_GROUP} characters")
        if not 0 < ttl <= _MOST_SECONDS:
            raise bad_request(f"snapshotTtl is {ttl}; it is a number of seconds up to {_MOST_SECONDS}")
        chosen = choose(self._vhost, permissions, queues, pattern)
        if not chosen:
            raise not_found(f"there is no queue in vhost {self._vhost.name!r} that {permissions.user!r} may read here")
        if sum(note["user"] == permissions.user for note in self._held.values()) >= _MOST_HELD:
            raise Refused(
                503, "unavailable", f"user {permissions.user!r} holds {_MOST_HELD} snapshots: warren snapshots release"
            )
        name = f"{PREFIX}{secrets.token_hex(8)}"
        path = os.path.join(self._directory, name)
        try:
            root = await asyncio.to_thread(self._vhost.store.snapshot, path, set(chosen), transients=True)
        except BaseException:
            self._drop(name)
            raise
        counts = json.loads(self._disk.read(os.path.join(root, "manifest.json")))["queues"]
        note = {
            "id": name,
            "vhost": self._vhost.name,
            "user": permissions.user,
            "queues": {
                queue: {"ready": said["ready"], "unacknowledged": said["unacknowledged"]}
                for queue, said in counts.items()
            },
            "taken_at": time.time(),
            "ttl": ttl,
            "until": time.time() + ttl,
            "group": group,
        }
        self._held[name] = note
        await asyncio.to_thread(self._write, name, json.dumps(note).encode())
        self._watch()
        return {**note, "path": os.path.abspath(path)}

    def _write(self, name: str, note: bytes) -> None:
        self._disk.replace(os.path.join(self._directory, name, _NOTE), note)

    async def heartbeat(self, permissions: Permissions, *, id: str) -> dict[str, Any]:
        note = self._own(permissions, id)
        note["until"] = time.time() + note["ttl"]
        with contextlib.suppress(OSError):  # it was released, or another heartbeat writes it
            await asyncio.to_thread(self._write, id, json.dumps(note).encode())
        return {"until": note["until"]}

    async def release(
        self, permissions: Permissions, *, id: str | None = None, group: str | None = None
    ) -> dict[str, Any]:
        """One, or all of the user's that are of a group; it may be that there is none any more."""
        if (id is None) == (group is None):
            raise bad_request("snapshots/release wants an id, or a group")
        if id is not None:
            self._own(permissions, id)
            await self._remove(id)
            return {"released": True}
        mine = [
            name for name, note in self._held.items() if (note["user"], note.get("group")) == (permissions.user, group)
        ]
        for name in mine:
            await self._remove(name)
        return {"released": len(mine)}

    def list(self, permissions: Permissions) -> dict[str, Any]:
        """The user's own, and those of queues that he may read all: the others' names and depths are not his to know."""
        return {
            "snapshots": [
                {**note, "messages": sum(q["ready"] + q["unacknowledged"] for q in note["queues"].values())}
                for note in sorted(self._held.values(), key=lambda note: str(note["taken_at"]))
                if note["user"] == permissions.user or self._unreadable(permissions, note) is None
            ]
        }

    def _own(self, permissions: Permissions, name: str) -> dict[str, Any]:
        note = self._held.get(name)
        if note is None:
            raise not_found(f"no snapshot {name!r} in vhost {self._vhost.name!r}; it was released, or its time is over")
        queue = self._unreadable(permissions, note)
        if queue is not None:
            raise forbidden(f"user {permissions.user!r} may not read queue {queue!r}")
        return note

    @staticmethod
    def _unreadable(permissions: Permissions, note: dict[str, Any]) -> str | None:
        """A queue of it that the user may not read; None: there is none."""
        return next((queue for queue in note["queues"] if not permissions.check("read", "queue", queue)), None)

    async def _remove(self, name: str) -> None:
        self._held.pop(name, None)
        await asyncio.to_thread(self._drop, name)

    def _watch(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._sweep())

    async def _sweep(self) -> None:
        while self._held:
            now = time.time()
            for name in [name for name, note in self._held.items() if note["until"] < now]:
                await self._remove(name)
            await asyncio.sleep(_SWEEP_SECONDS)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
