"""A stage: the rows that one task of a Spark sink wants to publish, durable before anybody decides about them.

    stage file := header, stage record*, footer
    stage record := u32 bytes of payload, u32 CRC of the payload, payload            payload as in docs/format.md
    footer     := JSON, u32 bytes of JSON, u32 CRC of the JSON, "WSTG"

The name says whose it is: `<writer>/<batch>-<partition>-<attempt>-<random>.stage` below `stages/` of the vhost. It is written
under another name, synced, renamed, and then never changed. The footer has the number of rows and the exchanges that
they name. A file without one does not exist for anybody: its task never said that it was done.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import secrets
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote, unquote

from warren.errors import WarrenError
from warren.kernel.checksum import crc32c
from warren.kernel.stage_codec import decode_stage, encode_stage
from warren.storage.disk import Disk, DiskFile
from warren.storage.layout import HEADER_BYTES, pack_header

STAGES = "stages"
SUFFIX = ".stage"
STAGE_MAGIC = b"WRNG"
_FOOTER = struct.Struct("<II4s")
_FOOTER_MAGIC = b"WSTG"
_MOST_TRIES = 10  # to make a file in a directory that goes when it is empty
_NAME = re.compile(r"[A-Za-z0-9_~%]+/[A-Za-z0-9_~%-]+\.stage")


class StageError(WarrenError):
    """A stage that is not there, or not whole."""


@dataclass(frozen=True, slots=True)
class StageInfo:
    """What a stage's footer says."""

    count: int
    size: int  # of the records
    exchanges: tuple[str, ...]


def stage_path(root: str, name: str) -> str:
    """Where a stage of a vhost is. Names come from clients: one that points elsewhere is refused."""
    if not _NAME.fullmatch(name):
        raise StageError(f"{name!r} is not the name of a stage")
    return os.path.join(root, STAGES, name)


def stage_directory(root: str, writer: str) -> str:
    return os.path.join(root, STAGES, _quoted(writer))


def staged_bytes(root: str, writer: str, batch: str, disk: Disk | None = None) -> tuple[int, int]:
    """What all stages of a vhost take on disk, and those of one batch of a writer."""
    disk = disk or Disk()
    everything = ours = 0
    start = f"{_quoted(batch)}-"
    own = stage_directory(root, writer)
    stages = os.path.join(root, STAGES)
    for directory in [os.path.join(stages, name) for name in disk.listdir(stages)]:
        with contextlib.suppress(NotADirectoryError):
            for name in disk.listdir(directory):
                with contextlib.suppress(FileNotFoundError):  # renamed, released or dropped meanwhile
                    size = disk.size(os.path.join(directory, name))
                    everything += size
                    if directory == own and name.startswith(start):
                        ours += size
    return everything, ours


def batch_of(name: str) -> str:
    """The batch in the file name of a stage."""
    return unquote(name.partition("-")[0])


def _quoted(text: str) -> str:
    """As a part of a file name: no dot, because '..' leads elsewhere, and no dash, which divides the parts."""
    return quote(text, safe="").replace(".", "%2E").replace("-", "%2D")


class StageWriter:
    """Writes one stage. `finish` makes it durable; who does not come to its end calls `drop`, and nothing is left."""

    def __init__(
        self, root: str, writer: str, batch: str, partition: int, attempt: int, *, disk: Disk | None = None
    ) -> None:
        directory = stage_directory(root, writer)
        if len(os.path.basename(directory)) > 250:
            raise StageError(f"the name of writer {writer!r} is too long")
        stem = f"{_quoted(batch)}-{partition}-{attempt}-{secrets.token_hex(4)}{SUFFIX}"
        self.name = f"{os.path.basename(directory)}/{stem}"
        self.count = 0
        self.size = 0
        self._disk = disk or Disk()
        self._path = os.path.join(directory, stem)
        self._exchanges: set[str] = set()
        self._file = self._create(directory)
        try:
            self._file.append(pack_header(STAGE_MAGIC, 0))
        except BaseException:
            self.drop()
            raise

    def _create(self, directory: str) -> DiskFile:
        """The release of the batch before removes the directory where it is empty, perhaps between these two calls."""
        for _ in range(_MOST_TRIES):
            self._disk.make_dirs(directory, sync=False)  # `finish` does it
            with contextlib.suppress(FileNotFoundError):
                return self._disk.create(self._path + ".tmp")
        raise StageError(f"{directory} is removed as often as it is made")

    def add(self, heads: list[bytes], bodies: list[bytes], exchanges: Iterable[str]) -> None:
        """Some rows; `exchanges` are those that they name."""
        ends = struct.pack(f"<{len(bodies) + 1}i", *itertools.accumulate(map(len, bodies), initial=0))
        numbers = struct.pack(f"<{len(heads)}i", *range(len(heads)))
        self.add_columns(heads, memoryview(numbers), memoryview(ends), memoryview(b"".join(bodies)), exchanges)

    def add_columns(
        self, heads: list[bytes], numbers: memoryview, ends: memoryview, bodies: memoryview, exchanges: Iterable[str]
    ) -> None:
        """Some rows as Arrow has them: the numbers of their heads among `heads`, where their bodies end, and the bodies."""
        data = encode_stage(heads, numbers, ends, bodies)
        self._file.append(data)
        self.size += len(data)
        self.count += numbers.nbytes // 4
        self._exchanges.update(exchanges)

    def finish(self) -> StageInfo:
        """Durable when this returns."""
        text = json.dumps({"count": self.count, "bytes": self.size, "exchanges": sorted(self._exchanges)}).encode()
        self._file.append(text + _FOOTER.pack(len(text), crc32c(text), _FOOTER_MAGIC))
        self._file.sync()
        self._file.close()
        self._disk.rename(self._path + ".tmp", self._path)
        directory = self._path
        for _ in range(3):  # the writer's, that of all stages, the vhost's
            directory = os.path.dirname(directory)
            self._disk.sync_dir(directory)
        return StageInfo(self.count, self.size, tuple(sorted(self._exchanges)))

    def drop(self) -> None:
        """Also where `finish` has failed, wherever that was. What cannot be removed goes with the stages that nobody
        decides about."""
        self._file.close()
        for path in (self._path + ".tmp", self._path):
            with contextlib.suppress(OSError):
                self._disk.unlink(path)


def read_info(path: str, disk: Disk | None = None) -> StageInfo:
    """The footer of a stage. Raises StageError."""
    file, info = _open_stage(path, disk or Disk())
    file.close()
    return info


def _open_stage(path: str, disk: Disk) -> tuple[DiskFile, StageInfo]:
    """For reading, and what its footer says. Raises StageError."""
    try:
        file = disk.open_read(path)
    except FileNotFoundError as error:  # any other error of the disk may pass
        raise StageError(f"stage {path} cannot be read: {error}") from None
    try:
        return file, _footer_of(file)
    except BaseException:
        file.close()
        raise


def _footer_of(file: DiskFile) -> StageInfo:
    end = file.size - _FOOTER.size
    if end < HEADER_BYTES:
        raise StageError(f"stage {file.path} is cut short")
    length, crc, magic = _FOOTER.unpack(file.pread(_FOOTER.size, end))
    if magic != _FOOTER_MAGIC or length > end - HEADER_BYTES:
        raise StageError(f"stage {file.path} is cut short")
    text = file.pread(length, end - length)
    if crc32c(text) != crc:
        raise StageError(f"stage {file.path} is damaged at its end")
    said = json.loads(text)
    if HEADER_BYTES + said["bytes"] + length != end:
        raise StageError(f"stage {file.path} has not the {said['bytes']} bytes of rows that its end says")
    return StageInfo(said["count"], said["bytes"], tuple(said["exchanges"]))


class StageRows(NamedTuple):
    """Some rows of a stage, and the offset behind each. Rows in a row that have the same head have it once."""

    heads: list[bytes]
    counts: list[int]  # of rows with each head
    bodies: list[bytes]
    ends: list[int]


class StageReader:
    """Reads the rows of a stage from any record on."""

    def __init__(self, path: str, disk: Disk | None = None) -> None:
        self._path = path
        self._file, self.info = _open_stage(path, disk or Disk())
        self._end = HEADER_BYTES + self.info.size

    def read(self, offset: int, most: int, most_bytes: int) -> StageRows:
        """Up to `most` rows from `offset` on; 0: from the first."""
        start = offset or HEADER_BYTES
        rows = StageRows([], [], [], [])
        size = most_bytes
        while start < self._end:
            data = self._file.pread(min(size, self._end - start), start)
            needed = decode_stage(data, most, *rows)
            if rows.ends:
                break
            if needed <= len(data) or start + needed > self._end:
                raise StageError(f"stage {self._path}: the record at {start} is damaged")
            size = needed  # one that is larger than `most_bytes`
        rows.ends[:] = [start + end for end in rows.ends]
        return rows

    @property
    def end(self) -> int:
        return self._end

    def close(self) -> None:
        self._file.close()
