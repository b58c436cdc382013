"""`warren spark verify`: every file of a store checked by executors, and the references joined with the bodies.

    driver       names, metadata, terms, journal (`plan_verification`): what the journal says decides who is alive
    executors    a task for some megabytes of segments, SQLite files and message store files (`check_file`)
    a join       messages that refer to a stored body, anti-joined with the records that were found

The checks are those of `warren store verify`, so both name the same places in the same words; this one has no limit but
the cluster's. What the tasks find comes back as one table of four kinds of rows, read once:

    finding      bytes that are not what they should be
    count        how many of something there were
    reference    a live message whose body is in the message store
    record       a good record of the message store
    error        a file that a task could not read, or that a newer Warren wrote: it ends the job

Requires: nobody writes to the directory meanwhile, and every executor sees it under the same path.
"""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from warren.errors import StoreFormatError, WarrenError
from warren.kernel.store_table import HINT_ROW_BYTES
from warren.pipeline.jobs.division import divide
from warren.storage.store_format import DATA_SUFFIX, HINT_SUFFIX
from warren.storage.verify import Verification, plan_verification
from warren.storage.verify_files import DatabaseCheck, FileCheck, Finding, Reference, SegmentCheck, check_file

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

_ID_BYTES = 16
_SCHEMA = pa.schema(
    [
        ("kind", pa.string()),
        ("at", pa.int64()),  # the check, as the plan counts them
        ("text", pa.string()),  # why, or what was counted
        ("number", pa.int64()),  # a count
        ("file", pa.string()),
        ("offset", pa.int64()),
        ("length", pa.int64()),
        ("harmless", pa.bool_()),
        ("queue", pa.string()),
        ("seq_id", pa.int64()),
        ("msg_id", pa.binary()),
    ]
)
_DDL = (
    "kind string, at bigint, text string, number bigint, file string, offset bigint, length bigint, "
    "harmless boolean, queue string, seq_id bigint, msg_id binary"
)


@dataclass(slots=True)
class SparkVerification(Verification):
    """What was found in one vhost, and how long that took."""

    seconds: float = 0.0
    tasks: int = 0

    @property
    def messages_per_second(self) -> float:
        return self.counts["messages"] / self.seconds if self.seconds else 0.0


def verify_on_spark(spark: SparkSession, root: str) -> SparkVerification:
    """Check everything below a vhost's directory.

    Raises StoreFormatError for files that a newer Warren wrote, WarrenError where an executor cannot read a file.
    """
    began = time.monotonic()
    root = os.path.abspath(root)
    plan = plan_verification(root)
    findings, counts = plan.opening.findings, plan.opening.counts
    groups = divide(spark, list(enumerate(plan.checks)), lambda each: _bytes_of(root, each[1]))
    if groups:
        checked = _check_groups(spark, root, groups)
        try:
            told = checked.where("kind in ('finding', 'count', 'error')").collect()
            _raise_errors(told)
            findings += _findings(told)
            counts += _counts(told)
            references = checked.where("kind = 'reference'").select(
                "msg_id", "file", "offset", "length", "queue", "seq_id"
            )
            if plan.opening.references:
                references = references.unionByName(_as_frame(spark, plan.opening.references))
            counts["references to stored bodies"] = counts["references to stored bodies"] + len(plan.opening.references)
            if counts["references to stored bodies"]:
                findings += _missing(references, checked.where("kind = 'record'").select("msg_id"))
        finally:
            checked.unpersist()
    else:
        findings += [reference.missing() for reference in plan.opening.references]
        counts["references to stored bodies"] = len(plan.opening.references)
    return SparkVerification(root, plan.vhost, findings, counts, time.monotonic() - began, len(groups))


def _bytes_of(root: str, check: FileCheck) -> int:
    if isinstance(check, SegmentCheck):
        stem = os.path.join(root, check.directory, str(check.number))
        paths = [f"{stem}.qi", f"{stem}.qs", f"{stem}.qa"]
    else:
        paths = [os.path.join(root, check.file)]
        if not isinstance(check, DatabaseCheck):
            paths.append(paths[0].removesuffix(DATA_SUFFIX) + HINT_SUFFIX)
    return sum(os.path.getsize(path) for path in paths if os.path.exists(path))


# -- on executors ------------------------------------------------------------------------------------------------------


def _check_groups(spark: SparkSession, root: str, groups: list[list[tuple[int, FileCheck]]]) -> DataFrame:
    rows = [(pickle.dumps(group),) for group in groups]
    work = spark.createDataFrame(spark.sparkContext.parallelize(rows, len(rows)), "work binary")
    return work.mapInArrow(_checker(root), _DDL).persist()


def _checker(root: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def check(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for work in batch.column(0):
                yield from _check_group(root, pickle.loads(work.as_py()))

    return check


def _check_group(root: str, group: list[tuple[int, FileCheck]]) -> Iterator[pa.RecordBatch]:
    counts: Counter[str] = Counter()
    for at, check in group:
        try:
            checked = check_file(root, check)
        except (WarrenError, OSError) as error:
            yield _told(_error_row(root, error))
            return
        counts += checked.counts
        counts["references to stored bodies"] += len(checked.references)
        if checked.findings:
            yield _told(*(_finding_row(at, finding) for finding in checked.findings))
        if checked.references:
            yield _told(*({"kind": "reference", **_reference_row(each)} for each in checked.references))
        for rows in checked.records:
            if rows:
                yield _records(rows)
    yield _told(*({"kind": "count", "text": what, "number": number} for what, number in counts.items()))


def _error_row(root: str, error: Exception) -> dict[str, Any]:
    if isinstance(error, StoreFormatError):
        return {"kind": "error", "text": str(error), "harmless": False}
    text = (
        f"an executor on {socket.gethostname()} cannot read {root}: {error}. Every executor has to see that directory"
    )
    return {"kind": "error", "text": text, "harmless": True}


def _finding_row(at: int, finding: Finding) -> dict[str, Any]:
    return {
        "kind": "finding",
        "at": at,
        "text": finding.why,
        "file": finding.file,
        "offset": finding.offset,
        "length": finding.length,
        "harmless": finding.harmless,
        "queue": finding.queue,
        "seq_id": finding.seq_id,
    }


def _reference_row(reference: Reference) -> dict[str, Any]:
    return {
        "msg_id": reference.msg_id,
        "file": reference.file,
        "offset": reference.offset,
        "length": reference.length,
        "queue": reference.queue,
        "seq_id": reference.seq_id,
    }


def _told(*rows: dict[str, Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(list(rows), schema=_SCHEMA)


def _records(rows: bytes) -> pa.RecordBatch:
    """The msg_ids of hint rows, without an object for each."""
    count = len(rows) // HINT_ROW_BYTES
    fixed = pa.Array.from_buffers(pa.binary(HINT_ROW_BYTES), count, [None, pa.py_buffer(rows)])
    ids = pc.binary_slice(fixed, 0, _ID_BYTES)
    columns = {"kind": pa.repeat("record", count), "msg_id": ids.cast(pa.binary())}
    return pa.RecordBatch.from_arrays(
        [columns.get(each.name, pa.nulls(count, each.type)) for each in _SCHEMA], schema=_SCHEMA
    )


# -- on the driver -----------------------------------------------------------------------------------------------------


def _raise_errors(told: Iterable[Row]) -> None:
    for row in told:
        if row.kind == "error":
            raise WarrenError(row.text) if row.harmless else StoreFormatError(row.text)


def _findings(told: Iterable[Row]) -> list[Finding]:
    """In the order of the plan, as one process would have found them."""
    rows = sorted((row for row in told if row.kind == "finding"), key=lambda row: row["at"])
    return [
        Finding(row.file, row["offset"], row["length"], row.text, row.harmless, row.queue, row.seq_id) for row in rows
    ]


def _counts(told: Iterable[Row]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for row in told:
        if row.kind == "count":
            counts[row.text] += row.number
    return counts


def _as_frame(spark: SparkSession, references: list[Reference]) -> DataFrame:
    table = pa.Table.from_pylist([_reference_row(reference) for reference in references], schema=_reference_schema())
    return spark.createDataFrame(table)


def _reference_schema() -> pa.Schema:
    return pa.schema([_SCHEMA.field(name) for name in ("msg_id", "file", "offset", "length", "queue", "seq_id")])


def _missing(references: DataFrame, records: DataFrame) -> list[Finding]:
    """References whose body no file has."""
    rows = references.join(records, "msg_id", "left_anti").collect()
    lost = [Reference(bytes(row.msg_id), *(row[name] for name in _reference_schema().names[1:])) for row in rows]
    return [each.missing() for each in sorted(lost, key=lambda each: (each.file, each.offset, each.seq_id))]
