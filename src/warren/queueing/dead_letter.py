"""What a message carries after its death in a queue: x-death, and where it may not go again.

`x-death` is an array of tables, the latest death first, one for each pair of queue and reason. A second death of the same
pair raises its count and moves it to the front; its time stays that of the first.

A message that dies by itself in a circle (expired, pushed out by a length limit) would go round for ever. So a target is
left out when the message died there before and nobody rejected it since: only `rejected` is a decision of a consumer.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from functools import partial
from typing import Any

from warren.queueing.properties import Head, carbon_keys, decode_head, rewritten

_MOST_DEATHS = 2**63 - 1
REJECTED, EXPIRED, MAXLEN, DELIVERY_LIMIT = "rejected", "expired", "maxlen", "delivery_limit"


class Death:
    """One message, on its way to the dead-letter exchange.

    >>> from warren.queueing.properties import encode_head, headers_of
    >>> died = Death(encode_head("", "orders", persistent=True), "orders", EXPIRED, "retry", None)
    >>> died.keys
    ['orders']
    >>> headers_of(died.head)["x-first-death-reason"]
    'expired'
    """

    def __init__(
        self,
        head: bytes,
        queue: str,
        reason: str,
        exchange: str,
        routing_key: str | None,
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ) -> None:
        dead = decode_head(head)
        headers = dead.headers
        self.properties = dead.properties  # for routing; what is sent is in `head`
        carbon = carbon_keys(headers.get("CC"))
        self.keys = [routing_key] if routing_key is not None else dead.keys
        self._deaths = self._died(dead, _deaths_of(headers), carbon, queue, reason, now)
        changed: dict[str, Any] = {"x-death": self._deaths}
        if "x-first-death-reason" not in headers:
            changed["x-first-death-reason"] = reason
            changed["x-first-death-queue"] = queue
            changed["x-first-death-exchange"] = dead.exchange
        changed["x-last-death-reason"] = reason
        changed["x-last-death-queue"] = queue
        changed["x-last-death-exchange"] = dead.exchange
        without: tuple[str, ...] = ()
        if routing_key is not None:
            headers.pop("CC", None)
            without = ("CC",)
        self._reason = reason
        rewrite = partial(
            rewritten,
            head,
            exchange=exchange,
            routing_key=self.keys[0],
            headers=changed,
            without_headers=without,
            without_expiration=True,
            blind=None if routing_key is None else (),
        )
        try:
            self.head = rewrite()
        except (TypeError, ValueError):
            # A client may send deaths that we can read and not write. Those are left out; ours stays: it ends circles.
            self._deaths = changed["x-death"] = self._died(dead, [], carbon, queue, reason, now)
            self.head = rewrite()
        self.headers = {**headers, **changed}

    @staticmethod
    def _died(
        dead: Head,
        deaths: list[dict[str, Any]],
        carbon: list[str],
        queue: str,
        reason: str,
        now: Callable[[], datetime.datetime],
    ) -> list[dict[str, Any]]:
        for position, death in enumerate(deaths):
            if death.get("queue") == queue and death.get("reason") == reason:
                count = death.get("count")
                again = {**death, "count": min((count if isinstance(count, int) else 0) + 1, _MOST_DEATHS)}
                return [again, *deaths[:position], *deaths[position + 1 :]]
        death = {
            "count": 1,
            "reason": reason,
            "queue": queue,
            "time": now().replace(microsecond=0),
            "exchange": dead.exchange,
            "routing-keys": [dead.routing_key, *carbon],
        }
        if "expiration" in dead.properties:
            death["original-expiration"] = dead.properties["expiration"]
        return [death, *deaths]

    def allows(self, target: str) -> bool:
        """May it go to this queue, or would it go in a circle?"""
        if self._reason == REJECTED:
            return True
        for death in self._deaths:
            if death.get("reason") == REJECTED:
                return True
            if death.get("queue") == target:
                return False
        return True


def _deaths_of(headers: dict[str, Any]) -> list[dict[str, Any]]:
    before = headers.get("x-death")
    deaths = [death for death in before if isinstance(death, dict)] if isinstance(before, list) else []
    return [{name: _as_name(value) for name, value in death.items()} for death in deaths]


def _as_name(value: Any) -> Any:
    """Names are any bytes. One that is not UTF-8 comes out of a header as bytes, and is text everywhere else."""
    if isinstance(value, list):
        return [_as_name(item) for item in value]
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value
