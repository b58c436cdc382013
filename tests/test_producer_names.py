"""The name of a producer, of which a record has the first 255 bytes: longer ones are refused, others survive a crash."""

from __future__ import annotations

import pika
import pytest
from pika.exceptions import ChannelClosedByBroker

from warren.storage.vhost_store import VhostStore

HEAD = b"\0\1q\x10\0\2"


def publish(store: VhostStore, producer: str, number: int) -> None:
    queue = store.queues.get("q") or store.declare("q")
    store.fan_out([queue], HEAD, b"x", persistent=True, published_at=1, producer=producer, publishing_id=number)


@pytest.mark.parametrize("name", ["p" * 255, "ü" * 127, "\udcff\udcfe", "a:b"])
def test_a_name_survives_a_crash(tmp_path, name):
    store = VhostStore(str(tmp_path))
    publish(store, name, 7)
    store.sync()
    store.abandon()
    store = VhostStore(str(tmp_path))
    assert store.last_publishing_id(store.get("q"), name) == 7
    store.close()
    store = VhostStore(str(tmp_path))
    assert store.last_publishing_id(store.get("q"), name) == 7
    store.close()


@pytest.mark.parametrize("name", ["p" * 256, "ü" * 128 + "a", "p" * 100_000])
def test_the_engine_refuses_a_longer_one(tmp_path, name):
    store = VhostStore(str(tmp_path))
    with pytest.raises(ValueError, match="at most 255"):
        publish(store, name, 7)
    store.close()


def test_a_client_with_a_longer_one_is_told(warren_broker):
    with pika.BlockingConnection(pika.URLParameters(warren_broker.url)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare("numbered", durable=True)
        headers = {"x-producer-name": "ü" * 128, "x-publishing-id": 1}
        with pytest.raises(ChannelClosedByBroker, match=r"406.*256 bytes: it has at most 255"):
            channel.basic_publish("", "numbered", b"x", pika.BasicProperties(headers=headers, delivery_mode=2))
        channel = connection.channel()
        channel.confirm_delivery()
        headers["x-producer-name"] = "p" * 255
        channel.basic_publish("", "numbered", b"x", pika.BasicProperties(headers=headers, delivery_mode=2))
        assert channel.queue_declare("numbered", passive=True).method.message_count == 1
