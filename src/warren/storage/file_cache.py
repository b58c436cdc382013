"""Open files for reading, a bounded number of them, shared by all queues of a vhost."""

from __future__ import annotations

import errno
from collections import OrderedDict

from warren.storage.disk import Disk, DiskFile
from warren.storage.reading import open_to_read, read_around


class FileCache:
    """Requires: the engine's lock. A handle is good until the next call of `get`."""

    def __init__(self, disk: Disk, capacity: int = 256) -> None:
        self._disk = disk
        self._capacity = capacity
        self._open: OrderedDict[str, DiskFile] = OrderedDict()

    def get(self, path: str) -> DiskFile:
        file = self._open.get(path)
        if file is not None:
            self._open.move_to_end(path)
            return file
        try:
            file = open_to_read(self._disk, path)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self.close()  # the process has no file left to open: these can be opened again
            file = open_to_read(self._disk, path)
        self._open[path] = file
        if len(self._open) > self._capacity:
            self._open.popitem(last=False)[1].close()
        return file

    def read(self, path: str, count: int, offset: int) -> bytes:
        """Up to `count` bytes at `offset`; what cannot be read is zeros (`reading.py`)."""
        return read_around(self.get(path), count, offset)

    def drop(self, path: str) -> None:
        """The name is gone, or stands for another file now."""
        file = self._open.pop(path, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()
