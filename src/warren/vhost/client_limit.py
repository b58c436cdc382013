"""How many clients one process takes: each is a descriptor, and whoever uses up all of them takes the store's files too.

Clients get the lower descriptors, and the upper ones are kept for files. A new descriptor has the lowest number that is free,
so the number of a client's tells how many are in use, whatever for.

>>> ClientLimit(2).refusal(clients=2, descriptor=9)
'connection refused: connection limit (2) is reached (connection_max)'
"""

from __future__ import annotations

import resource

_KEPT_FOR_FILES = 1024  # at least, but of few descriptors not more than half


class ClientLimit:
    def __init__(self, most: int) -> None:
        """`most` is the key connection_max: 0 for as many as there are descriptors for."""
        self._most = most

    def refusal(self, clients: int, descriptor: int) -> str | None:
        """Why a process that has so many clients does not take this one; None: it does."""
        if self._most and clients >= self._most:
            return f"connection refused: connection limit ({self._most}) is reached (connection_max)"
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if allowed == resource.RLIM_INFINITY or descriptor < allowed - max(
            allowed // 4, min(_KEPT_FOR_FILES, allowed // 2)
        ):
            return None
        return (
            f"connection refused: {descriptor} of {allowed} open files are in use, and the rest is kept for queues; "
            "raise ulimit -Hn"
        )
