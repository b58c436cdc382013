"""`make bench-rabbitmq`: Warren beside RabbitMQ on this machine, under the same load.

    python -m bench.rabbitmq [--seconds 8] [--scale 1] [--repeat 3] [--only fill] [--quick]

Both brokers run during all of it, each with a fresh directory on the measured disk, and one of them is idle while the other
works. Each scenario goes round Warren and versions 1 and 2 of RabbitMQ's classic queues, `--repeat` times, and
the medians count. Warren runs with `durability = fsync`, its default: a confirm comes after fdatasync. RabbitMQ 3.10 syncs
v1 and v2 as it sees fit; nothing of its configuration is changed but ports and directories. Durable lines last for ten of
Warren's checkpoints and more, which the report counts (`checkpoints.py`).

RabbitMQ is Debian's, installed if it is missing. Only what was started here is stopped here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.checkpoints import ENOUGH, Checkpoints
from bench.harness import RESULTS, commit, fdatasync_microseconds, filesystem, median, scratch
from warren.amqp.bulk_client import connect
from warren.cli.bench import Outcome, measure
from warren.cli.load import Load, remove_queues

_PACKAGE = "rabbitmq-server"
_SERVER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")  # the one in PATH changes the user first
_START_SECONDS = 90
_STOP_SECONDS = 30
_REST_SECONDS = 1.0  # between two runs: what a broker does after its queue is gone
_WINDOW = 1000
_ACK_EVERY = 100
_SIZES = ((16, "16 B"), (1024, "1 KiB"))
_BACKLOG = {16: 3_600_000, 1024: 450_000}  # a journal file takes 262,144 messages or 32 MiB: more than ten of them


@dataclass(frozen=True)
class Candidate:
    name: str
    url: str
    arguments: dict[str, Any]
    checkpoints: Checkpoints | None = None  # of a Warren


@dataclass(frozen=True)
class Scenario:
    """One line of the table, or two: what was filled is drained."""

    key: str
    name: str
    load: Load
    drained_as: str = ""


def scenarios(scale: float) -> list[Scenario]:
    """All of them, with that part of the backlogs."""
    found = []
    for size, label in _SIZES:
        transient = Load("", size=size, ack_every=0)
        found.append(Scenario("transient", f"transient, no acks, {label}", transient))
    safe = {"persistent": True, "confirm": _WINDOW, "ack_every": _ACK_EVERY, "prefetch": _WINDOW}
    for size, label in _SIZES:
        found.append(
            Scenario("persistent", f"persistent, confirms, acks, {label}", Load("", size=size, **safe))  # type: ignore[arg-type]
        )
    for size, label in _SIZES:
        fill = Load("", size=size, mode="fill", messages=int(_BACKLOG[size] * scale), **safe)  # type: ignore[arg-type]
        found.append(Scenario("fill", f"fill with confirms, {label}", fill, f"drain with acks, {label}"))
    return found


# ---- the brokers ----


def ensure_rabbitmq() -> None:
    """Install Debian's package where it is missing, and stop the service that its installation starts."""
    if _SERVER.exists():
        return
    command = ["apt-get", "-o", "DPkg::Lock::Timeout=120", "install", "-y", _PACKAGE]
    if os.geteuid() or not shutil.which("apt-get"):
        raise SystemExit(f"RabbitMQ is not installed. As root: {shlex.join(command)}")
    print(shlex.join(command), flush=True)
    subprocess.run(command, check=True, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})
    stop = ["systemctl", "stop", _PACKAGE] if Path("/run/systemd/system").exists() else ["service", _PACKAGE, "stop"]
    subprocess.run(stop, check=False, capture_output=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def rabbitmq(directory: Path) -> Iterator[str]:
    """A node of its own: ports, directories, cookie and epmd. No plugins, so no management either."""
    port, epmd_port = free_port(), free_port()
    directory.mkdir()
    for name, text in (("plugins", "[].\n"), ("env.conf", ""), ("rabbitmq.conf", "")):
        (directory / name).write_text(text)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("RABBITMQ_", "ERL_"))}
    environment |= {
        "HOME": str(directory),
        "ERL_EPMD_PORT": str(epmd_port),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODENAME": "warren-bench@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_MNESIA_BASE": str(directory / "mnesia"),
        "RABBITMQ_LOG_BASE": str(directory / "log"),
        "RABBITMQ_PID_FILE": str(directory / "pid"),
        "RABBITMQ_CONF_ENV_FILE": str(directory / "env.conf"),
        "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq.conf"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "plugins"),
    }
    try:
        with running([str(_SERVER)], directory / "out", environment):
            url = f"amqp://guest:guest@127.0.0.1:{port}/%2F"
            wait_for(url, directory / "out")
            yield url
    finally:
        # The node started an epmd; it listens on a port that only this node knows.
        subprocess.run(["epmd", "-port", str(epmd_port), "-kill"], check=False, capture_output=True)


@contextlib.contextmanager
def warren(directory: Path) -> Iterator[Candidate]:
    directory.mkdir()
    port, http_port = free_port(), free_port()
    command = [sys.executable, "-m", "warren.cli.main", "serve", "--data-dir", str(directory / "data")]
    command += ["--amqp-port", str(port), "--http-port", str(http_port), "--durability", "fsync"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WARREN_")}
    with running(command, directory / "out", environment):
        url = f"amqp://guest:guest@127.0.0.1:{port}/%2F"
        wait_for(url, directory / "out")
        yield Candidate("Warren", url, {}, Checkpoints(directory / "data", url, f"http://127.0.0.1:{http_port}"))


@contextlib.contextmanager
def running(command: list[str], output: Path, environment: dict[str, str]) -> Iterator[None]:
    """A process group that ends with the block."""
    with open(output, "wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for(url: str, output: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            asyncio.run(server_properties(url))
            return
        except OSError:
            if time.monotonic() > deadline:
                raise SystemExit(f"{url} did not come up:\n{output.read_text()}") from None
            time.sleep(0.25)


async def server_properties(url: str) -> dict[str, Any]:
    async with await connect(url) as connection:
        return connection.server_properties


# ---- runs ----


def run(scenario: Scenario, candidate: Candidate, seconds: float) -> dict[str, Outcome]:
    """Measure one scenario on one broker: outcomes by the name of their line."""
    load = replace(scenario.load, url=candidate.url, arguments=candidate.arguments)
    os.sync()  # what the other broker left to the kernel is not this one's to wait for
    time.sleep(_REST_SECONDS)
    if not scenario.drained_as:
        return {scenario.name: counted(candidate, lambda: measure(load, seconds, warmup=min(1.0, seconds / 4)))}
    asked = candidate.checkpoints.asked_for() if candidate.checkpoints is not None else contextlib.nullcontext()
    try:
        filled = counted(candidate, lambda: measure(load, 0))
        with asked:
            drained = counted(candidate, lambda: measure(replace(load, mode="drain"), 0))
    finally:
        asyncio.run(remove_queues(load))
    return {scenario.name: filled, scenario.drained_as: drained}


def counted(candidate: Candidate, measured: Callable[[], Outcome]) -> Outcome:
    """What was measured, with Warren's checkpoints meanwhile among its counts."""
    if candidate.checkpoints is None:
        return measured()
    before = candidate.checkpoints.done()
    outcome = measured()
    outcome.counts["checkpoints"] = candidate.checkpoints.done() - before
    return outcome


def rate(outcome: Outcome, name: str) -> float:
    """The figure of a line: what was confirmed of a fill, what arrived of a drain; of a flow what went in and came out."""
    if name.startswith("fill"):
        return outcome.rates["confirmed"]
    if name.startswith("drain"):
        return outcome.rates["consumed"]
    return min(outcome.rates["published"], outcome.rates["consumed"])


def run_all(chosen: list[Scenario], candidates: list[Candidate], repeat: int, seconds: float) -> dict[str, Any]:
    """name of a line -> name of a candidate -> its outcomes."""
    found: dict[str, dict[str, list[Outcome]]] = {}
    for scenario in chosen:
        print(scenario.name, flush=True)
        for number in range(repeat):
            for candidate in candidates:
                for name, outcome in run(scenario, candidate, seconds).items():
                    found.setdefault(name, {}).setdefault(candidate.name, []).append(outcome)
                    print(
                        f"    {number + 1}/{repeat} {candidate.name}, {name}: {rate(outcome, name):,.0f}/s", flush=True
                    )
    return found


# ---- the report ----


def table(found: dict[str, dict[str, list[Outcome]]], candidates: list[Candidate]) -> list[str]:
    ours, *others = (candidate.name for candidate in candidates)
    lines = [
        f"| messages/s | {ours} | {' | '.join(others)} | ratio to the better one |",
        "|---|--:|" + "--:|" * (len(others) + 1),
    ]
    for name, outcomes in found.items():
        rates = {key: median([rate(outcome, name) for outcome in each]) for key, each in outcomes.items()}
        ratio = rates[ours] / max(rates[other] for other in others)
        cells = [f"{rates[ours]:,.0f}", *(f"{rates[other]:,.0f}" for other in others), f"{ratio:.1f} x"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def confirm_table(found: dict[str, dict[str, list[Outcome]]], candidates: list[Candidate]) -> list[str]:
    names = [candidate.name for candidate in candidates]
    lines = [f"| ms to a confirm, p50 / p99 | {' | '.join(names)} |", "|---|" + "--:|" * len(names)]
    for name, outcomes in found.items():
        times = {
            key: [each.confirm_times for each in several if each.confirm_times] for key, several in outcomes.items()
        }
        if all(times.values()):
            cells = [
                " / ".join(f"{median([each[part] for each in times[key]]):.1f}" for part in ("p50", "p99"))
                for key in names
            ]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines if len(lines) > 2 else []


def checkpoint_table(found: dict[str, dict[str, list[Outcome]]], ours: str) -> list[str]:
    """Of the durable lines; a transient one has nothing to write."""
    lines = ["| checkpoints meanwhile, the fewest of all runs | |", "|---|--:|"]
    for name, outcomes in found.items():
        if not name.startswith("transient"):
            fewest = min(outcome.counts["checkpoints"] for outcome in outcomes[ours])
            lines.append(f"| {name} | {fewest}{'' if fewest >= ENOUGH else f' (**void: below {ENOUGH}**)'} |")
    return lines if len(lines) > 2 else []


def report(
    found: dict[str, dict[str, list[Outcome]]],
    candidates: list[Candidate],
    versions: str,
    command: str,
    repeat: int,
    disk: tuple[float, float],
) -> str:
    changed = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=False).stdout
    state = f"{commit()}{', with uncommitted changes' if changed.strip() else ''}"
    p50, p99 = disk
    void = " **The run is void: fdatasync below 50 us.**" if p50 < 50 else ""
    return "\n".join(
        [
            f"# Warren and RabbitMQ, {time.strftime('%Y-%m-%d')}, commit {state}",
            "",
            f"`{command}`; median of {repeat}, brokers taking turns; {versions}; {os.cpu_count()} cores, "
            f"Python {platform.python_version()}, {filesystem()}; fdatasync p50 {p50:.0f} us, p99 {p99:.0f} us in the same "
            f"run.{void}",
            "",
            "One publisher, one consumer, one durable queue, bodies of random bytes, load by `warren bench` in processes of "
            f"its own on the same machine. Confirms: {_WINDOW} open; acks: one for {_ACK_EVERY}, prefetch {_WINDOW}. A flow "
            "counts the lesser of what went in and came out, a fill its confirms, a drain up to the last ack. "
            "Warren confirms after fdatasync. While it drains, snapshots of it are taken, which make it write checkpoints.",
            "",
            *table(found, candidates),
            "",
            *confirm_table(found, candidates),
            "",
            *checkpoint_table(found, candidates[0].name),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.rabbitmq")
    parser.add_argument("--seconds", type=float, default=8, help="of each flow")
    parser.add_argument("--scale", type=float, default=1, help="of the backlogs that are filled and drained")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default="transient,persistent,fill", help="of transient, persistent, fill")
    parser.add_argument("--quick", action="store_true", help="once and short, and no report is written")
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.scale, options.repeat = 3, 0.1, 1
    chosen = [each for each in scenarios(options.scale) if each.key in options.only.split(",")]
    ensure_rabbitmq()
    disk = fdatasync_microseconds()
    print(f"fdatasync p50 {disk[0]:.0f} us, p99 {disk[1]:.0f} us", flush=True)
    with (
        scratch() as path,
        rabbitmq(Path(path) / "rabbitmq") as rabbit_url,
        warren(Path(path) / "warren") as ours,
    ):
        candidates = [
            ours,
            Candidate("RabbitMQ v1", rabbit_url, {"x-queue-version": 1}),
            Candidate("RabbitMQ v2", rabbit_url, {"x-queue-version": 2}),
        ]
        about = {name: asyncio.run(server_properties(url)) for name, url in (("w", ours.url), ("r", rabbit_url))}
        versions = (
            f"Warren {about['w'].get('version')}, RabbitMQ {about['r'].get('version')} ({about['r'].get('platform')})"
        )
        print(versions, flush=True)
        found = run_all(chosen, candidates, options.repeat, options.seconds)
    command = shlex.join(["python", "-m", "bench.rabbitmq", *sys.argv[1:]])
    text = report(found, candidates, versions, command, options.repeat, disk)
    print(text)
    if options.quick:
        return
    RESULTS.mkdir(exist_ok=True)
    stem = RESULTS / f"{time.strftime('%Y-%m-%d')}-rabbitmq-{commit()}"
    stem.with_suffix(".md").write_text(text)
    every = {
        name: {key: [each.__dict__ for each in several] for key, several in by.items()} for name, by in found.items()
    }
    stem.with_suffix(".json").write_text(json.dumps(every, indent=1) + "\n")
    print(f"written to {stem}.md")


if __name__ == "__main__":
    main()
