"""From an empty machine to a windowed aggregate over a live queue, in ten lines.

pip install 'warrenmq[spark]' pika       # and Java 17 or newer
warren serve &
python examples/pipeline/publish_orders.py
python examples/pipeline/windowed_aggregate.py
"""

import os

from pyspark.sql.functions import col, count, from_json, sum, window

from warren.pipeline.session import spark_session

URL = os.environ.get("WARREN_URL", "http://127.0.0.1:15672")
spark = spark_session()
broker = {"url": URL, "user": "guest", "password": "guest"}
orders = spark.readStream.format("warren").options(**broker, queue="orders", mode="tap").load()
order = from_json(col("body").cast("string"), "id bigint, country string, amount double")
minutes = orders.withColumn("order", order).groupBy(window("published_at", "1 minute"), "order.country")
revenue = minutes.agg(count("*").alias("orders"), sum("order.amount").alias("revenue")).orderBy("window", "country")
revenue.writeStream.outputMode("complete").format("console").trigger(availableNow=True).start().awaitTermination()
