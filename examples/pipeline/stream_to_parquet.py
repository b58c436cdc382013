"""A queue into a lake, exactly once: everything that is ready now moves to Parquet, then the program ends.

Kill it at any point and run it again: no row is lost, none is there twice. What is in the lake has left the queue.

python examples/pipeline/stream_to_parquet.py lake/
"""

from __future__ import annotations

import os
import sys

from pyspark.sql.functions import col, from_json

from warren.pipeline.session import spark_session

URL = os.environ.get("WARREN_URL", "http://127.0.0.1:15672")
LAKE = sys.argv[1]

spark = spark_session(app="queue to lake")
messages = (
    spark.readStream.format("warren")
    .options(url=URL, user="guest", password="guest", queue="orders")
    .option("lease", "lake")  # the name of this stream at the broker, as a consumer group
    .option("maxOffsetsPerTrigger", 100_000)
    .load()
)
order = from_json(col("body").cast("string"), "id bigint, country string, amount double")
query = (
    messages.select("seq_id", "published_at", order.alias("order"), "body")
    .writeStream.format("parquet")
    .option("path", f"{LAKE}/orders")
    .option("checkpointLocation", f"{LAKE}/checkpoint")  # belongs to the lease: keep both, or neither
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
print(f"{spark.read.parquet(f'{LAKE}/orders').count()} orders are in the lake")
