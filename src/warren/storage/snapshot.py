"""Snapshots: a consistent copy of a vhost by hard links, which opens as a store.

Taken between two commits, after the journal was rolled and the message stores sealed, so every linked file is one that
never changes again, or one whose owner copies it before it appends (`segment.py`). The manifest adds what no file has:
pending acks, and what is in the journal's place in time.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from typing import Any

from warren.storage.disk import Disk

MANIFEST = "manifest.json"
_LINKED = ("journal", "msg_store_persistent", "queues")
_COPIED = (".vhost",)
_SKIPPED = ("RESERVE",)


def link_store(disk: Disk, root: str, target: str) -> int:
    """Link every durable file below `root` into `target`; how many. Requires: the engine's lock, everything sealed."""
    count = 0
    for part in _LINKED:
        source = os.path.join(root, part)
        for path in disk.walk(source):
            name = os.path.basename(path)
            relative = os.path.relpath(path, root)
            if name in _SKIPPED or name.endswith((".tmp", ".part", ".db", ".db-wal", ".db-shm")) or ".lmdb" in relative:
                continue
            copy = os.path.join(target, relative)
            disk.make_dirs(os.path.dirname(copy))
            disk.link(path, copy)
            count += 1
    for name in _COPIED:
        path = os.path.join(root, name)
        if disk.exists(path):
            disk.replace(os.path.join(target, name), disk.read(path))
    return count


def write_manifest(disk: Disk, target: str, manifest: dict[str, Any]) -> None:
    data = json.dumps({**manifest, "taken_at": time.time()}, indent=1).encode()
    disk.replace(os.path.join(target, MANIFEST), data)


def copy_store(source: str, target: str) -> int:
    """Copy a snapshot's data directory to a place of its own, bytes and all; how many files. For backups."""
    count = 0

    def copy(path: str, to: str) -> str:
        nonlocal count
        count += 1
        return str(shutil.copy2(path, to))

    shutil.copytree(source, target, copy_function=copy)
    return count
