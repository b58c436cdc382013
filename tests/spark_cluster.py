"""A standalone cluster of Spark on this machine: one master, two workers, each executor a process of its own.

Started from the pip package, which has no scripts for it. Workers may be started so that they do not see a directory, as on
another machine: in a mount namespace of their own, which needs root.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyspark

from tests.broker_process import free_port
from tests.spark_session import prepare_environment

_PATIENCE = 240.0
EXECUTOR = "CoarseGrainedExecutorBackend"


class Cluster:
    """`url` is for `.master(...)`."""

    def __init__(self, directory: Path, hidden: Path | None = None) -> None:
        prepare_environment()
        self._directory = directory
        self._hidden = hidden
        self._processes: list[subprocess.Popen[bytes]] = []
        self.url = ""

    def start(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        port = free_port()
        self.url = f"spark://127.0.0.1:{port}"
        common = ["--host", "127.0.0.1"]
        self._run("master", [*common, "--port", str(port), "--webui-port", str(free_port())], "Master")
        for number in range(2):
            name = f"worker{number}"
            arguments = [*common, "--cores", "1", "--memory", "1g", "--work-dir", str(self._directory / name)]
            self._run(name, [*arguments, "--webui-port", str(free_port()), self.url], "Worker")
        deadline = time.monotonic() + _PATIENCE
        while any("registered with master" not in self.log(f"worker{number}") for number in range(2)):
            assert time.monotonic() < deadline, self.log("master") + self.log("worker0")
            time.sleep(0.1)

    def _run(self, name: str, arguments: list[str], what: str) -> None:
        home = os.path.dirname(pyspark.__file__)
        command = [f"{home}/bin/spark-class", f"org.apache.spark.deploy.{what.lower()}.{what}", *arguments]
        if what == "Worker" and self._hidden is not None:
            hide = f'mount --make-rprivate / && mount -t tmpfs none "{self._hidden}" && exec "$@"'
            command = ["unshare", "--mount", "sh", "-c", hide, "sh", *command]
        environment = {**os.environ, "SPARK_HOME": home, "SPARK_NO_DAEMONIZE": "1", "SPARK_DAEMON_MEMORY": "256m"}
        with (self._directory / f"{name}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
            )

    def log(self, name: str) -> str:
        path = self._directory / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def executors(self) -> list[psutil.Process]:
        found = []
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        if any(EXECUTOR in part for part in child.cmdline()):
                            found.append(child)
        return found

    def kill_an_executor(self) -> int:
        """kill -9, as soon as there is one; its pid."""
        deadline = time.monotonic() + _PATIENCE
        while not (running := self.executors()):
            assert time.monotonic() < deadline, "no executor came up"
            time.sleep(0.02)
        running[0].kill()
        return running[0].pid

    def stop(self) -> None:
        for process in reversed(self._processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def cluster(directory: Path, hidden: Path | None = None) -> Iterator[Cluster]:
    made = Cluster(directory, hidden)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def may_hide() -> bool:
    """Whether this user may have a mount namespace of his own."""
    done = subprocess.run(["unshare", "--mount", "true"], capture_output=True)
    return done.returncode == 0


@contextlib.contextmanager
def driver(program: str, *arguments: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A driver program of its own: a process has one session, and the tests' own is local."""
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=file, stderr=file)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
