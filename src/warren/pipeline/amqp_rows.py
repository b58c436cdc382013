"""Rows become messages: an Arrow batch with the columns of a DataFrame, as heads and bodies that the broker stores.

| column | type | |
|---|---|---|
| `body` | binary or string | has to be there, and not null |
| `exchange`, `routing_key` | string | unless the options `exchange` and `routingKey` say so for all rows |
| `headers` | map of string to string, number, boolean or binary | |
| `delivery_mode`, `priority` | an integer | delivery_mode is 2, persistent, where there is none |
| `expiration` | string or an integer, milliseconds | |
| `timestamp` | timestamp | |
| `content_type`, `content_encoding`, `correlation_id`, `reply_to`, `message_id`, `type`, `user_id`, `app_id`, | string | |
| `cluster_id` | string | |

A null is a property that is not set. The names and types are those of the source, so what was read can be written; a column
that is none of these is refused by name, because nobody would find out that it was not published.

Heads repeat: each distinct combination of values is encoded once, by codes and not by values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from warren.pipeline.errors import ColumnError, PipelineError
from warren.queueing.properties import build_head

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

SCHEMA = pa.schema([pa.field("head", pa.binary()), pa.field("body", pa.binary()), pa.field("exchange", pa.string())])


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
        heads, exchanges = self._heads(rows)
        message = pa.RecordBatch.from_arrays([heads, body, exchanges], schema=SCHEMA)
        yield from _portions(message)

    def _heads(self, rows: pa.RecordBatch) -> tuple[pa.Array, pa.Array]:
        names = [name for name in rows.schema.names if name != "body"]
        if self._exchange is not None and "exchange" in names:
            names.remove("exchange")
        if self._routing_key is not None and "routing_key" in names:
            names.remove("routing_key")
        coded = [_coded(name, rows.column(name)) for name in names]
        if not coded:
            return self._same_head(rows.num_rows)
        known: dict[tuple[int, ...], int] = {}  # codes -> number of their head
        heads: list[bytes] = []
        exchanges: list[str] = []
        chosen: list[int] = []
        for codes in zip(*(codes for codes, _ in coded), strict=True):
            number = known.get(codes)
            if number is None:
                values = {name: value(code) for name, (_, value), code in zip(names, coded, codes, strict=True)}
                exchange, head = self._head(values)
                number = known[codes] = len(heads)
                heads.append(head)
                exchanges.append(exchange)
            chosen.append(number)
        if len(heads) == rows.num_rows:
            return pa.array(heads, pa.binary()), pa.array(exchanges, pa.string())
        places = pa.array(chosen, pa.int32())
        return pa.array(heads, pa.binary()).take(places), pa.array(exchanges, pa.string()).take(places)

    def _same_head(self, count: int) -> tuple[pa.Array, pa.Array]:
        exchange, head = self._head({})
        return pa.repeat(pa.scalar(head, pa.binary()), count), pa.repeat(pa.scalar(exchange, pa.string()), count)

    def _head(self, values: dict[str, Any]) -> tuple[str, bytes]:
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
        if values.get("headers") is not None:
            values["headers"] = dict(values["headers"])
        try:
            return exchange, build_head(exchange, key, values)
        except (TypeError, ValueError) as error:
            raise PipelineError(f"a row cannot be published: {error}") from error


def _bodies(rows: pa.RecordBatch) -> pa.Array:
    body = rows.column("body")
    if body.null_count:
        raise PipelineError(
            f"the body of {body.null_count} rows is null, and a message has one: filter them, or coalesce(body, '')"
        )
    return body if body.type == pa.binary() else pc.cast(body, pa.binary())


def _coded(name: str, column: pa.Array) -> tuple[Sequence[int], Callable[[int], Any]]:
    """A code for every row, equal for equal values, and what turns a code into the value."""
    if pa.types.is_map(column.type):
        return _coded_maps(column)
    if not pa.types.is_string(column.type):
        values = column.to_pylist()
        return _coded_values(values)
    encoded = column.dictionary_encode()
    found = encoded.dictionary.to_pylist()
    codes = pc.fill_null(encoded.indices, -1).to_pylist()
    return codes, lambda code: None if code < 0 else found[code]


def _coded_maps(column: pa.Array) -> tuple[Sequence[int], Callable[[int], Any]]:
    # A map comes as a list of pairs.
    return _coded_values([None if value is None else tuple(value) for value in column.to_pylist()])


def _coded_values(values: Sequence[Any]) -> tuple[Sequence[int], Callable[[int], Any]]:
    known: dict[Any, int] = {}
    codes = [known.setdefault(value, len(known)) for value in values]
    found = list(known)
    return codes, lambda code: found[code]


def _portions(message: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if message.num_rows == 1 or _bytes_of(message) <= MOST_BATCH_BYTES:
        yield message
        return
    middle = message.num_rows // 2
    yield from _portions(message.slice(0, middle))
    yield from _portions(message.slice(middle))


def _bytes_of(message: pa.RecordBatch) -> int:
    """Of a batch that may be a slice of a larger one."""
    return int(message.get_total_buffer_size() if message.column(0).offset == 0 else message.nbytes)
