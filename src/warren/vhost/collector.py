"""Python's garbage collector, while a vhost is being read from disk."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Nothing is garbage while queues and bindings are made: to look through them again and again, as they become more,
    would only make a start longer."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
