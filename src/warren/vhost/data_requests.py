"""What the data pipeline may ask of a vhost, as one table.

The node asks, over the control socket or, inline, directly; it has found out who the user is. The names are those of the
HTTP interface (`node/pipeline_api.py`).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from warren.errors import WarrenError
from warren.vhost.chosen_queues import choose
from warren.vhost.held_snapshots import HeldSnapshots
from warren.vhost.leases import Leases
from warren.vhost.permissions import Permissions
from warren.vhost.refused import Refused, bad_request
from warren.vhost.stages import Stages

if TYPE_CHECKING:
    from warren.vhost.vhost import Vhost

log = logging.getLogger("warren.vhost")


class DataRequests:
    """Leases, stages and held snapshots of a vhost."""

    def __init__(self, vhost: Vhost) -> None:
        self._vhost = vhost
        self.leases = Leases(vhost)
        self.stages = Stages(vhost)
        self.snapshots = HeldSnapshots(vhost)
        self._table: dict[str, Callable[..., Any]] = {
            "snapshots/take": self.snapshots.take,
            "snapshots/heartbeat": self.snapshots.heartbeat,
            "snapshots/release": self.snapshots.release,
            "snapshots/list": self.snapshots.list,
            "leases/open": self.leases.open,
            "leases/next": self.leases.next,
            "leases/describe": self.leases.describe,
            "leases/heartbeat": self.leases.heartbeat,
            "leases/list": self.leases.list,
            "leases/requeue": self.leases.requeue,
            "leases/release": self.leases.release,
            "leases/plan": self._plan,
            "tap/status": self._tap,
            "queues/list": self._queues,
            "connections/list": self._connections,
            "stages/open": self.stages.open,
            "stages/status": self.stages.status,
            "stages/decide": self.stages.decide,
            "stages/drop": self.stages.drop,
        }

    def start(self) -> None:
        self.stages.resume()

    async def stop(self) -> None:
        await self.stages.stop()
        await self.snapshots.stop()

    async def answer(self, name: str, permissions: Permissions, arguments: dict[str, Any]) -> dict[str, Any]:
        """{"result": ...}, or {"status": ..., "error": ..., "reason": ...}."""
        try:
            function = self._table.get(name)
            if function is None:
                raise Refused(404, "not_found", f"no request {name!r}; there are {', '.join(sorted(self._table))}")
            try:
                inspect.signature(function).bind(permissions, **arguments)
            except TypeError as error:
                raise bad_request(f"{name}: {error}") from None
            result = function(permissions, **arguments)
            return {"result": await result if inspect.isawaitable(result) else result}
        except Refused as refused:
            return {"status": refused.status, "error": refused.code, "reason": str(refused)}
        except TimeoutError:
            return {"status": 503, "error": "unavailable", "reason": f"vhost {self._vhost.name!r} cannot commit now"}
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            return {"status": 400, "error": "bad_request", "reason": f"{name}: {type(error).__name__}: {error}"}
        except WarrenError as error:
            return {"status": 503, "error": "unavailable", "reason": str(error)}
        except Exception:
            log.exception("request %s of the pipeline failed", name)
            self._vhost.wake()  # a store that failed is found by the next commit, and the vhost restarted
            return {"status": 503, "error": "unavailable", "reason": f"{name} failed; the broker's log says why"}

    def _plan(self, permissions: Permissions, **arguments: Any) -> dict[str, Any]:
        """By ticket: what it says was checked by the node."""
        return self.leases.plan(**arguments)

    def _queues(
        self, permissions: Permissions, *, queues: list[str] | None = None, pattern: str | None = None
    ) -> dict[str, Any]:
        """Everything that is known of the queues that the user may read."""
        return {"queues": self._vhost.queue_infos(choose(self._vhost, permissions, queues, pattern).values())}

    def _connections(self, permissions: Permissions) -> dict[str, Any]:
        """The user's own."""
        return {
            "connections": [
                {
                    "peer": one.peer,
                    "tls": one.tls,
                    "user": one.user,
                    "heartbeat": one.heartbeat,
                    "waits_for": one.flow.waits,
                    "channels": [
                        {
                            "number": number,
                            "consumer_count": len(channel.consumers),
                            "messages_unacknowledged": len(channel.unacked),
                            **channel.statistics.info(),
                        }
                        for number, channel in one.channels.items()
                    ],
                }
                for one in self._vhost.connections
                if one.user == permissions.user
            ]
        }

    def _tap(
        self, permissions: Permissions, *, queues: list[str] | None = None, pattern: str | None = None
    ) -> dict[str, Any]:
        found = {}
        for name, queue in choose(self._vhost, permissions, queues, pattern).items():
            found[name] = {
                "next_seq_id": queue.stored.seqs.next,
                "ready": len(queue),
                "unacknowledged": queue.unacknowledged,
            }
        return {"queues": found}
