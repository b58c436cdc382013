"""A look over the shoulder of a queue's consumers: a stream that reads every message and consumes none.

What a consumer took before the tap came to it is not seen: for rows that must not be lost, use a lease.

python examples/pipeline/tap.py state/
"""

from __future__ import annotations

import os
import sys

from warren.pipeline.session import spark_session

URL = os.environ.get("WARREN_URL", "http://127.0.0.1:15672")
STATE = sys.argv[1]

spark = spark_session(app="tap")
messages = (
    spark.readStream.format("warren")
    .options(url=URL, user="guest", password="guest")
    .options(queuePattern="orders.*", mode="tap")  # queues that appear later belong to it as well
    .option("columns", "queue,seq_id,routing_key,size,redelivered")  # bodies are not even read
    .load()
)
query = (
    messages.writeStream.format("parquet")
    .option("path", f"{STATE}/seen")
    .option("checkpointLocation", f"{STATE}/checkpoint")  # how far it has read, for the next run
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
spark.read.parquet(f"{STATE}/seen").groupBy("queue").count().show()
