"""The engine's numbers, with their units. Tests make them small; a user rarely changes one."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True)
class EngineSettings:
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
    store_index: str = "table"  # or "lmdb"
