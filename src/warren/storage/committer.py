"""Group commit: whoever waits for safety first commits for all who came meanwhile.

A thread that calls `sync` becomes the leader if there is none, and runs one commit: message store first, then journal, so
that a journal record never refers to a body that is not there. Those who call meanwhile wait, each at a gate of its
own; what they appended forms the next commit, led by one of them. So commits never overlap, and a thread that is alone
pays no hand-over.

Where many wait, nobody leads: the commit is given to a thread for the disk, and whoever of the crowd passes by when it is
written collects it, tells the others and gives the next (`DiskThread`, docs/decisions/0011). One of those who wait is the
deputy: it is woken to collect if nobody passes by. What is more than a write and a sync of the journal's file is led.

When the disk is full: the reserve is given up, so that the commit under way, and acks after it, have room; publishing is
refused (`full`) until the reserve could be taken again. Nothing is lost and nothing has to be restarted: a commit that
could not be written is kept and tried again, at the same place.

When a write or a sync fails otherwise, what the disk holds is unknown: the store has failed, nothing of that batch is
ever confirmed, and every call raises StoreFailedError until the store is opened again, through recovery.

When a thread is called away, by Ctrl-C or another signal whose handler raises: it stands down, and somebody else leads in
its place. A commit that it had begun is kept and run again, at the same place, by whoever leads next. Only where it was
called away in the middle of beginning or ending one, which is work in memory, has the store failed. Python looks for
signals at calls and in loops, so plain assignments, one behind the other, happen all or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator

from warren.errors import DiskFullError, StoreClosedError, StoreFailedError, WarrenError
from warren.kernel.gates import DiskThread, Gate, open_gates
from warren.storage.disk import Disk
from warren.storage.journal import Journal, JournalCommit
from warren.storage.message_store import Commit as StoreCommit
from warren.storage.message_store import MessageStore

FULL = (errno.ENOSPC, errno.EDQUOT)
_NEVER = 1 << 64  # above every LSN
_CROWD = 4  # threads that wait for one commit, from which on the thread for the disk does the next one
_THREAD = -1  # in the place of a leader: the thread for the disk has the commit
_LEADS = "this thread is running a commit: it cannot wait for another one (is this a signal handler?)"
_HAS_LOCK = "this thread holds the engine's lock, which the commit under way needs to end: it cannot wait for it"


class _Waiter:
    """A call that waits. Its gate is opened when it is done, or its thread has the lead, or shall collect."""

    __slots__ = ("done", "error", "gate", "lsn", "thread")

    def __init__(self, lsn: int, thread: int) -> None:
        self.lsn = lsn
        self.thread = thread
        self.gate = Gate()
        self.done = False
        self.error: WarrenError | None = None


class _Batch:
    """What one commit takes to the disk."""

    __slots__ = ("_failed", "journal", "store", "store_syncs")

    def __init__(self, store: StoreCommit | None, journal: JournalCommit | None, store_syncs: int) -> None:
        self.store = store
        self.journal = journal
        self.store_syncs = store_syncs  # as many were asked for when it began
        self._failed: OSError | None = None

    def run(self) -> None:
        """May be called again, unless it is poisoned; then it raises the same."""
        if self._failed is not None:
            raise self._failed
        try:
            if self.store is not None:
                self.store.run()
            if self.journal is not None:
                self.journal.run()
        except OSError as error:
            if error.errno not in FULL:  # noted before anything can call this thread away: no other may run it again
                self._failed = error
            raise

    @property
    def poisoned(self) -> bool:
        """What the disk holds is unknown: an error that is none of room, or of a sync of the message store. (For want of
        room the journal's block is written anew by the next `run`, whatever became of it.)"""
        return self._failed is not None or (self.store is not None and self.store.poisoned)

    def done(self) -> None:
        if self.store is not None:
            self.store.done()
        if self.journal is not None:
            self.journal.done()


class Committer:
    def __init__(
        self, lock: threading.RLock, disk: Disk, root: str, journal: Journal, store: MessageStore, reserve_bytes: int
    ) -> None:
        self._lock = lock
        self._disk = disk
        self._root = root
        self._journal = journal
        self._store = store
        self._reserve_path = os.path.join(root, "journal", "RESERVE")
        self._reserve_bytes = reserve_bytes
        self._leader = 0  # the thread that leads; 0: none
        self._waiters: list[_Waiter] = []
        self._disk_thread = DiskThread()
        self._deputy: _Waiter | None = None  # is woken if nobody collects what the thread has written
        self._to_open: list[tuple[list[Gate], Gate | None]] = []  # once the lock is free: they come for it at once
        self._batch: _Batch | None = None  # begun and not done: first in line if nobody leads, as after a full disk
        # Calls that want the message store synced even if commits do not, and as many as got it.
        self._store_syncs = self._store_synced = 0
        self.failed: WarrenError | None = None
        self.full = False
        self.full_changed: Callable[[bool], None] = lambda is_full: None  # told with the lock, by any thread, in order
        self.commits = 0

    # -- state -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises what made the store unusable. Requires: the lock."""
        if self.failed is not None:
            raise type(self.failed)(
                *self.failed.args
            ) from self.failed.__cause__  # fresh: a traceback grows when raised

    def check_publish(self) -> None:
        """As `check`, and refuses publishing on a full disk."""
        self.check()
        if self.full:
            raise DiskFullError(
                f"the disk of {self._root} is full: free some room, or consume messages; publishing goes on by itself"
            )

    def fail(self, error: BaseException) -> None:
        with self._lock:
            if self.failed is None:
                failure = StoreFailedError(
                    f"a write to {self._root} failed: {str(error) or type(error).__name__}. What was not synced is unknown. "
                    "Close the store and open it again: it recovers everything that was confirmed"
                )
                failure.__cause__ = error
                self.failed = failure

    def trouble(self, error: OSError) -> WarrenError:
        """What to raise for an error of the disk outside of a commit."""
        if error.errno in FULL:
            self.give_up_reserve()
            return DiskFullError(
                f"the disk of {self._root} is full; nothing is lost. Free some room, or consume messages: what could "
                "not be done now is done later"
            )
        self.fail(error)
        return self.failed or StoreFailedError(str(error))

    def has_room(self, size: int) -> bool:
        """May upkeep write `size` bytes? On a full disk it begins nothing that would end half-way and eat the room of
        acks."""
        return not self.full or self._disk.free_bytes(self._root) >= size

    def close(self) -> None:
        with self._lock:
            if self.failed is None:
                self.failed = StoreClosedError(f"the store {self._root} was closed")
        self._disk_thread.stop()  # its file is about to be closed

    # -- waiting for safety ------------------------------------------------------------------------------------------

    def sync(self, lsn: int | None = None) -> None:
        """Return when everything appended up to `lsn` (default: up to now) is safe. Raises RuntimeError where it would
        wait for ever, because this thread has what the leader needs."""
        me = threading.get_ident()
        if self._leader == me:
            raise RuntimeError(_LEADS)
        waiter: _Waiter | None = None
        try:
            with self._lock:
                if isinstance(self.failed, StoreClosedError) and lsn is not None and self._journal.synced_lsn >= lsn:
                    return  # the last commit before the close had it
                self.check()
                if lsn is None:
                    lsn = self._journal.appended_lsn
                if (
                    self._journal.synced_lsn >= lsn
                    and self._store_synced == self._store_syncs
                    and (self._leader or self._batch is None)
                ):
                    return
                if self._leader:
                    waiter = _Waiter(lsn, me)
                    self._join(waiter)
                else:
                    self._leader = me
            if waiter is not None:
                self._wait(waiter)
            if self._leader == me:
                self._lead()
        except BaseException:
            self._stand_down(me, waiter)
            raise

    @contextlib.contextmanager
    def sync_and_hold(self) -> Iterator[None]:
        """Hold the lock, with everything safe that was appended before. Unlike `sync`, which lets others append meanwhile,
        this commits under the lock: who has to have nothing under way gets there however busy publishers are."""
        me = threading.get_ident()
        if self._leader == me:
            raise RuntimeError(_LEADS)
        waiter: _Waiter | None = None
        try:
            with self._lock:
                self.check()
                if self._leader:
                    waiter = _Waiter(_NEVER, me)
                    self._join(waiter)
                else:
                    self._leader = me
            if waiter is not None:
                self._wait(waiter)
            with self._lock:
                self._lead(until_clean=True)
                yield
        except BaseException:
            self._stand_down(me, waiter)
            raise

    def _join(self, waiter: _Waiter) -> None:
        """To those who wait. Who passes by looks after the thread for the disk. Requires: the lock."""
        self._waiters.append(waiter)
        if self._leader == _THREAD and (self._deputy is None or self._disk_thread.is_written()):
            self._collect_or_be_deputy(waiter)

    def _wait(self, waiter: _Waiter) -> None:
        """Until its commit is done, or it shall lead one."""
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError(_HAS_LOCK)
        while True:
            if self._to_open:
                self._open()
            waiter.gate.wait()
            if waiter.done or self._leader == waiter.thread or self._is_over(waiter):
                break
        if waiter.error is not None:
            raise waiter.error

    def _is_over(self, waiter: _Waiter) -> bool:
        """Of a thread whose gate was opened for no other reason than that it is the deputy: it collects, unless somebody
        was quicker."""
        with self._lock:
            if waiter.done or self._leader == waiter.thread:
                return True
            waiter.gate = Gate()
            if self._leader == _THREAD:
                self._collect_or_be_deputy(waiter)
            return False

    def commit(self, sync_store: bool = False) -> None:
        """Commit what is in the buffer now; with `sync_store`, bodies are synced in `os` durability, too."""
        wanted = 0
        if sync_store:
            with self._lock:
                wanted = self._store_syncs = self._store_syncs + 1
        self.sync()
        while self._store_synced < wanted:  # the commit that this call waited for had begun before
            self.sync()

    def _lead(self, until_clean: bool = False) -> None:
        """Run one commit, or with `until_clean` what it takes, and hand on the lead. Requires: this thread is the leader,
        and whoever calls stands down if this raises."""
        try:
            while True:
                with self._lock:
                    batch, retry = self._begin()
                self._run(batch)
                with self._lock:
                    self._end(batch)
                if not retry and not (until_clean and self._journal.dirty):
                    break
        except WarrenError as failure:
            self._hand_on(failure)
            raise
        except Exception as unexpected:
            self.fail(unexpected)
            error = self.failed
            assert error is not None
            self._hand_on(error)
            raise error from unexpected
        self._hand_on(None)

    def _begin(self) -> tuple[_Batch, bool]:
        """A batch, and whether it was begun before. Requires: the lock."""
        self.check()
        if self._batch is not None:
            self._disk_thread.stop()  # it still has it, where who gave it was called away
            return self._batch, True
        try:
            wanted = self._store_syncs
            store = self._store.begin_commit(True if self._store_synced < wanted else None)
            batch = self._batch = _Batch(store, self._journal.begin(), wanted)
        except BaseException as error:
            if not isinstance(error, WarrenError):  # half of it happened: only recovery helps
                self.fail(error)
            raise
        return batch, False

    def _end(self, batch: _Batch) -> None:
        """Requires: the lock; `batch` was run."""
        try:
            batch.done()
        except BaseException as error:  # half of it happened: it can be neither repeated nor left
            self.fail(error)
            raise
        self._batch = None
        self._store_synced = batch.store_syncs
        self.commits += 1

    def _run(self, batch: _Batch) -> None:
        try:
            batch.run()
        except OSError as error:
            if batch.poisoned:
                self.fail(error)
                raise self.failed or error from error
            self.give_up_reserve()
            self._retry(batch)

    def _retry(self, batch: _Batch) -> None:
        """The same bytes at the same place, with the room that the reserve gave."""
        try:
            batch.run()
        except OSError as error:
            if batch.poisoned:
                self.fail(error)
                raise self.failed or error from error
            raise DiskFullError(
                f"the disk of {self._root} is full and the reserve is used up; nothing is lost, but what was published "
                "last is not safe yet. Free some room and call sync() again"
            ) from error

    def _hand_on(self, error: WarrenError | None, lead: bool = False, held: bool = False) -> None:
        """Those whose commit is done, or with an `error` all, may go; the first of the others leads. Requires: this thread
        is the leader."""
        leader: Gate | None = None
        try:
            with self._lock:
                synced = self._journal.synced_lsn
                done = []
                left = []
                for waiter in self._waiters:
                    waiter.done = error is not None or waiter.lsn <= synced
                    waiter.error = error
                    if waiter.done:
                        done.append(waiter.gate)
                    else:
                        left.append(waiter)
                given = error is None and not lead and len(self._waiters) >= _CROWD and self._give(left)
                # From here on nothing calls this thread away: before, the lead is its own; after, another's.
                if given:
                    self._leader = _THREAD
                    self._waiters = left
                elif left:
                    leader = left[0].gate
                    self._leader = left[0].thread
                    self._waiters = left[1:]
                else:
                    self._leader = 0
                    self._waiters = left
                self._to_open.append((done, leader))
        finally:
            if not held:
                self._open()

    def _open(self) -> None:
        """The gates of those who may go. What is opened twice stays open."""
        while self._to_open:
            try:
                opening = self._to_open[-1]
            except IndexError:  # somebody else was at it, too
                return
            open_gates(*opening)
            with contextlib.suppress(ValueError):
                self._to_open.remove(opening)

    # -- the thread for the disk -------------------------------------------------------------------------------------

    def _give(self, left: list[_Waiter]) -> bool:
        """Have the thread do the next commit, if that is nothing but a write and a sync of the journal's file. Who leads
        finds it begun, if not. Requires: the lock and the lead."""
        if not left or left[0].lsn == _NEVER or self._batch is not None or self._store_synced < self._store_syncs:
            return False
        if self.failed is not None:
            return False
        batch, _ = self._begin()
        if batch.store is not None or batch.journal is None or not batch.journal.give(self._disk_thread, left[0].gate):
            return False
        self._deputy = left[0]
        return True

    def _collect_or_be_deputy(self, waiter: _Waiter) -> None:
        """Requires: the lock; the thread has a commit."""
        if not self._disk_thread.is_written() and self._disk_thread.appoint(waiter.gate):
            self._deputy = waiter
            return
        self._leader = threading.get_ident()  # from here on this thread leads, and stands down if it is called away
        self._deputy = None
        failed = self._disk_thread.collect()
        batch = self._batch
        assert batch is not None
        error: WarrenError | None = None
        try:
            if not failed:
                self._end(batch)
            elif (
                failed not in FULL
            ):  # for want of room it is led: first the same bytes again, with the room of the reserve
                raise OSError(failed, os.strerror(failed))
        except Exception as unexpected:
            self.fail(unexpected)
            error = self.failed
        self._hand_on(error, lead=bool(failed), held=True)

    def _stand_down(self, me: int, waiter: _Waiter | None) -> None:
        """This thread neither waits nor leads any longer, whatever called it away. That it may be called away from here,
        too, keeps nobody waiting: it begins again, and what called it away first is raised."""
        while True:
            try:
                with self._lock:
                    if waiter is not None and waiter in self._waiters:
                        self._waiters.remove(waiter)
                    if self._leader == _THREAD and self._deputy is waiter:
                        self._deputy = None
                        if self._waiters:
                            self._collect_or_be_deputy(self._waiters[0])
                    leads = self._leader == me
                if leads:
                    self._hand_on(None)
                self._open()
                if waiter is not None:
                    # With the old one goes its place in the line, where nobody may wait for a thread that does not come.
                    waiter.gate = Gate()
                return
            except (KeyboardInterrupt, SystemExit):
                pass

    # -- the reserve -------------------------------------------------------------------------------------------------

    def take_reserve(self) -> bool:
        """Keep some disk back for acks; whether that worked. Publishing is allowed while it is there."""
        if not self._reserve_bytes:
            self._set_full(False)
            return True
        try:
            if not self._reserve_is_there():
                if self._disk.free_bytes(self._root) < 2 * self._reserve_bytes:
                    self._set_full(True)
                    return False
                with contextlib.suppress(FileNotFoundError):
                    self._disk.unlink(self._reserve_path)
                file = self._disk.create(self._reserve_path)
                try:
                    file.reserve(self._reserve_bytes)
                finally:
                    file.close()
            self._set_full(False)
        except OSError as error:
            if error.errno not in FULL:
                raise
            self.give_up_reserve()
        return not self.full

    def _reserve_is_there(self) -> bool:
        """Whole: a crash may have left a part of it."""
        return self._disk.exists(self._reserve_path) and self._disk.size(self._reserve_path) >= self._reserve_bytes

    def give_up_reserve(self) -> None:
        """There was no room for something: acks get what was kept back, and publishing waits until it can be taken again."""
        self._set_full(True)
        with contextlib.suppress(OSError):
            self._disk.unlink(self._reserve_path)

    def _set_full(self, is_full: bool) -> None:
        with self._lock:
            if is_full != self.full:
                self.full = is_full
                self.full_changed(is_full)
