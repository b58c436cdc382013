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
from warren.storage.layout import HEADER_BYTES, pack_header

STAGES = "stages"
SUFFIX = ".stage"
STAGE_MAGIC = b"WRNG"
_FOOTER = struct.Struct("<II4s")
_FOOTER_MAGIC = b"WSTG"
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


def staged_bytes(root: str, writer: str, batch: str) -> tuple[int, int]:
    """What all stages of a vhost take on disk, and those of one batch of a writer."""
    everything = ours = 0
    start = f"{_quoted(batch)}-"
    own = os.path.basename(stage_directory(root, writer))
    with contextlib.suppress(FileNotFoundError), os.scandir(os.path.join(root, STAGES)) as writers:
        for found in writers:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(found.path) as files:
                for file in files:
                    with contextlib.suppress(FileNotFoundError):
                        size = file.stat().st_size
                        everything += size
                        if found.name == own and file.name.startswith(start):
                            ours += size
    return everything, ours


def batch_of(name: str) -> str:
    """The batch in the file name of a stage."""
    return unquote(name.partition("-")[0])


def _quoted(text: str) -> str:
    """As a part of a file name: no dot, because '..' leads elsewhere, and no dash, which divides the parts."""
    return quote(text, safe="").replace(".", "%2E").replace("-", "%2D")


class StageWriter:
    """Writes one stage. `finish` makes it durable; without that it leaves nothing."""

    def __init__(self, root: str, writer: str, batch: str, partition: int, attempt: int) -> None:
        directory = stage_directory(root, writer)
        if len(os.path.basename(directory)) > 250:
            raise StageError(f"the name of writer {writer!r} is too long")
        os.makedirs(directory, exist_ok=True)
        stem = f"{_quoted(batch)}-{partition}-{attempt}-{secrets.token_hex(4)}{SUFFIX}"
        self.name = f"{os.path.basename(directory)}/{stem}"
        self._path = os.path.join(directory, stem)
        self._file = open(self._path + ".tmp", "wb")  # noqa: SIM115  # closed by finish or drop
        self._file.write(pack_header(STAGE_MAGIC, 0))
        self._exchanges: set[str] = set()
        self.count = 0
        self.size = 0

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
        self._file.write(data)
        self.size += len(data)
        self.count += numbers.nbytes // 4
        self._exchanges.update(exchanges)

    def finish(self) -> StageInfo:
        """Durable when this returns."""
        text = json.dumps({"count": self.count, "bytes": self.size, "exchanges": sorted(self._exchanges)}).encode()
        self._file.write(text + _FOOTER.pack(len(text), crc32c(text), _FOOTER_MAGIC))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.rename(self._path + ".tmp", self._path)
        directory = self._path
        for _ in range(3):  # the writer's, that of all stages, the vhost's
            directory = os.path.dirname(directory)
            _sync_directory(directory)
        return StageInfo(self.count, self.size, tuple(sorted(self._exchanges)))

    def drop(self) -> None:
        self._file.close()
        os.unlink(self._path + ".tmp")


def read_info(path: str) -> StageInfo:
    """The footer of a stage. Raises StageError."""
    try:
        with open(path, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - _FOOTER.size))
            length, crc, magic = _FOOTER.unpack(file.read(_FOOTER.size))
            if magic != _FOOTER_MAGIC or length > end:
                raise StageError(f"stage {path} is cut short")
            file.seek(end - _FOOTER.size - length)
            text = file.read(length)
    except (FileNotFoundError, struct.error) as error:  # any other error of the disk may pass
        raise StageError(f"stage {path} cannot be read: {error}") from None
    if crc32c(text) != crc:
        raise StageError(f"stage {path} is damaged at its end")
    said = json.loads(text)
    return StageInfo(said["count"], said["bytes"], tuple(said["exchanges"]))


class StageRows(NamedTuple):
    """Some rows of a stage, and the offset behind each. Rows in a row that have the same head have it once."""

    heads: list[bytes]
    counts: list[int]  # of rows with each head
    bodies: list[bytes]
    ends: list[int]


class StageReader:
    """Reads the rows of a stage from any record on."""

    def __init__(self, path: str) -> None:
        self.info = read_info(path)
        self._path = path
        self._end = HEADER_BYTES + self.info.size
        self._file = open(path, "rb")  # noqa: SIM115  # closed by close

    def read(self, offset: int, most: int, most_bytes: int) -> StageRows:
        """Up to `most` rows from `offset` on; 0: from the first."""
        start = offset or HEADER_BYTES
        rows = StageRows([], [], [], [])
        size = most_bytes
        while start < self._end:
            self._file.seek(start)
            data = self._file.read(min(size, self._end - start))
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


def _sync_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
