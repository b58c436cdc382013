"""pika: publish with confirms, then work one message at a time.

warren serve &
python examples/broker_pika.py
"""

from __future__ import annotations

import json
import os

import pika

URL = os.environ.get("AMQP_URL", "amqp://guest:guest@localhost/")
ORDERS = 20


def main() -> None:
    connection = pika.BlockingConnection(pika.URLParameters(URL))
    channel = connection.channel()
    channel.queue_declare("json-orders", durable=True)

    channel.confirm_delivery()  # from here on basic_publish returns when the message is safe on disk, or raises
    for number in range(ORDERS):
        order = json.dumps({"order": number, "price": number * 10})
        persistent = pika.BasicProperties(delivery_mode=pika.DeliveryMode.Persistent, content_type="application/json")
        channel.basic_publish("", "json-orders", order, persistent, mandatory=True)

    channel.basic_qos(prefetch_count=10)  # at most so many at a time: another worker gets its share
    total = 0
    for done, (method, _, body) in enumerate(channel.consume("json-orders"), start=1):
        total += json.loads(body)["price"]
        channel.basic_ack(method.delivery_tag)  # only now is the broker allowed to forget it
        if done == ORDERS:
            break
    channel.cancel()
    connection.close()
    print(f"{ORDERS} orders worth {total}")


if __name__ == "__main__":
    main()
