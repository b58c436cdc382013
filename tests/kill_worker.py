"""The victim of `test_kill.py`: publishes and consumes for ever, and tells its parent what was promised.

A line `p <seq> <body>` follows the sync of a publish, a line `t <seq>` goes before an ack, a line `a <seq>` follows its sync. Lines go to a pipe in one write
each, so what the parent has read whole had happened before the kill.
"""

from __future__ import annotations

import os
import random
import sys
import threading

import warren
from warren.storage.settings import EngineSettings

SETTINGS = EngineSettings(
    segment_entries=64, journal_file_bytes=64 * 1024, embed_below=512, store_file_bytes=64 * 1024, carry_below=2048
)


def main(path: str, durability: str, seed: int) -> None:
    store = warren.open(path, durability=durability, settings=SETTINGS)
    queue = store.queue("kill")
    say = threading.Lock()

    def tell(lines: list[str]) -> None:
        with say:
            os.write(1, "".join(lines).encode())

    def publish(number: int) -> None:
        rng = random.Random(seed * 1000 + number)
        while True:
            bodies = [
                f"{seed}.{number}.{rng.getrandbits(64):x}".encode().ljust(rng.choice((20, 100, 700)), b".")
                for _ in range(rng.randint(1, 20))
            ]
            seqs = queue.publish_many(bodies)
            store.sync()
            tell([f"p {seq} {body.decode()}\n" for seq, body in zip(seqs, bodies, strict=True)])

    def consume() -> None:
        rng = random.Random(seed)
        while True:
            messages = queue.get_many(rng.randint(1, 15), timeout=1)
            if not messages:
                continue
            if rng.random() < 0.1:
                queue.nack_many(messages)
                continue
            keep = [message for message in messages if rng.random() < 0.9]
            tell([f"t {message.seq_id}\n" for message in keep])
            queue.ack_many(keep)
            store.sync()
            tell([f"a {message.seq_id}\n" for message in keep])

    threads = [threading.Thread(target=publish, args=(number,), daemon=True) for number in range(2)]
    threads.append(threading.Thread(target=consume, daemon=True))
    tell(["ready\n"])
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
