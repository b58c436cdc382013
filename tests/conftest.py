"""What every test may use: the scale of the run, its seed, and the report that a full run leaves.

Rules:

1. A test that repeats something asks `scale` how often, so that `make test` does a tenth of `make test-full`.
2. All chance in a run comes from one seed. It stands in pytest's header; `--hypothesis-seed=<it>` repeats the run.
3. What a test counted (`record_property("kills", 300)`) goes into the report of a full run, docs/reliability/. A run of
   some of the tests leaves no report: it would look like a run of all of them.
"""

from __future__ import annotations

import datetime
import gc
import os
import platform
import random
import shlex
import subprocess
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    import pika
    from pika.adapters.blocking_connection import BlockingChannel

    from tests.broker_process import Served
    from warren.testing import RunningBroker

_EXAMPLES_FULL = 1000


_SEED = "WARREN_TEST_SEED"


@dataclass(frozen=True)
class Scale:
    """How big the run is."""

    full: bool

    def scale(self, full: int) -> int:
        """`full` in a full run, a tenth of it in a small one, but at least 2."""
        return full if self.full else max(2, full // 10)


def _scale_of_run() -> Scale:
    name = os.environ.get("WARREN_TEST_SCALE", "small")
    if name not in ("small", "full"):
        raise pytest.UsageError(f"WARREN_TEST_SCALE is {name!r}; it can be small or full")
    return Scale(full=name == "full")


@pytest.fixture(scope="session")
def scale() -> Scale:
    return _scale_of_run()


@pytest.fixture
def seed(request: pytest.FixtureRequest, record_property) -> int:
    """The seed of this run, for `random.Random(seed)`."""
    seed = int(request.config.option.hypothesis_seed)
    record_property("seed", seed)
    return seed


def pytest_configure(config: pytest.Config) -> None:
    # Before Hypothesis' own pytest_configure, which reads it.
    if config.option.hypothesis_seed is None:
        # By the environment: the processes of a parallel run have the seed that its first lines tell.
        config.option.hypothesis_seed = os.environ.setdefault(_SEED, str(random.SystemRandom().randrange(2**32)))
    scale = _scale_of_run()
    # No deadline: a busy machine is no failure, and pytest-timeout ends what hangs.
    hypothesis.settings.register_profile(
        "warren", deadline=None, print_blob=True, max_examples=scale.scale(_EXAMPLES_FULL)
    )
    hypothesis.settings.load_profile("warren")
    is_xdist_worker = hasattr(config, "workerinput")
    if scale.full and not is_xdist_worker:
        config.pluginmanager.register(ReliabilityReport(config), "warren-reliability-report")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share a Spark session run in one process, or each would start a JVM of its own."""
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("spark"))


def pytest_report_header(config: pytest.Config) -> str:
    return f"warren: scale {'full' if _scale_of_run().full else 'small'}, seed {config.option.hypothesis_seed}"


@dataclass
class _TestRun:
    outcome: str = "passed"
    seconds: float = 0.0
    properties: dict[str, object] = field(default_factory=dict)


class ReliabilityReport:
    """Gathers the results of a full run and writes them to docs/reliability/<date>-<commit>.md."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._runs: dict[str, _TestRun] = defaultdict(_TestRun)  # by node id, in the order of the run
        self._deselected = False
        self._written: Path | None = None

    def pytest_deselected(self) -> None:
        self._deselected = True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._runs[report.nodeid].outcome = "skipped"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        run = self._runs[report.nodeid]
        run.seconds += report.duration
        run.properties.update(report.user_properties)
        if report.outcome != "passed" and run.outcome != "failed":
            run.outcome = report.outcome

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        whole = (
            self._config.args_source is pytest.Config.ArgsSource.TESTPATHS
            and not self._deselected
            and not session.shouldstop
            and not session.shouldfail
            and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        )
        if not whole:
            return
        now = datetime.datetime.now(datetime.UTC)
        commit = self._git("rev-parse", "--short", "HEAD") or "uncommitted"
        path = self._config.rootpath / "docs" / "reliability" / f"{now:%Y-%m-%d}-{commit}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self._text(now, commit))
        self._written = path

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._written is None:
            terminalreporter.write_line("no reliability report: the run did not go through all of the tests")
        else:
            terminalreporter.write_line(f"wrote {self._written.relative_to(self._config.rootpath)}")

    def _text(self, now: datetime.datetime, commit: str) -> str:
        arguments = shlex.join(self._config.invocation_params.args)
        command = "make test-full" + (f" ARGS={shlex.quote(arguments)}" if arguments else "")
        dirty = ", with uncommitted changes" if self._git("status", "--porcelain") else ""
        lines = [
            f"# Full test run of {now:%Y-%m-%d}",
            "",
            f"- commit: {commit}{dirty}",
            f"- command: `{command}`",
            f"- seed: {self._config.option.hypothesis_seed} (`--hypothesis-seed` repeats it)",
            f"- machine: {os.cpu_count()} cores, {platform.system()} {platform.release()} {platform.machine()}, "
            f"temporary files on {_filesystem(tempfile.gettempdir())}",
            f"- Python: {platform.python_version()} ({platform.python_implementation()})",
            "",
            "| test file | tests | passed | failed | skipped | minutes |",
            "|---|--:|--:|--:|--:|--:|",
        ]
        files: dict[str, list[_TestRun]] = defaultdict(list)
        for node_id, run in self._runs.items():
            files[node_id.partition("::")[0]].append(run)
        lines += [_row(name, runs) for name, runs in sorted(files.items())]
        lines.append(_row("**all**", list(self._runs.values())))
        counted = [
            f"| {node_id.replace('|', chr(92) + '|')} | {name} | {value} |"
            for node_id, run in self._runs.items()
            for name, value in run.properties.items()
        ]
        if counted:
            lines += ["", "What the tests recorded:", "", "| test | what | value |", "|---|---|--:|", *counted]
        return "\n".join(lines) + "\n"

    def _git(self, *arguments: str) -> str:
        """What git says, or nothing where there is no git, no repository or no commit."""
        try:
            done = subprocess.run(["git", *arguments], cwd=self._config.rootpath, capture_output=True, text=True)
        except FileNotFoundError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""


def _row(name: str, runs: list[_TestRun]) -> str:
    count = Counter(run.outcome for run in runs)
    minutes = sum(run.seconds for run in runs) / 60
    cells = [name, len(runs), count["passed"], count["failed"], count["skipped"], f"{minutes:.2f}"]
    return "| " + " | ".join(map(str, cells)) + " |"


def _filesystem(path: str) -> str:
    """The type of the filesystem that holds `path`, for example ext4."""
    path = os.path.realpath(path)
    best, kind = "", "an unknown filesystem"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, mount_kind, *_ = line.split(" ")
        if os.path.commonpath([path, mount]) == mount and len(mount) >= len(best):
            best, kind = mount, mount_kind
    return kind


@pytest.fixture
def pika_litter() -> Iterator[None]:
    """pika leaves the sockets of lost and forgotten connections to the collector: have it come while that is ignored."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


# ---- a broker and a pika client of it, for the suites of clients; a module that needs another kind has its own ----


MODES = ("processes", "inline")  # how a broker runs: as `warren serve` does it, one process a vhost, and with --inline


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The suites of clients run against both kinds of broker."""
    if "broker" in metafunc.fixturenames and metafunc.module.__name__.split(".")[-1].startswith("test_clients_"):
        metafunc.parametrize("broker", MODES, indirect=True, scope="module")


@pytest.fixture(scope="module")
def broker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningBroker | Served]:
    from tests.broker_process import served  # most tests need none
    from warren.node.users import Users
    from warren.testing import running_broker

    data = tmp_path_factory.mktemp("broker") / "data"
    data.mkdir()
    with Users(data) as users:
        users.add_user("clerk", "secret")
        users.set_permissions("clerk", "/", "^own-", "^own-", "^own-")
    if getattr(request, "param", "inline") == "inline":
        with running_broker(str(data)) as running:
            yield running
    else:
        with served(data, "--durability", "os") as processes:
            yield processes


@pytest.fixture
def connection(broker: RunningBroker | Served) -> Iterator[pika.BlockingConnection]:
    from tests.broker_clients import connected

    with connected(broker) as connection:
        yield connection


@pytest.fixture
def channel(connection: pika.BlockingConnection) -> BlockingChannel:
    return connection.channel()


@pytest.fixture
def q(channel: BlockingChannel) -> Iterator[str]:
    """A queue."""
    from tests.broker_clients import unique

    name = unique()
    channel.queue_declare(name)
    yield name
    if channel.connection.is_open:
        channel.connection.channel().queue_delete(name)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real one of 8 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(path)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs of 8 MiB can be mounted here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.fixture(autouse=True)
def _active_spark(request: pytest.FixtureRequest) -> None:
    """A broker in the tests' own process starts a data server, and Spark's connection to its JVM does not survive that: the
    next one is of another thread there, for which no session is the active one. Sources are looked up in the active one."""
    if "spark" in request.fixturenames:
        from tests.spark_session import activate

        activate(request.getfixturevalue("spark"))
