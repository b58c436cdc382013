"""The broker with kombu and its pyamqp transport: what Celery stands on."""

from __future__ import annotations

import amqp.exceptions
import kombu
import pytest
from kombu.pools import connections, producers

from tests.broker_clients import SECONDS, eventually, unique
from warren.testing import running_broker


@pytest.fixture
def connection(broker):
    with kombu.Connection(broker.url.replace("amqp://", "pyamqp://")) as connection:
        yield connection


def receive(connection: kombu.Connection, found: list, count: int) -> None:
    while len(found) < count:
        connection.drain_events(timeout=SECONDS)


def test_a_simple_queue_puts_gets_and_empties(connection):
    with connection.SimpleQueue(unique()) as queue:
        for number in range(5):
            queue.put({"number": number})
        assert queue.qsize() == 5
        assert queue.clear() == 5
        queue.put({"number": 5})
        message = queue.get(timeout=SECONDS)
        assert (message.payload, message.delivery_info["redelivered"]) == ({"number": 5}, False)
        message.requeue()
        message = queue.get(timeout=SECONDS)
        assert (message.payload, message.delivery_info["redelivered"]) == ({"number": 5}, True)
        message.ack()
        with pytest.raises(queue.Empty):
            queue.get(block=False)
        queue.consumer.cancel()
        queue.queue.delete()


def test_a_simple_buffer_leaves_nothing_behind(connection):
    with connection.SimpleBuffer(unique()) as buffer:
        buffer.put("x")
        assert buffer.get(timeout=SECONDS).payload == "x"


@pytest.mark.parametrize("serializer", ["json", "pickle"])
@pytest.mark.parametrize("compression", [None, "zlib", "bzip2"])
def test_a_payload_comes_back_through_any_serializer_and_compression(connection, serializer, compression):
    payload = {"text": "Grüße", "numbers": [1, 2.5, None], "deep": {"flag": True}}
    with connection.channel() as channel:
        queue = kombu.Queue(unique(), channel=channel, exclusive=True)
        queue.declare()
        kombu.Producer(channel).publish(payload, routing_key=queue.name, serializer=serializer, compression=compression)
        message = queue.get(accept=[serializer])
        assert message.payload == payload


def test_producer_declares_what_it_needs_and_consumer_gets_it(connection):
    exchange = kombu.Exchange(unique("x"), type="topic", auto_delete=True)
    queue = kombu.Queue(unique(), exchange, routing_key="task.#", auto_delete=True)
    found: list[tuple[object, str]] = []

    def on_message(body, message) -> None:
        found.append((body, message.delivery_info["routing_key"]))
        message.ack()

    with connection.Consumer(queue, callbacks=[on_message]) as consumer:
        consumer.qos(prefetch_count=1)
        producer = connection.Producer(exchange=exchange, serializer="json")
        producer.publish({"a": 1}, routing_key="task.one", declare=[queue])
        producer.publish({"a": 2}, routing_key="other")
        producer.publish({"a": 3}, routing_key="task.two.three")
        receive(connection, found, 2)
        with pytest.raises(TimeoutError):
            connection.drain_events(timeout=0.05)
    assert found == [({"a": 1}, "task.one"), ({"a": 3}, "task.two.three")]


def test_prefetch_can_be_raised_while_a_consumer_works(connection):
    """Celery does so for every task that waits for its time; kombu asks the transport which kind of qos is the right one."""
    queue = kombu.Queue(unique(), exclusive=True, durable=False)
    by_channel = not connection.qos_semantics_matches_spec
    found: list[object] = []
    with connection.Consumer(queue, callbacks=[lambda body, message: found.append(body)]) as consumer:
        consumer.qos(prefetch_count=1, apply_global=by_channel)
        producer = connection.Producer(connection.default_channel)
        for number in range(5):
            producer.publish(number, routing_key=queue.name)
        receive(connection, found, 1)
        consumer.qos(prefetch_count=3, apply_global=by_channel)
        receive(connection, found, 3)
        with pytest.raises(TimeoutError):
            connection.drain_events(timeout=0.05)
    assert found == [0, 1, 2]


def test_confirmed_publishing_waits_for_the_broker_and_raises_what_it_refused(broker):
    with kombu.Connection(broker.url, transport_options={"confirm_publish": True}) as connection:
        channel = connection.channel()
        arguments = {"x-max-length": 1, "x-overflow": "reject-publish"}
        queue = kombu.Queue(unique(), channel=channel, exclusive=True, queue_arguments=arguments)
        queue.declare()
        producer = kombu.Producer(channel)
        producer.publish("one", routing_key=queue.name)
        with pytest.raises(amqp.exceptions.MessageNacked):
            producer.publish("two", routing_key=queue.name)
        assert queue.get().payload == "one"
        producer.publish("three", routing_key=queue.name)


def test_a_mandatory_message_that_nobody_gets_comes_back(connection):
    returned: list[tuple[int, str]] = []

    def on_return(exception, exchange, routing_key, message) -> None:
        returned.append((exception.reply_code, routing_key))

    producer = kombu.Producer(connection.channel(), on_return=on_return)
    key = unique("nowhere")
    producer.publish("x", routing_key=key, mandatory=True)
    receive(connection, returned, 1)
    assert returned == [(312, key)]


def test_pools_share_connections(broker):
    connection = kombu.Connection(broker.url)
    name = unique()
    try:
        with producers[connection].acquire(block=True) as producer:
            producer.publish("x", routing_key=name, declare=[kombu.Queue(name, expires=60)])
        with connections[connection].acquire(block=True) as pooled:
            queue = kombu.Queue(name, expires=60).bind(pooled.default_channel)
            message = queue.get(no_ack=True)
            assert message.payload == "x"
            queue.delete()
    finally:
        kombu.pools.reset()
        connection.close()


def test_errors_are_amqps_own(connection):
    with pytest.raises(amqp.exceptions.NotFound):
        connection.channel().queue_declare("nope", passive=True)
    name = unique()
    connection.channel().queue_declare(name, exclusive=True)
    with pytest.raises(amqp.exceptions.PreconditionFailed):
        connection.channel().queue_declare(name, exclusive=True, durable=True)


def test_ensure_goes_on_after_a_restart(tmp_path):
    with running_broker(str(tmp_path)) as broker:
        port = broker.port
        connection = kombu.Connection(broker.url)
        queue = kombu.Queue("kept", durable=True)
        producer = connection.Producer()
        producer.publish("before", routing_key="kept", declare=[queue], delivery_mode=2)
        # A synchronous answer behind it: the message has arrived before the broker stops.
        assert queue.bind(connection.default_channel).queue_declare(passive=True).message_count == 1
    errors: list[BaseException] = []
    with running_broker(str(tmp_path), amqp_port=port):
        publish = connection.ensure(
            producer, producer.publish, errback=lambda error, interval: errors.append(error), interval_start=0
        )
        publish("after", routing_key="kept", declare=[queue], delivery_mode=2)
        bound = queue.bind(connection.default_channel)
        assert [bound.get(no_ack=True).payload for _ in range(2)] == ["before", "after"]
        connection.close()
    assert errors


def test_heartbeats_are_kept_by_both_sides(broker):
    with kombu.Connection(broker.url, heartbeat=1) as connection:
        connection.ensure_connection(timeout=SECONDS)
        channel = connection.channel()
        name = unique()
        channel.queue_declare(name, exclusive=True)
        assert connection.get_heartbeat_interval() == 1
        for _ in range(12):
            connection.heartbeat_check(rate=2)
            with pytest.raises(TimeoutError):
                connection.drain_events(timeout=0.2)
        channel.queue_declare(name, passive=True)


def test_consumers_with_a_higher_priority_are_served_first(connection):
    channel = connection.channel()
    queue = kombu.Queue(unique(), channel=channel, durable=False, auto_delete=True)
    got: list[tuple[int, object]] = []
    consumers = []
    queue.declare()
    for priority in (1, 9, 5):
        own = connection.channel()
        own.basic_qos(0, 1, False)
        bound = kombu.Queue(queue.name, channel=own, consumer_arguments={"x-priority": priority}, no_declare=True)
        consumers.append(kombu.Consumer(own, bound, callbacks=[lambda body, _, who=priority: got.append((who, body))]))
        consumers[-1].consume()
    producer = kombu.Producer(channel, routing_key=queue.name)
    for number in range(3):
        producer.publish(number)
    while len(got) < 3:
        connection.drain_events(timeout=20)
    assert sorted(got, key=lambda one: str(one[1])) == [(9, 0), (5, 1), (1, 2)]


def test_a_queue_for_replies_goes_when_nobody_has_used_it_for_its_time(broker, connection):
    """As Celery has one for the result of each task in version 4, and for the answers of workers."""
    channel = connection.channel()
    queue = kombu.Queue(unique("reply"), channel=channel, durable=False, auto_delete=True, expires=0.3, message_ttl=60)
    queue.declare()
    kombu.Producer(channel, routing_key=queue.name).publish("a result that nobody fetched")

    eventually(lambda: queue.name not in broker.queue_names())
