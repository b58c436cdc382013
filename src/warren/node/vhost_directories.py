"""The directories of vhosts that were deleted.

A deletion is first written to `node.db`; then the vhost is closed, its directory moves to `trash/` of the data directory, the
name is free again, and what is in the trash goes. A node that died in between finishes that when it starts. Nothing else is
ever deleted here: a directory that `node.db` does not mention stays.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import threading

from warren.node.users import Users
from warren.storage.disk import Disk
from warren.storage.layout import hashed

TRASH_NAME = "trash"
_trash_lock = threading.Lock()  # two vhosts may be deleted at once: one's empty trash is the other's way out


def remove_deleted(users: Users, data_dir: str, vhost: str) -> None:
    """The directory of one vhost. Requires: it is among `Users.deleted_vhosts`, and no process has it open."""
    root = os.path.join(data_dir, "vhosts", hashed(vhost))
    if os.path.exists(root):
        disk = Disk()
        trash = os.path.join(data_dir, TRASH_NAME)
        with _trash_lock:
            os.makedirs(trash, exist_ok=True)
            os.rename(root, os.path.join(trash, f"{os.path.basename(root)}-{secrets.token_hex(4)}"))
        # Before the name is free: else a power cut could bring the messages back, into the next vhost of that name.
        disk.sync_dir(os.path.dirname(root))
    users.vhost_is_gone(vhost)
    empty_trash(data_dir)


def finish_deletions(users: Users, data_dir: str) -> None:
    """What a node that died has left. Called before any vhost is opened."""
    for vhost in users.deleted_vhosts():
        remove_deleted(users, data_dir, vhost)
    empty_trash(data_dir)


def empty_trash(data_dir: str) -> None:
    trash = os.path.join(data_dir, TRASH_NAME)
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(trash):
            shutil.rmtree(os.path.join(trash, name), ignore_errors=True)
    with _trash_lock, contextlib.suppress(OSError):  # another deletion has put something in
        os.rmdir(trash)
