"""The batch source: what Spark calls to plan a read, and what a task does with its share.

Spark plans in a short-lived process of the driver, pickles the reader, and runs `read` in the executors. So a reader keeps
nothing in memory between the two, and no secret in itself: what tasks need is in their partitions.

    path    the driver plans from the files; a task reads files
    url     the driver asks the broker for a snapshot, which it holds for `snapshotTtl` seconds, then, where it sees the
            snapshot's files, plans as for a path; else the data server beside the broker plans. A task reads files where
            it sees them, else from the data server with the snapshot's ticket
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from warren.errors import StoreLockedError
from warren.pipeline.broker_client import FIRST_SECONDS, BrokerClient, Credentials, sees_files
from warren.pipeline.errors import CredentialsError, PipelineError
from warren.pipeline.options import SourceOptions, plain_options
from warren.pipeline.parts import StreamPart
from warren.pipeline.rows import read_part
from warren.pipeline.store_view import broker_url, estimated_rows, open_view, owner_of, vhosts_of
from warren.storage.layout import hashed

_READ = "/snapshots/read"
_PLAN = "/snapshots/plan"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the files of a vhost are, and who else can read them. The ticket opens one snapshot, for a while."""

    root: str
    host: str | None = None  # the machine that has them; None: whoever was given the path
    data_url: str | None = None
    ticket: str | None = None
    access: str = "auto"
    ca_file: str | None = None
    url: str | None = None  # of the broker, for heartbeats

    def __repr__(self) -> str:
        return f"Place(root={self.root!r}, data_url={self.data_url!r})"

    @property
    def by_files(self) -> bool:
        """Does this process read files, or ask the data server? Raises PipelineError where it is to read files and cannot."""
        if self.host is None:
            return True
        if self.access == "http":
            return False
        seen = sees_files(self.root, self.host)
        if not seen and self.access == "files":
            raise PipelineError(
                f"access=files is asked for, but this machine does not see {self.root} of the broker's machine; "
                "use access=auto or access=http"
            )
        return seen


class WarrenPartition(InputPartition):
    """What one task reads: some parts."""

    def __init__(self, place: Place, parts: tuple[StreamPart, ...]) -> None:
        super().__init__(None)
        self.place = place
        self.parts = parts

    def __repr__(self) -> str:
        queues = ", ".join(sorted({part.queue for part in self.parts}))
        return f"WarrenPartition({len(self.parts)} parts of {queues})"


class OptionsReader(DataSourceReader):
    """A reader that knows what it is asked for, and forgets on its way to executors with which secrets."""

    def __init__(self, options: Mapping[str, str], schema: pa.Schema) -> None:
        self._schema = schema
        self._asked = SourceOptions.parse(options)
        self._options: dict[str, str] | None = dict(options)

    def __getstate__(self) -> dict[str, Any]:
        # Credentials are among the options.
        return {**self.__dict__, "_options": None}


class WarrenBatchReader(OptionsReader):
    """Reads messages."""

    def partitions(self) -> list[InputPartition]:
        assert self._options is not None
        place, parts = plan_read(self._asked, self._options)
        return [WarrenPartition(place, group) for group in _grouped(parts, self._asked)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, WarrenPartition):  # Spark's own, where there is nothing to read
            return
        _keep_alive(partition.place)
        for part in partition.parts:
            yield from read_at(partition.place, part, self._schema, self._asked.fail_on_data_loss)


def plan_read(asked: SourceOptions, options: Mapping[str, str]) -> tuple[Place, list[StreamPart]]:
    """Where to read, and what. `options` may hold secrets, which go no further."""
    place = find_place(asked, options)
    if place.by_files:
        data_directory = os.path.dirname(os.path.dirname(place.root))
        return place, open_view(data_directory, asked.vhost).parts(asked)
    assert place.data_url is not None
    assert place.ticket is not None
    with BrokerClient(place.data_url, ca_file=place.ca_file) as client:
        answer = client.ask(place.data_url, _PLAN, place.ticket, {"options": plain_options(options)})
    return place, [StreamPart.from_json(part) for part in answer["parts"]]


def find_place(asked: SourceOptions, options: Mapping[str, str]) -> Place:
    """The files to read: those of a path, or of a snapshot that the broker takes now."""
    url = asked.url
    if asked.path is not None:
        roots = vhosts_of(asked.path)
        root = roots.get(asked.vhost)
        if root is None or owner_of(root) is None:
            # Where there is no such vhost, the view says so and names those that there are.
            return Place(root or os.path.join(asked.path, "vhosts", hashed(asked.vhost)))
        url = broker_url(asked.path)
        if url is None or not has_credentials(options):
            open_view(asked.path, asked.vhost)  # refuses, and says what to do
            raise StoreLockedError(f"{asked.path} was in use a moment ago; try again")
    assert url is not None
    credentials = Credentials.from_options(options)
    with BrokerClient(url, credentials, first_seconds=FIRST_SECONDS, ca_file=asked.ca_file) as client:
        snapshot = client.call(
            "snapshots/take",
            vhost=asked.vhost,
            queues=[asked.queue] if asked.queue is not None else None,
            pattern=asked.queue_pattern,
            ttl=asked.snapshot_ttl,
            group=asked.snapshot_group,
        )
    root = os.path.join(snapshot["path"], "vhosts", hashed(asked.vhost))
    return Place(root, snapshot["host"], snapshot["data_url"], snapshot["ticket"], asked.access, asked.ca_file, url)


def _keep_alive(place: Place) -> None:
    """A task begins to read a snapshot: its time begins anew. One that has ended, or a broker that is busy, shows itself when
    the files are read."""
    if place.url is not None:
        with suppress(PipelineError), BrokerClient(place.url, ca_file=place.ca_file, retry_seconds=0) as client:
            client.call("snapshots/heartbeat", ticket=place.ticket)


def has_credentials(options: Mapping[str, str]) -> bool:
    try:
        Credentials.from_options(options)
    except CredentialsError:
        return False
    return True


def read_at(place: Place, part: StreamPart, schema: pa.Schema, fail_on_data_loss: bool) -> Iterator[pa.RecordBatch]:
    """The batches of a part, from files or from the data server."""
    if place.by_files:
        if place.host is None:
            _refuse_owned(place.root)
        try:
            yield from read_part(place.root, part, schema, fail_on_data_loss=fail_on_data_loss)
        except FileNotFoundError as error:
            raise PipelineError(
                f"{error.filename} of queue {part.queue!r} is not there any more: the snapshot has ended, or the "
                "directory was used since the read was planned. Plan it anew; option snapshotTtl keeps a snapshot longer"
            ) from error
        return
    assert place.data_url is not None
    assert place.ticket is not None
    asked = {"part": part.to_json(), "columns": schema.names, "fail_on_data_loss": fail_on_data_loss}
    with BrokerClient(place.data_url, ca_file=place.ca_file) as client:
        for batch in client.stream(place.data_url, _READ, place.ticket, asked):
            yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)


def _refuse_owned(root: str) -> None:
    """Since a read of a path was planned, somebody may have opened the store, whose files change from then on."""
    pid = owner_of(root)
    if pid is not None:
        raise StoreLockedError(f"{root} was opened by process {pid} after the read of it was planned; load it anew")


def _grouped(parts: list[StreamPart], asked: SourceOptions) -> Iterator[tuple[StreamPart, ...]]:
    """Small parts share a task: ten thousand short queues are not ten thousand tasks."""
    weights = [estimated_rows(part) for part in parts]
    target = max(1, min(asked.max_records, -(-sum(weights) // asked.min_partitions)))
    group: list[StreamPart] = []
    total = 0
    for part, weight in zip(parts, weights, strict=True):
        if group and total + weight > target:
            yield tuple(group)
            group, total = [], 0
        group.append(part)
        total += weight
    if group:
        yield tuple(group)
