"""Workers as tasks: a producer and three consumers on one loop; those who wait hold no thread.

python examples/asyncio_worker.py data/
"""

from __future__ import annotations

import asyncio
import sys

import warren.aio

WORKERS = 3
MESSAGES = 30


async def produce(store: warren.aio.Store, queue: warren.aio.Queue) -> None:
    for number in range(MESSAGES):
        await queue.publish(b"%d" % number, headers={"square": number * number})
        await store.sync()  # tasks that wait at the same time share one sync of the disk


async def consume(queue: warren.aio.Queue, results: list[int]) -> None:
    async for message in queue:  # ends when the queue is deleted or the store closed
        await asyncio.sleep(0.001)  # the work
        results.append(message.headers["square"])
        await message.ack()


async def main(directory: str) -> None:
    async with warren.aio.open(directory) as store:
        queue = await store.queue("numbers")
        results: list[int] = []
        workers = [asyncio.create_task(consume(queue, results)) for _ in range(WORKERS)]
        await produce(store, queue)
        while len(results) < MESSAGES:
            await asyncio.sleep(0.01)
        await queue.delete()
        await asyncio.gather(*workers)
        print(f"{len(results)} messages by {WORKERS} workers, sum of squares {sum(results)}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
