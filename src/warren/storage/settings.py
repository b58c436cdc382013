"""The engine's numbers, with their units. Tests make them small; a user rarely changes one."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from warren.errors import InvalidArgumentError

KIB = 1024
MIB = 1024 * KIB
PRODUCERS_PER_QUEUE = 10_000
_MOST = (1 << 31) - 1  # of bytes in one file or message: places in files have 32 bits


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Raises InvalidArgumentError for a value that the engine cannot work with."""

    segment_entries: int = 4096  # seq_ids in a segment
    journal_file_bytes: int = 32 * MIB  # a journal file is sealed, and a checkpoint starts, at this size
    journal_file_records: int = 262_144  # or at this many records: it bounds the overlay's memory
    journal_files_behind: int = 3  # sealed files that may wait for a checkpoint while much of them would be carried on
    journal_files_most: int = 3  # sealed files behind which publishers are slowed down
    commit_bytes: int = 1 * MIB  # a publisher that finds more than this in the buffer commits it
    commit_interval: float = 0.025  # seconds until what nobody waits for is committed
    embed_below: int = 4096  # payloads of this size and more go to the message store
    large_body_bytes: int = 1 * MIB  # bodies over this are written to a file of their own, in slices
    max_message_bytes: int = 128 * MIB
    store_file_bytes: int = 16 * MIB
    garbage_fraction: float = 0.5
    carry_below: int = 64 * KIB  # a queue with less than this in a retiring file has it carried forward
    checkpoint_batch_rows: int = 65536  # rows whose bodies are written before one sync
    sync_all_above: int = 64  # touched files above which one syncfs replaces their syncs
    io_batch: int = 4096  # betas are pushed to delta in batches of at least this
    load_entries: int = 2048  # entries read from delta at once
    ram_target: int = 2048  # messages that a queue may keep whole in RAM
    ram_slack: int = 256  # paging waits for this many more, so that single publishes page in batches
    ram_bytes: int = 256 * MIB  # cap of message bytes in RAM of a vhost; above half of it, queues page by rate
    reserve_ahead: int = 4096  # seq_ids reserved before they are needed
    reserve_bytes: int = 4 * MIB  # disk kept back so that acks have room when it is full
    producers_per_queue: int = (
        PRODUCERS_PER_QUEUE  # whose last numbers a queue remembers; the silent ones are forgotten
    )
    store_index: str = "table"  # or "lmdb"

    # The least and the most, where they are not "0 or more".
    _BOUNDS: ClassVar[dict[str, tuple[int, int]]] = {
        "segment_entries": (1, 65536),  # .qa counts slots in 16 bits
        "journal_file_bytes": (1024, _MOST),  # fewer, and a checkpoint's own records fill the next file, without end
        "journal_file_records": (64, _MOST),
        "journal_files_behind": (1, _MOST),
        "journal_files_most": (1, _MOST),
        "max_message_bytes": (1, _MOST),
        "store_file_bytes": (1, _MOST),
        "garbage_fraction": (0, 1),
        "checkpoint_batch_rows": (1, _MOST),
        "io_batch": (1, _MOST),
        "load_entries": (1, _MOST),
        "reserve_ahead": (1, _MOST),
        "producers_per_queue": (1, _MOST),
    }

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "store_index":
                if value not in ("table", "lmdb"):
                    raise InvalidArgumentError(f"store_index is {value!r}; it is 'table' or 'lmdb'")
                continue
            kinds = (int, float) if field.type == "float" else (int,)
            low, high = self._BOUNDS.get(field.name, (0, 1 << 62))
            if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
                what = "a number" if len(kinds) == 2 else "an integer"
                most = f"of {low} to {high}" if field.name in self._BOUNDS else "of 0 or more"
                raise InvalidArgumentError(f"{field.name} is {value!r}; it is {what} {most}")
