"""A process that publishes and consumes in threads until it is killed, and says what it was promised.

    python -m tests.kill_worker <directory> <durability> <seed>

It waits for a line on stdin, opens the store, works, and writes one line for each promise to stdout, in one write each:

    P queue seq label      about to publish: may be there
    C queue seq            confirmed: must be there
    a queue seq label      about to be acked: may be gone
    A queue seq            the ack is synced: must be gone
    T label ...            about to commit a transaction of these labels: all or none
    O                      the store is open
"""

from __future__ import annotations

import dataclasses
import os
import random
import sys
import threading
import time
import zlib

from warren.kernel.entry import PERSISTENT, Entry, make_entries
from warren.storage.settings import EngineSettings
from warren.storage.vhost_store import StoredQueue, VhostStore

SETTINGS = EngineSettings(
    segment_entries=64,
    journal_file_bytes=32 * 1024,
    store_file_bytes=64 * 1024,
    carry_below=2048,
    embed_below=600,
    ram_target=50,
    ram_slack=0,
    io_batch=16,
    load_entries=32,
    reserve_ahead=64,
    reserve_bytes=64 * 1024,
    commit_interval=0.002,
)
MOST_READY = 300  # publishers wait for consumers above that: the parent reads everything, every time
QUEUES = {"plain": {}, "levels": {"x-max-priority": 2}, "target": {}}


def body_of(label: str, size: int) -> bytes:
    """A content that tells whether it is whole."""
    head = f"{label} {size} "
    filling = (label * (size // len(label) + 1))[:size]
    text = (head + filling).encode()
    return text + b" %08x" % zlib.crc32(text)


def label_in(body: bytes) -> str | None:
    """The label, or None where the content is not what `body_of` made."""
    text, _, checksum = body.rpartition(b" ")
    if checksum != b"%08x" % zlib.crc32(text):
        return None
    return text.split(b" ", 1)[0].decode()


def open_store(directory: str, durability: str, **options: object) -> VhostStore:
    settings = dataclasses.replace(SETTINGS, **options) if options else SETTINGS
    return VhostStore(directory, durability=durability, settings=settings, debug=True)


class Worker:
    def __init__(self, store: VhostStore, seed: int) -> None:
        self.store = store
        self.seed = seed
        self.queues = {name: store.declare(name, arguments=arguments) for name, arguments in QUEUES.items()}

    def run(self) -> None:
        jobs = [self.publish, self.publish, self.consume, self.consume, self.move]
        for number, job in enumerate(jobs):
            threading.Thread(target=self.repeat, args=(job, number), daemon=True).start()
        threading.Event().wait()

    def repeat(self, job, number: int) -> None:
        chance = random.Random(f"{self.seed}/{number}")
        count = 0
        try:
            while True:
                count += 1
                job(chance, f"{self.seed}.{number}.{count}")
        except BaseException as error:
            say(f"! {type(error).__name__}: {error}".replace("\n", " "))
            raise

    def publish(self, chance: random.Random, name: str) -> None:
        queue = self.queues[chance.choice(["plain", "plain", "levels"])]
        if len(queue.backing) > MOST_READY:
            time.sleep(0.001)
            return
        count = chance.choice([1, 1, 2, 5, 20])
        size = chance.choice([10, 50, 200, 700, 3000])
        persistent = chance.random() < 0.8
        labels = [f"{name}.{i}" for i in range(count)]
        bodies = [body_of(label, size) for label in labels]
        entries, _ = make_entries(bodies, b"", 0, PERSISTENT if persistent else 0, 0, 0)
        level = chance.randrange(3)
        with self.reserved(queue, count):
            first = queue.seqs.take(count)
            for seq, entry in enumerate(entries, first):
                entry.seq = seq
                entry.level = level
            if persistent:
                say(*(f"P {queue.name} {entry.seq} {label}" for entry, label in zip(entries, labels, strict=True)))
            queue.backing.publish(entries)
        self.store.wake()
        if chance.random() < 0.7:
            self.store.sync()
            if persistent:
                say(*(f"C {queue.name} {entry.seq}" for entry in entries))

    def reserved(self, queue: StoredQueue, count: int):
        """The lock, with seq_ids to take."""
        while True:
            self.store.reserve(queue, count)
            self.store.lock.acquire()
            if queue.seqs.available(count):
                return _Release(self.store.lock)
            self.store.lock.release()

    def consume(self, chance: random.Random, name: str) -> None:
        queue = self.queues[chance.choice(["plain", "levels", "target"])]
        with self.store.lock:
            entries = queue.backing.fetch(chance.choice([1, 3, 10, 40]))
            for entry in entries:
                if label_in(entry.body) is None:
                    say(f"! {queue.name} {entry.seq} was served with a wrong content")
        if not entries:
            time.sleep(0.001)
            return
        seqs = [entry.seq for entry in entries]
        if chance.random() < 0.2:
            with self.store.lock:
                queue.backing.requeue(seqs)
            return
        say(*(f"a {queue.name} {entry.seq} {label_in(entry.body)}" for entry in entries))
        with self.store.lock:
            queue.backing.ack(seqs)
        if chance.random() < 0.7:
            self.store.sync()
            say(*(f"A {queue.name} {seq}" for seq in seqs))

    def move(self, chance: random.Random, name: str) -> None:
        """From one queue to another, in one transaction."""
        source, target = self.queues["plain"], self.queues["target"]
        with self.store.lock:
            entries = source.backing.fetch(chance.choice([1, 2]))
        entries = [entry for entry in entries if entry.flags & PERSISTENT] or entries
        if not entries:
            time.sleep(0.001)
            return
        labels = [f"{name}.t{i}" for i in range(2)]
        new = [Entry(0, b"", body_of(label, chance.choice([30, 800])), PERSISTENT) for label in labels]
        seqs = [entry.seq for entry in entries]
        persistent = [entry.seq for entry in entries if entry.flags & PERSISTENT]
        say(f"T {' '.join(labels)} {' '.join(f'{source.name}:{seq}' for seq in persistent)}")
        moved = self.store.transact([(target, entry) for entry in new], [(source, seqs)])
        lines = [
            f"P {target.name} {seq} {label}\nC {target.name} {seq}" for seq, label in zip(moved, labels, strict=True)
        ]
        say(*lines, *(f"A {source.name} {seq}" for seq in seqs))


class _Release:
    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def say(*lines: str) -> None:
    """In one write, so that no line is half."""
    if lines:
        os.write(1, ("\n".join(lines) + "\n").encode())


def main() -> None:
    directory, durability, seed = sys.argv[1:]
    sys.stdin.readline()
    store = open_store(directory, durability)
    say("O")
    Worker(store, int(seed)).run()


if __name__ == "__main__":
    main()
