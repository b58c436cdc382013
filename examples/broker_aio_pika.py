"""aio-pika: a topic exchange, two subscribers, and a connection that comes back by itself when the broker was restarted.

warren serve &
python examples/broker_aio_pika.py
"""

from __future__ import annotations

import asyncio
import os

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

URL = os.environ.get("AMQP_URL", "amqp://guest:guest@localhost/")
EVENTS = ("user.created", "user.deleted", "order.created", "order.paid", "order.paid")


async def subscribe(channel: AbstractChannel, pattern: str, heard: list[str], enough: int) -> asyncio.Event:
    """Collect events whose name fits the pattern: * is one word, # any number of them."""
    exchange = await channel.declare_exchange("events", aio_pika.ExchangeType.TOPIC, durable=True)
    queue = await channel.declare_queue(exclusive=True)  # the broker names it, and drops it with this connection
    await queue.bind(exchange, pattern)
    complete = asyncio.Event()

    async def on_event(message: AbstractIncomingMessage) -> None:
        async with message.process():  # acked at the end of the block, rejected when it raises
            heard.append(message.routing_key or "")
        if len(heard) == enough:
            complete.set()

    await queue.consume(on_event)
    return complete


async def main() -> None:
    connection = await aio_pika.connect_robust(URL)
    async with connection:
        channel = await connection.channel()  # with publisher confirms: publish() waits for the broker's word
        await channel.set_qos(prefetch_count=50)
        created: list[str] = []
        orders: list[str] = []
        waiting = [
            await subscribe(channel, "*.created", created, 2),
            await subscribe(channel, "order.#", orders, 3),
        ]
        exchange = await channel.get_exchange("events")
        for name in EVENTS:
            await exchange.publish(aio_pika.Message(b"{}", content_type="application/json"), routing_key=name)
        await asyncio.gather(*(complete.wait() for complete in waiting))
    print(f"created: {', '.join(created)}; orders: {', '.join(orders)}")


if __name__ == "__main__":
    asyncio.run(main())
