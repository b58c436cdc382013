"""HTTP for the data pipeline: POST /api/pipeline/<request>, JSON in and out.

Who asks says who he is, with a password (Basic) or a token (Bearer), once, on Spark's driver. What the driver then hands to
executors are tickets (`warren/tickets.py`), which are good for one snapshot, some checkouts or one batch. The requests
that executors make here, `leases/plan` and `snapshots/heartbeat`, carry such a ticket. Tokens and tickets end with the
password that they stem from, and tickets with what their user may read in their vhost; whoever changes these is answered
when they have ended here and in the data server.

An error is `{"error": code, "reason": text}` with its status.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
import logging
import os
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from warren.node.broker import Broker
from warren.node.data_server import DataServer
from warren.storage.layout import hashed
from warren.storage.running_node import NODE_FILE
from warren.tickets import TicketError, Tickets, place_name
from warren.vhost.refused import Refused, bad_request

log = logging.getLogger("warren.node")

_TOKEN_SECONDS = 12 * 3600.0
_TICKET_SECONDS = 24 * 3600.0
_MOST_BODY_BYTES = 16 * 1024 * 1024
_MOST_TICKET_BYTES = 64 * 1024
_BY_TICKET = ("leases/plan", "snapshots/heartbeat")
_LISTS = {"snapshots/list": "snapshots", "leases/list": "leases"}


class PipelineApi:
    """The requests, and the data server that some of them lead to."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._known: Tickets | None = None
        self._data_server: DataServer | None = None
        self._url = ""
        self._starting: asyncio.Task[int | None] | None = None
        broker.operations.credentials_changed.append(self._credentials_changed)

    async def _credentials_changed(self, user: str) -> None:
        if self._data_server is not None:
            await self._data_server.tell_stamp(user)

    @property
    def _tickets(self) -> Tickets:
        if self._known is None:
            self._known = Tickets.of_directory(str(self._broker.config.data_dir), self._broker.stamp_of)
        return self._known

    def routes(self) -> list[Route]:
        return [Route("/api/pipeline/{name:path}", self._serve, methods=["POST"])]

    def listening(self, url: str) -> None:
        """The HTTP server is up: say so to those who find the data directory."""
        self._url = url
        path = os.path.join(self._broker.config.data_dir, NODE_FILE)
        with open(path + ".tmp", "w") as file:
            json.dump({"http": url, "pid": os.getpid()}, file)
        os.replace(path + ".tmp", path)
        if self._server().was_used:  # tasks may be waiting for it since the node died
            self._start_data_server()

    def _start_data_server(self) -> None:
        """Now, and without waiting for it: it will be asked for."""
        self._starting = asyncio.get_running_loop().create_task(self._server().port(self._url))

    async def stop(self) -> None:
        if self._url:
            path = os.path.join(self._broker.config.data_dir, NODE_FILE)
            if os.path.exists(path):
                os.unlink(path)
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._data_server is not None:
            await self._data_server.stop()

    async def _serve(self, request: Request) -> Response:
        try:
            return JSONResponse(await self._answer(request))
        except Refused as refused:
            headers = {"WWW-Authenticate": 'Basic realm="Warren"'} if refused.status == 401 else None
            return JSONResponse({"error": refused.code, "reason": str(refused)}, refused.status, headers)
        except Exception:
            log.exception("a request of the pipeline failed: %s", request.url.path)
            return JSONResponse({"error": "unavailable", "reason": "the broker failed; its log says why"}, 503)

    async def _answer(self, request: Request) -> dict[str, Any]:
        name = request.path_params["name"]
        if not self._broker.started:
            raise Refused(503, "unavailable", "the broker is starting")
        # Who shows a ticket sends little; who sends much has said who he is.
        by_name = "authorization" in request.headers or name not in _BY_TICKET
        user, stamp = await self._user(request) if by_name else ("", "")
        body = await self._body(request, _MOST_BODY_BYTES if user else _MOST_TICKET_BYTES)
        if name == "leases/plan":
            return await self._plan(body)
        if name == "snapshots/heartbeat" and not user:
            said = self._checked(body, "snapshot")
            return await self._broker.data_request(name, said["user"], said["vhost"], {"id": said["id"]})
        if name == "token":
            if request.headers["authorization"].lower().startswith("bearer"):
                raise Refused(403, "forbidden", "a token does not give another one: say user and password")
            token = self._tickets.issue("user", seconds=_TOKEN_SECONDS, user=user, stamp=stamp)
            return {"token": token, "expires_at": time.time() + _TOKEN_SECONDS}
        if name in _LISTS and "vhost" not in body:
            return await self._list(name, user)
        vhost = body.pop("vhost", "/")
        # Before the request is: should what the user may read change meanwhile, the ticket is worth nothing.
        stamp_here = self._broker.users.stamp_in(vhost, user, stamp)
        result = await self._broker.data_request(name, user, vhost, body)
        return await self._with_ticket(request, name, {"user": user, "stamp": stamp_here}, vhost, body, result)

    async def _body(self, request: Request, most: int) -> dict[str, Any]:
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > most:
                raise bad_request(f"the request has more than {most} bytes")
        try:
            body = json.loads(data or b"{}")
        except ValueError as error:
            raise bad_request(f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise bad_request("the body is not a JSON object")
        return body

    async def _user(self, request: Request) -> tuple[str, str]:
        """Who asks, and the stamp of the password that he has shown. Raises Refused with 401."""
        kind, _, credential = request.headers.get("authorization", "").partition(" ")
        address = request.client.host if request.client is not None else ""
        stamp: str | None = None
        if kind.lower() == "bearer":
            try:
                said = self._tickets.check(credential, "user")
            except TicketError as error:
                raise Refused(401, "unauthorized", f"token: {error}") from None
            user, stamp = said["user"], said["stamp"]
        elif kind.lower() == "basic":
            try:
                user, _, password = base64.b64decode(credential, validate=True).decode().partition(":")
            except (binascii.Error, UnicodeDecodeError):
                raise bad_request("the Authorization header is not Basic credentials") from None
            # Before the password is looked at: should it change meanwhile, what stems from the old one is worth nothing.
            stamp = self._broker.stamp_of(user)
            if not await self._broker.logins.of_request(user, password, address):
                stamp = None
        else:
            raise Refused(401, "unauthorized", "say who you are: options user and password, or token")
        if stamp is None or not self._broker.may_connect_from(user, address):
            raise Refused(401, "unauthorized", "user or password is wrong, or the user may not come from this address")
        return user, stamp

    async def _list(self, name: str, user: str) -> dict[str, Any]:
        """Of all vhosts that the user may see."""
        key = _LISTS[name]
        found: list[Any] = []
        for vhost in self._broker.users.vhosts():
            if self._broker.refusal(user, vhost) is None:
                found += (await self._broker.data_request(name, user, vhost, {}))[key]
        return {key: found}

    async def _plan(self, body: dict[str, Any]) -> dict[str, Any]:
        """For an executor: a part of what its ticket is good for."""
        said = self._checked(body, "checkout")
        arguments = {key: body.get(key) for key in ("number", "sid", "first", "stop")}
        if not all(isinstance(value, int) for value in arguments.values()):
            raise bad_request("leases/plan needs the numbers number, sid, first and stop")
        if not said["first"] <= arguments["number"] <= said["last"]:
            raise Refused(403, "forbidden", f"the ticket is not good for checkout {arguments['number']}")
        return await self._broker.data_request(
            "leases/plan", said["user"], said["vhost"], {"lease": said["lease"], "born": said["born"], **arguments}
        )

    def _checked(self, body: dict[str, Any], kind: str) -> dict[str, Any]:
        try:
            return self._tickets.check(str(body.get("ticket", "")), kind)
        except TicketError as error:
            raise Refused(401, "unauthorized", str(error)) from None

    async def _with_ticket(
        self,
        request: Request,
        name: str,
        who: dict[str, str | None],
        vhost: str,
        body: dict[str, Any],
        result: dict[str, Any],
    ) -> dict[str, Any]:
        """What executors need besides."""
        says: dict[str, Any] = {"vhost": vhost, **who}
        if name == "snapshots/take":
            kind, seconds = "snapshot", max(_TICKET_SECONDS, float(result["ttl"]))
            says |= {"path": result["path"], "id": result["id"]}
        elif name == "leases/describe":
            kind, seconds = "checkout", _TICKET_SECONDS
            says |= {"lease": body["lease"], "first": body["first"], "last": body["last"], "born": result["born"]}
        elif name == "stages/open":
            kind, seconds = "stage", _TICKET_SECONDS
            says |= {"writer": result.pop("writer"), "batch": body.get("batch"), "root": result.pop("root")}
            says |= {"limit": self._broker.config.staged_limit, "free": self._broker.config.disk_free_limit}
        else:
            if name == "leases/open":
                self._start_data_server()  # the first batch asks for its address
            return result
        url = await self._data_url(request)
        if url is None and kind == "stage":
            why = self._data_server.why if self._data_server is not None else ""
            raise Refused(503, "unavailable", f"the broker's data server cannot be started: {why}")
        ticket = self._tickets.issue(kind, seconds=seconds, **says)
        answer = {**result, "vhost": vhost, "host": "", "ticket": ticket, "data_url": url}
        root = result.get("root") or (
            os.path.join(result["path"], "vhosts", hashed(vhost)) if "path" in result else None
        )
        if root is not None:
            with contextlib.suppress(OSError):  # then nobody sees its files
                answer["host"] = place_name(root)
        return answer

    def _server(self) -> DataServer:
        if self._data_server is None:
            config = self._broker.config
            self._data_server = DataServer(
                config.host,
                config.data_port,
                self._tickets.key,
                config.tls.http_files,
                config.data_dir,
                self._broker.users,
            )
        return self._data_server

    async def _data_url(self, request: Request) -> str | None:
        port = await self._server().port(self._url)
        if port is None:
            return None
        host = request.url.hostname or self._broker.config.host
        return f"{request.url.scheme}://{f'[{host}]' if ':' in host else host}:{port}"
