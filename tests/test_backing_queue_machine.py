"""One state machine for all backing queues. `backing_queue_machine.py` is the machine; a failing run is a program for it."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.backing_queue_machine import (
    BackingQueueMachine,
    PriorityLmdb,
    PriorityTable,
    VariableLmdb,
    VariableTable,
    VolatileLmdb,
    VolatileTable,
)

MACHINES: tuple[type[BackingQueueMachine], ...] = (
    VariableTable,
    VariableLmdb,
    PriorityTable,
    PriorityLmdb,
    VolatileTable,
    VolatileLmdb,
)
EXAMPLES = 20_000  # of a full run, over all machines
STEPS = 25


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.__name__)
def test_a_backing_queue_does_what_the_model_does(
    machine: type[BackingQueueMachine], scale, seed, record_property
) -> None:
    examples = scale.scale(EXAMPLES) // len(MACHINES)
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=examples, stateful_step_count=STEPS, suppress_health_check=list(HealthCheck)),
    )
    record_property("examples", examples)
