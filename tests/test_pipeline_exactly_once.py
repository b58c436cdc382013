"""Exactly once, end to end: broker -> stream -> Parquet and broker -> stream -> broker, while everything is killed.

A round is a point and a victim (`exactly_once_traps.py`). For both sinks it publishes and starts a driver, or two if it is
the driver that dies, which comes by the point, kills the victim there, and leaves its checkpoint to the next one, which
has another number of cores, partitions and shuffle partitions, adaptive execution on or off, and reads files in the place
of HTTP, or the other way round. Twenty rounds are all points with all victims; in a small run a round is for one of the
sinks. At the end one driver drains the queues. The ledger: every confirmed message is in the Parquet files, or in the
target queue, exactly once; and the sources are empty.
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
from tests.exactly_once_traps import HALF_DONE, POINTS, RELEASING, TRAP, VICTIMS, kill_session, killed
from tests.spark_cluster import Cluster, cluster
from warren.pipeline.broker_client import BrokerClient, Credentials
from warren.pipeline.sink import SinkSettings, _Stages

ROOT = Path(__file__).parent.parent
PATIENCE = 900.0  # a machine may be busy with other things
SINKS = ("parquet", "broker")
ROWS = 300  # published before a driver starts: two batches
BATCH = 150
ROOM = 100  # in a target that is to be full in the middle of a batch
GUEST = Credentials("guest", "guest")


class Campaign:
    """A broker, the drivers that use it, and the ledger."""

    def __init__(self, broker: Served, work: Path) -> None:
        work.mkdir()
        self.broker = broker
        self.work = work
        self.ledger: dict[str, Counter[bytes]] = {sink: Counter() for sink in SINKS}
        self.consumed: Counter[bytes] = Counter()  # out of targets that were full
        self._numbers = itertools.count()
        self._declare("done", *(f"to-{sink}" for sink in SINKS))

    @property
    def url(self) -> str:
        return self.broker.http_url

    def _declare(self, *queues: str, **arguments: Any) -> None:
        with contextlib.closing(self.broker.connect()) as connection:
            for queue in queues:
                connection.channel().queue_declare(queue, durable=True, arguments=arguments)

    def publish(self, sink: str, count: int) -> None:
        with contextlib.closing(self.broker.connect()) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            for _ in range(count):
                number = next(self._numbers)
                body = b"%d" % number + b"x" * (5000 if number % 50 == 0 else 0)  # some are in the message store
                channel.basic_publish("", f"to-{sink}", body, pika.BasicProperties(delivery_mode=2))
                self.ledger[sink][body] += 1

    def shape(self, chance: random.Random) -> dict[str, Any]:
        """How a driver cuts its work, which is nothing that may be seen in the rows."""
        conf = {
            "spark.sql.shuffle.partitions": chance.randint(1, 4),
            "spark.sql.adaptive.enabled": chance.choice(["true", "false"]),
            "spark.sql.adaptive.advisoryPartitionSizeInBytes": chance.choice(["1k", "64m"]),
        }
        access = chance.choice(["files", "http"])
        return {
            "master": f"local[{chance.randint(1, 3)}, 4]",
            "partitions": chance.randint(2, 4),
            "rows": BATCH,
            "access": dict.fromkeys(SINKS, access),
            "conf": conf,
        }

    def drive(self, *sinks: str, shape: dict[str, Any], trap: dict[str, Any] | None = None) -> int:
        """The exit code of a driver. A node that is killed meanwhile is started again."""
        traps = self.work / f"traps-{next(self._numbers)}"
        traps.mkdir()
        assert self.broker.process is not None
        target = "done"
        if trap is not None:
            trap = {"nth": 2, "directory": str(traps), "url": self.url, **trap}
            if trap["point"] == RELEASING:
                target = trap["narrow"] = f"narrow-{traps.name}"
                trap["room"], trap["nth"] = ROOM, 1
                self._declare(target, **{"x-max-length": ROOM, "x-overflow": "reject-publish"})
        said = {"url": self.url, "work": str(self.work), "sinks": sinks, "target": target, "traps": str(traps), **shape}
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK", "SPARK"))},
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".strip(os.pathsep),
            TRAP: json.dumps(trap),
        }
        with (self.work / "driver.log").open("ab") as log:
            driver = subprocess.Popen(
                [sys.executable, "-c", "import json, sys; from tests.exactly_once_driver import drive; "
                 "drive(json.loads(sys.argv[1]))", json.dumps(said)],
                stdout=log, stderr=log, env=environment, cwd=ROOT, start_new_session=True,
            )  # fmt: skip
            try:
                self._wait(driver, traps, target)
            finally:
                kill_session(driver.pid)
                driver.wait()
        for sink in sinks if trap is not None else ():
            assert killed(traps, sink).exists(), (trap, sink, self.log())
        if target != "done":
            self._consume(target, until=lambda: self._pending() == 0)
        return driver.returncode

    def _wait(self, driver: subprocess.Popen[bytes], traps: Path, target: str) -> None:
        deadline = time.monotonic() + PATIENCE
        assert self.broker.process is not None
        (traps / "node").write_text(str(self.broker.process.pid))
        while driver.poll() is None:
            if self.broker.process.poll() is not None:
                self.broker.start()
                (traps / "node").write_text(str(self.broker.process.pid))
            elif target != "done" and killed(traps, "broker").exists():
                self._consume(target)
            assert time.monotonic() < deadline, f"the driver does not end: {self.log()}"
            time.sleep(0.05)

    def _pending(self) -> int:
        """Stages of the stream into the broker that are decided and not released."""
        identity = json.loads((self.work / "checkpoint-broker" / "metadata").read_text())["id"]
        found: int = self.broker.ask("stages/status", vhost="/", writer=f"spark-{identity}")["pending"]
        return found

    def _consume(self, target: str, until: Any = lambda: True) -> None:
        """What is in a target that was full when something was killed; nothing is killed from now on."""
        deadline = time.monotonic() + PATIENCE
        while True:
            ended = until()
            self.consumed += self.in_queue(target)
            if ended:
                return
            assert time.monotonic() < deadline, "the release does not end"
            time.sleep(0.02)

    def log(self) -> str:
        return (self.work / "driver.log").read_text(errors="replace")[-4000:]

    def in_parquet(self) -> Counter[bytes]:
        """By the sink's own log: files that it does not name are litter of drivers that died."""
        named: dict[str, None] = {}
        entries = self.work / "rows" / "_spark_metadata"
        for entry in sorted(entries.iterdir()) if entries.exists() else ():
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
        info = self.broker.queue_info(queue)
        return info["messages_ready"], info["messages_unacknowledged"]

    def check_ledger(self) -> None:
        for sink in SINKS:
            assert self.counts(f"to-{sink}") == (0, 0), "the source is empty when the stream is idle"
        assert self.in_parquet() == self.ledger["parquet"]
        assert self.in_queue("done") + self.consumed == self.ledger["broker"]


@pytest.fixture
def campaign(tmp_path: Path) -> Iterator[Campaign]:
    often = {"WARREN_VHOST_MAX_RESTARTS": "1000"}  # a vhost that falls is lifted again
    with served(tmp_path / "data", "--http-port", str(free_port()), **often) as broker:
        yield Campaign(broker, tmp_path / "work")


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "data", "--http-port", str(free_port())) as broker:
        yield broker


@pytest.fixture
def machines(tmp_path: Path, scale: Scale) -> Iterator[Cluster | None]:
    """Where executors are processes that can be killed; in a small run there are none."""
    if not scale.full:
        yield None
        return
    with cluster(tmp_path / "cluster") as made:
        yield made


@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("pika_litter")
def test_every_message_arrives_exactly_once_whatever_is_killed(
    campaign: Campaign, machines: Cluster | None, scale: Scale, seed: int, record_property: Any
) -> None:
    chance = random.Random(seed)
    begun = time.monotonic()
    kills: Counter[str] = Counter()
    schedule = list(itertools.product(POINTS, VICTIMS if machines is not None else ("driver", "vhost", "node")))
    chance.shuffle(schedule)
    for sink in SINKS:
        campaign.publish(sink, ROWS // 3)
    for number, (point, victim) in enumerate(schedule[: scale.scale(20)]):
        sinks = SINKS if scale.full else SINKS[number % 2 :][:1]
        if point == RELEASING:
            sinks = ("broker",)  # Parquet has no stages
        for driven in [(sink,) for sink in sinks] if victim == "driver" else [sinks]:
            for sink in driven:
                campaign.publish(sink, ROWS)
            shape = campaign.shape(chance)
            shape["access"] = {sink: ("files", "http")[(number + place) % 2] for place, sink in enumerate(SINKS)}
            if victim == "executor":
                assert machines is not None
                shape["master"] = machines.url
            print(f"seed {seed}, round {number}: {victim} {point}, {driven}, {shape}", flush=True)
            code = campaign.drive(*driven, shape=shape, trap={"point": point, "victim": victim})
            assert code == (-9 if victim == "driver" else 0), campaign.log()
            kills[f"{victim} {point}"] += len(driven)
            print(f"{(time.monotonic() - begun) / 60:.1f} minutes", flush=True)
    assert campaign.drive(*SINKS, shape=campaign.shape(chance)) == 0, campaign.log()
    record_property("kills", sum(kills.values()))
    record_property("messages", sum(sum(ledger.values()) for ledger in campaign.ledger.values()))
    campaign.check_ledger()
    print(f"{sum(kills.values())} kills in {(time.monotonic() - begun) / 60:.1f} minutes: {dict(kills)}", flush=True)


@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("pika_litter")
def test_a_batch_killed_after_half_of_its_tasks_arrives_once_in_another_shape(
    campaign: Campaign, scale: Scale, seed: int
) -> None:
    """Two of its four tasks are done, one after the other; the repetition has seven, or as many as Spark thinks right, on
    three cores. A row's place in the batch is another one then: whoever takes that for its name, loses and doubles rows."""
    chance = random.Random(seed)
    cases = list(itertools.product(SINKS, ("true", "false")))
    for sink, adaptive in cases if scale.full else (chance.choice(cases),):
        campaign.publish(sink, ROWS)
        half = {
            **campaign.shape(chance),
            "master": "local[1, 4]",
            "rows": ROWS,
            "conf": {
                "spark.sql.shuffle.partitions": "4",
                "spark.sql.adaptive.enabled": adaptive,
                "spark.sql.adaptive.coalescePartitions.enabled": "false",
            },
        }
        trap = {"point": HALF_DONE, "victim": "driver", "nth": 3}
        assert campaign.drive(sink, shape=half, trap=trap) == -9, campaign.log()
        assert campaign.counts(f"to-{sink}") == (0, ROWS), "the batch is checked out, and not settled"
        again = {
            **half,
            "master": "local[3, 4]",
            "conf": {
                "spark.sql.shuffle.partitions": "7",
                "spark.sql.adaptive.enabled": "false" if adaptive == "true" else "true",
                "spark.sql.adaptive.advisoryPartitionSizeInBytes": "1k",
            },
        }
        assert campaign.drive(sink, shape=again) == 0, campaign.log()
    campaign.check_ledger()


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
        stages = _Stages(SinkSettings.from_options(options), target, GUEST)
        bodies = [b"%d" % n for n in range(total)]
        rows = pa.RecordBatch.from_pydict({"body": bodies})
        staged = stages.stage("q.0", 0, 1, iter([rows]))
        deciding = threading.Thread(target=stages.decide, args=("q.0", [staged]), daemon=True)
        deciding.start()
        with BrokerClient(options["url"], GUEST) as client:
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
        with BrokerClient(options["url"], GUEST) as client:
            assert client.call("stages/status", vhost="/", writer=target)["pending"] == 0
    record_property("kills", kills)
