"""How far a Spark job is, shown while it runs.

Spark tells of tasks, not of rows: the bar counts the tasks of all jobs that the block started, and grows when another
stage is planned. The driver's thread waits in the job, so another thread asks. Nothing is shown where stderr is no
terminal, and then nobody asks.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from pyspark import SparkContext, StatusTracker
    from pyspark.sql import SparkSession

_POLL_SECONDS = 0.2
_GROUP = "spark.jobGroup.id"
_DESCRIPTION = "spark.job.description"


class Tasks(NamedTuple):
    """Tasks of a group of jobs."""

    done: int
    running: int
    total: int


def count_tasks(tracker: StatusTracker, group: str) -> Tasks:
    """The tasks of all jobs of `group` that Spark still knows."""
    stages: set[int] = set()
    for job in tracker.getJobIdsForGroup(group):
        info = tracker.getJobInfo(job)
        if info is not None:
            stages.update(info.stageIds)
    done = running = total = 0
    for stage in stages:
        known = tracker.getStageInfo(stage)
        if known is not None:
            done += known.numCompletedTasks
            running += known.numActiveTasks
            total += known.numTasks
    return Tasks(done, running, total)


@contextlib.contextmanager
def job_group(context: SparkContext, what: str) -> Iterator[str]:
    """Jobs that this thread starts meanwhile are of one group; its name."""
    group = f"warren-{uuid.uuid4()}"
    before = context.getLocalProperty(_GROUP), context.getLocalProperty(_DESCRIPTION)
    context.setJobGroup(group, what)
    try:
        yield group
    finally:
        for name, value in zip((_GROUP, _DESCRIPTION), before, strict=True):
            # None takes the property away; the annotation of PySpark does not know.
            context.setLocalProperty(name, value)  # type: ignore[arg-type]


@contextlib.contextmanager
def job_progress(spark: SparkSession, what: str, console: Console | None = None) -> Iterator[None]:
    """A bar on stderr, where that is a terminal, for the jobs that this thread starts meanwhile.

    with job_progress(spark, "checking /"):
        frame.count()
    """
    console = console or Console(stderr=True)
    with job_group(spark.sparkContext, what) as group:
        if not console.is_terminal:
            yield
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(what, total=None)
            over = threading.Event()

            def follow() -> None:
                tracker = spark.sparkContext.statusTracker()
                while True:
                    tasks = count_tasks(tracker, group)
                    if tasks.total:
                        bar.update(task, completed=tasks.done, total=tasks.total)
                    if over.wait(_POLL_SECONDS):
                        return

            watcher = threading.Thread(target=follow, name="warren progress", daemon=True)
            watcher.start()
            try:
                yield
            finally:
                over.set()
                watcher.join()
