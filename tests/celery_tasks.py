"""The Celery application of tests/test_clients_celery.py. A worker is started with it as
`celery -A tests.celery_tasks worker`; it finds its broker, its results and a directory for notes in the environment."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from celery import Celery
from kombu import Exchange, Queue
from kombu.common import Broadcast


def note(path: Path, text: str) -> None:
    """One line more, visible to the test at once."""
    with path.open("a") as file:
        file.write(f"{text}\n")


def use_quorum_queues(app: Celery) -> None:
    """What Celery 5.5 and later do otherwise with quorum queues, and the kinds of queues that older ones have made."""
    app.conf.update(
        task_queue_max_priority=None,
        task_default_priority=None,
        task_default_queue_type="quorum",
        task_default_exchange_type="topic",
        task_default_exchange="celery",
        worker_detect_quorum_queues=True,
        task_send_sent_event=True,
        task_queues=[
            Queue("celery", Exchange("celery", type="topic"), "celery", queue_arguments={"x-queue-type": "quorum"}),
            Queue("transient", durable=False, consumer_arguments={"x-priority": 7}),
            Broadcast("everybody"),
        ],
    )


def make_app(url: str, backend: str, notes: Path, *, quorum: bool = False) -> Celery:
    app = Celery("warren-tests", broker=url, backend=backend, set_as_current=False)
    app.conf.update(
        broker_connection_retry_on_startup=True,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        task_queue_max_priority=10,
        task_default_priority=5,
        worker_prefetch_multiplier=1,
        worker_hijack_root_logger=False,
        result_expires=60,
        result_chord_retry_interval=0.1,
    )

    if quorum:
        use_quorum_queues(app)

    # Not shared: a test makes several applications, and each has tasks of its own.
    @app.task(shared=False, name="add")
    def add(x: int, y: int) -> int:
        return x + y

    @app.task(shared=False, name="total")
    def total(numbers: list[int]) -> int:
        return sum(numbers)

    @app.task(shared=False, name="fail")
    def fail() -> None:
        raise ValueError("as asked")

    @app.task(shared=False, name="third_time_lucky", bind=True, max_retries=5)
    def third_time_lucky(self: Any) -> int:
        if self.request.retries < 2:
            raise self.retry(countdown=0.05)
        return int(self.request.retries)

    @app.task(shared=False, name="when")
    def when() -> float:
        return time.time()

    @app.task(shared=False, name="record")
    def record(text: str) -> None:
        note(notes / "records", text)

    @app.task(shared=False, name="hang_once")
    def hang_once() -> str:
        """Hangs the first time, until somebody kills the worker."""
        first = not (notes / "hung").exists()
        note(notes / "hung", str(os.getpid()))
        if first:
            time.sleep(600)
        return "done"

    @app.task(shared=False, name="echo")
    def echo(data: str) -> str:
        return data

    return app


if "WARREN_TEST_CELERY_URL" in os.environ:
    app = make_app(
        os.environ["WARREN_TEST_CELERY_URL"],
        os.environ["WARREN_TEST_CELERY_BACKEND"],
        Path(os.environ["WARREN_TEST_CELERY_NOTES"]),
        quorum=bool(os.environ.get("WARREN_TEST_CELERY_QUORUM")),
    )
