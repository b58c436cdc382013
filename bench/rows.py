"""The rows of the storage table. Each function measures one line of the issue's table and returns `Row`s."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import warren
from bench.harness import Row, in_child, interleaved, median, scratch
from bench.peers import PEERS, PlainSqlite
from warren.storage.settings import EngineSettings

BODY = b"x" * 100
BATCH = 1000
CHECKPOINTS = 10


def _settled(store: warren.Store) -> None:
    """Return when everything is safe and no checkpoint is due."""
    store.sync()
    while store.engine.checkpoint_due():
        store.engine.tick()


def _files_for(count: int) -> int:
    """Messages that fill enough journal files for ten checkpoints, rounded to batches."""
    return count // BATCH * BATCH


def _publish_rate(count: int, durability: str, batch: int = BATCH) -> float:
    with scratch() as path, warren.open(path, durability=durability) as store:
        queue = store.queue("bench")
        bodies = [BODY] * batch
        begin = time.perf_counter()
        for _ in range(count // batch):
            queue.publish_many(bodies)
        _settled(store)
        rate = count / (time.perf_counter() - begin)
        assert store.engine.journal.floor > CHECKPOINTS or count < 1_000_000, "fewer than ten checkpoints"
        return rate


def _drain_rate(count: int, durability: str, batch: int = BATCH) -> float:
    with scratch() as path, warren.open(path, durability=durability) as store:
        queue = store.queue("bench")
        for _ in range(count // batch):
            queue.publish_many([BODY] * batch)
        _settled(store)
        due = count // CHECKPOINTS
        done = 0
        begin = time.perf_counter()
        while messages := queue.get_many(batch):
            queue.ack_many(messages)
            done += len(messages)
            if done >= due:  # acks alone fill no journal file: ask for the ten checkpoints
                due += count // CHECKPOINTS
                store.engine.checkpoint(seal=True)
        _settled(store)
        assert done == count
        return count / (time.perf_counter() - begin)


def _peer_rates(peer: type[Any], count: int) -> tuple[float, float]:
    with scratch() as path:
        queue = peer(path + "/peer")
        begin = time.perf_counter()
        for _ in range(count):
            queue.put(BODY)
        put = count / (time.perf_counter() - begin)
        begin = time.perf_counter()
        for _ in range(count):
            queue.take()
        take = count / (time.perf_counter() - begin)
        queue.close()
        return put, take


def batch(repeat: int, size: float) -> list[Row]:
    """publish_many and get_many + ack_many against the others."""
    count = _files_for(int(4_400_000 * size))
    peers = int(4000 * size) + 500
    publishing: dict[str, Callable[[], float]] = {"warren": lambda: _publish_rate(count, "os")}
    draining: dict[str, Callable[[], float]] = {"warren": lambda: _drain_rate(count, "os")}
    for peer in PEERS:
        publishing[peer.name] = lambda peer=peer: _peer_rates(peer, peers)[0]
        draining[peer.name] = lambda peer=peer: _peer_rates(peer, peers)[1]
    rows = []
    for name, runs in (("publish_many, 100 B, os", publishing), ("get_many + ack_many, 100 B, os", draining)):
        rates = interleaved(repeat, runs)
        best = max((rate, peer) for peer, rate in rates.items() if peer != "warren")
        ratio = rates["warren"] / best[0]
        figure = f"{rates['warren']:,.0f} msg/s, {ratio:.0f} x {best[1]}"
        rows.append(Row(name, figure, "at least 50 x the best", ratio >= 50, rates))
    return rows


def single(repeat: int, size: float) -> list[Row]:
    """Single publish, and single get + ack, against the same single calls."""
    count = int(100_000 * size)
    peers = int(4000 * size) + 500

    def publish() -> float:
        with scratch() as path, warren.open(path, durability="os") as store:
            queue = store.queue("bench")
            begin = time.perf_counter()
            for _ in range(count):
                queue.publish(BODY)
            store.sync()
            return count / (time.perf_counter() - begin)

    def take() -> float:
        with scratch() as path, warren.open(path, durability="os") as store:
            queue = store.queue("bench")
            queue.publish_many([BODY] * count)
            begin = time.perf_counter()
            for _ in range(count):
                message = queue.get()
                assert message is not None
                message.ack()
            store.sync()
            return count / (time.perf_counter() - begin)

    rows = []
    for name, mine, column in (("single publish", publish, 0), ("single get + ack", take, 1)):
        runs: dict[str, Callable[[], float]] = {"warren": mine}
        for peer in PEERS:
            runs[peer.name] = lambda peer=peer, column=column: _peer_rates(peer, peers)[column]
        rates = interleaved(repeat, runs)
        best = max((rate, peer) for peer, rate in rates.items() if peer != "warren")
        ratio = rates["warren"] / best[0]
        figure = f"{rates['warren']:,.0f} msg/s, {ratio:.1f} x {best[1]}"
        rows.append(Row(f"{name}, 100 B, os", figure, "at least 10 x the best", ratio >= 10, rates))
    return rows


def sqlite(repeat: int, size: float) -> list[Row]:
    """Batches against plain SQLite in WAL mode with batches of the same size."""
    count = _files_for(int(4_400_000 * size))
    other = _files_for(int(500_000 * size))

    def put() -> float:
        with scratch() as path:
            queue = PlainSqlite(path)
            begin = time.perf_counter()
            for _ in range(other // BATCH):
                queue.put_many([BODY] * BATCH)
            rate = other / (time.perf_counter() - begin)
            queue.close()
            return rate

    def take() -> float:
        with scratch() as path:
            queue = PlainSqlite(path)
            for _ in range(other // BATCH):
                queue.put_many([BODY] * BATCH)
            begin = time.perf_counter()
            while queue.take_many(BATCH):
                pass
            rate = other / (time.perf_counter() - begin)
            queue.close()
            return rate

    rows = []
    for name, mine, theirs in (
        ("publish in batches of 1000", lambda: _publish_rate(count, "os"), put),
        ("get + ack in batches of 1000", lambda: _drain_rate(count, "os"), take),
    ):
        rates = interleaved(repeat, {"warren": mine, "SQLite, WAL": theirs})
        ratio = rates["warren"] / rates["SQLite, WAL"]
        rows.append(Row(name, f"{ratio:.1f} x plain SQLite", "at least 2 x", ratio >= 2, rates))
    return rows


def group_commit(repeat: int, size: float) -> list[Row]:
    """64 threads, each waiting for its own message, against one. A journal file has fewer records than usual, so that the
    thread that is alone gets to ten checkpoints, too."""
    total = int(200_000 * size) // 64 * 64 + 64
    settings = EngineSettings(journal_file_records=total // (CHECKPOINTS + 2) + 1)

    def rate(threads: int) -> float:
        with scratch() as path, warren.open(path, durability="fsync", settings=settings) as store:
            queue = store.queue("bench")
            barrier = threading.Barrier(threads + 1)

            def work() -> None:
                barrier.wait()
                for _ in range(total // threads):
                    queue.publish(BODY)
                    store.sync()

            workers = [threading.Thread(target=work) for _ in range(threads)]
            for worker in workers:
                worker.start()
            barrier.wait()
            begin = time.perf_counter()
            for worker in workers:
                worker.join()
            _settled(store)
            assert store.engine.journal.floor > CHECKPOINTS or size < 1, "fewer than ten checkpoints"
            return total / (time.perf_counter() - begin)

    rates = interleaved(repeat, {"warren, 1 thread": lambda: rate(1), "warren, 64 threads": lambda: rate(64)})
    ratio = rates["warren, 64 threads"] / rates["warren, 1 thread"]
    figure = f"{rates['warren, 64 threads']:,.0f} against {rates['warren, 1 thread']:,.0f} msg/s, {ratio:.1f} x"
    return [Row("fsync, 64 threads against one", figure, "at least 15 x", ratio >= 15, rates)]


def many_queues(repeat: int, size: float) -> list[Row]:
    """1, 1,000 and 10,000 queues, the same total, persistent, fsync; each commit is one batch over the queues."""
    total = _files_for(int(3_000_000 * size))
    commit_size = 1000

    def run(queues: int, path: str) -> tuple[float, float]:
        with warren.open(path, durability="fsync") as store:
            handles = [store.queue(f"q{number}") for number in range(queues)]
            waits = []
            begin = time.perf_counter()
            sent = 0
            while sent < total:
                for number in range(commit_size):
                    handles[(sent + number) % queues].publish(BODY)
                at = time.perf_counter()
                store.sync()
                waits.append(time.perf_counter() - at)
                sent += commit_size
            _settled(store)
            assert store.engine.journal.floor > CHECKPOINTS or size < 1, "fewer than ten checkpoints"
            rate = sent / (time.perf_counter() - begin)
            waits.sort()
            return rate, waits[min(len(waits) - 1, int(len(waits) * 0.999))] * 1000

    rates: dict[str, list[float]] = {}
    tails: dict[str, list[float]] = {}
    for number in range(repeat):
        for queues in (1, 1000, 10_000):
            with scratch() as path:
                rate, tail = run(queues, path)
                rates.setdefault(f"warren, {queues} queues", []).append(rate)
                tails.setdefault(f"warren, {queues} queues", []).append(tail)
                print(f"    {number + 1}/{repeat} {queues} queues: {rate:,.0f} msg/s, p99.9 {tail:.2f} ms", flush=True)
    mid = {name: median(values) for name, values in rates.items()}
    slow = {name: median(values) for name, values in tails.items()}
    spread = max(mid.values()) / min(mid.values())
    tail_spread = max(slow.values()) / slow["warren, 1 queues"]
    return [
        Row("1, 1,000, 10,000 queues: rate", f"{spread:.2f} x apart", "within 2 x", spread <= 2, mid),
        Row(
            "1, 1,000, 10,000 queues: p99.9 of a commit (ms)",
            f"{tail_spread:.2f} x",
            "within 3 x",
            tail_spread <= 3,
            slow,
        ),
    ]


_MEMORY = """
import json, os, sys, time
import warren
from warren.storage.settings import EngineSettings
path, count, body, index = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
def anon():
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
def fill():
    most = 0
    for step in range(count // 1000):
        queue.publish_many(bodies)
        if step % 50 == 0:
            most = max(most, anon())
    store.sync()
    while store.engine.checkpoint_due():
        store.engine.tick()
    time.sleep(2.5)  # at rest: upkeep gives back after a quiet second what was freed
    return anon() - empty, most - empty
with warren.open(path, durability="os", settings=EngineSettings(store_index=index)) as store:
    queue = store.queue("bench")
    queue.publish_many([b"x" * body] * 10)
    store.sync()
    empty = anon()
    bodies = [b"x" * body for _ in range(1000)]
    full, peak = fill()
    twice, _ = fill()
    print(json.dumps({"full": full, "peak": peak, "growth": twice - full}), flush=True)
    os._exit(0)
"""


def _memory(repeat: int, count: int, body: int, index: str) -> dict[str, float]:
    """Bytes with `count` messages, and by how much they grow with as many again. Medians over fresh processes."""
    runs = []
    for number in range(repeat):
        with scratch() as path:
            runs.append(in_child(_MEMORY, path, str(count), str(body), index))
        taken = ", ".join(f"{name} {value / 1e6:.1f}" for name, value in runs[-1].items())
        print(f"    {number + 1}/{repeat} {count:,} x {body} B, {index} (MB): {taken}", flush=True)
    return {name: median([run[name] for run in runs]) for name in runs[0]}


def memory(repeat: int, size: float) -> list[Row]:
    """RAM with a deep backlog. What a message costs is seen where as many again come: buffers have their size by then."""
    rows = []
    count = int(10_000_000 * size)
    taken = _memory(repeat, count, 100, "table")
    full, peak, growth = (taken[name] / 1e6 for name in ("full", "peak", "growth"))
    rows.append(
        Row(
            f"memory with {count:,} x 100 B waiting",
            f"{full:.0f} MB over the empty process, peak {peak:.0f} MB; {growth:+.1f} MB with as many again",
            "at most 100 MB, flat",
            peak <= 100 and growth <= 5,
            {"warren, waiting (MB)": full, "warren, peak (MB)": peak, "warren, twice as many (MB)": full + growth},
        )
    )
    count = int(1_000_000 * size)
    for index, target, most in (("table", "at most 64 B a message", 64), ("lmdb", "flat", 8)):
        taken = _memory(repeat, count, 5000, index)
        growth = taken["growth"] / count
        rows.append(
            Row(
                f"memory with {count:,} x 5 KB waiting, {index} index",
                f"{growth:.1f} B a message; {taken['full'] / 1e6:.0f} MB over the empty process with all buffers",
                target,
                growth <= most,
                {
                    "warren, waiting (MB)": taken["full"] / 1e6,
                    "warren, twice as many (MB)": (taken["full"] + taken["growth"]) / 1e6,
                },
                "RssAnon; LMDB's pages are the page cache's" if index == "lmdb" else "",
            )
        )
    return rows


def backlog(repeat: int, size: float) -> list[Row]:
    """Cost per message at a deep backlog against a short one."""
    deep, short, step = int(10_000_000 * size), int(100_000 * size), 400_000

    def run(depth: int) -> tuple[float, float]:
        with scratch() as path, warren.open(path, durability="os") as store:
            queue = store.queue("bench")
            bodies = [BODY] * BATCH
            for _ in range(depth // BATCH):
                queue.publish_many(bodies)
            _settled(store)
            begin = time.perf_counter()
            for _ in range(step // BATCH):
                queue.publish_many(bodies)
            _settled(store)
            publishing = (time.perf_counter() - begin) / step
            begin = time.perf_counter()
            for _ in range(step // BATCH):
                queue.ack_many(queue.get_many(BATCH))
            _settled(store)
            return publishing, (time.perf_counter() - begin) / step

    costs: dict[str, list[float]] = {}
    for number in range(repeat):
        for name, depth in (("100 k", short), ("10 M", deep)):
            publishing, draining = run(depth)
            costs.setdefault(f"warren, publish at {name} (us)", []).append(publishing * 1e6)
            costs.setdefault(f"warren, drain at {name} (us)", []).append(draining * 1e6)
            print(f"    {number + 1}/{repeat} {name}: {publishing * 1e6:.2f}, {draining * 1e6:.2f} us", flush=True)
    mid = {name: median(values) for name, values in costs.items()}
    publish = mid["warren, publish at 10 M (us)"] / mid["warren, publish at 100 k (us)"]
    drain = mid["warren, drain at 10 M (us)"] / mid["warren, drain at 100 k (us)"]
    holds = publish <= 1.2 and drain <= 1.2
    figure = f"publishing {publish:.2f} x, draining {drain:.2f} x"
    return [Row(f"cost per message at a backlog of {deep:,} against {short:,}", figure, "within 1.2 x", holds, mid)]


_FILL = """
import sys, os, warren
path, count, body, clean = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "clean"
store = warren.open(path, durability="os")
queue = store.queue("bench")
batch = max(1, min(1000, 4_000_000 // body))
for _ in range(count // batch):
    queue.publish_many([b"x" * body] * batch)
store.sync()
if clean:
    store.close()
print("{}", flush=True)
os._exit(0)
"""

_OPEN = """
import sys, json, os, time
import warren
begin = time.perf_counter()
store = warren.open(sys.argv[1], durability="os")
seconds = time.perf_counter() - begin
print(json.dumps({"seconds": seconds, "count": len(store.queue("bench"))}), flush=True)
if sys.argv[2] == "clean":
    store.close()
os._exit(0)
"""


def recovery(repeat: int, size: float) -> list[Row]:
    """Starts after a crash, and after a clean stop."""
    rows = []
    count = int(10_000_000 * size)
    with scratch() as path:
        in_child(_FILL, path, str(count), "100", "dirty")
        seconds = median([in_child(_OPEN, path, "dirty")["seconds"] for _ in range(repeat)])
        found = in_child(_OPEN, path, "clean")
        assert found["count"] == count, found
        rate = count / seconds
        rows.append(
            Row(
                f"dirty recovery of {count:,} x 100 B",
                f"{seconds:.2f} s, {rate / 1e6:.1f} M messages/s",
                "at least 2 M messages/s",
                rate >= 2e6,
                {"warren, M messages/s": rate / 1e6},
            )
        )
        clean = median([in_child(_OPEN, path, "clean")["seconds"] for _ in range(repeat)])
        rows.append(
            Row(
                f"clean start of {count:,}",
                f"{clean:.2f} s",
                "under 1 s",
                clean < 1,
                {"warren, clean start (s)": clean},
            )
        )
    bodies = int(20_000_000_000 * size / 65536)
    with scratch() as path:
        in_child(_FILL, path, str(bodies), "65536", "dirty")
        seconds = median([in_child(_OPEN, path, "dirty")["seconds"] for _ in range(repeat)])
        rows.append(
            Row(
                f"dirty recovery of {bodies * 65536 / 1e9:.1f} GB of 64 KB bodies",
                f"{seconds:.2f} s",
                "under 10 s",
                seconds < 10,
                {"warren, dirty start, large bodies (s)": seconds},
            )
        )
    return rows


def disk_written(repeat: int, size: float) -> list[Row]:
    """Bytes written for a message that is acked before the checkpoint."""
    count = _files_for(int(4_400_000 * size))
    with scratch() as path, warren.open(path, durability="os") as store:
        queue = store.queue("bench")
        before = _written()
        for _ in range(count // BATCH):
            queue.publish_many([BODY] * BATCH)
            queue.ack_many(queue.get_many(BATCH))
        _settled(store)
        written = (_written() - before) / count
        stored = 4 + 15 + len(BODY)
    ratio = written / stored
    figure = f"{written:.0f} B, {ratio:.2f} x its stored size of {stored} B"
    values = {"warren, written (B)": written, "stored (B)": float(stored)}
    return [
        Row("disk written per 100 B message acked before the checkpoint", figure, "at most 2.5 x", ratio <= 2.5, values)
    ]


def _written() -> int:
    """Bytes that this process has handed to write calls."""
    with open("/proc/self/io") as counters:
        return next(int(line.split()[1]) for line in counters if line.startswith("wchar"))


ROWS: dict[str, Callable[[int, float], list[Row]]] = {
    "batch": batch,
    "single": single,
    "sqlite": sqlite,
    "group": group_commit,
    "queues": many_queues,
    "memory": memory,
    "backlog": backlog,
    "recovery": recovery,
    "written": disk_written,
}
