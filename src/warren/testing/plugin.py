"""The pytest plugin: the fixture `warren_broker`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from warren.testing.running import RunningBroker


@pytest.fixture
def warren_broker() -> Iterator[RunningBroker]:
    """A fresh broker for one test: `warren_broker.url` is for any AMQP client."""
    from warren.testing.running import running_broker  # who does not use the fixture does not pay for it

    with running_broker() as broker:
        yield broker
