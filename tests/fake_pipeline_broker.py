"""The pipeline's HTTP interface in memory: for tests of what Spark's side does when the broker's side misbehaves, and of
plans without a store.

One queue is a list of bodies, a checkout some positions of it; the data server is the same server. What the real broker
does with journals and permissions is tested with the real broker.
"""

from __future__ import annotations

import base64
import contextlib
import json
import ssl
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pyarrow as pa

TICKET = "a-ticket"


class Refused(Exception):
    """A refusal with a status of HTTP, a code and a reason."""

    def __init__(self, status: int, code: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.code, self.reason = status, code, reason


class FakeBroker:
    """State, and a method for every request."""

    def __init__(self) -> None:
        self.queues: dict[str, list[bytes]] = {}
        self.acked: dict[str, set[int]] = defaultdict(set)
        self.checkouts: dict[int, dict[str, list[int]]] = {}
        self.floor = 0
        self.next = 1
        self.epoch = 0
        self.holder: str | None = None
        self.held = 0  # how often leases/open is refused
        self.stages: dict[str, list[tuple[bytes, bytes]]] = {}
        self.uploads = 0
        self.decided: dict[str, list[str]] = defaultdict(list)
        self.published: list[tuple[bytes, bytes]] = []
        self.dropped: list[str] = []
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.authorizations: set[str] = set()
        self.faults: list[Callable[[str], None]] = []  # each is asked before a request, and may raise
        self.lock = threading.RLock()
        self.url = ""

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def ready(self, queue: str) -> list[int]:
        taken = {position for frozen in self.checkouts.values() for position in frozen.get(queue, ())}
        return [n for n in range(len(self.queues[queue])) if n not in self.acked[queue] and n not in taken]

    # ---- leases ----

    def leases_open(self, lease: str, owner: str, takeover: bool, starting: str, **_: Any) -> dict[str, Any]:
        if self.held and not takeover:
            self.held -= 1
            raise Refused(409, "held", f"lease {lease!r} is held by {self.holder!r}")
        self.epoch += 1
        self.holder = owner
        ready = sum(len(self.ready(queue)) for queue in self.queues)
        return {
            "epoch": self.epoch,
            "born": 7,
            "floor": self.floor,
            "next": self.next,
            "queues": sorted(self.queues),
            "ready": ready,
            "heartbeat_seconds": 0.05,
        }

    def _fenced(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise Refused(409, "fenced", f"epoch {epoch} is old: {self.epoch} has the lease")

    def leases_next(
        self, epoch: int, start: int, max_rows: int | None, max_bytes: int | None, min_rows: int | None, **_: Any
    ) -> dict[str, Any]:
        self._fenced(epoch)
        if self.floor > start:
            raise Refused(409, "data_loss", f"checkouts up to {self.floor} are settled")
        for number in [n for n in self.checkouts if n <= start]:
            for queue, positions in self.checkouts.pop(number).items():
                self.acked[queue].update(positions)
        self.floor = max(self.floor, start)
        self.next = max(self.next, start + 1)
        if start + 1 not in self.checkouts:
            frozen = self._freeze(max_rows, max_bytes)
            count = sum(map(len, frozen.values()))
            if count == 0 or count < (min_rows or 0):
                return {"end": start, "rows": 0, "bytes": 0, "ready": self._all_ready()}
            self.checkouts[start + 1] = frozen
            self.next = start + 2
        frozen = self.checkouts[start + 1]
        rows = sum(map(len, frozen.values()))
        size = sum(len(self.queues[queue][n]) for queue, positions in frozen.items() for n in positions)
        return {"end": start + 1, "rows": rows, "bytes": size, "ready": self._all_ready()}

    def _freeze(self, max_rows: int | None, max_bytes: int | None) -> dict[str, list[int]]:
        frozen: dict[str, list[int]] = defaultdict(list)
        rows = size = 0
        for queue in sorted(self.queues):
            for position in self.ready(queue):
                if max_rows is not None and rows >= max_rows:
                    return frozen
                size += len(self.queues[queue][position])
                if max_bytes is not None and rows and size > max_bytes:
                    return frozen
                frozen[queue].append(position)
                rows += 1
        return frozen

    def _all_ready(self) -> int:
        return sum(len(self.ready(queue)) for queue in self.queues)

    def leases_describe(self, epoch: int, first: int, last: int, **_: Any) -> dict[str, Any]:
        self._fenced(epoch)
        checkouts = []
        for number in range(first, last + 1):
            if number not in self.checkouts:
                raise Refused(409, "data_loss", f"there is no checkout {number}")
            streams = [
                {"queue": queue, "sid": self._sid(queue), "count": len(positions), "ranges": packed(positions)}
                for queue, positions in sorted(self.checkouts[number].items())
            ]
            checkouts.append({"number": number, "streams": streams})
        place = {"root": "/nowhere", "host": "another machine", "ticket": TICKET, "data_url": self.url}
        return {"checkouts": checkouts, **place}

    def _sid(self, queue: str) -> int:
        return 256 * (sorted(self.queues).index(queue) + 1)

    def leases_heartbeat(self, epoch: int, **_: Any) -> dict[str, Any]:
        self._fenced(epoch)
        return {}

    def checkouts_read(
        self, number: int, sid: int, first: int, stop: int, columns: list[str], **_: Any
    ) -> list[pa.RecordBatch]:
        queue = sorted(self.queues)[sid // 256 - 1]
        positions = [n for n in self.checkouts[number][queue] if first <= n < stop]
        values = {
            "queue": pa.array([queue] * len(positions), pa.string()),
            "seq_id": pa.array(positions, pa.int64()),
            "body": pa.array([self.queues[queue][n] for n in positions], pa.binary()),
        }
        return [pa.RecordBatch.from_arrays([values[name] for name in columns], names=columns)]

    # ---- stages ----

    def stages_open(self, writer: str, **_: Any) -> dict[str, Any]:
        decided = self.decided[writer][-1] if self.decided[writer] else None
        return {"ticket": TICKET, "data_url": self.url, "decided": decided}

    def stage(self, query: dict[str, str], batches: list[pa.RecordBatch]) -> dict[str, Any]:
        self.uploads += 1
        name = f"{query['writer']}:{query['batch']}:{query['partition']}:{query['attempt']}:{self.uploads}"
        rows = [(row["head"], row["body"]) for batch in batches for row in batch.to_pylist()]
        self.stages[name] = rows
        return {"name": name, "count": len(rows), "bytes": sum(len(body) for _, body in rows)}

    def stages_decide(self, writer: str, batch: str, stages: list[str], **_: Any) -> dict[str, Any]:
        duplicate = batch in self.decided[writer]
        if not duplicate:
            self.decided[writer].append(batch)
            for name in stages:
                self.published += self.stages[name]
        rows = sum(len(self.stages.pop(name)) for name in stages)
        return {"decided": True, "duplicate": duplicate, "released": True, "count": rows}

    def stages_drop(self, stages: list[str], **_: Any) -> dict[str, Any]:
        for name in stages:
            self.stages.pop(name)
            self.dropped.append(name)
        return {}

    def token(self) -> dict[str, Any]:
        return {"token": "a-token", "expires_at": 2_000_000_000}


def packed(positions: list[int]) -> str:
    """As ranges: pairs of first and count."""
    pairs: list[list[int]] = []
    for position in positions:
        if pairs and pairs[-1][0] + pairs[-1][1] == position:
            pairs[-1][1] += 1
        else:
            pairs.append([position, 1])
    return base64.b64encode(b"".join(struct.pack("<QQ", *pair) for pair in pairs)).decode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeBroker

    def do_POST(self) -> None:
        parts = urlsplit(self.path)
        name = parts.path.removeprefix("/api/pipeline").strip("/")
        body = self._body()
        try:
            for fault in list(self.fake.faults):
                fault(name)
            with self.fake.lock:
                self.fake.authorizations.add(self.headers.get("Authorization", ""))
                content, kind = self._answer(name, dict(parse_qsl(parts.query)), body)
            status = 200
        except Refused as refused:
            status, kind = refused.status, "application/json"
            content = json.dumps({"error": refused.code, "reason": refused.reason}).encode()
        except ConnectionAbortedError:
            self.close_connection = True
            return
        except Exception as error:  # the test that asked shall say so
            status, kind = 500, "application/json"
            content = json.dumps({"error": "failed", "reason": repr(error)}).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.write(content)

    def _answer(self, name: str, query: dict[str, str], body: bytes) -> tuple[bytes, str]:
        if name == "stages":
            with pa.ipc.open_stream(body) as reader:
                answer = self.fake.stage(query, list(reader))
            return json.dumps(answer).encode(), "application/json"
        arguments = json.loads(body)
        self.fake.calls.append((name, arguments))
        found = getattr(self.fake, name.replace("/", "_"))(**arguments)
        if isinstance(found, dict):
            return json.dumps(found).encode(), "application/json"
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, found[0].schema) as writer:
            for batch in found:
                writer.write_batch(batch)
        return sink.getvalue().to_pybytes(), "application/vnd.apache.arrow.stream"

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers["Content-Length"]))
        pieces = []
        while size := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def fake_broker(tls: ssl.SSLContext | None = None) -> Iterator[FakeBroker]:
    fake = FakeBroker()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"fake": fake}))
    server.daemon_threads = True
    fake.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.server_address[1]}"
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
