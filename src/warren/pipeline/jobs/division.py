"""How the files of a store are divided among tasks: by bytes, so that tasks take about as long as each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")

_TASKS_A_CORE = 4
_LEAST_BYTES = 4 * 1024 * 1024  # less is not worth a task
_MOST_BYTES = 256 * 1024 * 1024  # more is too much to do again when an executor is lost


def divide(spark: SparkSession, work: Sequence[T], size: Callable[[T], int]) -> list[list[T]]:
    """Groups of neighbours, in order, each the work of one task."""
    sizes = [size(each) for each in work]
    share = sum(sizes) // max(1, spark.sparkContext.defaultParallelism * _TASKS_A_CORE)
    limit = min(max(share, _LEAST_BYTES), _MOST_BYTES)
    groups: list[list[T]] = []
    filled = limit
    for each, length in zip(work, sizes, strict=True):
        if filled >= limit:
            groups.append([])
            filled = 0
        groups[-1].append(each)
        filled += length
    return groups
