"""The methods of AMQP 0-9-1 and RabbitMQ's additions, as a table, and their bytes.

Only methods off the hot path come here: publishes, acks and deliveries are the kernel's (`kernel/frames.pyx`). The codec is
ours and not pamqp's for the reason that `queueing/properties.py` gives, and because pamqp refuses names of queues that
RabbitMQ accepts. The tests hold the two against each other.

A line of `_SPEC` is: class.method, class id, method id, then the arguments as type:name. Bits that stand next to each other
share octets.

    o octet   s short   l long   q longlong   S short string   L long string   t table   b bit
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from warren.queueing.properties import encode_table, read_table

_SPEC = """
connection.start 10 10 o:version_major o:version_minor t:server_properties L:mechanisms L:locales
connection.start-ok 10 11 t:client_properties S:mechanism L:response S:locale
connection.secure 10 20 L:challenge
connection.secure-ok 10 21 L:response
connection.tune 10 30 s:channel_max l:frame_max s:heartbeat
connection.tune-ok 10 31 s:channel_max l:frame_max s:heartbeat
connection.open 10 40 S:virtual_host S:capabilities b:insist
connection.open-ok 10 41 S:known_hosts
connection.close 10 50 s:reply_code S:reply_text s:class_id s:method_id
connection.close-ok 10 51
connection.blocked 10 60 S:reason
connection.unblocked 10 61
connection.update-secret 10 70 L:new_secret S:reason
connection.update-secret-ok 10 71
channel.open 20 10 S:out_of_band
channel.open-ok 20 11 L:channel_id
channel.flow 20 20 b:active
channel.flow-ok 20 21 b:active
channel.close 20 40 s:reply_code S:reply_text s:class_id s:method_id
channel.close-ok 20 41
access.request 30 10 S:realm b:exclusive b:passive b:active b:write b:read
access.request-ok 30 11 s:ticket
exchange.declare 40 10 s:ticket S:exchange S:type b:passive b:durable b:auto_delete b:internal b:nowait t:arguments
exchange.declare-ok 40 11
exchange.delete 40 20 s:ticket S:exchange b:if_unused b:nowait
exchange.delete-ok 40 21
exchange.bind 40 30 s:ticket S:destination S:source S:routing_key b:nowait t:arguments
exchange.bind-ok 40 31
exchange.unbind 40 40 s:ticket S:destination S:source S:routing_key b:nowait t:arguments
exchange.unbind-ok 40 51
queue.declare 50 10 s:ticket S:queue b:passive b:durable b:exclusive b:auto_delete b:nowait t:arguments
queue.declare-ok 50 11 S:queue l:message_count l:consumer_count
queue.bind 50 20 s:ticket S:queue S:exchange S:routing_key b:nowait t:arguments
queue.bind-ok 50 21
queue.unbind 50 50 s:ticket S:queue S:exchange S:routing_key t:arguments
queue.unbind-ok 50 51
queue.purge 50 30 s:ticket S:queue b:nowait
queue.purge-ok 50 31 l:message_count
queue.delete 50 40 s:ticket S:queue b:if_unused b:if_empty b:nowait
queue.delete-ok 50 41 l:message_count
basic.qos 60 10 l:prefetch_size s:prefetch_count b:global_
basic.qos-ok 60 11
basic.consume 60 20 s:ticket S:queue S:consumer_tag b:no_local b:no_ack b:exclusive b:nowait t:arguments
basic.consume-ok 60 21 S:consumer_tag
basic.cancel 60 30 S:consumer_tag b:nowait
basic.cancel-ok 60 31 S:consumer_tag
basic.publish 60 40 s:ticket S:exchange S:routing_key b:mandatory b:immediate
basic.return 60 50 s:reply_code S:reply_text S:exchange S:routing_key
basic.deliver 60 60 S:consumer_tag q:delivery_tag b:redelivered S:exchange S:routing_key
basic.get 60 70 s:ticket S:queue b:no_ack
basic.get-ok 60 71 q:delivery_tag b:redelivered S:exchange S:routing_key l:message_count
basic.get-empty 60 72 S:cluster_id
basic.ack 60 80 q:delivery_tag b:multiple
basic.reject 60 90 q:delivery_tag b:requeue
basic.recover-async 60 100 b:requeue
basic.recover 60 110 b:requeue
basic.recover-ok 60 111
basic.nack 60 120 q:delivery_tag b:multiple b:requeue
confirm.select 85 10 b:nowait
confirm.select-ok 85 11
tx.select 90 10
tx.select-ok 90 11
tx.commit 90 20
tx.commit-ok 90 21
tx.rollback 90 30
tx.rollback-ok 90 31
"""


class Method(NamedTuple):
    name: str  # queue.declare-ok
    class_id: int
    method_id: int
    fields: tuple[tuple[str, str], ...]  # (type, name)

    @property
    def handler(self) -> str:
        """The name of the Python method that does it: queue_declare_ok."""
        return self.name.replace(".", "_").replace("-", "_")


def _parse(spec: str) -> list[Method]:
    methods = []
    for line in spec.strip().splitlines():
        name, class_id, method_id, *arguments = line.split()
        fields = tuple((argument[0], argument[2:]) for argument in arguments)
        methods.append(Method(name, int(class_id), int(method_id), fields))
    return methods


METHODS = {(method.class_id, method.method_id): method for method in _parse(_SPEC)}
BY_NAME = {method.name: method for method in METHODS.values()}

_IDS = struct.Struct(">HH")
_NUMBERS = {"o": struct.Struct(">B"), "s": struct.Struct(">H"), "l": struct.Struct(">I"), "q": struct.Struct(">Q")}
_U32 = struct.Struct(">I")


def encode(name: str, **arguments: Any) -> bytes:
    """The payload of a method frame. Arguments that are left out are 0, empty or false.

    >>> encode("queue.declare-ok", queue="q", message_count=2).hex(" ")
    '00 32 00 0b 01 71 00 00 00 02 00 00 00 00'
    """
    method = BY_NAME[name]
    parts = [_IDS.pack(method.class_id, method.method_id)]
    bits = -1  # of the octet that is being filled; -1: none
    count = 0
    for kind, field in method.fields:
        value = arguments.pop(field, None)
        if kind == "b":
            if bits < 0 or count == 8:
                if bits >= 0:
                    parts.append(bytes((bits,)))
                bits = count = 0
            bits |= bool(value) << count
            count += 1
            continue
        if bits >= 0:
            parts.append(bytes((bits,)))
            bits = -1
        parts.append(_encode_field(kind, field, value))
    if bits >= 0:
        parts.append(bytes((bits,)))
    if arguments:
        raise TypeError(f"{name} has no argument {next(iter(arguments))!r}")
    return b"".join(parts)


def _encode_field(kind: str, field: str, value: Any) -> bytes:
    if kind in _NUMBERS:
        return _NUMBERS[kind].pack(value or 0)
    if kind == "t":
        return encode_table(value or {})
    data = value if isinstance(value, bytes) else (value or "").encode("utf-8", "surrogateescape")
    if kind == "L":
        return _U32.pack(len(data)) + data
    if len(data) > 255:
        raise ValueError(f"{field} has {len(data)} bytes; a short string has at most 255")
    return bytes((len(data),)) + data


def decode(method: Method, payload: bytes) -> dict[str, Any]:
    """Its arguments by name. Raises ValueError for bytes that are none.

    >>> decode(BY_NAME["queue.purge"], bytes.fromhex("0000 0171 01"))
    {'ticket': 0, 'queue': 'q', 'nowait': True}
    """
    values: dict[str, Any] = {}
    at = 0
    bit = 8
    try:
        for kind, field in method.fields:
            if kind == "b":
                if bit == 8:
                    octet = payload[at]
                    at += 1
                    bit = 0
                values[field] = bool(octet >> bit & 1)
                bit += 1
                continue
            bit = 8
            if kind in _NUMBERS:
                (values[field],) = _NUMBERS[kind].unpack_from(payload, at)
                at += _NUMBERS[kind].size
            elif kind == "t":
                values[field], at = read_table(payload, at)
            else:
                if kind == "L":
                    (size,) = _U32.unpack_from(payload, at)
                    at += 4
                else:
                    size = payload[at]
                    at += 1
                data = payload[at : at + size]
                if len(data) < size:
                    raise ValueError(f"{method.name}: {field} ends before its {size} bytes")
                values[field] = bytes(data) if kind == "L" else data.decode("utf-8", "surrogateescape")
                at += size
    except (IndexError, struct.error):
        raise ValueError(f"{method.name} ends after {len(payload)} bytes, in the middle of {field}") from None
    if at != len(payload):
        raise ValueError(f"{method.name} has {len(payload) - at} bytes too many")
    return values
