"""Where a job reads: a data directory at rest, or a running broker."""

from __future__ import annotations

import contextlib
import uuid
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

from warren.errors import StoreLockedError
from warren.pipeline.batch_source import has_credentials
from warren.pipeline.broker_client import BrokerClient, Credentials
from warren.pipeline.errors import PipelineError
from warren.pipeline.store_view import broker_url, owner_of, vhosts_of
from warren.storage.running_node import running_node

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SNAPSHOT_SECONDS = 600
_CHECK_SECONDS = 3.0  # for a broker that is about to come up


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """One vhost of a directory (or a snapshot), or of a broker. Secrets come from files or from the environment, never
    from here: this may be shown. As a context manager it lets go, at its end, of the snapshots that were read.

    >>> Origin(path="data").options()
    {'vhost': '/', 'path': 'data'}
    """

    path: str | None = None
    url: str | None = None
    vhost: str = "/"
    user: str | None = None
    password_file: str | None = None
    token_file: str | None = None
    ca_file: str | None = None
    access: str | None = None
    group: str = field(default_factory=lambda: f"job-{uuid.uuid4().hex}", compare=False)  # of its snapshots

    def __post_init__(self) -> None:
        if (self.path is None) == (self.url is None):
            what = "both a directory and a url are" if self.path is not None else "neither a directory nor a url is"
            raise PipelineError(
                f"{what} given; give a data directory, or --url, the HTTP address of a running broker such as "
                "http://127.0.0.1:15672"
            )

    @property
    def place(self) -> str:
        """For titles."""
        return self.path if self.path is not None else str(self.url)

    def options(self) -> dict[str, str]:
        """The options of the source (and of the sink) that say where."""
        given = {
            "vhost": self.vhost,
            "path": self.path,
            "url": self.url,
            "user": self.user,
            "passwordFile": self.password_file,
            "tokenFile": self.token_file,
            "caFile": self.ca_file,
            "access": self.access,
        }
        return {name: value for name, value in given.items() if value is not None}

    def read_options(self) -> dict[str, str]:
        """The options of a reading. A job that dies does not hold a broker's snapshot for long; tasks renew it."""
        return {**self.options(), "snapshotTtl": str(_SNAPSHOT_SECONDS), "snapshotGroup": self.group}

    def read(self, spark: SparkSession, **options: str | int | None) -> DataFrame:
        """A table of the source; options that are None are left out."""
        reader = spark.read.format("warren").options(**self.read_options())
        for name, value in options.items():
            if value is not None:
                reader = reader.option(name, str(value))
        return reader.load()

    def check(self) -> None:
        """Is there a store, or a broker that knows the user? To be asked before Spark is started, which takes its time.

        Raises PipelineError, or what else `open_view` raises."""
        if self.path is not None:
            root = vhosts_of(self.path).get(self.vhost)
            node = running_node(self.path)
            if root is not None and node is not None and owner_of(root) and not has_credentials(self.options()):
                raise StoreLockedError(
                    f"{self.path} is in use by {node}; ask it instead of the directory: --url {node.url} --user NAME, with "
                    "the password in WARREN_PASSWORD or --password-file. Or stop the broker"
                )
            return
        assert self.url is not None
        credentials = Credentials.from_options(self.options())
        with BrokerClient(self.url, credentials, ca_file=self.ca_file, retry_seconds=_CHECK_SECONDS) as client:
            client.call("snapshots/list", vhost=self.vhost)

    def __enter__(self) -> Origin:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What cannot be let go now has its time to live."""
        url = self.url if self.path is None else broker_url(self.path)
        if url is None:
            return
        with (
            contextlib.suppress(PipelineError),
            BrokerClient(
                url, Credentials.from_options(self.options()), ca_file=self.ca_file, retry_seconds=0
            ) as client,
        ):
            client.call("snapshots/release", vhost=self.vhost, group=self.group)

    def queues(self, spark: SparkSession) -> list[str]:
        """The names of the queues."""
        rows = self.read(spark, table="queues", columns="queue").collect()
        return sorted(row.queue for row in rows)
