"""Policies: settings that an operator gives to many queues and exchanges at once, by a pattern of their names.

Rules:

1. Of the policies whose pattern is found in a name, the one with the highest priority counts, whole; the others do
   nothing. Equal priorities are decided by name, so that a restart changes nothing.
2. An operator policy is found in the same way and laid over it: of limits the lower one counts, of everything else the
   operator's.
3. An argument of the queue itself meets the result like this: of limits the lower one counts, else the argument.
4. A key that Warren does not know is refused, with the one that was probably meant. Keys that say how RabbitMQ keeps a
   queue, and not what the queue does, are taken and have no effect.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from warren.routing.errors import PolicyError

ApplyTo = Literal["queues", "exchanges", "all", "classic_queues"]
Kind = Literal["queue", "exchange"]

# Of two values the lower one counts, wherever they come from.
LIMITS = frozenset({"expires", "message-ttl", "max-length", "max-length-bytes", "delivery-limit"})

MAX_DURATION_MS = 315_360_000_000  # 10 years of 365 days, RabbitMQ's limit
_MAX_COUNT = 2**63 - 1  # AMQP's widest integer

_APPLIES: dict[str, frozenset[Kind]] = {
    "queues": frozenset({"queue"}),
    "classic_queues": frozenset({"queue"}),  # as all of Warren's are
    "exchanges": frozenset({"exchange"}),
    "all": frozenset({"queue", "exchange"}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy, or an operator policy.

    >>> short = Policy(name="short", pattern="^short[.]", definition={"max-length": 10}, apply_to="queues")
    >>> short.covers("queue", "short.orders"), short.covers("exchange", "short.orders"), short.covers("queue", "orders")
    (True, False, False)
    >>> Policy(name="short", pattern="^short", definition={"max-lenght": 10})
    Traceback (most recent call last):
    warren.routing.errors.PolicyError: policy 'short': unknown key max-lenght=10; did you mean max-length?
    """

    name: str
    pattern: str  # a regular expression, found anywhere in the name unless it says ^ and $
    definition: Mapping[str, object]
    apply_to: ApplyTo = "all"
    priority: int = 0  # the highest counts
    _found_in: Callable[[str], object] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises PolicyError with what is wrong, its value and what is allowed."""
        if not isinstance(self.name, str) or not self.name:
            raise PolicyError(f"a policy needs a name, not {self.name!r}")
        if not isinstance(self.pattern, str):
            raise self._refusal(f"pattern {self.pattern!r} is a {type(self.pattern).__name__}; it is a str")
        try:
            found_in = re.compile(self.pattern).search
        except (re.error, RecursionError, OverflowError) as error:
            raise self._refusal(f"pattern {self.pattern!r} is no regular expression: {error}") from None
        object.__setattr__(self, "_found_in", found_in)
        if self.apply_to not in _APPLIES:
            raise self._refusal(
                f"apply_to {self.apply_to!r} is not possible; it is one of {_listed(get_args(ApplyTo))}"
            )
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise self._refusal(f"priority {self.priority!r} is not possible; it is an integer")
        if not isinstance(self.definition, Mapping) or not self.definition:
            raise self._refusal(f"definition {self.definition!r} is not possible; it is a table of at least one key")
        for key, value in self.definition.items():
            self._check_key(key, value)

    def covers(self, kind: Kind, name: str) -> bool:
        """Whether it is meant for the queue or exchange of that name. Never for the default exchange."""
        return bool(name) and kind in _APPLIES[self.apply_to] and self._found_in(name) is not None

    def _check_key(self, key: object, value: object) -> None:
        if not isinstance(key, str) or key not in _ALLOWED:
            close = difflib.get_close_matches(str(key), _ALLOWED, n=1)
            meant = f"did you mean {close[0]}?" if close else f"the keys are {_listed(sorted(_ALLOWED))}"
            raise self._refusal(f"unknown key {key}={value!r}; {meant}")
        allowed = _ALLOWED[key]
        if not allowed.accepts(value):
            raise self._refusal(f"{key}={value!r} is not possible; {key} is {allowed.text}")

    def _refusal(self, what: str) -> PolicyError:
        return PolicyError(f"policy {self.name!r}: {what}")


def matching(policies: Iterable[Policy], kind: Kind, name: str) -> Policy | None:
    """The policy that counts for a queue or exchange, or None."""
    covering = [policy for policy in policies if policy.covers(kind, name)]
    return min(covering, key=lambda policy: (-policy.priority, policy.name), default=None)


def effective(
    policies: Iterable[Policy], operator_policies: Iterable[Policy], kind: Kind, name: str
) -> dict[str, object]:
    """What policies say about a queue or exchange, all in all.

    >>> short = Policy(name="short", pattern="", definition={"max-length": 10, "overflow": "reject-publish"})
    >>> limit = Policy(name="limit", pattern="", definition={"max-length": 5, "message-ttl": 1000})
    >>> effective([short], [limit], "queue", "orders")
    {'max-length': 5, 'overflow': 'reject-publish', 'message-ttl': 1000}
    """
    chosen = matching(policies, kind, name)
    result = {} if chosen is None else dict(chosen.definition)
    operator = matching(operator_policies, kind, name)
    for key, value in () if operator is None else operator.definition.items():
        result[key] = _lower(result[key], value) if key in LIMITS and key in result else value
    return result


def queue_arguments(policy: Mapping[str, object], arguments: Mapping[str, object]) -> dict[str, object]:
    """The arguments of a queue and what `effective` says about it, as one table of arguments.

    >>> queue_arguments({"max-length": 10, "overflow": "reject-publish"}, {"x-max-length": 20, "x-overflow": "drop-head"})
    {'x-max-length': 10, 'x-overflow': 'drop-head'}
    """
    result = dict(arguments)
    for key, value in policy.items():
        if key not in _QUEUE_KEYS:
            continue
        argument = f"x-{key}"
        if argument not in result:
            result[argument] = value
        elif key in LIMITS:
            result[argument] = _lower(result[argument], value)
    # A policy may name the key for queues that have the exchange by argument; alone it means nothing.
    if "x-dead-letter-exchange" not in result and "x-dead-letter-routing-key" not in arguments:
        result.pop("x-dead-letter-routing-key", None)
    return result


def _lower(one: object, other: object) -> object:
    assert isinstance(one, int)
    assert isinstance(other, int)
    return min(one, other)


# ---- what a key may be ----


@dataclass(frozen=True, slots=True)
class _Allowed:
    accepts: Callable[[object], bool]
    text: str


def _integer(low: int, high: int = _MAX_COUNT) -> _Allowed:
    def accepts(value: object) -> bool:
        # bool is an int to Python, and none to anybody else.
        return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high

    return _Allowed(
        accepts, f"an integer of {low} or more" if high == _MAX_COUNT else f"an integer from {low} to {high}"
    )


def _one_of(*words: str) -> _Allowed:
    return _Allowed(lambda value: isinstance(value, str) and value in words, f"one of {_listed(words)}")


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words)


def _is_short_string(value: object) -> bool:
    try:
        return isinstance(value, str) and len(value.encode()) <= 255
    except UnicodeEncodeError:
        return False


_NAME = _Allowed(_is_short_string, "text of at most 255 bytes of UTF-8")
_ANYTHING = _Allowed(lambda value: True, "anything")

_QUEUE_KEYS: dict[str, _Allowed] = {
    "backing-queue": _one_of("variable", "volatile", "sqlite"),
    "dead-letter-exchange": _NAME,
    "dead-letter-routing-key": _NAME,
    "delivery-limit": _integer(0),
    "expires": _integer(1, MAX_DURATION_MS),
    "max-length": _integer(0),
    "max-length-bytes": _integer(0),
    "message-ttl": _integer(0, MAX_DURATION_MS),
    "overflow": _one_of("drop-head", "reject-publish", "reject-publish-dlx"),
}

_EXCHANGE_KEYS: dict[str, _Allowed] = {"alternate-exchange": _NAME}

# How RabbitMQ keeps a queue, and where.
_WITHOUT_EFFECT: dict[str, _Allowed] = {
    "dead-letter-strategy": _one_of("at-most-once", "at-least-once"),
    "ha-mode": _one_of("all", "exactly", "nodes"),
    "ha-params": _ANYTHING,
    "ha-promote-on-failure": _one_of("always", "when-synced"),
    "ha-promote-on-shutdown": _one_of("always", "when-synced"),
    "ha-sync-batch-size": _integer(1),
    "ha-sync-mode": _one_of("manual", "automatic"),
    "max-in-memory-bytes": _integer(0),
    "max-in-memory-length": _integer(0),
    "queue-leader-locator": _one_of("client-local", "balanced", "random", "least-leaders"),
    "queue-master-locator": _one_of("client-local", "min-masters", "random"),
    "queue-mode": _one_of("default", "lazy"),
    "queue-version": _integer(1, 2),
}

_ALLOWED: dict[str, _Allowed] = {**_QUEUE_KEYS, **_EXCHANGE_KEYS, **_WITHOUT_EFFECT}
