"""What users may do, in the process of a vhost: a copy that the node keeps true.

The node sends a grant with each connection and again when it changes. It answers a change only when every process has it,
so a right that was taken away is gone when the operator reads "ok".
"""

from __future__ import annotations

from typing import Any

from warren.vhost.permissions import Grant, TopicGrant

Packed = dict[str, Any] | None


class Grants:
    """A `GrantSource` of what the node sent.

    >>> grants = Grants()
    >>> grants.put("ann", "/", pack(Grant("", "^orders$", ".*")))
    >>> grants.grant("ann", "/").write, grants.grant("bob", "/")
    ('^orders$', None)
    """

    def __init__(self) -> None:
        self._grants: dict[tuple[str, str], Grant | None] = {}
        self._version = 1

    @property
    def version(self) -> int:
        return self._version

    def grant(self, user: str, vhost: str) -> Grant | None:
        return self._grants.get((user, vhost))

    def put(self, user: str, vhost: str, packed: Packed) -> None:
        grant = unpack(packed)
        if self._grants.get((user, vhost)) != grant:
            self._grants[user, vhost] = grant
            self._version += 1


def pack(grant: Grant | None) -> Packed:
    """As a message of the control socket holds it."""
    if grant is None:
        return None
    topics = {exchange: [topic.write, topic.read] for exchange, topic in grant.topics.items()}
    return {"configure": grant.configure, "write": grant.write, "read": grant.read, "topics": topics}


def unpack(packed: Packed) -> Grant | None:
    if packed is None:
        return None
    topics = {exchange: TopicGrant(write, read) for exchange, (write, read) in packed["topics"].items()}
    return Grant(packed["configure"], packed["write"], packed["read"], topics)
