"""Stages beyond the way that they usually go: rows for nobody, no room, nobody who decides, and an answer that is lost. And
leases whose messages come back to queues with limits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pika
import pyarrow as pa
import pytest

from tests.test_pipeline_api import Client, drain, publish, ready, stage
from warren.pipeline import broker_client
from warren.pipeline.broker_client import Credentials
from warren.pipeline.errors import BrokerError, PipelineError
from warren.pipeline.sink import SinkSettings, WarrenBatchWriter, _Stages
from warren.testing import RunningBroker, running_broker
from warren.vhost import stages

PATIENCE = 240.0


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def running() -> Iterator[RunningBroker]:
    with running_broker(http=True) as broker:
        yield broker


@pytest.fixture
def ask(running: RunningBroker) -> Client:
    return Client(running.http_url)


@pytest.fixture
def root(running: RunningBroker) -> str:
    return root_of(running)


def root_of(broker: RunningBroker) -> str:
    return str(broker.broker.vhosts["/"].store.root)


@contextlib.contextmanager
def channel_of(broker: RunningBroker) -> Iterator[Any]:
    with contextlib.closing(pika.BlockingConnection(pika.URLParameters(broker.url))) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare("orders", durable=True)
        yield channel


@pytest.fixture
def channel(running: RunningBroker) -> Iterator[Any]:
    with channel_of(running) as channel:
        yield channel


def files_in(root: str) -> list[str]:
    return [name for _, _, names in os.walk(os.path.join(root, "stages")) for name in names]


# ---- rows for nobody ----


def test_rows_that_no_queue_takes_are_counted_and_logged_with_where_they_were_sent(channel, ask, root, caplog):
    rows = [("amq.topic", "nobody", b"%d" % n) for n in range(3)]
    names = [stage(root, [("", "orders", b"here"), *rows]), stage(root, [("", "no-queue", b"3")], partition=1)]
    done = ask("stages/decide", vhost="/", writer="w", batch="0", stages=names)
    assert (done["count"], done["unroutable"]) == (5, 4)
    assert ask("stages/status", vhost="/", writer="w") == {"decided": "0", "pending": 0, "unroutable": 4}
    assert drain(channel) == [b"here"]
    (said,) = [record.getMessage() for record in caplog.records if "no queue takes them" in record.getMessage()]
    assert "4 rows of batch 0" in said
    assert "exchange 'amq.topic' with routing key 'nobody'" in said
    again = ask("stages/decide", vhost="/", writer="w", batch="0", stages=[])
    assert (again["duplicate"], again["unroutable"]) == (True, 4), "an answer that was lost is given again"
    name = stage(root, [("", "orders", b"1")], batch="1")
    assert ask("stages/decide", vhost="/", writer="w", batch="1", stages=[name])["unroutable"] == 0


def test_with_mandatory_a_batch_goes_to_queues_with_all_its_rows_or_not_at_all(running, channel, root):
    settings = SinkSettings.from_options({"url": running.http_url, "exchange": "amq.topic", "mandatory": "true"})
    driver = _Stages(settings, "w", Credentials("guest", "guest"))
    keys = ["eu.paid", "us.paid", "us.paid"]
    rows = pa.RecordBatch.from_pydict({"body": [b"1", b"2", b"3"], "routing_key": keys})
    channel.queue_bind("orders", "amq.topic", "eu.#")
    with pytest.raises(BrokerError, match=r"no queue takes 2 rows, .* exchange 'amq.topic' with routing key 'us.paid'"):
        driver.decide("q.0", [driver.stage("q.0", 0, 1, iter([rows]))])
    assert (drain(channel), files_in(root)) == ([], [])
    channel.queue_bind("orders", "amq.topic", "us.#")
    driver.decide("q.0", [driver.stage("q.0", 0, 2, iter([rows]))])
    assert sorted(drain(channel)) == [b"1", b"2", b"3"]


def test_rows_are_spread_by_a_property_of_theirs(running, channel):
    channel.exchange_declare("hash", "x-consistent-hash", arguments={"hash-property": "message_id"})
    shards = ["shard-0", "shard-1"]
    for name in shards:
        channel.queue_declare(name)
        channel.queue_bind(name, "hash", "1")
    settings = SinkSettings.from_options({"url": running.http_url, "exchange": "hash", "routingKey": "k"})
    driver = _Stages(settings, "w", Credentials("guest", "guest"))
    rows = pa.RecordBatch.from_pydict({"body": [b"m"] * 100, "message_id": [f"message {n}" for n in range(100)]})
    driver.decide("q.0", [driver.stage("q.0", 0, 1, iter([rows]))])
    found = [len(drain(channel, name)) for name in shards]
    assert sum(found) == 100
    assert min(found) > 10


def test_the_driver_says_how_many_rows_went_nowhere(running, channel, caplog):
    driver = _Stages(
        SinkSettings.from_options({"url": running.http_url, "routingKey": "no-queue"}),
        "w",
        Credentials("guest", "guest"),
    )
    driver.decide("q.0", [driver.stage("q.0", 0, 1, iter([pa.RecordBatch.from_pydict({"body": [b"1", b"2"]})]))])
    (said,) = [record.getMessage() for record in caplog.records if record.name == "warren.pipeline"]
    assert said.startswith("2 of 2 rows of batch q.0 were dropped")


def test_a_batch_whose_stages_are_dropped_while_it_is_decided_is_not_decided(running, channel, ask, root, monkeypatch):
    """A driver that gave up says so while its decision is still under way. Once decided, the repetition of the batch would be
    taken for what it is, and its rows be in no queue."""
    name = stage(root, [("", "orders", b"1")], batch="q.0")
    deciding = running.broker.vhosts["/"].data_requests.stages
    real = deciding._check_routes

    async def slowly(paths: list[str]) -> None:
        await real(paths)
        assert await asyncio.to_thread(ask, "stages/drop", vhost="/", writer="w", stages=[name]) == {"dropped": 1}

    monkeypatch.setattr(deciding, "_check_routes", slowly)
    said = {"vhost": "/", "writer": "w", "batch": "q.0"}
    status, answer = ask.ask("stages/decide", **said, stages=[name], mandatory=True)
    assert (status, answer["error"]) == (409, "data_loss")
    again = stage(root, [("", "orders", b"1")], batch="q.0")
    assert ask("stages/decide", **said, stages=[again])["duplicate"] is False
    assert drain(channel) == [b"1"]


# ---- no room ----


def test_a_stop_between_a_decision_and_its_commit_keeps_the_stages(running, channel, ask, root, monkeypatch):
    """Who had decided went on when the release had been stopped: it began anew, found that it should stop, and took what was
    not published yet for litter."""
    vhost = running.broker.vhosts["/"]
    channel.queue_declare("narrow", durable=True, arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    name = stage(root, [("", "narrow", b"%d" % number) for number in range(3)])
    loop = vhost._loop
    committed = asyncio.run_coroutine_threadsafe(_event(), loop).result(PATIENCE)
    real = type(vhost.commits).safe

    async def late(commits: Any) -> None:
        await real(commits)
        await committed.wait()

    monkeypatch.setattr(type(vhost.commits), "safe", late)
    answers: list[Any] = []
    deciding = threading.Thread(
        target=lambda: answers.append(ask("stages/decide", vhost="/", writer="w", batch="0", stages=[name]))
    )
    deciding.start()
    eventually(lambda: ask("stages/status", vhost="/", writer="w")["pending"])
    asyncio.run_coroutine_threadsafe(vhost.data_requests.stages.stop(), loop).result(PATIENCE)
    loop.call_soon_threadsafe(committed.set)
    deciding.join(PATIENCE)
    assert answers[0]["released"] is False
    assert len(files_in(root)) == 1


async def _event() -> asyncio.Event:
    return asyncio.Event()


def test_a_batch_that_is_larger_than_the_place_for_stages_is_refused_with_the_remedy():
    with running_broker(http=True, staged_limit=20_000) as broker, channel_of(broker) as channel:
        driver = _Stages(
            SinkSettings.from_options({"url": broker.http_url, "routingKey": "orders", "maxStageBytes": "4000"}),
            "w",
            Credentials("guest", "guest"),
        )
        with pytest.raises(BrokerError, match=r"more than the 20000 bytes .*maxOffsetsPerTrigger.* staged_limit"):
            driver.stage("q.0", 0, 1, iter([pa.RecordBatch.from_pydict({"body": [b"x" * 3000] * 2})] * 10))
        assert 0 < len(files_in(root_of(broker))) < 10
        driver.decide("q.1", [driver.stage("q.1", 0, 1, iter([pa.RecordBatch.from_pydict({"body": [b"1"]})]))])
        assert drain(channel) == [b"1"]
        assert files_in(root_of(broker)) == [], "what the refused batch had staged is gone with the next decision"


def test_a_sink_waits_while_others_have_filled_the_place_for_stages():
    with running_broker(http=True, staged_limit=20_000) as broker, channel_of(broker) as channel:
        ask = Client(broker.http_url)
        narrow = {"x-max-length": 1, "x-overflow": "reject-publish"}
        channel.queue_declare("narrow", durable=True, arguments=narrow)
        publish(channel, 1, "narrow")
        other = stage(root_of(broker), [("", "narrow", b"x" * 9000), ("", "narrow", b"y" * 9000)], writer="guest:other")
        blocked = threading.Thread(
            target=lambda: ask("stages/decide", vhost="/", writer="other", batch="0", stages=[other])
        )
        blocked.start()
        driver = _Stages(
            SinkSettings.from_options({"url": broker.http_url, "routingKey": "orders"}),
            "w",
            Credentials("guest", "guest"),
        )
        staged: list[Any] = []
        rows = pa.RecordBatch.from_pydict({"body": [b"z" * 5000]})
        waiting = threading.Thread(target=lambda: staged.append(driver.stage("q.0", 0, 1, iter([rows]))))
        waiting.start()
        eventually(lambda: ask("stages/status", vhost="/", writer="other")["pending"])
        ticket, data_url = driver.ticket()
        where = {"vhost": "/", "writer": "w", "batch": "q.0", "partition": 0, "attempt": 2}
        encoded = [pa.RecordBatch.from_pydict({"head": [b""], "body": [b"z" * 5000]})]
        impatient = broker_client.BrokerClient(broker.http_url)
        with pytest.raises(
            BrokerError, match=r"have staged \d+ of 20000 bytes .*batches wait for queues that are full"
        ):
            impatient.upload(data_url, "/stages", ticket, encoded, where, busy_seconds=0.0)
        assert not staged
        eventually(lambda: drain(channel, "narrow") is not None and staged)
        waiting.join()
        blocked.join()
        driver.decide("q.0", staged)
        assert drain(channel) == [b"z" * 5000]


# ---- nobody who decides ----


def test_stages_that_nobody_decides_about_are_dropped_while_the_vhost_runs(monkeypatch):
    monkeypatch.setattr(stages, "_SWEEP_SECONDS", 0.02)
    with running_broker(http=True) as broker:
        root = root_of(broker)
        young = stage(root, [("", "orders", b"1")])
        old = [stage(root, [("", "orders", b"2")]), stage(root, [("", "orders", b"3")], writer="guest:gone")]
        for name in old:
            two_days_ago = time.time() - 2 * 86_400
            os.utime(os.path.join(root, "stages", name), (two_days_ago, two_days_ago))
        eventually(lambda: files_in(root) == [os.path.basename(young)])
        eventually(lambda: len(os.listdir(os.path.join(root, "stages"))) == 1)


# ---- an answer that is lost ----


def test_a_decision_without_an_answer_is_not_called_a_failure_and_not_hidden_by_the_abort(
    running, channel, ask, root, monkeypatch, tmp_path
):
    from pyspark.sql.types import BinaryType, StructField, StructType

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    options = {"url": running.http_url, "routingKey": "orders", "user": "guest", "password": "guest"}
    writer = WarrenBatchWriter(options, StructType([StructField("body", BinaryType())]))
    staged = writer._stages.stage("0", 0, 1, iter([pa.RecordBatch.from_pydict({"body": [b"1"]})]))
    call = broker_client.BrokerClient.call

    def lost(self: Any, name: str, **arguments: Any) -> Any:
        answer = call(self, name, **arguments)
        if name == "stages/decide":
            raise broker_client.BrokerDownError("no broker answers")
        return answer

    monkeypatch.setattr(broker_client.BrokerClient, "call", lost)
    with pytest.raises(PipelineError, match="it is not known whether the rows were published") as caught:
        writer.commit([staged])
    assert "write again only then" in str(caught.value)
    writer.abort([staged])
    assert list(tmp_path.glob("warren-token-*")) == []
    assert ask("stages/status", vhost="/", writer=writer._stages.writer)["decided"] == "0"
    assert drain(channel) == [b"1"], "it was decided, and the abort took nothing back"
    writer.abort([staged])  # the token is gone: a line in the log, and not an error over Spark's own


# ---- messages of a lease that come back ----


def open_lease(ask: Client, queue: str) -> int:
    """The epoch."""
    epoch: int = ask("leases/open", vhost="/", lease="etl", owner="q", queues=[queue])["epoch"]
    return epoch


def check_out(ask: Client, epoch: int) -> None:
    """All that is ready."""
    assert ask("leases/next", vhost="/", lease="etl", epoch=epoch, start=0)["rows"]


def test_what_a_lease_gives_back_counts_for_the_length_of_the_queue(channel, ask):
    limits = {"x-max-length": 5, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "orders"}
    channel.queue_declare("short", durable=True, arguments=limits)
    publish(channel, 5, "short")
    check_out(ask, open_lease(ask, "short"))
    publish(channel, 5, "short", first=5)
    assert ask("leases/requeue", vhost="/", lease="etl")["requeued"] == 5
    eventually(lambda: ready(channel, "orders") == 5)
    assert drain(channel, "short") == [b"%d" % n for n in range(5, 10)], (
        "the head is dropped, as when a consumer requeues"
    )
    assert drain(channel) == [b"%d" % n for n in range(5)]


@pytest.mark.parametrize("restart", [True, False])
def test_what_a_lease_gives_back_expires_also_after_a_restart(tmp_path: Path, restart: bool):
    def declare(channel: Any) -> None:
        limits = {"x-message-ttl": 3000, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "orders"}
        channel.queue_declare("short-lived", durable=True, arguments=limits)

    with contextlib.ExitStack() as first:
        broker = first.enter_context(running_broker(str(tmp_path), http=True))
        channel = first.enter_context(channel_of(broker))
        declare(channel)
        ask = Client(broker.http_url)
        epoch = open_lease(ask, "short-lived")  # first: it takes a while, and what is published lives for 3 seconds
        publish(channel, 3, "short-lived")
        check_out(ask, epoch)
        if restart:
            first.pop_all().close()
            broker = first.enter_context(running_broker(str(tmp_path), http=True))
            channel = first.enter_context(channel_of(broker))
        time.sleep(3.05)  # what is checked out does not expire, however long
        assert broker.queue_info("short-lived")["messages_unacknowledged"] == 3
        assert Client(broker.http_url)("leases/requeue", vhost="/", lease="etl")["requeued"] == 3
        eventually(lambda: ready(channel, "orders") == 3)
        assert broker.queue_info("short-lived")["messages"] == 0
