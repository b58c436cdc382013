"""x-delayed-message: messages wait on disk, in order of their time, and survive restarts."""

from __future__ import annotations

import time
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import lmdb
import pika
import pika.exceptions
import pytest

from tests.broker_clients import eventually
from tests.test_broker_queue_restart import Broken
from warren.queueing import delayed
from warren.testing import running_broker


def declare(channel) -> None:
    channel.exchange_declare("later", "x-delayed-message", durable=True, arguments={"x-delayed-type": "direct"})
    channel.queue_declare("q", durable=True)
    channel.queue_bind("q", "later", "k")
    channel.confirm_delivery()


def publish(channel, body: bytes, delay: object) -> None:
    channel.basic_publish("later", "k", body, pika.BasicProperties(delivery_mode=2, headers={"x-delay": delay}))


def wait_for(channel, count: int) -> list[tuple[bytes, Any, float]]:
    found = []
    for method, properties, body in channel.consume("q", auto_ack=True, inactivity_timeout=20):
        assert method is not None, found
        found.append((body, properties.headers["x-delay"], time.time()))
        if len(found) == count:
            channel.cancel()
            return found
    raise AssertionError(found)


@pytest.fixture
def channel():
    with running_broker() as broker:
        connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        yield connection.channel()
        connection.close()


def test_messages_come_when_they_are_due_and_not_in_the_order_they_were_sent(channel):
    declare(channel)
    began = time.time()
    for body, delay in ((b"third", 600), (b"first", 200), (b"second", 400)):
        publish(channel, body, delay)
    assert channel.queue_declare("q", passive=True).method.message_count == 0
    found = wait_for(channel, 3)
    assert [(body, delay) for body, delay, _ in found] == [(b"first", -200), (b"second", -400), (b"third", -600)]
    assert found[0][2] - began >= 0.2
    assert found[2][2] - began >= 0.6


def test_a_message_without_a_delay_goes_at_once(channel):
    declare(channel)
    channel.basic_publish("later", "k", b"now", mandatory=True)
    assert channel.basic_get("q")[2] == b"now"


def test_what_waits_survives_a_restart(tmp_path):
    with running_broker(str(tmp_path)) as broker:
        connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        channel = connection.channel()
        declare(channel)
        publish(channel, b"late", 1500)
        publish(channel, b"soon", 100)
        assert wait_for(channel, 1)[0][0] == b"soon"
        connection.close()
    with running_broker(str(tmp_path)) as broker:
        connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        channel = connection.channel()
        assert wait_for(channel, 1)[0][:2] == (b"late", -1500)
        assert broker.call(lambda: len(broker.broker.vhosts["/"].delayed["later"])) == 0
        connection.close()


def test_an_exchange_takes_what_waits_for_it_with_it(channel):
    declare(channel)
    publish(channel, b"never", 300)
    channel.exchange_delete("later")
    declare(channel)
    publish(channel, b"other", 500)
    assert [body for body, _, _ in wait_for(channel, 1)] == [b"other"]


def test_a_message_waits_before_a_delayed_exchange_that_it_comes_to_by_a_binding(channel):
    declare(channel)
    channel.exchange_declare("front", "fanout")
    channel.queue_declare("at-once")
    channel.queue_bind("at-once", "front")
    channel.exchange_bind("later", "front")
    began = time.time()
    channel.basic_publish("front", "k", b"m", pika.BasicProperties(delivery_mode=2, headers={"x-delay": 300}))
    assert channel.basic_get("at-once", auto_ack=True)[2] == b"m"
    assert channel.queue_declare("q", passive=True).method.message_count == 0
    [(body, delay, came)] = wait_for(channel, 1)
    assert (body, delay) == (b"m", -300)
    assert came - began >= 0.3


def test_a_dead_letter_waits_before_a_delayed_exchange_and_goes_to_the_keys_of_cc_and_bcc(channel):
    declare(channel)
    channel.queue_declare("carbon", durable=True)
    channel.queue_bind("carbon", "later", "c")
    channel.queue_declare("blind", durable=True)
    channel.queue_bind("blind", "later", "b")
    channel.queue_declare("dies", arguments={"x-dead-letter-exchange": "later", "x-message-ttl": 0})
    began = time.time()
    headers = {"x-delay": 300, "CC": ["c"], "BCC": ["b"]}
    channel.queue_bind("dies", "amq.direct", "k")
    channel.basic_publish("amq.direct", "k", b"m", pika.BasicProperties(delivery_mode=2, headers=headers))
    [(body, delay, came)] = wait_for(channel, 1)
    assert (body, delay) == (b"m", -300)
    assert came - began >= 0.3
    for queue in ("carbon", "blind"):
        assert channel.basic_get(queue, auto_ack=True)[2] == b"m"


@pytest.mark.parametrize("operation", ["publish", "drop", "ackfold"])
def test_a_failure_among_the_messages_that_wait_costs_none_of_them(operation):
    """They begin anew from what is on disk, as every queue does."""
    with running_broker() as broker:
        connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        channel = connection.channel()
        declare(channel)
        publish(channel, b"before", 300)

        def plant() -> None:
            delayed = broker.broker.vhosts["/"].delayed["later"]
            delayed.stored.backing = Broken(delayed.stored.backing, operation)

        broker.call(plant)
        if operation == "ackfold":
            publish(channel, b"then", 600)
        else:
            with pytest.raises(pika.exceptions.NackError):
                publish(channel, b"refused", 3_600_000)
            publish(channel, b"then", 600)
        assert [body for body, _, _ in wait_for(channel, 2)] == [b"before", b"then"]
        connection.close()


def fail(monkeypatch, **operations: int) -> dict[str, int]:
    """So many times the operations of the table of times find the disk full; what is left of that."""
    left = dict(operations)
    for name in operations:
        real = getattr(delayed.TimeTable, name)

        def planted(self, *arguments, name=name, real=real):
            if left[name]:
                left[name] -= 1
                raise lmdb.DiskError("No space left on device")
            return real(self, *arguments)

        monkeypatch.setattr(delayed.TimeTable, name, planted)
    monkeypatch.setattr(delayed, "_RETRY_SECONDS", 0.02)
    return left


def break_table(monkeypatch, then: Callable[[], None]) -> None:
    """The first time that something is due, the table breaks, and `then` is called."""
    broken: list[bool] = []
    real = delayed.TimeTable.remove_many

    def remove_many(self, rows):
        if not broken:
            broken.append(True)
            then()
            raise lmdb.PanicError("Update of meta page failed")
        real(self, rows)

    monkeypatch.setattr(delayed.TimeTable, "remove_many", remove_many)


@pytest.mark.parametrize("operations", [{"remove_many": 3}, {"put_many": 3}, {"remove_many": 2, "put_many": 2}])
def test_what_waits_comes_once_when_a_full_disk_has_room_again(monkeypatch, operations):
    with running_broker() as broker:
        connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        channel = connection.channel()
        declare(channel)
        publish(channel, b"1", 200)
        waiting = broker.call(lambda: broker.broker.vhosts["/"].delayed["later"])
        hidden = waiting.stored
        left = fail(monkeypatch, **operations)
        publish(channel, b"2", 300)
        publish(channel, b"3", 100)
        assert sorted(body for body, _, _ in wait_for(channel, 3)) == [b"1", b"2", b"3"]
        assert not any(left.values())
        publish(channel, b"4", 1)
        assert [body for body, _, _ in wait_for(channel, 1)] == [b"4"]
        assert waiting.stored is hidden, "a full disk is no reason to restart the queue"
        eventually(lambda: broker.call(lambda: (len(waiting), hidden.backing.depth())) == (0, 0))
        connection.close()


@pytest.mark.parametrize("full", [{"__init__": 3}, {"put_many": 2}])
def test_a_table_of_times_that_broke_on_a_full_disk_is_made_anew_when_there_is_room(monkeypatch, full):
    with running_broker() as broker:
        connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        channel = connection.channel()
        declare(channel)
        for body in (b"first", b"second", b"third"):
            publish(channel, body, 500)
        waiting = broker.call(lambda: broker.broker.vhosts["/"].delayed["later"])
        left = fail(monkeypatch, **dict.fromkeys(full, 0))
        break_table(monkeypatch, lambda: left.update(full))
        publish(channel, b"fourth", 500)
        assert [body for body, _, _ in wait_for(channel, 4)] == [b"first", b"second", b"third", b"fourth"]
        assert not any(left.values())
        publish(channel, b"then", 1)
        assert [body for body, _, _ in wait_for(channel, 1)] == [b"then"]
        eventually(lambda: broker.call(lambda: (len(waiting), waiting.stored.backing.depth())) == (0, 0))
        connection.close()


def test_an_exchange_that_cannot_keep_times_yet_refuses_messages_and_loses_none_that_wait(monkeypatch):
    with running_broker() as broker:
        connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        channel = connection.channel()
        declare(channel)
        left = fail(monkeypatch, __init__=0)
        break_table(monkeypatch, lambda: left.update(__init__=1_000_000))
        publish(channel, b"before", 100)
        waiting = broker.call(lambda: broker.broker.vhosts["/"].delayed["later"])
        eventually(lambda: broker.call(lambda: waiting._table is None))
        with pytest.raises(pika.exceptions.NackError):
            publish(channel, b"refused", 100)
        assert broker.call(lambda: len(waiting)) == 1
        left["__init__"] = 0
        assert [body for body, _, _ in wait_for(channel, 1)] == [b"before"]
        connection.close()


def test_a_table_of_times_goes_on_after_a_real_disk_was_full(small_disk):
    """LMDB says DiskError, or an input/output error where half a page found room."""
    table = delayed.TimeTable(str(small_disk / "times"))
    rows: list[tuple[int, int]] = []

    def fill() -> None:
        while True:
            more = [(due, due) for due in range(len(rows), len(rows) + 20_000)]
            table.put_many(more)
            rows.extend(more)

    try:
        with pytest.raises(lmdb.Error) as caught:
            fill()
        assert not isinstance(caught.value, delayed._BROKEN)
        assert len(table) == len(rows)
        assert table.first(2, 1 << 40) == rows[:2]
        table.remove_many(rows[:100])
        assert table.first(1, 1 << 40) == [rows[100]]
    finally:
        table.close()


@pytest.mark.parametrize("mode", [1, 2])
def test_a_message_has_its_own_time_to_live_from_the_moment_it_was_waited_for(channel, mode):
    """Only the queue's counted, and it stayed for ever."""
    declare(channel)
    channel.queue_declare("long", durable=True, arguments={"x-message-ttl": 3_600_000})
    channel.queue_bind("long", "later", "k")
    properties = pika.BasicProperties(delivery_mode=mode, expiration="1", headers={"x-delay": 50})
    channel.basic_publish("later", "k", b"gone", properties)
    channel.basic_publish("later", "k", b"stays", pika.BasicProperties(headers={"x-delay": 300}))
    channel.connection.sleep(1)
    for queue in ("q", "long"):
        found = [eventually(lambda queue=queue: channel.basic_get(queue, auto_ack=True)[2])]
        while (body := channel.basic_get(queue, auto_ack=True)[2]) is not None:
            found.append(body)
        assert found == [b"stays"]


@pytest.mark.parametrize(
    ("delay", "waited"),
    [("200", -200), ("+200", -200), (Decimal("200.5"), -200), ("soon", "soon"), ("-5", "-5")],
)
def test_a_delay_in_digits_is_one_and_comes_back_as_a_whole_number(channel, delay, waited):
    """As in the plugin. Text was no delay at all: who makes all his headers text was not delayed, and not told."""
    declare(channel)
    began = time.time()
    publish(channel, b"m", delay)
    [(body, header, at)] = wait_for(channel, 1)
    assert (body, header, type(header)) == (b"m", waited, type(waited))
    if isinstance(waited, int):
        assert at - began >= 0.2


def test_a_delay_in_digits_that_is_too_long_is_refused(channel):
    declare(channel)
    with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="invalid x-delay 99999999999"):
        publish(channel, b"m", "99999999999")
