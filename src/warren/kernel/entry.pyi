from collections.abc import Iterable
from typing import Any, TypeVar

from warren.kernel.ranges import RangeSet

PERSISTENT: int
IN_STORE: int
IN_QS: int
SLOTTED: int

class Entry:
    head: Any
    body: Any
    msg_id: Any
    seq: int
    expiry: int
    published_at: int
    offset: int
    size: int
    flags: int
    level: int
    def __init__(
        self,
        seq: int,
        head: bytes | None,
        body: bytes | None,
        flags: int = 0,
        published_at: int = 0,
        expiry: int = 0,
        msg_id: bytes | None = None,
        size: int = 0,
        offset: int = 0,
    ) -> None: ...
    def copy(self) -> Entry: ...

class Delivery:
    entry: Entry
    queue: Any
    delivery_count: int
    redelivered: bool
    settled: bool

_D = TypeVar("_D", bound=Delivery)

def make_entries(
    bodies: Iterable[bytes], head: bytes, first_seq: int, flags: int, published_at: int, expiry: int
) -> tuple[list[Entry], int]: ...
def number_entries(entries: list[Entry], first_seq: int, level: int) -> None: ...
def split_levels(entries: list[Entry], highest: int) -> list[tuple[int, list[Entry]]]: ...
def set_level(entries: list[Entry], level: int) -> None: ...
def summarize(entries: list[Entry]) -> tuple[int, int, int]: ...
def without(entries: Iterable[Entry], mask: int) -> list[Entry]: ...
def bodiless(entries: Iterable[Entry], mask: int, flags: int) -> list[Entry]: ...
def sort_by_seq(entries: list[Entry]) -> None: ...
def body_spans(
    entries: list[Entry], segment_size: int, prefix: int, most: int, gap: int
) -> list[tuple[int, int, int, int, int]]: ...
def total_size(entries: Iterable[Entry]) -> int: ...
def ram_total(entries: Iterable[Entry]) -> tuple[int, int]: ...
def persistent_total(entries: Iterable[Entry]) -> tuple[int, int]: ...
def drop_bodies(entries: Iterable[Entry]) -> tuple[int, int]: ...
def record_pending(pending: dict[int, Entry], entries: list[Entry]) -> None: ...
def take_pending(pending: dict[int, Entry], seqs: Iterable[int]) -> tuple[list[Entry], list[int]]: ...
def entry_ranges(entries: Iterable[Entry]) -> list[int]: ...
def seq_ranges(seqs: list[int]) -> list[int]: ...
def deliveries(
    cls: type[_D],
    entries: list[Entry],
    queue: object,
    redelivered_below: int,
    returned: RangeSet,
    counts: dict[int, int],
) -> list[_D]: ...
def settle(messages: list[Any], queue: object) -> tuple[list[int], Any]: ...
