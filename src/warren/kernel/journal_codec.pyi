from collections.abc import Sequence
from typing import Any

from warren.kernel.entry import Entry
from warren.kernel.overlay import Overlay
from warren.kernel.ranges import RangeSet

PUBLISH: int
ACK: int
PURGE: int
REQUEUE: int
RESERVE: int
GROUP: int
CHECKOUT: int
SETTLE: int
LEASE: int
STAGE: int
DELAY: int
DEDUP: int
BLOCK_HEADER_BYTES: int
RECORD_PREFIX_BYTES: int
PUBLISH_FIXED_BYTES: int
MOST_PRODUCER_BYTES: int
MOST_TARGETS: int

class RecordBuffer:
    file: int
    base: int
    count: int
    lsn: int
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    @property
    def empty(self) -> bool: ...
    def reset(self, file: int, base: int) -> None: ...
    def finish(self, lsn: int) -> None: ...
    def peek(self, offset: int, size: int) -> bytes: ...
    def append_publishes(self, sid: int, entries: list[Entry], overlay: Overlay, state: int) -> None: ...
    def append_fanout(
        self,
        entry: Entry,
        targets: Sequence[tuple[int, int, Overlay]],
        state: int,
        publishing_id: int = 0,
        producer: bytes | None = None,
    ) -> None: ...
    def append_ranges(self, kind: int, sid: int, pairs: list[int]) -> None: ...
    def append_requeue(self, sid: int, counts: list[tuple[int, int]]) -> None: ...
    def append_reserve(self, uid: int, upto: int) -> None: ...
    def append_other(self, kind: int, body: bytes) -> None: ...
    def carry(
        self,
        sid: int,
        rows: bytes,
        data: bytes,
        base: int,
        overlay: Overlay,
        damaged: list[tuple[int, int, int]],
    ) -> list[int]: ...
    def begin_group(self) -> None: ...
    def end_group(self) -> None: ...

def read_publishes(
    rows: bytes, data: bytes, base: int, entries: list[Entry], damaged: list[tuple[int, int, int]]
) -> None: ...
def replay(
    data: bytes,
    start: int,
    file: int,
    overlays: dict[int, Overlay],
    acks: dict[int, RangeSet],
    counts: dict[int, dict[int, int]],
    reserved: dict[int, int],
    others: list[tuple[int, Any]],
    damaged: list[tuple[int, int]],
    summed: list[int] | None = None,
) -> tuple[int, int, int, int]: ...
