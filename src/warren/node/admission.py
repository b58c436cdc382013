"""Who may be logging in at one time: clients that have not said who they are must not keep the others out.

Rules:

1. One address has at most `per_address` of them; its next ones are turned away until some are done. Who has an IPv6
   network has 2**64 addresses, so of these the network counts.
2. All together have at most `most`. Whoever comes then takes the place of an idle one: the oldest of the address that has
   the most of them. Nobody is idle while a password is checked, which is our work, nor in the first second.
3. When nobody is idle, the newcomer is turned away. A deadline (`handshake_timeout`) ends the rest.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import Callable

log = logging.getLogger("warren.node")

_IDLE_SECONDS = 1.0
_QUIET_SECONDS = 10.0  # between two lines in the log


class Entry:
    """One client that is logging in."""

    __slots__ = ("_clock", "_since", "_works", "is_evicted", "network", "task")

    def __init__(self, network: str, clock: Callable[[], float]) -> None:
        self.network = network
        self.task: asyncio.Task[None] | None = None  # that serves it, to be cancelled
        self.is_evicted = False
        self._works = False
        self._clock = clock
        self._since = clock()

    def working(self, is_working: bool) -> None:
        self._works = is_working

    @property
    def age(self) -> float:
        return self._clock() - self._since

    @property
    def is_idle(self) -> bool:
        return not self._works and not self.is_evicted and self.age >= _IDLE_SECONDS

    def evict(self) -> None:
        self.is_evicted = True
        if self.task is not None:
            self.task.cancel()


class Admission:
    """
    >>> gate = Admission(most=1000, per_address=2)
    >>> first, second = gate.enter("10.0.0.1"), gate.enter("10.0.0.1")
    >>> gate.enter("10.0.0.1") is None
    True
    >>> gate.leave(first)
    >>> gate.enter("10.0.0.1") is None
    False
    """

    def __init__(self, most: int, per_address: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._per_address = per_address
        self._clock = clock
        self._entries: dict[str, dict[Entry, None]] = {}  # by network, the oldest first
        self._count = 0
        self._turned_away = 0  # since the last line in the log
        self._logged = float("-inf")

    def __len__(self) -> int:
        return self._count

    def enter(self, address: str) -> Entry | None:
        """None: there is no room."""
        network = network_of(address)
        if len(self._entries.get(network, ())) >= self._per_address:
            self._turn_away(f"{network} has {self._per_address} under way (max_handshakes_per_address)")
            return None
        if self._count >= self._most and not self._evict_one():
            self._turn_away(f"{self._most} are under way (max_handshakes)")
            return None
        entry = Entry(network, self._clock)
        self._entries.setdefault(network, {})[entry] = None
        self._count += 1
        return entry

    def leave(self, entry: Entry) -> None:
        """It has logged in, or is gone. An entry that was evicted has left already."""
        entries = self._entries.get(entry.network, {})
        if entry in entries:
            del entries[entry]
            self._count -= 1
            if not entries:
                del self._entries[entry.network]

    def _evict_one(self) -> bool:
        for entries in sorted(self._entries.values(), key=len, reverse=True):
            for entry in entries:
                if entry.is_idle:
                    self.leave(entry)
                    entry.evict()
                    return True
        return False

    def _turn_away(self, why: str) -> None:
        self._turned_away += 1
        now = self._clock()
        if now - self._logged >= _QUIET_SECONDS:
            log.warning(
                "clients are turned away before they log in (%s since the last such line): %s", self._turned_away, why
            )
            self._logged, self._turned_away = now, 0


def network_of(address: str) -> str:
    """
    >>> network_of("10.0.0.1"), network_of("::ffff:10.0.0.1"), network_of("2001:db8::1:2:3:4")
    ('10.0.0.1', '10.0.0.1', '2001:db8::/64')
    """
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))
