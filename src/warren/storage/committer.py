"""Group commit: whoever waits for safety first commits for all who came meanwhile.

A thread that calls `sync` becomes the leader if there is none, and runs one commit: message store first, then journal, so
that a journal record never refers to a body that is not there. Those who call meanwhile wait, each at a gate of its
own; what they appended forms the next commit, led by one of them. So commits never overlap, no thread exists for the
purpose, and a thread that is alone pays no hand-over.

When the disk is full: the reserve is given up, so that the commit under way, and acks after it, have room; publishing is
refused (`full`) until the reserve could be taken again. Nothing is lost and nothing has to be restarted: a commit that
could not be written is kept and tried again, at the same place.

When a write or a sync fails otherwise, what the disk holds is unknown: the store has failed, nothing of that batch is
ever confirmed, and every call raises StoreFailedError until the store is opened again, through recovery.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator

from warren.errors import DiskFullError, StoreClosedError, StoreFailedError, WarrenError
from warren.kernel.gates import Gate, open_gates
from warren.storage.disk import Disk
from warren.storage.journal import Journal, JournalCommit
from warren.storage.message_store import Commit as StoreCommit
from warren.storage.message_store import MessageStore

FULL = (errno.ENOSPC, errno.EDQUOT)
_NEVER = 1 << 64  # above every LSN


class _Waiter:
    __slots__ = ("error", "gate", "lead", "lsn")

    def __init__(self, lsn: int) -> None:
        self.lsn = lsn
        self.gate = Gate()
        self.lead = False
        self.error: WarrenError | None = None


class _Batch:
    """What one commit takes to the disk."""

    __slots__ = ("journal", "store")

    def __init__(self, store: StoreCommit | None, journal: JournalCommit | None) -> None:
        self.store = store
        self.journal = journal

    def run(self) -> None:
        if self.store is not None:
            self.store.run()
        if self.journal is not None:
            self.journal.run()

    @property
    def poisoned(self) -> bool:
        """A sync of the message store failed: what its files hold is unknown. (The journal's block is written anew by the
        next `run`, whatever became of it.)"""
        return self.store is not None and self.store.poisoned

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
        self._leader = False
        self._waiters: list[_Waiter] = []
        self._stuck: _Batch | None = None  # could not be written for want of disk; first in line
        self._sync_store = False  # the next commit syncs the message store even if commits do not
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
                    f"a write to {self._root} failed: {error}. What was not synced is unknown. "
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

    # -- waiting for safety ------------------------------------------------------------------------------------------

    def sync(self, lsn: int | None = None) -> None:
        """Return when everything appended up to `lsn` (default: up to now) is safe."""
        with self._lock:
            self.check()
            if lsn is None:
                lsn = self._journal.appended_lsn
            if self._journal.synced_lsn >= lsn and not self._sync_store:
                return
            lead = not self._leader
            self._leader = True
            waiter = None if lead else _Waiter(lsn)
            if waiter is not None:
                self._waiters.append(waiter)
        if waiter is not None:
            self._wait(waiter)
            lead = waiter.lead
        if lead:
            self._lead()

    @contextlib.contextmanager
    def sync_and_hold(self) -> Iterator[None]:
        """Hold the lock, with everything safe that was appended before. Unlike `sync`, which lets others append meanwhile,
        this commits under the lock: who has to have nothing under way gets there however busy publishers are."""
        self._wait_for_lead()
        with self._lock:
            self._lead(until_clean=True)
            yield

    def _wait_for_lead(self) -> None:
        """Return as the leader, when those who came before have led."""
        with self._lock:
            self.check()
            if not self._leader:
                self._leader = True
                return
            waiter = _Waiter(_NEVER)
            self._waiters.append(waiter)
        self._wait(waiter)

    def _wait(self, waiter: _Waiter) -> None:
        """Until its commit is done, or it shall lead one."""
        try:
            waiter.gate.wait()
        except BaseException:  # Ctrl-C: somebody else has to lead in its place
            self._withdraw(waiter)
            raise
        if waiter.error is not None:
            raise waiter.error

    def commit(self, sync_store: bool = False) -> None:
        """Commit what is in the buffer now; with `sync_store`, bodies are synced in `os` durability, too."""
        with self._lock:
            self._sync_store = self._sync_store or sync_store
        self.sync()
        while sync_store and self._sync_store:  # the commit that this call waited for had begun before
            self.sync()

    def _lead(self, until_clean: bool = False) -> None:
        """Run one commit, or with `until_clean` what it takes, and hand on the lead. Requires: this thread is the leader."""
        error: WarrenError | None = None
        try:
            while True:
                with self._lock:
                    batch, retry = self._begin()
                self._run(batch)
                with self._lock:
                    batch.done()
                    self._stuck = None
                    self.commits += 1
                if not retry and not (until_clean and self._journal.dirty):
                    break
        except WarrenError as failure:
            error = failure
        except BaseException as unexpected:
            self.fail(unexpected)
            error = self.failed
        self._hand_on(error)
        if error is not None:
            raise error

    def _begin(self) -> tuple[_Batch, bool]:
        self.check()
        if self._stuck is not None:
            return self._stuck, True
        store = self._store.begin_commit(True if self._sync_store else None)
        self._sync_store = False
        return _Batch(store, self._journal.begin()), False

    def _run(self, batch: _Batch) -> None:
        try:
            batch.run()
        except OSError as error:
            if error.errno not in FULL or batch.poisoned:
                self.fail(error)
                raise self.failed or error from error
            self.give_up_reserve()
            self._retry(batch)

    def _retry(self, batch: _Batch) -> None:
        """The same bytes at the same place, with the room that the reserve gave."""
        try:
            batch.run()
        except OSError as error:
            if error.errno not in FULL or batch.poisoned:
                self.fail(error)
                raise self.failed or error from error
            with self._lock:
                self._stuck = batch
            raise DiskFullError(
                f"the disk of {self._root} is full and the reserve is used up; nothing is lost, but what was published "
                "last is not safe yet. Free some room and call sync() again"
            ) from error

    def _hand_on(self, error: WarrenError | None) -> None:
        with self._lock:
            synced = self._journal.synced_lsn
            done = []
            left = []
            for waiter in self._waiters:
                if error is not None or waiter.lsn <= synced:
                    waiter.error = error
                    done.append(waiter.gate)
                else:
                    left.append(waiter)
            self._waiters = left[1:]
            self._leader = bool(left)
            leader = None
            if left:
                left[0].lead = True
                leader = left[0].gate
        open_gates(done, leader)

    def _withdraw(self, waiter: _Waiter) -> None:
        """A thread does not wait any longer."""
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                return
        if waiter.lead:
            self._hand_on(None)

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
