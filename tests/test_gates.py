"""Gates let as many threads through as they were opened for; group commit stands on them."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

import warren
from warren.kernel.gates import Gate, open_gates


def test_each_opening_lets_one_thread_through():
    gate = Gate()
    passed = threading.Semaphore(0)

    def walk() -> None:
        gate.wait()
        passed.release()

    threads = [threading.Thread(target=walk) for _ in range(3)]
    for thread in threads:
        thread.start()
    open_gates([gate, gate])
    assert passed.acquire(timeout=60)
    assert passed.acquire(timeout=60)
    assert not passed.acquire(blocking=False)
    open_gates([gate])
    for thread in threads:
        thread.join()


def test_a_gate_that_was_opened_before_does_not_hold_anybody():
    gate = Gate()
    open_gates([gate])
    gate.wait()
    open_gates([])


def test_only_gates_can_be_opened():
    with pytest.raises(TypeError):
        open_gates([object()])  # type: ignore[list-item]


_INTERRUPTED = """
import os, signal, sys, threading
import warren
from warren.storage import disk

entered, go = threading.Event(), threading.Event()
real = disk.DiskFile.sync

def slow(self):
    if threading.current_thread().name == "leader" and not go.is_set():
        entered.set()
        go.wait()
    real(self)

disk.DiskFile.sync = slow
with warren.open(sys.argv[1], durability="fsync") as store:
    queue = store.queue("q")
    queue.publish(b"first")
    leader = threading.Thread(target=store.sync, name="leader")
    leader.start()
    entered.wait()
    queue.publish(b"second")
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        store.sync()  # waits at a gate: the leader's sync goes on
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    go.set()
    leader.join()
    store.sync()
    print(store.engine.journal.dirty, len(queue))
"""


def test_ctrl_c_while_waiting_for_a_commit_leaves_a_store_that_works(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split() == ["interrupted", "False", "2"], done.stderr
    assert done.returncode == 0
    with warren.open(tmp_path) as store:
        assert [message.body for message in store.queue("q").get_many(5)] == [b"first", b"second"]


def test_sixty_four_threads_are_all_told(tmp_path):
    with warren.open(tmp_path) as store:
        queue = store.queue("q")

        def work() -> None:
            for _ in range(20):
                queue.publish(b"x")
                store.sync()

        threads = [threading.Thread(target=work) for _ in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads)
        assert len(queue) == 64 * 20
        assert store.engine.committer.commits < 64 * 20
