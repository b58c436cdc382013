"""A thread that a signal calls away, wherever it is in a commit, leaves a store that works and nobody who waits for ever."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from tests.small_engine import fetch, open_engine, publish
from warren.errors import StoreFailedError
from warren.kernel.gates import Gate
from warren.storage import committer as committing
from warren.storage.disk import Disk, DiskFile
from warren.storage.vhost_store import StoredQueue, VhostStore

pytestmark = pytest.mark.skipif(
    not committing.__file__.endswith(".py"), reason="compiled code looks for signals in fewer places, and shows none"
)


class Called(KeyboardInterrupt):
    """Away, by Ctrl-C."""


class HookedFile(DiskFile):
    before: Callable[[], None] | None = None
    after: Callable[[], None] | None = None

    def pwrite_and_sync(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        before, HookedFile.before = HookedFile.before, None
        if before is not None:
            before()
        super().pwrite_and_sync(data, offset)
        after, HookedFile.after = HookedFile.after, None
        if after is not None:
            after()


class HookedDisk(Disk):
    def create(self, path: str) -> DiskFile:
        return HookedFile(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))


@pytest.fixture(autouse=True)
def no_hooks() -> Iterator[None]:
    yield
    HookedFile.before = HookedFile.after = None


def call_away() -> None:
    raise Called


def opened(root: Any) -> tuple[VhostStore, StoredQueue]:
    store = open_engine(str(root), HookedDisk(), reserve_ahead=100_000, ram_target=10_000)
    queue = store.declare("q")
    publish(store, queue, 1)
    store.sync()
    return store, queue


def finishes(call: Callable[[], None]) -> bool:
    """In a thread of its own, in time, and without an error."""
    done = []

    def run() -> None:
        call()
        done.append(True)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    return bool(done)


def found_after_a_restart(store: VhostStore, root: Any) -> int:
    store.abandon()
    again = open_engine(str(root))
    count = len(again.get("q").backing)
    again.abandon()
    return count


@pytest.mark.parametrize("when", ["before", "after"])
def test_ctrl_c_during_a_sync_is_raised_and_the_next_sync_makes_the_same_commit_safe(tmp_path, when):
    store, queue = opened(tmp_path)
    publish(store, queue, 3)
    setattr(HookedFile, when, call_away)
    with pytest.raises(Called):
        store.sync()
    assert store.committer.failed is None
    assert store.journal.dirty, "nobody was told that it is safe"
    publish(store, queue, 1)
    store.sync()
    assert not store.journal.dirty
    assert fetch(queue, 9) == [0, 1, 2, 3, 4]
    assert found_after_a_restart(store, tmp_path) == 5


def test_those_who_waited_for_a_leader_that_was_called_away_are_led_by_one_of_them(tmp_path):
    store, queue = opened(tmp_path)
    publish(store, queue, 1)
    threads = [threading.Thread(target=store.sync, daemon=True) for _ in range(4)]

    def gather() -> None:
        for thread in threads:
            thread.start()
        while len(store.committer._waiters) < len(threads):
            pass
        raise Called

    HookedFile.after = gather
    with pytest.raises(Called):
        store.sync()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert not store.journal.dirty
    assert store.committer.failed is None
    store.abandon()


def test_ctrl_c_behind_a_write_that_failed_does_not_make_it_good(tmp_path, monkeypatch):
    """The signal may come before anybody has looked at the error."""
    store, queue = opened(tmp_path)
    publish(store, queue, 1)

    def fail() -> None:
        raise OSError(errno.EIO, "a bad sector")

    HookedFile.before = fail
    with monkeypatch.context() as patch:
        patch.setattr(store.committer, "fail", lambda error: call_away())
        with pytest.raises(Called):
            store.sync()
    with pytest.raises(StoreFailedError, match="a bad sector"):
        store.sync()
    store.abandon()


def test_ctrl_c_in_the_middle_of_the_end_of_a_commit_is_raised_and_the_store_has_failed(tmp_path):
    store, queue = opened(tmp_path)
    publish(store, queue, 1)
    store.journal.after(call_away)
    with pytest.raises(Called):
        store.sync()
    with pytest.raises(StoreFailedError, match="Called"):
        store.sync()
    assert found_after_a_restart(store, tmp_path) == 2


class NotingGate(Gate):
    at_gate: Callable[[], None] | None = None

    def wait(self) -> None:
        at_gate, NotingGate.at_gate = NotingGate.at_gate, None
        if at_gate is not None:
            at_gate()
        super().wait()


class Interruption:
    """Raises at the n-th place of this thread where Python looks for signals: behind calls, and where functions begin."""

    def __init__(self, place: int) -> None:
        self._left = place
        self.came = False
        self.half_way = False  # where memory may be half changed

    def __call__(self, frame: FrameType, event: str, what: Any) -> None:
        if event not in ("call", "c_return"):
            return
        names = set()
        above: FrameType | None = frame
        while above is not None:
            names.add(above.f_code.co_name)
            above = above.f_back
        if names & {"_stand_down", "line_up"}:  # the one has a test of its own, the other is of this one
            return
        self._left -= 1
        if self._left < 0 and not self.came:
            self.came = True
            self.half_way = bool(names & {"_begin", "_end"})
            raise Called

    def during(self, call: Callable[[], None]) -> None:
        sys.setprofile(self)
        try:
            call()
        except Called:
            pass
        finally:
            sys.setprofile(None)


def sync(store: VhostStore) -> None:
    store.committer.sync()


def sync_if_well(store: VhostStore) -> None:
    with contextlib.suppress(StoreFailedError):
        store.sync()


def hold(store: VhostStore) -> None:
    with store.committer.sync_and_hold():
        pass


@pytest.mark.parametrize("how", [sync, hold])
def test_a_leader_may_be_called_away_anywhere(tmp_path, how):
    for place in range(10_000):
        store, queue = opened(tmp_path / str(place))
        publish(store, queue, 1)
        interruption = Interruption(place)
        interruption.during(lambda store=store: how(store))  # type: ignore[misc]
        failed = store.committer.failed is not None
        assert not failed or interruption.half_way, place
        if not failed:
            publish(store, queue, 1)
            assert finishes(store.sync), f"nobody leads, after place {place}"
            assert not store.journal.dirty
        assert store.committer._leader == 0
        store.abandon()
        if not interruption.came:
            break
    assert place > 10, "there were no places"


@pytest.mark.parametrize("how", [sync, hold])
def test_a_waiter_may_be_called_away_anywhere(tmp_path, how, monkeypatch):
    """While one leads and another one stands behind it in the line."""
    monkeypatch.setattr(committing, "Gate", NotingGate)
    for place in range(10_000):
        store, queue = opened(tmp_path / str(place))
        committer = store.committer
        entered, release = threading.Event(), threading.Event()

        def be_slow(entered: threading.Event = entered, release: threading.Event = release) -> None:
            entered.set()
            release.wait(10)

        HookedFile.before = be_slow
        publish(store, queue, 1)
        behind = threading.Thread(target=sync_if_well, args=(store,), daemon=True)

        def line_up(
            behind: threading.Thread = behind, release: threading.Event = release, store: VhostStore = store
        ) -> None:
            behind.start()
            while len(store.committer._waiters) < 2:
                pass
            release.set()

        leader = threading.Thread(target=store.sync, daemon=True)
        leader.start()
        assert entered.wait(60)
        publish(store, queue, 1)
        interruption = Interruption(place)
        NotingGate.at_gate = line_up
        interruption.during(lambda store=store: how(store))  # type: ignore[misc]
        NotingGate.at_gate = None
        release.set()
        leader.join(20)
        assert not leader.is_alive(), place
        failed = committer.failed is not None
        assert not failed or interruption.half_way, place
        if behind.ident is not None:
            behind.join(20)
            assert not behind.is_alive(), f"nobody leads, after place {place}"
        if not failed:
            assert finishes(store.sync), place
            assert not store.journal.dirty
        assert committer._leader == 0
        store.abandon()
        if not interruption.came:
            break
    assert place > 10, "there were no places"


def test_who_is_called_away_while_it_stands_down_begins_again(tmp_path, monkeypatch):
    store, queue = opened(tmp_path)
    publish(store, queue, 1)
    calls = []
    hand_on = store.committer._hand_on

    def hand_on_the_third_time(error: Any) -> None:
        calls.append(error)
        if len(calls) < 3:
            raise Called
        hand_on(error)

    monkeypatch.setattr(store.committer, "_hand_on", hand_on_the_third_time)
    with pytest.raises(Called):
        store.sync()
    assert len(calls) == 3
    assert finishes(store.sync)
    store.abandon()


def test_who_holds_the_lock_is_told_so_in_place_of_waiting_for_a_leader_that_needs_it(tmp_path):
    store, queue = opened(tmp_path)
    entered, release = threading.Event(), threading.Event()

    def be_slow() -> None:
        entered.set()
        release.wait(60)

    HookedFile.before = be_slow
    publish(store, queue, 1)
    leader = threading.Thread(target=store.sync, daemon=True)
    leader.start()
    assert entered.wait(60)
    with store.lock:
        publish_entries = len(store.committer._waiters)
        with pytest.raises(RuntimeError, match="holds the engine's lock"):
            store.committer.commit(sync_store=True)
        with pytest.raises(RuntimeError, match="holds the engine's lock"), store.committer.sync_and_hold():
            pass
        assert len(store.committer._waiters) == publish_entries == 0
    release.set()
    leader.join(20)
    assert not leader.is_alive()
    with store.lock:
        store.committer.sync()  # nobody leads: it does not have to wait
    store.abandon()


def test_a_signal_handler_that_syncs_while_its_thread_leads_is_told_so(tmp_path):
    store, queue = opened(tmp_path)
    publish(store, queue, 1)
    told = []

    def handler() -> None:
        with pytest.raises(RuntimeError, match="is running a commit"):
            store.sync()
        told.append(True)

    HookedFile.before = handler
    store.sync()
    assert told
    assert not store.journal.dirty
    assert finishes(store.sync)
    store.abandon()


def test_a_sync_of_bodies_that_was_called_away_is_not_taken_for_done(tmp_path):
    store, _ = opened(tmp_path)
    committer = store.committer
    synced = []
    run = committer._run
    first = [True]

    def run_and_note(batch: Any) -> None:
        if first.pop() if first else False:
            raise Called
        run(batch)
        synced.append(batch.store_syncs)

    committer._run = run_and_note  # type: ignore[method-assign]
    with pytest.raises(Called):
        committer.commit(sync_store=True)
    assert committer._store_synced == 0
    committer.sync()
    assert synced[0] == committer._store_synced == 1
    store.abandon()
