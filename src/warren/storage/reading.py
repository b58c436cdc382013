"""Reading from a disk that may not be able to: one bad sector costs what lies in it, and nothing else.

A read that fails with EIO is tried again. If it fails again, it is done in small pieces, and zeros stand for those that
stay unreadable: no checksum of ours is true of zeros, so whoever wanted them finds them damaged and says so.
"""

from __future__ import annotations

import errno

from warren.storage.disk import Disk, DiskFile

_PIECE = 4096


def open_to_read(disk: Disk, path: str) -> DiskFile:
    """As `Disk.open_read`."""
    try:
        return disk.open_read(path)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return disk.open_read(path)


def read_around(file: DiskFile, count: int, offset: int) -> bytes:
    """As `DiskFile.pread`."""
    for _ in range(2):
        try:
            return file.pread(count, offset)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
    return _in_pieces(file, count, offset)


def _in_pieces(file: DiskFile, count: int, offset: int) -> bytes:
    pieces = []
    stop = offset + count
    while offset < stop:
        size = min(stop, (offset // _PIECE + 1) * _PIECE) - offset
        try:
            piece = file.pread(size, offset)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            piece = bytes(size)
        pieces.append(piece)
        if len(piece) < size:
            break
        offset += size
    return b"".join(pieces)


def read_whole(disk: Disk, path: str) -> bytes:
    """As `Disk.read`."""
    try:
        return disk.read(path)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
    file = open_to_read(disk, path)
    try:
        return read_around(file, file.size, 0)
    finally:
        file.close()
