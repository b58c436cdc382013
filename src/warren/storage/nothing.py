"""The empty container that thousands of idle queues share until they hold something."""

from __future__ import annotations

from collections import deque
from typing import NoReturn

from warren.kernel.entry import Entry


class _Nothing(deque[Entry]):
    """An empty container that stays so."""

    def _refuse(self, *arguments: object) -> NoReturn:
        raise AssertionError("put into a container of `_filling`, not into the shared empty one")

    append = appendleft = extend = extendleft = insert = _refuse


NOTHING: deque[Entry] = _Nothing()
