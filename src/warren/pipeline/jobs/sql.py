"""`warren spark sql`: a query in which every queue of the vhost is a table of its own name.

    select routing_key, count(*) from orders group by 1
    select * from `dead-letters` where headers['x-death'] is not null
    select queue, ready, bytes from warren_queues order by ready desc

The views are made anew for every query, for those queues whose name stands in it: a view is one plan of one reading (of a
broker: one snapshot), and Spark would keep what one query pushed into it for the next one.

What the store is made of is there, too, as `warren_queues`, `warren_segments`, `warren_files` and `warren_journal`.
"""

from __future__ import annotations

import base64
import csv
import datetime
import decimal
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

from warren.pipeline.errors import PipelineError
from warren.pipeline.jobs.origin import Origin
from warren.pipeline.session import clear_errors

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

_TABLES = {f"warren_{table}": table for table in ("queues", "segments", "files", "journal")}


def quoted(name: str) -> str:
    """A name as an identifier of Spark's SQL.

    >>> quoted("dead`letters")
    '`dead``letters`'
    """
    return "`" + name.replace("`", "``") + "`"


def query(spark: SparkSession, origin: Origin, text: str) -> DataFrame:
    """The result of a query over the queues of `origin`. Raises SparkFailedError with what Spark says of the query."""
    with clear_errors():
        names = mentioned(text, origin.queues(spark))
        lower = Counter(name.lower() for name in names)
        if any(count > 1 for count in lower.values()):  # Orders and orders are two queues
            spark.conf.set("spark.sql.caseSensitive", "true")
        for view, table in _TABLES.items():
            if view in text.lower() and view not in names:
                origin.read(spark, table=table).createOrReplaceTempView(view)
        for name in names:
            origin.read(spark, queue=name).createOrReplaceTempView(quoted(name))
        return spark.sql(text)


def mentioned(text: str, names: list[str]) -> list[str]:
    """The queues whose name stands in a query, as it is or quoted. Each is read, of a broker as a snapshot: so a name that is
    only a part of another one does not count.

    >>> mentioned("select * from Orders", ["orders", "invoices", "o", "order"])
    ['orders']
    """
    lower = text.lower()
    return [
        name
        for name in names
        if quoted(name).lower() in lower or re.search(rf"(?<!\w){re.escape(name.lower())}(?!\w)", lower)
    ]


# -- results -----------------------------------------------------------------------------------------------------------


def as_json(value: Any) -> Any:
    """A value of a result in what JSON has: bytes as text where they are UTF-8, else base64 in a tag."""
    if isinstance(value, bytes | bytearray):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError:
            return {"$bytes": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, datetime.datetime | datetime.date):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | datetime.timedelta):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):  # as Spark's own to_json says it
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        if value and all(isinstance(item, tuple) and len(item) == 2 for item in value):  # a map, as Arrow has it
            return {str(key): as_json(item) for key, item in value}
        return [as_json(item) for item in value]
    return value


def as_text(value: Any) -> str:
    """A value for a cell of a table."""
    plain = as_json(value)
    if plain is None:
        return ""
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def rows_of(result: pa.Table) -> Iterator[list[Any]]:
    """The rows of a result, each a list of its cells. Two columns may have one name."""
    for batch in result.to_batches():
        columns = [column.to_pylist() for column in batch.columns]
        yield from ([column[at] for column in columns] for at in range(batch.num_rows))


def write_json(result: pa.Table, file: IO[str]) -> None:
    """An array with an object for each row. Raises PipelineError where two columns have one name: it has room for one."""
    names = result.schema.names
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise PipelineError(
            f"the result has more than one column {twice[0]!r}, and JSON has room for one: name them with AS"
        )
    rows = [dict(zip(names, map(as_json, row), strict=True)) for row in rows_of(result)]
    json.dump(rows, file, indent=1, ensure_ascii=False)
    file.write("\n")


def write_csv(result: pa.Table, file: IO[str]) -> None:
    """A line of names, then a line for each row."""
    writer = csv.writer(file)
    writer.writerow(result.schema.names)
    writer.writerows([as_text(value) for value in row] for row in rows_of(result))
