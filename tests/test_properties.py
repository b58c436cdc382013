"""The head of a message: what is written comes back equal, other programs read it the same, bad values are named."""

from __future__ import annotations

import contextlib
import datetime
import doctest
import math
import struct
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp.commands import Basic

from warren.queueing import properties as properties_module
from warren.queueing.properties import (
    MAX_EXPIRATION_MS,
    MAX_TABLE_DEPTH,
    Head,
    decode_head,
    encode_head,
    expiration_of,
    headers_of,
    priority_of,
    properties_of,
)

UTC = datetime.UTC

SHORT_STRING_PROPERTIES = (
    "content_type",
    "content_encoding",
    "correlation_id",
    "reply_to",
    "message_id",
    "type",
    "user_id",
    "app_id",
    "cluster_id",
)

short_strings = st.text(max_size=60).filter(lambda text: len(text.encode()) <= 255)
whole_seconds = st.datetimes(min_value=datetime.datetime(1970, 1, 1), timezones=st.just(UTC)).map(
    lambda moment: moment.replace(microsecond=0)
)
decimals = st.builds(
    lambda number, places: Decimal(number).scaleb(-places),
    st.integers(-(2**31), 2**31 - 1),
    st.integers(0, 255),
)


def tables(names, floats, times, binaries):
    """Field tables with a value of every type that AMQP has."""
    leaves = (
        st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | floats | decimals | st.text() | times | binaries
    )
    values = st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
        max_leaves=15,
    )
    return st.dictionaries(names, values, max_size=6)


any_table = tables(short_strings, st.floats(allow_nan=False), whole_seconds, st.binary())

# What pamqp does not lose: names of 128 bytes, floats of 32 bits, times until 2106, no bytes.
pamqp_table = tables(
    st.text(max_size=32),
    st.floats(width=32, allow_nan=False),
    st.datetimes(datetime.datetime(1970, 1, 1), datetime.datetime(2106, 1, 1), timezones=st.just(UTC)).map(
        lambda moment: moment.replace(microsecond=0)
    ),
    st.nothing(),
)

some_properties = st.fixed_dictionaries(
    {},
    optional={**dict.fromkeys(SHORT_STRING_PROPERTIES, short_strings), "timestamp": whole_seconds},
)


def raw_head(flags: int, values: bytes = b"", address: bytes = b"\0\0") -> bytes:
    return address + struct.pack(">H", flags) + values


def head_with_table(fields: bytes) -> bytes:
    return raw_head(0x2000, struct.pack(">I", len(fields)) + fields)


def pamqp_properties(head: bytes) -> Basic.Properties:
    """The properties of a head without exchange and routing key, as pamqp reads them."""
    properties = Basic.Properties()
    properties.unmarshal(*struct.unpack_from(">H", head, 2), head[4:])
    return properties


def test_the_examples_of_the_module_run():
    assert doctest.testmod(properties_module).failed == 0


# ---- what is written comes back ----


@given(
    exchange=short_strings,
    routing_key=short_strings,
    persistent=st.booleans(),
    headers=st.none() | any_table,
    priority=st.none() | st.integers(0, 255),
    expiration_ms=st.none() | st.integers(0, MAX_EXPIRATION_MS),
    properties=some_properties,
)
def test_every_head_comes_back_as_it_was_written(
    exchange, routing_key, persistent, headers, priority, expiration_ms, properties
):
    head = encode_head(
        exchange,
        routing_key,
        persistent=persistent,
        headers=headers,
        priority=priority,
        expiration_ms=expiration_ms,
        **properties,
    )
    expected = {**properties, "delivery_mode": 2 if persistent else 1}
    if headers:
        expected["headers"] = headers
    if priority is not None:
        expected["priority"] = priority
    if expiration_ms is not None:
        expected["expiration"] = str(expiration_ms)
    assert decode_head(head) == Head(exchange, routing_key, expected)
    assert properties_of(head) == expected
    assert headers_of(head) == (headers or {})
    assert priority_of(head) == priority
    assert expiration_of(head) == expiration_ms


@given(any_table)
def test_a_header_keeps_its_type(table):
    def types(value):
        if isinstance(value, dict):
            return {key: types(item) for key, item in value.items()}
        if isinstance(value, list):
            return [types(item) for item in value]
        return type(value)

    assert types(headers_of(encode_head("", "q", persistent=True, headers=table))) == types(table)


@given(headers=pamqp_table, priority=st.integers(0, 255), properties=some_properties)
def test_pamqp_reads_what_we_write(headers, priority, properties):
    # pamqp has no empty string in its properties, no time after 2106, and another name for type.
    properties = {key: value for key, value in properties.items() if value and key not in ("cluster_id", "timestamp")}
    head = encode_head("", "", persistent=True, headers=headers, priority=priority, **properties)
    expected = Basic.Properties(
        headers=headers or None,
        delivery_mode=2,
        priority=priority,
        message_type=properties.pop("type", None),
        **properties,
    )
    assert pamqp_properties(head) == expected


@given(headers=pamqp_table, priority=st.integers(0, 255), properties=some_properties)
def test_we_read_what_pamqp_writes(headers, priority, properties):
    properties = {key: value for key, value in properties.items() if value and key not in ("cluster_id", "timestamp")}
    expected = {**properties, "headers": headers, "delivery_mode": 1, "priority": priority}
    written = Basic.Properties(
        headers=headers,
        delivery_mode=1,
        priority=priority,
        message_type=properties.pop("type", None),
        **properties,
    ).marshal()
    assert properties_of(b"\0\0" + written) == expected


def test_the_bytes_of_a_head_are_those_of_the_specification():
    head = encode_head("e", "key", persistent=True, headers={"n": 1, "ok": True}, priority=5, expiration_ms=60)
    assert head == (
        b"\x01e"
        b"\x03key"
        b"\x39\x00"  # headers, delivery mode, priority, expiration
        b"\x00\x00\x00\x0c"
        b"\x01nI\x00\x00\x00\x01"
        b"\x02okt\x01"
        b"\x02"
        b"\x05"
        b"\x0260"
    )


def test_a_property_that_is_none_is_not_set_and_an_empty_one_is():
    head = encode_head("", "q", persistent=False, message_id=None, app_id="", headers={})
    assert properties_of(head) == {"delivery_mode": 1, "app_id": ""}


def test_a_plain_head_is_built_once():
    head = encode_head("", "built-once", persistent=True, priority=4)
    assert encode_head("", "built-once", persistent=True, priority=4) is head
    assert encode_head("", "built-once", persistent=True, priority=4, headers=None, expiration_ms=None) is head


def test_heads_that_differ_only_in_mode_or_priority_are_not_mixed_up():
    heads = {
        encode_head("", "q", persistent=persistent, priority=priority)
        for persistent in (True, False)
        for priority in (None, 0, 1, 255)
    }
    assert len(heads) == 8


def test_a_tuple_and_a_bytearray_come_back_as_list_and_bytes():
    head = encode_head("", "q", persistent=True, headers={"a": (1, ("b", None)), "raw": bytearray(b"\x00\xff")})
    assert headers_of(head) == {"a": [1, ["b", None]], "raw": b"\x00\xff"}


def test_not_a_number_comes_back_as_one():
    value = headers_of(encode_head("", "q", persistent=True, headers={"a": math.nan}))["a"]
    assert isinstance(value, float)
    assert math.isnan(value)


def test_a_decimal_keeps_its_places():
    headers = {"price": Decimal("1.50"), "debt": Decimal("-0.07"), "thousands": Decimal("2E+3")}
    back = headers_of(encode_head("", "q", persistent=True, headers=headers))
    assert {name: str(value) for name, value in back.items()} == {"price": "1.50", "debt": "-0.07", "thousands": "2000"}


def test_a_time_has_whole_seconds_and_one_without_a_zone_is_utc():
    naive = datetime.datetime(2026, 1, 1, 12, 0, 5, 999_999)
    cet = datetime.timezone(datetime.timedelta(hours=1))
    assert properties_of(encode_head("", "q", persistent=True, timestamp=naive))["timestamp"] == datetime.datetime(
        2026, 1, 1, 12, 0, 5, tzinfo=UTC
    )
    for same in (datetime.datetime(2026, 1, 1, 13, tzinfo=cet), 1767268800):
        assert properties_of(encode_head("", "q", persistent=True, timestamp=same))["timestamp"] == datetime.datetime(
            2026, 1, 1, 12, tzinfo=UTC
        )


# ---- what clients send ----


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (b"t\x00", False),
        (b"t\x01", True),
        (b"b\xff", -1),
        (b"B\xff", 255),
        (b"s\xff\xfe", -2),
        (b"u\xff\xfe", 65534),
        (b"I\xff\xff\xff\xff", -1),
        (b"i\xff\xff\xff\xff", 2**32 - 1),
        (b"l" + b"\xff" * 8, -1),
        (b"L" + b"\xff" * 8, -1),
        (b"f\x3f\xc0\x00\x00", 1.5),
        (b"d\x3f\xf8" + bytes(6), 1.5),
        (b"D\x02\x00\x00\x00\x96", Decimal("1.50")),
        (b"D\x02\xff\xff\xff\x6a", Decimal("-1.50")),
        (b"S\x00\x00\x00\x02\xc3\xa9", "é"),
        (b"S\x00\x00\x00\x01\xff", b"\xff"),
        (b"x\x00\x00\x00\x02ab", b"ab"),
        (b"A\x00\x00\x00\x03Vt\x01", [None, True]),
        (b"A\x00\x00\x00\x00", []),
        (b"F\x00\x00\x00\x04\x01at\x01", {"a": True}),
        (b"T" + struct.pack(">Q", 1767225600), datetime.datetime(2026, 1, 1, tzinfo=UTC)),
        (b"T" + struct.pack(">Q", 1767225600_250), datetime.datetime(2026, 1, 1, 0, 0, 0, 250_000, tzinfo=UTC)),
        (b"T" + b"\xff" * 8, 2**64 - 1),
        (b"V", None),
        (b"\x00", None),
    ],
)
def test_every_field_type_is_read(field, value):
    [(name, read)] = headers_of(head_with_table(b"\x01h" + field)).items()
    assert name == "h"
    assert read == value
    assert type(read) is type(value)


def test_a_routing_key_of_any_bytes_comes_back_as_those_bytes():
    head = raw_head(0x1000, b"\x02", address=b"\x00\x03a\xff\xfe")
    routing_key = decode_head(head).routing_key
    assert encode_head("", routing_key, persistent=True) == head


@pytest.mark.parametrize("text", ["soon", "-1", "+1", " 1", "1.5", "1_0", "", "٣", str(MAX_EXPIRATION_MS + 1)])
def test_an_expiration_that_is_no_number_of_milliseconds_is_named(text):
    encoded = text.encode()
    head = raw_head(0x0100, bytes((len(encoded),)) + encoded)
    assert properties_of(head) == {"expiration": text}
    with pytest.raises(ValueError, match=r"expiration is '.*'; it can be '0' to '315360000000' milliseconds"):
        expiration_of(head)


def test_a_head_without_properties_has_none():
    assert decode_head(raw_head(0)) == Head("", "", {})
    assert headers_of(raw_head(0)) == {}
    assert priority_of(raw_head(0)) is None
    assert expiration_of(raw_head(0)) is None


def test_a_head_that_was_cut_anywhere_is_refused_with_a_value_error():
    head = encode_head(
        "exchange",
        "key",
        persistent=True,
        headers={"a": [1, {"b": "text"}], "c": Decimal("1.5"), "d": b"xyz", "e": 1.5},
        priority=1,
        expiration_ms=1,
        timestamp=1,
        content_type="text/plain",
        cluster_id="c",
    )
    for length in range(len(head)):
        with pytest.raises(ValueError, match=r"ends too early|over the end"):
            decode_head(head[:length])
    with pytest.raises(ValueError, match="1 bytes are left over"):
        decode_head(head + b"x")


@given(st.binary(max_size=80), st.integers(0, 0xFFFF))
def test_bytes_that_are_no_head_raise_nothing_but_a_value_error(values, flags):
    head = raw_head(flags, values)
    for read in (decode_head, properties_of, headers_of, priority_of, expiration_of):
        with contextlib.suppress(ValueError):
            read(head)


def test_flags_of_properties_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="the property flags 0x1001 name properties"):
        decode_head(raw_head(0x1001, b"\x02"))


def test_an_unknown_field_type_is_named():
    with pytest.raises(ValueError, match="a header has the type '\\?'"):
        headers_of(head_with_table(b"\x01h?"))


def test_a_field_that_runs_over_the_end_of_its_table_is_refused():
    inner = b"\x01hI\x00\x00\x00\x01"
    head = raw_head(0x3000, struct.pack(">I", len(inner) - 1) + inner)
    with pytest.raises(ValueError, match="runs over the end of its table by 1 bytes"):
        headers_of(head)


def test_arrays_in_each_other_end_at_a_limit_and_not_with_the_stack():
    deep = b""
    for _ in range(5000):
        deep = b"A" + struct.pack(">I", len(deep)) + deep
    with pytest.raises(ValueError, match=f"more than {MAX_TABLE_DEPTH} deep"):
        headers_of(head_with_table(b"\x01h" + deep))
    itself: list[object] = []
    itself.append(itself)
    with pytest.raises(ValueError, match=f"header 'h': .* more than {MAX_TABLE_DEPTH} deep"):
        encode_head("", "q", persistent=True, headers={"h": itself})


def test_what_is_just_not_too_deep_comes_back():
    value: object = "bottom"
    for level in range(MAX_TABLE_DEPTH - 1):
        value = [value] if level % 2 else {"next": value}
    assert headers_of(encode_head("", "q", persistent=True, headers={"h": value})) == {"h": value}


# ---- what is refused ----


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"exchange": None}, TypeError, "exchange is None, a NoneType; it is a str"),
        ({"exchange": ["e"]}, TypeError, r"exchange is \['e'\], a list; it is a str"),
        ({"routing_key": b"q"}, TypeError, "routing key is b'q', a bytes; it is a str"),
        ({"routing_key": "ä" * 128}, ValueError, "routing key is 256 bytes long, AMQP allows 255: it begins with 'ää"),
        ({"routing_key": "\ud800"}, ValueError, r"routing key has '\\ud800', which UTF-8 cannot carry"),
        ({"priority": 256}, ValueError, "priority is 256; it can be 0 to 255"),
        ({"priority": -1}, ValueError, "priority is -1; it can be 0 to 255"),
        ({"priority": "high"}, TypeError, "priority is 'high', a str; it is an int from 0 to 255"),
        ({"expiration_ms": -1}, ValueError, "expiration_ms is -1; it can be 0 to 315360000000 milliseconds"),
        ({"expiration_ms": MAX_EXPIRATION_MS + 1}, ValueError, "expiration_ms is 315360000001; it can be"),
        ({"expiration_ms": 1.5}, TypeError, "expiration_ms is 1.5, a float; it is a number of milliseconds, an int"),
        ({"expiration_ms": True}, TypeError, "expiration_ms is True, a bool"),
        ({"timestamp": "now"}, TypeError, "timestamp is 'now', a str; it is a datetime"),
        ({"timestamp": datetime.datetime(1969, 1, 1)}, ValueError, "timestamp is 1969.*no time before 1970"),
        ({"timestamp": -1}, ValueError, "timestamp is -1; AMQP has no time before 1970"),
        ({"message_id": 7}, TypeError, "message_id is 7, a int; it is a str"),
        ({"contenttype": "a"}, TypeError, "no message property 'contenttype'; did you mean content_type?"),
        ({"colour": "a"}, TypeError, "no message property 'colour'; there are app_id, cluster_id, "),
        ({"delivery_mode": 2}, TypeError, "no message property 'delivery_mode'; there are .*persistent"),
        ({"expiration": "5"}, TypeError, "no message property 'expiration'; did you mean expiration_ms?"),
        ({"headers": "a"}, TypeError, "headers is 'a', a str; it is a dict"),
        ({"headers": {1: 2}}, TypeError, "the headers have the key 1, a int; keys are str"),
        ({"headers": {"a": {2: 3}}}, TypeError, "header 'a': the headers have the key 2, a int"),
        ({"headers": {"h" * 256: 1}}, ValueError, "a header's name is 256 bytes long"),
        ({"headers": {"a": {"b": [object]}}}, TypeError, "header 'a': <class 'object'> is a type; AMQP has None, bool"),
        ({"headers": {"a": 2**63}}, ValueError, "header 'a': 9223372036854775808 is too large"),
        ({"headers": {"a": Decimal("1e400")}}, ValueError, "header 'a': Decimal 1E.400 does not fit"),
        ({"headers": {"a": Decimal("NaN")}}, ValueError, "header 'a': Decimal NaN does not fit"),
        ({"headers": {"a": "\ud800"}}, ValueError, "header 'a': it has .* which UTF-8 cannot carry"),
        ({"headers": {"a": datetime.date(2026, 1, 1)}}, TypeError, r"header 'a': datetime.date.* is a date; AMQP has"),
    ],
)
def test_what_amqp_cannot_carry_is_refused_by_name(arguments, error, text):
    with pytest.raises(error, match=text):
        encode_head(**{"exchange": "", "routing_key": "q", "persistent": True, **arguments})
