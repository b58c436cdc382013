"""A small coverage-guided fuzzer: what reaches something new is kept, and changed further.

Comparisons guide it too: where a parser compared a number of the input with another one, the other one is put in its place.
So it gets past magic numbers and lengths; and a checksum that did not fit is made to fit.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Literal

MOST_BYTES = 4096
_PAIRS = 24
_REPAIRS = 3
_ORDERS: tuple[Literal["little", "big"], ...] = ("little", "big")
_INTERESTING = (
    0,
    1,
    2,
    7,
    8,
    127,
    128,
    255,
    256,
    32767,
    32768,
    65535,
    65536,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63,
    2**64 - 1,
)


class Runtime:
    """`runtime.c`, which counts."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self.begin: Callable[[], object] = self._library.warren_fuzz_begin
        self.end: Callable[[], int] = self._library.warren_fuzz_end
        self.reached: Callable[[int], int] = self._library.warren_fuzz_reached
        self._a, self._b = ctypes.c_uint64(), ctypes.c_uint64()

    def some_pairs(self, chance: random.Random) -> list[tuple[int, int, int]]:
        """Numbers that were compared in the last run, and were not equal, with their size in bytes."""
        pairs = set()
        for _ in range(_PAIRS):
            size = self._library.warren_fuzz_pair(chance.randrange(256), ctypes.byref(self._a), ctypes.byref(self._b))
            if size:
                pairs.add((self._a.value, self._b.value, size))
        return sorted(pairs)

    def checksums(self) -> list[tuple[bytes, bytes]]:
        """Those that were computed in the last run and those that they were compared with, in some order."""
        found = []
        while self._library.warren_fuzz_checksums(len(found), ctypes.byref(self._a), ctypes.byref(self._b)):
            found.append((self._a.value.to_bytes(8, "little")[:4], self._b.value.to_bytes(8, "little")[:4]))
        return found


class BlackBox:
    """The input that runs and how many ran before, where whoever watches finds them after a crash."""

    _HEAD = struct.Struct("<QI")

    def __init__(self, path: Path, *, create: bool) -> None:
        size = self._HEAD.size + MOST_BYTES * 2
        if create:
            path.write_bytes(bytes(size))
        self._file = path.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), size)

    def write(self, runs: int, data: bytes) -> None:
        self._HEAD.pack_into(self._map, 0, runs, len(data))
        self._map[self._HEAD.size : self._HEAD.size + len(data)] = data

    def read(self) -> tuple[int, bytes]:
        runs, size = self._HEAD.unpack_from(self._map)
        return runs, self._map[self._HEAD.size : self._HEAD.size + size]

    def close(self) -> None:
        self._map.close()
        self._file.close()


class Fuzzer:
    def __init__(self, run: Callable[[bytes], None], runtime: Runtime, chance: random.Random, box: BlackBox) -> None:
        self._run = run
        self._runtime = runtime
        self._chance = chance
        self._box = box
        self._pairs: list[tuple[int, int, int]] = []  # that the parent of what runs compared
        self.corpus: list[bytes] = []
        self.runs = 0

    def go(self, seeds: list[bytes], runs: int) -> None:
        for seed in seeds:
            assert len(seed) <= MOST_BYTES, f"a seed of {len(seed)} bytes"
            self._try(seed)
            self.corpus.append(seed)
        while self.runs < runs:
            parent = self._pick()
            self._try(parent)
            self._pairs = self._runtime.some_pairs(self._chance)
            for _ in range(20):
                self._try_repaired(self._mutated(parent))

    def replay(self) -> None:
        """All that was kept, once more."""
        for data in self.corpus:
            self._box.write(self.runs, data)
            self._run(data)

    def _try(self, data: bytes) -> None:
        self._box.write(self.runs, data)
        self.runs += 1
        self._runtime.begin()
        try:
            self._run(data)
        finally:
            news = self._runtime.end()
        if news:
            self.corpus.append(data)

    def _try_repaired(self, data: bytes) -> None:
        """With the checksums as they are, and then as the parser would like them: else no change inside of a record would get
        past its checksum."""
        self._try(data)
        for _ in range(_REPAIRS):
            fitting = [(a, b) for pair in self._runtime.checksums() for a, b in (pair, pair[::-1]) if a in data]
            if not fitting:
                return
            data = data.replace(*self._chance.choice(fitting[:4]), 1)
            self._try(data)

    def _pick(self) -> bytes:
        """The newest reached something that nothing before it did: half of the time one of these."""
        recent = self.corpus[-max(8, len(self.corpus) // 8) :]
        return self._chance.choice(recent if self._chance.random() < 0.5 else self.corpus)

    def _mutated(self, parent: bytes) -> bytes:
        data = bytearray(parent)
        for _ in range(self._chance.choice((1, 1, 1, 2, 3, 5))):
            self._chance.choice(_MUTATIONS)(self, data)
        return bytes(data[:MOST_BYTES])

    # -- mutations -----------------------------------------------------------------------------------------------------

    def _flip(self, data: bytearray) -> None:
        if data:
            data[self._chance.randrange(len(data))] ^= 1 << self._chance.randrange(8)

    def _number(self, data: bytearray) -> None:
        size = self._chance.choice((1, 2, 4, 8))
        if len(data) >= size:
            at = self._chance.randrange(len(data) - size + 1)
            order = self._chance.choice(_ORDERS)
            was = int.from_bytes(data[at : at + size], order)
            new = self._chance.choice(
                (self._chance.choice(_INTERESTING), was + self._chance.randrange(-8, 9), len(data))
            )
            data[at : at + size] = (new % 2 ** (8 * size)).to_bytes(size, order)

    def _compared(self, data: bytearray) -> None:
        """Put one side of a comparison where the other one is."""
        if not self._pairs:
            return
        a, b, size = self._chance.choice(self._pairs)
        if self._chance.random() < 0.5:
            a, b = b, a
        order = self._chance.choice(_ORDERS)
        old = (a % 2 ** (8 * size)).to_bytes(size, order)
        places = _places(data, old)
        if places:
            at = self._chance.choice(places)
            new = b + self._chance.choice((0, 0, 0, 1, -1))
            data[at : at + size] = (new % 2 ** (8 * size)).to_bytes(size, order)

    def _cut(self, data: bytearray) -> None:
        if data:
            at = self._chance.randrange(len(data))
            del data[at : at + self._chance.choice((1, 2, 8, 64, len(data)))]

    def _repeat(self, data: bytearray) -> None:
        if data:
            at = self._chance.randrange(len(data))
            piece = data[at : at + self._chance.choice((1, 8, 64, 256))]
            data[at:at] = piece

    def _insert(self, data: bytearray) -> None:
        at = self._chance.randrange(len(data) + 1)
        data[at:at] = self._chance.randbytes(self._chance.choice((1, 2, 4, 16)))

    def _splice(self, data: bytearray) -> None:
        other = self._chance.choice(self.corpus)
        at = self._chance.randrange(len(other) + 1)
        data[self._chance.randrange(len(data) + 1) :] = other[at:]


def _places(data: bytearray, piece: bytes) -> list[int]:
    places, at = [], data.find(piece)
    while at >= 0 and len(places) < 100:
        places.append(at)
        at = data.find(piece, at + 1)
    return places


_MUTATIONS: tuple[Callable[[Fuzzer, bytearray], None], ...] = (
    Fuzzer._flip,
    Fuzzer._number,
    Fuzzer._number,
    Fuzzer._compared,
    Fuzzer._compared,
    Fuzzer._compared,
    Fuzzer._cut,
    Fuzzer._repeat,
    Fuzzer._insert,
    Fuzzer._splice,
)
