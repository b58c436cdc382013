"""The broker with aio-pika: confirms, transactions, RPC, master and workers, and a connection that comes back by itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable
from functools import partial
from typing import TypeVar

import aio_pika
import aiormq.exceptions
import pytest
from aio_pika.patterns import RPC, Master

from tests.broker_clients import SECONDS, eventually, unique
from warren.testing import running_broker

T = TypeVar("T")


def run(work: Awaitable[T]) -> T:
    return asyncio.run(asyncio.wait_for(work, SECONDS))


def test_what_is_published_comes_to_an_iterator_in_order(broker, scale):
    count = scale.scale(1000)

    async def main() -> None:
        async with await aio_pika.connect(broker.url) as connection:
            channel = await connection.channel()
            await channel.set_qos(prefetch_count=10)
            queue = await channel.declare_queue(unique(), exclusive=True)
            await asyncio.gather(
                *(
                    channel.default_exchange.publish(aio_pika.Message(b"%d" % number), queue.name)
                    for number in range(count)
                )
            )
            found = []
            async with queue.iterator() as messages:
                async for message in messages:
                    async with message.process():
                        found.append(message.body)
                    if len(found) == count:
                        break
            assert found == [b"%d" % number for number in range(count)]

    run(main())


def test_confirms_that_wait_together_are_all_told(broker, scale):
    count = scale.scale(2000)

    async def main() -> None:
        async with await aio_pika.connect(broker.url) as connection:
            channel = await connection.channel(publisher_confirms=True)
            name = unique()
            queue = await channel.declare_queue(name, durable=True)
            messages = [
                aio_pika.Message(b"%d" % number, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
                for number in range(count)
            ]
            confirms = await asyncio.gather(*(channel.default_exchange.publish(one, name) for one in messages))
            assert {type(confirm).__name__ for confirm in confirms} == {"Ack"}
            assert (await channel.declare_queue(name, passive=True)).declaration_result.message_count == count
            await queue.delete(if_empty=False)

    run(main())


def test_a_full_queue_fails_the_publish_that_did_not_fit(broker):
    async def main() -> list[str]:
        async with await aio_pika.connect(broker.url) as connection:
            channel = await connection.channel()
            arguments = {"x-max-length": 3, "x-overflow": "reject-publish"}
            queue = await channel.declare_queue(unique(), exclusive=True, arguments=arguments)
            results = await asyncio.gather(
                *(channel.default_exchange.publish(aio_pika.Message(b"x"), queue.name) for _ in range(6)),
                return_exceptions=True,
            )
            return [type(result).__name__ for result in results]

    assert run(main()) == ["Ack"] * 3 + ["DeliveryError"] * 3


def test_an_unroutable_mandatory_message_fails_its_publish(broker):
    async def main() -> None:
        async with await aio_pika.connect(broker.url) as connection:
            channel = await connection.channel(on_return_raises=True)
            with pytest.raises(aio_pika.exceptions.DeliveryError):
                await channel.default_exchange.publish(aio_pika.Message(b"x"), unique("nowhere"))

    run(main())


def test_a_transaction_that_raises_leaves_nothing(broker):
    async def main() -> list[int]:
        async with await aio_pika.connect(broker.url) as connection:
            channel = await connection.channel(publisher_confirms=False)
            watcher = await connection.channel()
            queue = await channel.declare_queue(unique(), exclusive=True)

            async def count() -> int:
                again = await watcher.declare_queue(queue.name, passive=True)
                return int(again.declaration_result.message_count)

            counts = []
            async with channel.transaction():
                await channel.default_exchange.publish(aio_pika.Message(b"x"), queue.name)
                counts.append(await count())
            counts.append(await count())
            with contextlib.suppress(ZeroDivisionError):
                async with channel.transaction():
                    await channel.default_exchange.publish(aio_pika.Message(b"y"), queue.name)
                    raise ZeroDivisionError
            counts.append(await count())
            return counts

    assert run(main()) == [0, 1, 1]


def test_a_mistake_closes_its_channel_and_the_others_live_on(broker):
    async def main() -> None:
        async with await aio_pika.connect(broker.url) as connection:
            good, bad = await connection.channel(), await connection.channel()
            with pytest.raises(aiormq.exceptions.ChannelNotFoundEntity):
                await bad.get_queue("nope", ensure=True)
            await good.declare_queue(unique(), exclusive=True)

    run(main())


def test_a_large_message_comes_back_whole(broker):
    body = os.urandom(3_000_000)

    async def main() -> bytes:
        async with await aio_pika.connect(broker.url) as connection:
            channel = await connection.channel()
            queue = await channel.declare_queue(unique(), exclusive=True)
            await channel.default_exchange.publish(aio_pika.Message(body), queue.name)
            message = await queue.get(timeout=SECONDS)
            await message.ack()
            return message.body

    assert run(main()) == body


# ---- patterns ----


def test_rpc_returns_results_and_raises_what_the_other_side_raised(broker):
    async def multiply(*, x: int, y: int) -> int:
        return x * y

    async def divide(*, x: int, y: int) -> float:
        return x / y

    async def main() -> None:
        async with await aio_pika.connect(broker.url) as server, await aio_pika.connect(broker.url) as client:
            serving = await RPC.create(await server.channel())
            product, quotient = unique("multiply"), unique("divide")
            await serving.register(product, multiply, auto_delete=True)
            await serving.register(quotient, divide, auto_delete=True)
            asking = await RPC.create(await client.channel())
            answers = await asyncio.gather(*(asking.call(product, {"x": number, "y": 2}) for number in range(50)))
            assert answers == [2 * number for number in range(50)]
            with pytest.raises(ZeroDivisionError):
                await asking.call(quotient, {"x": 1, "y": 0})
            with pytest.raises(aio_pika.exceptions.MessageProcessError, match="has been returned"):
                await asking.call(unique("nobody"), {})
            await asking.close()
            await serving.close()

    run(main())


def test_a_master_gives_tasks_to_workers_each_to_one(broker):
    async def main() -> list[int]:
        async with await aio_pika.connect(broker.url) as boss, await aio_pika.connect(broker.url) as hands:
            done: list[int] = []
            all_done = asyncio.Event()

            async def work(*, task: int) -> None:
                done.append(task)
                if len(done) == 40:
                    all_done.set()

            name = unique("task")
            workers = []
            for _ in range(2):
                channel = await hands.channel()
                await channel.set_qos(prefetch_count=1)
                workers.append(await Master(channel).create_worker(name, work, auto_delete=True))
            master = Master(await boss.channel())
            for task in range(40):
                await master.create_task(name, {"task": task})
            await all_done.wait()
            for worker in workers:
                await worker.close()
            return sorted(done)

    assert run(main()) == list(range(40))


# ---- coming back ----


def test_a_robust_connection_comes_back_after_a_restart_with_its_consumer(tmp_path):
    """The broker goes and comes on the same port: consumer, bindings and an exclusive queue are there again."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        received: asyncio.Queue[bytes] = asyncio.Queue()
        first = running_broker(str(tmp_path))
        broker = await loop.run_in_executor(None, first.__enter__)
        port = broker.port
        connection = await aio_pika.connect_robust(broker.url, reconnect_interval=0.05)
        reconnected = asyncio.Event()
        connection.reconnect_callbacks.add(lambda *_: reconnected.set())
        channel = await connection.channel()
        queue = await channel.declare_queue("robust", durable=True)
        exclusive = await channel.declare_queue("own", exclusive=True)
        await exclusive.bind("amq.fanout")

        async def on_message(message: aio_pika.abc.AbstractIncomingMessage) -> None:
            async with message.process():
                await received.put(message.body)

        await queue.consume(on_message)
        await exclusive.consume(on_message)
        await channel.default_exchange.publish(aio_pika.Message(b"before", delivery_mode=2), "robust")
        assert await received.get() == b"before"
        acked = partial(eventually, lambda: broker.queue_info("robust")["messages"] == 0)
        await loop.run_in_executor(None, acked)  # or it would come once more, and rightly so
        await loop.run_in_executor(None, first.__exit__, None, None, None)
        second = running_broker(str(tmp_path), amqp_port=port)
        await loop.run_in_executor(None, second.__enter__)
        try:
            await reconnected.wait()
            await connection.ready()
            fanout = await channel.get_exchange("amq.fanout")
            await channel.default_exchange.publish(aio_pika.Message(b"after", delivery_mode=2), "robust")
            assert await received.get() == b"after"
            await fanout.publish(aio_pika.Message(b"to all"), "")
            assert await received.get() == b"to all"
        finally:
            await connection.close()
            await loop.run_in_executor(None, second.__exit__, None, None, None)

    run(main())
