"""The data server: a process beside the broker that reads store files for executors which cannot see them, as Arrow IPC over
HTTP, and stages the rows of sinks. It knows no user and no password: every request carries a ticket of the broker's.

| request | ticket | answer |
|---|---|---|
| `POST /snapshots/plan {options}` | snapshot | the parts of a snapshot, as JSON |
| `POST /snapshots/read {part, columns}` | snapshot | an Arrow IPC stream |
| `POST /snapshots/table {table, columns, options}` | snapshot | the same, of a table that is not that of messages |
| `POST /checkouts/read {number, sid, first, stop, columns}` | checkout | an Arrow IPC stream |
| `POST /stages?partition=&attempt=&batch=` with an Arrow IPC stream | stage | `{name, count, bytes}`, durable |

The node starts it with one line of JSON on its standard input, reads its port from its standard output, and ends it by
closing the former. In between each line is the stamps that a user has from now on, by vhost, and is answered by one: tickets
with another stamp are refused from then on. It never writes to a store but for stages, which are files of their own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import socket
import ssl
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from typing import IO, Any

import pyarrow as pa
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from warren.errors import WarrenError
from warren.http_server import HttpConnection, HttpServer, http_config
from warren.pipeline.amqp_rows import SCHEMA
from warren.pipeline.broker_client import STREAM_ERROR, BrokerClient
from warren.pipeline.errors import PipelineError
from warren.pipeline.options import SourceOptions
from warren.pipeline.parts import StreamPart
from warren.pipeline.rows import read_part
from warren.pipeline.schema import arrow_schema
from warren.pipeline.store_view import open_view
from warren.queueing.message_times import MAX_DELAY_MS, delay_ms, expiration_us
from warren.queueing.properties import MAX_EXPIRATION_MS, decode_head
from warren.storage.layout import hashed
from warren.storage.stage_file import StageWriter, staged_bytes
from warren.tickets import TicketError, Tickets

log = logging.getLogger("warren.pipeline")

_PLANS = 5  # of one checkout, while its files move
_HEADS_KEPT = 4096
_MOST_IN_RAM = 64 << 20  # of a stage that arrives; a sink sends 32 MiB at a time
# Options of a source that say which parts there are; the others are the driver's own business.
_PLANNED = frozenset(("queue", "queuepattern", "fromseqid", "toseqid", "since", "until", "state"))
_PLANNED |= {"minpartitions", "maxrecordsperpartition", "failondataloss"}
ARROW_STREAM = "application/vnd.apache.arrow.stream"


class DataServer:
    """The requests."""

    def __init__(
        self, key: bytes, stamps: dict[str, dict[str, str]], node_url: str, certificate: str | None = None
    ) -> None:
        self.stamps = stamps  # by user and vhost
        self._tickets = Tickets(key, lambda user, vhost: self.stamps.get(user, {}).get(vhost or ""))
        self._node_url = node_url
        self._arriving: Counter[str] = Counter()  # bytes of stages that are not files yet, by vhost
        self._trust = _pinned(certificate) if certificate is not None else None

    def application(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/snapshots/plan", self._guard(self._plan), methods=["POST"]),
                Route("/snapshots/read", self._guard(self._read_snapshot), methods=["POST"]),
                Route("/snapshots/table", self._guard(self._read_table), methods=["POST"]),
                Route("/checkouts/read", self._guard(self._read_checkout), methods=["POST"]),
                Route("/stages", self._guard(self._stage), methods=["POST"]),
            ]
        )

    def _guard(self, work: Any) -> Any:
        async def serve(request: Request) -> Response:
            try:
                result: Response = await work(request)
                return result
            except _NoRoom as error:
                return _refusal(503, "unavailable", str(error))
            except TicketError as error:
                return _refusal(401, "unauthorized", str(error))
            except FileNotFoundError as error:
                return _refusal(503, "unavailable", f"a file moved while it was read; try again: {error}")
            except (WarrenError, ValueError, KeyError, pa.ArrowInvalid) as error:
                return _refusal(400, "bad_request", str(error))

        return serve

    def _ticket(self, request: Request, kind: str) -> dict[str, Any]:
        scheme, _, ticket = request.headers.get("authorization", "").partition(" ")
        return self._tickets.check(ticket if scheme.lower() == "bearer" else "", kind)

    # -- snapshots -----------------------------------------------------------------------------------------------------

    async def _plan(self, request: Request) -> Response:
        said = self._ticket(request, "snapshot")
        options = (await request.json()).get("options", {})
        options = {name: value for name, value in options.items() if name.lower() in _PLANNED}
        parts = await run_in_threadpool(lambda: open_view(said["path"], said["vhost"]).parts(options))
        return JSONResponse({"parts": [part.to_json() for part in parts]})

    async def _read_snapshot(self, request: Request) -> Response:
        said = self._ticket(request, "snapshot")
        asked = await request.json()
        part = StreamPart.from_json(asked["part"])
        root = os.path.join(said["path"], "vhosts", hashed(said["vhost"]))
        await run_in_threadpool(_check_part, root, part)
        return await self._stream(root, part, asked)

    async def _read_table(self, request: Request) -> Response:
        from warren.pipeline.tables import table_batches, table_schema  # needs Spark's classes, and is rarely asked for

        said = self._ticket(request, "snapshot")
        asked = await request.json()
        options = SourceOptions.parse({"vhost": said["vhost"], **asked["options"]}, place_given=True)
        if options.table not in ("queues", "segments"):  # the others are of all queues
            raise PipelineError(f"table={options.table} is read from files, on the broker's machine")
        whole = table_schema(options.table)
        schema = pa.schema([whole.field(name) for name in asked["columns"]])
        view = await run_in_threadpool(open_view, said["path"], said["vhost"])
        await run_in_threadpool(view.chosen, options)
        batches = table_batches(view, options.table, options, schema)
        return StreamingResponse(_arrow_stream(schema, batches), media_type=ARROW_STREAM)

    # -- checkouts -----------------------------------------------------------------------------------------------------

    async def _read_checkout(self, request: Request) -> Response:
        self._ticket(request, "checkout")
        asked = await request.json()
        ticket = request.headers["authorization"].partition(" ")[2]
        place = {name: int(asked[name]) for name in ("number", "sid", "first", "stop")}
        attempt = 0
        while True:
            attempt += 1
            plan = await run_in_threadpool(self._plan_checkout, ticket, place)
            part = StreamPart.from_json(plan["parts"][0]) if plan["parts"] else None
            try:
                return await self._stream(plan["root"], part, asked)
            except FileNotFoundError:  # it was moved after it was planned
                if attempt == _PLANS:
                    raise

    def _plan_checkout(self, ticket: str, place: dict[str, int]) -> dict[str, Any]:
        with BrokerClient(self._node_url, trust=self._trust) as client:
            return client.call("leases/plan", ticket=ticket, **place)

    async def _stream(self, root: str, part: StreamPart | None, asked: dict[str, Any]) -> Response:
        schema = arrow_schema(asked.get("columns"))
        loss = bool(asked.get("fail_on_data_loss", True))
        batches: Iterator[pa.RecordBatch] = iter(())
        if part is not None:
            batches = await run_in_threadpool(lambda: read_part(root, part, schema, fail_on_data_loss=loss))
        return StreamingResponse(_arrow_stream(schema, batches), media_type=ARROW_STREAM)

    # -- stages --------------------------------------------------------------------------------------------------------

    async def _stage(self, request: Request) -> Response:
        said = self._ticket(request, "stage")
        batch = request.query_params.get("batch", "")
        if said["batch"] is not None and batch != said["batch"]:
            raise PipelineError(f"the ticket is for batch {said['batch']}, not for {batch}")
        place = [int(request.query_params.get(name, "0")) for name in ("partition", "attempt")]
        # All of the body is there before any of it is looked at: the network may be slow. A large one waits on the disk.
        directory = os.path.join(said["root"], "stages")
        os.makedirs(directory, exist_ok=True)
        room = _Room(said, batch, self._arriving)
        with room, tempfile.SpooledTemporaryFile(_MOST_IN_RAM, dir=directory) as file:
            refused: WarrenError | None = None
            async for chunk in request.stream():
                if refused is not None:
                    continue  # who still sends would not hear the answer
                try:
                    room.take(len(chunk))
                except WarrenError as error:
                    refused = error
                else:
                    file.write(chunk)
            if refused is not None:
                raise refused
            file.seek(0)
            answer = await run_in_threadpool(self._write_stage, file, said, batch, place)
        return JSONResponse(answer)

    def _write_stage(self, file: IO[bytes], said: dict[str, Any], batch: str, place: list[int]) -> dict[str, Any]:
        writer = StageWriter(said["root"], said["writer"], batch, *place)
        exchanges: dict[bytes, str] = {}  # by head
        try:
            for rows in pa.ipc.open_stream(file):
                heads, columns = _columns_of(rows)
                if len(exchanges) > _HEADS_KEPT:
                    exchanges.clear()
                for head in set(heads) - exchanges.keys():
                    exchanges[head] = _check_head(head, said["user"])
                # What is written on a row decides where it goes, not what its sender says of it.
                writer.add_columns(heads, *columns, {exchanges[head] for head in heads})
            info = writer.finish()
        except BaseException:
            writer.drop()
            raise
        return {"name": writer.name, "count": info.count, "bytes": info.size}


def _columns_of(rows: pa.RecordBatch) -> tuple[list[bytes], tuple[memoryview, memoryview, memoryview]]:
    """The heads of a batch, each once, and as bytes: the number of its head for each row, where its body ends, the bodies.
    Raises PipelineError for a batch that is none of `amqp_rows.py`."""
    if rows.schema != SCHEMA:
        raise PipelineError(
            f"rows to be staged have the columns {', '.join(map(str, SCHEMA))}; these have {rows.schema}"
        )
    head, body = rows.columns
    if head.null_count or head.dictionary.null_count or body.null_count:
        raise PipelineError("a row to be staged has neither head nor body that is null")
    _, numbers = head.indices.buffers()
    _, ends, bodies = body.buffers()
    start, stop = 4 * body.offset, 4 * (body.offset + rows.num_rows + 1)
    first = 4 * head.offset
    return head.dictionary.to_pylist(), (
        _bytes_of(numbers)[first : first + 4 * rows.num_rows],
        _bytes_of(ends)[start:stop],
        _bytes_of(bodies),
    )


def _bytes_of(buffer: pa.Buffer | None) -> memoryview:
    return memoryview(b"" if buffer is None else buffer).cast("B")


class _NoRoom(WarrenError):
    """There may be room for a stage later, when others are released."""


class _Room:
    """The place on disk that a stage takes while it arrives. What others have staged makes it wait; a batch that has no room
    even when it is alone is refused for good."""

    def __init__(self, said: dict[str, Any], batch: str, arriving: Counter[str]) -> None:
        self._root, self._limit = said["root"], said["limit"]
        self._arriving = arriving
        self._batch = batch
        self._taken = 0
        staged, self._ours = staged_bytes(self._root, said["writer"], batch)
        self._others = staged - self._ours
        if shutil.disk_usage(self._root).free < said["free"]:
            raise _NoRoom(f"the broker's disk has less than {said['free']} bytes left (disk_free_limit)")

    def take(self, size: int) -> None:
        self._taken += size
        self._arriving[self._root] += size
        if self._ours + self._taken > self._limit:
            raise PipelineError(
                f"batch {self._batch} has more than the {self._limit} bytes that sinks may stage in a vhost: make batches "
                f"smaller (maxOffsetsPerTrigger, maxBytesPerTrigger), or raise staged_limit of the broker"
            )
        if self._others + self._ours + self._arriving[self._root] > self._limit:
            raise _NoRoom(
                f"sinks have staged {self._others + self._ours} of {self._limit} bytes that they may in this vhost "
                f"(staged_limit of the broker): batches wait for queues that are full, or were given up less than a day ago"
            )

    def __enter__(self) -> _Room:
        return self

    def __exit__(self, *_: object) -> None:
        self._arriving[self._root] -= self._taken


def _check_head(head: bytes, user: str) -> str:
    """The exchange of a row. Refuses what a channel would refuse, before it is staged. Raises PipelineError."""
    said = decode_head(head)
    headers = said.properties.get("headers")
    headers = headers if isinstance(headers, dict) else {}
    if delay_ms(headers) > MAX_DELAY_MS:  # below 0 it was waited for once
        raise PipelineError(f"x-delay is {headers['x-delay']}; it is a number of milliseconds up to {MAX_DELAY_MS}")
    claimed = said.properties.get("user_id")
    if claimed is not None and claimed != user:
        raise PipelineError(f"user_id is {claimed!r}, but the sink's user is {user!r}; drop that column")
    expiration = said.properties.get("expiration")
    if expiration is not None and not 0 <= expiration_us(said.properties) <= MAX_EXPIRATION_MS * 1000:
        raise PipelineError(f"expiration is {expiration!r}; it is a number of milliseconds, as text")
    return said.exchange


def _check_part(root: str, part: StreamPart) -> None:
    """A ticket opens the queues of its snapshot, and a part names files: those must be the queue's own."""
    with open(os.path.join(root, "manifest.json")) as file:
        queues = json.load(file)["queues"]
    known = queues.get(part.queue)
    if known is None or known["uid"] != part.sid >> 8:
        raise PipelineError(f"the snapshot has no stream {part.sid} of queue {part.queue!r}")
    directory = os.path.join("queues", known["directory"])
    for path in (part.directory, part.database, part.transients):
        if path is None or path == "transients.wal":
            continue
        inside = os.path.normpath(path)
        if inside != directory and not inside.startswith(directory + os.sep):
            raise PipelineError(f"{path!r} is not of queue {part.queue!r}")


class _Chunks:
    """A file that gives away what was written to it."""

    closed = False

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: Any) -> int:
        self._parts.append(bytes(data))
        return len(self._parts[-1])

    def take(self) -> bytes:
        parts, self._parts = self._parts, []
        return b"".join(parts)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def _arrow_stream(schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> Iterator[bytes]:
    """A stream of batches. What goes wrong on the way, when status 200 was said long ago, stands beside a last batch without
    rows; and there is no end, so that nobody takes it for one."""
    chunks = _Chunks()
    with pa.ipc.new_stream(chunks, schema) as stream:
        try:
            for batch in batches:
                stream.write_batch(batch)
                yield chunks.take()
        except WarrenError as error:
            nothing = pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
            stream.write_batch(nothing, custom_metadata={STREAM_ERROR: str(error)})
            yield chunks.take()
            raise
    yield chunks.take()


def _pinned(certificate: str) -> ssl.SSLContext:
    """Trusts the node's own certificate, whoever signed it and whatever name is in it: it is on this machine."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(certificate)
    return context


def _refusal(status: int, code: str, reason: str) -> Response:
    return JSONResponse({"error": code, "reason": reason}, status)


class _Connection(HttpConnection):
    most = 4096  # every task that runs has one, in a cluster


class _Server(HttpServer):
    def install_signal_handlers(self) -> None:
        pass


def main() -> int:
    """Serve until standard input ends."""
    said = json.loads(sys.stdin.readline())
    try:
        family = socket.AF_INET6 if ":" in said["host"] else socket.AF_INET
        listener = socket.create_server((said["host"], said["port"]), family=family, backlog=128)
    except OSError as error:
        print(json.dumps({"error": f"cannot listen on {said['host']}:{said['port']}: {error.strerror}"}), flush=True)
        return 1
    certificate: tuple[str, str] | None = tuple(said["certificate"]) if said["certificate"] else None
    key = bytes.fromhex(said["key"])
    data_server = DataServer(key, said["stamps"], said["node"], certificate[0] if certificate is not None else None)
    config = http_config(data_server.application(), certificate, _Connection)
    server = _Server(config)

    def watch() -> None:
        for line in sys.stdin:
            changed = json.loads(line)
            data_server.stamps = {**data_server.stamps, changed["user"]: changed["stamps"]}
            print("{}", flush=True)
        server.should_exit = True

    threading.Thread(target=watch, daemon=True).start()
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
    asyncio.run(server.serve([listener]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
