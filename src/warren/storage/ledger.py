"""Small durable state that is not messages: leases, checkouts, decided stages, delays, duplicate windows.

A table of JSON values for each record type; one record puts or removes one key, so replay in order is idempotent. Its
checkpointed form is itself: what is alive in a retiring journal file is repeated in the newest one.
"""

from __future__ import annotations

import json
from typing import Any

from warren.kernel.journal_codec import CHECKOUT, DEDUP, DELAY, LEASE, STAGE
from warren.storage.journal import Journal

TABLES = (CHECKOUT, LEASE, STAGE, DELAY, DEDUP)


class Ledger:
    """Requires: the engine's lock."""

    def __init__(self) -> None:
        self._journal: Journal | None = None
        self._tables: dict[int, dict[str, Any]] = {kind: {} for kind in TABLES}
        self._files: dict[tuple[int, str], int] = {}  # journal file of the newest record of a key

    def attach(self, journal: Journal) -> None:
        """Recovery is over: from now on changes are journaled."""
        self._journal = journal

    def table(self, kind: int) -> dict[str, Any]:
        """The live values of one type; not to be changed."""
        return self._tables[kind]

    def put(self, kind: int, key: str, value: Any) -> None:
        """Set a value, or remove it with None; safe with the next commit."""
        assert self._journal is not None
        self._set(kind, key, value)
        self._append(kind, key, value)

    def _append(self, kind: int, key: str, value: Any) -> None:
        assert self._journal is not None
        body = json.dumps([key, value], separators=(",", ":")).encode()
        self._journal.buffer.append_other(kind, body)
        if value is not None:
            self._files[kind, key] = self._journal.buffer.file

    def _set(self, kind: int, key: str, value: Any) -> None:
        if value is None:
            self._tables[kind].pop(key, None)
            self._files.pop((kind, key), None)
        else:
            self._tables[kind][key] = value

    def replay(self, kind: int, body: bytes, file: int) -> None:
        """Apply a record that recovery read."""
        key, value = json.loads(body)
        self._set(kind, key, value)
        if value is not None:
            self._files[kind, key] = file

    def note(self, kind: int, key: str, value: Any, file: int) -> None:
        """A value that another record carries, such as the publishing id of a publish. It is the table's last then."""
        self._tables[kind].pop(key, None)
        self._tables[kind][key] = value
        self._files[kind, key] = file

    def forget(self, kind: int, key: str) -> None:
        """Remove a value without a record; for those that do no harm when a replay brings them back."""
        self._set(kind, key, None)

    def carry(self, upto: int) -> None:
        """Repeat what is alive and whose newest record is in files up to `upto`."""
        for (kind, key), file in list(self._files.items()):
            if file <= upto:
                self._append(kind, key, self._tables[kind][key])

    def dump(self) -> dict[str, dict[str, Any]]:
        """Everything, for recovery terms."""
        return {str(kind): values for kind, values in self._tables.items() if values}

    def restore(self, dumped: dict[str, dict[str, Any]]) -> None:
        """What `dump` gave; the next checkpoint writes it to the journal, because its file is 0."""
        for kind, values in dumped.items():
            for key, value in values.items():
                self._set(int(kind), key, value)
                self._files[int(kind), key] = 0
