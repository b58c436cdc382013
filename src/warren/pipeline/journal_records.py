"""The records of a journal, one after the other, as they lie in its files.

For people who want to see what happened: recovery has a replay of its own, in the kernel. What does not check out is shown
as a record of type `damaged`, and reading goes on at the next block.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import NamedTuple

from warren.kernel.checksum import crc32c
from warren.kernel.journal_codec import (
    ACK,
    BLOCK_HEADER_BYTES,
    CHECKOUT,
    DEDUP,
    DELAY,
    GROUP,
    LEASE,
    PUBLISH,
    PURGE,
    RECORD_PREFIX_BYTES,
    REQUEUE,
    RESERVE,
    SETTLE,
    STAGE,
)
from warren.storage.disk import Disk
from warren.storage.journal import list_files, read_floor
from warren.storage.layout import HEADER_BYTES, journal_path

TYPES = {
    PUBLISH: "publish",
    ACK: "ack",
    PURGE: "purge",
    REQUEUE: "requeue",
    RESERVE: "reserve",
    GROUP: "group",
    CHECKOUT: "checkout",
    SETTLE: "settle",
    LEASE: "lease",
    STAGE: "stage",
    DELAY: "delay",
    DEDUP: "dedup",
}

_PREFIX = struct.Struct("<II")
_BLOCK = struct.Struct("<4sIQQ4xI")
_MAGIC = b"WBLK"


class JournalRecord(NamedTuple):
    """One record; `sid`, `seq_id` and `amount` where its type has them."""

    file: int
    offset: int
    lsn: int | None
    type: str
    sid: int | None
    seq_id: int | None
    amount: int | None  # targets of a publish, messages of an ack, members of a group
    bytes: int
    in_group: bool
    needed: bool


def journal_records(directory: str, number: int) -> Iterator[JournalRecord]:
    """All records of one file, which may be a dead one."""
    floor, _ = read_floor(Disk(), directory)
    with open(journal_path(directory, number), "rb") as file:
        data = file.read()
    yield from _records(data, number, number >= floor)


def journal_numbers(directory: str) -> list[int]:
    """The numbers of all journal files."""
    return list_files(Disk(), directory) if os.path.isdir(directory) else []


def _records(data: bytes, number: int, needed: bool) -> Iterator[JournalRecord]:
    at, lsn = HEADER_BYTES, None
    while at < len(data):
        block = _block_at(data, at)
        if block is not None:
            lsn = block
            at += BLOCK_HEADER_BYTES
            continue
        length = _length_at(data, at)
        if length is None:
            following = _next_block(data, at + 1)
            if any(data[at:following]):  # zeros were never written
                yield JournalRecord(number, at, lsn, "damaged", None, None, None, following - at, False, needed)
            at = following
            continue
        yield _record(data, at, length, number, lsn, False, needed)
        if data[at + RECORD_PREFIX_BYTES] == GROUP:
            yield from _members(data, at, length, number, lsn, needed)
        at += RECORD_PREFIX_BYTES + length


def _members(data: bytes, at: int, length: int, number: int, lsn: int | None, needed: bool) -> Iterator[JournalRecord]:
    inner, stop = at + RECORD_PREFIX_BYTES + 4, at + RECORD_PREFIX_BYTES + length
    while inner < stop:
        size = _PREFIX.unpack_from(data, inner)[0]
        yield _record(data, inner, size, number, lsn, True, needed)
        inner += RECORD_PREFIX_BYTES + size


def _record(
    data: bytes, at: int, length: int, number: int, lsn: int | None, in_group: bool, needed: bool
) -> JournalRecord:
    content = at + RECORD_PREFIX_BYTES
    kind = data[content]
    sid = seq = count = None
    if kind == PUBLISH:
        count = struct.unpack_from("<H", data, content + 2)[0]
        sid, seq = struct.unpack_from("<QQ", data, content + 24)
    elif kind in (ACK, PURGE, REQUEUE):
        entries, sid = struct.unpack_from("<IQ", data, content + 4)
        seq = struct.unpack_from("<Q", data, content + 16)[0] if entries else None
        count = entries
        if kind != REQUEUE:
            count = sum(struct.unpack_from("<Q", data, content + 24 + 16 * i)[0] for i in range(entries))
    elif kind == RESERVE:
        uid, seq = struct.unpack_from("<QQ", data, content + 8)
        sid = uid << 8
    elif kind == GROUP:
        count = _count_members(data, content + 4, content + length)
    name = TYPES.get(kind, f"unknown {kind}")
    return JournalRecord(number, at, lsn, name, sid, seq, count, RECORD_PREFIX_BYTES + length, in_group, needed)


def _count_members(data: bytes, at: int, stop: int) -> int:
    count = 0
    while at < stop:
        at += RECORD_PREFIX_BYTES + int(_PREFIX.unpack_from(data, at)[0])
        count += 1
    return count


def _block_at(data: bytes, at: int) -> int | None:
    """The LSN of a block that begins here."""
    if len(data) - at < BLOCK_HEADER_BYTES or data[at : at + 4] != _MAGIC:
        return None
    _, _, lsn, _, crc = _BLOCK.unpack_from(data, at)
    return int(lsn) if crc32c(data[at : at + BLOCK_HEADER_BYTES - 4]) == crc else None


def _next_block(data: bytes, at: int) -> int:
    while (at := data.find(_MAGIC, at)) >= 0:
        if _block_at(data, at) is not None:
            return at
        at += 1
    return len(data)


def _length_at(data: bytes, at: int) -> int | None:
    """The length of a record that begins here and checks out."""
    if len(data) - at < RECORD_PREFIX_BYTES + 2:
        return None
    length, crc = _PREFIX.unpack_from(data, at)
    start = at + RECORD_PREFIX_BYTES
    if length < 2 or start + length > len(data) or crc32c(memoryview(data)[start : start + length]) != crc:
        return None
    return int(length)
