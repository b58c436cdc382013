"""A message whose ack or nack was refused by the disk can be settled another time."""

from __future__ import annotations

import pytest

import warren
from warren.errors import DiskFullError, MessageStateError


@pytest.mark.parametrize("requeue", [True, False])
def test_a_nack_that_the_disk_refused_can_be_repeated(tmp_path, monkeypatch, requeue):
    with warren.open(tmp_path) as store:
        queue = store.queue("q")
        queue.publish_many([b"a", b"b"])
        messages = queue.get_many(2)

        def refuse(*_: object) -> list[int]:
            raise DiskFullError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(type(queue._backing), "requeue", refuse)
            patch.setattr(type(queue._backing), "ack", refuse)
            with pytest.raises(DiskFullError):
                queue.nack_many(messages, requeue=requeue)
            with pytest.raises(DiskFullError):
                queue.ack_many(messages)
        assert [message.settled for message in messages] == [False, False]
        messages[0].ack()
        messages[1].nack(requeue=requeue)
        assert [message.body for message in queue.get_many(5)] == ([b"b"] if requeue else [])


def test_what_was_settled_before_the_disk_refused_the_rest_stays_so(tmp_path, monkeypatch):
    """Levels of priority settle one after the other."""
    with warren.open(tmp_path) as store:
        queue = store.queue("q", arguments={"x-max-priority": 1})
        queue.publish(b"low", priority=0)
        queue.publish(b"high", priority=1)
        high, low = queue.get_many(2)
        low_level = queue._backing.levels[0]
        real = type(low_level).ack

        def refuse(level: object, *rest: object) -> list[int]:
            if level is low_level:
                raise DiskFullError("no room")
            return real(level, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(type(low_level), "ack", refuse)
            with pytest.raises(DiskFullError):
                queue.nack_many([high, low], requeue=False)
        assert (high.settled, low.settled) == (True, False)
        with pytest.raises(MessageStateError):
            high.ack()
        low.nack()
        assert [message.body for message in queue.get_many(5)] == [b"low"]
