"""Where a job reads: a data directory at rest, or a running broker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from warren.pipeline.errors import PipelineError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SNAPSHOT_SECONDS = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """One vhost of a directory (or a snapshot), or of a broker. Secrets come from files or from the environment, never
    from here: this may be shown.

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
        """The options of a reading. A job does not hold a broker's snapshot for long after its end; tasks renew it."""
        return self.options() if self.url is None else {**self.options(), "snapshotTtl": str(_SNAPSHOT_SECONDS)}

    def read(self, spark: SparkSession, **options: str | int | None) -> DataFrame:
        """A table of the source; options that are None are left out."""
        reader = spark.read.format("warren").options(**self.read_options())
        for name, value in options.items():
            if value is not None:
                reader = reader.option(name, str(value))
        return reader.load()

    def queues(self, spark: SparkSession) -> list[str]:
        """The names of the queues."""
        rows = self.read(spark, table="queues", columns="queue").collect()
        return sorted(row.queue for row in rows)
