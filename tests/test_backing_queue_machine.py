"""One state machine for all backing queues, with both indexes of the message store.

`backing_queue_machine.py` is the machine. A failing run is printed as a program that can be pasted after
`from tests.backing_queue_machine import *`, and run as it is.
"""

from __future__ import annotations

import logging

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.backing_queue_machine import (
    BackingQueueMachine,
    PriorityLmdb,
    PriorityTable,
    SqliteLmdb,
    SqliteTable,
    VariableLmdb,
    VariableTable,
    VolatileLmdb,
    VolatileTable,
)

# With the share of the examples: the variable queue has most to get wrong, the volatile one least.
MACHINES: tuple[tuple[type[BackingQueueMachine], float], ...] = (
    (VariableTable, 0.25),
    (VariableLmdb, 0.25),
    (PriorityTable, 0.125),
    (PriorityLmdb, 0.125),
    (SqliteTable, 0.1),
    (SqliteLmdb, 0.05),
    (VolatileTable, 0.05),
    (VolatileLmdb, 0.05),
)
EXAMPLES = 20_000  # of a full run, over all machines
STEPS = 25


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("machine", "share"), MACHINES, ids=[machine.__name__ for machine, _ in MACHINES])
def test_a_backing_queue_does_what_the_model_does(
    machine: type[BackingQueueMachine], share: float, scale, seed, record_property, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "warren")  # crashes are noisy
    examples = round(scale.scale(EXAMPLES) * share)
    before = machine.lives
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
    run = machine.lives - before
    assert run >= examples, "Hypothesis gave up early"
    record_property("examples", run)
