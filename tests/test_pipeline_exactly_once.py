"""Exactly once, end to end: broker -> stream -> Parquet and broker -> stream -> broker, while everything is killed.

Every round publishes, starts a driver that dies at a named point, and leaves its checkpoint to the next one, which has
another number of cores, partitions and shuffle partitions, and adaptive execution on or off. At the end one driver drains
the queues. The ledger: every confirmed message is in the Parquet files, or in the target queue, exactly once; and the
sources are empty.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pika
import pyarrow as pa
import pyarrow.parquet
import pytest

from tests.broker_process import Served, free_port, served
from tests.conftest import Scale
from tests.exactly_once_driver import KILL_AT, KILL_DIRECTORY, KILL_URL, NODE_PID, kill_session
from warren.pipeline.broker_client import BrokerClient, Credentials
from warren.pipeline.sink import SinkSettings, _Stages

ROOT = Path(__file__).parent.parent
PATIENCE = 900.0  # a machine may be busy with other things
SINKS = ("parquet", "broker")
ROWS = 300  # two batches

# Each leaves another state behind. Spark's file sink has no hook between its own commit and Spark's: there the driver dies
# just behind Spark's commit, and that is then removed, which leaves the same files.
DRIVER_DIES = (
    "between sink commit and commits/N",
    "after a checkout is synced and before offsets/N",
    "between task read and sink commit",
    "between commits/N and the next latestOffset",
)
BROKER_DIES = ("vhost", "node")
POINTS = [
    *itertools.product(DRIVER_DIES, SINKS),
    ("vhost", "parquet"),
    ("vhost", "broker"),
    ("node", "parquet"),
    ("after half of the tasks", "broker"),
]


class Campaign:
    """A broker, the drivers that use it, and the ledger."""

    def __init__(self, broker: Served, work: Path) -> None:
        self.broker = broker
        self.work = work
        self.ledger: dict[str, Counter[bytes]] = {sink: Counter() for sink in SINKS}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.broker.http_port}"

    def publish(self, sink: str, count: int) -> None:
        with contextlib.closing(self.broker.connect()) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            channel.queue_declare(f"to-{sink}", durable=True)
            channel.queue_declare("done", durable=True)
            for _ in range(count):
                number = next(self._numbers)
                body = b"%d" % number + b"x" * (5000 if number % 50 == 0 else 0)  # some are in the message store
                channel.basic_publish("", f"to-{sink}", body, pika.BasicProperties(delivery_mode=2))
                self.ledger[sink][body] += 1

    def drive(self, *sinks: str, chance: random.Random, kill_at: str = "") -> int:
        """The exit code of a driver. A node that is killed meanwhile is started again."""
        traps = self.work / f"traps-{next(self._numbers)}"
        traps.mkdir()
        said = {
            "url": self.url,
            "work": str(self.work),
            "sinks": sinks,
            "cores": chance.randint(1, 3),
            "partitions": chance.randint(2, 4),
            "shuffle_partitions": chance.randint(1, 4),
            "adaptive": chance.choice(["true", "false"]),
        }
        assert self.broker.process is not None
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK", "SPARK"))},
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYTHONPATH": str(ROOT),
            KILL_AT: kill_at,
            KILL_DIRECTORY: str(traps),
            KILL_URL: self.url,
            NODE_PID: str(self.broker.process.pid),
        }
        with (self.work / "driver.log").open("ab") as log:
            driver = subprocess.Popen(
                [sys.executable, "-c", "import json, sys; from tests.exactly_once_driver import drive; "
                 "drive(json.loads(sys.argv[1]))", json.dumps(said)],
                stdout=log, stderr=log, env=environment, cwd=ROOT, start_new_session=True,
            )  # fmt: skip
            deadline = time.monotonic() + PATIENCE
            while driver.poll() is None:
                if self.broker.process.poll() is not None:
                    self.broker.start()
                if time.monotonic() > deadline:
                    kill_session(driver.pid)
                    driver.wait()
                    raise AssertionError(f"the driver does not end: {self.log()}")
                time.sleep(0.05)
        assert not kill_at or (traps / kill_at).exists(), (kill_at, self.log())
        return driver.returncode

    def log(self) -> str:
        return (self.work / "driver.log").read_text(errors="replace")[-4000:]

    def forget_last_commit(self) -> None:
        """As if the driver had died between the commit of the file sink and Spark's own."""
        commits = self.work / "checkpoint-parquet" / "commits"
        last = max((int(file.name) for file in commits.iterdir() if file.name.isdigit()), default=-1)
        for file in commits.iterdir():
            if file.name in (str(last), f".{last}.crc"):
                file.unlink()

    def in_parquet(self) -> Counter[bytes]:
        """By the sink's own log: files that it does not name are litter of drivers that died."""
        named: dict[str, None] = {}
        for entry in sorted((self.work / "rows" / "_spark_metadata").iterdir()):
            if entry.name.startswith("."):
                continue
            for line in entry.read_text().splitlines()[1:]:
                named[json.loads(line)["path"]] = None
        found: Counter[bytes] = Counter()
        for path in named:
            found.update(pyarrow.parquet.read_table(path.removeprefix("file://"), columns=["body"])["body"].to_pylist())
        return found

    def in_queue(self, queue: str) -> Counter[bytes]:
        """All that is ready; it is consumed."""
        found: Counter[bytes] = Counter()
        with contextlib.closing(self.broker.connect()) as connection:
            channel = connection.channel()
            while (got := channel.basic_get(queue, auto_ack=True))[0] is not None:
                found[got[2]] += 1
        return found

    def counts(self, queue: str) -> tuple[int, int]:
        with BrokerClient(self.url, Credentials("guest", "guest")) as client:
            found = client.call("tap/status", vhost="/", queues=[queue])["queues"][queue]
        return found["ready"], found["unacknowledged"]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "data", "--http-port", str(free_port())) as broker:
        yield broker


@pytest.mark.timeout(2400)
@pytest.mark.usefixtures("pika_litter")
def test_every_message_arrives_exactly_once_whatever_is_killed(
    broker: Served, tmp_path: Path, scale: Scale, seed: int, record_property: Any
) -> None:
    chance = random.Random(seed)
    work = tmp_path / "work"
    work.mkdir()
    campaign = Campaign(broker, work)
    rounds = scale.scale(20)
    schedule = [*POINTS]
    chance.shuffle(schedule)
    schedule = list(itertools.islice(itertools.cycle(schedule), rounds))
    for sink in SINKS:
        campaign.publish(sink, ROWS // 3)
    for point, sink in schedule:
        campaign.publish(sink, ROWS)
        forgets = sink == "parquet" and point == "between sink commit and commits/N"
        trap = "between commits/N and the next latestOffset" if forgets else point
        code = campaign.drive(sink, chance=chance, kill_at=trap.replace("/", "_"))
        if point in BROKER_DIES:
            assert code == 0, campaign.log()
        else:
            assert code == -9, campaign.log()
        if forgets:
            campaign.forget_last_commit()
    assert campaign.drive(*SINKS, chance=chance) == 0, campaign.log()
    record_property("kills", rounds)
    record_property("messages", sum(sum(ledger.values()) for ledger in campaign.ledger.values()))
    for sink in SINKS:
        assert campaign.counts(f"to-{sink}") == (0, 0), "the source is empty when the stream is idle"
    assert campaign.in_parquet() == campaign.ledger["parquet"]
    assert campaign.in_queue("done") == campaign.ledger["broker"]


@pytest.mark.usefixtures("pika_litter")
def test_a_release_that_is_cut_off_goes_on_where_it_was(broker: Served, scale: Scale, record_property: Any) -> None:
    """The target has room for some of the batch only, so the release is under way when the vhost process, or the node, is
    killed; then a consumer makes room."""
    total, room = 2000, 700
    kills = 0
    for number in range(scale.scale(10)):
        target = f"narrow-{number}"
        with contextlib.closing(broker.connect()) as connection:
            narrow = {"x-max-length": room, "x-overflow": "reject-publish"}
            connection.channel().queue_declare(target, durable=True, arguments=narrow)
        options = {"url": f"http://127.0.0.1:{broker.http_port}", "routingKey": target}
        guest = Credentials("guest", "guest")
        stages = _Stages(SinkSettings.from_options(options), target, guest)
        bodies = [b"%d" % n for n in range(total)]
        rows = pa.RecordBatch.from_pydict({"body": bodies})
        staged = stages.stage("q.0", 0, 1, iter([rows]))
        deciding = threading.Thread(target=stages.decide, args=("q.0", [staged]), daemon=True)
        deciding.start()
        with BrokerClient(options["url"], guest) as client:
            while not client.call("stages/status", vhost="/", writer=target)["pending"]:
                time.sleep(0.002)
        if number % 2:
            broker.kill_node()
            broker.start()
        else:
            os.kill(broker.vhost_pid(), 9)
        kills += 1
        found: list[bytes] = []
        deadline = time.monotonic() + PATIENCE
        while len(found) < total or deciding.is_alive():
            assert time.monotonic() < deadline, (len(found), deciding.is_alive())
            with contextlib.suppress(pika.exceptions.AMQPError), contextlib.closing(broker.connect()) as connection:
                channel = connection.channel()
                for method, _, body in channel.consume(target, inactivity_timeout=0.2):
                    if method is None:
                        break
                    found.append(body)
                    channel.basic_ack(method.delivery_tag)
        deciding.join()
        assert Counter(found) == Counter(bodies)
        with BrokerClient(options["url"], guest) as client:
            assert client.call("stages/status", vhost="/", writer=target)["pending"] == 0
    record_property("kills", kills)
