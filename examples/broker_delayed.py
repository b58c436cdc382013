"""Not now, but then: messages that wait at an exchange until their time has come.

    reminders  --after x-delay milliseconds-->  inbox

They wait on the broker's disk and come in the order of their times, whatever the order in which they were sent: no queue for
each delay, and no code of ours that sleeps.

warren serve &
python examples/broker_delayed.py
"""

from __future__ import annotations

import os
import time

import pika

URL = os.environ.get("AMQP_URL", "amqp://guest:guest@localhost/")
DELAYS = {"pay the invoice": 1000, "call back": 200, "water the plants": 600}  # milliseconds


def reminder(delay: int) -> pika.BasicProperties:
    return pika.BasicProperties(delivery_mode=pika.DeliveryMode.Persistent, headers={"x-delay": delay})


def main() -> None:
    connection = pika.BlockingConnection(pika.URLParameters(URL))
    channel = connection.channel()
    # x-delayed-type: how the exchange routes a message when its time has come.
    channel.exchange_declare("reminders", "x-delayed-message", durable=True, arguments={"x-delayed-type": "direct"})
    channel.queue_declare("inbox", durable=True)
    channel.queue_bind("inbox", "reminders", "remind")
    channel.confirm_delivery()

    channel.basic_publish("reminders", "remind", b"get up")  # without x-delay: at once
    sent: dict[str, float] = {}
    for text, delay in DELAYS.items():
        sent[text] = time.monotonic()
        channel.basic_publish("reminders", "remind", text.encode(), reminder(delay))

    for came, (method, _, body) in enumerate(channel.consume("inbox"), 1):
        channel.basic_ack(method.delivery_tag)
        text = body.decode()
        if text in sent:
            waited = 1000 * (time.monotonic() - sent[text])
            when = f"after {DELAYS[text]} ms" if waited >= DELAYS[text] else f"too early, after {waited:.0f} ms"
        else:
            when = "at once"
        print(f"{text}: {when}")
        if came == len(DELAYS) + 1:
            break
    channel.cancel()
    connection.close()


if __name__ == "__main__":
    main()
