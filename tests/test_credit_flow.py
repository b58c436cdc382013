"""Who is not read from, for what, and for how long."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pika
import pytest

import warren
from tests.broker_clients import eventually
from warren.queueing.credit_flow import SETTLING_BYTES, UNCOMMITTED_BYTES, CreditFlow, ReaderFlow, Wait
from warren.testing import running_broker


class FakeReader:
    def __init__(self) -> None:
        self.did: list[str] = []
        self.finds: list[Wait] = []  # what it has to wait for when it catches up
        self.flow = ReaderFlow(self)

    def pause_reading(self) -> None:
        self.did.append("pause")

    def resume_reading(self) -> None:
        self.did.append("resume")

    def catch_up(self) -> None:
        self.did.append("catch up")
        if self.finds:
            self.flow.wait_for(self.finds.pop(0))


@pytest.fixture
def reader() -> FakeReader:
    return FakeReader()


def test_a_reader_is_paused_by_the_first_thing_and_goes_on_with_the_last(reader):
    for wait in (Wait.COMMIT, Wait.RESOURCES, Wait.COMMIT, Wait.CLIENT):
        reader.flow.wait_for(wait)
    assert (reader.did, reader.flow.waits) == (["pause"], ["client", "commit", "resources"])
    for wait in (Wait.RESOURCES, Wait.RESOURCES, Wait.CLIENT, Wait.TRANSACTION):
        reader.flow.done(wait)
    assert reader.did == ["pause"], "an alarm that is cleared does not end the wait for a commit"
    reader.flow.done(Wait.COMMIT)
    assert (reader.did, reader.flow.waiting) == (["pause", "catch up", "resume"], False)


def test_what_was_held_may_have_to_wait_again_and_then_nothing_is_read(reader):
    reader.flow.wait_for(Wait.RESOURCES)
    reader.finds = [Wait.TRANSACTION]
    reader.flow.done(Wait.RESOURCES)
    assert reader.did == ["pause", "catch up"]
    reader.flow.done(Wait.TRANSACTION)
    assert reader.did == ["pause", "catch up", "catch up", "resume"]


def test_who_is_sent_away_is_read_from_and_waits_for_nothing(reader):
    reader.flow.wait_for(Wait.RESOURCES)
    reader.flow.end()
    assert reader.did == ["pause", "resume"], "what it had to say before does not count any more"
    reader.flow.wait_for(Wait.COMMIT)
    reader.flow.done(Wait.RESOURCES)
    assert reader.did == ["pause", "resume"]


class FakeVhost:
    """A store of which the test says how far behind it is."""

    def __init__(self) -> None:
        self.pause = 0.0
        self.buffer = b""
        self.waiting: list[Any] = []
        self.timers: list[tuple[float, Any]] = []
        store: Any = SimpleNamespace(journal=self, overload=lambda: self.pause)
        self.credit = CreditFlow(store, self, lambda seconds, call: self.timers.append((seconds, call)))

    def wait(self, waiter: Any, number: int) -> None:
        self.waiting.append(waiter)

    def commit(self) -> None:
        waiting, self.waiting = self.waiting, []
        self.buffer = b""
        for waiter in waiting:
            waiter.committed(0)


def test_publishers_share_the_credit_and_wait_for_the_commit_that_gives_it_back():
    vhost = FakeVhost()
    first, second, later = FakeReader(), FakeReader(), FakeReader()
    vhost.buffer = bytes(UNCOMMITTED_BYTES)
    vhost.credit.spent(first.flow, published=True)
    assert not first.flow.waiting
    vhost.buffer += b"more"
    for reader in (first, second):
        vhost.credit.spent(reader.flow, published=True)
        assert reader.flow.waits == ["commit"]
    vhost.commit()
    vhost.credit.spent(later.flow, published=True)
    assert [reader.flow.waiting for reader in (first, second, later)] == [False, False, False]


def test_who_only_settles_is_not_stopped_by_what_others_publish_but_has_a_limit_too(reader):
    vhost = FakeVhost()
    vhost.buffer = bytes(SETTLING_BYTES)
    vhost.pause = 0.01
    vhost.credit.spent(reader.flow, published=False)
    assert not reader.flow.waiting
    vhost.buffer += b"more"
    vhost.credit.spent(reader.flow, published=False)
    assert reader.flow.waits == ["commit"]


def test_checkpoints_that_are_behind_slow_publishers_down_for_as_long_as_the_store_says(reader):
    vhost = FakeVhost()
    vhost.pause = 0.025
    vhost.credit.spent(reader.flow, published=True)
    [(seconds, go_on)] = vhost.timers
    assert (seconds, reader.flow.waits) == (0.025, ["checkpoint"])
    go_on()
    assert reader.did == ["pause", "catch up", "resume"]


def test_an_alarm_that_is_cleared_while_a_commit_is_awaited_does_not_let_the_publisher_on():
    """Over a real socket: a reader that went on for the wrong reason would fill the memory."""
    with running_broker() as broker:
        vhost = broker.broker.vhosts["/"]
        connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        channel = connection.channel()
        channel.queue_declare("q")

        def look() -> Any:
            [one] = vhost.connections
            return one

        served = broker.call(look)
        broker.call(lambda: (vhost.set_alarm("memory", True), served.flow.wait_for(Wait.COMMIT)))
        channel.basic_publish("", "q", b"held")
        broker.call(lambda: vhost.set_alarm("memory", False))
        assert broker.call(lambda: served.flow.waits) == ["commit"]
        assert broker.queue_info("q")["messages_ready"] == 0
        broker.call(lambda: served.flow.committed(0))
        eventually(lambda: broker.queue_info("q")["messages_ready"] == 1)
        connection.close()


def test_nothing_but_the_credit_flow_pauses_a_reader():
    """`pause_reading` of a transport is called by the reader alone, and the reader's by `ReaderFlow`."""
    calls = set()
    for path in Path(warren.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("pause_reading", "resume_reading"):
                calls.add((path.name, ast.unparse(node.value)))
    ours = {call for call in calls if call[0] not in ("tls_relay.py",)}
    assert ours == {("credit_flow.py", "self._reader"), ("connection.py", "self._transport")}
