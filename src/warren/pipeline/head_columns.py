"""Columns out of the heads of messages: where they were published to, and their AMQP properties.

The kernel makes them from the bytes of the heads; what it leaves to Python is text that is not ASCII, and headers that are
lists, tables, times and the like.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from warren.kernel.head_codec import EXCHANGE, PROPERTIES, ROUTING_KEY, HeadColumns
from warren.queueing.properties import read_table
from warren.storage.tagged_json import to_json

_FIELDS = {
    "exchange": EXCHANGE,
    "routing_key": ROUTING_KEY,
    **{name: 2 + number for number, name in enumerate(PROPERTIES)},
}
_FIELDS["headers_table"] = _FIELDS["headers"]


class HeadTable:
    """The distinct heads of a batch: their bytes, one behind the other, and where each ends (packed u32).

    >>> from warren.queueing.properties import encode_head
    >>> HeadTable.of([encode_head("", "orders", persistent=True)]).column("routing_key", pa.string()).to_pylist()
    ['orders']
    """

    def __init__(self, data: Any, ends: Any) -> None:
        self._heads = HeadColumns(data, ends)

    @classmethod
    def of(cls, heads: Sequence[bytes]) -> HeadTable:
        ends, end = [], 0
        for head in heads:
            end += len(head)
            ends.append(end.to_bytes(4, "little"))
        return cls(b"".join(heads), b"".join(ends))

    def column(self, name: str, kind: pa.DataType) -> pa.Array:
        """One value a head; null where the property is not set, or the head cannot be read."""
        field, count = _FIELDS[name], self._heads.count
        if name == "headers":
            return self._headers(field, kind)
        if name == "headers_table":
            return pa.array(self._heads.raw(field), kind)
        if pa.types.is_timestamp(kind):
            return _array(kind, count, self._heads.moments(field))
        if pa.types.is_integer(kind):
            return _array(kind, count, self._heads.octets(field))
        made = self._heads.text(field)
        if made is not None:
            return _array(kind, count, made)
        return pa.array([None if raw is None else raw.decode(errors="replace") for raw in self._heads.raw(field)], kind)

    def _headers(self, field: int, kind: pa.DataType) -> pa.Array:
        made = self._heads.maps(field)
        if made is None:
            return pa.array([None if raw is None else _pairs(raw) for raw in self._heads.raw(field)], kind)
        valid, tables, name_ends, names, value_ends, values = made
        pairs = len(name_ends) // 4 - 1
        keys = _array(pa.string(), pairs, (None, name_ends, names))
        items = _array(pa.string(), pairs, (None, value_ends, values))
        entries = pa.StructArray.from_arrays([keys, items], fields=[kind.key_field, kind.item_field])
        buffers = [pa.py_buffer(valid), pa.py_buffer(tables)]
        return pa.Array.from_buffers(kind, self._heads.count, buffers, children=[entries])


def _array(kind: pa.DataType, count: int, buffers: Sequence[bytes | None]) -> pa.Array:
    return pa.Array.from_buffers(kind, count, [None if one is None else pa.py_buffer(one) for one in buffers])


def _pairs(raw: bytes) -> list[tuple[str, str]] | None:
    """The headers of a raw table; None for what is none."""
    try:
        table, _ = read_table(len(raw).to_bytes(4, "big") + raw, 0)
    except (ValueError, IndexError, struct.error):
        return None
    return [
        (_text(name), _text(value) if isinstance(value, str) else to_json(value, name)) for name, value in table.items()
    ]


def _text(text: str) -> str:
    """Without the surrogates that stand for bytes which are not UTF-8: Arrow has no place for them."""
    return text if text.isascii() else text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
