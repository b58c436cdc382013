"""`warren spark recover`: a crashed or damaged store gets the terms of a clean stop, so that a broker then starts at once.

The engine's own dirty start does it, with one step taken out of its hands: the segments are not read by this process, one
after the other, but by executors (`VhostStore(scan=...)`). Everything else (the lock, the journal, which word counts, the
message store, what goes to quarantine) is the engine's, so the result is the same by construction, and the lock is held
from the first look to the last write. Then a clean stop writes the terms.

Requires: every executor sees the directory under the same path.
"""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from warren.errors import StorePathError, WarrenError
from warren.pipeline.jobs.division import divide
from warren.storage.disk import Disk
from warren.storage.layout import hashed
from warren.storage.lock import DirectoryLock
from warren.storage.recovery import ScannedSegment, SegmentScan, scan_segment
from warren.storage.recovery_terms import TERMS_NAME, TermsDamaged, unpack_terms
from warren.storage.settings import EngineSettings
from warren.storage.store_format import TermsError, decode_terms
from warren.storage.vhost_store import VhostStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_STORE = "msg_store_persistent"


@dataclass(slots=True)
class Recovery:
    """What became of one vhost."""

    vhost: str
    root: str
    was_clean: bool  # then nothing was done
    queues: dict[str, int]  # messages of each
    damage: list[dict[str, object]]  # the lines of quarantine/ that this recovery added
    segments: int = 0  # read by executors
    tasks: int = 0
    seconds: float = 0.0

    @property
    def messages(self) -> int:
        return sum(self.queues.values())

    @property
    def messages_per_second(self) -> float:
        return self.messages / self.seconds if self.seconds else 0.0


def recover_on_spark(
    spark: SparkSession,
    directory: str,
    vhost: str = "/",
    *,
    force: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Recovery:
    """Recover one vhost of a data directory. One that was stopped cleanly is left as it is, unless `force`: then its
    terms are thrown away and everything is read.

    Raises StoreLockedError where a process owns the directory, StorePathError where there is no such vhost.
    """
    began = time.monotonic()
    directory = os.path.abspath(directory)
    root = os.path.join(directory, "vhosts", hashed(vhost))
    if not os.path.isdir(root):
        raise StorePathError(f"{directory} has no vhost {vhost!r}")
    if _has_terms(root, drop=force):
        return Recovery(vhost, root, was_clean=True, queues={}, damage=[])
    scanner = _Scanner(spark)
    store = VhostStore(
        directory,
        vhost,
        settings=EngineSettings(store_index=_index_kind(root)),
        background=False,
        progress=progress,
        scan=scanner,
    )
    try:
        queues = {name: queue.backing.depth() for name, queue in store.queues.items()}
        damage = list(store.quarantine.reports)
    except BaseException:
        store.abandon()
        raise
    store.close()
    return Recovery(
        vhost, root, False, queues, damage, scanner.segments, scanner.tasks, seconds=time.monotonic() - began
    )


def _has_terms(root: str, *, drop: bool) -> bool:
    """Whether the last stop was clean, so that a start reads nothing. Requires: nobody owns the directory."""
    lock = DirectoryLock(os.path.join(root, ".lock"))
    try:
        path = os.path.join(root, TERMS_NAME)
        if drop and os.path.exists(path):
            os.unlink(path)
            Disk().sync_dir(root)
        return _sound_terms(Disk(), root)
    finally:
        lock.release()


def _sound_terms(disk: Disk, root: str) -> bool:
    path = os.path.join(root, TERMS_NAME)
    if not disk.exists(path):
        return False
    try:
        decode_terms(unpack_terms(disk.read(path), path).store).check_files(disk, os.path.join(root, _STORE))
    except (TermsDamaged, TermsError):
        return False
    return True


def _index_kind(root: str) -> str:
    """The terms are for one kind of index of the message store: the one that the owner uses."""
    return "lmdb" if os.path.exists(os.path.join(root, _STORE, "index.lmdb")) else "table"


class _Scanner:
    """Has segments read by executors."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self.segments = 0
        self.tasks = 0

    def __call__(self, scans: list[SegmentScan]) -> Iterable[ScannedSegment]:
        groups = divide(self._spark, scans, _bytes_of)
        self.segments, self.tasks = len(scans), len(groups)
        if not groups:
            return []
        work = self._spark.sparkContext.parallelize([pickle.dumps(group) for group in groups], len(groups))
        found: list[ScannedSegment] = []
        for result in work.map(_scan_group).collect():
            scanned = pickle.loads(result)
            if isinstance(scanned, str):
                raise WarrenError(scanned)
            found += scanned
        return found


def _bytes_of(scan: SegmentScan) -> int:
    stem = os.path.join(scan.directory, str(scan.number))
    return sum(os.path.getsize(path) for path in (f"{stem}.qi", f"{stem}.qa") if os.path.exists(path))


def _scan_group(work: bytes) -> bytes:
    """On an executor. An error comes back as its text."""
    disk = Disk()
    result: Any
    scans: list[SegmentScan] = pickle.loads(work)
    try:
        result = [scan_segment(disk, scan) for scan in scans]
    except WarrenError as error:
        result = str(error)
    except OSError as error:
        where = socket.gethostname()
        result = f"an executor on {where} cannot read a segment: {error}. Every executor has to see that directory"
    return pickle.dumps(result)
