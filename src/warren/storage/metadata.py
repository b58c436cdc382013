"""What a vhost is made of, apart from its messages: the SQLite file `meta.db`.

Rules:

1. A uid is handed out once and never again: not after a delete, not after a crash, not to a queue of the same name.
   Durable and other queues draw from one sequence, SQLite's own for AUTOINCREMENT.
2. What a method changed is synced when it returns. Methods called inside `transaction()` become one commit, synced when
   the block ends; nothing that they returned may be shown to anybody before that.
3. A file that is not ours, or that a newer Warren wrote, is refused and left as it is.
4. One thread at a time: the caller holds a lock. Any thread may be the one.
5. The format is a list of steps, `_MIGRATIONS`. A step that was ever released is not edited; the next goes
   below it.

Values are stored as JSON that a person can read with the `sqlite3` command; what JSON does not know is tagged:
`{"$bytes": "AAE="}`, `{"$datetime": "2026-01-01T00:00:00+00:00"}`, `{"$decimal": "1.50"}`.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from warren.errors import (
    DiskFullError,
    QueueMismatchError,
    StoreClosedError,
    StoreFailedError,
    StoreFormatError,
    StoreLockedError,
    StorePathError,
    WarrenError,
)
from warren.storage.tagged_json import from_json, to_json

APPLICATION_ID = 0x5752524E  # "WRRN", in the header of the file: `file meta.db` shows it

# Step n takes the file from format n - 1 to format n. Format 0 is an empty file.
_MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE settings (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
        # A segment slot has 32 bits for the boot.
        "CREATE TABLE boots (count INTEGER NOT NULL CHECK (count BETWEEN 0 AND 4294967295))",
        "INSERT INTO boots (count) VALUES (0)",
        """
        CREATE TABLE queues (
            uid INTEGER PRIMARY KEY AUTOINCREMENT,
            name TEXT NOT NULL UNIQUE,
            durable INTEGER NOT NULL,
            auto_delete INTEGER NOT NULL,
            exclusive INTEGER NOT NULL,
            arguments TEXT NOT NULL,
            created_at REAL NOT NULL
        )
        """,
        # SQLite would add this row with the first queue; reserve_uid needs it before.
        "INSERT INTO sqlite_sequence (name, seq) VALUES ('queues', 0)",
    ),
    (
        # Only durable exchanges, and bindings whose both ends are durable, outlive a restart and are here.
        """
        CREATE TABLE durable_exchanges (
            name TEXT PRIMARY KEY,
            type TEXT NOT NULL,
            auto_delete INTEGER NOT NULL,
            internal INTEGER NOT NULL,
            arguments TEXT NOT NULL
        )
        """,
        # The arguments belong to the identity of a binding, so their names are stored in order.
        """
        CREATE TABLE durable_bindings (
            id INTEGER PRIMARY KEY,
            source TEXT NOT NULL,
            destination_kind TEXT NOT NULL CHECK (destination_kind IN ('queue', 'exchange')),
            destination TEXT NOT NULL,
            routing_key TEXT NOT NULL,
            arguments TEXT NOT NULL,
            UNIQUE (destination, source, routing_key, destination_kind, arguments)
        )
        """,
        """
        CREATE TABLE policies (
            name TEXT NOT NULL,
            operator INTEGER NOT NULL,
            pattern TEXT NOT NULL,
            apply_to TEXT NOT NULL,
            definition TEXT NOT NULL,
            priority INTEGER NOT NULL,
            PRIMARY KEY (operator, name)
        ) WITHOUT ROWID
        """,
        """
        CREATE TABLE runtime_parameters (
            component TEXT NOT NULL,
            name TEXT NOT NULL,
            value TEXT NOT NULL,
            PRIMARY KEY (component, name)
        ) WITHOUT ROWID
        """,
    ),
)

FORMAT_VERSION = len(_MIGRATIONS)

_UIDS_RESERVED_AT_ONCE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRecord:
    """A queue as it was declared.

    >>> QueueRecord(name="orders", created_at=1767225600.0, arguments={"x-max-length": 10}).durable
    True
    """

    name: str
    created_at: float  # seconds since 1970
    uid: int = 0  # 0: not declared yet
    durable: bool = True
    auto_delete: bool = False
    exclusive: bool = False
    arguments: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRecord:
    """A durable exchange as it was declared.

    >>> ExchangeRecord(name="logs", type="topic").internal
    False
    """

    name: str
    type: str
    auto_delete: bool = False
    internal: bool = False
    arguments: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingRecord:
    """A binding between a durable exchange and a durable queue or exchange.

    >>> BindingRecord(source="logs", destination_kind="queue", destination="errors", routing_key="*.error").source
    'logs'
    """

    source: str
    destination_kind: Literal["queue", "exchange"]
    destination: str
    routing_key: str = ""
    arguments: Mapping[str, object] = field(default_factory=dict)


BindingRow = tuple[str, Literal["queue", "exchange"], str, str, dict[str, object]]  # the fields of a BindingRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRecord:
    """A policy as it was set.

    >>> PolicyRecord(name="short", pattern="^short", definition={"max-length": 10}).apply_to
    'all'
    """

    name: str
    pattern: str
    definition: Mapping[str, object]
    apply_to: str = "all"
    priority: int = 0


class DurableExchange(Protocol):
    """What is kept of an exchange: any object that has these, such as an ExchangeRecord, can be given."""

    @property
    def name(self) -> str: ...
    @property
    def type(self) -> str: ...
    @property
    def auto_delete(self) -> bool: ...
    @property
    def internal(self) -> bool: ...
    @property
    def arguments(self) -> Mapping[str, object]: ...


class DurableBinding(Protocol):
    """What is kept of a binding: any object that has these, such as a BindingRecord, can be given."""

    @property
    def source(self) -> str: ...
    @property
    def destination_kind(self) -> str: ...
    @property
    def destination(self) -> str: ...
    @property
    def routing_key(self) -> str: ...
    @property
    def arguments(self) -> Mapping[str, object]: ...


class KeptPolicy(Protocol):
    """What is kept of a policy: any object that has these, such as a PolicyRecord, can be given."""

    @property
    def name(self) -> str: ...
    @property
    def pattern(self) -> str: ...
    @property
    def apply_to(self) -> str: ...
    @property
    def definition(self) -> Mapping[str, object]: ...
    @property
    def priority(self) -> int: ...


class Metadata:
    """The file `meta.db` of a vhost, opened or created.

    >>> metadata = Metadata(":memory:")
    >>> metadata.boot()
    1
    >>> metadata.declare_queue(QueueRecord(name="orders", created_at=0.0))
    1
    >>> [queue.name for queue in metadata.queues()]
    ['orders']
    >>> metadata.close()
    """

    def __init__(self, path: str) -> None:
        """Raises StoreFormatError when the file is not ours or too new, StorePathError when it cannot be opened."""
        self.path = path
        self._reserved: Iterator[int] = iter(())  # uids that are committed as used, and not handed out
        self._grouping = False
        with self._clear_errors():
            # No isolation level: the module would open transactions by itself, at moments of its own choice.
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._open = True
        try:
            with self._clear_errors():
                version = self._check_format()
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = FULL")
                self._db.execute("PRAGMA foreign_keys = ON")
            self._migrate(version)
        except BaseException:
            self.close()
            raise

    def boot(self) -> int:
        """Count one more start of the vhost, and return the count: 1 for the first. Fits in 32 bits."""
        with self.transaction():
            self._db.execute("UPDATE boots SET count = count + 1")
            return int(self._db.execute("SELECT count FROM boots").fetchone()[0])

    # ---- queues ----

    def declare_queue(self, record: QueueRecord) -> int:
        """Keep a queue and return its uid. Raises QueueMismatchError when there is a queue of that name."""
        return self.declare_queues([record])[0]

    def declare_queues(self, records: Sequence[QueueRecord]) -> list[int]:
        """Keep many queues with one commit, all or none, and return their uids in the same order.

        >>> metadata = Metadata(":memory:")
        >>> metadata.declare_queues([QueueRecord(name=name, created_at=0.0) for name in ("a", "b")])
        [1, 2]
        >>> metadata.close()
        """
        if not records:
            return []
        rows = [
            (
                record.uid or (self.reserve_uid() if self._grouping else None),
                record.name,
                record.durable,
                record.auto_delete,
                record.exclusive,
                to_json(record.arguments, f"the arguments of queue {record.name!r}"),
                record.created_at,
            )
            for record in records
        ]
        columns = "uid, name, durable, auto_delete, exclusive, arguments, created_at"
        insert = f"INSERT INTO queues ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)"
        uids: list[int] = []
        with self.transaction():
            for row in rows:
                try:
                    uid = self._db.execute(insert, row).lastrowid
                except sqlite3.IntegrityError as error:
                    if error.sqlite_errorcode != sqlite3.SQLITE_CONSTRAINT_UNIQUE:
                        raise
                    raise QueueMismatchError(
                        f"queue {row[1]!r} is in {self.path} already; delete it before it is declared anew"
                    ) from None
                assert uid is not None
                uids.append(uid)
        return uids

    def reserve_uid(self) -> int:
        """A uid for a queue that leaves no row here: it is not durable. Most calls touch no disk."""
        uid = next(self._reserved, None)
        if uid is not None:
            return uid
        # A uid of a group that a crash takes back would be handed out again, while the journal has records of it.
        grouping = self._grouping
        self.end_group()
        self._reserve_uids()
        if grouping:
            self.begin_group()
        return next(self._reserved)

    def _reserve_uids(self) -> None:
        with self.transaction():
            self._db.execute(
                "UPDATE sqlite_sequence SET seq = seq + ? WHERE name = 'queues'", (_UIDS_RESERVED_AT_ONCE,)
            )
            last = int(self._db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'queues'").fetchone()[0])
        self._reserved = iter(range(last - _UIDS_RESERVED_AT_ONCE + 1, last + 1))

    def begin_group(self) -> None:
        """What changes from now on becomes one commit, synced by `end_group`; nothing of it may be shown before that."""
        if not self._grouping:
            with self._clear_errors():
                self._db.execute("BEGIN IMMEDIATE")
            self._grouping = True

    def end_group(self) -> None:
        """Commit what was changed since `begin_group`, if it was called."""
        if self._grouping:
            self._grouping = False
            with self._clear_errors():
                self._db.execute("COMMIT")

    def delete_queue(self, uid: int) -> None:
        """Forget a queue and the bindings to it. Its uid stays used. Deleting what is not there does nothing."""
        with self.transaction():
            # Here, and not only by the router: the library deletes queues too, and knows of no bindings.
            self._db.execute(
                "DELETE FROM durable_bindings WHERE destination_kind = 'queue' "
                "AND destination = (SELECT name FROM queues WHERE uid = ?)",
                (uid,),
            )
            self._db.execute("DELETE FROM queues WHERE uid = ?", (uid,))

    def queues(self) -> list[QueueRecord]:
        """Every queue, in the order of declaration."""
        with self._clear_errors():
            rows = self._db.execute(
                "SELECT uid, name, durable, auto_delete, exclusive, arguments, created_at FROM queues ORDER BY uid"
            ).fetchall()
        return [
            QueueRecord(
                uid=uid,
                name=name,
                durable=bool(durable),
                auto_delete=bool(auto_delete),
                exclusive=bool(exclusive),
                arguments=from_json(arguments),
                created_at=created_at,
            )
            for uid, name, durable, auto_delete, exclusive, arguments, created_at in rows
        ]

    # ---- exchanges and bindings ----

    def put_exchange(self, exchange: DurableExchange) -> None:
        """Keep a durable exchange, in place of one of that name.

        >>> metadata = Metadata(":memory:")
        >>> metadata.put_exchange(ExchangeRecord(name="logs", type="topic"))
        >>> metadata.put_binding(BindingRecord(source="logs", destination_kind="queue", destination="errors"))
        >>> [exchange.name for exchange in metadata.exchanges()], [binding.source for binding in metadata.bindings()]
        (['logs'], ['logs'])
        >>> metadata.close()
        """
        arguments = to_json(exchange.arguments, f"the arguments of exchange {exchange.name!r}")
        with self.transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO durable_exchanges (name, type, auto_delete, internal, arguments) "
                "VALUES (?, ?, ?, ?, ?)",
                (exchange.name, exchange.type, exchange.auto_delete, exchange.internal, arguments),
            )

    def delete_exchange(self, name: str) -> None:
        """Forget an exchange; its bindings are the caller's to delete. What is not there is forgotten already."""
        with self.transaction():
            self._db.execute("DELETE FROM durable_exchanges WHERE name = ?", (name,))

    def exchanges(self) -> list[ExchangeRecord]:
        """Every durable exchange, by name."""
        with self._clear_errors():
            rows = self._db.execute(
                "SELECT name, type, auto_delete, internal, arguments FROM durable_exchanges ORDER BY name"
            ).fetchall()
        return [
            ExchangeRecord(
                name=name,
                type=type_,
                auto_delete=bool(auto_delete),
                internal=bool(internal),
                arguments=from_json(arguments),
            )
            for name, type_, auto_delete, internal, arguments in rows
        ]

    def put_binding(self, binding: DurableBinding) -> None:
        """Keep a binding. One that is there stays as it is."""
        self.put_bindings([binding])

    def put_bindings(self, bindings: Iterable[DurableBinding]) -> None:
        """Keep many bindings with one commit, all or none."""
        rows = [_binding_row(binding) for binding in bindings]
        with self.transaction():
            self._db.executemany(
                # Not INSERT OR IGNORE: that passes over every refusal, and not only over what is there.
                "INSERT INTO durable_bindings (source, destination_kind, destination, routing_key, arguments) "
                "VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT (destination, source, routing_key, destination_kind, arguments) DO NOTHING",
                rows,
            )

    def delete_binding(self, binding: DurableBinding) -> None:
        """Forget the binding that is this one in everything, arguments too. What is not there is forgotten already."""
        self.delete_bindings([binding])

    def delete_bindings(self, bindings: Iterable[DurableBinding]) -> None:
        """Forget many bindings with one commit."""
        rows = [_binding_row(binding) for binding in bindings]
        with self.transaction():
            self._db.executemany(
                "DELETE FROM durable_bindings WHERE source = ? AND destination_kind = ? AND destination = ? "
                "AND routing_key = ? AND arguments = ?",
                rows,
            )

    def bindings(self) -> list[BindingRecord]:
        """Every durable binding, in the order of binding."""
        return [
            BindingRecord(
                source=source,
                destination_kind=kind,
                destination=destination,
                routing_key=routing_key,
                arguments=arguments,
            )
            for source, kind, destination, routing_key, arguments in self.binding_rows()
        ]

    def binding_rows(self) -> Iterator[BindingRow]:
        """As `bindings`, for a start that makes 100,000 objects of its own of them: one at a time, as tuples."""
        with self._clear_errors():
            for source, kind, destination, routing_key, arguments in self._db.execute(
                "SELECT source, destination_kind, destination, routing_key, arguments FROM durable_bindings ORDER BY id"
            ):
                yield source, kind, destination, routing_key, from_json(arguments)

    # ---- policies and runtime parameters ----

    def put_policy(self, policy: KeptPolicy, operator: bool = False) -> None:
        """Keep a policy, in place of one of that name. Operator policies have names of their own."""
        definition = to_json(policy.definition, f"the definition of policy {policy.name!r}")
        with self.transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO policies (name, operator, pattern, apply_to, definition, priority) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (policy.name, operator, policy.pattern, policy.apply_to, definition, policy.priority),
            )

    def delete_policy(self, name: str, operator: bool = False) -> None:
        """Forget a policy. What is not there is forgotten already."""
        with self.transaction():
            self._db.execute("DELETE FROM policies WHERE name = ? AND operator = ?", (name, operator))

    def policies(self, operator: bool = False) -> list[PolicyRecord]:
        """Every policy, or every operator policy, by name.

        >>> metadata = Metadata(":memory:")
        >>> metadata.put_policy(PolicyRecord(name="short", pattern="^short", definition={"max-length": 10}))
        >>> [policy.definition for policy in metadata.policies()], metadata.policies(operator=True)
        ([{'max-length': 10}], [])
        >>> metadata.close()
        """
        with self._clear_errors():
            rows = self._db.execute(
                "SELECT name, pattern, apply_to, definition, priority FROM policies WHERE operator = ? ORDER BY name",
                (operator,),
            ).fetchall()
        return [
            PolicyRecord(
                name=name, pattern=pattern, apply_to=apply_to, definition=from_json(definition), priority=priority
            )
            for name, pattern, apply_to, definition, priority in rows
        ]

    def put_parameter(self, component: str, name: str, value: object) -> None:
        """Keep a runtime parameter, such as a shovel, in place of one of that component and name."""
        encoded = to_json(value, f"the {component} parameter {name!r}")
        with self.transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO runtime_parameters (component, name, value) VALUES (?, ?, ?)",
                (component, name, encoded),
            )

    def delete_parameter(self, component: str, name: str) -> None:
        """Forget a runtime parameter. What is not there is forgotten already."""
        with self.transaction():
            self._db.execute("DELETE FROM runtime_parameters WHERE component = ? AND name = ?", (component, name))

    def parameters(self) -> dict[tuple[str, str], Any]:
        """The value of every runtime parameter, by component and name.

        >>> metadata = Metadata(":memory:")
        >>> metadata.put_parameter("shovel", "to-archive", {"src-queue": "orders"})
        >>> metadata.parameters()
        {('shovel', 'to-archive'): {'src-queue': 'orders'}}
        >>> metadata.close()
        """
        with self._clear_errors():
            rows = self._db.execute(
                "SELECT component, name, value FROM runtime_parameters ORDER BY component, name"
            ).fetchall()
        return {(component, name): from_json(value) for component, name, value in rows}

    # ---- settings ----

    def get(self, key: str, default: Any = None) -> Any:
        """The value that was set for `key`, or `default`.

        >>> metadata = Metadata(":memory:")
        >>> metadata.set("default-backing-queue", "sqlite")
        >>> metadata.get("default-backing-queue")
        'sqlite'
        >>> metadata.close()
        """
        with self._clear_errors():
            row = self._db.execute("SELECT value FROM settings WHERE key = ?", (key,)).fetchone()
        return default if row is None else from_json(row[0])

    def set(self, key: str, value: object) -> None:
        """Keep `value` (anything that a queue argument can be) under `key`, in place of what was there."""
        encoded = to_json(value, f"setting {key!r}")
        with self.transaction():
            self._db.execute("INSERT OR REPLACE INTO settings (key, value) VALUES (?, ?)", (key, encoded))

    # ---- the file ----

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Make everything in the block one commit: all of it is synced when the block ends, or, after an error, none.

        >>> metadata = Metadata(":memory:")
        >>> with metadata.transaction():
        ...     uid = metadata.declare_queue(QueueRecord(name="new", created_at=0.0))
        ...     metadata.set("replaced-by", uid)
        >>> metadata.close()
        """
        with self._clear_errors():
            # Nested, a savepoint: a caller who catches the error of a step keeps the steps before it, whole.
            begin, commit, rollback = (
                ("SAVEPOINT step", "RELEASE step", "ROLLBACK TO step")
                if self._db.in_transaction
                else ("BEGIN IMMEDIATE", "COMMIT", "ROLLBACK")
            )
            self._db.execute(begin)
            try:
                yield
                self._db.execute(commit)
            except BaseException:
                # The sequence goes back to where it was: what was reserved meanwhile is not ours any more.
                if not self._grouping:
                    self._reserved = iter(())
                # On a full disk SQLite may have rolled back all of it by itself.
                if self._db.in_transaction:
                    self._db.execute(rollback)
                raise

    def backup(self, target_path: str) -> None:
        """Copy the file, as it is now, to a new file that is complete and synced. The caller syncs its directory.

        Requires: no transaction is open. Raises FileExistsError.
        """
        if os.path.exists(target_path):
            raise FileExistsError(f"{target_path} exists; a backup of {self.path} needs a name that is free")
        with self._clear_errors():
            assert not self._db.in_transaction
            with contextlib.closing(sqlite3.connect(target_path, isolation_level=None)) as target:
                target.execute("PRAGMA synchronous = FULL")
                self._db.backup(target)

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        if self._open:
            self._open = False
            self._db.close()

    def _check_format(self) -> int:
        """The format version of the file: 0 for a new one."""
        application_id, version, tables = (
            int(self._db.execute(question).fetchone()[0])
            for question in ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_schema")
        )
        # A crash right after the file was created leaves one without tables: it is new, too.
        if application_id != APPLICATION_ID and (application_id, version, tables) != (0, 0, 0):
            raise StoreFormatError(
                f"{self.path} is an SQLite database, but not one of Warren (application id {application_id:#x}, not "
                f"{APPLICATION_ID:#x}); choose another directory for the store, or move that file away"
            )
        if version > FORMAT_VERSION:
            raise StoreFormatError(
                f"{self.path} has metadata format version {version}, this Warren supports {FORMAT_VERSION} and older; "
                f"open it with the Warren that wrote it, or a newer one"
            )
        return version

    def _migrate(self, version: int) -> None:
        """Bring the file to the newest format. A step is one commit, so a crash leaves a whole format."""
        for number, statements in enumerate(_MIGRATIONS[version:], version + 1):
            with self.transaction():
                for statement in statements:
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                self._db.execute(f"PRAGMA user_version = {number}")

    @contextlib.contextmanager
    def _clear_errors(self) -> Iterator[None]:
        """Errors of SQLite become ours, with the path and the remedy."""
        try:
            yield
        except sqlite3.Error as error:
            if not getattr(self, "_open", True):
                raise StoreClosedError(f"{self.path} was closed") from None
            raise _clear_error(self.path, error) from error


def _clear_error(path: str, error: sqlite3.Error) -> WarrenError:
    # The low byte is the kind; the others say more of where it happened.
    kind = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if kind == sqlite3.SQLITE_FULL:
        return DiskFullError(f"no room to write {path}: {error}; free some space, then try again")
    if kind == sqlite3.SQLITE_NOTADB:
        return StoreFormatError(
            f"{path} is not a file of Warren's metadata: no format version is found in it (version 1 is supported, and "
            f"every later one up to {FORMAT_VERSION}); choose another directory for the store, or bring back the file "
            f"from a snapshot"
        )
    if kind in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return StorePathError(f"cannot open {path} to write: {error}; the directory must exist and be writable")
    if kind in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreLockedError(f"another process is writing {path}; close it and try again")
    return StoreFailedError(f"{path}: {error}; close the store and open it again")


def _binding_row(binding: DurableBinding) -> tuple[str, str, str, str, str]:
    what = f"the arguments of the binding from {binding.source!r} to {binding.destination_kind} {binding.destination!r}"
    arguments = to_json(binding.arguments, what, sort_names=True)
    return binding.source, binding.destination_kind, binding.destination, binding.routing_key, arguments
