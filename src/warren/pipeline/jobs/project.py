"""`warren spark init`: a project of Spark Declarative Pipelines that reads a queue and feeds an exchange.

    spark-pipeline.yml              name, storage, where the definitions are
    conf/spark-defaults.conf        settings that Spark takes at its start only: where the catalog is
    pipeline                        `spark-pipelines` with these settings
    transformations/<queue>.py      queue -> streaming table -> materialized views -> exchange
    README.md                       how to run it

It runs as it is, with `./pipeline run`: what is in the queue is moved into a table, exactly once, and a word about
each message goes to an exchange, exactly once. Spark runs such a project from beginning to end and stops: what was
published meanwhile is for the next run. Who asks the broker is in the environment, never in the files.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass

from warren.pipeline.errors import PipelineError

_SPEC = """\
name: {name}
storage: {storage}
libraries:
  - glob:
      include: transformations/**
configuration:
  spark.sql.session.timeZone: UTC
"""

# Settings that cannot be changed once Spark runs, so they cannot be in the spec.
_DEFAULTS = """\
# The tables are known to the next run because the catalog is in a directory.
spark.sql.catalogImplementation hive
spark.sql.warehouse.dir {warehouse}
spark.hadoop.javax.jdo.option.ConnectionURL {connection}
spark.ui.enabled false
spark.ui.showConsoleProgress false
"""

_LOGGING = """\
# What Spark says on the way is of no interest; `level = info` shows it.
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{yyyy-MM-dd HH:mm:ss}: %p %c{1}: %m%n%ex
"""

_COMMAND = """\
#!/bin/sh
# ./pipeline run: as `spark-pipelines run`, with the settings of this project.
cd "$(dirname "$0")" || exit 1
SPARK_CONF_DIR="$PWD/conf" PYSPARK_PYTHON="${PYSPARK_PYTHON:-$(command -v python)}" exec spark-pipelines "$@"
"""

_TRANSFORMATION = '''\
"""A queue as a streaming table, views of it, and a word about each message to an exchange."""

import os

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

# Who asks is in the environment: WARREN_USER and WARREN_PASSWORD, or WARREN_TOKEN.
BROKER = {{"url": os.environ.get("WARREN_URL", {url}), "vhost": {vhost}}}
QUEUE = {queue}
LEASE = {lease}  # what this project has read of the queue; another project takes another name
EXCHANGE = {exchange}

spark = SparkSession.active()
if spark.conf.get("spark.sql.catalogImplementation") != "hive":
    # The next run would not know the tables of this one. Nothing has been read yet.
    raise SystemExit("the settings in conf/ are not in use: start with ./pipeline run, or set SPARK_CONF_DIR=$PWD/conf")


@dp.table(name={messages}, comment="Every message of the queue, once.")
def messages() -> DataFrame:
    return spark.readStream.format("warren").options(**BROKER).option("queue", QUEUE).option("lease", LEASE).load()


@dp.materialized_view(name={by_key}, comment="How many messages, and how large, by routing key.")
def by_routing_key() -> DataFrame:
    return (
        spark.read.table({messages})
        .groupBy("routing_key")
        .agg(
            F.count("*").alias("messages"),
            F.sum("size").alias("bytes"),
            F.min("published_at").alias("first"),
            F.max("published_at").alias("last"),
        )
    )


@dp.materialized_view(name={by_minute}, comment="How many messages were published in each minute.")
def by_minute() -> DataFrame:
    minute = F.window("published_at", "1 minute").start.alias("minute")
    return spark.read.table({messages}).groupBy(minute).agg(F.count("*").alias("messages"))


dp.create_sink({sink}, "warren", {{**BROKER, "exchange": EXCHANGE, "producerName": {lease}}})


@dp.append_flow(target={sink}, name={flow})
def seen() -> DataFrame:
    word = F.struct("queue", "seq_id", "routing_key", "size", "published_at")
    return spark.readStream.table({messages}).select(
        F.concat(F.lit("seen."), "queue").alias("routing_key"),
        F.to_json(word).alias("body"),
        F.lit("application/json").alias("content_type"),
    )
'''

_README = """\
# {name}

Queue `{queue}` of vhost `{vhost}` -> table `{messages}` -> views `{by_key}` and `{by_minute}`;
a word about each message goes to the exchange `{exchange}`, with the routing key `seen.<queue>`.

    pip install 'warrenmq[spark]' 'pyspark[pipelines]'
    export WARREN_URL={url} WARREN_USER=guest WARREN_PASSWORD=guest
    ./pipeline dry-run             # checks everything, reads nothing
    ./pipeline run                 # moves what is in the queue now, and stops

`./pipeline` is `spark-pipelines` with `SPARK_CONF_DIR=$PWD/conf`: settings that Spark takes only at its start.

A run can be killed at any moment and started again: no message is lost and none is there twice. The lease `{lease}` is
what this project has read; `warren leases list` shows it. `storage/` holds tables, checkpoints and the catalog:
without it, a run begins anew with what is left in the queue.
"""


@dataclass(frozen=True, slots=True)
class Project:
    """What was written."""

    directory: str
    name: str
    files: list[str]


def write_project(
    directory: str, *, queue: str, url: str, vhost: str = "/", exchange: str = "amq.topic", name: str | None = None
) -> Project:
    """Write a project to a directory that is new or empty. Raises PipelineError where it is neither."""
    directory = os.path.abspath(directory)
    if os.path.exists(directory) and (not os.path.isdir(directory) or os.listdir(directory)):
        raise PipelineError(f"{directory} exists and is not an empty directory; give one that is new or empty")
    for what, value in (("queue", queue), ("exchange", exchange), ("vhost", vhost)):
        if not value.isprintable() or not value:
            raise PipelineError(f"the {what} is {value!r}; a project is for names that can be printed")
    name = name or os.path.basename(directory)
    storage = os.path.join(directory, "storage")
    table = identifier(queue)
    words = {
        "name": name,
        "queue": queue,
        "url": url,
        "vhost": vhost,
        "exchange": exchange,
        "lease": f"{identifier(name)}-{table}",
        "messages": f"{table}_messages",
        "by_key": f"{table}_by_routing_key",
        "by_minute": f"{table}_by_minute",
        "sink": f"{table}_seen",
        "flow": f"{table}_to_exchange",
    }
    texts = {
        "spark-pipeline.yml": _SPEC.format(name=_yaml(name), storage=_yaml(f"file://{storage}")),
        os.path.join("conf", "spark-defaults.conf"): _DEFAULTS.format(
            warehouse=os.path.join(storage, "warehouse"),
            connection=f"jdbc:derby:;databaseName={os.path.join(storage, 'catalog')};create=true",
        ),
        os.path.join("transformations", f"{table}.py"): _TRANSFORMATION.format(
            **{key: json.dumps(word, ensure_ascii=False) for key, word in words.items()}
        ),
        os.path.join("conf", "log4j2.properties"): _LOGGING,
        "pipeline": _COMMAND,
        "README.md": _README.format(**words),
        ".gitignore": "storage/\nderby.log\n",
    }
    os.makedirs(storage)
    for file, text in texts.items():
        path = os.path.join(directory, file)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as out:
            out.write(text)
    os.chmod(os.path.join(directory, "pipeline"), 0o755)
    return Project(directory, name, sorted(texts))


def identifier(name: str) -> str:
    """A name as one of a table and of a file.

    >>> identifier("dead-letters.eu")
    'dead_letters_eu'
    """
    plain = re.sub(r"[^0-9a-z]+", "_", name.lower()).strip("_")
    return plain if plain and not plain[0].isdigit() else f"q_{plain}".rstrip("_")


def _yaml(text: str) -> str:
    """A text of YAML, in quotes."""
    return "'" + text.replace("'", "''") + "'"
