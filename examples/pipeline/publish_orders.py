"""Orders to play with: 1000 messages of JSON in the durable queue `orders`, which is bound to the exchange `shop`.

warren serve &
python examples/pipeline/publish_orders.py
"""

from __future__ import annotations

import json
import os
import random

import pika

AMQP_URL = os.environ.get("AMQP_URL", "amqp://guest:guest@localhost/")
COUNTRIES = ("at", "de", "fr", "nl", "pl")
ORDERS = 1000


def main() -> None:
    connection = pika.BlockingConnection(pika.URLParameters(AMQP_URL))
    channel = connection.channel()
    channel.exchange_declare("shop", "topic", durable=True)
    channel.queue_declare("orders", durable=True)
    channel.queue_bind("orders", "shop", "order.#")
    channel.confirm_delivery()
    persistent = pika.BasicProperties(delivery_mode=2, content_type="application/json")
    for number in range(ORDERS):
        country = random.choice(COUNTRIES)
        order = {"id": number, "country": country, "amount": random.randrange(500, 20_000) / 100}
        channel.basic_publish("shop", f"order.{country}", json.dumps(order).encode(), persistent)
    connection.close()
    print(f"{ORDERS} orders are in the queue")


if __name__ == "__main__":
    main()
