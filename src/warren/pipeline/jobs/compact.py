"""`warren spark compact`: how much of the message store is garbage, which files would be merged and what that frees.

Only a plan. The files are the engine's, which merges them itself, by the rules of `storage/compaction.py`, while it runs;
this tells an operator what to expect of it, and why nothing happens.

Who refers to a body is known by every segment and by the journal, where a body is by every file of the message store: a
join of live references with records, summed up by file. Bodies are not read, unless a file has no hint.
"""

from __future__ import annotations

import itertools
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from warren.kernel.store_table import HINT_ROW_BYTES, scan_records
from warren.pipeline.jobs.division import divide
from warren.storage.compaction import MIN_FILES
from warren.storage.disk import Disk
from warren.storage.journal import read_floor
from warren.storage.layout import HEADER_BYTES
from warren.storage.recovery import SegmentScan, scan_segment
from warren.storage.settings import EngineSettings
from warren.storage.store_format import DATA_SUFFIX, HINT_SUFFIX, LARGE_BODY_BYTES, decode_hint
from warren.storage.verify import VerificationPlan, plan_verification
from warren.storage.verify_files import DataFileCheck, SegmentCheck

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class FileGarbage:
    """One file of the message store, and how much of it somebody refers to."""

    file: str
    number: int
    generation: int
    size: int
    records: int
    live_records: int
    live_bytes: int

    @property
    def record_bytes(self) -> int:
        return max(0, self.size - HEADER_BYTES)

    @property
    def garbage_bytes(self) -> int:
        return self.record_bytes - self.live_bytes

    @property
    def is_large(self) -> bool:
        """One large body and nothing else: that is all valid or gone."""
        return self.records == 1 and self.record_bytes > LARGE_BODY_BYTES


@dataclass(frozen=True, slots=True)
class Merge:
    """Two files that would become one."""

    left: str
    right: str
    copied_bytes: int
    freed_bytes: int


@dataclass(slots=True)
class CompactionPlan:
    """What is garbage in one vhost, and what a compaction would do about it."""

    vhost: str
    root: str
    files: list[FileGarbage]
    dead: list[str] = field(default_factory=list)  # nobody refers to anything in them: they are unlinked
    merges: list[Merge] = field(default_factory=list)  # in the order in which they would be done
    why_not: str | None = None  # why nothing, or nothing more, is merged
    seconds: float = 0.0

    @property
    def total_bytes(self) -> int:
        return sum(file.record_bytes for file in self.files)

    @property
    def live_bytes(self) -> int:
        return sum(file.live_bytes for file in self.files)

    @property
    def garbage_fraction(self) -> float:
        return 1 - self.live_bytes / self.total_bytes if self.total_bytes else 0.0

    @property
    def freed_bytes(self) -> int:
        dead = sum(file.size for file in self.files if file.file in self.dead)
        return dead + sum(merge.freed_bytes for merge in self.merges)


def compaction_plan(spark: SparkSession, root: str, settings: EngineSettings | None = None) -> CompactionPlan:
    """Plan the compaction of a vhost's message store. Requires: nobody writes to the directory meanwhile."""
    began = time.monotonic()
    settings = settings or EngineSettings()
    root = os.path.abspath(root)
    plan = plan_verification(root)
    found = CompactionPlan(plan.vhost, root, _files(spark, plan))
    plan_merges(found, settings)
    found.seconds = time.monotonic() - began
    return found


# -- rules -------------------------------------------------------------------------------------------------------------


def plan_merges(plan: CompactionPlan, settings: EngineSettings) -> None:
    """What the engine would do, one merge after the other, as long as there is one worth doing."""
    plan.dead = [file.file for file in plan.files if not file.live_bytes]
    files = [file for file in plan.files if file.live_bytes]
    while True:
        total = sum(file.record_bytes for file in files)
        garbage = sum(file.garbage_bytes for file in files)
        if len(files) < MIN_FILES:
            plan.why_not = f"there are {len(files)} files with something in them; {MIN_FILES} are worth it"
            return
        if garbage <= settings.garbage_fraction * total:
            share = garbage / total if total else 0.0
            plan.why_not = f"{share:.0%} of the records are garbage; it begins above {settings.garbage_fraction:.0%}"
            return
        pair = _best_pair(files, settings.store_file_bytes)
        if pair is None:
            plan.why_not = "no two neighbours fit into one file"
            return
        merged = _merged(*pair)
        freed = pair[0].size + pair[1].size - merged.size
        plan.merges.append(Merge(pair[0].file, pair[1].file, merged.live_bytes, freed))
        files = sorted([merged, *(file for file in files if file not in pair)], key=lambda file: file.number)


def _best_pair(files: Sequence[FileGarbage], limit: int) -> tuple[FileGarbage, FileGarbage] | None:
    """Neighbours whose live records fit into one file; of several the pair that frees most."""
    best = None
    most = 0
    for left, right in itertools.pairwise(file for file in files if not file.is_large):
        garbage = left.garbage_bytes + right.garbage_bytes
        if HEADER_BYTES + left.live_bytes + right.live_bytes <= limit and garbage > most:
            best, most = (left, right), garbage
    return best


def _merged(left: FileGarbage, right: FileGarbage) -> FileGarbage:
    live, records = left.live_bytes + right.live_bytes, left.live_records + right.live_records
    name = f"{left.file} + {right.file}"
    generation = max(left.generation, right.generation) + 1
    return FileGarbage(name, min(left.number, right.number), generation, HEADER_BYTES + live, records, records, live)


# -- the join ----------------------------------------------------------------------------------------------------------


def _files(spark: SparkSession, plan: VerificationPlan) -> list[FileGarbage]:
    checks = [check for check in plan.checks if isinstance(check, DataFileCheck)]
    if not checks:
        return []
    records = _records(spark, plan.root, checks).persist()
    try:
        every = {row.file: row for row in records.groupBy("file").agg({"size": "sum", "*": "count"}).collect()}
        live = _live(spark, plan, records)
    finally:
        records.unpersist()
    found = []
    for check in checks:
        count, size = live.get(check.file, (0, 0))
        records_in = every[check.file]["count(1)"] if check.file in every else 0
        whole = os.path.getsize(os.path.join(plan.root, check.file))
        found.append(
            FileGarbage(os.path.basename(check.file), check.number, check.generation, whole, records_in, count, size)
        )
    return sorted(found, key=lambda file: (file.number, file.generation))


def _live(spark: SparkSession, plan: VerificationPlan, records: DataFrame) -> dict[str, tuple[int, int]]:
    """Records that somebody refers to, and their bytes, of each file. Of two copies the one counts that a start would
    take: the newest generation that is safe, which a generation with a hint is."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    best = Window.partitionBy("msg_id").orderBy(F.desc("safe"), F.desc("generation"), F.desc("number"), F.asc("offset"))
    counted = (
        records.join(_references(spark, plan), "msg_id", "left_semi")
        .withColumn("rank", F.row_number().over(best))
        .where("rank = 1")
        .groupBy("file")
        .agg(F.count("*").alias("records"), F.sum("size").alias("bytes"))
    )
    return {row.file: (row.records, row.bytes) for row in counted.collect()}


def _references(spark: SparkSession, plan: VerificationPlan) -> DataFrame:
    """The msg_ids that live messages refer to."""
    scans = _scans(plan)
    table = pa.table({"msg_id": pa.array([each.msg_id for each in plan.opening.references], pa.binary())})
    references = spark.createDataFrame(table)
    if not scans:
        return references
    groups = divide(spark, scans, lambda scan: scan.segment_size * 64)
    return references.unionByName(_mapped(spark, groups, _scan_references, "msg_id binary"))


def _scans(plan: VerificationPlan) -> list[SegmentScan]:
    """The segments, as a dirty start would read them: the slots of one without references, by its trailer, are not."""
    floor, _ = read_floor(Disk(), os.path.join(plan.root, "journal"))
    return [
        SegmentScan(
            os.path.join(plan.root, check.directory),
            check.sid,
            check.segment_entries,
            check.number,
            0,
            check.acked,
            check.journaled,
            floor,
        )
        for check in plan.checks
        if isinstance(check, SegmentCheck)
    ]


def _records(spark: SparkSession, root: str, checks: list[DataFileCheck]) -> DataFrame:
    work = [(root, check) for check in checks]
    groups = divide(spark, work, lambda each: os.path.getsize(os.path.join(root, each[1].file)))
    return _mapped(spark, groups, _file_records, _RECORDS_DDL)


def _mapped(
    spark: SparkSession,
    groups: Sequence[object],
    function: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    schema: str,
) -> DataFrame:
    rows = [(pickle.dumps(group),) for group in groups]
    work = spark.createDataFrame(spark.sparkContext.parallelize(rows, len(rows)), "work binary")
    return work.mapInArrow(function, schema)


# -- on executors ------------------------------------------------------------------------------------------------------

_RECORDS_DDL = "file string, generation bigint, number bigint, safe boolean, msg_id binary, offset bigint, size bigint"


def _scan_references(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    disk = Disk()
    for batch in batches:
        for work in batch.column(0):
            for scan in pickle.loads(work.as_py()):
                ids = [msg_id for _, msg_id in scan_segment(disk, scan).refs]
                yield pa.RecordBatch.from_arrays([pa.array(ids, pa.binary())], ["msg_id"])


def _file_records(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for work in batch.column(0):
            for root, check in pickle.loads(work.as_py()):
                yield _records_of(root, check)


def _records_of(root: str, check: DataFileCheck) -> pa.RecordBatch:
    disk = Disk()
    path = os.path.join(root, check.file)
    hint_path = path.removesuffix(DATA_SUFFIX) + HINT_SUFFIX
    rows = None
    hinted = disk.exists(hint_path)
    if hinted:
        rows = decode_hint(disk.read(hint_path), check.number, check.generation, disk.size(path))
    if rows is None:
        rows, _ = scan_records(disk.read(path), HEADER_BYTES)
    count = len(rows) // HINT_ROW_BYTES
    fixed = pa.Array.from_buffers(pa.binary(HINT_ROW_BYTES), count, [None, pa.py_buffer(rows)])
    numbers = pa.Array.from_buffers(pa.int64(), count * HINT_ROW_BYTES // 8, [None, pa.py_buffer(rows)])
    offsets = numbers.take(pa.array(range(2, count * 4, 4), pa.int64()))
    sizes = numbers.take(pa.array(range(3, count * 4, 4), pa.int64()))
    return pa.RecordBatch.from_arrays(
        [
            pa.repeat(check.file, count),
            pa.repeat(pa.scalar(check.generation, pa.int64()), count),
            pa.repeat(pa.scalar(check.number, pa.int64()), count),
            pa.repeat(hinted or not check.generation, count),
            pc.binary_slice(fixed, 0, _ID_BYTES).cast(pa.binary()),
            offsets,
            sizes,
        ],
        ["file", "generation", "number", "safe", "msg_id", "offset", "size"],
    )
