"""The sink, batch and streaming: every row is published exactly once, and a batch as a whole or not at all.

Two phases. A task *stages* its rows: they go to the data server beside the broker, which answers when they are durable, under
a name that no other attempt has. Nobody can consume them. The driver then *decides*: one request names the stages of the
batch, the broker writes one record, and from there on it publishes them, whatever dies.

Rules:

1. What `write` did counts only if its commit message reached `commit`. So a task that runs twice, is killed, or races
   with its speculative copy, does no harm: stages that no decision names are dropped.
2. A batch is decided once. Its identity is the query's id and the batch's number, which a restarted query has again; row
   positions, partitions and attempts are no part of it, so a repetition may be split in another way.
3. The *writer* is the name under which the broker remembers the last decision: option producerName, else the query's id
   out of its checkpoint, else its name. Two queries that run at once must not share one.
4. Executors get a ticket for the stages of that writer, and never credentials. The batch writer travels between processes
   of the driver in the same way as to executors; so its token waits in a file that only the driver's user can read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from warren.pipeline.broker_client import FIRST_SECONDS, BrokerClient, Credentials
from warren.pipeline.errors import BrokerError, CredentialsError, OptionError, PipelineError
from warren.pipeline.options import checked_options, truth, whole_number

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

log = logging.getLogger("warren.pipeline")

DEFAULT_STAGE_BYTES = 32 * 1024 * 1024
DECIDE_SECONDS = 600.0  # a queue that is full holds the last batch, and the next decision waits for it
STAGE_SECONDS = 600.0  # what others have staged fills the place that there is for stages
ABORT_SECONDS = 5.0  # stages that are not dropped now are dropped later

_OPTIONS_OF_SPARK = frozenset({"queryname", "checkpointlocation", "outputmode"})  # it passes them on
_BATCH_PROPERTY = "streaming.sql.batchId"
_QUERY_PROPERTY = "sql.streaming.queryId"


@dataclass(frozen=True, slots=True)
class SinkSettings:
    """The options of a sink, checked. No secret is among them: this travels to executors."""

    url: str
    vhost: str
    exchange: str | None  # None: as the column says
    routing_key: str | None
    producer: str | None
    max_stage_bytes: int  # a task has as many stages as it needs
    mandatory: bool  # rows that no queue takes are an error, and not only counted
    ca_file: str | None

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> SinkSettings:
        ours = {name: value for name, value in options.items() if name.lower() not in _OPTIONS_OF_SPARK}
        given = checked_options(ours, "write")
        if not given.get("url"):
            raise OptionError(
                "option url is missing: a sink writes to a running broker, for example http://127.0.0.1:15672"
            )
        return cls(
            url=given["url"],
            vhost=given.get("vhost", "/"),
            exchange=given.get("exchange"),
            routing_key=given.get("routingKey"),
            producer=given.get("producerName"),
            max_stage_bytes=whole_number(given, "maxStageBytes", 1) or DEFAULT_STAGE_BYTES,
            mandatory=truth(given, "mandatory", False),
            ca_file=given.get("caFile"),
        )


@dataclass
class Staged(WriterCommitMessage):
    """What a task staged."""

    batch: str
    stages: tuple[str, ...]
    count: int


class _Stages:
    """What both writers do: on the driver with credentials, on executors with a ticket."""

    def __init__(self, settings: SinkSettings, writer: str, credentials: Credentials | None) -> None:
        self._settings = settings
        self.writer = writer
        self._credentials = credentials
        self._ticket: tuple[str, str] | None = None  # and the address of the data server

    def __getstate__(self) -> dict[str, Any]:
        """For an executor: a ticket in the place of credentials. Asks the broker for it, who may refuse."""
        return {
            "_settings": self._settings,
            "writer": self.writer,
            "_credentials": None,
            "_ticket": self.ticket(),
        }

    def ticket(self) -> tuple[str, str]:
        if self._ticket is None:
            with self._client() as client:
                answer = client.call("stages/open", vhost=self._settings.vhost, writer=self.writer, batch=None)
            self._ticket = answer["ticket"], answer["data_url"]
        return self._ticket

    def _client(self) -> BrokerClient:
        return BrokerClient(self._settings.url, self._credentials, ca_file=self._settings.ca_file)

    # -- on executors --------------------------------------------------------------------------------------------------

    def stage(self, batch: str, partition: int, attempt: int, rows: Iterator[pa.RecordBatch]) -> Staged:
        """Durable when it returns. Rows are kept until a stage is full, so that one can be sent again."""
        from warren.pipeline.amqp_rows import MessageEncoder

        settings = self._settings
        ticket, data_url = self.ticket()
        encoder = MessageEncoder(settings.exchange, settings.routing_key)
        where = {
            "vhost": settings.vhost,
            "writer": self.writer,
            "batch": batch,
            "partition": partition,
            "attempt": attempt,
        }
        names: list[str] = []
        count = 0

        def send(messages: list[pa.RecordBatch]) -> int:
            answer = client.upload(data_url, "/stages", ticket, messages, where, STAGE_SECONDS)
            expected: int = sum(message.num_rows for message in messages)
            if answer["count"] != expected:
                raise PipelineError(f"the data server at {data_url} staged {answer['count']} rows of {expected}")
            names.append(answer["name"])
            return expected

        with BrokerClient(settings.url, ca_file=settings.ca_file) as client:
            waiting: list[pa.RecordBatch] = []
            size = 0
            for batch_of_rows in rows:
                for message in encoder.encode(batch_of_rows):
                    waiting.append(message)
                    size += message.nbytes
                    if size >= settings.max_stage_bytes:
                        count += send(waiting)
                        waiting, size = [], 0
            if waiting:
                count += send(waiting)
        return Staged(batch, tuple(names), count)

    # -- on the driver -------------------------------------------------------------------------------------------------

    def decide(self, batch: str, messages: list[Staged | None]) -> None:
        stages = _names(messages)
        if not stages:
            return
        with self._client() as client:
            answer = client.call(
                "stages/decide",
                busy_seconds=DECIDE_SECONDS,
                vhost=self._settings.vhost,
                writer=self.writer,
                batch=batch,
                stages=stages,
                mandatory=self._settings.mandatory,
            )
        if answer.get("unroutable"):
            log.warning(
                "%d of %d rows of batch %s were dropped, because no queue takes them; the broker's log says where they were "
                "sent. mandatory=true makes that an error",
                answer["unroutable"],
                answer["count"],
                batch,
            )

    def drop(self, messages: list[Staged | None]) -> None:
        """The batch failed, and Spark is about to say why. What cannot be dropped now, the broker drops later."""
        stages = _names(messages)
        if not stages:
            return
        try:
            with self._client() as client:
                client.call(
                    "stages/drop",
                    retry_seconds=ABORT_SECONDS,
                    vhost=self._settings.vhost,
                    writer=self.writer,
                    stages=stages,
                )
        except PipelineError as error:
            log.warning("%d stages of writer %r are left to the broker: %s", len(stages), self.writer, error)


def _names(messages: list[Staged | None]) -> list[str]:
    """Of the stages that tasks told of; a task that failed told of none."""
    return [name for message in messages if message is not None for name in message.stages]


# ---- streaming ----


class WarrenStreamWriter(DataSourceStreamArrowWriter):
    """Publishes the batches of a streaming query. Made anew for every batch, and once more for its commit."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        from warren.pipeline.amqp_rows import check_columns

        settings = SinkSettings.from_options(options)
        given = {name.lower(): value for name, value in options.items()}
        check_columns(schema, settings.exchange, settings.routing_key)
        writer = settings.producer or _writer_of_checkpoint(given.get("checkpointlocation"), given.get("queryname"))
        self._stages = _Stages(settings, writer, Credentials.from_options(options))

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        query, batch = context.getLocalProperty(_QUERY_PROPERTY), context.getLocalProperty(_BATCH_PROPERTY)
        assert query is not None
        assert batch is not None
        # Without dashes: the broker's names of stages are separated by them.
        identity = f"{query.replace('-', '')}.{batch}"
        return self._stages.stage(identity, context.partitionId(), context.taskAttemptId(), iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        staged = _checked(messages)
        for message in staged:
            if message is not None:
                self._stages.decide(message.batch, staged)
                return

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._stages.drop(_checked(messages))


def _writer_of_checkpoint(location: str | None, query_name: str | None) -> str:
    """The name of a query that is the same after a restart, from what a writer is told on the driver.

    Where the checkpoint is a local directory, its file `metadata` has the query's id. Elsewhere the location itself has to
    do; batches carry the query's id anyway, so a new checkpoint in an old place is not taken for a repetition. A query
    without either is refused, as a checkpoint of the session's configuration is not told to writers: one writer stages,
    another one decides, and both must come to the same name."""
    if location is not None:
        parts = urlsplit(location)
        if parts.scheme in ("", "file"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                path = unquote(parts.path) if parts.scheme else location
                return f"spark-{json.loads((Path(path) / 'metadata').read_text())['id']}"
        return "spark-" + hashlib.sha256(location.rstrip("/").encode()).hexdigest()[:32]
    if query_name is not None:
        return "spark-" + hashlib.sha256(query_name.encode()).hexdigest()[:32]
    raise OptionError(
        "a streaming sink needs a name that lasts, and has none: give the query option checkpointLocation or queryName, or "
        "the sink option producerName. spark.sql.streaming.checkpointLocation is not enough: Spark does not tell sinks of it"
    )


def _checked(messages: list[WriterCommitMessage | None]) -> list[Staged | None]:
    for message in messages:
        assert message is None or isinstance(message, Staged)
    return messages  # type: ignore[return-value]


# ---- batch ----


class WarrenBatchWriter(DataSourceArrowWriter):
    """Publishes a DataFrame, all of it or nothing."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        from warren.pipeline.amqp_rows import check_columns

        self._settings = settings = SinkSettings.from_options(options)
        check_columns(schema, settings.exchange, settings.routing_key)
        credentials = Credentials.from_options(options)
        identity = uuid.uuid4().hex
        # A writer of its own for every write: two of them at once must not forget each other's decisions.
        name = f"{settings.producer}-{identity}" if settings.producer else f"spark-{identity}"
        self._stages = _Stages(settings, name, credentials)
        with BrokerClient(settings.url, credentials, first_seconds=FIRST_SECONDS, ca_file=settings.ca_file) as client:
            token = client.call("token")["token"]
        self._stages.ticket()  # here, where a refusal is told as it is, and no token waits yet
        self._token_file = _leave(token)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        return self._stages.stage("0", context.partitionId(), context.taskAttemptId(), iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        try:
            token = Path(self._token_file).read_text()
        except OSError as error:
            raise CredentialsError(
                f"the driver's token in {self._token_file} is gone ({error.strerror}): nothing was published, write again"
            ) from error
        try:
            self._with(token).decide("0", _checked(messages))
        except PipelineError as error:
            if isinstance(error, BrokerError) and error.code != "unavailable":
                raise  # it was refused: nothing was published
            raise PipelineError(
                f"it is not known whether the rows were published: the decision was sent, and no answer came ({error}). When "
                f"the broker is back, POST /api/pipeline/stages/status with writer {self._stages.writer!r} says decided: "
                f"'0' if they were, and null if not; write again only then"
            ) from error
        self._forget_token()

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Spark is about to say why: also when `commit` failed, whose batch the broker keeps if it was decided."""
        try:
            token = Path(self._token_file).read_text()
        except OSError as error:
            log.warning("the stages of writer %r are left to the broker: %s", self._stages.writer, error)
            return
        self._with(token).drop(_checked(messages))
        self._forget_token()

    def _with(self, token: str) -> _Stages:
        return _Stages(self._settings, self._stages.writer, Credentials(token=token))

    def _forget_token(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._token_file)


def _leave(token: str) -> str:
    """For the driver's process that commits: it gets the writer as executors do, without credentials."""
    descriptor, path = tempfile.mkstemp(prefix="warren-token-")  # readable for this user alone
    with os.fdopen(descriptor, "w") as file:
        file.write(token)
    return path
