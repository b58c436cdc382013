"""A work queue: threads take jobs, failed ones come back, and what a killed run left is done by the next.

python examples/work_queue.py data/
"""

from __future__ import annotations

import sys
import threading

import warren

WORKERS = 4
JOBS = 100


def work(job: warren.Message) -> None:
    """Every tenth job fails at its first attempt."""
    if int(job.body) % 10 == 0 and job.delivery_count == 0:
        raise RuntimeError(f"job {int(job.body)} failed")


def worker(queue: warren.Queue, done: list[int], failed: list[int]) -> None:
    while (job := queue.get(timeout=0.2)) is not None:
        try:
            work(job)
        except RuntimeError:
            failed.append(int(job.body))
            job.nack()  # back to its place; delivery_count says how often
        else:
            done.append(int(job.body))
            job.ack()


def main(directory: str) -> None:
    with warren.open(directory) as store:
        # After three returns a job is dropped, so that a broken one does not go round for ever.
        queue = store.queue("jobs", arguments={"x-delivery-limit": 3})
        print(f"{len(queue)} jobs were left by the last run")
        queue.publish_many([b"%d" % number for number in range(JOBS)])
        store.sync()  # from here on they survive a power failure

        done: list[int] = []
        failed: list[int] = []
        threads = [threading.Thread(target=worker, args=(queue, done, failed)) for _ in range(WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(f"{len(done)} jobs done, {len(failed)} of them at the second attempt, {len(queue)} left")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "mystore")
