"""The session that the commands use: found, started, or refused in one sentence."""

# ruff: noqa: F811  (the fixture is imported)

from __future__ import annotations

import importlib.util
import io
import os
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.spark_session import spark  # noqa: F401
from warren.pipeline import session
from warren.pipeline.jobs.division import divide
from warren.pipeline.progress import count_tasks, job_group, job_progress
from warren.pipeline.session import SparkFailedError, SparkMissingError, clear_errors, clear_message, spark_session


def fake_java(directory: Path, version: str) -> Path:
    """A JAVA_HOME whose java says this of itself."""
    (directory / "bin").mkdir(parents=True)
    java = directory / "bin" / "java"
    java.write_text(f"#!/bin/sh\necho '{version}' >&2\n")
    java.chmod(0o755)
    return directory


@pytest.mark.parametrize(
    ("says", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "21" 2023-09-19', 21),
        ('java version "1.8.0_402"', 8),
        ("something else", None),
    ],
)
def test_the_version_of_java_is_what_it_says(tmp_path, monkeypatch, says, version):
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "java", says)))
    assert session.java_version() == version


def test_without_java_the_message_says_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SparkMissingError, match=r"there is no Java.*apt install.*JAVA_HOME"):
        spark_session()


def test_a_java_home_without_java_is_no_java(tmp_path, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(SparkMissingError, match="there is no Java"):
        spark_session()


def test_an_old_java_is_named_with_its_version(tmp_path, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "java", 'openjdk version "11.0.2"')))
    with pytest.raises(SparkMissingError, match=r"is Java 11; Spark needs 17 or newer"):
        spark_session()


@pytest.mark.parametrize("name", ["pyspark", "pyarrow"])
def test_a_missing_package_is_named_with_the_command_that_brings_it(monkeypatch, name):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: None if wanted == name else find(wanted))
    with pytest.raises(SparkMissingError, match=rf"{name} is not installed; `pip install 'warrenmq\[spark\]'`"):
        spark_session()


def test_an_active_session_is_used_and_knows_the_source(spark):
    assert spark_session("local[7]", "another") is spark
    assert spark.sparkContext.master != "local[7]"
    with pytest.raises(SparkFailedError, match="neither path nor url"), clear_errors():
        spark.read.format("warren").option("queue", "q").load().count()


def test_a_local_session_is_quiet_and_keeps_to_loopback(monkeypatch):
    settings = session._settings("local[*]", {"spark.ui.enabled": "true"})
    assert settings["spark.driver.host"] == settings["spark.driver.bindAddress"] == "127.0.0.1"
    assert settings["spark.sql.session.timeZone"] == "UTC"
    assert settings["spark.ui.enabled"] == "true", "what the user says counts"
    assert "spark.driver.host" not in session._settings("spark://host:7077", {})


def test_the_workers_run_this_interpreter(monkeypatch):
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_LOCAL_IP"):
        monkeypatch.setenv(name, "other")
    session._prepare_environment("spark://host:7077")
    assert os.environ["PYSPARK_PYTHON"] == os.environ["PYSPARK_DRIVER_PYTHON"] == sys.executable
    assert os.environ["SPARK_LOCAL_IP"] == "other"
    session._prepare_environment("local[2]")
    assert os.environ["SPARK_LOCAL_IP"] == "127.0.0.1"


WORKER = """An exception was thrown from the Python worker. Please see the stack trace below.
Traceback (most recent call last):
  File "rows.py", line 1, in read
    raise DamagedMessageError("bad")
warren.pipeline.errors.DamagedMessageError: 0.qs at 64: seq_id 7 of 'orders' is damaged

\tat org.apache.spark.api.python.BasePythonRunner
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (WORKER, "0.qs at 64: seq_id 7 of 'orders' is damaged"),
        (
            "[TABLE_OR_VIEW_NOT_FOUND] The table `x` cannot be found.\nVerify it.; line 1",
            "[TABLE_OR_VIEW_NOT_FOUND] The",
        ),
        ("", "ValueError"),
    ],
)
def test_of_an_exception_of_spark_the_user_gets_the_line_that_counts(text, message):
    assert clear_message(ValueError(text)).startswith(message)
    assert "\n" not in clear_message(ValueError(text))


def test_a_job_that_fails_is_one_error_with_the_words_of_the_worker(spark):
    def fail(_: object) -> None:
        raise ValueError("the reason")

    with pytest.raises(SparkFailedError, match=r"^the reason$"), clear_errors():
        spark.sparkContext.parallelize([1], 1).foreach(fail)


def test_the_bar_counts_the_tasks_of_the_jobs_of_its_block(spark):
    screen = io.StringIO()
    with job_progress(spark, "counting", Console(file=screen, force_terminal=True, width=80)):
        assert spark.sparkContext.parallelize(range(10), 5).count() == 10
    assert "counting" in screen.getvalue()
    context = spark.sparkContext
    with job_group(context, "counting") as group:
        context.parallelize(range(10), 5).count()
        context.parallelize(range(10), 2).count()
    assert count_tasks(context.statusTracker(), group) == (7, 0, 7)
    assert context.getLocalProperty("spark.jobGroup.id") is None
    assert count_tasks(context.statusTracker(), "nobody's") == (0, 0, 0)


def test_without_a_terminal_nothing_is_shown(spark):
    screen = io.StringIO()
    with job_progress(spark, "counting", Console(file=screen, force_terminal=False)):
        spark.sparkContext.parallelize(range(10), 2).count()
    assert screen.getvalue() == ""


def test_work_is_divided_by_bytes_in_order(spark):
    mib = 1024 * 1024
    assert divide(spark, [], lambda _: 1) == []
    assert divide(spark, list(range(5)), lambda _: mib) == [[0, 1, 2, 3], [4]]
    groups = divide(spark, list(range(100)), lambda _: 3000 * mib)
    assert groups == [[number] for number in range(100)], "no task gets more than it can do again"
