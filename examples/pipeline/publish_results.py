"""Results back into an exchange, each once: a DataFrame as a batch, and an aggregate as a stream.

python examples/pipeline/publish_results.py state/
"""

from __future__ import annotations

import os
import sys

from pyspark.sql.functions import col, concat, count, from_json, lit, struct, sum, to_json, window

from warren.pipeline.session import spark_session

BROKER = {"url": os.environ.get("WARREN_URL", "http://127.0.0.1:15672"), "user": "guest", "password": "guest"}
STATE = sys.argv[1]
spark = spark_session(app="results")

# A batch. Columns are what a message has: body, routing_key, headers, any property. All rows are published, or none.
prices = spark.createDataFrame([("book", 12.5), ("lamp", 40.0)], "article string, price double")
messages = prices.select(
    to_json(struct("article", "price")).alias("body"), concat(lit("price."), "article").alias("routing_key")
)
messages.write.format("warren").mode("append").options(**BROKER, exchange="shop").save()

# A stream: orders come in from a queue. What a country bought in a second goes out, once that second is over.
order = from_json(col("body").cast("string"), "country string, amount double")
orders = spark.readStream.format("warren").options(**BROKER, queue="orders", lease="revenue").load()
seconds = orders.select("published_at", order.alias("order")).withWatermark("published_at", "0 seconds")
revenue = seconds.groupBy(window("published_at", "1 second"), "order.country").agg(
    count("*").alias("orders"), sum("order.amount").alias("revenue")
)
results = revenue.select(to_json(struct("*")).alias("body"), concat(lit("revenue."), "country").alias("routing_key"))
sink = results.writeStream.format("warren").options(**BROKER, exchange="shop")
sink.option("checkpointLocation", f"{STATE}/revenue").trigger(availableNow=True).start().awaitTermination()
