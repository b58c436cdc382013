"""The file `recovery`: what a clean stop knew, so that the next start need not read segments.

    recovery := header, JSON, terms of the message store, u32 CRC of all before
    header   := "WRNR", u32 bytes of JSON, u64 bytes of the store's terms

It is erased as soon as a start has made sure that it can read what it describes, so it can never describe a store that has
changed since.
"""

from __future__ import annotations

import json
import os
import struct
import time
from base64 import b64decode, b64encode
from typing import Any, NamedTuple

from warren.errors import StoreFormatError
from warren.kernel.checksum import crc32c
from warren.storage.disk import Disk
from warren.storage.layout import FORMAT_VERSION
from warren.storage.queue_index import QueueIndex
from warren.storage.reading import read_whole
from warren.storage.segment import Report

TERMS_NAME = "recovery"
TERMS_HEADER_BYTES = 16
_HEADER = struct.Struct("<4sIQ")
assert _HEADER.size == TERMS_HEADER_BYTES
_MAGIC = b"WRNR"


class TermsDamaged(Exception):
    """The file is not what a clean stop wrote; `length` bytes from its beginning on."""

    def __init__(self, why: str, length: int) -> None:
        super().__init__(why)
        self.length = length


class RecoveryTerms(NamedTuple):
    """The terms of a vhost, and those of its message store, which `store_format.decode_terms` reads."""

    vhost: dict[str, Any]
    store: bytes
    store_offset: int  # where they begin in the file


def write_terms(disk: Disk, root: str, terms: dict[str, Any], store_terms: bytes) -> None:
    """The last act of a clean stop."""
    whole = {"format": FORMAT_VERSION, **terms, "written_at": time.time()}
    text = json.dumps(whole, separators=(",", ":")).encode()
    data = _HEADER.pack(_MAGIC, len(text), len(store_terms)) + text + store_terms
    disk.replace(os.path.join(root, TERMS_NAME), data + struct.pack("<I", crc32c(data)))


def unpack_terms(data: bytes, path: str) -> RecoveryTerms:
    """Raises TermsDamaged, and StoreFormatError for terms of another version."""
    if len(data) < TERMS_HEADER_BYTES + 4 or struct.unpack("<I", data[-4:])[0] != crc32c(data[:-4]):
        raise TermsDamaged("the CRC is wrong", len(data))
    magic, text_length, store_length = _HEADER.unpack_from(data)
    start = TERMS_HEADER_BYTES + text_length
    if magic != _MAGIC or start + store_length + 4 != len(data):
        raise TermsDamaged("the header is wrong", TERMS_HEADER_BYTES)
    terms: dict[str, Any] = json.loads(data[TERMS_HEADER_BYTES:start])
    if terms.get("format") != FORMAT_VERSION:
        raise StoreFormatError(
            f"{path} has format version {terms.get('format')}; this Warren reads version {FORMAT_VERSION}. "
            "Open it with the Warren that wrote it, or a newer one"
        )
    return RecoveryTerms(terms, data[start:-4], start)


def read_terms(disk: Disk, root: str, report: Report) -> RecoveryTerms | None:
    """None: the last stop was dirty, or the terms are damaged. Whoever goes on from here calls `erase_terms`."""
    path = os.path.join(root, TERMS_NAME)
    if not disk.exists(path):
        return None
    data = read_whole(disk, path)
    try:
        return unpack_terms(data, path)
    except TermsDamaged:
        report(path, 0, len(data), -1, "recovery terms do not check out; everything is read again")
        return None


def erase_terms(disk: Disk, root: str) -> None:
    """From now on only the files say what is alive."""
    path = os.path.join(root, TERMS_NAME)
    if disk.exists(path):
        disk.unlink(path)
        disk.sync_dir(root)


def pack_segments(index: QueueIndex) -> list[list[Any]]:
    """The segments of an index for the terms."""
    return [
        [segment.number, segment.live_count, segment.qs_end, b64encode(bytes(segment.live)).decode(), segment.written]
        for segment in index.segments.values()
        if segment.live_count
    ]


def segment_numbers(packed: list[list[Any]]) -> list[int]:
    """Which segments the terms of a stream name."""
    return [segment[0] for segment in packed]


def unpack_segments(index: QueueIndex, packed: list[list[Any]]) -> None:
    for number, live_count, qs_end, live, written in packed:
        segment = index.segment(number)
        segment.live = bytearray(b64decode(live))
        segment.live_count = live_count
        segment.qs_end = qs_end
        segment.written = written
        segment.created = True
