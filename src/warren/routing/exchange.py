"""An exchange as it was declared: the record, what it may be, and when a redeclare asks for the same.

Rules:

1. A record never changes. What a policy adds (an alternate exchange) is kept beside it, by the router.
2. A redeclare compares type, flags and `alternate-exchange`, in RabbitMQ's order, and names the first difference. Other
   arguments are not compared, as in RabbitMQ: clients do redeclare with more or fewer of them.
3. `x-delayed-message` is a wrapper: it has the matching of the type in its argument `x-delayed-type`, and the caller
   holds messages back. So everything that asks how to match asks for `routing_type`.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal

from warren.routing.errors import ACCESS_REFUSED, COMMAND_INVALID, PRECONDITION_FAILED, RoutingError

DEFAULT_EXCHANGE = ""
ALTERNATE_EXCHANGE = "alternate-exchange"
CONSISTENT_HASH = "x-consistent-hash"
DELAYED_MESSAGE = "x-delayed-message"
DELAYED_TYPE = "x-delayed-type"
HASH_HEADER = "hash-header"
HASH_PROPERTY = "hash-property"
HASH_PROPERTIES = ("correlation_id", "message_id", "timestamp")

ROUTING_TYPES = frozenset({"direct", "fanout", "topic", "headers", CONSISTENT_HASH})
TYPES = ROUTING_TYPES | {DELAYED_MESSAGE}

_RESERVED_PREFIX = "amq."


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """An exchange, declared or about to be.

    >>> orders = Exchange(name="orders", type="x-delayed-message", arguments={"x-delayed-type": "topic"})
    >>> orders.delayed, orders.routing_type, orders.alternate
    (True, 'topic', None)
    """

    name: str
    type: str = "direct"
    durable: bool = True
    auto_delete: bool = False  # goes with the last binding of which it is the source
    internal: bool = False  # takes messages of other exchanges only
    arguments: Mapping[str, object] = field(default_factory=dict)

    @property
    def delayed(self) -> bool:
        """Whether messages with an `x-delay` header wait before they are routed."""
        return self.type == DELAYED_MESSAGE

    @property
    def routing_type(self) -> str:
        """How it matches: its type, or the one that a delayed exchange wraps.

        Requires: `check` let it pass.
        """
        return str(self.arguments[DELAYED_TYPE]) if self.delayed else self.type

    @property
    def needs_message(self) -> bool:
        """Whether it matches by headers or properties, so that `route` must be able to read them."""
        kind = self.routing_type
        return kind == "headers" or (
            kind == CONSISTENT_HASH and (HASH_HEADER in self.arguments or HASH_PROPERTY in self.arguments)
        )

    @property
    def needs_properties(self) -> bool:
        """Whether it matches by a property that is not in the headers."""
        return self.routing_type == CONSISTENT_HASH and HASH_PROPERTY in self.arguments

    @property
    def alternate(self) -> str | None:
        """Where messages go that match no binding, by argument. A policy may name one, too."""
        name = self.arguments.get(ALTERNATE_EXCHANGE)
        return name if isinstance(name, str) else None

    @property
    def predeclared(self) -> bool:
        """Whether it is one of those that every vhost has, and no client declares or deletes."""
        return self.name == DEFAULT_EXCHANGE or self.name.startswith(_RESERVED_PREFIX)


def predeclared_exchanges() -> list[Exchange]:
    """The exchanges that a vhost begins with."""
    return [
        Exchange(name=DEFAULT_EXCHANGE, type="direct"),
        Exchange(name="amq.direct", type="direct"),
        Exchange(name="amq.fanout", type="fanout"),
        Exchange(name="amq.topic", type="topic"),
        Exchange(name="amq.headers", type="headers"),
        Exchange(name="amq.match", type="headers"),
        Exchange(name="amq.rabbitmq.trace", type="topic", internal=True),
    ]


def exchange_in(name: str, vhost: str) -> str:
    """An exchange as RabbitMQ's messages call it.

    >>> exchange_in("orders", "/")
    "exchange 'orders' in vhost '/'"
    """
    return f"exchange '{name}' in vhost '{vhost}'"


# ---- what may be declared ----


def check(exchange: Exchange, vhost: str) -> None:
    """Raises RoutingError for an exchange that a client may not declare, or that makes no sense."""
    check_type(exchange.type)
    check_not_default(exchange.name)
    if exchange.predeclared:
        raise RoutingError(
            ACCESS_REFUSED, f"exchange name '{exchange.name}' contains reserved prefix '{_RESERVED_PREFIX}*'"
        )
    alternate = exchange.arguments.get(ALTERNATE_EXCHANGE)
    if alternate is not None and not isinstance(alternate, str):
        raise RoutingError(
            PRECONDITION_FAILED,
            f"invalid type '{amqp_type(alternate)}' for arg '{ALTERNATE_EXCHANGE}' in "
            f"{exchange_in(exchange.name, vhost)}",
        )
    if exchange.delayed:
        _check_delayed_type(exchange.arguments.get(DELAYED_TYPE))
    if exchange.routing_type == CONSISTENT_HASH:
        _check_hash_arguments(exchange.arguments)


def check_type(type_: str) -> None:
    """Raises RoutingError for a type that there is not.

    >>> check_type("topik")
    Traceback (most recent call last):
    warren.routing.errors.RoutingError: unknown exchange type 'topik'
    """
    if type_ not in TYPES:
        raise RoutingError(COMMAND_INVALID, f"unknown exchange type '{type_}'")


def check_not_default(name: str) -> None:
    """Raises RoutingError for the default exchange: it cannot be declared, deleted, bound or unbound."""
    if name == DEFAULT_EXCHANGE:
        raise RoutingError(ACCESS_REFUSED, "operation not permitted on the default exchange")


def _check_delayed_type(inner: object) -> None:
    if inner == DELAYED_MESSAGE or not isinstance(inner, str):
        raise RoutingError(PRECONDITION_FAILED, f"Invalid argument, '{DELAYED_TYPE}' must be an existing exchange type")
    check_type(inner)


def _check_hash_arguments(arguments: Mapping[str, object]) -> None:
    for name in (HASH_HEADER, HASH_PROPERTY):
        value = arguments.get(name)
        if value is not None and not isinstance(value, str):
            raise RoutingError(PRECONDITION_FAILED, f"invalid type '{amqp_type(value)}' for arg '{name}'")
    if arguments.get(HASH_HEADER) is not None and arguments.get(HASH_PROPERTY) is not None:
        raise RoutingError(PRECONDITION_FAILED, f"{HASH_HEADER} and {HASH_PROPERTY} are mutually exclusive")
    wanted = arguments.get(HASH_PROPERTY)
    if wanted is not None and wanted not in HASH_PROPERTIES:
        raise RoutingError(PRECONDITION_FAILED, f"Unsupported property: {wanted}")


# ---- redeclare ----


def check_equivalent(current: Exchange, requested: Exchange, vhost: str) -> None:
    """Raises RoutingError when `requested` is not what is declared, with the first difference.

    >>> check_equivalent(Exchange(name="x"), Exchange(name="x", durable=False), "/")
    Traceback (most recent call last):
    warren.routing.errors.RoutingError: inequivalent arg 'durable' for exchange 'x' in vhost '/': received 'false' but \
current is 'true'
    """
    where = exchange_in(current.name, vhost)
    for name in ("type", "durable", "auto_delete", "internal"):
        ours, theirs = getattr(current, name), getattr(requested, name)
        if ours != theirs:
            raise _inequivalent(name, where, _plain(theirs), _plain(ours))
    ours = current.arguments.get(ALTERNATE_EXCHANGE)
    theirs = requested.arguments.get(ALTERNATE_EXCHANGE)
    if type(ours) is not type(theirs) or ours != theirs:
        raise _inequivalent(ALTERNATE_EXCHANGE, where, _typed(theirs), _typed(ours))


def _inequivalent(argument: str, where: str, received: str, current: str) -> RoutingError:
    return RoutingError(
        PRECONDITION_FAILED,
        f"inequivalent arg '{argument}' for {where}: received {received} but current is {current}",
    )


def _plain(value: object) -> str:
    return f"'{str(value).lower() if isinstance(value, bool) else value}'"


def _typed(value: object) -> str:
    return "none" if value is None else f"the value '{value}' of type '{amqp_type(value)}'"


def amqp_type(value: object) -> str:
    """The name that RabbitMQ has for the type of a table's value.

    >>> amqp_type("a"), amqp_type(7), amqp_type(None)
    ('longstr', 'signedint', 'void')
    """
    match value:
        case None:
            return "void"
        case bool():
            return "bool"
        case int():
            return "signedint" if -(2**31) <= value < 2**31 else "long"
        case float():
            return "double"
        case str():
            return "longstr"
        case bytes() | bytearray():
            return "binary"
        case Decimal():
            return "decimal"
        case datetime.datetime():
            return "timestamp"
        case Mapping():
            return "table"
    return "array"
