"""Programs written by hand, that run before the generated ones: together they send every method that a client may send, and
make a broker send every method of its own but those of `NEVER_SENT`. So what a run covers does not depend on its seed.

A program ends at its first difference, also at one that is accepted; what leads to one is a program of its own.
"""

from __future__ import annotations

from differential.programs import Program, Step

# Methods of the broker's side that no program can make it send.
NEVER_SENT = {
    "connection.secure": "no mechanism of either broker asks a second question",
}
# Those of the handshake are compared in handshakes.py, those of an alarm in alarms.py.
ELSEWHERE = (
    *("connection.start", "connection.tune", "connection.open-ok"),
    *("connection.blocked", "connection.unblocked"),
)

_Q1 = Step("queue.declare", {"queue": "q1", "durable": True})
_Q2 = Step("queue.declare", {"queue": "q2"})
_PERSISTENT = {"delivery_mode": 2, "headers": {"n": 1}}


def _publish(body: bytes, exchange: str = "", routing_key: str = "q1", **arguments: object) -> Step:
    where = {"exchange": exchange, "routing_key": routing_key, **arguments}
    return Step("basic.publish", where, properties=_PERSISTENT, body=body)


TOUR: dict[str, Program] = {
    "exchanges, bindings and queues come and go": [
        _Q1,
        _Q2,
        Step("exchange.declare", {"exchange": "x1", "type": "topic", "durable": True}),
        Step("exchange.declare", {"exchange": "x2", "type": "fanout"}),
        Step("queue.bind", {"queue": "q1", "exchange": "x1", "routing_key": "a.#"}),
        Step("queue.bind", {"queue": "q2", "exchange": "x2"}),
        Step("exchange.bind", {"destination": "x2", "source": "x1", "routing_key": "*.b"}),
        _publish(b"both", "x1", "a.b"),
        _publish(b"returned", "x1", "c", mandatory=True),
        Step("exchange.unbind", {"destination": "x2", "source": "x1", "routing_key": "*.b"}),
        _publish(b"one", "x1", "a.b"),
        Step("queue.unbind", {"queue": "q1", "exchange": "x1", "routing_key": "a.#"}),
        Step("queue.purge", {"queue": "q1"}),
        Step("exchange.delete", {"exchange": "x1", "if_unused": True}),
        Step("exchange.delete", {"exchange": "x2"}),
        Step("queue.delete", {"queue": "q2"}),
        Step("queue.delete", {"queue": "q1", "if_empty": True}),
    ],
    "deliveries and what becomes of them": [
        _Q1,
        Step("basic.qos", {"prefetch_count": 3}),
        Step("confirm.select"),
        *(_publish(b"m%d" % number) for number in range(6)),
        Step("basic.get", {"queue": "q1"}),
        Step("basic.reject", {"delivery_tag": "oldest", "requeue": True}),
        Step("basic.consume", {"queue": "q1", "consumer_tag": "c1"}),
        Step("basic.ack", {"delivery_tag": "oldest"}),
        Step("basic.nack", {"delivery_tag": "newest", "multiple": True, "requeue": True}),
        Step("basic.recover", {"requeue": True}),
        Step("basic.recover-async", {"requeue": True}),
        Step("basic.cancel", {"consumer_tag": "c1"}),
        Step("channel.close", {"reply_code": 200}),
        Step("basic.get", {"queue": "q1", "no_ack": True}),
        Step("queue.purge", {"queue": "q1"}),
        Step("basic.get", {"queue": "q1"}),
        Step("channel.open", channel=3, bare=True),
        Step("channel.open", bare=True),
    ],
    "a transaction, its commit and its rollback": [
        _Q1,
        Step("tx.select"),
        _publish(b"kept"),
        Step("tx.commit"),
        _publish(b"forgotten"),
        Step("basic.get", {"queue": "q1"}),
        Step("basic.ack", {"delivery_tag": "oldest"}),
        Step("tx.rollback"),
        Step("channel.close", {"reply_code": 200}),
        Step("basic.get", {"queue": "q1"}),
    ],
    "a consumer is told when its queue goes": [
        _Q1,
        Step("basic.consume", {"queue": "q1", "consumer_tag": "c1"}),
        Step("queue.delete", {"queue": "q1"}, connection=1),
    ],
    "a publish that is refused": [
        Step("queue.declare", {"queue": "q1", "arguments": {"x-max-length": 0, "x-overflow": "reject-publish"}}),
        Step("confirm.select"),
        _publish(b"m"),
    ],
    "flow, access and a new secret": [
        Step("channel.flow", {"active": True}),
        Step("access.request", {"realm": "/data", "active": True, "read": True}),
        Step("connection.update-secret", {"new_secret": "another", "reason": "it was time"}, channel=0),
        _Q1,
        Step("connection.close", {"reply_code": 200}, channel=0),
    ],
    "channel.flow-ok unasked": [_Q1, Step("channel.flow-ok", {"active": True})],
    "channel.close-ok unasked": [_Q1, Step("channel.close-ok")],
    "basic.cancel-ok unasked": [_Q1, Step("basic.cancel-ok", {"consumer_tag": "c1"})],
    "connection.open a second time": [_Q1, Step("connection.open", {"virtual_host": "/"}, channel=0)],
    "connection.tune-ok a second time": [_Q1, Step("connection.tune-ok", {"frame_max": 131072}, channel=0)],
    "connection.secure-ok unasked": [_Q1, Step("connection.secure-ok", {"response": "x"}, channel=0)],
    "connection.close-ok unasked": [_Q1, Step("connection.close-ok", channel=0)],
    "connection.start-ok a second time": [
        _Q1,
        Step("connection.start-ok", {"mechanism": "PLAIN", "response": "\0guest\0guest"}, channel=0),
    ],
    "an error closes the channel": [Step("queue.purge", {"queue": "missing"}), _Q1],
    "an error closes the connection": [_Q1, Step("basic.recover", {"requeue": False}), _Q1],
}
