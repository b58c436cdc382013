"""Try again later, give up in the end: dead letters, with a waiting room and a morgue.

    work  --rejected-->  work.wait  --after 0.2 s-->  work      as often as RETRIES, then  -->  work.dead

The broker keeps count: x-death says how often a message was rejected, and no code of ours sleeps.

warren serve &
python examples/broker_retry.py
"""

from __future__ import annotations

import os

import pika
from pika.adapters.blocking_connection import BlockingChannel

URL = os.environ.get("AMQP_URL", "amqp://guest:guest@localhost/")
RETRIES = 3
WAIT_MILLISECONDS = 200


def declare(channel: BlockingChannel) -> None:
    """The default exchange "" brings a message to the queue that its routing key names."""
    rejected = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "work.wait"}
    channel.queue_declare("work", durable=True, arguments=rejected)
    expired = {
        "x-message-ttl": WAIT_MILLISECONDS,
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": "work",
    }
    channel.queue_declare("work.wait", durable=True, arguments=expired)  # nobody consumes from it
    channel.queue_declare("work.dead", durable=True)


def rejections(properties: pika.BasicProperties) -> int:
    """How often this message was rejected before."""
    deaths = (properties.headers or {}).get("x-death", [])
    return sum(death["count"] for death in deaths if death["queue"] == "work" and death["reason"] == "rejected")


def work(body: bytes, attempt: int) -> None:
    if body == b"broken" or (body == b"difficult" and attempt < 2):
        raise RuntimeError(f"{body.decode()} failed")


def main() -> None:
    connection = pika.BlockingConnection(pika.URLParameters(URL))
    channel = connection.channel()
    declare(channel)
    channel.confirm_delivery()
    persistent = pika.BasicProperties(delivery_mode=pika.DeliveryMode.Persistent)
    for body in (b"easy", b"difficult", b"broken"):
        channel.basic_publish("", "work", body, persistent)

    ended = 0
    for method, properties, body in channel.consume("work"):
        attempt = rejections(properties)
        try:
            work(body, attempt)
        except RuntimeError as error:
            if attempt < RETRIES:
                print(f"attempt {attempt + 1}: {error}")
                channel.basic_reject(method.delivery_tag, requeue=False)
                continue
            # Publish, wait for the confirm, then ack: a crash between the two leaves one message too many, never none.
            channel.basic_publish("", "work.dead", body, properties)
            print(f"attempt {attempt + 1}: {error}, and that was the last")
        else:
            print(f"attempt {attempt + 1}: {body.decode()} done")
        channel.basic_ack(method.delivery_tag)
        ended += 1
        if ended == 3:
            break
    channel.cancel()
    dead = channel.queue_purge("work.dead").method.message_count
    connection.close()
    print(f"{ended - dead} done, {dead} given up")


if __name__ == "__main__":
    main()
