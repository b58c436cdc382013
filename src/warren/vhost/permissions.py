"""What one user may do in one vhost, and the words in which a refusal is told.

Rules:

1. A permission is three regular expressions: configure, write, read. One is searched in the name of the resource, it need not
   match the whole: `orders` allows `reorders2`; who wants one queue writes `^orders$`.
2. The empty expression allows the empty name only, which is to say nothing.
3. The default exchange, whose name is empty, is asked for as `amq.default`.
4. A user without permissions in a vhost may do nothing there, and may not connect to it.
5. Topic permissions narrow a topic exchange by routing key. An exchange that has none is not narrowed.
6. An answer is as old as the source's `version`: it is kept until that changes, not longer.

These are RabbitMQ's. Two things differ: expressions are Python's (POSIX classes are refused when they are set), and what
stands for `{username}` and `{vhost}` in a topic permission is taken literally, so that a name cannot widen a permission.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

Permission = Literal["configure", "write", "read"]
ResourceKind = Literal["queue", "exchange"]

DEFAULT_EXCHANGE = "amq.default"

# Answers that are kept. Names come from clients, so there is no end of them; a full cache starts again empty.
_ANSWERS_KEPT = 4096
_REPLY_TEXT_BYTES = 255  # an AMQP short string


@dataclass(frozen=True, slots=True)
class TopicGrant:
    """What a user may do with the routing keys of one topic exchange. Write: publish; read: bind.

    >>> TopicGrant(write=r"^{username}[.]", read=".*").read
    '.*'
    """

    write: str
    read: str


@dataclass(frozen=True, slots=True)
class Grant:
    """What a user may do in one vhost.

    >>> Grant(configure="", write="^orders$", read=".*", topics={"amq.topic": TopicGrant("^a[.]", "")}).write
    '^orders$'
    """

    configure: str
    write: str
    read: str
    topics: Mapping[str, TopicGrant] = field(default_factory=dict)  # by exchange


class GrantSource(Protocol):
    """Where grants come from: `Users` in the node's process, what the node sent in a vhost's process."""

    @property
    def version(self) -> int:
        """Rises with every change of any grant."""

    def grant(self, user: str, vhost: str) -> Grant | None:
        """What the user may do in the vhost; None: nothing, or there is no such user or vhost."""


class Permissions:
    """What one user may do in one vhost, asked for often and so remembered.

    >>> class Fixed:
    ...     version = 1
    ...     def grant(self, user, vhost):
    ...         return Grant(configure="", write="^amq[.]default$", read="^orders")
    >>> permissions = Permissions(Fixed(), "ann", "/")
    >>> permissions.check("read", "queue", "orders.eu"), permissions.check("configure", "queue", "orders.eu")
    (True, False)
    >>> permissions.check("write", "exchange", "")
    True
    """

    __slots__ = ("_answers", "_compiled", "_grant", "_source", "_topic_answers", "_version", "user", "vhost")

    def __init__(self, source: GrantSource, user: str, vhost: str) -> None:
        self.user = user
        self.vhost = vhost
        self._source = source
        self._compiled: dict[str, re.Pattern[str]] = {}
        self._answers: dict[tuple[str, str, str], bool] = {}
        self._topic_answers: dict[tuple[str, str, str, tuple[tuple[str, str], ...]], bool] = {}
        self._reload()

    @property
    def vhost_allowed(self) -> bool:
        """Whether the user may connect to the vhost at all."""
        if self._version != self._source.version:
            self._reload()
        return self._grant is not None

    def check(self, kind: Permission, resource_kind: ResourceKind, name: str) -> bool:
        """Whether the user may configure, write to or read from a queue or an exchange."""
        if self._version != self._source.version:
            self._reload()
        key = (kind, resource_kind, name)
        answer = self._answers.get(key)
        if answer is None:
            answer = self._grant is not None and self._matches(
                _expression(self._grant, kind), _name_to_check(resource_kind, name)
            )
            if len(self._answers) >= _ANSWERS_KEPT:
                self._answers.clear()
            self._answers[key] = answer
        return answer

    def is_narrowed(self, exchange: str) -> bool:
        """Has the user topic permissions for this exchange?"""
        if self._version != self._source.version:
            self._reload()
        return self._grant is not None and exchange in self._grant.topics

    def check_topic(
        self,
        exchange: str,
        permission: Literal["write", "read"],
        routing_key: str,
        variables: Mapping[str, str] | None = None,
    ) -> bool:
        """Whether the user may publish with a routing key (write), or bind by it (read).

        Requires: the exchange is a topic exchange, and `check` allowed it. `{username}` and `{vhost}` are known;
        `variables` are known beside them.
        """
        if self._version != self._source.version:
            self._reload()
        if self._grant is None:
            return False
        topic = self._grant.topics.get(exchange)
        if topic is None:
            return True
        extra = tuple(sorted(variables.items())) if variables else ()
        key = (exchange, permission, routing_key, extra)
        answer = self._topic_answers.get(key)
        if answer is None:
            known = {**dict(extra), "username": self.user, "vhost": self.vhost}
            answer = self._matches(expand(topic.write if permission == "write" else topic.read, known), routing_key)
            if len(self._topic_answers) >= _ANSWERS_KEPT:
                self._topic_answers.clear()
            self._topic_answers[key] = answer
        return answer

    def _reload(self) -> None:
        # The version first: a change in between is then seen by the next question.
        self._version = self._source.version
        self._grant = self._source.grant(self.user, self.vhost)
        self._compiled.clear()
        self._answers.clear()
        self._topic_answers.clear()

    def _matches(self, expression: str, name: str) -> bool:
        compiled = self._compiled.get(expression)
        if compiled is None:
            if len(self._compiled) >= _ANSWERS_KEPT:  # variables come from clients too
                self._compiled.clear()
            compiled = self._compiled[expression] = re.compile(expression or r"\A\Z")
        return compiled.search(name) is not None


def _expression(grant: Grant, kind: Permission) -> str:
    if kind == "configure":
        return grant.configure
    return grant.write if kind == "write" else grant.read


def _name_to_check(resource_kind: ResourceKind, name: str) -> str:
    return DEFAULT_EXCHANGE if resource_kind == "exchange" and not name else name


def expand(expression: str, variables: Mapping[str, str]) -> str:
    """A topic permission with its variables in place, each taken literally.

    >>> expand("^{username}[.]", {"username": "a.b"})
    '^a\\\\.b[.]'
    """
    if "{" not in expression or not variables:
        return expression
    # In one pass: what a value holds is not expanded again.
    names = "|".join(map(re.escape, sorted(variables)))
    return re.sub(f"{{({names})}}", lambda found: re.escape(variables[found[1]]), expression)


def loopback_allowed(user: str, peer_host: str, loopback_users: Collection[str]) -> bool:
    """Whether a user may log in from an address: those in `loopback_users` only from this machine.

    >>> loopback_allowed("guest", "10.0.0.7", ["guest"]), loopback_allowed("guest", "::ffff:127.0.0.1", ["guest"])
    (False, True)
    """
    if user not in loopback_users:
        return True
    try:
        address = ipaddress.ip_address(peer_host.partition("%")[0])
    except ValueError:
        return peer_host in ("", "localhost")  # a Unix socket has no address
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


# ---- what a client is told ----


def access_refused_text(
    user: str, vhost: str, resource_kind: ResourceKind, name: str, permission: Permission | None = None
) -> str:
    """The reply text of a refused queue or exchange. With `permission` in the words of RabbitMQ 3.13 and later.

    >>> access_refused_text("ann", "/", "queue", "orders")
    "ACCESS_REFUSED - access to queue 'orders' in vhost '/' refused for user 'ann'"
    >>> access_refused_text("ann", "/", "exchange", "", "write")
    "ACCESS_REFUSED - write access to exchange 'amq.default' in vhost '/' refused for user 'ann'"
    """
    how = f"{permission} access" if permission else "access"
    name = _name_to_check(resource_kind, name)
    return _reply_text(
        f"ACCESS_REFUSED - {how} to {resource_kind} '{name}' in vhost '{vhost}' refused for user '{user}'"
    )


def topic_refused_text(
    user: str, vhost: str, exchange: str, routing_key: str, permission: Literal["write", "read"] | None = None
) -> str:
    """The reply text of a refused routing key.

    >>> topic_refused_text("ann", "/", "amq.topic", "a.b")
    "ACCESS_REFUSED - access to topic 'a.b' in exchange 'amq.topic' in vhost '/' refused for user 'ann'"
    """
    how = f"{permission} access" if permission else "access"
    return _reply_text(
        f"ACCESS_REFUSED - {how} to topic '{routing_key}' in exchange '{exchange}' in vhost '{vhost}'"
        f" refused for user '{user}'"
    )


def vhost_refused_text(user: str, vhost: str) -> str:
    """The reply text of a connection to a vhost in which the user has no permissions.

    >>> vhost_refused_text("ann", "prod")
    "NOT_ALLOWED - access to vhost 'prod' refused for user 'ann'"
    """
    return _reply_text(f"NOT_ALLOWED - access to vhost '{vhost}' refused for user '{user}'")


def vhost_missing_text(vhost: str) -> str:
    """The reply text of a connection to a vhost that does not exist.

    >>> vhost_missing_text("prod")
    'NOT_ALLOWED - vhost prod not found'
    """
    return _reply_text(f"NOT_ALLOWED - vhost {vhost} not found")


def login_refused_text(mechanism: str) -> str:
    """The reply text of a wrong name or password; which of them it was is for the log only.

    >>> login_refused_text("PLAIN").partition(".")[0]
    'ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN'
    """
    return _reply_text(
        f"ACCESS_REFUSED - Login was refused using authentication mechanism {mechanism}."
        " For details see the broker logfile."
    )


def _reply_text(text: str) -> str:
    """Cut to what an AMQP short string holds."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= _REPLY_TEXT_BYTES:
        return text
    return encoded[: _REPLY_TEXT_BYTES - 3].decode("utf-8", "ignore") + "..."
