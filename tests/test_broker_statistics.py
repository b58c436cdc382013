"""What a channel has done, by exchange and queue; and consumers that keep a message for too long."""

from __future__ import annotations

import pika.exceptions
import pytest

from tests.broker_clients import connected, pump, settle
from warren.testing import running_broker


@pytest.fixture(scope="module")
def broker():
    with running_broker() as running:
        yield running


def statistics(broker, connection):
    """Of the connection's first channel."""
    host, port = connection._impl._transport._sock.getsockname()
    peer = f"{host}:{port}"
    [served] = [one for one in broker.broker.vhosts["/"].connections if one.peer == peer]
    return broker.call(lambda: served.channels[1].statistics.info())


def test_a_channel_counts_by_exchange_and_by_queue(broker, pika_litter):
    with connected(broker) as connection:
        channel = connection.channel()
        for queue in ("counted", "uncounted"):
            channel.queue_declare(queue)
        channel.queue_bind("counted", "amq.topic", "a.#")
        channel.confirm_delivery()
        for key in ("a.1", "a.2", "a.3"):
            channel.basic_publish("amq.topic", key, b"x")
        channel.basic_publish("", "uncounted", b"x")
        with pytest.raises(pika.exceptions.UnroutableError):
            channel.basic_publish("amq.topic", "b", b"x", mandatory=True)
        method, _, _ = channel.basic_get("counted")
        channel.basic_nack(method.delivery_tag, requeue=True)
        method, _, _ = channel.basic_get("counted")
        assert method.redelivered
        channel.basic_ack(method.delivery_tag)
        channel.basic_get("uncounted", auto_ack=True)
        tag = channel.basic_consume("counted", lambda *arguments: None)
        settle(channel)
        channel.basic_cancel(tag)
        found = statistics(broker, connection)
        assert found["exchanges"] == [
            {"exchange": "amq.topic", "publish": 4, "confirm": 4, "return_unroutable": 1},
            {"exchange": "", "publish": 1, "confirm": 1, "return_unroutable": 0},
        ]
        counts = {row.pop("queue"): row for row in found["queues"]}
        assert counts["counted"] == {
            "deliver": 2,
            "deliver_no_ack": 0,
            "get": 2,
            "get_no_ack": 0,
            "ack": 1,
            "redeliver": 1,
        }
        assert counts["uncounted"]["get_no_ack"] == 1


def test_a_consumer_that_keeps_a_message_for_too_long_loses_its_channel_and_not_the_message(pika_litter):
    with running_broker(consumer_timeout=1) as broker, connected(broker) as connection:
        channel = connection.channel()
        channel.queue_declare("kept")
        for body in (b"quick", b"slow"):
            channel.basic_publish("", "kept", body)
        quick, _, _ = channel.basic_get("kept")
        channel.basic_ack(quick.delivery_tag)
        slow, _, _ = channel.basic_get("kept")
        assert slow is not None
        other = connection.channel()  # has nothing outstanding: it stays
        reasons = []
        channel._impl.add_on_close_callback(lambda _, reason: reasons.append(reason))
        pump(connection, lambda: reasons)
        assert reasons[0].reply_code == 406
        assert "timed out" in reasons[0].reply_text
        method, _, body = other.basic_get("kept", auto_ack=True)
        assert (method.redelivered, body) == (True, b"slow")
