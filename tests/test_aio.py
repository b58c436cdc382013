"""The library face for asyncio: nothing blocks the loop, and no cancelled get takes a message."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable

import pytest

import warren
import warren.aio
from warren.errors import (
    InvalidArgumentError,
    MessageStateError,
    QueueMismatchError,
    QueueNotFoundError,
    StoreClosedError,
    StorePathError,
)
from warren.storage.settings import EngineSettings

SMALL = EngineSettings(segment_entries=64, io_batch=32, load_entries=32, ram_target=16, ram_slack=0, commit_bytes=4096)


def on_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**fixtures: object) -> None:
        asyncio.run(test(**fixtures))

    return run


async def settle_down() -> None:
    """Let every task take the steps that it can take now."""
    for _ in range(5):
        await asyncio.sleep(0)


@on_a_loop
async def test_a_message_goes_in_and_comes_out_with_what_it_carried(tmp_path):
    async with warren.aio.open(tmp_path, vhost="v", durability="os") as store:
        queue = await store.queue("orders", arguments={"x-max-priority": 5})
        seq = await queue.publish(b"hello", headers={"k": "v"}, priority=3, expiration_ms=60_000, type="order")
        await store.sync()
        message = await queue.get()
        assert (message.body, message.headers, message.seq_id, message.redelivered) == (
            b"hello",
            {"k": "v"},
            seq,
            False,
        )
        assert message.properties["type"] == "order"
        assert (message.exchange, message.routing_key, message.delivery_count) == ("", "orders", 0)
        assert message.expires_at == pytest.approx(message.published_at + 60)
        assert message.queue is queue
        await message.ack()
        assert message.settled
        assert await queue.get() is None
        assert (store.vhost, store.durability) == ("v", "os")


@on_a_loop
async def test_open_can_be_awaited_or_entered(tmp_path):
    store = await warren.aio.open(tmp_path)
    await (await store.queue("q")).publish(b"1")
    await store.close()
    await store.close()
    async with await warren.aio.open(tmp_path) as store:
        assert await store.queues() == ["q"]
    async with warren.aio.open(tmp_path) as store:
        assert len(await store.queue("q")) == 1
    with pytest.raises(StoreClosedError):
        await store.queues()


@on_a_loop
async def test_an_error_of_open_is_that_of_the_library(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorePathError):
        await warren.aio.open(tmp_path / "file")
    with pytest.raises(StorePathError):
        async with warren.aio.open(tmp_path / "file"):
            pass


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("Store", "vhost durability queue queues sync transaction snapshot info close"),
        ("Queue", "name durable publish publish_many get get_many ack_many nack_many browse info purge delete __len__"),
        ("Message", "body headers properties exchange routing_key seq_id published_at expires_at ack nack"),
        ("Transaction", "publish ack"),
        ("Snapshot", "release"),
    ],
)
def test_the_names_and_their_parameters_are_those_of_the_library(kind, names):
    for name in names.split():
        plain, awaited = getattr(getattr(warren, kind), name, None), getattr(getattr(warren.aio, kind), name)
        if callable(plain):
            assert inspect.signature(plain).parameters.keys() == inspect.signature(awaited).parameters.keys(), name
    assert inspect.signature(warren.open).parameters.keys() == inspect.signature(warren.aio.open).parameters.keys()


@on_a_loop
async def test_a_store_that_exists_keeps_its_arguments(tmp_path):
    async with warren.aio.open(tmp_path) as store:
        queue = await store.queue("q", arguments={"x-max-length": 10})
        assert await store.queue("q") is queue
        with pytest.raises(QueueMismatchError):
            await store.queue("q", arguments={"x-max-length": 20})


@on_a_loop
async def test_batches_nack_browse_purge_and_info(tmp_path):
    async with warren.aio.open(tmp_path, settings=SMALL) as store:
        queue = await store.queue("q")
        assert await queue.publish_many(b"%d" % n for n in range(300)) == range(300)
        batch = await queue.get_many(10)
        await batch[0].nack()
        await batch[1].nack(requeue=False)
        await queue.ack_many(batch[2:5])
        await queue.nack_many(batch[5:])
        assert [m.seq_id async for m in queue.browse(limit=4)] == [0, 5, 6, 7]
        assert [m.body async for m in queue.browse(start_seq=298)] == [b"298", b"299"]
        assert [m.seq_id async for m in queue.browse()] == [0, *range(5, 300)]
        info = await queue.info()
        assert sum(info[part] for part in ("q1", "q2", "delta", "q3", "q4")) == info["len"] == len(queue) == 296
        first = await queue.get()
        assert (first.seq_id, first.redelivered, first.delivery_count) == (0, True, 1)
        assert await queue.purge() == 295
        await first.ack()
        assert (await store.info())["queues"] == 1


@on_a_loop
async def test_a_waiting_get_is_woken_by_a_publish_of_another_task(tmp_path):
    async with warren.aio.open(tmp_path) as store:
        queue = await store.queue("q")
        waiting = asyncio.create_task(queue.get(timeout=None))
        await settle_down()
        assert not waiting.done()
        await queue.publish(b"1")
        assert (await waiting).body == b"1"


@on_a_loop
async def test_a_waiting_get_is_woken_by_a_thread_by_a_nack_and_by_a_transaction(tmp_path):
    async with warren.aio.open(tmp_path) as store:
        queue = await store.queue("q")
        waiting = asyncio.create_task(queue.get(timeout=30))
        await settle_down()
        await asyncio.to_thread(queue.blocking.publish, b"thread")
        message = await waiting
        assert message.body == b"thread"
        waiting = asyncio.create_task(queue.get(timeout=30))
        await settle_down()
        await message.nack()
        assert (await waiting).redelivered
        waiting = asyncio.create_task(queue.get(timeout=30))
        await settle_down()
        async with store.transaction() as tx:
            await tx.publish("q", b"transaction")
        assert (await waiting).body == b"transaction"


@on_a_loop
async def test_get_gives_up_after_its_timeout_and_the_queue_listens_to_nobody(tmp_path):
    async with warren.aio.open(tmp_path) as store:
        queue = await store.queue("q")
        before = time.monotonic()
        assert await queue.get(timeout=0.05) is None
        assert await queue.get_many(3, timeout=0.05) == []
        assert time.monotonic() - before >= 0.1
        assert queue.blocking._listeners == []


@on_a_loop
async def test_a_cancelled_get_takes_no_message(tmp_path):
    async with warren.aio.open(tmp_path) as store:
        queue = await store.queue("q")
        for publish_first in (False, True):
            waiting = asyncio.create_task(queue.get(timeout=None))
            await settle_down()
            if publish_first:  # the get was woken, but has not run yet
                await queue.publish(b"kept")
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert len(queue) == 1
        assert (await queue.get()).body == b"kept"
        assert queue.blocking._listeners == []


@on_a_loop
async def test_a_get_that_was_woken_and_cancelled_wakes_the_next(tmp_path):
    async with warren.aio.open(tmp_path) as store:
        queue = await store.queue("q")
        first, second = (asyncio.create_task(queue.get(timeout=None)) for _ in range(2))
        await settle_down()
        queue._woken = True  # no second wake-up from the publish: only the cancelled one can hand it on
        queue.blocking.publish(b"1")
        queue._woken = False
        queue._wake(1)
        first.cancel()
        message = await asyncio.wait_for(second, 30)
        assert message.body == b"1"
        with pytest.raises(asyncio.CancelledError):
            await first


@on_a_loop
async def test_no_message_is_lost_or_doubled_under_a_storm_of_cancelled_gets(tmp_path, seed):
    chance = random.Random(seed)
    total = 300
    seen: list[int] = []
    async with warren.aio.open(tmp_path, durability="os") as store:
        queue = await store.queue("q")

        async def consumer() -> None:
            while len(seen) < total:
                try:
                    message = await asyncio.wait_for(queue.get(timeout=None), chance.random() * 0.002)
                except TimeoutError:
                    continue
                seen.append(message.seq_id)
                await message.ack()

        consumers = [asyncio.create_task(consumer()) for _ in range(10)]
        for number in range(total):
            if number % 2:
                await queue.publish(b"x")
            else:
                await asyncio.to_thread(queue.blocking.publish, b"x")
        await asyncio.wait_for(asyncio.gather(*consumers), 60)
        assert sorted(seen) == list(range(total))
        assert len(queue) == 0
        assert (await queue.info())["pending_acks"] == 0


@on_a_loop
async def test_many_waiting_tasks_get_one_message_each(tmp_path):
    async with warren.aio.open(tmp_path) as store:
        queue = await store.queue("q")
        tasks = [asyncio.create_task(queue.get(timeout=30)) for _ in range(50)]
        await settle_down()
        await queue.publish_many([b"%d" % n for n in range(50)])
        messages = await asyncio.gather(*tasks)
        assert sorted(m.seq_id for m in messages) == list(range(50))


@on_a_loop
async def test_iteration_waits_and_ends_when_the_queue_is_deleted(tmp_path):
    async with warren.aio.open(tmp_path) as store:
        queue = await store.queue("q")
        bodies = []

        async def consume() -> None:
            async for message in queue:
                bodies.append(message.body)
                await message.ack()

        consumer = asyncio.create_task(consume())
        await queue.publish(b"1")
        await settle_down()
        await queue.publish(b"2")
        while len(bodies) < 2:
            await asyncio.sleep(0.001)
        assert await queue.delete() == 0
        await asyncio.wait_for(consumer, 30)
        assert bodies == [b"1", b"2"]
        with pytest.raises(QueueNotFoundError):
            await queue.publish(b"3")
        assert len(await store.queue("q")) == 0


@on_a_loop
async def test_iteration_ends_and_a_waiting_get_fails_when_the_store_is_closed(tmp_path):
    store = await warren.aio.open(tmp_path)
    queue = await store.queue("q")

    async def consume() -> None:
        async for _ in queue:
            pass

    consumer = asyncio.create_task(consume())
    waiting = asyncio.create_task(queue.get(timeout=None))
    await settle_down()
    await store.close()
    await asyncio.wait_for(consumer, 30)
    with pytest.raises(StoreClosedError):
        await waiting


@on_a_loop
async def test_a_transaction_is_all_or_nothing(tmp_path):
    async with warren.aio.open(tmp_path) as store:
        a, b = await store.queue("a"), await store.queue("b")
        await a.publish(b"0")
        message = await a.get()

        async def fail_half_way() -> None:
            async with store.transaction() as tx:
                await tx.publish("b", b"1")
                await tx.ack(message)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail_half_way()
        assert (len(b), message.settled) == (0, False)
        async with store.transaction() as tx:
            await tx.publish("a", b"1", headers={"k": 1})
            await tx.publish("b", b"2")
            await tx.ack(message)
        assert tx.seq_ids == [1, 0]
        assert message.settled
        assert [m.body for m in await b.get_many(5)] == [b"2"]
        assert [m.headers for m in await a.get_many(5)] == [{"k": 1}]
        with pytest.raises(MessageStateError):
            await message.ack()


@on_a_loop
async def test_a_snapshot_is_there_inside_its_block_only(tmp_path):
    async with warren.aio.open(tmp_path) as store:
        await (await store.queue("q")).publish_many([b"x"] * 10)
        async with store.snapshot() as snapshot:
            path = snapshot.path
            async with warren.aio.open(path) as copy:
                assert len(await copy.queue("q")) == 10
        with pytest.raises(InvalidArgumentError):
            _ = snapshot.path
        assert not os.path.exists(path)


@on_a_loop
async def test_tasks_that_sync_at_once_share_their_commits(tmp_path):
    async with warren.aio.open(tmp_path) as store:
        queue = await store.queue("q")
        before = (await store.info())["commits"]

        async def publish() -> None:
            await queue.publish(b"x")
            await store.sync()

        await asyncio.gather(*(publish() for _ in range(200)))
        assert store.blocking.engine.journal.synced_lsn >= store.blocking.engine.journal.appended_lsn
        assert (await store.info())["commits"] - before < 20


@on_a_loop
async def test_sync_that_fails_raises_in_every_task_that_waits(tmp_path):
    async with warren.aio.open(tmp_path) as store:
        queue = await store.queue("q")
        await queue.publish(b"x")
        failure = StoreClosedError("as if closed")

        def fail() -> None:
            raise failure

        store.blocking.sync = fail
        results = await asyncio.gather(*(store.sync() for _ in range(3)), return_exceptions=True)
        assert results == [failure] * 3
        del store.blocking.sync
        await store.sync()


@on_a_loop
async def test_a_publish_that_has_to_wait_for_the_disk_does_not_hold_the_loop(tmp_path):
    async with warren.aio.open(tmp_path, settings=SMALL) as store:
        queue = await store.queue("q")
        loop_thread = threading.get_ident()
        threads = set()
        commit = store.blocking.engine.committer.sync

        def noted(*arguments: object) -> None:
            threads.add(threading.get_ident())
            commit(*arguments)

        store.blocking.engine.committer.sync = noted
        for _ in range(40):
            await queue.publish_many([b"x" * 100] * 20)
        batch = await queue.get_many(800)
        await queue.ack_many(batch)
        assert threads
        assert loop_thread not in threads


@on_a_loop
async def test_a_cancelled_commit_is_finished_before_the_task_ends(tmp_path):
    async with warren.aio.open(tmp_path) as store:
        queue = await store.queue("q")
        started, release = threading.Event(), threading.Event()
        engine = store.blocking.engine
        may_begin = engine.may_begin

        def slow(*arguments: object) -> bool:
            started.set()
            release.wait(30)
            return may_begin(*arguments)

        engine.may_begin = slow

        async def move() -> None:
            async with store.transaction() as tx:
                await tx.publish("q", b"1")

        task = asyncio.create_task(move())
        await asyncio.to_thread(started.wait, 30)
        task.cancel()
        await settle_down()
        assert not task.done()
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(queue) == 1


@on_a_loop
async def test_a_listener_of_a_loop_that_is_gone_does_no_harm(tmp_path):
    store = warren.open(tmp_path)
    other = asyncio.new_event_loop()
    queue = warren.aio.Queue(store.queue("q"), other)
    queue.blocking.listen(queue._notice)
    other.close()
    queue.blocking.publish(b"x")
    store.close()


@on_a_loop
async def test_wrong_arguments_are_named(tmp_path):
    async with warren.aio.open(tmp_path) as store:
        queue = await store.queue("q")
        with pytest.raises(InvalidArgumentError, match="str"):
            await queue.publish("text")
        with pytest.raises(InvalidArgumentError, match="list of bodies"):
            await queue.publish_many(b"one body")
        with pytest.raises(InvalidArgumentError, match="count is 0"):
            await queue.get_many(0)
        await queue.publish(b"1")
        plain = queue.blocking.get()
        with pytest.raises(InvalidArgumentError, match=r"warren\.aio\.Message"):
            await queue.ack_many([plain])
        plain.ack()


def test_aio_is_imported_when_it_is_used():
    code = "import sys, warren; assert 'asyncio' not in sys.modules; warren.aio.open; warren.nothing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip().endswith("AttributeError: module 'warren' has no attribute 'nothing'")
