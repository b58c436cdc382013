"""The tests are tested: four mistakes that a queue engine can make are planted, and the machine must find each.

A mutant is the engine with one method changed. The same short run, without a mutant, finds nothing: so it is the mutant
that was found, and the message of the assertion says for what.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.backing_queue_machine import VariableTable
from tests.small_engine import open_engine, publish
from tests.test_variable_queue_traces import containers
from warren.kernel.entry import Entry, entry_ranges
from warren.storage.segment import SegmentFiles
from warren.storage.seq_ids import SeqIds
from warren.storage.variable_queue import VariableQueue

Patch = pytest.MonkeyPatch
EXAMPLES = 1000  # at most: it ends with the first that fails


def run_the_machine(examples: int) -> None:
    run_state_machine_as_test(
        VariableTable,
        settings=settings(
            derandomize=True,  # the same examples every time
            max_examples=examples,
            stateful_step_count=25,
            database=None,
            phases=[Phase.generate],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


def keep_everything_in_one_deque(patch: Patch) -> None:
    """Nothing is ever paged, so all messages are alphas in q4: fast, right, and without a bound."""
    patch.setattr(VariableQueue, "_reduce_memory", lambda self: None)


def confirm_before_the_sync(patch: Patch) -> None:
    """In the buffer is as good as on the disk."""
    original = VariableQueue.publish

    def publish(self: VariableQueue, entries: list[Entry], confirm: bool = False) -> None:
        pairs = entry_ranges(entries)
        original(self, entries, False)
        if confirm:
            self._confirmed += pairs

    patch.setattr(VariableQueue, "publish", publish)


def skip_an_ack_at_the_checkpoint(patch: Patch) -> None:
    """The first ack of each batch is not written to .qa, and the journal that had it goes."""
    original = SegmentFiles.ack_batch

    def ack_batch(self: SegmentFiles, lsn: int, acks: list[int], counts: dict[int, int]) -> bytes:
        return original(self, lsn, acks[2:], counts)

    patch.setattr(SegmentFiles, "ack_batch", ack_batch)


def reuse_a_seq_id(patch: Patch) -> None:
    """Reservations are granted without a record, so a crash forgets what was handed out."""

    def reserve(self: SeqIds, upto: int) -> None:
        self._asked = self.reserved = upto

    patch.setattr(SeqIds, "_reserve", reserve)


MUTANTS: list[tuple[Callable[[Patch], None], str]] = [
    (keep_everything_in_one_deque, "more in RAM than allowed"),
    (confirm_before_the_sync, "confirmed before it was safe"),
    (skip_an_ack_at_the_checkpoint, "was acked, and that was synced|messages out of nowhere"),
    (reuse_a_seq_id, "handed out twice|handed out before"),
]


@pytest.mark.parametrize(("plant", "found"), MUTANTS, ids=lambda value: getattr(value, "__name__", None))
def test_the_machine_finds_the_mutant(plant: Callable[[Patch], None], found: str, monkeypatch: Patch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=found):
        run_the_machine(EXAMPLES)


def test_a_run_that_failed_is_printed_as_a_program_that_fails_in_the_same_way(monkeypatch: Patch) -> None:
    reuse_a_seq_id(monkeypatch)
    with pytest.raises(AssertionError, match=r"handed out twice|handed out before") as caught:
        run_the_machine(EXAMPLES)
    printed = "\n".join(getattr(caught.value, "__notes__", []))
    program = printed[printed.index("state = ") : printed.index("state.teardown()")]
    lines = ["from tests.backing_queue_machine import *", *program.splitlines()]
    names: dict[str, Any] = {}
    with pytest.raises(AssertionError, match=r"handed out twice|handed out before"):
        exec("\n".join(line.strip() for line in lines), names)
    names["state"].store.abandon()
    names["state"]._temporary.cleanup()


def test_the_same_run_finds_nothing_without_a_mutant(scale) -> None:
    run_the_machine(scale.scale(EXAMPLES))


def test_the_trace_finds_the_one_deque(tmp_path, monkeypatch: Patch) -> None:
    keep_everything_in_one_deque(monkeypatch)
    store = open_engine(str(tmp_path), segment_entries=4)
    queue = store.declare("q")
    publish(store, queue, 10)
    assert isinstance(queue.backing, VariableQueue)
    queue.backing.set_ram_target(4)
    assert containers(queue.backing) == ([*range(10)], [], None, [], []), "the trace has q4=[0..3], q3=[4..7], delta"
    store.abandon()
