"""Where something is killed, and whom: what the drivers of `test_pipeline_exactly_once.py` fall into.

A trap is said in the environment (`WARREN_PIPELINE_TRAP`, JSON), so that the driver, its JVM and the executors all know it. A
process that comes by a point calls `reached` with the sink that it works for; for each sink the n-th one to come by the
trap's point kills its victim with signal 9 and leaves the file `killed-<sink>` in the trap's directory. Only the standard
library: an interpreter is started for it, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

TRAP = "WARREN_PIPELINE_TRAP"

CHECKED_OUT = "after a checkout is synced and before offsets/N"
TASK_READ = "between task read and sink commit"
SINK_COMMITTED = "between sink commit and commits/N"
BATCH_COMMITTED = "between commits/N and the next latestOffset"
RELEASING = "during the release of stages"
POINTS = (CHECKED_OUT, TASK_READ, SINK_COMMITTED, BATCH_COMMITTED, RELEASING)
HALF_DONE = "after half of the tasks"

VICTIMS = ("driver", "executor", "vhost", "node")
EXECUTOR = "CoarseGrainedExecutorBackend"


def trapped(point: str) -> dict[str, Any] | None:
    """The trap, if it is at this point."""
    trap: dict[str, Any] | None = json.loads(os.environ.get(TRAP, "null"))
    return trap if trap is not None and trap["point"] == point else None


def killed(directory: str | Path, sink: str) -> Path:
    """There, when something was killed while it worked for the sink."""
    return Path(directory) / f"killed-{sink}"


def reached(point: str, sink: str) -> None:
    """Kill the victim, if this is the point and the time."""
    trap = trapped(point)
    if trap is None:
        return
    with open(Path(trap["directory"]) / f"reached-{sink}", "ab") as file:
        file.write(b".")
        file.flush()
        if file.tell() != trap["nth"]:
            return
    mark = killed(trap["directory"], sink)
    if trap["victim"] == "driver":
        mark.touch()
        kill_session(os.getsid(0))
        os.kill(os.getpid(), signal.SIGKILL)
    victim = _victim(trap)
    if trap["victim"] == "executor":
        mark.touch()  # this process may be the executor's own
    _kill(victim)
    mark.touch()


def _victim(trap: dict[str, Any]) -> int:
    if trap["victim"] == "vhost":
        with urllib.request.urlopen(trap["url"] + "/api/status", timeout=10) as answer:
            return int(json.load(answer)["vhosts"][0]["pid"])
    if trap["victim"] == "node":
        return int((Path(trap["directory"]) / "node").read_text())
    executors = [pid for pid in _processes() if _is_executor(pid, trap["directory"])]
    mine = [pid for pid in _ancestors(os.getpid()) if pid in executors]  # the one that has this task
    return [*mine, *executors][0]


def _is_executor(pid: int, mark: str) -> bool:
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return EXECUTOR.encode() in command and mark.encode() in command
    return False


def _ancestors(pid: int) -> list[int]:
    found = []
    while pid > 1:
        with open(f"/proc/{pid}/stat") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
        found.append(pid)
    return found


def _kill(pid: int) -> None:
    """And wait until it does nothing any more."""
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        while True:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] in "ZX":
                    return
            time.sleep(0.002)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def kill_session(session: int) -> None:
    """Every process of a session but this one."""
    for pid in _processes():
        with contextlib.suppress(ProcessLookupError):
            if pid != os.getpid() and os.getsid(pid) == session:
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    reached(sys.argv[1], sys.argv[2])
