"""Exchanges, bindings, policies and runtime parameters in meta.db."""

from __future__ import annotations

import contextlib
import datetime
import sqlite3
from dataclasses import asdict
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warren.errors import StoreClosedError
from warren.routing.binding import Binding
from warren.routing.exchange import Exchange
from warren.routing.policies import Policy
from warren.routing.router import Router
from warren.storage import metadata as metadata_module
from warren.storage.metadata import BindingRecord, ExchangeRecord, Metadata, PolicyRecord, QueueRecord

ARGUMENTS = {
    "text": "ü",
    "bytes": b"\0\xff",
    "time": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
    "decimal": Decimal("1.50"),
    "table": {"list": [1, True, None, 1.5]},
}


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "meta.db")


@pytest.fixture
def metadata(path):
    metadata = Metadata(path)
    yield metadata
    metadata.close()


def reopened(metadata: Metadata) -> Metadata:
    metadata.close()
    return Metadata(metadata.path)


def binding(key: str = "", **arguments: object) -> BindingRecord:
    return BindingRecord(source="x", destination_kind="queue", destination="q", routing_key=key, arguments=arguments)


# ---- exchanges ----


def test_exchanges_come_back_as_they_were_put_after_a_restart(metadata):
    plain = ExchangeRecord(name="b", type="fanout")
    full = ExchangeRecord(name="a", type="topic", auto_delete=True, internal=True, arguments=ARGUMENTS)
    metadata.put_exchange(plain)
    metadata.put_exchange(full)
    again = reopened(metadata)
    assert again.exchanges() == [full, plain]
    again.close()


def test_an_exchange_put_again_replaces_the_one_of_its_name(metadata):
    metadata.put_exchange(ExchangeRecord(name="a", type="topic"))
    metadata.put_exchange(ExchangeRecord(name="a", type="fanout"))
    assert metadata.exchanges() == [ExchangeRecord(name="a", type="fanout")]


def test_deleting_what_is_not_there_does_nothing(metadata):
    metadata.put_exchange(ExchangeRecord(name="a", type="topic"))
    metadata.delete_exchange("b")
    metadata.delete_binding(binding())
    metadata.delete_policy("p")
    metadata.delete_parameter("shovel", "s")
    metadata.delete_exchange("a")
    metadata.delete_exchange("a")
    assert metadata.exchanges() == []


# ---- bindings ----


def test_bindings_come_back_in_the_order_of_binding_after_a_restart(metadata):
    bindings = [binding("z"), binding("a"), binding("m", **ARGUMENTS)]
    into_exchange = BindingRecord(source="x", destination_kind="exchange", destination="q", routing_key="z")
    for one in (*bindings, into_exchange):
        metadata.put_binding(one)
    again = reopened(metadata)
    assert again.bindings() == [*bindings, into_exchange]
    again.close()


def test_a_binding_put_twice_is_one_and_keeps_its_place(metadata):
    metadata.put_bindings([binding("a", one=1, two=2), binding("b"), binding("a", two=2, one=1)])
    assert metadata.bindings() == [binding("a", one=1, two=2), binding("b")]


def test_all_of_a_binding_is_its_identity_the_types_of_arguments_too(metadata):
    bindings = [
        binding(),
        binding("k"),
        binding(a=1),
        binding(a=True),
        binding(a=1.0),
        binding(a="1"),
        binding(a=b"1"),
        binding(a=None),
        BindingRecord(source="y", destination_kind="queue", destination="q"),
        BindingRecord(source="x", destination_kind="exchange", destination="q"),
        BindingRecord(source="x", destination_kind="queue", destination="r"),
    ]
    metadata.put_bindings(bindings)
    assert len(metadata.bindings()) == len(bindings)
    for left in range(len(bindings) - 1, -1, -1):
        metadata.delete_binding(bindings[left])
        assert metadata.bindings() == bindings[:left]


def test_the_order_of_arguments_does_not_matter_to_a_delete(metadata):
    metadata.put_binding(binding(one=1, two={"a": 1, "b": 2}))
    metadata.delete_binding(binding(two={"b": 2, "a": 1}, one=1))
    assert metadata.bindings() == []


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.dictionaries(st.text(max_size=3), VALUES, max_size=3), max_size=5))
def test_the_file_and_the_router_agree_on_which_bindings_are_the_same(tables):
    metadata = Metadata(":memory:")
    bindings = [Binding("x", "queue", "q", "", table) for table in tables]
    metadata.put_bindings(bindings)
    kept = [Binding(**{name: getattr(r, name) for name in r.__slots__}) for r in metadata.bindings()]
    assert kept == list(dict.fromkeys(bindings))
    metadata.delete_bindings(bindings[:1])
    assert len(metadata.bindings()) == max(0, len(kept) - 1)
    metadata.close()


def test_with_a_queue_go_the_bindings_to_it_and_no_others(metadata):
    uid = metadata.declare_queue(QueueRecord(name="q", created_at=0.0))
    into_exchange = BindingRecord(source="x", destination_kind="exchange", destination="q")
    into_other = BindingRecord(source="x", destination_kind="queue", destination="r")
    metadata.put_bindings([binding("a"), into_exchange, binding("b", size=1), into_other])
    metadata.delete_queue(uid + 1)
    assert len(metadata.bindings()) == 4
    metadata.delete_queue(uid)
    assert metadata.bindings() == [into_exchange, into_other]


def test_a_kind_of_destination_that_there_is_not_is_refused_and_nothing_is_kept(metadata):
    wrong = BindingRecord(source="x", destination_kind="topic", destination="q")  # type: ignore[arg-type]
    metadata.put_bindings([])
    with pytest.raises(Exception, match="CHECK constraint failed"):
        metadata.put_bindings([binding(), wrong])
    assert metadata.bindings() == []


# ---- policies and parameters ----


def test_policies_and_operator_policies_of_one_name_are_two(metadata):
    users = PolicyRecord(name="p", pattern="^a", definition={"max-length": 1}, apply_to="queues", priority=-3)
    operators = PolicyRecord(name="p", pattern="^b", definition={"expires": 2})
    metadata.put_policy(users)
    metadata.put_policy(operators, operator=True)
    again = reopened(metadata)
    assert again.policies() == [users]
    assert again.policies(operator=True) == [operators]
    again.delete_policy("p")
    assert again.policies() == []
    assert again.policies(operator=True) == [operators]
    again.close()


def test_a_policy_or_parameter_put_again_replaces_the_old_one(metadata):
    for length in (1, 2):
        metadata.put_policy(PolicyRecord(name="p", pattern="", definition={"max-length": length}))
        metadata.put_parameter("shovel", "s", {"length": length})
    assert [policy.definition for policy in metadata.policies()] == [{"max-length": 2}]
    assert metadata.parameters() == {("shovel", "s"): {"length": 2}}


def test_parameters_are_told_apart_by_component_and_name(metadata):
    metadata.put_parameter("shovel", "a", {"uri": "amqp://"})
    metadata.put_parameter("federation", "a", [1, 2])
    metadata.put_parameter("shovel", "b", "text")
    metadata.delete_parameter("shovel", "a")
    again = reopened(metadata)
    assert again.parameters() == {("federation", "a"): [1, 2], ("shovel", "b"): "text"}
    again.close()


# ---- with the rest ----


def test_the_objects_of_routing_are_kept_as_they_are_and_make_the_same_router_again(metadata):
    router = Router("/")
    exchange = Exchange(name="logs", type="topic", auto_delete=True, arguments={"alternate-exchange": "amq.fanout"})
    router.declare(exchange)
    router.add_queue("errors")
    bindings = [Binding("logs", "queue", "errors", "*.error"), Binding("amq.direct", "exchange", "logs", "k", {"a": 1})]
    policy = Policy(name="p", pattern="^logs", definition={"alternate-exchange": "amq.direct"}, apply_to="exchanges")
    with metadata.transaction():
        metadata.put_exchange(exchange)
        metadata.put_policy(policy)
        for one in bindings:
            router.bind(one)
            metadata.put_binding(one)
    metadata = reopened(metadata)
    again = Router("/")
    again.add_queue("errors")
    for record in metadata.exchanges():
        again.declare(Exchange(**asdict(record)))
    for record in metadata.bindings():
        again.bind(Binding(**asdict(record)))
    assert again.exchanges == router.exchanges
    assert set(again.all_bindings()) == set(router.all_bindings())
    assert [Policy(**asdict(record)) for record in metadata.policies()] == [policy]
    removed = router.remove_queue("errors")
    with metadata.transaction():
        metadata.delete_bindings(removed.bindings)
        for gone in removed.exchanges:
            metadata.delete_exchange(gone.name)
    assert metadata.exchanges() == []
    assert metadata.bindings() == []
    metadata.close()


def test_a_transaction_that_fails_keeps_nothing_of_any_kind(metadata):
    with contextlib.suppress(RuntimeError), metadata.transaction():
        metadata.put_exchange(ExchangeRecord(name="a", type="topic"))
        metadata.put_binding(binding())
        metadata.put_policy(PolicyRecord(name="p", pattern="", definition={"max-length": 1}))
        metadata.put_parameter("shovel", "s", 1)
        metadata.declare_queue(QueueRecord(name="q", created_at=0.0))
        raise RuntimeError
    assert (metadata.exchanges(), metadata.bindings(), metadata.policies(), metadata.parameters()) == ([], [], [], {})
    assert metadata.queues() == []


def test_a_file_of_format_1_gets_the_new_tables_and_keeps_its_queues(path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(metadata_module, "_MIGRATIONS", metadata_module._MIGRATIONS[:1])
        patch.setattr(metadata_module, "FORMAT_VERSION", 1)
        old = Metadata(path)
        old.declare_queue(QueueRecord(name="orders", created_at=0.0))
        old.close()
    metadata = Metadata(path)
    assert [record.name for record in metadata.queues()] == ["orders"]
    metadata.put_binding(binding())
    assert metadata.bindings() == [binding()]
    metadata.close()
    plain = sqlite3.connect(path)
    assert plain.execute("PRAGMA user_version").fetchone() == (2,)
    plain.close()


def test_a_delete_finds_its_row_by_an_index(metadata):
    plan = metadata._db.execute(
        "EXPLAIN QUERY PLAN DELETE FROM durable_bindings WHERE source = 'x' AND destination_kind = 'queue' "
        "AND destination = 'q' AND routing_key = '' AND arguments = '{}'"
    ).fetchall()
    assert all("USING" in row[3] and "INDEX" in row[3] for row in plan)


@pytest.mark.parametrize("what", ["exchange", "binding", "policy", "parameter"])
def test_a_value_that_cannot_be_stored_is_refused_with_its_owner(metadata, what):
    put = {
        "exchange": lambda: metadata.put_exchange(ExchangeRecord(name="n", type="topic", arguments={"a": object()})),
        "binding": lambda: metadata.put_binding(binding(a=object())),
        "policy": lambda: metadata.put_policy(PolicyRecord(name="n", pattern="", definition={"a": object()})),
        "parameter": lambda: metadata.put_parameter("shovel", "n", object()),
    }[what]
    with pytest.raises(TypeError, match=f"the .*{what}.*'[nxq]'.* is a object"):
        put()


def test_closed_metadata_says_so(metadata):
    metadata.close()
    for use in (metadata.exchanges, metadata.bindings, metadata.policies, metadata.parameters):
        with pytest.raises(StoreClosedError, match=r"meta\.db was closed"):
            use()
