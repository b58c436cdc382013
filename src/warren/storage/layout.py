"""Names and numbers of the files of a vhost: the one place for magic words, versions and sizes.

`docs/format.md` is the same for people. All numbers are little-endian, all checksums CRC-32C.
"""

from __future__ import annotations

import hashlib
import os
import struct

from warren.errors import StoreFormatError
from warren.kernel.checksum import crc32c

FORMAT_VERSION = 1
HEADER_BYTES = 64

JOURNAL_MAGIC = b"WRNJ"
INDEX_MAGIC = b"WRNI"
BODIES_MAGIC = b"WRNS"
ACKS_MAGIC = b"WRNA"
TRAILER_MAGIC = b"WRNT"
FLOOR_MAGIC = b"WRNF"

# magic, version, unused, three numbers whose meaning depends on the file, unused, CRC of the 60 bytes before
_HEADER = struct.Struct("<4sHHQQQ28xI")
assert _HEADER.size == HEADER_BYTES


def pack_header(magic: bytes, first: int, second: int = 0, third: int = 0) -> bytes:
    """The 64 bytes that open a file."""
    head = _HEADER.pack(magic, FORMAT_VERSION, 0, first, second, third, 0)[:-4]
    return head + struct.pack("<I", crc32c(head))


def unpack_header(magic: bytes, data: bytes, path: str) -> tuple[int, int, int] | None:
    """The three numbers, or None where the header is damaged. Raises StoreFormatError for a newer version."""
    if len(data) < HEADER_BYTES:
        return None
    found, version, _, first, second, third, crc = _HEADER.unpack(data[:HEADER_BYTES])
    if found != magic or crc != crc32c(data[: HEADER_BYTES - 4]):
        return None
    if version != FORMAT_VERSION:
        raise StoreFormatError(
            f"{path} has format version {version}; this Warren reads version {FORMAT_VERSION}. "
            "Open it with the Warren that wrote it, or a newer one"
        )
    return first, second, third


def hashed(name: str) -> str:
    """A directory name for a vhost or queue: any characters are allowed in their names, few in a file's."""
    return hashlib.blake2b(name.encode(), digest_size=12).hexdigest()


def stream_id(uid: int, level: int = 0) -> int:
    """The number that journal records and slots carry: a queue's uid and a priority level."""
    return uid << 8 | level


def level_of(sid: int) -> int:
    """The priority level that a stream id carries."""
    return sid & 0xFF


def journal_path(directory: str, number: int) -> str:
    return os.path.join(directory, f"{number}.wal")


def pairs_of(flat: list[int]) -> list[tuple[int, int]]:
    """A flat list first, count, first, count, ..., the form in which ranges of seq_ids travel, as pairs."""
    return list(zip(flat[::2], flat[1::2], strict=True))
