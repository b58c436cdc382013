"""The head of a message: where it was published to, and its AMQP properties, as they are stored.

    head        = exchange routing-key properties [blind]
    exchange    = length (1 byte), UTF-8
    routing-key = length (1 byte), UTF-8
    properties  = flags (2 bytes), then the value of each property whose flag is set, in the order of _PROPERTIES:
                  what follows the body size in the content header frame of AMQP 0-9-1, byte for byte
    blind       = keys (each: length (1 byte), UTF-8), then their size in bytes (4 bytes); there when the flag 0x0002, that
                  AMQP has no property for, is set. The keys of BCC: dead letters go there too, and no client sees them

Rules:

1. A head from the network is stored as it came and handed out as it was stored. So reading takes whatever a client may
   have sent, and re-encoding is not needed to deliver. Where the broker changes a head (a dead letter), what it does not
   change stays byte for byte: the types of a client's numbers, times that no calendar has, what we could not write.
2. Most messages have no property but delivery mode and priority: their head is looked up, not built.
3. A reader that wants one property skips the others and decodes none of them.
4. Nothing is lost in silence: a value that AMQP cannot carry is refused, and what was accepted comes back equal. Only
   times lose their fraction of a second: AMQP has none. And a name that is not UTF-8 (text with surrogates for its bytes)
   comes back as bytes when it was the value of a header.

Rule 4 is why the field tables are not left to pamqp: it stores a float in 32 bits, cuts a header's name at 128 bytes,
reads a time after 2106 as milliseconds, and takes no bytes. Where it loses nothing, the tests hold it against this.
"""

from __future__ import annotations

import datetime
import difflib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache

MAX_SHORT_STRING_BYTES = 255
MAX_PRIORITY = 255
MAX_EXPIRATION_MS = 315_360_000_000  # 10 years of 365 days, RabbitMQ's limit
MAX_TABLE_DEPTH = 100  # of tables and arrays in each other; far below what would exhaust the stack

_HEADS_CACHED = 4096

_PERSISTENT = 2
_TRANSIENT = 1

_BLIND = 0x0002  # among the flags: AMQP has no such property, and a client that sets it is refused
_EMPTY_TABLE = bytes(4)

_U16 = struct.Struct(">H")
_U32 = struct.Struct(">I")
_U64 = struct.Struct(">Q")
_I32 = struct.Struct(">i")
_I64 = struct.Struct(">q")
_F64 = struct.Struct(">d")
_DECIMAL = struct.Struct(">Bi")

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_SECOND = datetime.timedelta(seconds=1)
_LAST_SECOND = (datetime.datetime.max.replace(tzinfo=datetime.UTC) - _EPOCH) // _SECOND


@dataclass(frozen=True, slots=True)
class Head:
    """A head, decoded."""

    exchange: str
    routing_key: str
    properties: dict[str, object]  # by AMQP's names with underscores; only those that were set
    blind: tuple[str, ...] = ()  # the keys of BCC

    @property
    def headers(self) -> dict[str, object]:
        """A copy of them."""
        found = self.properties.get("headers")
        return dict(found) if isinstance(found, dict) else {}

    @property
    def keys(self) -> list[str]:
        """Everything that it is routed by: its routing key, CC, BCC."""
        carbon = self.headers.get("CC")
        return [self.routing_key, *carbon_keys(carbon), *self.blind]


def carbon_keys(value: object) -> list[str]:
    """The keys in a header CC or BCC. What is no text in there is passed over, as RabbitMQ does."""
    return [key for key in value if isinstance(key, str)] if isinstance(value, list) else []


# ---- writing ----


def encode_head(
    exchange: str,
    routing_key: str,
    *,
    persistent: bool,
    headers: Mapping[str, object] | None = None,
    priority: int | None = None,
    expiration_ms: int | None = None,
    **properties: object,
) -> bytes:
    """The head of a message. `properties` are the other ones of AMQP: content_type, content_encoding, correlation_id,
    reply_to, message_id, timestamp (datetime or seconds), type, user_id, app_id, cluster_id. None means not set.

    >>> encode_head("", "orders", persistent=True).hex(" ")
    '00 06 6f 72 64 65 72 73 10 00 02'
    >>> head = encode_head("", "orders", persistent=True, headers={"trace": 7}, content_type="text/plain")
    >>> properties_of(head)
    {'content_type': 'text/plain', 'headers': {'trace': 7}, 'delivery_mode': 2}

    Raises TypeError or ValueError, with the name and the value, for what AMQP cannot carry.
    """
    if not headers and expiration_ms is None and not properties:
        try:
            return _plain_head(exchange, routing_key, persistent, priority)
        except TypeError:
            pass  # perhaps only because the cache cannot hash an argument: what follows says what is wrong
    if not _OTHER_PROPERTIES.issuperset(properties):
        raise _unknown_property(next(name for name in properties if name not in _OTHER_PROPERTIES))
    properties["headers"] = headers or None
    properties["delivery_mode"] = _PERSISTENT if persistent else _TRANSIENT
    properties["priority"] = priority
    properties["expiration"] = None if expiration_ms is None else _checked_expiration(expiration_ms)
    return build_head(exchange, routing_key, properties)


@lru_cache(maxsize=_HEADS_CACHED)
def _plain_head(exchange: str, routing_key: str, persistent: bool, priority: int | None) -> bytes:
    mode = _PERSISTENT if persistent else _TRANSIENT
    return build_head(exchange, routing_key, {"delivery_mode": mode, "priority": priority})


def build_head(exchange: str, routing_key: str, properties: Mapping[str, object]) -> bytes:
    """A head with exactly these properties, by AMQP's names with underscores: what `decode_head` returned, changed.

    >>> head = decode_head(encode_head("", "orders", persistent=True))
    >>> build_head("retry", head.routing_key, {**head.properties, "type": "order"}) == encode_head(
    ...     "retry", "orders", persistent=True, type="order"
    ... )
    True
    """
    flags = 0
    parts = [_encode_short("exchange", exchange), _encode_short("routing key", routing_key), b""]
    for name, flag, encode in _WRITERS:
        value = properties.get(name)
        if value is not None:
            flags |= flag
            parts.append(encode(name, value))
    parts[2] = _U16.pack(flags)
    return b"".join(parts)


def rewritten(
    head: bytes,
    *,
    exchange: str | None = None,
    routing_key: str | None = None,
    headers: Mapping[str, object] | None = None,
    without_headers: Sequence[str] = (),
    without_expiration: bool = False,
    reply_to: str | None = None,
    blind: Sequence[str] | None = None,
) -> bytes:
    """The same head but for what is given. What is not given stays byte for byte (rule 1).

    >>> head = encode_head("", "orders", persistent=True, headers={"a": 1})
    >>> decode_head(rewritten(head, routing_key="k", headers={"b": 2}))
    Head(exchange='', routing_key='k', properties={'headers': {'a': 1, 'b': 2}, 'delivery_mode': 2}, blind=())

    Raises TypeError or ValueError for headers that AMQP cannot carry.
    """
    key_at = 1 + head[0]
    at = key_at + 1 + head[key_at]
    flags = _flags(head, at)
    end = _properties_end(head, at, flags)
    values: dict[int, bytes] = {}
    offset = at + 2
    for prop in _PROPERTIES:
        if flags & prop.flag:
            size = prop.size_of(head, offset)
            values[prop.flag] = head[offset : offset + size]
            offset += size
    if headers or without_headers:
        table = values.get(_HEADERS, _EMPTY_TABLE)
        values[_HEADERS] = _table_with(table, headers or {}, without_headers)
    if without_expiration:
        values.pop(_EXPIRATION, None)
    if reply_to is not None:
        values[_FLAGS["reply_to"]] = _encode_short("reply_to", reply_to)
    hidden = head[end : -_U32.size] if blind is None and flags & _BLIND else _encode_keys(blind or ())
    flags = sum(values) | (_BLIND if hidden else 0)
    return b"".join(
        (
            head[:key_at] if exchange is None else _encode_short("exchange", exchange),
            head[key_at:at] if routing_key is None else _encode_short("routing key", routing_key),
            _U16.pack(flags),
            *(values[flag] for flag in sorted(values, reverse=True)),
            hidden + _U32.pack(len(hidden)) if hidden else b"",
        )
    )


def _encode_keys(keys: Sequence[str]) -> bytes:
    return b"".join([_encode_short("a key of BCC", key) for key in keys])


def _table_with(table: bytes, changed: Mapping[str, object], without: Sequence[str]) -> bytes:
    """A table of a client with some fields replaced and some left out; the others are copied."""
    gone = {*changed, *without}
    parts = []
    offset = 4
    while offset < len(table):
        name, value = _read_short(table, offset)
        end = _value_end(table, value)
        if name not in gone:
            parts.append(table[offset:end])
        offset = end
    parts.append(_encode_table(dict(changed.items()), 1)[4:])
    encoded = b"".join(parts)
    return _U32.pack(len(encoded)) + encoded


def _value_end(table: bytes, offset: int) -> int:
    """Where the value ends whose type stands at `offset`."""
    kind = table[offset]
    offset += 1
    if kind in b"SxFA":
        return _span(table, offset)[1]
    number = _NUMBERS.get(kind)
    if number is not None:
        return offset + number.size
    return offset + {ord("T"): _U64.size, ord("D"): _DECIMAL.size}.get(kind, 0)


def _unknown_property(name: str) -> TypeError:
    names = sorted({"headers", "priority", "expiration_ms", "persistent", *_OTHER_PROPERTIES})
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
    return TypeError(f"there is no message property {name!r}; {hint}")


def _checked_expiration(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expiration_ms is {value!r}, a {type(value).__name__}; it is a number of milliseconds, an int")
    if not 0 <= value <= MAX_EXPIRATION_MS:
        raise ValueError(f"expiration_ms is {value}; it can be 0 to {MAX_EXPIRATION_MS} milliseconds")
    return str(int(value))


def _encode_short(name: str, value: object) -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; it is a str")
    # AMQP lets a name be any bytes. Those that are not UTF-8 become surrogates when read, and bytes again here.
    encoded = _utf8(name, value, "surrogateescape")
    if len(encoded) > MAX_SHORT_STRING_BYTES:
        raise ValueError(
            f"{name} is {len(encoded)} bytes long, AMQP allows {MAX_SHORT_STRING_BYTES}: it begins with {value[:40]!r}"
        )
    return bytes((len(encoded),)) + encoded


def _utf8(name: str, value: str, errors: str) -> bytes:
    try:
        return value.encode("utf-8", errors)
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} has {value!r}, which UTF-8 cannot carry: {error.reason}") from None


def _encode_octet(name: str, value: object) -> bytes:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; it is an int from 0 to 255")
    if not 0 <= value <= 255:
        raise ValueError(f"{name} is {value}; it can be 0 to 255")
    return bytes((value,))


def _encode_timestamp(name: str, value: object) -> bytes:
    """Whole seconds, as AMQP has them. A datetime without a zone is taken as UTC."""
    if isinstance(value, datetime.datetime):
        if value.tzinfo is None:
            value = value.replace(tzinfo=datetime.UTC)
        seconds = (value - _EPOCH) // _SECOND
    elif isinstance(value, int) and not isinstance(value, bool):
        seconds = value
    else:
        raise TypeError(
            f"{name} is {value!r}, a {type(value).__name__}; it is a datetime, or an int of seconds since 1970"
        )
    if not 0 <= seconds < 2**64:
        raise ValueError(f"{name} is {value}; AMQP has no time before 1970-01-01 UTC")
    return _U64.pack(seconds)


def _encode_headers(name: str, value: object) -> bytes:
    if not isinstance(value, (dict, Mapping)):
        raise TypeError(f"headers is {value!r}, a {type(value).__name__}; it is a dict")
    return _encode_table(value, 1)


def encode_table(table: Mapping[str, object]) -> bytes:
    """A field table as AMQP sends it. Raises TypeError or ValueError for what AMQP cannot carry.

    >>> encode_table({"k": True}).hex(" ")
    '00 00 00 04 01 6b 74 01'
    """
    return _encode_table(table, 0)  # type: ignore[arg-type]  # its names are checked there


def read_table(data: bytes, offset: int) -> tuple[dict[str, object], int]:
    """A field table at `offset`, and where it ends. Raises ValueError for what is none.

    >>> read_table(encode_table({"k": True}), 0)
    ({'k': True}, 8)
    """
    return _read_table(data, offset, 0)


def _encode_table(table: Mapping[object, object], depth: int) -> bytes:
    _check_depth(depth)
    parts = []
    for key, value in table.items():
        if not isinstance(key, str):
            raise TypeError(f"the headers have the key {key!r}, a {type(key).__name__}; keys are str")
        parts.append(_encode_short("a header's name", key))
        try:
            parts.append(_encode_value(value, depth))
        except (TypeError, ValueError) as error:
            # Named once, where a user looks for it: the header itself, however deep in it the value is.
            raise type(error)(f"header {key!r}: {error}" if depth == 1 else str(error)) from None
    encoded = b"".join(parts)
    return _U32.pack(len(encoded)) + encoded


def _encode_array(array: Sequence[object], depth: int) -> bytes:
    _check_depth(depth)
    encoded = b"".join([_encode_value(item, depth) for item in array])
    return _U32.pack(len(encoded)) + encoded


def _encode_value(value: object, depth: int) -> bytes:
    """A field of a table or array: one letter for its type, then the value."""
    if isinstance(value, str):
        encoded = _utf8("it", value, "surrogateescape")  # x-death has routing keys, and those are any bytes
        return b"S" + _U32.pack(len(encoded)) + encoded
    if isinstance(value, bool):
        return b"t\x01" if value else b"t\x00"
    if isinstance(value, int):
        # The two that every client reads the same way; some take the short and the unsigned ones for others.
        if -(2**31) <= value < 2**31:
            return b"I" + _I32.pack(value)
        if -(2**63) <= value < 2**63:
            return b"l" + _I64.pack(value)
        raise ValueError(f"{value} is too large; AMQP's integers have 64 bits")
    if value is None:
        return b"V"
    if isinstance(value, float):
        return b"d" + _F64.pack(value)
    if isinstance(value, (list, tuple)):
        return b"A" + _encode_array(value, depth + 1)
    if isinstance(value, (dict, Mapping)):
        return b"F" + _encode_table(value, depth + 1)
    if isinstance(value, (bytes, bytearray)):
        return b"x" + _U32.pack(len(value)) + value
    if isinstance(value, datetime.datetime):
        return b"T" + _encode_timestamp("it", value)
    if isinstance(value, Decimal):
        return b"D" + _encode_decimal(value)
    raise TypeError(
        f"{value!r} is a {type(value).__name__}; AMQP has None, bool, int, float, Decimal, str, bytes, datetime, list "
        f"and dict"
    )


def _encode_decimal(value: Decimal) -> bytes:
    sign, digits, exponent = value.as_tuple()
    if isinstance(exponent, int) and -255 <= exponent <= 10:
        number = int("".join(map(str, digits))) * 10 ** max(exponent, 0) * (-1 if sign else 1)
        if -(2**31) <= number < 2**31:
            return _DECIMAL.pack(max(-exponent, 0), number)
    raise ValueError(f"Decimal {value} does not fit; AMQP's decimals have 32 bits and up to 255 places")


def _check_depth(depth: int) -> None:
    # A client can send thousands of arrays in each other, and a list can hold itself: Python's stack would end first.
    if depth > MAX_TABLE_DEPTH:
        raise ValueError(f"tables or arrays are in each other more than {MAX_TABLE_DEPTH} deep")


# ---- reading ----


def decode_head(head: bytes) -> Head:
    """All of a head. Times are datetimes in UTC, `expiration` is text as AMQP has it, `delivery_mode` is 1 or 2.

    >>> decode_head(encode_head("amq.topic", "orders.new", persistent=False, expiration_ms=5000))
    Head(exchange='amq.topic', routing_key='orders.new', properties={'delivery_mode': 1, 'expiration': '5000'}, blind=())

    Raises ValueError for bytes that are no head.
    """
    exchange, offset = _read_short(head, 0)
    routing_key, offset = _read_short(head, offset)
    flags = _flags(head, offset)
    end = _properties_end(head, offset, flags)
    offset += 2
    properties: dict[str, object] = {}
    for name, flag, read in _READERS:
        if flags & flag:
            properties[name], offset = read(head, offset)
    if offset != end:
        raise ValueError(f"{end - offset} bytes are left over after the last property of {_shown(head)}")
    return Head(exchange, routing_key, properties, _read_keys(head, end) if flags & _BLIND else ())


def properties_of(head: bytes) -> dict[str, object]:
    """The properties alone.

    >>> properties_of(encode_head("", "orders", persistent=True, priority=3, type="order"))
    {'delivery_mode': 2, 'priority': 3, 'type': 'order'}
    """
    return decode_head(head).properties


def headers_of(head: bytes) -> dict[str, object]:
    """The headers, empty when there are none; no other property is decoded.

    >>> headers_of(encode_head("", "orders", persistent=True, headers={"retries": [1, 2.5, None]}))
    {'retries': [1, 2.5, None]}
    """
    offset = _find(head, _HEADERS)
    return {} if offset < 0 else _read_headers(head, offset)[0]


def priority_of(head: bytes) -> int | None:
    """The priority, None when there is none; nothing else is decoded.

    >>> priority_of(encode_head("", "orders", persistent=True, priority=3))
    3
    """
    offset = _find(head, _PRIORITY)
    return None if offset < 0 else _read_octet(head, offset)[0]


def expiration_of(head: bytes) -> int | None:
    """The expiration in milliseconds, None when there is none; nothing else is decoded.

    >>> expiration_of(encode_head("", "orders", persistent=True, expiration_ms=5000))
    5000

    Raises ValueError where a client sent something else than a number of milliseconds: a broker refuses that message.
    """
    offset = _find(head, _EXPIRATION)
    if offset < 0:
        return None
    text = _read_short(head, offset)[0]
    # int() would take "+1", " 1" and "1_0", too.
    if not (text.isascii() and text.isdigit()) or int(text) > MAX_EXPIRATION_MS:
        raise ValueError(f"expiration is {text!r}; it can be '0' to '{MAX_EXPIRATION_MS}' milliseconds, in digits")
    return int(text)


def _find(head: bytes, flag: int) -> int:
    """Where the value of a property begins, -1 when it is not set."""
    try:
        offset = 1 + head[0]
        offset += 1 + head[offset]
        flags = _flags(head, offset)
        if not flags & flag:
            return -1
        offset += 2
        for before, size_of in _BEFORE[flag]:
            if flags & before:
                offset += size_of(head, offset)
    except (IndexError, struct.error):
        raise _cut_short(head) from None
    return offset


def _flags(head: bytes, offset: int) -> int:
    if offset + 2 > len(head):
        raise _cut_short(head)
    flags = head[offset] << 8 | head[offset + 1]
    if flags & 1:
        raise ValueError(
            f"the property flags {flags:#06x} name properties that AMQP 0-9-1 does not have, in {_shown(head)}"
        )
    return flags


def _read_short(head: bytes, offset: int) -> tuple[str, int]:
    start = offset + 1
    if start > len(head):
        raise _cut_short(head)
    end = start + head[offset]
    if end > len(head):
        raise _cut_short(head)
    return head[start:end].decode("utf-8", "surrogateescape"), end


def _properties_end(head: bytes, at: int, flags: int) -> int:
    """Where the properties end whose flags stand at `at`: with the head, but for the keys of BCC."""
    if not flags & _BLIND:
        return len(head)
    end = len(head) - _U32.size
    end -= int(_U32.unpack_from(head, end)[0])
    if end < at + 2:
        raise _cut_short(head)
    return end


def _read_keys(head: bytes, offset: int) -> tuple[str, ...]:
    keys = []
    while offset < len(head) - _U32.size:
        key, offset = _read_short(head, offset)
        keys.append(key)
    return tuple(keys)


def _read_octet(head: bytes, offset: int) -> tuple[int, int]:
    if offset >= len(head):
        raise _cut_short(head)
    return head[offset], offset + 1


def _read_timestamp(head: bytes, offset: int) -> tuple[datetime.datetime | int, int]:
    if offset + 8 > len(head):
        raise _cut_short(head)
    return _moment(_U64.unpack_from(head, offset)[0]), offset + 8


def _read_headers(head: bytes, offset: int) -> tuple[dict[str, object], int]:
    try:
        return _read_table(head, offset, 1)
    except (IndexError, struct.error):
        raise _cut_short(head) from None


def _read_table(data: bytes, offset: int, depth: int) -> tuple[dict[str, object], int]:
    _check_depth(depth)
    offset, end = _span(data, offset)
    table: dict[str, object] = {}
    while offset < end:
        key, offset = _read_short(data, offset)
        table[key], offset = _read_value(data, offset, depth)
    _check_end(data, offset, end)
    return table, end


def _read_array(data: bytes, offset: int, depth: int) -> tuple[list[object], int]:
    _check_depth(depth)
    offset, end = _span(data, offset)
    array: list[object] = []
    while offset < end:
        value, offset = _read_value(data, offset, depth)
        array.append(value)
    _check_end(data, offset, end)
    return array, end


def _read_value(data: bytes, offset: int, depth: int) -> tuple[object, int]:
    kind = data[offset]
    offset += 1
    if kind == _LONG_STRING:
        start, end = _span(data, offset)
        value = data[start:end]
        try:
            return value.decode("utf-8"), end
        except UnicodeDecodeError:
            return value, end  # AMQP's long strings are bytes that often are text
    number = _NUMBERS.get(kind)
    if number is not None:
        return number.unpack_from(data, offset)[0], offset + number.size
    match chr(kind):
        case "F":
            return _read_table(data, offset, depth + 1)
        case "A":
            return _read_array(data, offset, depth + 1)
        case "x":
            start, end = _span(data, offset)
            return data[start:end], end
        case "T":
            return _read_timestamp(data, offset)
        case "D":
            places, digits = _DECIMAL.unpack_from(data, offset)
            return Decimal(f"{digits}e-{places}"), offset + _DECIMAL.size
        case "V" | "\0":  # the second is in no specification, and in the wild
            return None, offset
    raise ValueError(f"a header has the type {chr(kind)!r}, which AMQP 0-9-1 does not have, in {_shown(data)}")


def _span(data: bytes, offset: int) -> tuple[int, int]:
    """Where the bytes begin and end whose number stands at `offset`."""
    start = offset + 4
    end = start + int(_U32.unpack_from(data, offset)[0])
    if end > len(data):
        raise _cut_short(data)
    return start, end


def _check_end(data: bytes, offset: int, end: int) -> None:
    if offset != end:
        raise ValueError(f"a header runs over the end of its table by {offset - end} bytes in {_shown(data)}")


def _moment(seconds: int) -> datetime.datetime | int:
    """Many clients send milliseconds. As seconds, those since 1978 would be in years that no calendar has; so both can
    be told apart, and every datetime comes back as it was written."""
    if seconds <= _LAST_SECOND:
        return _EPOCH + datetime.timedelta(seconds=seconds)
    if seconds // 1000 <= _LAST_SECOND:
        return _EPOCH + datetime.timedelta(milliseconds=seconds)
    return seconds


def _cut_short(head: bytes) -> ValueError:
    return ValueError(f"the message head ends too early: {_shown(head)}")


def _shown(head: bytes) -> str:
    return head.hex(" ") if len(head) <= 40 else f"{head[:40].hex(' ')} ... ({len(head)} bytes)"


_LONG_STRING = ord("S")

# RabbitMQ's list of field types, and pamqp's. "L" is in the specification, and signed.
_NUMBERS = {
    ord(letter): struct.Struct(">" + code)
    for letter, code in {
        "t": "?",
        "b": "b",
        "B": "B",
        "s": "h",
        "u": "H",
        "I": "i",
        "i": "I",
        "l": "q",
        "L": "q",
        "f": "f",
        "d": "d",
    }.items()
}


# ---- the fourteen properties ----


@dataclass(frozen=True, slots=True)
class _Property:
    name: str
    flag: int
    encode: Callable[[str, object], bytes]
    read: Callable[[bytes, int], tuple[object, int]]
    size_of: Callable[[bytes, int], int]  # of the value at an offset, without decoding it


def _properties() -> tuple[_Property, ...]:
    short = (_encode_short, _read_short, lambda head, offset: 1 + head[offset])
    octet = (_encode_octet, _read_octet, lambda head, offset: 1)
    time = (_encode_timestamp, _read_timestamp, lambda head, offset: 8)
    table = (_encode_headers, _read_headers, lambda head, offset: 4 + _U32.unpack_from(head, offset)[0])
    in_order = (
        ("content_type", short),
        ("content_encoding", short),
        ("headers", table),
        ("delivery_mode", octet),
        ("priority", octet),
        ("correlation_id", short),
        ("reply_to", short),
        ("expiration", short),
        ("message_id", short),
        ("timestamp", time),
        ("type", short),
        ("user_id", short),
        ("app_id", short),
        ("cluster_id", short),
    )
    return tuple(_Property(name, 0x8000 >> number, *how) for number, (name, how) in enumerate(in_order))


_PROPERTIES = _properties()
_FLAGS = {prop.name: prop.flag for prop in _PROPERTIES}
_HEADERS = _FLAGS["headers"]
_DELIVERY_MODE = _FLAGS["delivery_mode"]
_PRIORITY = _FLAGS["priority"]
_EXPIRATION = _FLAGS["expiration"]

# Plain tuples: the loops over them are short of time.
_WRITERS = tuple((prop.name, prop.flag, prop.encode) for prop in _PROPERTIES)
_READERS = tuple((prop.name, prop.flag, prop.read) for prop in _PROPERTIES)

# What a reader has to skip to come to a property.
_BEFORE = {
    prop.flag: tuple((before.flag, before.size_of) for before in _PROPERTIES[:number])
    for number, prop in enumerate(_PROPERTIES)
}

# Those that encode_head takes by their own name; it has parameters for the others.
_OTHER_PROPERTIES = frozenset(_FLAGS) - {"headers", "delivery_mode", "priority", "expiration"}
