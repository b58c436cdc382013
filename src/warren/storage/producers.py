"""Which number each producer has published last to each queue, so that none is taken twice.

The numbers are values of the ledger: a publish carries its own, and a checkpoint carries them forward. What goes, goes
without a record. After a crash the journal may bring some of it back: numbers of queues that are gone are dropped then, and
those that were forgotten for want of a place are true still.

A name that is new with every message would make this grow for ever. So a queue remembers so many producers, and forgets the
one first that has been silent for longest: its next message is taken, whatever its number.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

from warren.kernel.journal_codec import DEDUP
from warren.storage.ledger import Ledger


class Producers:
    """Requires: the engine's lock."""

    def __init__(self, ledger: Ledger, most: int, uids: Container[int]) -> None:
        """With what recovery found in the ledger of the queues `uids`."""
        self._ledger = ledger
        self._most = most  # of a queue
        self._keys: dict[
            int, OrderedDict[str, None]
        ] = {}  # uid -> keys in the ledger, who was silent for longest first
        for key in list(ledger.table(DEDUP)):
            uid = int(key.partition(":")[0])
            if uid in uids:
                self._heard(uid, key)
            else:
                ledger.forget(DEDUP, key)

    def last(self, uid: int, producer: str) -> int | None:
        value = self._ledger.table(DEDUP).get(f"{uid}:{producer}")
        return None if value is None else int(value)

    def published(self, uid: int, producer: str, publishing_id: int, file: int) -> None:
        """A record of the journal file has it."""
        key = f"{uid}:{producer}"
        self._ledger.note(DEDUP, key, publishing_id, file)
        self._heard(uid, key)

    def _heard(self, uid: int, key: str) -> None:
        keys = self._keys.setdefault(uid, OrderedDict())
        keys[key] = None
        keys.move_to_end(key)
        while len(keys) > self._most:
            self._ledger.forget(DEDUP, keys.popitem(last=False)[0])

    def forget(self, uid: int) -> None:
        """The queue is gone."""
        for key in self._keys.pop(uid, ()):
            self._ledger.forget(DEDUP, key)
