"""One Spark session for all tests of a run that need one: it takes seconds to start.

`local[2, 4]`: two cores, and a task may fail three times before its job does, as on a cluster.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Spark's settings must not come from the machine.
_FOREIGN = (
    "PYSPARK_SUBMIT_ARGS",
    "SPARK_CONF_DIR",
    "HADOOP_CONF_DIR",
    "JAVA_TOOL_OPTIONS",
    "_JAVA_OPTIONS",
    "SPARK_HOME",
)


def prepare_environment() -> None:
    """Before the first session: the interpreter and the address that Spark's workers use."""
    for name in _FOREIGN:
        os.environ.pop(name, None)
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session of two cores; what it writes goes to a temporary directory."""
    prepare_environment()
    from pyspark.sql import SparkSession

    directory = tmp_path_factory.mktemp("spark")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session = (
            SparkSession.builder.master("local[2, 4]")
            .appName("warren tests")
            .config("spark.ui.enabled", "false")
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.sql.session.timeZone", "UTC")
            .config("spark.driver.memory", "1g")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.sql.warehouse.dir", str(directory / "warehouse"))
            .config("spark.local.dir", str(directory / "local"))
            .getOrCreate()
        )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


def activate(session: SparkSession) -> None:
    """Make it the active one of this thread: what earlier tests did (foreachBatch, for one) may have left a clone of it
    there, which knows none of the sources that are registered from now on."""
    from pyspark.sql import SparkSession

    SparkSession._get_j_spark_session_class(session._jvm).setActiveSession(session._jsparkSession)
