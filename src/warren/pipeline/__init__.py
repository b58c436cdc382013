"""Queues as Spark tables: the batch and streaming source, the sink, and jobs over whole stores.

Nothing here is imported before it is needed: the library and the broker do without Spark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Make the format `warren` known to a session. Where `pyspark_warren` is importable, Spark finds it by itself."""
    from warren.pipeline.source import WarrenSource

    spark.dataSource.register(WarrenSource)
