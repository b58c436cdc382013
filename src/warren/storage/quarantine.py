"""Damage is copied, not cut out: the bytes go to `quarantine/`, one line to its log."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

from warren.storage.disk import Disk

_MOST_BYTES = 1024 * 1024  # of one damaged place
_MOST_REPORTS = 10_000


class Quarantine:
    """`report` may be called by any thread; damage that was reported before is not reported again by this process."""

    def __init__(self, disk: Disk, root: str, listener: Callable[[dict[str, object]], None] | None = None) -> None:
        self._disk = disk
        self._root = root
        self._directory = os.path.join(root, "quarantine")
        self._known: set[tuple[str, int, int]] = set()
        self._listener = listener
        self.reports: list[dict[str, object]] = []

    def report(self, path: str, offset: int, length: int, seq: int, why: str, sid: int = -1) -> None:
        """Bytes [offset, offset + length) of `path` cannot be used."""
        place = (path, offset, seq if offset == 0 else -1)  # 0: of a file as a whole, message by message
        if place in self._known or len(self.reports) >= _MOST_REPORTS:
            return
        self._known.add(place)
        line: dict[str, object] = {
            "file": os.path.relpath(path, self._root),
            "offset": offset,
            "length": length,
            "queue": sid >> 8 if sid >= 0 else None,
            "seq_id": seq if seq >= 0 else None,
            "why": why,
        }
        self.reports.append(line)
        try:
            self._copy(path, offset, length, line)
        except OSError:  # a full or failing disk must not keep the rest of the store from being served
            line["copy"] = None
        if self._listener is not None:
            self._listener(line)

    def _copy(self, path: str, offset: int, length: int, line: dict[str, object]) -> None:
        self._disk.make_dirs(self._directory)
        name = f"{len(self._disk.listdir(self._directory))}.bin"
        data = b""
        if self._disk.exists(path):
            source = self._disk.open_read(path)
            try:
                data = source.pread(min(length, _MOST_BYTES), offset)
            finally:
                source.close()
        target = self._disk.create(os.path.join(self._directory, name))
        try:
            target.append(data)
        finally:
            target.close()
        line["copy"] = name
        log_path = os.path.join(self._directory, "log.jsonl")
        log = self._disk.open(log_path) if self._disk.exists(log_path) else self._disk.create(log_path)
        try:
            log.append(json.dumps(line).encode() + b"\n")
        finally:
            log.close()
