"""The options of the source and the sink, by name, checked before anything is opened.

Spark hands options over as text, with names in any case. An option that nobody knows is refused by name, with the nearest
one that exists: a misspelt `toSeqId` must not read a whole queue. Secrets are options, too; `SourceOptions`, which is kept,
shown and sent, has none of them.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from warren.patterns import name_pattern
from warren.pipeline.errors import OptionError
from warren.pipeline.parts import STATES, State
from warren.pipeline.schema import checked_columns, unknown

Use = Literal["batch read", "streaming read", "write"]

READ: tuple[Use, ...] = ("batch read", "streaming read")
_ANY: tuple[Use, ...] = (*READ, "write")
_BATCH: tuple[Use, ...] = ("batch read",)
_STREAM: tuple[Use, ...] = ("streaming read",)
_WRITE: tuple[Use, ...] = ("write",)

OPTIONS: dict[str, tuple[Use, ...]] = {
    "path": _BATCH,
    "url": _ANY,
    "user": _ANY,
    "password": _ANY,
    "token": _ANY,
    "passwordFile": _ANY,
    "tokenFile": _ANY,
    "caFile": _ANY,
    "vhost": _ANY,
    "queue": READ,
    "queuePattern": READ,
    "fromSeqId": _BATCH,
    "toSeqId": _BATCH,
    "since": _BATCH,
    "until": _BATCH,
    "state": _BATCH,
    "columns": READ,
    "minPartitions": READ,
    "maxRecordsPerPartition": READ,
    "failOnDataLoss": READ,
    "access": READ,
    "table": _BATCH,
    "snapshotTtl": READ,
    "snapshotGroup": _BATCH,
    "lease": _STREAM,
    "startingOffsets": _STREAM,
    "maxOffsetsPerTrigger": _STREAM,
    "maxBytesPerTrigger": _STREAM,
    "minOffsetsPerTrigger": _STREAM,
    "maxTriggerDelay": _STREAM,
    "mode": _STREAM,
    "asyncProgressTrackingEnabled": _STREAM,
    "checkpointLocation": ("streaming read", "write"),  # Spark's own; it passes it on
    "exchange": _WRITE,
    "routingKey": _WRITE,
    "producerName": _WRITE,
    "maxStageBytes": _WRITE,
    "mandatory": _WRITE,
}

SECRETS = frozenset({"user", "password", "token", "passwordFile", "tokenFile"})
_BY_LOWER = {name.lower(): name for name in OPTIONS}

ACCESSES = ("auto", "files", "http")
TABLES = ("messages", "queues", "segments", "files", "journal")
MODES = ("consume", "tap")
_OF_MESSAGES = ("fromSeqId", "toSeqId", "since", "until", "state")

_DEFAULT_PARTITIONS = 4
_DEFAULT_RECORDS = 1_000_000
_DEFAULT_TTL = 3600  # seconds
_MOST_SECONDS = 253_402_300_800  # the year 10000


def checked_options(options: Mapping[str, str], use: Use) -> dict[str, str]:
    """The options under their proper names. Raises OptionError for one that is unknown, or is not for this use.

    >>> checked_options({"QUEUE": "orders"}, "batch read")
    {'queue': 'orders'}
    """
    given: dict[str, str] = {}
    for name, value in options.items():
        proper = _BY_LOWER.get(name.lower())
        if proper is None:
            raise OptionError(unknown("option", name, [known for known, uses in OPTIONS.items() if use in uses]))
        if use not in OPTIONS[proper]:
            raise OptionError(
                f"option {proper!r} is for a {' or a '.join(OPTIONS[proper])}, not for a {use}; leave it out"
            )
        given[proper] = value
    return given


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """What a batch read was asked for, without secrets."""

    path: str | None = None
    url: str | None = None
    vhost: str = "/"
    queue: str | None = None
    queue_pattern: str | None = None
    from_seq: int = 0
    to_seq: int | None = None
    since: int | None = None  # microseconds
    until: int | None = None
    state: State = "all"
    columns: tuple[str, ...] | None = None
    min_partitions: int = _DEFAULT_PARTITIONS
    max_records: int = _DEFAULT_RECORDS  # of a partition
    fail_on_data_loss: bool = True
    access: str = "auto"
    table: str = "messages"
    snapshot_ttl: int = _DEFAULT_TTL
    snapshot_group: str | None = None  # snapshots of one group are released together
    ca_file: str | None = None

    @classmethod
    def parse(cls, options: Mapping[str, str], *, place_given: bool = False) -> SourceOptions:
        """Raises OptionError. `place_given`: path or url are not among the options, because the caller knows the place.

        >>> SourceOptions.parse({"path": "data", "queue": "orders", "state": "ready"}).state
        'ready'
        """
        given = checked_options(options, "batch read")
        table = one_of(given, "table", TABLES, "messages")
        for name in _OF_MESSAGES if table != "messages" else ():
            if name in given:
                raise OptionError(f"option {name} chooses messages, and table={table} has none: leave it out")
        if not place_given and ("path" in given) == ("url" in given):
            what = "both path and url are" if "path" in given else "neither path nor url is"
            raise OptionError(
                f"{what} given; give path, a data directory or a snapshot, or url, the HTTP address of a running broker"
            )
        if table == "messages" and "queue" not in given and "queuePattern" not in given:
            raise OptionError("no queue is given; give queue, or queuePattern, such as '.*' for all of them")
        if "queue" in given and "queuePattern" in given:
            raise OptionError(
                f"both queue={given['queue']!r} and queuePattern={given['queuePattern']!r} are given; give one"
            )
        columns = given.get("columns")
        names = None if columns is None else tuple(name.strip() for name in columns.split(","))
        if table == "messages" and names is not None:
            checked_columns(names)
        return cls(
            path=given.get("path"),
            url=given.get("url"),
            vhost=given.get("vhost", "/"),
            queue=given.get("queue"),
            queue_pattern=_pattern(given.get("queuePattern")),
            from_seq=whole_number(given, "fromSeqId", 0) or 0,
            to_seq=whole_number(given, "toSeqId", 0),
            since=_moment(given, "since"),
            until=_moment(given, "until"),
            state=cast(State, one_of(given, "state", STATES, "all")),
            columns=names,
            min_partitions=whole_number(given, "minPartitions", 1) or _DEFAULT_PARTITIONS,
            max_records=whole_number(given, "maxRecordsPerPartition", 1) or _DEFAULT_RECORDS,
            fail_on_data_loss=truth(given, "failOnDataLoss", True),
            access=one_of(given, "access", ACCESSES, "auto"),
            table=table,
            snapshot_ttl=whole_number(given, "snapshotTtl", 1) or _DEFAULT_TTL,
            snapshot_group=given.get("snapshotGroup"),
            ca_file=given.get("caFile"),
        )

    def takes(self, queue: str) -> bool:
        """Is this queue one of those that are asked for?"""
        if self.queue is not None:
            return queue == self.queue
        return self.queue_pattern is None or re.fullmatch(self.queue_pattern, queue) is not None


def plain_options(options: Mapping[str, str]) -> dict[str, str]:
    """The options of a read that say what to read; neither where, nor with which secrets. Safe to send and to show."""
    given = {_BY_LOWER.get(name.lower(), name): value for name, value in options.items()}
    return {name: value for name, value in given.items() if name not in SECRETS | {"path", "url", "caFile", "access"}}


def whole_number(given: Mapping[str, str], name: str, least: int) -> int | None:
    """The number of an option, None where it is not given."""
    text = given.get(name)
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise OptionError(f"option {name} is {text!r}; it is a whole number, {least} or more")
    return value


def truth(given: Mapping[str, str], name: str, default: bool) -> bool:
    """The truth value of an option."""
    return one_of(given, name, ("true", "false"), "true" if default else "false") == "true"


def one_of(given: Mapping[str, str], name: str, choices: tuple[str, ...], default: str) -> str:
    """The value of an option that has a few, in any case."""
    value = given.get(name, default).strip().lower()
    if value not in choices:
        raise OptionError(f"option {name} is {given[name]!r}; it can be {', '.join(choices)}")
    return value


def _pattern(text: str | None) -> str | None:
    if text is not None:
        try:
            name_pattern(text)
        except ValueError as error:
            raise OptionError(
                f"queuePattern is {text!r}, which is no regular expression that can be used: {error}"
            ) from None
    return text


def _moment(given: Mapping[str, str], name: str) -> int | None:
    """Microseconds since 1970, of ISO 8601 (UTC where it names no zone) or a number of seconds."""
    text = given.get(name)
    if text is None:
        return None
    try:
        seconds = float(text)
        if -_MOST_SECONDS <= seconds <= _MOST_SECONDS:
            return round(seconds * 1_000_000)
    except ValueError:
        pass
    try:
        moment = datetime.datetime.fromisoformat(text.strip())
    except ValueError:
        raise OptionError(
            f"option {name} is {text!r}; it is a time such as 2026-01-31T12:00:00Z, or seconds since 1970"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return round((moment - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)) / datetime.timedelta(microseconds=1))


def table_of(options: Mapping[str, str]) -> str:
    """The table that is asked for."""
    return one_of(
        {_BY_LOWER.get(name.lower(), name): value for name, value in options.items()}, "table", TABLES, "messages"
    )


def columns_of(options: Mapping[str, str]) -> tuple[str, ...] | None:
    """The columns that are asked for; None: all."""
    for name, value in options.items():
        if name.lower() == "columns":
            return tuple(column.strip() for column in value.split(","))
    return None
