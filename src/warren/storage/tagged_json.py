"""JSON that a person can read, of values that JSON does not know: these are tagged.

{"$bytes": "AAE="}, {"$datetime": "2026-01-01T00:00:00+00:00"}, {"$decimal": "1.50"}
"""

from __future__ import annotations

import base64
import datetime
import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

_DEEPEST = 128  # of lists and dicts in each other: more than AMQP's tables are let in with, less than the stack


def to_json(value: object, what: str, sort_names: bool = False) -> str:
    """Raises TypeError for a value that it does not know, or one with more in each other than `_DEEPEST`."""
    return json.dumps(_tagged(value, what), separators=(",", ":"), sort_keys=sort_names)


def from_json(text: str) -> Any:
    # Of 100,000 bindings most have no arguments, and a start waits for all of them.
    return {} if text == "{}" else json.loads(text, object_hook=_untagged)


def _tagged(value: object, what: str, depth: int = 0) -> object:
    if depth > _DEEPEST:
        raise TypeError(f"{what}: lists or dicts are in each other more than {_DEEPEST} deep")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_tagged(item, what, depth + 1) for item in value]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{what}: the key {key!r} is a {type(key).__name__}; keys are str")
        plain = {key: _tagged(item, what, depth + 1) for key, item in value.items()}
        # A dict that looks like a tag, {"$bytes": 1}, is stored as {"$dict": [["$bytes", 1]]}: a list, so that reading,
        # which begins with the innermost object, does not take it for one.
        return {"$dict": [[key, item] for key, item in plain.items()]} if _looks_like_a_tag(plain) else plain
    if isinstance(value, bytes | bytearray):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, datetime.datetime):
        return {"$datetime": value.isoformat()}
    if isinstance(value, Decimal):
        return {"$decimal": str(value)}
    raise TypeError(
        f"{what}: {value!r} is a {type(value).__name__}; it can be None, bool, int, float, str, bytes, Decimal, "
        f"datetime, list or dict"
    )


def _looks_like_a_tag(value: dict[str, object]) -> bool:
    return len(value) == 1 and next(iter(value)).startswith("$")


def _untagged(value: dict[str, Any]) -> object:
    if not _looks_like_a_tag(value):
        return value
    [(tag, content)] = value.items()
    match tag:
        case "$dict":
            return dict(content)
        case "$bytes":
            return base64.b64decode(content)
        case "$datetime":
            return datetime.datetime.fromisoformat(content)
        case "$decimal":
            return Decimal(content)
    raise ValueError(f"unknown tag {tag!r} in the metadata")
