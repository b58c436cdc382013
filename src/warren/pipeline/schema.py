"""The table of messages: its columns, as Arrow and as Spark have them.

Spark compares the schema of a batch with its own, by names, order, types and nullability, so there is one list here, and
everything else follows from it. No Spark is needed to read it: the data server beside a broker uses it, too.

Headers are a map of text to text: a value that is not text is JSON (bytes, times and decimals are tagged as in `meta.db`:
`{"$bytes": "AAE="}`). Names and texts that are not UTF-8 have the replacement character where they are not. So what was a
number and what was text is not told apart. `headers_table`, a column for those who ask for it by name, has the headers as
they were sent: an archive keeps it, and the sink publishes it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from warren.pipeline.errors import ColumnError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_TIME = pa.timestamp("us", tz="UTC")

# name, type in Arrow, type in Spark's DDL
_MESSAGES: tuple[tuple[str, pa.DataType, str], ...] = (
    ("vhost", pa.string(), "STRING"),
    ("queue", pa.string(), "STRING"),
    ("seq_id", pa.int64(), "BIGINT"),
    ("state", pa.string(), "STRING"),  # ready or unacked
    ("redelivered", pa.bool_(), "BOOLEAN"),
    ("delivery_count", pa.int32(), "INT"),
    ("exchange", pa.string(), "STRING"),
    ("routing_key", pa.string(), "STRING"),
    ("headers", pa.map_(pa.string(), pa.string()), "MAP<STRING, STRING>"),
    ("content_type", pa.string(), "STRING"),
    ("content_encoding", pa.string(), "STRING"),
    ("delivery_mode", pa.int32(), "INT"),
    ("priority", pa.int32(), "INT"),
    ("correlation_id", pa.string(), "STRING"),
    ("reply_to", pa.string(), "STRING"),
    ("expiration", pa.string(), "STRING"),
    ("message_id", pa.string(), "STRING"),
    ("timestamp", _TIME, "TIMESTAMP"),
    ("type", pa.string(), "STRING"),
    ("user_id", pa.string(), "STRING"),
    ("app_id", pa.string(), "STRING"),
    ("cluster_id", pa.string(), "STRING"),
    ("published_at", _TIME, "TIMESTAMP"),
    ("expires_at", _TIME, "TIMESTAMP"),
    ("size", pa.int32(), "INT"),  # of the body
    ("body", pa.binary(), "BINARY"),
    ("source_file", pa.string(), "STRING"),  # below the vhost's directory
    ("source_offset", pa.int64(), "BIGINT"),
)

_IF_NAMED: tuple[tuple[str, pa.DataType, str], ...] = (("headers_table", pa.binary(), "BINARY"),)  # a table of AMQP

COLUMNS: tuple[str, ...] = tuple(name for name, _, _ in _MESSAGES)
ALL_COLUMNS: tuple[str, ...] = (*COLUMNS, *(name for name, _, _ in _IF_NAMED))
_ARROW = {name: kind for name, kind, _ in _MESSAGES + _IF_NAMED}
_DDL = {name: kind for name, _, kind in _MESSAGES + _IF_NAMED}

# Columns that come out of a message's head, and the rest of those for which its payload has to be read.
HEAD_COLUMNS = frozenset(COLUMNS[COLUMNS.index("exchange") : COLUMNS.index("published_at")]) | {"headers_table"}
PAYLOAD_COLUMNS = HEAD_COLUMNS | {"size", "body", "source_file", "source_offset"}


def arrow_schema(columns: Sequence[str] | None = None) -> pa.Schema:
    """The schema of messages, or of some columns in the order given. Raises ColumnError for an unknown one.

    >>> arrow_schema(["queue", "seq_id"]).names
    ['queue', 'seq_id']
    """
    return pa.schema([pa.field(name, _ARROW[name]) for name in checked_columns(columns)])


def spark_ddl(columns: Sequence[str] | None = None) -> str:
    """The same, as Spark's data definition language.

    >>> spark_ddl(["queue", "seq_id"])
    'queue STRING, seq_id BIGINT'
    """
    return ", ".join(f"{name} {_DDL[name]}" for name in checked_columns(columns))


def checked_columns(columns: Sequence[str] | None) -> tuple[str, ...]:
    """The names, if each is known and there once; for None all of them but those that want to be named."""
    return COLUMNS if columns is None else checked_names(columns, ALL_COLUMNS)


def checked_names(columns: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """The names of columns, if each is one of those that are known, and there once."""
    if not columns:
        raise ColumnError(f"no columns are named; there are {', '.join(known)}")
    for name in columns:
        if name not in known:
            raise ColumnError(unknown("column", name, known))
        if columns.count(name) > 1:
            raise ColumnError(f"column {name!r} is named twice; name it once")
    return tuple(columns)


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """What to say of a name that is none of those that are known."""
    names = list(known)
    near = difflib.get_close_matches(name.lower(), [known.lower() for known in names], n=1)
    if near:
        hint = f"did you mean {next(known for known in names if known.lower() == near[0])!r}?"
    else:
        hint = f"there are {', '.join(names)}" if names else "there are none"
    return f"there is no {what} {name!r}; {hint}"


def arrow_schema_of(asked: StructType, offered: pa.Schema) -> pa.Schema:
    """The Arrow schema for a schema that Spark asks for: some of the columns of `offered`, in any order, with their types.

    Raises ColumnError for a column that is not there, or is there with another type."""
    from pyspark.sql.pandas.types import to_arrow_schema

    checked_names(asked.names, offered.names)
    wanted = to_arrow_schema(asked, timezone="UTC")
    for field in wanted:
        have = offered.field(field.name).type
        if field.type != have:
            raise ColumnError(
                f"column {field.name!r} is asked for as {asked[field.name].dataType.simpleString()}; "
                f"it is {_spark_name(have)}. Read it as that, then cast it"
            )
    return wanted


def _spark_name(kind: pa.DataType) -> str:
    from pyspark.sql.pandas.types import from_arrow_type

    return from_arrow_type(kind).simpleString()
