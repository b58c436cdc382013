"""Rows become messages: an Arrow batch with the columns of a DataFrame, as heads and bodies that the broker stores.

| column | type | |
|---|---|---|
| `body` | binary or string | has to be there, and not null |
| `exchange`, `routing_key` | string | unless the options `exchange` and `routingKey` say so for all rows |
| `headers` | map of string to string, number, boolean or binary | |
| `headers_table` | binary, a table of AMQP as the source has it in its column of this name | goes before `headers` |
| `delivery_mode`, `priority` | an integer | delivery_mode is 2, persistent, where there is none |
| `expiration` | string or an integer, milliseconds | |
| `timestamp` | timestamp | |
| `content_type`, `content_encoding`, `correlation_id`, `reply_to`, `message_id`, `type`, `user_id`, `app_id`, | string | |
| `cluster_id` | string | |

A null is a property that is not set. The names and types are those of the source, so what was read can be written; a column
that is none of these is refused by name, because nobody would find out that it was not published.

Heads repeat: each distinct combination of values is encoded once, by codes and not by values, and sent once a batch. Arrow
finds the combinations; Python sees each of them, and no row. (But for headers: maps are told apart one by one.)
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from warren.pipeline.errors import ColumnError, PipelineError
from warren.queueing.properties import build_head, read_table

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_TEXTS = (
    "exchange",
    "routing_key",
    "content_type",
    "content_encoding",
    "correlation_id",
    "reply_to",
    "message_id",
    "type",
    "user_id",
    "app_id",
    "cluster_id",
)
_INTEGERS = ("tinyint", "smallint", "int", "bigint")
_HEADER_VALUES = ("string", "boolean", "binary", "float", "double", *_INTEGERS)

# What a column may be, by the names of Spark.
TYPES: dict[str, tuple[str, ...]] = {
    "body": ("binary", "string"),
    **dict.fromkeys(_TEXTS, ("string",)),
    "headers": tuple(f"map<string,{value}>" for value in _HEADER_VALUES),
    "headers_table": ("binary",),
    "delivery_mode": _INTEGERS,
    "priority": _INTEGERS,
    "expiration": ("string", *_INTEGERS),
    "timestamp": ("timestamp",),
}

# Columns of the source that say where a message was, not what it is.
_OF_THE_QUEUE = frozenset(
    {
        "vhost",
        "queue",
        "seq_id",
        "state",
        "redelivered",
        "delivery_count",
        "published_at",
        "expires_at",
        "size",
        "source_file",
        "source_offset",
    }
)

MOST_BATCH_BYTES = 4 * 1024 * 1024  # of bodies and heads in a batch that is sent
_PERSISTENT = 2
_Coded = tuple[pa.Array, list[Any]]

SCHEMA = pa.schema([pa.field("head", pa.dictionary(pa.int32(), pa.binary())), pa.field("body", pa.binary())])


def check_columns(schema: StructType, exchange: str | None, routing_key: str | None) -> None:
    """Can rows of this schema be published, with these options? Raises ColumnError, naming the column."""
    for field in schema.fields:
        name, kind = field.name, field.dataType.simpleString()
        if name in _OF_THE_QUEUE:
            raise ColumnError(
                f"column {name!r} says where a message was, and cannot be published: leave it out with .drop({name!r})"
            )
        if name not in TYPES:
            raise ColumnError(
                f"column {name!r} is no part of a message; there are {', '.join(TYPES)}. Leave it out, or put it into "
                f"body or headers"
            )
        if kind not in TYPES[name]:
            raise ColumnError(f"column {name!r} is {kind}; it can be {' or '.join(TYPES[name])}: cast it")
    names = schema.fieldNames()
    if "body" not in names:
        raise ColumnError(
            f"there is no column 'body' among {', '.join(names) or 'no columns'}: what is to be published?"
        )
    if routing_key is None and "routing_key" not in names and not exchange and "exchange" not in names:
        raise ColumnError(
            "nothing says where to publish: give the option exchange, or routingKey (with no exchange, the name of a queue), "
            "or columns of these names, exchange and routing_key"
        )


class MessageEncoder:
    """Turns batches of rows into batches of heads and bodies. `exchange` and `routing_key`, where given, count for all rows;
    else the columns do, and where there is none, AMQP's defaults: both are empty."""

    def __init__(self, exchange: str | None = None, routing_key: str | None = None) -> None:
        self._exchange = exchange
        self._routing_key = routing_key

    def encode(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Batches of SCHEMA, each of up to MOST_BATCH_BYTES. Raises PipelineError for a row that is no message."""
        if not rows.num_rows:
            return
        body = _bodies(rows)
        message = pa.RecordBatch.from_arrays([self._heads(rows), body], schema=SCHEMA)
        yield from _portions(message)

    def _heads(self, rows: pa.RecordBatch) -> pa.DictionaryArray:
        names = [name for name in rows.schema.names if name != "body"]
        if self._exchange is not None and "exchange" in names:
            names.remove("exchange")
        if self._routing_key is not None and "routing_key" in names:
            names.remove("routing_key")
        numbers, found = _combinations([_coded(name, rows.column(name)) for name in names], rows.num_rows)
        heads = [self._head(dict(zip(names, values, strict=True))) for values in found]
        return pa.DictionaryArray.from_arrays(numbers, pa.array(heads, pa.binary()))

    def _head(self, values: dict[str, Any]) -> bytes:
        exchange, key = values.pop("exchange", None), values.pop("routing_key", None)
        exchange = self._exchange if self._exchange is not None else exchange or ""
        key = self._routing_key if self._routing_key is not None else key or ""
        if values.get("delivery_mode") is None:
            values["delivery_mode"] = _PERSISTENT
        elif values["delivery_mode"] not in (1, 2):
            raise PipelineError(
                f"a row has delivery_mode {values['delivery_mode']}; it is 1, transient, or 2, persistent"
            )
        if isinstance(values.get("expiration"), int):
            values["expiration"] = str(values["expiration"])
        table = values.pop("headers_table", None)
        if table is not None:
            values["headers"] = _headers_of(table)
            if self._routing_key is not None:  # for all rows: not also to where they went before
                values["headers"].pop("CC", None)
        elif values.get("headers") is not None:
            values["headers"] = dict(values["headers"])
        try:
            return build_head(exchange, key, values)
        except (TypeError, ValueError) as error:
            raise PipelineError(f"a row cannot be published: {error}") from error


def _headers_of(table: bytes) -> dict[str, Any]:
    try:
        headers, end = read_table(len(table).to_bytes(4, "big") + table, 0)
    except (ValueError, IndexError, struct.error) as error:
        raise PipelineError(f"a row has a headers_table that is no table of AMQP ({error}): {table[:40]!r}") from error
    if end != 4 + len(table):
        raise PipelineError(f"a row has a headers_table with bytes behind its end: {table[:40]!r}")
    return headers


def _bodies(rows: pa.RecordBatch) -> pa.Array:
    body = rows.column("body")
    if body.null_count:
        raise PipelineError(
            f"the body of {body.null_count} rows is null, and a message has one: filter them, or coalesce(body, '')"
        )
    return body if body.type == pa.binary() else pc.cast(body, pa.binary())


def _combinations(columns: Sequence[_Coded], rows: int) -> tuple[pa.Array, list[tuple[Any, ...]]]:
    """Which combinations of values there are, and the number of its combination for every row."""
    numbers: pa.Array = pa.repeat(pa.scalar(0, pa.int32()), rows)
    found: list[tuple[Any, ...]] = [()]
    for codes, values in columns:
        # With this column a combination is one of those without it and a value.
        both = pc.add(pc.multiply(numbers.cast(pa.int64()), len(values)), codes.cast(pa.int64())).dictionary_encode()
        numbers = both.indices
        found = [(*found[each // len(values)], values[each % len(values)]) for each in both.dictionary.to_pylist()]
    return numbers, found


def _coded(name: str, column: pa.Array) -> _Coded:
    """A code for every row, equal for equal values, and the values by their codes. Null is a value."""
    if not pa.types.is_map(column.type):
        encoded = column.dictionary_encode(null_encoding="encode")
        return encoded.indices, encoded.dictionary.to_pylist()
    known: dict[Any, int] = {}  # a map comes as a list of pairs
    maps = (None if value is None else tuple(value) for value in column.to_pylist())
    codes = pa.array([known.setdefault(value, len(known)) for value in maps], pa.int32())
    return codes, list(known)


def _portions(message: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    head, body = message.columns
    if message.num_rows == 1 or head.nbytes + body.nbytes <= MOST_BATCH_BYTES:
        yield message
        return
    middle = message.num_rows // 2
    for half in (message.slice(0, middle), message.slice(middle)):
        # Each with its own heads only, or many halves would have all of them.
        own = half.column("head").dictionary_decode().dictionary_encode()
        yield from _portions(pa.RecordBatch.from_arrays([own, half.column("body")], schema=SCHEMA))
