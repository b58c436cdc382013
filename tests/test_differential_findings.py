"""What the comparison with RabbitMQ found in Warren: each was wrong once. Run against Warren alone."""

from __future__ import annotations

import pytest

from differential.compare import Side
from differential.programs import Step
from differential.wire import Wire
from warren.testing import running_broker


@pytest.fixture(scope="module")
def broker():
    with running_broker() as running:
        yield running


@pytest.fixture
def side(broker):
    side = Side("Warren", broker.port, 0.001)
    yield side
    side.close()


def closes(seen):
    """Code, class and method of what was closed, and whether it was the connection."""
    return [
        (answer[1]["reply_code"], answer[1]["class_id"], answer[1]["method_id"], answer[0] == "connection.close")
        for place, answers in seen.items()
        if place.endswith(": answers")
        for answer in answers
        if answer[0] in ("channel.close", "connection.close")
    ]


def bodies(seen, consumer, connection=0):
    place = f"connection {connection} channel 1: deliveries to {consumer}"
    return [(message[0], message[1]) for message in seen.get(place, [])]


def do(side, *steps):
    """What the last step led to."""
    for step in steps:
        seen = side.do(step)
    return seen


QUEUE = Step("queue.declare", {"queue": "q1"})


def publish(*, to="q1", body=b"m", times=1, **properties):
    return Step("basic.publish", {"routing_key": to}, properties=properties, body=body, times=times)


# ---- codes ----


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (Step("basic.ack", {"delivery_tag": 9}), (406, 60, 80, False)),
        (Step("basic.reject", {"delivery_tag": 9}), (406, 60, 90, False)),
        (Step("basic.nack", {"delivery_tag": 9}), (406, 60, 120, False)),
        (Step("basic.recover-async"), (540, 60, 100, True)),
        (Step("basic.recover"), (540, 60, 110, True)),
        (Step("queue.declare", {"passive": True}), (404, 50, 10, False)),
        (Step("queue.bind", {"queue": "q1", "exchange": ""}), (403, 50, 20, False)),
        (Step("queue.bind", {"queue": "missing", "exchange": ""}), (403, 50, 20, False)),
        (Step("queue.unbind", {"queue": "missing", "exchange": ""}), (403, 50, 50, False)),
        (Step("exchange.unbind", {"source": "missing", "destination": ""}), (403, 40, 40, False)),
        (Step("exchange.bind", {"source": "missing", "destination": ""}), (403, 40, 30, False)),
        (Step("exchange.declare", {"exchange": "", "passive": True}), (403, 40, 10, False)),
        (Step("exchange.declare", {"exchange": "amq.direct", "type": "nonsense"}), (503, 40, 10, True)),
        (Step("exchange.delete", {"exchange": "amq.nothing"}), (403, 40, 20, False)),
        (Step("basic.get", {"queue": "amq.rabbitmq.reply-to", "no_ack": True}), (404, 60, 70, False)),
        (Step("connection.open", {"virtual_host": "/"}, channel=0), (504, 10, 40, True)),
        (Step("connection.close-ok", channel=0), (504, 10, 51, True)),
        (Step("channel.close-ok"), (503, 20, 41, True)),
        (Step("channel.close-ok", channel=7, bare=True), (504, 20, 41, True)),
        (Step("raw", {"payload": bytes.fromhex("0032000a0000ff")}), (501, 50, 10, True)),
        (publish(expiration="-1"), (406, 60, 40, False)),
    ],
    ids=lambda value: value.source() if isinstance(value, Step) else None,
)
def test_an_error_has_the_code_and_the_ids_that_rabbitmq_gives(side, step, expected):
    assert closes(do(side, QUEUE, step)) == [expected]


def test_a_redeclare_with_another_exclusiveness_is_locked_and_not_inequivalent(side):
    exclusive = Step("queue.declare", {"queue": "q2", "exclusive": True})
    assert closes(do(side, exclusive, Step("queue.declare", {"queue": "q2", "durable": True}))) == [
        (405, 50, 10, False)
    ]
    assert closes(do(side, QUEUE, Step("queue.declare", {"queue": "q1", "exclusive": True}))) == [(405, 50, 10, False)]


def test_an_expiration_may_have_a_plus_sign(side):
    assert do(side, QUEUE, publish(expiration="+3600000"))["queue q1"] == (1, 0)


def test_entries_of_cc_that_are_no_text_are_passed_over(side):
    assert closes(do(side, QUEUE, publish(headers={"CC": [1, "q2"]}))) == []
    assert closes(do(side, publish(headers={"CC": "q2"}))) == [(406, 60, 40, False)]


def test_an_unbind_of_what_is_not_bound_does_not_ask_whose_queue_it_is(side):
    step = Step("queue.unbind", {"queue": "q1", "exchange": "amq.direct", "routing_key": "a"}, connection=1)
    assert closes(do(side, Step("queue.declare", {"queue": "q1", "exclusive": True}), step)) == []


def test_a_binding_that_cannot_be_is_told_before_whose_queue_it_is(side):
    bind = {"queue": "q1", "exchange": "amq.headers", "arguments": {"x-match": 5}}
    do(side, Step("queue.declare", {"queue": "q1", "exclusive": True}))
    assert closes(do(side, Step("queue.bind", bind, connection=1))) == [(406, 50, 20, False)]
    assert closes(do(side, Step("queue.bind", {**bind, "arguments": {}}, connection=1))) == [(405, 50, 20, False)]


# ---- deliveries ----


def test_a_cancelled_consumer_gets_nothing_when_it_acks_what_it_had(side):
    do(
        side,
        QUEUE,
        Step("basic.qos", {"prefetch_count": 1}),
        Step("basic.consume", {"queue": "q1", "consumer_tag": "c1"}),
        publish(times=3),
        Step("basic.cancel", {"consumer_tag": "c1"}),
    )
    seen = do(side, Step("basic.ack", {"delivery_tag": "oldest"}))
    assert bodies(seen, "c1") == []
    assert seen["queue q1"] == (2, 0)


def test_a_consumer_at_its_prefetch_gets_what_it_requeues_again(side):
    do(side, QUEUE, Step("basic.qos", {"prefetch_count": 2}))
    do(side, publish(body=b"m1"), publish(body=b"m2"), Step("basic.consume", {"queue": "q1", "consumer_tag": "c1"}))
    do(side, Step("basic.consume", {"queue": "q1", "consumer_tag": "c2"}))
    seen = do(side, Step("basic.nack", {"delivery_tag": 2, "multiple": True, "requeue": True}))
    assert sorted(bodies(seen, "c1") + bodies(seen, "c2")) == [(b"m1", True), (b"m2", True)]
    assert len(bodies(seen, "c1")) == 1


def test_a_full_queue_that_rejects_takes_as_many_as_its_consumers_do(side):
    arguments = {"x-max-length": 1, "x-overflow": "reject-publish"}
    do(side, Step("queue.declare", {"queue": "q1", "arguments": arguments}), Step("confirm.select"))
    do(side, Step("basic.consume", {"queue": "q1", "consumer_tag": "c1", "no_ack": True}))
    seen = do(side, publish(times=5))
    assert len(bodies(seen, "c1")) == 5
    assert seen["connection 0 channel 1: confirmed"] == {1, 2, 3, 4, 5}


def test_an_expired_message_goes_when_the_one_before_it_is_fetched(side):
    do(side, QUEUE, publish(body=b"stays"), publish(body=b"goes", expiration="0"))
    seen = do(side, Step("basic.get", {"queue": "q1"}))
    assert seen["connection 0 channel 1: answers"][0][2] == 0  # messages left
    assert seen["queue q1"] == (0, 0)


def test_a_message_that_expired_in_the_hands_of_a_consumer_goes_when_it_is_requeued(side):
    do(side, Step("queue.declare", {"queue": "q1", "arguments": {"x-message-ttl": 0}}))
    do(side, Step("basic.consume", {"queue": "q1", "consumer_tag": "c1"}), publish(times=2))
    assert do(side, Step("channel.close"))["queue q1"] == (0, 0)


def test_what_a_channel_leaves_behind_is_held_against_the_length_limit_together(side):
    do(
        side,
        Step("queue.declare", {"queue": "q1", "arguments": {"x-max-length": 1}}),
        Step("queue.declare", {"queue": "q2"}),
    )
    do(side, Step("basic.consume", {"queue": "q1", "consumer_tag": "c1"}, connection=1))
    do(side, Step("basic.consume", {"queue": "q2", "consumer_tag": "c2"}, connection=1))
    do(side, publish(body=b"m1"), publish(body=b"between", to="q2"), publish(body=b"m2"))
    do(side, Step("basic.consume", {"queue": "q1", "consumer_tag": "c3"}))
    assert bodies(do(side, Step("drop", connection=1)), "c3") == [(b"m2", True)]


def test_a_prefetch_for_consumers_lifts_that_of_the_channel(side):
    do(side, QUEUE, Step("basic.qos", {"prefetch_count": 1, "global_": True}), Step("basic.qos", {"prefetch_count": 2}))
    do(side, Step("basic.consume", {"queue": "q1", "consumer_tag": "c1"}))
    assert len(bodies(do(side, publish(times=3)), "c1")) == 2


def test_what_was_fetched_by_basic_get_does_not_count_for_the_prefetch_of_a_channel(side):
    do(side, QUEUE, publish(times=2), Step("basic.qos", {"prefetch_count": 1, "global_": True}))
    do(side, Step("basic.get", {"queue": "q1"}), Step("basic.get", {"queue": "q1"}), publish(times=3))
    seen = do(side, Step("basic.consume", {"queue": "q1", "consumer_tag": "c1"}))
    assert len(bodies(seen, "c1")) == 1
    seen = do(side, Step("basic.nack", {"delivery_tag": 1, "requeue": True}))
    assert seen["queue q1"] == (3, 1)
    seen = do(side, Step("basic.ack", {"delivery_tag": 3, "multiple": True}))
    assert len(bodies(seen, "c1")) == 1
    assert seen["queue q1"] == (2, 1)


def test_a_consumer_goes_on_after_all_that_waited_for_it_expired(side):
    do(side, Step("queue.declare", {"queue": "q1", "arguments": {"x-message-ttl": 0}}))
    do(side, Step("basic.consume", {"queue": "q1", "consumer_tag": "c1"}), publish(body=b"m1"))
    do(side, Step("basic.recover", {"requeue": True}))
    assert bodies(do(side, publish(body=b"m2")), "c1") == [(b"m2", False)]


def test_dead_letters_that_come_together_are_held_against_the_length_limit_of_their_queue(side):
    dead_letters = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "q2"}
    do(side, Step("queue.declare", {"queue": "q1", "arguments": {"x-max-length": 1, **dead_letters}}))
    do(side, Step("queue.declare", {"queue": "q2", "arguments": {"x-max-length": 1, "x-overflow": "reject-publish"}}))
    seen = do(side, publish(times=4))
    assert (seen["queue q1"], seen["queue q2"]) == ((1, 0), (1, 0))


def test_dead_letters_that_a_consumer_takes_at_once_do_not_count_for_a_queue_that_rejects(side):
    limit = {"x-max-length": 1, "x-overflow": "reject-publish"}
    do(side, Step("queue.declare", {"queue": "q1", "arguments": limit}))
    letters = {"x-message-ttl": 0, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "q1"}
    do(side, Step("queue.declare", {"queue": "q2", "arguments": letters}), Step("basic.qos", {"prefetch_count": 1}))
    do(side, Step("basic.consume", {"queue": "q1", "consumer_tag": "c1"}))
    seen = do(side, publish(to="q2", times=3))
    assert len(bodies(seen, "c1")) == 1
    assert seen["queue q1"] == (1, 1)


# ---- tx ----


def test_a_delivery_is_settled_once_in_a_transaction(side):
    do(side, QUEUE, publish(), Step("tx.select"), Step("basic.get", {"queue": "q1"}))
    assert closes(do(side, Step("basic.ack", {"delivery_tag": 1}))) == []
    assert closes(do(side, Step("basic.nack", {"delivery_tag": 1}))) == [(406, 60, 120, False)]


def test_an_ack_of_all_in_a_transaction_means_all_that_there_were(side):
    do(side, QUEUE, publish(body=b"m1"), Step("basic.publish", {"routing_key": "q1"}, body=b"m2"), Step("tx.select"))
    do(
        side,
        Step("basic.get", {"queue": "q1"}),
        Step("basic.ack", {"multiple": True}),
        Step("basic.get", {"queue": "q1"}),
    )
    do(side, Step("tx.commit"))
    assert do(side, Step("channel.close"))["queue q1"] == (1, 0)


def test_recover_leaves_what_waits_for_a_commit(side):
    do(side, QUEUE, publish(times=2), Step("tx.select"), Step("basic.get", {"queue": "q1"}))
    do(side, Step("basic.ack", {"delivery_tag": 1}), Step("basic.get", {"queue": "q1"}))
    assert do(side, Step("basic.recover", {"requeue": True}))["queue q1"] == (1, 0)
    assert do(side, Step("tx.commit"))["connection 0 channel 1: answers"] == [("tx.commit-ok", {})]
    assert do(side, Step("channel.close"))["queue q1"] == (1, 0)


def test_a_publish_in_a_transaction_is_refused_at_once(side):
    assert closes(do(side, QUEUE, Step("tx.select"), publish(expiration="soon"))) == [(406, 60, 40, False)]


def test_a_transaction_is_routed_when_its_messages_come(side):
    """Bindings that change before the commit do not count; a queue that is gone by then does not get it."""
    bind = {"queue": "q1", "exchange": "amq.direct", "routing_key": "k"}
    send = Step("basic.publish", {"exchange": "amq.direct", "routing_key": "k", "mandatory": True}, body=b"m")
    do(side, QUEUE, Step("queue.declare", {"queue": "q2"}), Step("queue.bind", bind), Step("tx.select"), send)
    do(side, Step("queue.unbind", bind), Step("queue.bind", {**bind, "queue": "q2"}))
    seen = do(side, Step("tx.commit"))
    assert (seen["queue q1"], seen["queue q2"]) == ((1, 0), (0, 0))
    do(side, send, Step("queue.delete", {"queue": "q2"}))
    answers = do(side, Step("tx.commit"))["connection 0 channel 1: answers"]
    assert [answer[0] for answer in answers] == ["basic.return", "tx.commit-ok"]


def test_an_unroutable_message_of_a_transaction_comes_back_with_its_commit(side):
    do(side, QUEUE, Step("tx.select"))
    send = Step("basic.publish", {"exchange": "amq.direct", "routing_key": "k", "mandatory": True}, body=b"m")
    assert do(side, send).get("connection 0 channel 1: answers", []) == []
    do(side, Step("queue.bind", {"queue": "q1", "exchange": "amq.direct", "routing_key": "k"}))
    seen = do(side, Step("tx.commit"))
    assert [answer[0] for answer in seen["connection 0 channel 1: answers"]] == ["basic.return", "tx.commit-ok"]
    assert seen["queue q1"] == (0, 0)


# ---- arguments, dead letters ----


def test_a_max_priority_of_0_is_a_queue_without_priorities(side):
    declare = Step("queue.declare", {"queue": "q1", "durable": True, "arguments": {"x-max-priority": 0}})
    assert closes(do(side, declare, declare)) == []
    do(side, publish(body=b"m1", priority=0), publish(body=b"m2", priority=9))
    seen = do(side, Step("basic.consume", {"queue": "q1", "consumer_tag": "c1"}))
    assert [body for body, _ in bodies(seen, "c1")] == [b"m1", b"m2"]
    unset = Step("queue.declare", {"queue": "q1", "durable": True})
    assert closes(do(side, unset)) == [(406, 50, 10, False)]


def test_a_dead_letter_goes_to_the_keys_of_bcc_again_and_shows_them_to_nobody(side):
    dead_letters = Step("queue.declare", {"queue": "q1", "arguments": {"x-dead-letter-exchange": "amq.direct"}})
    do(side, dead_letters, Step("queue.declare", {"queue": "q2"}), Step("queue.declare", {"queue": "q3"}))
    for queue, key in (("q2", "q3"), ("q3", "q1")):
        do(side, Step("queue.bind", {"queue": queue, "exchange": "amq.direct", "routing_key": key}))
    do(side, publish(body=b"m", headers={"BCC": ["q3"], "a": 1}))
    do(side, Step("queue.purge", {"queue": "q3"}), Step("basic.get", {"queue": "q1"}))
    seen = do(side, Step("basic.reject", {"delivery_tag": "oldest"}))
    assert (seen["queue q2"], seen["queue q3"]) == ((1, 0), (1, 0))
    [answer] = do(side, Step("basic.get", {"queue": "q2"}))["connection 0 channel 1: answers"]
    properties = answer[-1]
    assert properties["headers"]["x-death"][0]["routing-keys"] == ["q1"]
    assert "BCC" not in properties["headers"]
    assert properties["headers"]["a"] == 1


def test_a_dead_letter_with_a_key_of_its_own_forgets_the_keys_of_bcc(side):
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "q2"}
    do(side, Step("queue.declare", {"queue": "q1", "arguments": arguments}), Step("queue.declare", {"queue": "q3"}))
    again = {"x-dead-letter-exchange": "amq.fanout"}
    do(side, Step("queue.declare", {"queue": "q2", "arguments": again}), publish(headers={"BCC": ["q3"]}))
    do(side, Step("queue.purge", {"queue": "q3"}), Step("basic.get", {"queue": "q1"}))
    seen = do(side, Step("basic.reject", {"delivery_tag": "oldest"}))
    assert (seen["queue q2"], seen["queue q3"]) == ((1, 0), (0, 0))


def test_a_new_secret_is_answered_and_looked_at_by_nobody(side):
    """RabbitMQ has its users' backend look at one only where secrets expire: those of tokens."""
    step = Step("connection.update-secret", {"new_secret": "not the password", "reason": "r"}, channel=0)
    assert do(side, QUEUE, step)["connection 0 channel 0: answers"] == [("connection.update-secret-ok", {})]
    assert do(side, publish())["queue q1"] == (1, 0)


def test_a_reply_does_not_wait_for_the_transaction_that_it_is_in(broker):
    """As RabbitMQ does it: a reply is sent while its message is routed."""
    with Wire(broker.port) as wire:
        wire.open_channel(1)
        wire.open_channel(2)
        wire.send(1, "basic.consume", queue="amq.rabbitmq.reply-to", consumer_tag="c", no_ack=True)
        wire.send(1, "queue.declare", queue="asked", exclusive=True)
        wire.publish(1, b"ask", {"reply_to": "amq.rabbitmq.reply-to"}, routing_key="asked")
        wire.send(1, "basic.get", queue="asked", no_ack=True)
        request = wire.wait(lambda event: event.name == "basic.get-ok", start=0)
        wire.send(2, "tx.select")
        wire.publish(2, b"answer", routing_key=request.properties["reply_to"])
        wire.publish(2, b"copy", {"headers": {"CC": [request.properties["reply_to"]]}}, routing_key="nowhere")
        assert wire.wait(lambda event: event.name == "basic.deliver", start=0).body == b"answer"
        assert wire.wait(lambda event: event.body == b"copy", start=0).name == "basic.deliver"


def test_dead_letters_that_are_on_their_way_count_for_a_queue_that_rejects(side):
    """One after the other, and faster than they are committed."""
    letters = {"x-message-ttl": 0, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "q2"}
    do(side, Step("queue.declare", {"queue": "q1", "arguments": letters}))
    limit = {"x-max-length": 2, "x-overflow": "reject-publish"}
    do(side, Step("queue.declare", {"queue": "q2", "durable": True, "arguments": limit}))
    assert do(side, publish(times=20, headers={"a": 1}))["queue q2"] == (2, 0)
    do(side, Step("queue.purge", {"queue": "q2"}))
    assert do(side, publish(to="q2", times=3))["queue q2"] == (2, 0)
