"""Who used the processors: seconds of CPU by groups of processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

import psutil


class CpuShares:
    """Watches groups of processes, each named by the one whose descendants belong to it. What a process was before is not
    counted, nor is one that ended before anybody looked, unless its parent waited for it."""

    def __init__(self, groups: Mapping[str, int]) -> None:
        self._groups = dict(groups)
        self._before = self._seconds()

    def _seconds(self) -> dict[str, float]:
        return {name: _seconds_of(pid) for name, pid in self._groups.items()}

    def taken(self) -> dict[str, float]:
        """Seconds of CPU since the beginning, by group."""
        return {name: max(0.0, now - self._before[name]) for name, now in self._seconds().items()}


def jvm_pid() -> int:
    """The JVM that Spark started for this process; workers and readers in Python are its children."""
    for child in psutil.Process(os.getpid()).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.name() == "java":
                return child.pid
    raise RuntimeError("there is no JVM below this process: start a session first")


def shown(seconds: Mapping[str, float]) -> str:
    """As shares of all that was used."""
    whole = sum(seconds.values()) or 1.0
    return ", ".join(f"{name} {value / whole:.0%}" for name, value in seconds.items())


def _seconds_of(pid: int) -> float:
    total = 0.0
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += sum(process.cpu_times()[:4])  # its own, and of children that it waited for
    return total
