"""What an operator may ask of a vhost that runs, as one table: its policies, and to send clients away.

The node asks (`node/operations.py`), over the control socket or, inline, directly. It has seen to it that the operator may.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from warren.amqp.errors import AmqpError
from warren.errors import WarrenError
from warren.routing.errors import PolicyError
from warren.routing.policies import Policy

if TYPE_CHECKING:
    from warren.vhost.vhost import Vhost

log = logging.getLogger("warren.vhost")


class OperatorRequests:
    """Requests of operators to one vhost."""

    def __init__(self, vhost: Vhost) -> None:
        self._vhost = vhost
        self._table: dict[str, Callable[..., Any]] = {
            "policies/list": self._list_policies,
            "policies/set": self._set_policy,
            "policies/clear": self._clear_policy,
            "connections/close": self._close_connections,
        }

    def answer(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """{"result": ...}, or {"status", "error", "reason"}."""
        try:
            return {"result": self._table[name](**arguments)}
        except PolicyError as error:
            return {"status": 400, "error": "bad_request", "reason": str(error)}
        except LookupError as error:
            return {"status": 404, "error": "not_found", "reason": str(error.args[0])}
        except WarrenError as error:
            return {"status": 503, "error": "unavailable", "reason": str(error)}
        except Exception:
            log.exception("request %s of an operator failed", name)
            return {"status": 503, "error": "unavailable", "reason": f"{name} failed; the broker's log says why"}

    def _list_policies(self, *, operator: bool) -> list[dict[str, Any]]:
        kept = self._vhost.operator_policies if operator else self._vhost.policies
        return [
            {
                "vhost": self._vhost.name,
                "name": policy.name,
                "pattern": policy.pattern,
                "definition": dict(policy.definition),
                "apply_to": policy.apply_to,
                "priority": policy.priority,
            }
            for policy in sorted(kept.values(), key=lambda policy: policy.name)
        ]

    def _set_policy(self, *, operator: bool, **policy: Any) -> None:
        self._vhost.set_policy(Policy(**policy), operator=operator)

    def _clear_policy(self, *, operator: bool, name: str) -> None:
        kept = self._vhost.operator_policies if operator else self._vhost.policies
        if name not in kept:
            which = "operator policy" if operator else "policy"
            raise LookupError(f"there is no {which} {name!r} in vhost {self._vhost.name!r}")
        self._vhost.clear_policy(name, operator=operator)

    def _close_connections(self, *, user: str, why: str) -> int:
        """All of a user's; how many they were."""
        mine = [connection for connection in self._vhost.connections if connection.user == user]
        for connection in mine:
            connection.fail(AmqpError(320, why))
        return len(mine)
