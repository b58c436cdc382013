"""The broker with pika: what a queue does by its arguments, exchanges and their bindings, dead letters, direct reply-to."""

from __future__ import annotations

import time

import pamqp.commands
import pika
import pika.exceptions
import pytest

from tests.broker_clients import (
    Inbox,
    RawClient,
    connected,
    declare,
    declare_exchange,
    drain,
    eventually,
    get,
    publish,
    pump,
    settle,
    unique,
)

Properties = pika.BasicProperties


def is_gone(channel, queue: str) -> bool:
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        channel.connection.channel().queue_declare(queue, passive=True)
    return caught.value.reply_code == 404


# ---- life of a queue ----


def test_an_exclusive_queue_is_its_connections_own_and_goes_with_it(broker, channel):
    with connected(broker) as owner:
        own = owner.channel()
        name = declare(own)
        publish(own, name, b"x")
        for action in (
            lambda other: other.queue_declare(name, passive=True),
            lambda other: other.queue_declare(name, exclusive=True),
            lambda other: other.basic_get(name),
            lambda other: other.basic_consume(name, Inbox()),
            lambda other: other.queue_bind(name, "amq.fanout"),
            lambda other: other.queue_purge(name),
            lambda other: other.queue_delete(name),
        ):
            with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
                action(channel.connection.channel())
            assert caught.value.reply_code == 405
            assert caught.value.reply_text.startswith("RESOURCE_LOCKED - cannot obtain exclusive access")
        publish(channel, name, b"y")  # to publish to it is nobody's secret
        settle(channel)
        assert drain(own, name) == [b"x", b"y"]
    eventually(lambda: name not in broker.queue_names())
    assert is_gone(channel, name)


def test_an_auto_delete_queue_goes_with_its_last_consumer_and_not_before_its_first(channel):
    name = unique()
    channel.queue_declare(name, auto_delete=True)
    publish(channel, name, b"x")
    assert drain(channel, name) == [b"x"]  # a get is no consumer
    channel.queue_declare(name, passive=True)
    first = channel.basic_consume(name, Inbox())
    other = channel.connection.channel()
    other.basic_consume(name, Inbox())
    channel.basic_cancel(first)
    channel.queue_declare(name, passive=True)
    other.close()
    assert is_gone(channel, name)


def test_a_server_named_queue_is_what_an_empty_name_stands_for_afterwards(channel):
    declared = channel.queue_declare("", exclusive=True)
    name = declared.method.queue
    assert name.startswith("amq.gen-")
    channel.queue_bind("", "amq.direct", "by-last")
    channel.basic_publish("amq.direct", "by-last", b"x")
    assert channel.basic_get("")[2] == b"x"
    assert channel.queue_declare("", exclusive=True).method.queue != name


def test_declaring_again_counts_messages_and_consumers(channel):
    name = declare(channel)
    publish(channel, name, b"1", b"2")
    other = channel.connection.channel()
    other.basic_qos(prefetch_count=1)
    other.basic_consume(name, Inbox())
    again = channel.queue_declare(name, exclusive=True).method
    assert (again.message_count, again.consumer_count) == (1, 1)


def test_purge_takes_what_is_ready_and_leaves_what_is_held(broker, channel):
    name = declare(channel)
    publish(channel, name, b"1", b"2", b"3")
    channel.basic_get(name)
    assert channel.queue_purge(name).method.message_count == 2
    assert broker.queue_info(name)["messages_unacknowledged"] == 1
    channel.basic_recover(requeue=True)
    assert drain(channel, name) == [b"1"]


def test_delete_looks_at_its_conditions_first(channel):
    name = declare(channel)
    consumer = channel.connection.channel()
    consumer.basic_consume(name, Inbox())
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        channel.connection.channel().queue_delete(name, if_unused=True)
    assert (caught.value.reply_code, "in use" in caught.value.reply_text) == (406, True)
    consumer.close()
    publish(channel, name, b"1")
    settle(channel)
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        channel.connection.channel().queue_delete(name, if_empty=True)
    assert (caught.value.reply_code, "not empty" in caught.value.reply_text) == (406, True)
    assert channel.queue_delete(name).method.message_count == 1
    assert channel.queue_delete(name).method.message_count == 0  # what is not there is deleted


def test_an_unused_queue_expires_and_a_used_one_does_not(broker, channel):
    idle, consumed = declare(channel, x_expires=150), declare(channel, x_expires=150)
    channel.basic_consume(consumed, Inbox())
    eventually(lambda: idle not in broker.queue_names())
    assert is_gone(channel, idle)
    channel.queue_declare(consumed, passive=True)


def test_a_get_gives_an_expiring_queue_its_time_again(broker, channel):
    name = declare(channel, x_expires=400)
    started = time.monotonic()
    while time.monotonic() - started < 0.8:  # twice its time, and used at every moment
        channel.basic_get(name)
    eventually(lambda: name not in broker.queue_names())


# ---- exchanges ----


def test_a_fanout_exchange_copies_to_all_its_queues(channel):
    exchange = declare_exchange(channel, "fanout")
    names = [declare(channel) for _ in range(3)]
    for name in names:
        channel.queue_bind(name, exchange)
    publish(channel, "any", b"1", b"2", exchange=exchange, delivery_mode=2)
    assert [drain(channel, name) for name in names] == [[b"1", b"2"]] * 3


@pytest.mark.parametrize("size", [10, 10_000])
def test_a_persistent_message_reaches_durable_and_other_queues_and_each_settles_its_own(broker, channel, size):
    exchange = declare_exchange(channel, "fanout")
    durable = [unique(), unique()]
    for name in durable:
        channel.queue_declare(name, durable=True)
    names = [*durable, declare(channel)]
    for name in names:
        channel.queue_bind(name, exchange)
    channel.confirm_delivery()
    bodies = [b"%d" % number * size for number in range(3)]
    publish(channel, "", *bodies, exchange=exchange, delivery_mode=2)
    first = [channel.basic_get(name) for name in names]
    assert [body for _, _, body in first] == [bodies[0]] * 3
    channel.basic_ack(first[0][0].delivery_tag)
    channel.basic_nack(first[1][0].delivery_tag, requeue=True)
    channel.basic_reject(first[2][0].delivery_tag, requeue=False)
    assert [drain(channel, name) for name in names] == [bodies[1:], bodies, bodies[1:]]
    for name in durable:
        channel.queue_delete(name)


@pytest.mark.parametrize(
    "arguments", [{"x-message-ttl": 0}, {"x-max-length": 0}, {"x-max-length": 0, "x-overflow": "reject-publish"}]
)
def test_a_durable_queue_that_keeps_nothing_hands_over_its_share_of_a_fanout(broker, channel, arguments):
    exchange = declare_exchange(channel, "fanout")
    keeps, hands_over = unique(), unique()
    channel.queue_declare(keeps, durable=True)
    channel.queue_declare(hands_over, durable=True, arguments=arguments)
    for name in (keeps, hands_over):
        channel.queue_bind(name, exchange)
    publish(channel, "", b"before", exchange=exchange, delivery_mode=2)
    inbox = Inbox()
    other = channel.connection.channel()
    other.basic_consume(hands_over, inbox)
    publish(channel, "", b"1", b"2", exchange=exchange, delivery_mode=2)
    settle(channel)
    expected = [] if arguments.get("x-overflow") else [b"1", b"2"]
    pump(channel.connection, lambda: inbox.bodies == expected)
    assert drain(channel, keeps) == [b"before", b"1", b"2"]
    for name in (keeps, hands_over):
        channel.queue_delete(name)


@pytest.mark.parametrize(
    ("pattern", "keys"),
    [
        ("a.b", {"a.b"}),
        ("a.*", {"a.b", "a.c"}),
        ("a.#", {"a", "a.b", "a.c", "a.b.c"}),
        ("#", {"", "a", "a.b", "a.c", "a.b.c", "b"}),
        ("#.c", {"a.c", "a.b.c"}),
        ("*", {"a", "b", ""}),
    ],
)
def test_a_topic_exchange_matches_words(channel, pattern, keys):
    exchange, name = declare_exchange(channel, "topic"), declare(channel)
    channel.queue_bind(name, exchange, pattern)
    for key in ("", "a", "b", "a.b", "a.c", "a.b.c"):
        channel.basic_publish(exchange, key, key.encode())
    found = {body.decode() for body in drain(channel, name)}
    assert found - {""} == keys - {""}  # whether an empty key is one empty word is for the router's own tests


def test_a_queue_bound_twice_gets_a_message_once(channel):
    exchange, name = declare_exchange(channel, "topic"), declare(channel)
    channel.queue_bind(name, exchange, "a.*")
    channel.queue_bind(name, exchange, "*.b")
    channel.basic_publish(exchange, "a.b", b"x")
    assert drain(channel, name) == [b"x"]


@pytest.mark.parametrize(
    ("arguments", "matching"),
    [
        ({"x-match": "all", "color": "red", "size": 5}, [b"both"]),
        ({"x-match": "any", "color": "red", "size": 5}, [b"red", b"both"]),
        ({"color": "red"}, [b"red", b"both"]),
    ],
)
def test_a_headers_exchange_matches_headers(channel, arguments, matching):
    exchange, name = declare_exchange(channel, "headers"), declare(channel)
    channel.queue_bind(name, exchange, arguments=arguments)
    publish(channel, "", b"red", exchange=exchange, headers={"color": "red"})
    publish(channel, "", b"both", exchange=exchange, headers={"color": "red", "size": 5, "more": True})
    publish(channel, "", b"none", exchange=exchange, headers={"color": "blue"})
    publish(channel, "", b"bare", exchange=exchange)
    assert drain(channel, name) == matching


def test_exchanges_bound_to_exchanges_pass_messages_on_once(channel):
    first, second, third = (declare_exchange(channel, kind) for kind in ("topic", "fanout", "direct"))
    name = declare(channel)
    channel.queue_bind(name, second)
    channel.queue_bind(name, third, "a.b")
    channel.exchange_bind(second, first, "a.*")
    channel.exchange_bind(third, first, "#")
    channel.exchange_bind(first, third, "a.b")  # a circle
    channel.basic_publish(first, "a.b", b"x")
    assert drain(channel, name) == [b"x"]
    channel.exchange_unbind(second, first, "a.*")
    channel.basic_publish(first, "a.c", b"lost")
    channel.basic_publish(first, "a.b", b"y")
    assert drain(channel, name) == [b"y"]


def test_an_alternate_exchange_gets_what_cannot_be_routed(channel):
    spare = declare_exchange(channel, "fanout")
    name = declare(channel)
    channel.queue_bind(name, spare)
    exchange = declare_exchange(channel, "direct", alternate_exchange=spare)
    other = declare(channel)
    channel.queue_bind(other, exchange, "known")
    channel.confirm_delivery()
    channel.basic_publish(exchange, "unknown", b"spare", mandatory=True)
    channel.basic_publish(exchange, "known", b"routed", mandatory=True)
    assert (drain(channel, name), drain(channel, other)) == ([b"spare"], [b"routed"])


def test_an_auto_delete_exchange_goes_with_its_last_binding(channel):
    exchange, name = declare_exchange(channel, "direct"), declare(channel)
    channel.queue_bind(name, exchange, "k")
    channel.exchange_declare(exchange, passive=True)
    channel.queue_unbind(name, exchange, "k")
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        channel.exchange_declare(exchange, passive=True)
    assert caught.value.reply_code == 404


def test_cc_and_bcc_are_further_routing_keys_and_bcc_is_not_shown(channel):
    to, cc, bcc = declare(channel), declare(channel), declare(channel)
    publish(channel, to, b"x", headers={"CC": [cc], "BCC": [bcc], "kept": 1})
    for name in (to, cc, bcc):
        method, properties, _ = channel.basic_get(name)
        assert (method.routing_key, properties.headers) == (to, {"CC": [cc], "kept": 1})


# ---- time to live ----


def test_messages_expire_by_the_queues_time_to_live(broker, channel):
    name = declare(channel, x_message_ttl=50)
    publish(channel, name, b"1", b"2")
    eventually(lambda: broker.queue_info(name)["messages"] == 0)
    assert broker.queue_info(name)["expired"] == 2


def test_messages_expire_by_their_own_time_to_live_or_the_queues_whichever_is_shorter(broker, channel):
    name = declare(channel, x_message_ttl=60_000)
    publish(channel, name, b"short", expiration="30")
    publish(channel, name, b"long", expiration="600000")
    eventually(lambda: broker.queue_info(name)["expired"] == 1)
    _, properties, body = channel.basic_get(name)
    assert (body, properties.expiration) == (b"long", "600000")


def test_only_the_head_expires(broker, channel):
    name = declare(channel)
    publish(channel, name, b"stays")
    publish(channel, name, b"behind", expiration="1")
    publish(channel, name, b"last")
    with connected(broker) as other:
        probe = declare(other.channel())
        publish(other.channel(), probe, b"x", expiration="20")
        eventually(lambda: broker.queue_info(probe)["expired"] == 1)
    assert broker.queue_info(name)["messages"] == 3
    assert drain(channel, name) == [b"stays", b"last"]


def test_time_to_live_0_means_now_or_never(channel):
    name = declare(channel, x_message_ttl=0)
    publish(channel, name, b"never")
    assert drain(channel, name) == []
    inbox = Inbox()
    channel.basic_consume(name, inbox)
    publish(channel, name, b"now")
    pump(channel.connection, lambda: len(inbox) == 1)
    assert inbox.bodies == [b"now"]


def test_a_held_message_does_not_expire_before_it_is_back(broker, channel):
    name = declare(channel)
    publish(channel, name, b"x", expiration="30")
    publish(channel, name, b"probe", expiration="30")
    method, _, _ = channel.basic_get(name)
    eventually(lambda: broker.queue_info(name)["expired"] == 1)
    assert broker.queue_info(name)["messages_unacknowledged"] == 1
    channel.basic_nack(method.delivery_tag, requeue=True)
    assert drain(channel, name) == []


# ---- length limits ----


def test_the_length_limit_counts_ready_messages_only(channel):
    name = declare(channel, x_max_length=2)
    publish(channel, name, b"1", b"2")
    channel.basic_get(name)
    publish(channel, name, b"3")
    channel.connection.process_data_events(0)
    channel.basic_nack(1, requeue=True)  # back to the head, and pushed out from there
    assert drain(channel, name) == [b"2", b"3"]


def test_the_byte_limit_counts_bodies(channel):
    name = declare(channel, x_max_length_bytes=10)
    publish(channel, name, b"aaaa", b"bbbb", headers={"long": "x" * 500})
    assert channel.queue_declare(name, passive=True).method.message_count == 2
    publish(channel, name, b"cccc", headers={"long": "x" * 500})
    assert drain(channel, name) == [b"bbbb", b"cccc"]


def test_the_byte_limit_rejects_by_the_bodies(channel):
    name = declare(channel, x_max_length_bytes=10, x_overflow="reject-publish")
    channel.confirm_delivery()
    publish(channel, name, b"aaaa", b"bbbb", headers={"long": "x" * 500})
    with pytest.raises(pika.exceptions.NackError):
        publish(channel, name, b"ccc")
    publish(channel, name, b"cc")
    assert drain(channel, name) == [b"aaaa", b"bbbb", b"cc"]


def test_length_0_hands_over_to_a_consumer_and_keeps_nothing(channel):
    name = declare(channel, x_max_length=0)
    publish(channel, name, b"lost")
    inbox = Inbox()
    channel.basic_consume(name, inbox)
    publish(channel, name, b"taken")
    pump(channel.connection, lambda: len(inbox) == 1)
    assert inbox.bodies == [b"taken"]


# ---- priorities, single active consumer ----


def test_higher_priorities_come_first_and_unknown_ones_are_the_nearest(channel):
    name = declare(channel, x_max_priority=5)
    for body, priority in ((b"none", None), (b"3a", 3), (b"200", 200), (b"5", 5), (b"0", 0), (b"3b", 3)):
        publish(channel, name, body, priority=priority)
    assert drain(channel, name) == [b"200", b"5", b"3a", b"3b", b"none", b"0"]


def test_a_single_active_consumer_keeps_the_queue_until_it_goes(broker, channel):
    name = unique()
    channel.queue_declare(name, arguments={"x-single-active-consumer": True})
    inboxes = [Inbox() for _ in range(3)]
    channels = [channel.connection.channel() for _ in inboxes]
    for other, inbox, priority in zip(channels, inboxes, (0, 0, 7), strict=True):
        other.basic_consume(name, inbox, arguments={"x-priority": priority})
    publish(channel, name, b"1", b"2")
    pump(channel.connection, lambda: len(inboxes[0]) == 2)
    channels[0].basic_ack(2, multiple=True)
    channels[0].close()
    publish(channel, name, b"3")
    pump(channel.connection, lambda: len(inboxes[2]) == 1)
    assert [inbox.bodies for inbox in inboxes] == [[b"1", b"2"], [], [b"3"]]
    channels[2].close()  # with the message in its hands
    pump(channel.connection, lambda: len(inboxes[1]) == 1)
    assert inboxes[1].bodies == [b"3"]
    channel.queue_delete(name)


def test_a_single_active_consumer_cannot_be_exclusive(channel):
    name = declare(channel, x_single_active_consumer=True)
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        channel.basic_consume(name, Inbox(), exclusive=True)
    assert caught.value.reply_code == 403


# ---- direct reply-to ----


def test_direct_reply_to_brings_the_answer_to_who_asked(broker, channel):
    requests = declare_shared(channel)
    answers = Inbox()
    channel.basic_consume("amq.rabbitmq.reply-to", answers, auto_ack=True)
    publish(channel, requests, b"2+2", reply_to="amq.rabbitmq.reply-to", correlation_id="one")
    with connected(broker) as server_connection:
        server = server_connection.channel()
        _, request, body = get(server, requests)
        assert (body, request.correlation_id) == (b"2+2", "one")
        assert request.reply_to.startswith("amq.rabbitmq.reply-to.")
        assert server.queue_declare(request.reply_to, passive=True).method.consumer_count == 1
        server.confirm_delivery()
        server.basic_publish("", request.reply_to, b"4", Properties(correlation_id="one"))
        pump(channel.connection, lambda: len(answers) == 1)
        [(method, properties, body)] = answers.deliveries
        assert (body, properties.correlation_id, method.routing_key) == (b"4", "one", request.reply_to)
        with pytest.raises(pika.exceptions.UnroutableError):  # it arrives, and is no route: so says RabbitMQ's manual
            server.basic_publish("", request.reply_to, b"5", mandatory=True)
        pump(channel.connection, lambda: len(answers) == 2)
        channel.close()
        with pytest.raises(pika.exceptions.UnroutableError):
            server.basic_publish("", request.reply_to, b"too late", mandatory=True)
        with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
            server.queue_declare(request.reply_to, passive=True)
        assert caught.value.reply_code == 404
        server_connection.channel().queue_delete(requests)


def declare_shared(channel) -> str:
    name = unique()
    channel.queue_declare(name)
    return name


def test_to_ask_for_a_direct_reply_one_has_to_listen_first(channel):
    name = declare(channel)
    publish(channel, name, b"x", reply_to="amq.rabbitmq.reply-to")
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        settle(channel)
    assert caught.value.reply_code == 406
    assert "fast reply consumer does not exist" in caught.value.reply_text


def test_a_direct_reply_consumer_cannot_ack(channel):
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        channel.basic_consume("amq.rabbitmq.reply-to", Inbox())
    assert caught.value.reply_code == 406


# ---- to the frame ----


def test_a_client_that_cannot_take_a_cancel_gets_none(broker, channel):
    name = declare_shared(channel)
    with RawClient(broker) as client:
        client.open(1)
        client.call(1, pamqp.commands.Basic.Consume(queue=name), "Basic.ConsumeOk")
        channel.queue_delete(name)
        client.call(1, pamqp.commands.Basic.Qos(prefetch_count=1), "Basic.QosOk")
    name = declare_shared(channel)
    with RawClient(broker, capabilities={"consumer_cancel_notify": True}) as client:
        client.open(1)
        consumer = client.call(1, pamqp.commands.Basic.Consume(queue=name), "Basic.ConsumeOk")
        channel.queue_delete(name)
        assert client.expect("Basic.Cancel")[1].consumer_tag == consumer.consumer_tag


def test_who_deletes_a_queue_hears_of_that_before_its_consumer_ends(broker):
    with RawClient(broker, capabilities={"consumer_cancel_notify": True}) as client:
        client.open(1)
        name = unique()
        client.call(1, pamqp.commands.Queue.Declare(queue=name), "Queue.DeclareOk")
        client.call(1, pamqp.commands.Basic.Consume(queue=name, consumer_tag="t"), "Basic.ConsumeOk")
        client.call(1, pamqp.commands.Queue.Delete(queue=name), "Queue.DeleteOk")
        assert client.expect("Basic.Cancel")[1].consumer_tag == "t"


@pytest.mark.parametrize("argument", ["x-message-ttl", "x-max-length"])
def test_of_a_large_batch_nothing_is_dropped_while_a_consumer_waits(broker, channel, argument):
    """A queue that keeps nothing hands over everything, also what comes in one write."""
    name = unique()
    channel.queue_declare(name, arguments={argument: 0}, auto_delete=True)
    inbox = Inbox()
    channel.basic_consume(name, inbox)
    with RawClient(broker) as client:
        client.open(1)
        client.publish(1, name, *(b"%d" % number for number in range(1000)))
        pump(channel.connection, lambda: len(inbox) == 1000)
    assert inbox.bodies == [b"%d" % number for number in range(1000)]
