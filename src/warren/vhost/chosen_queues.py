"""Which queues a request of the data pipeline is about: named ones, or those that an expression matches.

A name that does not exist, or may not be read, is an error; an expression simply finds less.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from warren.patterns import name_pattern
from warren.queueing.queue_process import QueueProcess
from warren.vhost.permissions import Permissions
from warren.vhost.refused import bad_request, forbidden, not_found


class _Vhost(Protocol):
    name: str
    queues: dict[str, QueueProcess]


def choose(
    vhost: _Vhost, permissions: Permissions, names: list[str] | None, pattern: str | None
) -> Mapping[str, QueueProcess]:
    """The queues that the user may read. Neither names nor a pattern: all of them."""
    if names is not None and pattern is not None:
        raise bad_request("give queue or queuePattern, not both")
    if names is not None:
        for name in names:
            if name not in vhost.queues:
                raise not_found(f"no queue {name!r} in vhost {vhost.name!r}{_nearest(name, vhost.queues)}")
            if not permissions.check("read", "queue", name):
                raise forbidden(f"user {permissions.user!r} may not read queue {name!r} in vhost {vhost.name!r}")
        return {name: vhost.queues[name] for name in names}
    try:
        wanted = name_pattern(pattern) if pattern is not None else None
    except ValueError as error:
        raise bad_request(f"queuePattern: {error}") from None
    return {
        name: queue
        for name, queue in vhost.queues.items()
        if permissions.check("read", "queue", name) and (wanted is None or wanted.fullmatch(name))
    }


def _nearest(name: str, known: Mapping[str, object]) -> str:
    near = [other for other in known if other.lower() == name.lower() or other.startswith(name[:4])][:3]
    return f"; there is {', '.join(map(repr, near))}" if near else ""
