"""Celery: an application whose tasks, results and worker commands all go through Warren.

warren serve &
celery --workdir examples -A broker_celery worker &
python examples/broker_celery.py
"""

from __future__ import annotations

import os

from celery import Celery, chain

URL = os.environ.get("AMQP_URL", "amqp://guest:guest@localhost/")

app = Celery("shop", broker=URL, backend="rpc://")
app.conf.update(
    broker_connection_retry_on_startup=True,
    broker_transport_options={"confirm_publish": True},  # delay() returns when the task is safe on the broker's disk
    task_acks_late=True,  # a task whose worker died is given to another one
    task_reject_on_worker_lost=True,
    task_queue_max_priority=10,
    task_default_priority=5,
    worker_prefetch_multiplier=1,
)


@app.task
def price(article: str) -> int:
    return len(article) * 100


@app.task
def with_tax(amount: int) -> int:
    return amount * 119 // 100


@app.task(bind=True, max_retries=3)
def ship(self, article: str) -> str:  # type: ignore[no-untyped-def]
    """The lorry comes at the second call."""
    if self.request.retries == 0:
        raise self.retry(countdown=0.1)
    return f"{article} is on its way"


def main() -> None:
    total = chain(price.s("book"), with_tax.s()).apply_async(priority=9)
    shipped = ship.delay("book")
    print(f"{total.get(timeout=60)} to pay, {shipped.get(timeout=60)}")


if __name__ == "__main__":
    # As the worker knows them: tasks of a program's __main__ would have other names.
    import broker_celery

    broker_celery.main()
