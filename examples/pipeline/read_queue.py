"""A live queue as a table: what is in it now, in SQL. Nothing is consumed, and no consumer notices.

warren serve &
python examples/pipeline/publish_orders.py
python examples/pipeline/read_queue.py
"""

from __future__ import annotations

import os

from warren.pipeline.session import spark_session

URL = os.environ.get("WARREN_URL", "http://127.0.0.1:15672")

spark = spark_session(app="read a queue")
orders = spark.read.format("warren").options(url=URL, user="guest", password="guest", queue="orders").load()
orders.createOrReplaceTempView("orders")

spark.sql("""
    select routing_key, state, count(*) as messages, sum(size) as bytes, max(published_at) as newest
    from orders group by routing_key, state order by routing_key
""").show(truncate=False)

# Bodies are bytes; what they mean is up to the reader. A body that is no JSON is null here, and no error.
spark.sql("""
    select order.country, count(*) as orders, round(sum(order.amount), 2) as revenue
    from (select from_json(cast(body as string), 'country string, amount double') as order from orders)
    group by 1 order by revenue desc
""").show()
