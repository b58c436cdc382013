"""Policies change queues that exist; quorum queues are served by classic ones."""

from __future__ import annotations

import pika
import pika.exceptions
import pytest

from warren.routing.policies import Policy
from warren.testing import running_broker


@pytest.fixture
def broker():
    with running_broker() as running:
        yield running


@pytest.fixture
def channel(broker):
    connection = pika.BlockingConnection(pika.URLParameters(broker.url))
    yield connection.channel()
    connection.close()


def set_policy(broker, *, operator: bool = False, **fields) -> None:
    policy = Policy(**fields)
    broker.call(lambda: broker.broker.vhosts["/"].set_policy(policy, operator=operator))


def count(channel, queue: str) -> int:
    return channel.queue_declare(queue, passive=True).method.message_count


def test_a_policy_shortens_a_queue_that_is_there_and_its_end_lets_it_grow(broker, channel):
    channel.queue_declare("orders.eu", arguments={"x-max-length": 8})
    channel.queue_declare("other")
    for queue in ("orders.eu", "other"):
        for number in range(10):
            channel.basic_publish("", queue, b"%d" % number)
    assert (count(channel, "orders.eu"), count(channel, "other")) == (8, 10)
    set_policy(broker, name="short", pattern="^orders", definition={"max-length": 3})
    assert (count(channel, "orders.eu"), count(channel, "other")) == (3, 10)
    set_policy(broker, operator=True, name="limit", pattern="", definition={"max-length": 2})
    assert (count(channel, "orders.eu"), count(channel, "other")) == (2, 2)
    broker.call(lambda: broker.broker.vhosts["/"].clear_policy("limit", operator=True))
    broker.call(lambda: broker.broker.vhosts["/"].clear_policy("short"))
    for _ in range(10):
        channel.basic_publish("", "orders.eu", b"")
    assert count(channel, "orders.eu") == 8


def test_a_policy_gives_dead_letters_and_an_alternate_exchange_and_survives_a_restart(tmp_path):
    with running_broker(str(tmp_path)) as broker:
        set_policy(
            broker, name="dl", pattern="^q$", definition={"dead-letter-exchange": "", "dead-letter-routing-key": "dead"}
        )
        set_policy(
            broker, name="ae", pattern="^x$", apply_to="exchanges", definition={"alternate-exchange": "amq.fanout"}
        )
    with running_broker(str(tmp_path)) as broker:
        connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        channel = connection.channel()
        channel.queue_declare("q", durable=True)
        channel.queue_declare("dead", durable=True)
        channel.exchange_declare("x", "direct")
        channel.queue_bind("q", "amq.fanout")
        channel.basic_publish("x", "nowhere", b"m")
        method, _, _ = channel.basic_get("q")
        channel.basic_reject(method.delivery_tag, requeue=False)
        connection.process_data_events(0.1)
        assert channel.basic_get("dead")[2] == b"m"
        connection.close()


def test_a_quorum_queue_is_a_durable_classic_one_with_a_delivery_limit(broker, channel):
    channel.queue_declare("q", durable=True, arguments={"x-queue-type": "quorum"})
    channel.queue_declare("q", durable=True, arguments={"x-queue-type": "quorum"})
    channel.basic_publish("", "q", b"poison")
    for _ in range(21):
        method, _, _ = channel.basic_get("q")
        assert method is not None
        channel.basic_reject(method.delivery_tag, requeue=True)
    assert channel.basic_get("q")[0] is None


@pytest.mark.parametrize(
    ("durable", "kind", "code"), [(True, "stream", 406), (False, "quorum", 406), (True, "nonsense", 406)]
)
def test_other_queue_types_are_refused_with_a_reason(channel, durable, kind, code):
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        channel.queue_declare("q", durable=durable, arguments={"x-queue-type": kind})
    assert caught.value.reply_code == code
    assert kind in caught.value.reply_text


@pytest.mark.parametrize(("first", "then"), [("quorum", None), (None, "quorum"), ("classic", "quorum")])
def test_a_queue_of_one_type_is_not_declared_again_as_one_of_another(channel, first, then):
    """A classic queue has no delivery limit, so it is not what a client wants who asks for a quorum queue."""
    arguments = [{"x-queue-type": kind} if kind else {} for kind in (first, then)]
    channel.queue_declare("q", durable=True, arguments=arguments[0])
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        channel.queue_declare("q", durable=True, arguments=arguments[1])
    shown = ["none" if kind != "quorum" else "the value 'quorum' of type 'longstr'" for kind in (then, first)]
    assert caught.value.reply_code == 406
    assert caught.value.reply_text == (
        f"PRECONDITION_FAILED - inequivalent arg 'x-queue-type' for queue 'q' in vhost '/': received {shown[0]} but "
        f"current is {shown[1]}"
    )


def test_a_queue_that_is_said_to_be_classic_is_the_one_of_which_nothing_is_said(channel):
    for arguments in ({}, {"x-queue-type": "classic"}, {}):
        channel.queue_declare("q", durable=True, arguments=arguments)


def test_the_alias_can_be_switched_off():
    with running_broker(queue_type_aliases={}) as broker:
        connection = pika.BlockingConnection(pika.URLParameters(broker.url))
        with pytest.raises(pika.exceptions.ConnectionClosedByBroker, match="quorum"):
            connection.channel().queue_declare("q", durable=True, arguments={"x-queue-type": "quorum"})
