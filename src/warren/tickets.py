"""Signed, expiring tickets: what Spark's executors get in place of a password.

A ticket says what it is good for and until when; who holds the key of the node can check it without asking anybody. It is
bound to one snapshot, one range of checkouts or one batch of stages, so that a ticket which leaks (into a log of Spark,
say) opens that and nothing else, and not for long. It carries the stamp of the password that it stems from (`Users.stamp`),
and of what its user may read in its vhost (`Users.stamp_in`), and ends with it: when the user gets another password, is
deleted, or may not read what he might.

    ticket := base64url(JSON) "." base64url(HMAC-SHA256 of the first part)
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

from warren.errors import WarrenError

StampOf = Callable[[str, str | None], str | None]  # by user, and by vhost where a ticket is for one
KEY_NAME = "node.key"  # in the data directory: tickets outlive a restart of the node
_KEY_BYTES = 32


class TicketError(WarrenError):
    """A ticket that is not good (any more)."""


class Tickets:
    """Issues and checks tickets.

    >>> tickets = Tickets(b"k" * 32)
    >>> ticket = tickets.issue("snapshot", seconds=60, vhost="/", id="s1")
    >>> tickets.check(ticket, "snapshot")["id"]
    's1'
    >>> tickets.check(ticket, "stage")
    Traceback (most recent call last):
    warren.tickets.TicketError: the ticket is for 'snapshot', not for 'stage'
    """

    def __init__(self, key: bytes, stamp_of: StampOf | None = None) -> None:
        """With `stamp_of`, which knows the stamps of users, a ticket is good only as long as its stamp is its user's."""
        self._key = key
        self._stamp_of = stamp_of

    @classmethod
    def of_directory(cls, data_directory: str, stamp_of: StampOf | None = None) -> Tickets:
        """With the key of a data directory, which is made where there is none."""
        path = os.path.join(data_directory, KEY_NAME)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            with open(path, "rb") as file:
                key = file.read()
            if len(key) == _KEY_BYTES:
                return cls(key, stamp_of)
            os.unlink(path)  # cut short by a crash: older tickets are void
            return cls.of_directory(data_directory, stamp_of)
        key = secrets.token_bytes(_KEY_BYTES)
        with os.fdopen(descriptor, "wb") as file:
            file.write(key)
            file.flush()
            os.fsync(file.fileno())
        return cls(key, stamp_of)

    @property
    def key(self) -> bytes:
        return self._key

    def issue(self, kind: str, *, seconds: float, **says: Any) -> str:
        text = json.dumps({**says, "kind": kind, "until": time.time() + seconds}, separators=(",", ":"), sort_keys=True)
        body = _encode(text.encode())
        return f"{body}.{_encode(self._sign(body))}"

    def check(self, ticket: str, kind: str) -> dict[str, Any]:
        """What the ticket says. Raises TicketError."""
        body, _, signature = ticket.partition(".")
        try:
            signed = hmac.compare_digest(_decode(signature), self._sign(body))
            said: dict[str, Any] = json.loads(_decode(body)) if signed else {}
        except (binascii.Error, ValueError):
            signed = False
        if not signed:
            raise TicketError("the ticket is not signed by this broker")
        if said["kind"] != kind:
            raise TicketError(f"the ticket is for {said['kind']!r}, not for {kind!r}")
        if said["until"] < time.time():
            raise TicketError("the ticket has expired; start the query anew")
        if self._stamp_of is not None:
            user, vhost = said["user"], said.get("vhost")
            if said.get("stamp") is None or said["stamp"] != self._stamp_of(user, vhost):
                other = "" if vhost is None else f", or other permissions to read in vhost {vhost!r}"
                raise TicketError(
                    f"the ticket has ended: user {user!r} has another password{other}, or is deleted; start the query anew"
                )
        return said

    def _sign(self, body: str) -> bytes:
        return hmac.new(self._key, body.encode(), hashlib.sha256).digest()


def place_name(root: str) -> str:
    """Of a vhost's directory, or of a snapshot's. Equal on both sides means: the same directory of the same machine, and not
    one that has the same path elsewhere. Raises OSError where there is none."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    known = os.stat(os.path.join(root, ".vhost"))
    return f"{socket.gethostname()}/{boot}/{known.st_dev}:{known.st_ino}"


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
