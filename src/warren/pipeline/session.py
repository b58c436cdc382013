"""The Spark session of the `warren spark` commands, and what goes wrong with one, in a sentence.

Rules:

1. Whoever has a session keeps it: an active one is used as it is, and is not stopped by us.
2. The workers run the interpreter that runs us: another one has other packages, or none.
3. A laptop needs no network: a local session binds to loopback and has no web interface.
4. Spark's own words go to a file; the terminal belongs to the command. When the start fails, the end of that file is the
   reason.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from warren.pipeline.errors import PipelineError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OLDEST_JAVA = 17
_LOOPBACK = "127.0.0.1"
_LOCAL_SHUFFLE_PARTITIONS = "8"  # 200, Spark's own number, is for a cluster
_TALKATIVE = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")  # log what they raise, with stack traces
_JAVA_VERSION = re.compile(r'version "(\d+)(?:\.(\d+))?')


class SparkMissingError(PipelineError):
    """PySpark or Java is not there, or too old."""


class SparkFailedError(PipelineError):
    """Spark did not start, or a job of it failed."""


def require_spark() -> None:
    """Raises SparkMissingError, with the remedy, unless a session can be started here."""
    for name in ("pyspark", "pyarrow"):
        if importlib.util.find_spec(name) is None:
            raise SparkMissingError(f"{name} is not installed; `pip install 'warrenmq[spark]'` brings what is needed")
    version = java_version()
    if version is None:
        raise SparkMissingError(
            f"there is no Java; Spark needs {OLDEST_JAVA} or newer. Install one (Debian: apt install "
            f"openjdk-17-jre-headless), or set JAVA_HOME to where it is"
        )
    if version < OLDEST_JAVA:
        raise SparkMissingError(
            f"{_java()} is Java {version}; Spark needs {OLDEST_JAVA} or newer. Set JAVA_HOME to a newer one"
        )


def java_version() -> int | None:
    """The major version of the Java that Spark would use; None: there is none."""
    java = _java()
    if java is None:
        return None
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return None
    found = _JAVA_VERSION.search(done.stderr + done.stdout)
    if found is None:
        return None
    first, second = int(found[1]), int(found[2] or 0)
    return second if first == 1 else first  # 8 and older say 1.8


def _java() -> str | None:
    home = os.environ.get("JAVA_HOME")
    if home:
        path = os.path.join(home, "bin", "java")
        return path if os.access(path, os.X_OK) else None
    return shutil.which("java")


def spark_session(master: str = "local[*]", app: str = "warren", conf: Mapping[str, str] | None = None) -> SparkSession:
    """The active session, or a new one on `master`; the source "warren" is registered in it.

        spark = spark_session("local[2]", "a look")
        spark.read.format("warren").option("path", "data").option("queue", "orders").load()

    Raises SparkMissingError without Java or PySpark, SparkFailedError where Spark does not start.
    """
    require_spark()
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    if session is None:
        _prepare_environment(master)
        session = _start(_settings(master, conf or {}), master, app)
    from warren.pipeline import register

    register(session)
    return session


def _prepare_environment(master: str) -> None:
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    if _is_local(master):
        os.environ["SPARK_LOCAL_IP"] = _LOOPBACK


def _is_local(master: str) -> bool:
    return master.startswith("local")


def _settings(master: str, conf: Mapping[str, str]) -> dict[str, str]:
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
    }
    if _is_local(master):
        place = tempfile.mkdtemp(prefix="warren-spark-")
        atexit.register(shutil.rmtree, place, ignore_errors=True)
        settings |= {
            "spark.driver.host": _LOOPBACK,
            "spark.driver.bindAddress": _LOOPBACK,
            "spark.sql.shuffle.partitions": _LOCAL_SHUFFLE_PARTITIONS,
            "spark.sql.warehouse.dir": os.path.join(place, "warehouse"),
        }
    return {**settings, **conf}


def _start(settings: Mapping[str, str], master: str, app: str) -> SparkSession:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master).appName(app)
    for name, value in settings.items():
        builder = builder.config(name, value)
    with _words_aside() as words, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            session: SparkSession = builder.getOrCreate()
        except Exception as error:
            raise SparkFailedError(
                f"Spark did not start on {master}: {clear_message(error)}{_last_words(words)}"
            ) from None
    session.sparkContext.setLogLevel("ERROR")
    return session


@contextlib.contextmanager
def _words_aside() -> Iterator[str]:
    """What the JVM that is started meanwhile says, then and later, goes to a file; its path. The JVM inherits the
    descriptor, so this process gets its own stderr back."""
    fd, path = tempfile.mkstemp(prefix="warren-spark-", suffix=".log")
    atexit.register(_remove, path)
    sys.stderr.flush()
    kept = os.dup(2)
    os.dup2(fd, 2)
    try:
        yield path
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(fd)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _last_words(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = [line.strip() for line in file if line.strip() and not line.startswith(("WARNING:", "\tat "))]
    return f" ({lines[-1]})" if lines else ""


def clear_message(error: BaseException) -> str:
    """What a user has to know of an exception of Spark: one line, without its stack traces."""
    text = str(error)
    # A failure of a Python worker has the worker's traceback in it; its last line is the error itself.
    trace = text.rfind("Traceback (most recent call last)")
    if trace >= 0:
        raised = [line for line in text[trace:].splitlines()[1:] if line and not line.startswith((" ", "\t", "~"))]
        if raised:
            return re.sub(r"^(?:[\w.]+\.)?(\w+(?:Error|Exception)): ", "", raised[0])
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("at ", "JVM stacktrace", ": "))] or lines
    return lines[0] if lines else type(error).__name__


@contextlib.contextmanager
def clear_errors() -> Iterator[None]:
    """Failures of Spark become SparkFailedError, with what a user has to know of them."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException
    from pyspark.logger import PySparkLogger

    loggers: list[logging.Logger] = [PySparkLogger.getLogger(name) for name in _TALKATIVE]
    for logger in loggers:
        logger.addFilter(_nothing)
    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise SparkFailedError(clear_message(error)) from error
    finally:
        for logger in loggers:
            logger.removeFilter(_nothing)


def _nothing(_: logging.LogRecord) -> bool:
    return False
