"""What operators can do with a node that runs; the table is in `control.py`.

Rules:

1. A change is first made safe (`node.db`, a vhost's `meta.db`), then told to every process that may have an older answer, and
   answered when all of them have dropped it.
2. What concerns one vhost happens one after the other; what concerns another one does not wait for it.
3. Who loses his user loses his connections; whose password changes keeps them. Tokens and tickets end with both, and tickets
   for a vhost with what the user may read there.
4. Passwords are in no log line and in no error.
5. A vhost that was stopped is stopped until it is started, or the node is: a node starts all its vhosts, as RabbitMQ does.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from warren.errors import WarrenError
from warren.node.running_vhosts import VhostDownError
from warren.node.users import AlreadyKnownError, NotKnownError, UsersError
from warren.node.vhost_directories import remove_deleted
from warren.vhost.refused import Refused, bad_request, not_found
from warren.vhost.supervisor import DOWN, RESTARTING, RUNNING, STOPPED

if TYPE_CHECKING:
    from warren.node.broker import Broker
    from warren.node.running_vhosts import RunningVhosts
    from warren.node.users import Users

log = logging.getLogger("warren.node")

_DELETE_SECONDS = 30.0  # that a vhost which is deleted gets to finish, before it is killed
CredentialsChanged = Callable[[str], Awaitable[None]]


class Operations:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._locks: dict[str, asyncio.Lock] = {}  # by vhost
        self.credentials_changed: list[
            CredentialsChanged
        ] = []  # told the user who is new or gone, or whose password or permissions changed
        self.table: dict[str, Callable[..., Awaitable[Any]]] = {
            "vhosts/list": self._list_vhosts,
            "vhosts/add": self._add_vhost,
            "vhosts/delete": self._delete_vhost,
            "vhosts/stop": self._stop_vhost,
            "vhosts/start": self._start_vhost,
            "vhosts/restart": self._restart_vhost,
            "users/list": self._list_users,
            "users/add": self._add_user,
            "users/delete": self._delete_user,
            "users/password": self._set_password,
            "users/tags": self._set_tags,
            "permissions/list": self._list_permissions,
            "permissions/set": self._set_permissions,
            "permissions/clear": self._clear_permissions,
            "topic_permissions/list": self._list_topic_permissions,
            "topic_permissions/set": self._set_topic_permissions,
            "topic_permissions/clear": self._clear_topic_permissions,
            "policies/list": self._list_policies,
            "policies/set": self._set_policy,
            "policies/clear": self._clear_policy,
            "status": self._status,
        }

    async def answer(self, name: object, arguments: object) -> dict[str, Any]:
        """{"result": ...}, or {"status", "error", "reason"}."""
        try:
            return {"result": await self._do(name, arguments)}
        except Refused as refused:
            status, code, reason = refused.status, refused.code, str(refused)
        except NotKnownError as error:
            status, code, reason = 404, "not_found", str(error)
        except AlreadyKnownError as error:
            status, code, reason = 409, "exists", str(error)
        except UsersError as error:
            status, code, reason = 400, "bad_request", str(error)
        except (WarrenError, OSError) as error:
            status, code, reason = 503, "unavailable", str(error)
        except (TypeError, ValueError, AttributeError) as error:
            # Not its text: that may show an argument, and a password is one.
            log.error("request %s of an operator: %s", name, type(error).__name__)
            status, code, reason = 400, "bad_request", f"{name}: an argument has a type that it cannot have"
        except Exception:
            log.exception("request %s of an operator failed", name)
            status, code, reason = 503, "unavailable", f"{name} failed; the broker's log says why"
        return {"status": status, "error": code, "reason": reason}

    async def _do(self, name: object, arguments: object) -> Any:
        work = self.table.get(name) if isinstance(name, str) else None
        if work is None:
            raise not_found(f"there is no request {name!r}")
        if not isinstance(arguments, dict):
            raise bad_request(f"{name}: the arguments are a JSON object")
        if not self._broker.started and not str(name).endswith("/list"):
            raise Refused(503, "unavailable", "the node is starting or stopping; try again")
        try:
            inspect.signature(work).bind(**arguments)
        except TypeError as error:  # it names arguments, and shows none
            raise bad_request(f"{name}: {error}") from None
        return await work(**arguments)

    @property
    def _users(self) -> Users:
        return self._broker.users

    @property
    def _running(self) -> RunningVhosts:
        return self._broker.running

    # -- vhosts ------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _alone(self, vhost: str) -> AsyncIterator[None]:
        """Rule 2."""
        lock = self._locks.setdefault(vhost, asyncio.Lock())
        try:
            async with lock:
                yield
        finally:
            if not lock.locked() and not self._users.has_vhost(vhost):
                self._locks.pop(vhost, None)

    def _check_vhost(self, name: str) -> None:
        if not self._users.has_vhost(name):
            raise not_found(f"there is no vhost {name!r}; `warren vhosts list` shows those there are")

    async def _list_vhosts(self) -> list[dict[str, str]]:
        return [{"name": name, "state": self._running.state(name)} for name in self._users.vhosts()]

    async def _add_vhost(self, *, name: str) -> None:
        async with self._alone(name):
            await asyncio.to_thread(self._users.add_vhost, name)
            log.info("vhost %r is added", name)
            await self._running.open(name)

    async def _delete_vhost(self, *, name: str) -> None:
        async with self._alone(name):
            await asyncio.to_thread(self._users.delete_vhost, name)
            log.info("vhost %r is being deleted", name)
            await self._running.close(name, f"vhost '{name}' is deleted", state=STOPPED, patience=_DELETE_SECONDS)
            self._running.forget(name)
            await asyncio.to_thread(remove_deleted, self._users, str(self._broker.config.data_dir), name)
            log.info("vhost %r is deleted", name)

    async def _stop_vhost(self, *, name: str) -> None:
        async with self._alone(name):
            self._check_vhost(name)
            log.info("vhost %r is being stopped", name)
            await self._running.close(name, f"vhost '{name}' is down (stopped)", state=STOPPED)

    async def _start_vhost(self, *, name: str) -> None:
        async with self._alone(name):
            self._check_vhost(name)
            if self._running.state(name) in (DOWN, STOPPED):
                await self._running.open(name)
                log.info("vhost %r is started", name)

    async def _restart_vhost(self, *, name: str) -> None:
        async with self._alone(name):
            self._check_vhost(name)
            log.info("vhost %r is being restarted", name)
            await self._running.close(name, f"vhost '{name}' is down (restarting)", state=RESTARTING)
            await self._running.open(name)
            log.info("vhost %r is restarted", name)

    # -- users -------------------------------------------------------------------------------------------------------

    async def _list_users(self) -> list[dict[str, Any]]:
        return [{"name": user.name, "tags": list(user.tags)} for user in self._users.list_users()]

    async def _add_user(self, *, user: str, password: str, tags: Iterable[str] = ()) -> None:
        await asyncio.to_thread(self._users.add_user, user, password, tags)
        await self._tell_credentials(user)  # the data server knows those users that there were when it started
        log.info("user %r is added, with tags %s", user, list(tags))

    async def _delete_user(self, *, user: str) -> None:
        await asyncio.to_thread(self._users.delete_user, user)
        await self._tell_credentials(user)
        await self._everywhere(self._forget_user(user, vhost) for vhost in self._users.vhosts())
        log.info("user %r is deleted", user)

    async def _forget_user(self, user: str, vhost: str) -> None:
        if self._running.state(vhost) == RUNNING:
            await self._running.grant_changed(user, vhost)
            await self._operate(vhost, "connections/close", user=user, why=f"user '{user}' is deleted")

    async def _set_password(self, *, user: str, password: str) -> None:
        await asyncio.to_thread(self._users.set_password, user, password)
        await self._tell_credentials(user)
        log.info("user %r has another password", user)

    async def _set_tags(self, *, user: str, tags: Iterable[str]) -> None:
        await asyncio.to_thread(self._users.set_tags, user, tags)
        log.info("user %r has the tags %s", user, list(tags))

    async def _tell_credentials(self, user: str) -> None:
        await self._everywhere(tell(user) for tell in self.credentials_changed)

    @staticmethod
    async def _everywhere(work: Iterable[Awaitable[None]]) -> None:
        """All of it, also where some fails; then the first failure is raised."""
        for result in await asyncio.gather(*work, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    # -- permissions -------------------------------------------------------------------------------------------------

    async def _list_permissions(self, *, user: str | None = None, vhost: str | None = None) -> list[dict[str, str]]:
        return [asdict(entry) for entry in self._users.list_permissions(user, vhost)]

    async def _set_permissions(self, *, user: str, vhost: str, configure: str, write: str, read: str) -> None:
        await asyncio.to_thread(self._users.set_permissions, user, vhost, configure, write, read)
        await self._tell_grant(user, vhost)
        log.info("user %r may configure %r, write %r, read %r in vhost %r", user, configure, write, read, vhost)

    async def _clear_permissions(self, *, user: str, vhost: str) -> None:
        await asyncio.to_thread(self._users.clear_permissions, user, vhost)
        await self._tell_grant(user, vhost)
        log.info("user %r may do nothing in vhost %r", user, vhost)

    async def _tell_grant(self, user: str, vhost: str) -> None:
        await self._everywhere((self._running.grant_changed(user, vhost), self._tell_credentials(user)))

    async def _list_topic_permissions(
        self, *, user: str | None = None, vhost: str | None = None
    ) -> list[dict[str, str]]:
        return [asdict(entry) for entry in self._users.list_topic_permissions(user, vhost)]

    async def _set_topic_permissions(self, *, user: str, vhost: str, exchange: str, write: str, read: str) -> None:
        await asyncio.to_thread(self._users.set_topic_permissions, user, vhost, exchange, write, read)
        await self._running.grant_changed(user, vhost)
        log.info("user %r may write %r, read %r by exchange %r in vhost %r", user, write, read, exchange, vhost)

    async def _clear_topic_permissions(self, *, user: str, vhost: str, exchange: str | None = None) -> None:
        await asyncio.to_thread(self._users.clear_topic_permissions, user, vhost, exchange)
        await self._running.grant_changed(user, vhost)
        log.info("user %r is not narrowed by exchange %r in vhost %r", user, exchange or "(all)", vhost)

    # -- policies ----------------------------------------------------------------------------------------------------

    async def _list_policies(self, *, vhost: str | None = None, operator: bool = False) -> list[dict[str, Any]]:
        """Of one vhost, or of all that run."""
        if vhost is not None:
            found: list[dict[str, Any]] = await self._operate(vhost, "policies/list", operator=operator)
            return found
        running = [name for name in self._users.vhosts() if self._running.state(name) == RUNNING]
        return [policy for name in running for policy in await self._operate(name, "policies/list", operator=operator)]

    async def _set_policy(
        self,
        *,
        vhost: str,
        name: str,
        pattern: str,
        definition: dict[str, Any],
        apply_to: str = "all",
        priority: int = 0,
        operator: bool = False,
    ) -> None:
        policy = {
            "name": name,
            "pattern": pattern,
            "definition": definition,
            "apply_to": apply_to,
            "priority": priority,
        }
        await self._operate(vhost, "policies/set", operator=operator, **policy)
        log.info("%s %r in vhost %r is %s", "operator policy" if operator else "policy", name, vhost, policy)

    async def _clear_policy(self, *, vhost: str, name: str, operator: bool = False) -> None:
        await self._operate(vhost, "policies/clear", operator=operator, name=name)
        log.info("%s %r in vhost %r is cleared", "operator policy" if operator else "policy", name, vhost)

    async def _operate(self, vhost: str, request: str, **arguments: Any) -> Any:
        """Ask a vhost. Raises Refused."""
        self._check_vhost(vhost)
        try:
            answer = await self._running.operate(vhost, request, arguments)
        except VhostDownError as error:
            raise Refused(503, "unavailable", f"{error}; start it first") from None
        if "result" not in answer:
            raise Refused(answer["status"], answer["error"], answer["reason"])
        return answer["result"]

    # -- looking -----------------------------------------------------------------------------------------------------

    async def _status(self) -> Any:
        return await self._broker.status()
