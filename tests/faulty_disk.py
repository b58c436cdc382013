"""A disk that loses power: the double of `warren.storage.disk` for fault campaigns.

    disk = FaultyDisk(tmp_path)
    disk.crash_at(17, tear=5)                  # or disk.fail_at(17, errno.EIO), or disk.capacity = 4096
    with contextlib.suppress(PowerCut):
        run(disk)
    after = disk.crash(rng, mode="random")     # what a machine finds when it starts again

Files, directories and names live in memory, so a campaign can afford tens of thousands of runs.

Rules:

1. Every file has two images, `live` (what a reader sees) and `durable` (what is surely on the platter), and the writes
   between the two. A sync moves writes from one to the other; a crash keeps `durable` and, by its mode, some writes.
2. Every directory has two lists of names, `names` and `durable`, and the name operations between the two. A name
   operation survives only with all earlier ones on the same names, so a rename is atomic and nothing is at two places
   or at none that was moved. It is safe once any directory that it touches was synced.
3. The sync of a file does not make its name safe; the sync of a directory does not make its own name safe.
4. Writes that were in flight when a sync failed stay in doubt for ever: a later sync that succeeds does not cover them.
   Names whose `sync_dir` failed are just not synced yet.
5. SQLite and LMDB open their files by themselves, so these are real files in the real directory `root`, and every
   directory in memory is mirrored there. They are trusted: a crash leaves them as they are, but a directory that is
   lost takes them along and one that returns to its old name brings them back. Close the connections of a crashed
   engine before the next one starts.

Not modelled: room for a write into a hole (`capacity` counts lengths), sectors torn in the middle of a file, the
failure of `exists`, `is_dir`, `links` and `close`, which are therefore not counted as calls.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from warren.kernel.gates import DiskThread, Gate
from warren.storage.disk import Disk, DiskFile

# What a crash leaves of that which was not synced: nothing, everything, a random part; or, when only the process was
# killed, everything, and still not synced.
Mode: TypeAlias = Literal["none", "all", "random", "process"]

# Files that SQLite and LMDB open by themselves. A path with a component that ends in `.lmdb` is real as well.
REAL_SUFFIXES = (".db", ".db-wal", ".db-shm", ".db-journal", ".lmdb-lock")

# What `free_bytes` answers when there is no capacity.
UNLIMITED_BYTES = 1 << 40


class PowerCut(BaseException):
    """The machine has no power. A BaseException, so that no `except Exception` of the engine survives it."""


class Call(NamedTuple):
    """One counted call."""

    kind: str
    path: str
    size: int
    site: str  # "journal.py:120"; empty unless `trace_sites`


class _Image:
    """Bytes of a file. Zeros at the end are only a `length`, so a reserved file costs nothing."""

    __slots__ = ("data", "length", "shared")

    def __init__(self, data: bytes | bytearray = b"", length: int = 0) -> None:
        self.data = bytearray(data)
        self.length = max(length, len(data))
        self.shared = False  # once two inodes hold it, each copies it before its next write

    def own(self) -> _Image:
        return _Image(self.data, self.length) if self.shared else self

    def share(self) -> _Image:
        self.shared = True
        return self

    def apply(self, write: _Write) -> None:
        offset, data, _ = write
        end = offset + len(data)
        if data:
            if offset > len(self.data):
                self.data.extend(bytes(offset - len(self.data)))
            self.data[offset:end] = data
        if end > self.length:
            self.length = end

    def read(self, count: int, offset: int) -> bytes:
        end = min(offset + count, self.length)
        data = bytes(memoryview(self.data)[offset:end])
        return data + bytes(max(0, end - offset - len(data)))

    def flip(self, position: int, mask: int) -> _Image:
        if position >= self.length:
            return self
        own = self.own()
        own.apply(_Write(position, bytes([self.read(1, position)[0] ^ mask])))
        return own


class _Write(NamedTuple):
    """A write since the last good sync. Without data it only makes the file `offset` bytes long: a `reserve`."""

    offset: int
    data: bytes
    synced: bool = False  # only behind writes in doubt, which it may overwrite: so it cannot join `durable`

    def flip(self, position: int, mask: int) -> _Write:
        inside = position - self.offset
        if not 0 <= inside < len(self.data):
            return self
        data = self.data[:inside] + bytes([self.data[inside] ^ mask]) + self.data[inside + 1 :]
        return self._replace(data=data)


class _Inode:
    __slots__ = ("doubtful", "durable", "handles", "links", "live", "pending")

    def __init__(self, live: _Image, durable: _Image) -> None:
        self.live = live
        self.durable = durable
        self.doubtful: list[_Write] = []  # from the first failed sync on, in order
        self.pending: list[_Write] = []
        self.links = 0
        self.handles = 0

    def write(self, offset: int, data: bytes) -> None:
        write = _Write(offset, data)
        if self.live.shared:
            self.live = self.live.own()
        self.live.apply(write)
        self.pending.append(write)

    def sync(self) -> None:
        if self.doubtful:
            self.doubtful += [write._replace(synced=True) for write in self.pending]
        elif self.pending:
            self.durable = self.durable.own()
            for write in self.pending:
                self.durable.apply(write)
        self.pending.clear()

    def fail_sync(self) -> None:
        self.doubtful += self.pending
        self.pending.clear()

    def copy(self) -> _Inode:
        twin = _Inode(self.live.share(), self.durable.share())
        twin.doubtful = self.doubtful.copy()
        twin.pending = self.pending.copy()
        twin.links = self.links
        return twin

    def last_write(self) -> _Write | None:
        return next((write for write in reversed(self.pending) if write.data), None)

    def safe_image(self) -> _Image:
        """What was synced, and nothing else."""
        safe = [write for write in self.doubtful if write.synced]
        if not safe:
            return self.durable
        image = self.durable.share().own()
        for write in safe:
            image.apply(write)
        return image

    def torn_image(self, size: int) -> _Image:
        """Everything, but of the last write only its first `size` bytes."""
        last = self.last_write()
        if last is None or not 0 <= size <= len(last.data):
            raise ValueError(f"cannot tear at byte {size}: the last unsynced write is {last}")
        image = self.durable.share().own()
        for write in self.doubtful + self.pending:
            if write is not last:
                image.apply(write)
            elif size:
                image.apply(_Write(write.offset, write.data[:size]))
        return image

    def random_image(self, rng: random.Random, chance: float, zero_tails: bool) -> _Image:
        """Unsynced writes each survive or not, in any order; a synced one among them stands after all before it."""
        writes = self.doubtful + self.pending
        if not writes:
            return self.durable
        image = self.durable.share().own()
        survivors: list[_Write] = []
        for write in writes:
            if write.synced:
                _apply_in_any_order(survivors, rng, image)
                image.apply(write)
                continue
            if rng.random() < chance:
                size = len(write.data)
                if write is writes[-1] and rng.random() < 0.5:
                    size = rng.randint(0, size)
                if size or not write.data:
                    survivors.append(_Write(write.offset, write.data[:size]))
            if zero_tails and rng.random() < 0.5:
                survivors.append(_Write(write.offset + len(write.data), b""))
        _apply_in_any_order(survivors, rng, image)
        return image


def _apply_in_any_order(writes: list[_Write], rng: random.Random, image: _Image) -> None:
    rng.shuffle(writes)
    for write in writes:
        image.apply(write)
    writes.clear()


class _Directory:
    __slots__ = ("changes", "durable", "home", "names")

    def __init__(self) -> None:
        self.home: _Directory | None = None  # the one that has it among its `durable` names
        self.names: dict[str, _Node] = {}
        self.durable: dict[str, _Node] = {}
        self.changes: dict[_Change, None] = {}  # those of `FaultyDisk._changes` that touch it, in order

    def chain(self) -> Iterator[_Directory]:
        """Itself and the directories that it cannot be reached without."""
        directory: _Directory | None = self
        while directory is not None:
            yield directory
            directory = directory.home


_Root: TypeAlias = str | os.PathLike[str] | None
_Node: TypeAlias = _Inode | _Directory
_Slot: TypeAlias = tuple[_Directory, str]


@dataclass(slots=True, eq=False)
class _Change:
    """A name operation that was not synced: `node` leaves `source` and appears at `target`."""

    node: _Node
    source: _Slot | None  # None: create, link, mkdir
    target: _Slot | None  # None: unlink, rmdir
    replaced: _Node | None = None  # what had the name `target` before
    slots: tuple[_Slot, ...] = field(init=False)
    crosses: bool = field(init=False)  # a rename from one directory to another
    removes: _Directory | None = field(init=False)

    def __post_init__(self) -> None:
        self.slots = tuple(slot for slot in (self.source, self.target) if slot is not None)
        self.crosses = self.source is not None and self.target is not None and self.source[0] is not self.target[0]
        removed = self.node if self.target is None else self.replaced
        self.removes = removed if isinstance(removed, _Directory) else None

    def apply(self, names_of: Callable[[_Directory], dict[str, _Node]]) -> None:
        if self.source is not None:
            del names_of(self.source[0])[self.source[1]]
        if self.target is not None:
            names_of(self.target[0])[self.target[1]] = self.node


def _complete(changes: Iterable[_Change], chosen: set[_Change]) -> None:
    """Add to `chosen` what its members cannot do without, so that names stay consistent and nothing moved is lost.

    `changes` are all that are pending, the oldest first. A change needs:
    all earlier ones on its names; when it removes a directory, all that took something out of it; when it moves
    something into another directory, the making of that one; when it moves a directory, all earlier such moves
    (or two of them could put each into the other).
    """
    touched: set[_Slot] = set()
    removed: set[_Directory] = set()
    needed: set[_Node] = set()
    moved_directory = False
    for change in reversed(list(changes)):
        moves_directory = change.crosses and isinstance(change.node, _Directory)
        makes_needed = change.source is None and change.node in needed
        if (
            makes_needed
            or (moved_directory and moves_directory)
            or any(slot in touched or slot[0] in removed for slot in change.slots)
        ):
            chosen.add(change)
        if change not in chosen:
            continue
        touched.update(change.slots)
        moved_directory = moved_directory or moves_directory
        if change.removes is not None:
            removed.add(change.removes)
        if change.target is not None and (change.crosses or makes_needed):
            needed.update(change.target[0].chain())


@dataclass(slots=True)
class _Fault:
    error: int | None  # None: the power goes
    written: int | None  # how much of a pwrite happens all the same; None: chosen by rng

    def exception(self, path: str) -> BaseException:
        return PowerCut(path) if self.error is None else _error(self.error, path)


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


def _moved(path: str, source: str, target: str) -> str:
    """`path` at or below `source`, once `source` is called `target`."""
    return target + path[len(source) :]


class FaultyFile(DiskFile):
    """One open file in memory. It stays readable after its last name is gone."""

    __slots__ = ("_disk", "_inode", "_is_open", "_is_writable")

    def __init__(self, disk: FaultyDisk, path: str, inode: _Inode, writable: bool) -> None:
        self.path = path
        self._fd = -1
        self.size = inode.live.length
        self._disk = disk
        self._inode = inode
        self._is_open = True
        self._is_writable = writable
        inode.handles += 1

    def pwrite(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        data = bytes(data)
        if data:
            disk = self._disk
            with disk._lock:
                fault = disk._count("pwrite", self.path, len(data))
                self._check(writing=True)
                if offset < 0:
                    raise _error(errno.EINVAL, self.path)
                fits = data
                if fault is not None:
                    fits = data[: disk._written_despite(fault, len(data))]
                if disk.capacity is not None:
                    longest = self._inode.live.length + max(0, disk._room())
                    fits = fits[: max(0, longest - offset)]
                if fits:
                    disk._store(self._inode, offset, fits)
                if fault is not None:
                    raise fault.exception(self.path)
                if len(fits) < len(data):
                    raise _error(errno.ENOSPC, self.path)
        end = offset + len(data)
        if end > self.size:
            self.size = end

    def pread(self, count: int, offset: int) -> bytes:
        disk = self._disk
        with disk._lock:
            disk._enter("pread", self.path, count)
            self._check()
            if offset < 0 or count < 0:
                raise _error(errno.EINVAL, self.path)
            return self._inode.live.read(count, offset)

    def pwrite_and_sync(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        self.pwrite(data, offset)
        self.sync()

    def give(self, thread: DiskThread, data: memoryview, offset: int, deputy: Gate) -> bool:
        return False

    def sync(self) -> None:
        disk = self._disk
        with disk._lock:
            fault = disk._count("sync", self.path)
            self._check()
            if fault is not None:
                if fault.error is not None:
                    self._inode.fail_sync()
                raise fault.exception(self.path)
            self._inode.sync()
            disk._dirty.pop(self._inode, None)

    def reserve(self, size: int) -> None:
        disk = self._disk
        with disk._lock:
            disk._enter("reserve", self.path, size)
            self._check(writing=True)
            if size <= 0:
                raise _error(errno.EINVAL, self.path)
            grows = size - self._inode.live.length
            if grows > 0:
                if grows > disk._room():
                    raise _error(errno.ENOSPC, self.path)
                disk._store(self._inode, size, b"")
        self.size = max(self.size, size)

    def links(self) -> int:
        with self._disk._lock:
            self._disk._require_power(self.path)
            self._check()
            return self._inode.links

    def close(self) -> None:
        """Never raises, so that the cleanup of a crashed engine is not in the way."""
        with self._disk._lock:
            if self._is_open:
                self._is_open = False
                self._inode.handles -= 1
                self._disk._forget_unused(self._inode)

    def _check(self, writing: bool = False) -> None:
        if not self._is_open or (writing and not self._is_writable):
            raise _error(errno.EBADF, self.path)


class FaultyDisk(Disk):
    """A filesystem in memory below `root`, an empty or new directory. A path outside of it is a ValueError."""

    def __init__(self, root: str | os.PathLike[str], *, real_suffixes: tuple[str, ...] = REAL_SUFFIXES) -> None:
        self.root = os.path.abspath(root)
        self.rng = random.Random(0)  # for what nobody gave another one
        self.capacity: int | None = None
        self.calls = 0
        self.trace: list[Call] = []
        self.trace_sites = False
        self.is_off = False
        self._real_suffixes = real_suffixes
        self._real_names_end = (*real_suffixes, ".lmdb")
        self._lock = threading.RLock()
        self._plan: dict[int, _Fault] = {}  # by number of call
        self._used = 0  # bytes of all inodes with a name or a handle
        self._root = _Directory()
        self._dirs: dict[str, _Directory] = {self.root: self._root}  # by path, as they are now
        self._dirty: dict[_Inode, None] = {}  # with pending writes
        self._changes: dict[_Change, None] = {}  # of all directories, the oldest first
        self._last_written: _Inode | None = None
        os.makedirs(self.root, exist_ok=True)

    # Faults.

    def fail_at(self, n: int, error: int, *, written: int | None = None) -> None:
        """The `n`-th call from now (1 is the next) raises OSError(`error`). Of a pwrite the first `written` bytes
        happen; when not given, any number for EIO and ENOSPC, else none. Faults at several calls add up."""
        self._plan[self._nth(n)] = _Fault(error, written)

    def crash_at(self, n: int, *, tear: int = 0) -> None:
        """The `n`-th call from now raises PowerCut, before its effect (of a pwrite: after `tear` bytes of it), and so
        does every later one."""
        self._plan[self._nth(n)] = _Fault(None, tear)

    def clear_faults(self) -> None:
        self._plan.clear()

    def _nth(self, n: int) -> int:
        if n < 1:
            raise ValueError(f"the next call is number 1, there is no call {n} from now")
        return self.calls + n

    def crash(
        self,
        rng: random.Random | None = None,
        mode: Mode = "random",
        *,
        tear: int | None = None,
        zero_tails: bool = False,
        root: _Root = None,
    ) -> FaultyDisk:
        """The disk as it is when the machine starts again; this one is off from now on.

        `tear`: of the last write issued, exactly the first `tear` bytes are there, and all before them in that file.
        `zero_tails`: in mode "random", a file may keep the length of a write but have zeros in place of its bytes.
        `root`: an empty or new directory for the new disk and copies of the real files. Without it the new disk has the
        same root; to look at several outcomes of one crash, give each its own.
        """
        with self._lock:
            if mode == "process":
                if tear is not None:
                    raise ValueError("a killed process tears no write")
                after = self.clone(root)
            else:
                after = self._survivor(rng or self.rng, mode, tear, zero_tails, root)
            self.is_off = True
            return after

    @property
    def last_write_size(self) -> int:
        """Bytes of the last write, which `crash(tear=...)` can tear; 0 when it was synced."""
        last = self._last_written.last_write() if self._last_written is not None else None
        return len(last.data) if last is not None else 0

    def clone(self, root: _Root = None) -> FaultyDisk:
        """A disk in the same state, without open files, faults and trace. With `root` (empty or new) it has copies of
        the real files. Without it shares the real directory: enough when there is no database, or when only one of the
        two disks goes on."""
        with self._lock:
            twin = self._sibling(root)
            inodes: dict[_Inode, _Inode] = {}
            directories: dict[_Directory, _Directory] = {}

            def inode(old: _Inode) -> _Inode:
                if old not in inodes:
                    new = inodes[old] = old.copy()
                    twin._used += new.live.length if new.links else 0
                    if new.pending:
                        twin._dirty[new] = None
                return inodes[old]

            def directory(old: _Directory) -> _Directory:
                if old not in directories:
                    new = directories[old] = _Directory()
                    new.home = None if old.home is None else directory(old.home)
                    new.names = {name: node(child) for name, child in old.names.items()}
                    new.durable = {name: node(child) for name, child in old.durable.items()}
                return directories[old]

            def node(old: _Node) -> _Node:
                return inode(old) if isinstance(old, _Inode) else directory(old)

            def slot(old: _Slot | None) -> _Slot | None:
                return None if old is None else (directory(old[0]), old[1])

            twin._root = directory(self._root)
            twin._dirs = {_moved(path, self.root, twin.root): directory(old) for path, old in self._dirs.items()}
            for old in self._changes:
                replaced = None if old.replaced is None else node(old.replaced)
                twin._record(_Change(node(old.node), slot(old.source), slot(old.target), replaced))
            if self._last_written is not None:
                twin._last_written = inodes.get(self._last_written)
            self._carry_real_files(twin, {_moved(path, self.root, twin.root): path for path in self._dirs})
            return twin

    def flip_bit(self, path: str, bit: int) -> None:
        """Flip one bit of a file in memory, on the platter as well. Bit 0 is the lowest of the first byte."""
        with self._lock:
            inode = self._inode_at(path)
            position, mask = bit >> 3, 1 << (bit & 7)
            if not 0 <= position < inode.live.length:
                raise ValueError(f"{path} has {inode.live.length} bytes, there is no bit {bit}")
            inode.live = inode.live.flip(position, mask)
            inode.durable = inode.durable.flip(position, mask)
            inode.doubtful = [write.flip(position, mask) for write in inode.doubtful]
            inode.pending = [write.flip(position, mask) for write in inode.pending]

    def files(self) -> list[str]:
        """Paths of all files in memory, sorted."""
        with self._lock:
            return sorted(path for path, node in self._walk_nodes() if isinstance(node, _Inode))

    def dump(self) -> dict[str, bytes]:
        """What a reader sees, by path below the root; a directory is a name that ends in `/`."""
        with self._lock:
            content: dict[str, bytes] = {}
            for path, node in self._walk_nodes():
                name = path[len(self.root) + 1 :]
                if isinstance(node, _Inode):
                    content[name] = node.live.read(node.live.length, 0)
                else:
                    content[name + "/"] = b""
            return content

    # The interface of Disk.

    def create(self, path: str) -> DiskFile:
        with self._lock:
            self._enter("create", path)
            if self._is_real(path):
                return super().create(path)
            directory, name = self._slot(path)
            if name in directory.names:
                raise _error(errno.EEXIST, path)
            if self._room() <= 0:
                raise _error(errno.ENOSPC, path)
            inode = _Inode(_Image(), _Image())
            inode.links = 1
            directory.names[name] = inode
            self._record(_Change(inode, None, (directory, name)))
            return FaultyFile(self, path, inode, writable=True)

    def open(self, path: str) -> DiskFile:
        with self._lock:
            self._enter("open", path)
            return super().open(path) if self._is_real(path) else FaultyFile(self, path, self._inode_at(path), True)

    def open_read(self, path: str) -> DiskFile:
        with self._lock:
            self._enter("open_read", path)
            if self._is_real(path):
                return super().open_read(path)
            return FaultyFile(self, path, self._inode_at(path), writable=False)

    def rename(self, source: str, target: str) -> None:
        with self._lock:
            self._enter("rename", f"{source} -> {target}")
            if self._both_real(source, target):
                super().rename(source, target)
                return
            source, target = self._path(source), self._path(target)
            from_directory, from_name = self._slot(source)
            to_directory, to_name = self._slot(target)
            node = from_directory.names.get(from_name)
            replaced = to_directory.names.get(to_name)
            if node is None:
                raise self._missing(source)
            if target.startswith(source + "/"):
                raise _error(errno.EINVAL, target)
            if source.startswith(target + "/"):
                raise _error(errno.ENOTEMPTY, target)
            if node is replaced:
                return  # as POSIX has it, also for two links to one file
            if isinstance(node, _Directory):
                if replaced is not None:
                    self._require_empty_directory(target, replaced)
                self._rename_real_directory(source, target)
                self._move_paths(source, target)
            elif isinstance(replaced, _Directory):
                raise _error(errno.EISDIR, target)
            del from_directory.names[from_name]
            to_directory.names[to_name] = node
            if isinstance(replaced, _Inode):
                self._unname(replaced)
            self._record(_Change(node, (from_directory, from_name), (to_directory, to_name), replaced))

    def link(self, source: str, target: str) -> None:
        with self._lock:
            self._enter("link", f"{source} -> {target}")
            if self._both_real(source, target):
                super().link(source, target)
                return
            from_directory, from_name = self._slot(source)
            inode = from_directory.names.get(from_name)
            if inode is None:
                raise self._missing(source)
            directory, name = self._slot(target)
            if name in directory.names:
                raise _error(errno.EEXIST, target)
            if isinstance(inode, _Directory):
                raise _error(errno.EPERM, source)
            directory.names[name] = inode
            inode.links += 1
            self._record(_Change(inode, None, (directory, name)))

    def unlink(self, path: str) -> None:
        with self._lock:
            self._enter("unlink", path)
            if self._is_real(path):
                super().unlink(path)
                return
            inode = self._inode_at(path)
            directory, name = self._slot(path)
            del directory.names[name]
            self._unname(inode)
            self._record(_Change(inode, (directory, name), None))

    def mkdir(self, path: str) -> None:
        with self._lock:
            self._enter("mkdir", path)
            if self._is_real(path):
                super().mkdir(path)
                return
            parent, name = self._slot(path)
            if name in parent.names:
                raise _error(errno.EEXIST, path)
            os.makedirs(path, exist_ok=True)
            directory = parent.names[name] = self._dirs[self._path(path)] = _Directory()
            self._record(_Change(directory, None, (parent, name)))

    def rmdir(self, path: str) -> None:
        with self._lock:
            self._enter("rmdir", path)
            if self._is_real(path):
                super().rmdir(path)
                return
            parent, name = self._slot(path)
            directory = parent.names.get(name)
            if directory is None:
                raise self._missing(path)
            self._require_empty_directory(path, directory)
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(path)
            del parent.names[name]
            del self._dirs[self._path(path)]
            self._record(_Change(directory, (parent, name), None))

    def listdir(self, path: str) -> list[str]:
        with self._lock:
            self._enter("listdir", path)
            directory = self._dirs.get(self._path(path))
            if directory is not None:
                return sorted([*directory.names, *self._real_names(path)])
            if self._is_real(path):
                return super().listdir(path)
            if self._exists(path):
                raise _error(errno.ENOTDIR, path)
            missing = self._missing(path)
            if isinstance(missing, FileNotFoundError):
                return []
            raise missing

    def exists(self, path: str) -> bool:
        with self._lock:
            self._require_power(path)
            return super().exists(path) if self._is_real(path) else self._exists(path)

    def is_dir(self, path: str) -> bool:
        with self._lock:
            self._require_power(path)
            return super().is_dir(path) if self._is_real(path) else self._path(path) in self._dirs

    def size(self, path: str) -> int:
        with self._lock:
            self._enter("size", path)
            if self._is_real(path) or self._path(path) in self._dirs:
                return super().size(path)
            return self._inode_at(path).live.length

    def changed_at(self, path: str) -> float:
        with self._lock:
            self._enter("changed_at", path)
            if not self._is_real(path):
                self._inode_at(path)  # it has to be there; a double has no clock
                return 0.0
            return super().changed_at(path)

    def sync_dir(self, path: str) -> None:
        with self._lock:
            self._enter("sync_dir", path)
            directory = self._dirs.get(self._path(path))
            if directory is not None:
                self._sync_names(directory)
            elif not (self._is_real(path) and super().is_dir(path)):
                raise _error(errno.ENOTDIR, path) if self._exists(path) else self._missing(path)

    def sync_all(self, path: str) -> None:
        with self._lock:
            fault = self._count("sync_all", path)
            if fault is not None:
                if fault.error is not None:
                    self._sync_contents(_Inode.fail_sync)
                raise fault.exception(path)
            if not (super().exists(path) if self._is_real(path) else self._exists(path)):
                raise self._missing(path)
            self._sync_contents(_Inode.sync)
            self._make_safe(list(self._changes))

    def free_bytes(self, path: str) -> int:
        with self._lock:
            self._enter("free_bytes", path)
            return max(0, self._room())

    # Calls and faults.

    def _require_power(self, path: str) -> None:
        if self.is_off:
            raise PowerCut(path)

    def _count(self, kind: str, path: str, size: int = 0) -> _Fault | None:
        if self.is_off:
            raise PowerCut(path)
        self.calls += 1
        self.trace.append(Call(kind, path, size, _call_site() if self.trace_sites else ""))
        if not self._plan:
            return None
        fault = self._plan.pop(self.calls, None)
        if fault is not None and fault.error is None:
            self.is_off = True
        return fault

    def _enter(self, kind: str, path: str, size: int = 0) -> None:
        fault = self._count(kind, path, size)
        if fault is not None:
            raise fault.exception(path)

    def _written_despite(self, fault: _Fault, size: int) -> int:
        if fault.written is not None:
            return min(fault.written, size)
        return self.rng.randint(0, size) if fault.error in (errno.EIO, errno.ENOSPC) else 0

    # Space.

    def _room(self) -> int:
        return UNLIMITED_BYTES if self.capacity is None else self.capacity - self._used

    def _store(self, inode: _Inode, offset: int, data: bytes) -> None:
        length = inode.live.length
        inode.write(offset, data)
        self._used += inode.live.length - length
        self._dirty[inode] = None
        if data:
            self._last_written = inode

    def _unname(self, inode: _Inode) -> None:
        inode.links -= 1
        self._forget_unused(inode)

    def _forget_unused(self, inode: _Inode) -> None:
        if not inode.links and not inode.handles:
            self._used -= inode.live.length

    # Paths.

    def _path(self, path: str) -> str:
        """The one spelling of `path` that `_dirs` knows."""
        if path in self._dirs:
            return path
        head, _, name = path.rpartition("/")
        if head in self._dirs and name not in ("", ".", ".."):
            return path
        path = os.path.abspath(path)
        if not path.startswith(self.root + "/") and path != self.root:
            raise ValueError(f"{path} is outside of the root of this disk, {self.root}")
        return path

    def _slot(self, path: str) -> _Slot:
        head, _, name = self._path(path).rpartition("/")
        directory = self._dirs.get(head)
        if directory is None:
            raise self._missing(path)
        return directory, name

    def _exists(self, path: str) -> bool:
        path = self._path(path)
        if path in self._dirs:
            return True
        head, _, name = path.rpartition("/")
        return head in self._dirs and name in self._dirs[head].names

    def _missing(self, path: str) -> OSError:
        """The error of a path that does not exist."""
        above = os.path.dirname(self._path(path))
        while above not in self._dirs:
            if self._exists(above):
                return _error(errno.ENOTDIR, path)
            above = os.path.dirname(above)
        return _error(errno.ENOENT, path)

    def _inode_at(self, path: str) -> _Inode:
        path = self._path(path)
        if path in self._dirs:
            raise _error(errno.EISDIR, path)
        directory, name = self._slot(path)
        node = directory.names.get(name)
        if not isinstance(node, _Inode):
            raise self._missing(path)
        return node

    def _require_empty_directory(self, path: str, node: _Node) -> None:
        if not isinstance(node, _Directory):
            raise _error(errno.ENOTDIR, path)
        if node.names or self._real_names(path):
            raise _error(errno.ENOTEMPTY, path)

    def _move_paths(self, source: str, target: str) -> None:
        inside = source + "/"
        for path in [path for path in self._dirs if path == source or path.startswith(inside)]:
            self._dirs[_moved(path, source, target)] = self._dirs.pop(path)

    def _walk_nodes(self) -> Iterator[tuple[str, _Node]]:
        for path, directory in list(self._dirs.items()):
            if directory is not self._root:
                yield path, directory
            for name, node in directory.names.items():
                if isinstance(node, _Inode):
                    yield f"{path}/{name}", node

    # Syncs.

    def _record(self, change: _Change) -> None:
        self._changes[change] = None
        for directory, _ in change.slots:
            directory.changes[change] = None

    def _sync_names(self, directory: _Directory) -> None:
        chosen = set(directory.changes)
        if any(change.crosses or change.removes is not None for change in chosen):
            _complete(self._changes, chosen)
            self._make_safe([change for change in self._changes if change in chosen])
        else:
            self._make_safe(list(directory.changes))

    def _make_safe(self, changes: list[_Change]) -> None:
        for change in changes:
            change.apply(lambda directory: directory.durable)
            if isinstance(change.node, _Directory):
                change.node.home = None if change.target is None else change.target[0]
            del self._changes[change]
            for directory, _ in change.slots:
                directory.changes.pop(change, None)

    def _sync_contents(self, sync: Callable[[_Inode], None]) -> None:
        for inode in self._dirty:
            sync(inode)
        self._dirty.clear()

    # Crashes.

    def _sibling(self, root: _Root) -> FaultyDisk:
        """An empty disk with the settings of this one."""
        if root is not None and os.path.exists(root) and os.listdir(root):
            raise _error(errno.ENOTEMPTY, os.fspath(root))
        disk = FaultyDisk(self.root if root is None else root, real_suffixes=self._real_suffixes)
        disk.rng.seed(self.rng.random())
        disk.capacity = self.capacity
        disk.trace_sites = self.trace_sites
        return disk

    def _survivor(self, rng: random.Random, mode: Mode, tear: int | None, zero_tails: bool, root: _Root) -> FaultyDisk:
        torn: dict[_Inode, _Image] = {}
        if tear is not None:
            if self._last_written is None:
                raise ValueError("cannot tear: nothing was written")
            torn[self._last_written] = self._last_written.torn_image(tear)
        names = self._surviving_names(rng, mode)
        # One chance for all writes of a crash, so that "nearly all" and "nearly none" come up as well as "half".
        chance = rng.random()
        after = self._sibling(root)
        inodes: dict[_Inode, _Inode] = {}
        origin: dict[str, str | None] = {}
        paths = {directory: path for path, directory in self._dirs.items()}

        def image(inode: _Inode) -> _Image:
            if inode in torn:
                return torn[inode]
            if mode == "random":
                return inode.random_image(rng, chance, zero_tails)
            return inode.live if mode == "all" else inode.safe_image()

        def revive(inode: _Inode) -> _Inode:
            if inode not in inodes:
                content = image(inode).share()
                inodes[inode] = _Inode(content, content)
                after._used += content.length
            inodes[inode].links += 1
            return inodes[inode]

        def grow(old: _Directory, new: _Directory, path: str) -> None:
            after._dirs[path] = new
            origin[path] = paths.get(old)
            for name, node in names(old).items():
                if isinstance(node, _Inode):
                    new.names[name] = revive(node)
                else:
                    child = new.names[name] = _Directory()
                    child.home = new
                    grow(node, child, f"{path}/{name}")
            new.durable = new.names.copy()

        grow(self._root, after._root, after.root)
        self._carry_real_files(after, origin)
        return after

    def _surviving_names(self, rng: random.Random, mode: Mode) -> Callable[[_Directory], dict[str, _Node]]:
        if mode == "all":
            return lambda directory: directory.names
        if mode == "none":
            return lambda directory: directory.durable
        chance = rng.random()
        chosen = {change for change in self._changes if rng.random() < chance}
        _complete(self._changes, chosen)
        changed: dict[_Directory, dict[str, _Node]] = {}

        def names_to_change(directory: _Directory) -> dict[str, _Node]:
            if directory not in changed:
                changed[directory] = directory.durable.copy()
            return changed[directory]

        for change in self._changes:
            if change in chosen:
                change.apply(names_to_change)
        return lambda directory: changed.get(directory, directory.durable)

    # The real directory.

    def _is_real(self, path: str) -> bool:
        if path.endswith(self._real_suffixes):
            return True
        return ".lmdb" in path and ".lmdb/" in self._path(path)[len(self.root) :] + "/"

    def _both_real(self, source: str, target: str) -> bool:
        real = self._is_real(source)
        if real != self._is_real(target):
            raise _error(errno.EXDEV, f"{source} -> {target}")
        return real

    # A clone that shares the root may have removed a real directory: that is no error of the one that still has it.

    def _real_names(self, path: str) -> list[str]:
        try:
            names = os.listdir(path)
        except FileNotFoundError:
            return []
        return [name for name in names if name.endswith(self._real_names_end)]

    def _rename_real_directory(self, source: str, target: str) -> None:
        try:
            os.rename(source, target)
        except FileNotFoundError:
            os.makedirs(target, exist_ok=True)

    def _carry_real_files(self, after: FaultyDisk, origin: Mapping[str, str | None]) -> None:
        """Make the real directories of `after`. Each gets the real files of the directory that it is now; `origin` says
        where that is, or None when it was removed, and its real files with it."""
        in_place = after.root == self.root
        if in_place and len(origin) == len(self._dirs) and all(path == old for path, old in origin.items()):
            _make_real_directories(origin)
            return
        with tempfile.TemporaryDirectory(dir=os.path.dirname(self.root)) as stage:
            carried: list[tuple[str, str]] = []
            for path, old in origin.items():
                for name in self._real_names(old) if old is not None else ():
                    source, target = os.path.join(old or "", name), os.path.join(path, name)
                    if in_place:
                        # Two directories may have changed places, so all files leave before the first one arrives.
                        staged = os.path.join(stage, str(len(carried)))
                        os.rename(source, staged)
                        source = staged
                    carried.append((source, target))
            if in_place:
                for path in self._dirs:
                    if os.path.dirname(path) == self.root:
                        shutil.rmtree(path, ignore_errors=True)
            _make_real_directories(origin)
            for source, target in carried:
                if in_place:
                    os.rename(source, target)
                elif os.path.isdir(source):
                    shutil.copytree(source, target)
                else:
                    shutil.copyfile(source, target)


def _make_real_directories(paths: Iterable[str]) -> None:
    for path in paths:
        if not os.path.isdir(path):
            os.makedirs(path, exist_ok=True)


def _call_site() -> str:
    """Where the engine called the disk: the nearest frame that is neither here nor in disk.py."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename in _OWN_FILES and frame.f_back is not None:
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


_OWN_FILES = (Disk.read.__code__.co_filename, _call_site.__code__.co_filename)
