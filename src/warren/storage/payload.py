"""The stored form of a message's content: u32 length of the head, head, body. The same bytes in the journal, in a
segment and in a message store."""

from __future__ import annotations

import struct

_LENGTH = struct.Struct("<I")


def join_payload(head: bytes, body: bytes) -> tuple[bytes, bytes, bytes]:
    """In parts, so that a large body is not copied."""
    return _LENGTH.pack(len(head)), head, body


def split_payload(payload: bytes) -> tuple[bytes, bytes]:
    """(head, body)."""
    (length,) = _LENGTH.unpack_from(payload)
    return payload[4 : 4 + length], payload[4 + length :]
