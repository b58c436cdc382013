"""What every backing queue of a vhost shares."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from warren.errors import WarrenError
from warren.storage.journal import Journal
from warren.storage.message_store import MessageStore
from warren.storage.queue_index import QueueIndex
from warren.storage.rates import MemoryMonitor
from warren.storage.segment import Report
from warren.storage.settings import EngineSettings

DEBUG = bool(os.environ.get("WARREN_DEBUG"))


def _raise(error: OSError) -> WarrenError:
    raise error


@dataclass(slots=True)
class QueueContext:
    journal: Journal
    persistent_store: MessageStore
    transient_store: MessageStore
    monitor: MemoryMonitor
    settings: EngineSettings
    report: Report
    debug: bool = DEBUG  # check the invariants after every operation
    clock: Callable[[], float] = field(default=time.monotonic)
    is_full: Callable[[], bool] = bool  # the disk is: what room there is belongs to acks
    trouble: Callable[[OSError], WarrenError] = _raise  # takes note of a failed write; what to raise for it
    thinned: set[QueueIndex] = field(default_factory=set)  # transient messages left their segments, without a record
