"""Gates let their threads through, one after the other, and nobody is forgotten; group commit stands on them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading

import pytest

import warren
from warren.kernel.gates import DiskThread, Gate, open_gates, write_and_sync


def through(gates: list[Gate], passed: list[Gate]) -> list[threading.Thread]:
    """Threads that wait at a gate each and write down that they are through."""

    def walk(gate: Gate) -> None:
        gate.wait()
        passed.append(gate)

    threads = [threading.Thread(target=walk, args=(gate,)) for gate in gates]
    for thread in threads:
        thread.start()
    return threads


def finished(threads: list[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(60)
    return not any(thread.is_alive() for thread in threads)


def test_a_gate_lets_its_thread_through_and_no_other():
    gates = [Gate() for _ in range(5)]
    passed: list[Gate] = []
    threads = through(gates, passed)
    open_gates(gates[:2])
    assert finished(threads[:2])
    assert set(passed) == set(gates[:2])
    open_gates(gates[2:4], first=gates[4])
    assert finished(threads)


def test_nobody_waits_for_a_thread_that_went_away_with_its_turn():
    """The one that is through does something else, and does not come back to a gate."""
    go = threading.Event()
    busy, gate = Gate(), Gate()

    def walk_and_stay() -> None:
        busy.wait()
        go.wait(60)

    stays = threading.Thread(target=walk_and_stay)
    stays.start()
    passed: list[Gate] = []
    threads = through([gate], passed)
    open_gates([busy, gate])
    assert finished(threads)
    assert stays.is_alive()
    go.set()
    assert finished([stays])


def test_a_gate_whose_thread_never_came_holds_up_nobody():
    """Ctrl-C may call a thread away when others know its gate already."""
    lonely, gate = Gate(), Gate()
    passed: list[Gate] = []
    threads = through([gate], passed)
    open_gates([lonely, gate])
    assert not passed
    del lonely
    assert finished(threads)


def test_a_gate_is_opened_once():
    gate = Gate()
    open_gates([gate, gate], first=gate)
    gate.wait()
    following = Gate()
    open_gates([following])
    following.wait()


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
real = disk.DiskFile.pwrite_and_sync

def slow(self, data, offset):
    if threading.current_thread().name == "leader" and not go.is_set():
        entered.set()
        go.wait()
    real(self, data, offset)

disk.DiskFile.pwrite_and_sync = slow
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


_IN_LINE = """
import os, signal, threading
from warren.kernel.gates import Gate, open_gates

# Main waits in the middle of a line; others come and go at full speed; a signal takes it out, again and again.
class Out(Exception):
    pass

def leave(*_):
    raise Out

signal.signal(signal.SIGUSR1, leave)
out = through = 0
stop = threading.Event()

def churn():
    while not stop.is_set():
        gate = Gate()
        waiting.append(gate)
        gate.wait()

def opener():
    while not stop.is_set() or waiting:
        batch = [waiting.pop() for _ in range(min(len(waiting), 5))]
        open_gates(batch)

waiting = []
threads = [threading.Thread(target=churn) for _ in range(6)]
opens = threading.Thread(target=opener)
for thread in [*threads, opens]:
    thread.start()
for n in range(400):
    gate = Gate()
    timer = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGUSR1))
    try:
        timer.start()
        if n % 2:
            waiting.insert(0, gate)
        gate.wait()
        through += 1
        while True:
            signal.pause()
    except Out:
        out += 1
        if gate in waiting:
            waiting.remove(gate)
    timer.join()
stop.set()
for thread in [*threads, opens]:
    thread.join(60)
print(out, any(thread.is_alive() for thread in [*threads, opens]))
"""


def test_who_is_called_away_by_a_signal_holds_up_nobody():
    done = subprocess.run([sys.executable, "-c", _IN_LINE], capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.split() == ["400", "False"], done.stderr


def test_the_child_of_a_fork_starts_with_an_empty_line():
    script = """
import os, threading
from warren.kernel.gates import Gate, open_gates
shut = [Gate() for _ in range(8)]
for gate in shut:
    threading.Thread(target=gate.wait, daemon=True).start()
child = os.fork()
if not child:
    gate = Gate()
    open_gates([gate])
    gate.wait()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
open_gates(shut)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["7"], done.stderr


def test_a_write_that_cannot_be_done_is_an_error_and_gives_the_turn_on(tmp_path):
    path = tmp_path / "file"
    path.touch()
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            write_and_sync(fd, b"x", 0)
    finally:
        os.close(fd)
    fd = os.open(path, os.O_RDWR)
    try:
        write_and_sync(fd, memoryview(b"hello"), 3)
    finally:
        os.close(fd)
    assert path.read_bytes() == b"\0\0\0hello"
    gate = Gate()
    open_gates([gate])
    gate.wait()


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


# ---- the thread for the disk ----


@pytest.fixture
def block(tmp_path):
    """A file to write to, and the thread that writes."""
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    disk = DiskThread()
    yield disk, fd
    disk.stop()
    os.close(fd)


def test_the_deputy_is_called_when_nobody_collects(block):
    disk, fd = block
    for number in range(50):
        deputy = Gate()
        disk.submit(fd, b"%4d" % number, 4 * number, deputy)
        deputy.wait()
        assert disk.is_written()
        assert disk.collect() == 0
        assert not disk.is_written()
    assert os.pread(fd, 1000, 0) == b"".join(b"%4d" % number for number in range(50))


def test_what_failed_is_told_to_who_collects(block, tmp_path):
    disk, _ = block
    closed = os.open(tmp_path / "other", os.O_RDONLY | os.O_CREAT)
    os.close(closed)
    deputy = Gate()
    disk.submit(closed, b"x", 0, deputy)
    deputy.wait()
    assert disk.collect() == errno.EBADF


def test_another_deputy_is_called_in_the_place_of_one_that_went_away(block):
    disk, fd = block
    for _ in range(200):
        disk.submit(fd, b"x", 0, Gate())
        other = Gate()
        if disk.appoint(other):
            other.wait()
        assert disk.is_written()
        assert disk.collect() == 0


def test_a_deputy_that_is_gone_when_it_would_be_called_is_nobody(block):
    disk, fd = block
    for _ in range(200):
        gate = Gate()
        disk.submit(fd, b"x", 0, gate)
        while not disk.is_written():
            pass
        assert disk.collect() == 0
        del gate


def test_a_thread_that_is_stopped_finishes_its_block(tmp_path):
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        for number in range(20):
            disk = DiskThread()
            disk.submit(fd, b"%4d" % number, 4 * number, Gate())
            disk.stop()
            assert os.pread(fd, 4, 4 * number) == b"%4d" % number
    finally:
        os.close(fd)


def test_the_deputy_of_a_thread_that_is_stopped_is_called_also_while_somebody_has_the_turn(tmp_path):
    """Who has the turn may be the one that stops it, and never pass by."""
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    data = bytes(4 << 20)
    try:
        for _ in range(5):
            turn, deputy = Gate(), Gate()
            open_gates([turn])
            turn.wait()  # from here on this thread has the turn
            disk = DiskThread()
            waiting = threading.Thread(target=deputy.wait, daemon=True)
            disk.submit(fd, data, 0, deputy)
            waiting.start()
            disk.stop()
            waiting.join(60)
            assert not waiting.is_alive()
    finally:
        os.close(fd)


_KEEPER = """
import contextlib, os, sys, time
from warren.kernel.gates import DiskThread, Gate

def threads(name):
    found = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has just ended
            if open(f"/proc/self/task/{task}/comm").read() == name + "\\n":
                found.append(int(task))
    return found

def write(disk, fd, times):
    # 1 as soon as there is a keeper; 0: there was none
    for number in range(times):
        deputy = Gate()
        disk.submit(fd, b"%4d" % number, 4 * number, deputy)
        deputy.wait()
        assert disk.collect() == 0
        if threads("warren-keeper"):
            return 1
    return 0

allowed = {int(processor) for processor in sys.argv[2].split(",")}
os.sched_setaffinity(0, allowed)
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
disk = DiskThread()
assert write(disk, fd, 10) == 0
assert threads("warren-disk")
for _ in range(2):  # what was started again has a keeper again
    print(write(disk, fd, 1000))
    assert os.sched_getaffinity(0) == allowed, "a thread of the program was bound"
    child = os.fork()
    if child == 0:
        assert not threads("warren-keeper")
        os._exit(write(disk, fd, 1000))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(allowed) - 1
    disk.stop()
    assert not threads("warren-disk")
    deadline = time.monotonic() + 60
    while threads("warren-keeper"):  # it goes when there was nothing to do for a second
        assert time.monotonic() < deadline
        time.sleep(0.05)
"""


@pytest.mark.parametrize("processors", [1, 2])
def test_of_two_processors_the_disk_s_one_is_kept_and_no_thread_of_the_program_is_bound(tmp_path, processors):
    there = sorted(os.sched_getaffinity(0))
    if len(there) < processors:
        pytest.skip("needs two processors")
    command = [sys.executable, "-c", _KEEPER, tmp_path / "file", ",".join(map(str, there[:processors]))]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == [str(processors - 1)] * 2


_CHANGED = """
import contextlib, os, sys
from warren.kernel.gates import DiskThread, Gate

fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
disk = DiskThread()
for number in range(200):
    deputy = Gate()
    disk.submit(fd, b"x", number, deputy)
    deputy.wait()
    assert disk.collect() == 0
    if number == int(sys.argv[2]):
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # it has just ended
                os.sched_setaffinity(int(task), {int(sys.argv[3])})
for task in os.listdir("/proc/self/task"):
    with contextlib.suppress(OSError):
        name = open(f"/proc/self/task/{task}/comm").read()
        assert name == "warren-keeper\\n" or os.sched_getaffinity(int(task)) == {int(sys.argv[3])}, name
"""


@pytest.mark.parametrize("after", [5, 100])
def test_a_processor_that_is_taken_away_from_the_disk_s_thread_stays_away(tmp_path, after):
    for processor in sorted(os.sched_getaffinity(0))[:2]:
        command = [sys.executable, "-c", _CHANGED, tmp_path / "file", str(after), str(processor)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert ran.returncode == 0, ran.stderr


def test_the_child_of_a_fork_starts_a_thread_of_its_own(block):
    disk, fd = block
    deputy = Gate()
    disk.submit(fd, b"1", 0, deputy)
    deputy.wait()
    disk.collect()
    child = os.fork()
    if child == 0:
        deputy = Gate()
        disk.submit(fd, b"2", 1, deputy)
        deputy.wait()
        os._exit(disk.collect())
    assert os.waitpid(child, 0)[1] == 0
    assert os.pread(fd, 10, 0) == b"12"
