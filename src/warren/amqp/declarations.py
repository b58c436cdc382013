"""The methods of a channel that declare, bind and delete queues and exchanges."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from warren.amqp.errors import AmqpError, check_utf8
from warren.amqp.methods import encode
from warren.queueing.queue_process import QueueProcess
from warren.routing.binding import Binding
from warren.routing.errors import RoutingError
from warren.routing.exchange import Exchange, check_not_default, check_type

if TYPE_CHECKING:
    from warren.amqp.connection import Connection, Permission, ResourceKind

REPLY_TO = "amq.rabbitmq.reply-to"


class Declarations:
    """The part of a channel that deals with what there is, and not with messages."""

    def __init__(self, connection: Connection, number: int) -> None:
        self.number = number
        self.connection = connection
        self.vhost = connection.vhost
        self._last_queue = ""  # what an empty queue name stands for

    def reply(self, name: str, **arguments: Any) -> None:
        self.connection.send_method(self.number, encode(name, **arguments))

    def _allow(self, permission: Permission, kind: ResourceKind, name: str) -> None:
        if not self.connection.allows(permission, kind, name):
            user = self.connection.user
            shown = "amq.default" if kind == "exchange" and not name else name
            raise AmqpError(403, f"access to {kind} '{shown}' in vhost '{self.vhost.name}' refused for user '{user}'")

    def _queue_name(self, name: str) -> str:
        if not name and not self._last_queue:
            raise AmqpError(404, "no previously declared queue")
        return name or self._last_queue

    def _queue(self, name: str, *, locked: bool = True) -> QueueProcess:
        """By name; an empty one is the queue that was declared last."""
        queue = self.vhost.queue(self._queue_name(name))
        if locked:
            self._check_owner(queue)
        return queue

    def _check_owner(self, queue: QueueProcess) -> None:
        if queue.exclusive_to is not None and queue.exclusive_to is not self.connection:
            raise AmqpError(
                405,
                f"cannot obtain exclusive access to locked queue '{queue.name}' in vhost '{self.vhost.name}'. It could be "
                "originally declared on another connection or the exclusive property value does not match that of the "
                "original declaration.",
            )

    # -- queues ------------------------------------------------------------------------------------------------------

    def queue_declare(
        self,
        ticket: int,
        queue: str,
        passive: bool,
        durable: bool,
        exclusive: bool,
        auto_delete: bool,
        nowait: bool,
        arguments: dict[str, Any],
    ) -> None:
        if queue == REPLY_TO or (self.vhost.is_reply_name(queue) and passive):
            self._declared(queue, 0, 1, nowait)
            return
        name = queue or ("" if passive else self.vhost.new_name())
        if passive:
            known = self.vhost.queue(name)  # an empty name stands for no other here
            self._check_owner(known)  # and nothing else: as in RabbitMQ, to ask for a queue needs no permission
        else:
            self._allow("configure", "queue", name)
            existing = self.vhost.queues.get(name)
            if existing is None:
                known = self._new_queue(name, durable, exclusive, auto_delete, arguments, unnamed=not queue)
            else:
                self._check_owner(existing)
                self.vhost.check_same_queue(existing, durable, exclusive, auto_delete, arguments)
                known = existing
        known.used()
        self._last_queue = known.name
        self._declared(known.name, len(known), len(known.consumers), nowait)

    def _declared(self, name: str, messages: int, consumers: int, nowait: bool) -> None:
        if not nowait:
            self.reply("queue.declare-ok", queue=name, message_count=messages, consumer_count=consumers)

    def _new_queue(
        self,
        name: str,
        durable: bool,
        exclusive: bool,
        auto_delete: bool,
        arguments: dict[str, Any],
        *,
        unnamed: bool,
    ) -> QueueProcess:
        if name.startswith("amq.") and not unnamed:
            raise AmqpError(403, f"queue name '{name}' contains reserved prefix 'amq.*'", 50, 10)
        check_utf8("queue name", name)
        dead_letters = arguments.get("x-dead-letter-exchange")
        if isinstance(dead_letters, str):
            self._allow("read", "queue", name)
            self._allow("write", "exchange", dead_letters)
        return self.vhost.declare_queue(
            name,
            durable=durable,
            exclusive_to=self.connection if exclusive else None,
            auto_delete=auto_delete,
            arguments=arguments,
        )

    def queue_delete(self, ticket: int, queue: str, if_unused: bool, if_empty: bool, nowait: bool) -> None:
        name = queue or self._last_queue
        known = self.vhost.queues.get(name)
        count = 0
        if known is None:
            if not name:
                raise AmqpError(404, "no previously declared queue", 50, 40)
            self._allow("configure", "queue", name)  # to delete what is not there is no error
            if name in self.vhost.down:
                count = self.vhost.delete_down(name)
        else:
            self._check_owner(known)
            self._allow("configure", "queue", known.name)
            if if_empty and len(known):
                raise AmqpError(406, f"queue '{name}' in vhost '{self.vhost.name}' not empty", 50, 40)
            if if_unused and len(known.consumers):
                raise AmqpError(406, f"queue '{name}' in vhost '{self.vhost.name}' in use", 50, 40)
            count = self.vhost.remove_queue(known)
        if not nowait:
            self.reply("queue.delete-ok", message_count=count)

    def queue_purge(self, ticket: int, queue: str, nowait: bool) -> None:
        known = self._queue(queue)
        self._allow("read", "queue", known.name)
        count = known.purge()
        if not nowait:
            self.reply("queue.purge-ok", message_count=count)

    def queue_bind(
        self, ticket: int, queue: str, exchange: str, routing_key: str, nowait: bool, arguments: dict[str, Any]
    ) -> None:
        name = self._queue_name(queue)
        if not queue and not routing_key:
            routing_key = name
        self._allow("write", "queue", name)
        self._routed(lambda: check_not_default(exchange))
        self._allow("read", "exchange", exchange)
        self._check_exchange(exchange)
        binding = _binding(exchange, "queue", name, routing_key, arguments)
        if name in self.vhost.queues and self.vhost.queues[name].exclusive:
            # In RabbitMQ's order: what cannot be bound is told before whose queue it is.
            self._routed(lambda: self.vhost.router.check_binding(binding))
        self._queue(name)
        self.connection.check_topic(self.vhost.router.exchanges[exchange], routing_key, "read")
        self._routed(lambda: self.vhost.bind(binding))
        if not nowait:
            self.reply("queue.bind-ok")

    def queue_unbind(self, ticket: int, queue: str, exchange: str, routing_key: str, arguments: dict[str, Any]) -> None:
        name = self._queue_name(queue)
        if not queue and not routing_key:
            routing_key = name
        self._allow("write", "queue", name)
        self._routed(lambda: check_not_default(exchange))
        self._allow("read", "exchange", exchange)
        known = self.vhost.queues.get(name)
        binding = _binding(exchange, "queue", name, routing_key, arguments)
        if known is not None and exchange in self.vhost.router.exchanges:
            if known.exclusive and binding in self.vhost.router.bindings_to_queue(name):
                self._check_owner(known)
            self.connection.check_topic(self.vhost.router.exchanges[exchange], routing_key, "read")
            self._routed(lambda: self.vhost.unbind(binding))
        self.reply("queue.unbind-ok")

    # -- exchanges ---------------------------------------------------------------------------------------------------

    def _check_exchange(self, name: str) -> None:
        if name not in self.vhost.router.exchanges:
            raise AmqpError(404, f"no exchange '{name}' in vhost '{self.vhost.name}'")

    @staticmethod
    def _routed(change: Callable[[], None]) -> None:
        try:
            change()
        except RoutingError as error:
            raise AmqpError(error.reply_code, error.text) from None

    def exchange_declare(
        self,
        ticket: int,
        exchange: str,
        type: str,
        passive: bool,
        durable: bool,
        auto_delete: bool,
        internal: bool,
        nowait: bool,
        arguments: dict[str, Any],
    ) -> None:
        if not passive:
            self._routed(lambda: check_type(type))
        self._routed(lambda: check_not_default(exchange))
        if passive:
            self._check_exchange(exchange)
        else:
            if not exchange:
                raise AmqpError(403, "operation not permitted on the default exchange", 40, 10)
            self._allow("configure", "exchange", exchange)
            self._routed(lambda: self._declare_exchange(exchange, type, durable, auto_delete, internal, arguments))
        if not nowait:
            self.reply("exchange.declare-ok")

    def _declare_exchange(
        self, name: str, type_: str, durable: bool, auto_delete: bool, internal: bool, arguments: dict[str, Any]
    ) -> None:
        if name in self.vhost.router.exchanges:
            self.vhost.router.check_same(name, type_, durable, auto_delete, internal, arguments)
            return
        check_utf8("exchange name", name)
        alternate = arguments.get("alternate-exchange")
        if isinstance(alternate, str):
            self._allow("read", "exchange", name)
            self._allow("write", "exchange", alternate)
        self.vhost.declare_exchange(
            Exchange(
                name=name,
                type=type_,
                durable=durable,
                auto_delete=auto_delete,
                internal=internal,
                arguments=arguments,
            )
        )

    def exchange_delete(self, ticket: int, exchange: str, if_unused: bool, nowait: bool) -> None:
        if exchange.startswith("amq."):  # whether there is one or not
            raise AmqpError(403, f"deletion of system exchange '{exchange}' in vhost '{self.vhost.name}' not allowed")
        self._allow("configure", "exchange", exchange)
        if exchange in self.vhost.router.exchanges:
            self._routed(lambda: self.vhost.delete_exchange(exchange, if_unused))
        if not nowait:
            self.reply("exchange.delete-ok")

    def exchange_bind(
        self, ticket: int, destination: str, source: str, routing_key: str, nowait: bool, arguments: dict[str, Any]
    ) -> None:
        self._allow("write", "exchange", destination)
        for name in (destination, source):
            self._routed(partial(check_not_default, name))
        self._allow("read", "exchange", source)
        for name in (source, destination):
            self._check_exchange(name)
        self.connection.check_topic(self.vhost.router.exchanges[source], routing_key, "read")
        self._routed(lambda: self.vhost.bind(_binding(source, "exchange", destination, routing_key, arguments)))
        if not nowait:
            self.reply("exchange.bind-ok")

    def exchange_unbind(
        self, ticket: int, destination: str, source: str, routing_key: str, nowait: bool, arguments: dict[str, Any]
    ) -> None:
        self._allow("write", "exchange", destination)
        for name in (destination, source):
            self._routed(partial(check_not_default, name))
        self._allow("read", "exchange", source)
        exchanges = self.vhost.router.exchanges
        if source in exchanges and destination in exchanges:
            self.connection.check_topic(exchanges[source], routing_key, "read")
            self._routed(lambda: self.vhost.unbind(_binding(source, "exchange", destination, routing_key, arguments)))
        if not nowait:
            self.reply("exchange.unbind-ok")


def _binding(
    source: str, kind: Literal["queue", "exchange"], destination: str, routing_key: str, arguments: dict[str, Any]
) -> Binding:
    return Binding(
        source=source,
        destination_kind=kind,
        destination=destination,
        routing_key=routing_key,
        arguments=arguments,
    )
