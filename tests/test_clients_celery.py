"""The broker with Celery: real worker processes, results through the broker, and the events and commands between workers.

The worker's pool is `solo`: one task at a time, in the worker's own process, so that to kill it is to kill the task.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import celery.result
import kombu.pools
import pytest
from celery import chain, chord, group

from tests.broker_clients import eventually
from tests.celery_tasks import make_app
from warren.testing import running_broker

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 60  # a worker takes seconds to start on a busy machine


class Site:
    """A broker, an application for the test, and workers."""

    def __init__(self, broker, notes: Path, backend: str = "rpc://", *, quorum: bool = False) -> None:
        self.broker = broker
        self.notes = notes
        self.backend = backend
        self.quorum = quorum
        self.app = make_app(broker.url, backend, notes, quorum=quorum)

    def send(self, name: str, *arguments: object, **options: object) -> celery.result.AsyncResult:
        return self.app.send_task(name, arguments, **options)

    def call(self, name: str, *arguments: object, **options: object) -> object:
        return self.send(name, *arguments, **options).get(timeout=SECONDS)

    @contextlib.contextmanager
    def worker(self, name: str) -> Iterator[subprocess.Popen[bytes]]:
        environment = os.environ | {
            "WARREN_TEST_CELERY_URL": self.broker.url,
            "WARREN_TEST_CELERY_BACKEND": self.backend,
            "WARREN_TEST_CELERY_NOTES": str(self.notes),
            "WARREN_TEST_CELERY_QUORUM": "1" if self.quorum else "",
        }
        log = (self.notes / f"{name}.log").open("wb")
        command = [
            "-m",
            "celery",
            "-A",
            "tests.celery_tasks",
            "worker",
            "-P",
            "solo",
            "-l",
            "INFO",
            "-n",
            f"{name}@test",
            *(["-E"] if self.quorum else []),
        ]
        with (
            log,
            subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment, stdout=log, stderr=log) as process,
        ):
            try:
                eventually(lambda: self.is_ready(name) or process.poll() is not None, SECONDS)
                assert process.poll() is None, self.log(name)
                yield process
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                    try:
                        process.wait(SECONDS)
                    except subprocess.TimeoutExpired:
                        process.kill()

    def log(self, name: str) -> str:
        return (self.notes / f"{name}.log").read_text()

    def is_ready(self, name: str) -> bool:
        return f"{name}@test ready." in self.log(name)

    def records(self) -> list[str]:
        path = self.notes / "records"
        return path.read_text().splitlines() if path.exists() else []

    def close(self) -> None:
        if self.backend == "rpc://":
            self.app.backend.result_consumer.stop()
        self.app.pool.force_close_all()
        self.app.close()


@pytest.fixture(scope="module")
def site(broker, tmp_path_factory):
    """With one worker, for all the tests that leave it alive."""
    site = Site(broker, tmp_path_factory.mktemp("celery"))
    with site.worker("first"):
        yield site
    site.close()
    log = site.log("first")
    assert log.count("Traceback") == log.count("ValueError: as asked"), log
    assert "onnection to broker lost" not in log


def test_a_task_returns_its_result(site):
    assert site.call("add", 2, 3) == 5


def test_many_tasks_return_theirs(site):
    results = [site.send("add", number, number) for number in range(50)]
    assert [result.get(timeout=SECONDS) for result in results] == [2 * number for number in range(50)]


def test_a_task_that_raises_raises_where_its_result_is_asked_for(site):
    with pytest.raises(ValueError, match="as asked"):
        site.call("fail")


def test_a_task_tries_again_until_it_is_done(site):
    assert site.call("third_time_lucky") == 2


def test_a_countdown_and_an_eta_are_waited_for(site):
    sent = time.time()
    later = site.send("when", countdown=0.7)
    at = site.send("when", eta=datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=0.5))
    assert at.get(timeout=SECONDS) - sent >= 0.5
    assert later.get(timeout=SECONDS) - sent >= 0.7


def test_tasks_that_wait_for_their_time_do_not_keep_others_from_running(site):
    """Each of them raises the prefetch of the worker's channel by one, which is told to the broker with basic.qos."""
    waiting = [site.send("when", countdown=5) for _ in range(10)]
    at_once = site.call("when")
    assert all(result.get(timeout=SECONDS) > at_once for result in waiting)


def test_an_expired_task_is_not_run(site):
    site.send("record", "too late", expires=datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=5))
    site.call("record", "in time")
    assert site.records()[-1] == "in time"
    assert "too late" not in site.records()


def test_a_chain_and_a_group_bring_their_results_together(site):
    app = site.app
    added = chain(app.signature("add", (1, 2)), app.signature("add", (10,)), app.signature("add", (100,)))
    assert added.apply_async().get(timeout=SECONDS) == 113
    grouped = group(app.signature("add", (number, 1)) for number in range(5))
    assert grouped.apply_async().get(timeout=SECONDS) == [1, 2, 3, 4, 5]


def test_a_large_argument_and_a_large_result_pass(site):
    data = "x" * 2_000_000
    assert site.call("echo", data) == data


def test_the_worker_answers_ping_and_inspection(site):
    control = site.app.control
    assert control.broadcast("ping", reply=True, limit=1, timeout=SECONDS) == [{"first@test": {"ok": "pong"}}]
    inspect = control.inspect(limit=1, timeout=SECONDS)
    assert set(inspect.registered()["first@test"]) >= {"add", "record"}
    [queue] = inspect.active_queues()["first@test"]
    assert (queue["name"], queue["durable"], queue["max_priority"]) == ("celery", True, None)
    assert inspect.stats()["first@test"]["pool"]["implementation"].endswith("solo:TaskPool")


def test_a_task_can_be_revoked_before_its_time(site):
    result = site.send("record", "revoked", countdown=1)
    site.app.control.revoke(result.id, reply=True, limit=1, timeout=SECONDS)
    site.call("record", "after it", countdown=1.2)
    assert site.records()[-1] == "after it"
    assert "revoked" not in site.records()


def test_a_second_worker_finds_the_first_and_shares_the_work(site):
    """mingle and gossip: queues of their own, that are gone with the worker."""
    with site.worker("second"):
        assert "mingle: sync with 1 nodes" in site.log("second")
        pinged = eventually(lambda: found if len(found := site.app.control.ping(timeout=1)) == 2 else None)
        assert {next(iter(answer)) for answer in pinged} == {"first@test", "second@test"}
        results = [site.send("add", number, 1) for number in range(20)]
        assert [result.get(timeout=SECONDS) for result in results] == list(range(1, 21))
    names = site.broker.queue_names()
    assert "second@test.celery.pidbox" not in names


def test_results_do_not_pile_up_in_the_broker(site):
    """rpc:// has one queue for results, and they were all taken."""
    site.call("add", 1, 1)

    def left() -> dict[str, int]:
        names = [name for name in site.broker.queue_names() if "celeryev" not in name]
        counts = {name: site.broker.queue_info(name)["messages"] for name in names}
        return {name: count for name, count in counts.items() if count}

    eventually(lambda: not left())  # a late ack follows its result


# ---- workers that come later, and workers that die; results in files, because a chord cannot count with rpc:// ----


@pytest.fixture
def idle_site(tmp_path):
    """Without a worker."""
    with running_broker() as broker:
        (tmp_path / "results").mkdir()
        site = Site(broker, tmp_path, f"file://{tmp_path}/results")
        yield site
        site.close()


def test_waiting_tasks_are_done_by_priority_and_a_chord_comes_to_its_end(idle_site):
    site = idle_site
    for number, priority in enumerate((0, 9, 5, 9, 1)):
        site.send("record", f"{priority}:{number}", priority=priority)
    with site.worker("late"):
        eventually(lambda: len(site.records()) == 5, SECONDS)
        assert site.records() == ["9:1", "9:3", "5:2", "1:4", "0:0"]
        signatures = [site.app.signature("add", (number, number)) for number in range(6)]
        assert chord(signatures)(site.app.signature("total")).get(timeout=SECONDS) == 30


def test_a_task_of_a_worker_that_was_killed_is_done_by_the_next(idle_site):
    site = idle_site
    result = site.send("hang_once")
    with site.worker("one") as worker:
        eventually(lambda: (site.notes / "hung").exists(), SECONDS)
        worker.kill()
        worker.wait()
    eventually(lambda: site.broker.queue_info("celery")["messages_ready"] == 1)
    with site.worker("two"):
        assert result.get(timeout=SECONDS) == "done"
    first, second = (site.notes / "hung").read_text().split()
    assert first != second
    assert site.broker.queue_info("celery")["messages"] == 0


def test_a_worker_goes_on_after_a_restart_of_the_broker(tmp_path):
    data = str(tmp_path / "data")
    (tmp_path / "results").mkdir()
    backend = f"file://{tmp_path}/results"
    with contextlib.ExitStack() as stack:
        with running_broker(data) as broker:
            port = broker.port
            site = Site(broker, tmp_path, backend)
            stack.enter_context(site.worker("steady"))
            assert site.call("add", 1, 2) == 3
            site.close()
            kombu.pools.reset()  # by their URL, which the next one has too
        with running_broker(data, amqp_port=port) as broker:
            again = Site(broker, tmp_path, backend)
            assert again.call("add", 3, 4) == 7
            stack.close()
            again.close()


# ---- quorum queues, as Celery finds them since 5.5, and the queues and events that older ones use, too ----


@pytest.fixture(scope="module")
def quorum_site(tmp_path_factory):
    """On a broker of its own: the other tests have a classic queue of the same name."""
    with running_broker() as own:
        site = Site(own, tmp_path_factory.mktemp("quorum"), quorum=True)
        with site.worker("quorum"):
            yield site
        site.close()


def test_a_worker_takes_a_quorum_queue_for_one_and_its_prefetch_is_that_of_consumers(quorum_site):
    assert "Global QoS is disabled" in quorum_site.log("quorum")
    assert quorum_site.call("add", 1, 2) == 3
    info = quorum_site.broker.queue_info("celery")
    assert (info["durable"], info["arguments"]["x-queue-type"]) == (True, "quorum")


def test_a_countdown_is_waited_for_in_the_broker_by_queues_that_expire_into_each_other(quorum_site):
    """Native delayed delivery: 28 queues, each with a time to live of a power of two, bound by bits of the routing key."""
    names = quorum_site.broker.queue_names()
    assert {f"celery_delayed_{level}" for level in range(28)} <= set(names)
    sent = time.time()
    assert quorum_site.call("when", countdown=1) - sent >= 1
    assert quorum_site.broker.queue_info("celery_delayed_0")["published"] == 1


def test_a_transient_queue_that_is_not_exclusive_brings_tasks_too(quorum_site):
    info = quorum_site.broker.queue_info("transient")
    assert (info["durable"], info["exclusive"], info["consumers"]) == (False, False, 1)
    assert quorum_site.call("add", 4, 5, queue="transient") == 9


def test_a_broadcast_comes_to_the_worker_by_a_queue_of_its_own(quorum_site):
    quorum_site.app.send_task("record", ("to all",), queue="everybody", ignore_result=True)
    eventually(lambda: "to all" in quorum_site.records(), SECONDS)


def test_events_of_tasks_and_workers_are_received(quorum_site):
    app = quorum_site.app
    seen: set[str] = set()

    def note(event: dict[str, object]) -> None:
        if not seen:  # the receiver asks workers for a heartbeat when it listens
            quorum_site.send("add", 1, 1)
        seen.add(str(event["type"]))
        receiver.should_stop = "task-succeeded" in seen

    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, handlers={"*": note})
        receiver.capture(limit=None, timeout=SECONDS)
    assert {"task-sent", "task-received", "task-started", "task-succeeded"} <= seen
