"""One vhost on disk: its directory, lock, metadata, journal, message stores and queues.

This is the engine without a protocol. The library, the broker's vhost process and the tests all own one of these. Every
call takes the engine's lock (`lock`) for as long as it needs it; the slow part of a commit, a checkpoint and a compaction
run without it.

`background=False` leaves out the thread: then the owner calls `tick` when it likes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from typing import Any

from warren.errors import (
    DiskFullError,
    MessageTooLargeError,
    StoreFailedError,
)
from warren.kernel.entry import IN_STORE, PERSISTENT, Entry, body_total
from warren.kernel.journal_codec import MOST_PRODUCER_BYTES
from warren.storage import compaction
from warren.storage.checkpoint import Checkpoint
from warren.storage.checkpoint_pace import CheckpointPace, divide_at
from warren.storage.committer import FULL, Committer
from warren.storage.context import DEBUG
from warren.storage.disk import Disk, trim_memory
from warren.storage.metadata import QueueRecord
from warren.storage.priority_queue import PriorityQueue
from warren.storage.queue_database import QueueDatabase
from warren.storage.queue_index import QueueIndex
from warren.storage.queue_terms import is_in_segments, stop_queues
from warren.storage.recovery import ScanSegments
from warren.storage.recovery_terms import write_terms
from warren.storage.seq_ids import SeqIds
from warren.storage.settings import EngineSettings
from warren.storage.snapshot import dump_transients, link_store, new_snapshot, write_manifest
from warren.storage.stored_queue import StoredQueue, backing_kind, level_count
from warren.storage.variable_queue import VariableQueue
from warren.storage.vhost_opening import DURABILITIES
from warren.storage.vhost_transactions import VhostTransactions, accept_each

log = logging.getLogger("warren.storage")

_PAUSE_EVERY_BYTES = 512 * 1024
_PAUSE_SECONDS = 0.002
_LONGEST_PAUSE_SECONDS = 0.05
_SWEEP_SECONDS = 2.0  # between two looks for segments with nothing in them
_CHECKPOINT_SLACK = 4096  # bytes for headers, carried records and FLOOR

__all__ = ["DURABILITIES", "StoredQueue", "VhostStore"]

_POLITE_SYNCS = 3  # commits that let publishers go on, before one that does not


class VhostStore(VhostTransactions):
    def __init__(
        self,
        data_directory: str,
        vhost: str = "/",
        *,
        durability: str = "fsync",
        settings: EngineSettings | None = None,
        disk: Disk | None = None,
        background: bool = True,
        debug: bool = DEBUG,
        clock: Callable[[], float] = time.monotonic,
        progress: Callable[[str, int, int], None] | None = None,
        scan: ScanSegments | None = None,
    ) -> None:
        self.closed = False
        self._checkpoint_lock = threading.Lock()  # taken before `lock`; held by checkpoint, delete, snapshot, close
        self._wake = threading.Event()
        self._awake = False  # the thread was told that there is something to commit
        self._closing = False
        self._thread: threading.Thread | None = None
        self.when_failed: Callable[[], None] = lambda: (
            None
        )  # told by the thread, without the lock: some wait for messages
        super().__init__(
            data_directory,
            vhost,
            durability=durability,
            settings=settings,
            disk=disk,
            debug=debug,
            clock=clock,
            progress=progress,
            scan=scan,
        )
        self._upkeep = self.committer  # commits of upkeep: a close, which refuses everybody else, has its own
        self._commit_bytes = self.settings.commit_bytes
        self._pace = CheckpointPace(self.settings)
        self._next_sweep = 0.0
        self._next_pause = 0  # bytes of the journal
        if background:
            self._thread = threading.Thread(target=self._maintain, name=f"warren {vhost}", daemon=True)
            self._thread.start()

    # -- queues ------------------------------------------------------------------------------------------------------

    def declare(
        self,
        name: str,
        *,
        durable: bool = True,
        arguments: dict[str, Any] | None = None,
        auto_delete: bool = False,
    ) -> StoredQueue:
        """The queue of this name, made if there is none. Durable ones are in the metadata when this returns."""
        with self.lock:
            self.committer.check()
            queue = self.queues.get(name)
            if queue is not None:
                return queue
            record = QueueRecord(
                name=name,
                created_at=time.time(),
                durable=durable,
                auto_delete=auto_delete,
                arguments=arguments or {},
            )
            record = replace(
                record, uid=self.metadata.declare_queue(record) if durable else self.metadata.reserve_uid()
            )
            seqs = SeqIds(self.journal, record.uid, self.settings.reserve_ahead, self.settings.segment_entries)
            if not durable or self.durability == "memory":
                seqs.unlimited()  # no restart brings its uid back
            else:
                seqs.available(0)  # asks for the first reservation: the first publish finds it, or waits for it
                self._rouse()
            if backing_kind(record) == "sqlite":
                return self._add_sqlite_queue(record, self._new_database(record), seqs)
            return self._add_queue(record, seqs, [self._index(record, n) for n in range(level_count(record))], None)

    def _new_database(self, record: QueueRecord) -> QueueDatabase:
        """Where its file cannot be made, the queue was not declared: its name is free again."""
        try:
            return self._database(record)
        except BaseException as error:
            if record.durable:
                self.metadata.delete_queue(record.uid)
            if isinstance(error, OSError) and error.errno not in (errno.EMFILE, errno.ENFILE):
                raise self.committer.trouble(error) from error
            raise

    def delete(self, name: str) -> int:
        """Delete a queue and its messages; how many were ready. With a group of the metadata open, the delete of a queue
        that has nothing is part of it, and safe when it ends."""
        with self._checkpoint_lock, self.lock, self.disk_errors():
            self.committer.check()
            queue = self.get(name)
            has_files = self.disk.is_dir(queue.directory)
            if queue.durable:
                self.metadata.delete_queue(queue.uid)
                if has_files or any(len(index.overlay) for index in queue.indexes):
                    self.metadata.end_group()  # before its files and stored bodies go
            del self.queues[name]
            self.producers.forget(queue.uid)
            try:
                count = len(queue.backing)
                queue.backing.delete_and_terminate()
            except Exception:  # its files go, whatever is wrong in memory; the next start counts references anew
                log.exception("queue %r in vhost %r failed while it was deleted", name, self.vhost)
                count = 0
            if has_files:
                self._to_trash(queue.directory)
        if has_files:
            self._empty_trash(os.path.basename(queue.directory))
        return count

    def _to_trash(self, directory: str) -> None:
        """Out of the way at once; the files are unlinked without the lock, but for a disk too full for a directory."""
        trash = os.path.join(self.root, "trash")
        try:
            self.disk.make_dirs(trash)
            self.disk.rename(directory, os.path.join(trash, os.path.basename(directory)))
        except OSError as error:
            if error.errno not in FULL:
                raise
            self.disk.remove_tree(directory)

    def restart_queue(self, name: str) -> StoredQueue:
        """Rebuild a queue, of which something in memory went wrong, from what is on disk. What was handed out is ready
        again; transient messages that were only in memory are gone. Everything before is safe when this returns. Called
        without the lock."""
        if self.holds_lock():
            raise RuntimeError("restart_queue() is called without the lock: it waits for a commit")
        with self._checkpoint_lock, self._synced(), self.disk_errors():
            old = self.get(name)
            levels = old.backing.levels if isinstance(old.backing, PriorityQueue) else [old.backing]
            for level in levels:
                if isinstance(level, VariableQueue):
                    level.forget_ram()
            states = [self._rebuilt(index, old.seqs.next, old.backing.counts) for index in old.indexes]
            return self._add_queue(old.record, old.seqs, old.indexes, states)

    def _rebuilt(self, index: QueueIndex, stop: int, counts: dict[int, int]) -> dict[str, Any]:
        """As recovery terms, from the index of a running queue. Requires: the lock, nothing unsynced."""
        size = stored = 0
        alive: list[int] = []
        cursor = min((number * index.segment_size for number in index.segments), default=stop)
        first = index.overlay.first_seq()
        low = cursor = cursor if first is None else min(cursor, first)
        while cursor < stop:
            entries, _ = index.read(cursor, stop, self.settings.load_entries)
            if not entries:
                break
            size += body_total(entries)
            stored += sum(entry.flags & (IN_STORE | PERSISTENT) == IN_STORE | PERSISTENT for entry in entries)
            alive += [entry.seq for entry in entries if entry.seq in counts]
            cursor = entries[-1].seq + 1
        return {
            "bytes": size,
            "low": low,
            "redelivered_below": stop,
            "returned": [],
            "counts": {seq: counts[seq] for seq in alive},
            "stored": stored,
            "leased": self._live_leased(index),
        }

    # -- publishing --------------------------------------------------------------------------------------------------

    def check_size(self, size: int) -> None:
        if size > self.settings.max_message_bytes:
            raise MessageTooLargeError(
                f"a message of {size} bytes is over the limit of {self.settings.max_message_bytes}; "
                "split it, or raise max_message_bytes"
            )

    def wake(self) -> None:
        """Something is in the buffer: see that it is committed. Commits at once when there is much. Called without the
        lock: whoever leads a commit needs it to end."""
        if len(self.journal.buffer) > self._commit_bytes:
            self.committer.sync()
        elif not self._awake:
            self._rouse()
        pause = self.overload()
        if pause:
            time.sleep(pause)

    def _rouse(self) -> None:
        """As `wake`, but waits for nothing: also with the lock."""
        self._awake = True
        self._wake.set()

    def overload(self) -> float:
        """Seconds that a publisher should wait because checkpoints are far behind; 0: none. It is asked for once in so
        many bytes of the journal: who publishes little waits little. Without this a publisher that is faster than the
        checkpoints would fill the memory with overlays."""
        journal = self.journal
        behind = journal.sealed - journal.floor - self._pace.lag - self.settings.journal_files_most
        if behind < 0 or self._thread is None or journal.bytes_written < self._next_pause:
            return 0.0
        self._next_pause = journal.bytes_written + _PAUSE_EVERY_BYTES
        return min(_PAUSE_SECONDS * (behind + 1), _LONGEST_PAUSE_SECONDS)

    def fan_out(
        self,
        queues: list[StoredQueue],
        head: bytes,
        body: bytes,
        *,
        persistent: bool,
        published_at: int,
        expiry: int = 0,
        level: int = 0,
        producer: str | None = None,
        publishing_id: int = 0,
        times_to_live: list[int] | None = None,
        wake: bool = True,
        failed: Callable[[StoredQueue, Exception], None] | None = None,
    ) -> list[Entry]:
        """One message to many queues: one body, one journal record. Its entries, one for each queue. Without `wake` the
        caller sees to its commit. `failed` is told, at the end, of queues that could not take it; they find it when they are
        built anew from what is on disk.

        `times_to_live` are the queues' own, in microseconds; below 0: none. All of them take it, or none: raises
        QueueNotFoundError where one was deleted. Called without the lock."""
        self.check_size(4 + len(head) + len(body))
        if producer is not None and len(producer.encode(errors="surrogateescape")) > MOST_PRODUCER_BYTES:
            raise ValueError(
                f"a producer's name of {len(producer)} characters; at most {MOST_PRODUCER_BYTES} bytes fit"
            )
        while True:
            with self.lock:
                if self._may_fan_out(queues):
                    entries = self._copies(queues, head, body, persistent, published_at, expiry, level, times_to_live)
                    self._append_fanout(queues, entries, producer, publishing_id)
                    failures = accept_each(queues, entries)
                    break
            self.committer.sync()
        if wake:
            self.wake()
        for queue, why in failures:
            if failed is None:
                raise why
            failed(queue, why)
        return entries

    def last_publishing_id(self, queue: StoredQueue, producer: str) -> int | None:
        """The highest publishing id that a producer has published to a queue; None also where it was forgotten."""
        return self.producers.last(queue.uid, producer)

    # -- safety and upkeep -------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Return when everything before this call is safe, as `durability` defines it."""
        if self.durability == "memory":
            self.committer.check()
            return
        self.committer.sync()

    def commit(self) -> None:
        """For the checkpoint: what is in the buffer, with bodies synced in `os` durability, too."""
        self._upkeep.commit(sync_store=True)

    def indexes(self) -> list[QueueIndex]:
        return [index for queue in self.queues.values() for index in queue.indexes]

    def commit_databases(self) -> None:
        """For the checkpoint: what queues in SQLite changed becomes safe in their files."""
        with self.lock:
            queues = self._sqlite_queues()
        for _, backing in queues:
            if backing.database.changed:
                with self._synced():
                    try:
                        backing.commit()
                    except StoreFailedError as error:  # the file lacks what is in the journal: that must be replayed
                        self._upkeep.fail(error)
                        raise

    def seq_ids(self) -> list[SeqIds]:
        return [queue.seqs for queue in self.queues.values() if queue.durable]

    def carry_state(self, upto: int) -> None:
        self.ledger.carry(upto)

    def checkpoint(self, *, seal: bool = False, carry_below: int | None = None) -> bool:
        """Move what is in sealed journal files to segments; with `seal`, the current file first."""
        with self._checkpoint_lock, self.disk_errors():
            if self.committer.full:
                self._new_checkpoint(self.journal.floor - 1).drop_dead()
                seal = seal and self._fits(self.journal.buffer.file)
            if seal:
                self._roll()
            if self._checkpoint(carry_below):
                return True
            self._drop_dead()
            return False

    def _drop_dead(self) -> None:
        """Transient messages leave no record in the journal. So without a checkpoint their empty segments go here. Queues
        that nobody uses are not looked at: there may be ten thousand."""
        with self.lock:
            thinned = self.context.thinned
            found = any(segment.empty for index in thinned for segment in index.segments.values())
            thinned.clear()
        if found:
            self._new_checkpoint(self.journal.floor - 1).drop_dead()

    def checkpoint_due(self) -> bool:
        """Has the journal grown enough for the next run of a checkpoint?"""
        return self._pace.due(self.journal.sealed - self.journal.floor + 1) > 0

    def _checkpoint(self, carry_below: int | None, sparing: bool = True) -> bool:
        """Runs over all sealed files; on a full disk, unless not `sparing`, only over those that there is room for."""
        done = False
        last = self.journal.sealed
        while self.journal.floor <= last and (self._fits(self.journal.floor) or not sparing):
            files = min(self._pace.due(last - self.journal.floor + 1) or 1, last - self.journal.floor + 1)
            if self._upkeep.full:
                files = 1
            self._run_checkpoint(files, carry_below, patient=False)
            done = True
        return done

    def _run_checkpoint(self, files: int, carry_below: int | None, *, patient: bool) -> None:
        run = self._new_checkpoint(self.journal.floor + files - 1)
        try:
            sizes = run.measure()
            if patient and self._pace.wait(sizes, files):
                return
            run.run(*(self._pace.divide(sizes, files) if carry_below is None else divide_at(sizes, carry_below)))
        finally:
            run.close()

    def _new_checkpoint(self, upto: int) -> Checkpoint:
        return Checkpoint(self, self.disk, self.root, self.journal, self.settings, upto)

    def _fits(self, upto: int) -> bool:
        """Is there room to move what is alive in journal files up to `upto`? It is there twice until they go."""
        if not self._upkeep.full:
            return True
        with self.lock:
            moving = sum(index.overlay.bytes_upto(upto) for index in self.indexes())
        return not moving or self._upkeep.has_room(2 * moving + _CHECKPOINT_SLACK)

    def _roll(self) -> None:
        """Seal the current journal file, with everything that is appended now in it."""
        with self._synced():
            self.journal.roll()

    @contextlib.contextmanager
    def _synced(self) -> Iterator[None]:
        """Hold the lock, with nothing in the journal that is not safe."""
        for _ in range(_POLITE_SYNCS):
            self._upkeep.sync()
            with self.lock:
                self._upkeep.check()
                if not self.journal.dirty:
                    yield
                    return
        with self._upkeep.sync_and_hold():  # publishers are always quicker: they wait for one commit
            yield

    @contextlib.contextmanager
    def disk_errors(self) -> Iterator[None]:
        """For writes outside of a commit. For want of disk publishing stops, and the work is done another time; after
        any other error what the disk holds is unknown, and the store has failed."""
        try:
            yield
        except OSError as error:
            raise self._upkeep.trouble(error) from error

    def compact(self) -> bool:
        """Merge two store files that are mostly garbage; whether there were any."""
        done = False
        for store in (self.store, self.transient_store):
            with self.lock:
                job = compaction.plan(store)
            if job is None:
                continue
            complete = False
            try:
                if self.committer.has_room(job.copy_bytes + self.settings.reserve_bytes):
                    complete = job.run(sync=store is self.store)
            except OSError as error:  # the copy is dropped, and nothing refers to it
                log.warning("compaction in %s failed: %s", store.path, error)
            finally:
                with self.lock, contextlib.suppress(OSError):
                    if complete:
                        job.commit()
                    else:
                        job.abort()
            done = done or complete
        return done

    def tick(self) -> None:
        """What the background thread does between two sleeps."""
        if self.journal.dirty and self.durability != "memory":
            try:
                self.committer.sync()
            except DiskFullError:  # also with the reserve: what it needs may lie in files that nobody needs
                self._make_room()
                self.committer.sync()
        full = self.committer.full
        if full:
            self.checkpoint(seal=True)
        else:
            with self._checkpoint_lock, self.disk_errors():
                while files := self._pace.due(self.journal.sealed - self.journal.floor + 1):
                    self._run_checkpoint(files, None, patient=True)
                    trim_memory()
                if self._clock() >= self._next_sweep:
                    self._next_sweep = self._clock() + _SWEEP_SECONDS
                    self._drop_dead()
        self.compact()
        with self.disk_errors():
            if full:
                self.committer.take_reserve()
            with self.lock:
                if not self.committer.full:
                    self.transient_store.flush()
                self.monitor.update()
            for store in (self.store, self.transient_store):
                store.sweep()

    def _make_room(self) -> None:
        """What upkeep can free while a commit waits for room."""
        with self._checkpoint_lock, self.disk_errors():
            self._new_checkpoint(self.journal.floor - 1).drop_dead()
        self.compact()
        for store in (self.store, self.transient_store):
            store.sweep()

    def _maintain(self) -> None:
        self._keep_up()
        if not self._closing:
            self.when_failed()

    def _keep_up(self) -> None:
        """Until the store is closed, or has failed."""
        interval = self.settings.commit_interval
        worked = False
        while not self._closing:
            if self._wake.wait(1.0):
                worked = True
            elif worked:  # a quiet second: what the work took goes back to the system
                worked = False
                trim_memory()
            if self._closing or self.committer.failed is not None:
                return
            time.sleep(interval)
            self._wake.clear()
            self._awake = False
            try:
                self.tick()
            except Exception as error:
                if self._closing or self.committer.failed is not None:
                    return
                if not self.committer.full:
                    log.exception("upkeep of vhost %s failed", self.vhost)
                    self.committer.fail(error)
                    return

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Hold off checkpoints and hold the lock, with everything committed and the journal rolled."""
        with self._checkpoint_lock, self._synced():
            self.journal.roll()
            yield

    def snapshot(self, directory: str, queues: Container[str] | None = None, *, transients: bool = False) -> str:
        """A consistent copy by hard links in `directory`, a data directory of its own; the vhost's root in it.

        With `transients` it also has what would not survive a restart: non-durable queues, transient messages. It is for
        readers then: who opens it as a store finds that gone. `queues` are the names to copy; None: all."""
        target = os.path.join(directory, "vhosts", os.path.basename(self.root))
        with self.quiet(), self.disk_errors(), new_snapshot(self.disk, target):
            chosen = [queue for queue in self.queues.values() if queues is None or queue.name in queues]
            if transients:
                dump_transients(self.disk, target, chosen)
                self.transient_store.flush()
            self.store.seal()
            names = {os.path.basename(queue.directory) for queue in chosen if transients or queue.durable}
            known = {os.path.basename(queue.directory) for queue in self.queues.values()}
            files = link_store(self.disk, self.root, target, left_out=known - names, transients=transients)
            for queue, backing in self._sqlite_queues():
                if queue.durable and queue in chosen:
                    backing.backup(os.path.join(target, os.path.relpath(backing.database.path, self.root)))
            self.metadata.end_group()
            self.metadata.backup(os.path.join(target, "meta.db"))
            self.disk.sync_all(target)  # a snapshot with a manifest is whole
            write_manifest(
                self.disk,
                target,
                {
                    "vhost": self.vhost,
                    "lsn": self.journal.synced_lsn,
                    "files": files,
                    "boot": self.boot if transients else 0,
                    "queues": {queue.name: _manifest_of(queue) for queue in chosen},
                },
            )
        return target

    # -- closing -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """A clean stop: everything to segments, recovery terms written. A store that failed is only let go. Other threads
        are refused from the beginning: what is confirmed then is in the terms, and nothing can be confirmed later."""
        self._stop_thread()
        with self._checkpoint_lock:
            try:
                if self.committer.failed is None and self.durability != "memory":
                    with self.disk_errors():
                        self._stop_cleanly()
            finally:
                self._let_go()

    def _stop_cleanly(self) -> None:
        with self.committer.sync_and_hold():
            self.journal.roll()
            self.committer.close()  # its last commit is done, and none can begin: the one that follows has the journal
            self._upkeep = Committer(
                self.lock, self.disk, self.root, self.journal, self.store, self.settings.reserve_bytes
            )
            self._upkeep.full = self.committer.full
        self._checkpoint(carry_below=0, sparing=False)
        with self._upkeep.sync_and_hold():
            # What the checkpoint carried (reservations, state) is in a new file. The terms have it, too, but it stays: the
            # terms may be damaged, or the next start cut short after it took them.
            self.journal.roll()
            if is_in_segments(self.queues.values()):
                self._write_terms()
            else:  # the next start is a dirty one, which finds it
                log.warning("vhost %s was used while it was closed; the next start reads its journal", self.vhost)
            self._upkeep.close()

    def _write_terms(self) -> None:
        terms = {
            "journal": self.journal.buffer.file,
            "floor": self.journal.floor,
            "lsn": self.journal.next_lsn,
            "queues": stop_queues(self.queues.values()),
            "ledger": self.ledger.dump(),
        }
        write_terms(self.disk, self.root, terms, self.store.save_terms())

    def abandon(self) -> None:
        """Let go without a clean stop, as a crash would; for tests."""
        self._stop_thread()
        self._let_go()

    def _let_go(self) -> None:
        self._upkeep.close()
        self.committer.failed = self._upkeep.failed  # who comes after a close that failed is told so
        self._release()

    def _stop_thread(self) -> None:
        self._closing = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None

    def _release(self) -> None:
        with self.lock:
            if self.closed:
                return
            self.closed = True
            self._close_files()
            self._directory_lock.release()


def _manifest_of(queue: StoredQueue) -> dict[str, Any]:
    """What a reader of a snapshot has to know of a queue that no file says."""
    return {
        "uid": queue.uid,
        "durable": queue.durable,
        "arguments": queue.record.arguments,
        "directory": os.path.basename(queue.directory),
        "levels": level_count(queue.record),
        "backing": backing_kind(queue.record),
        "ready": len(queue.backing),
        "unacknowledged": queue.backing.pending_count,
        "pending": queue.backing.pending_pairs(),
        "next_seq_id": queue.seqs.next,
        "redelivered_below": queue.backing.redelivered_below,
        "returned": queue.backing.returned.pairs(),
        "forgotten": {str(index.sid): pairs for index in queue.indexes if (pairs := index.forgotten_pairs())},
    }
