"""What one task reads: some messages of one stream, as files and what the journal says about them.

A part says everything that its reader needs besides the vhost's root directory, so it can travel: pickled, inside of Spark's
partitions, and as JSON over HTTP. It holds no path above the root and no secret.

Rules:

1. A part is read by files alone. Whoever plans it has replayed the journal; its reader never does.
2. Ranges of seq_ids are packed pairs (u64 first, u64 count, little-endian), sorted and apart from each other.
3. A message is alive if it is in `rows`, or has a valid slot that neither `acked` nor its .qa acks. Where it is in `rows`,
   its slot does not count: a checkpoint was under way.
4. With `only`, the planner vouches for these messages: .qa is not asked, and each of them has to be found.
"""

from __future__ import annotations

import dataclasses
import struct
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from warren.kernel.ranges import RangeSet
from warren.pipeline.errors import PipelineError

State = Literal["ready", "unacked", "all"]
STATES: tuple[str, ...] = get_args(State)

# The number in `rows` that stands for the file `transients`; journal files count from 0 and never get there.
TRANSIENTS_FILE = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPart:
    """Some messages of one stream: a queue, or one priority level of it.

    >>> part = StreamPart(vhost="/", queue="orders", sid=256, directory="queues/da9b99c88222a0c0da0ffa70-1", segments=(0,))
    >>> StreamPart.from_json(part.to_json()) == part
    True
    """

    vhost: str
    queue: str
    sid: int
    directory: str  # the stream's, below the vhost's root
    segment_size: int = 4096
    boot: int = 0  # slots of transient messages of this boot are alive; 0: none are
    segments: tuple[int, ...] = ()  # numbers of those to read
    only: bytes | None = None  # pairs: exactly these messages; None: all that are alive
    acked: bytes = b""  # pairs: acked by the journal
    rows: bytes = b""  # of `kernel.overlay`: messages that are in a journal file, or in `transients`
    unacked: bytes = b""  # pairs: handed out, not acked
    redelivered_below: int = 0  # all messages below were handed out before
    returned: bytes = b""  # pairs: so were these
    counts: tuple[tuple[int, int], ...] = ()  # seq_id, delivery count; what .qa says comes in addition
    from_seq: int = 0
    to_seq: int | None = None  # exclusive
    since: int | None = None  # published at this time or later, in microseconds
    until: int | None = None  # published before this time
    state: State = "all"
    # Below the root, a file in the journal's format with messages that were only in RAM. Rows of TRANSIENTS_FILE are in
    # it; without any such row, all its messages of this stream are meant.
    transients: str | None = None
    database: str | None = None  # below the root, the queue.db of a queue in SQLite, in the place of segments

    @property
    def level(self) -> int:
        """The priority level of the stream."""
        return self.sid & 0xFF

    def wanted(self) -> RangeSet:
        """The seq_ids that come into question by all that the part itself says, before any file is read."""
        stop = self.to_seq if self.to_seq is not None else 1 << 63
        chosen = RangeSet()
        if self.from_seq < stop:
            if self.only is not None:
                chosen.add_pairs(RangeSet(unpack_pairs(self.only)).pairs(self.from_seq, stop))
            else:
                chosen.add(self.from_seq, stop - self.from_seq)
        chosen.remove_pairs(unpack_pairs(self.acked))
        if self.state == "ready":
            chosen.remove_pairs(unpack_pairs(self.unacked))
        elif self.state == "unacked":
            out = RangeSet(unpack_pairs(self.unacked))
            return RangeSet(n for f, c in _couples(chosen.pairs()) for n in out.pairs(f, f + c))
        return chosen

    def to_json(self) -> dict[str, Any]:
        """As values of JSON; bytes are base64."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> StreamPart:
        """The part that `to_json` described. Raises PipelineError for what is none."""
        names = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - names)
        if unknown:
            raise PipelineError(
                f"a part of a stream has no field {unknown[0]!r}; it was made by another version of Warren"
            )
        given = dict(values)
        try:
            for name in ("only", "acked", "rows", "unacked", "returned"):
                if given.get(name) is not None:
                    given[name] = b64decode(given[name], validate=True)
            given["segments"] = tuple(given.get("segments", ()))
            given["counts"] = tuple((int(seq), int(count)) for seq, count in given.get("counts", ()))
            return cls(**given)
        except (TypeError, ValueError) as error:
            raise PipelineError(f"this is no part of a stream: {error}") from error


def pack_pairs(pairs: Iterable[int]) -> bytes:
    """A flat list first, count, ... as a part has it.

    >>> unpack_pairs(pack_pairs([4, 2, 9, 1]))
    [4, 2, 9, 1]
    """
    numbers = list(pairs)
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def unpack_pairs(packed: bytes) -> list[int]:
    """The flat list of packed pairs."""
    return list(struct.unpack(f"<{len(packed) // 8}Q", packed))


def _couples(flat: list[int]) -> list[tuple[int, int]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return b64encode(value).decode("ascii")
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
