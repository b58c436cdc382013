"""Users, vhosts and permissions: what is kept, who gets in, and what he may do there."""

from __future__ import annotations

import os
import re
import sqlite3
import stat
import subprocess
import sys
import threading
import time

import argon2
import hypothesis.strategies as st
import pytest
from hypothesis import given

from warren.errors import StoreClosedError, StoreFormatError, StoreLockedError, StorePathError
from warren.node import users as users_module
from warren.node.users import (
    AlreadyKnownError,
    InvalidAccessError,
    NotKnownError,
    PermissionEntry,
    TopicPermissionEntry,
    User,
    Users,
)
from warren.vhost.permissions import (
    Grant,
    Permissions,
    TopicGrant,
    access_refused_text,
    expand,
    login_refused_text,
    loopback_allowed,
    topic_refused_text,
    vhost_missing_text,
    vhost_refused_text,
)


@pytest.fixture(autouse=True)
def cheap_hashes(monkeypatch):
    """Hashes that cost next to nothing; the tests that are about their cost do not use them."""
    monkeypatch.setattr(users_module, "_HASHER", argon2.PasswordHasher(time_cost=1, memory_cost=8, parallelism=1))


@pytest.fixture
def users(tmp_path):
    with Users(tmp_path) as users:
        yield users


class CountingHasher:
    """Counts verifications, and can hold one up."""

    def __init__(self, hasher: argon2.PasswordHasher) -> None:
        self._hasher = hasher
        self.verified: list[str] = []
        self.during_verify = lambda: None

    def hash(self, password):
        return self._hasher.hash(password)

    def verify(self, password_hash, password):
        self.verified.append(password_hash)
        self.during_verify()
        return self._hasher.verify(password_hash, password)


@pytest.fixture
def hasher(monkeypatch):
    hasher = CountingHasher(users_module._HASHER)
    monkeypatch.setattr(users_module, "_HASHER", hasher)
    return hasher


# ---- the file ----


def test_a_first_start_makes_the_default_vhost_and_an_administrator_who_may_do_everything(users):
    assert users.vhosts() == ["/"]
    assert users.list_users() == [User("guest", ("administrator",))]
    assert users.authenticate("guest", "guest").is_administrator
    assert users.list_permissions() == [PermissionEntry("guest", "/", ".*", ".*", ".*")]


def test_the_defaults_of_a_first_start_can_be_chosen(tmp_path):
    with Users(tmp_path, default_user="root", default_pass="x", default_vhost="main") as users:
        assert users.vhosts() == ["main"]
        assert users.authenticate("root", "x") is not None
        assert users.authenticate("guest", "guest") is None


def test_a_later_start_brings_nothing_back_that_was_deleted(tmp_path):
    with Users(tmp_path) as users:
        users.delete_user("guest")
        users.delete_vhost("/")
    with Users(tmp_path) as users:
        assert users.list_users() == []
        assert users.vhosts() == []


def test_everything_is_there_again_after_a_restart(tmp_path):
    with Users(tmp_path) as users:
        users.add_user("ann", "secret", tags=["monitoring", "management"])
        users.add_vhost("prod")
        users.set_permissions("ann", "prod", "^a", "^b", "^c")
        users.set_topic_permissions("ann", "prod", "amq.topic", "^d", "^e")
        users.set_topic_permissions("ann", "/", "amq.topic", "^f", "^g")
    with Users(tmp_path) as users:
        assert users.user("ann") == User("ann", ("management", "monitoring"))
        assert users.authenticate("ann", "secret") == users.user("ann")
        assert users.vhosts() == ["/", "prod"]
        assert users.grant("ann", "prod") == Grant("^a", "^b", "^c", {"amq.topic": TopicGrant("^d", "^e")})
        assert users.grant("ann", "/") is None
        assert users.list_topic_permissions("ann") == [
            TopicPermissionEntry("ann", "/", "amq.topic", "^f", "^g"),
            TopicPermissionEntry("ann", "prod", "amq.topic", "^d", "^e"),
        ]


def test_what_a_call_changed_survives_a_killed_process(tmp_path):
    program = (
        "import os, sys; from warren.node.users import Users; users = Users(sys.argv[1]);"
        "users.add_user('ann', 'secret'); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60)
    with Users(tmp_path) as users:
        assert users.authenticate("ann", "secret") == User("ann")


def test_the_file_is_its_owners_alone_and_holds_no_password(tmp_path):
    with Users(tmp_path) as users:
        users.add_user("ann", "correct horse")
    path = tmp_path / "node.db"
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert b"correct horse" not in path.read_bytes()
    assert b"$argon2id$" in path.read_bytes()


def test_a_second_node_on_the_same_directory_is_refused(tmp_path, users):
    with pytest.raises(StoreLockedError, match="in use by another node"):
        Users(tmp_path, lock_seconds=0)
    users.add_vhost("still works")


def test_a_file_that_is_not_ours_or_too_new_is_refused_and_left_as_it_is(tmp_path):
    path = tmp_path / "node.db"
    path.write_bytes(b"these are not the users you look for" * 100)
    with pytest.raises(StoreFormatError):
        Users(tmp_path)
    assert path.read_bytes().startswith(b"these are not")
    path.unlink()
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE cats (name)")
    database.close()
    with pytest.raises(StoreFormatError, match="not one of Warren's nodes"):
        Users(tmp_path)
    path.unlink()
    Users(tmp_path).close()
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(StoreFormatError, match="format version 99"):
        Users(tmp_path)


def test_a_data_directory_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "data").write_text("")
    with pytest.raises(StorePathError):
        Users(tmp_path / "data")


def test_after_the_close_changes_are_refused(tmp_path):
    users = Users(tmp_path)
    users.close()
    users.close()
    with pytest.raises(StoreClosedError):
        users.add_vhost("x")


def test_a_change_that_could_not_be_written_did_not_happen(users, monkeypatch):
    version = users.version

    def refuse(*_):
        raise StoreClosedError("no")

    monkeypatch.setattr(users, "_commit", refuse)
    for change in (
        lambda: users.add_user("ann", "x"),
        lambda: users.delete_user("guest"),
        lambda: users.set_password("guest", "y"),
        lambda: users.set_tags("guest", []),
        lambda: users.set_permissions("guest", "/", "", "", ""),
        lambda: users.clear_permissions("guest", "/"),
        lambda: users.set_topic_permissions("guest", "/", "x", "", ""),
        lambda: users.add_vhost("x"),
        lambda: users.delete_vhost("/"),
    ):
        with pytest.raises(StoreClosedError):
            change()
    assert users.version == version
    assert users.list_users() == [User("guest", ("administrator",))]
    assert users.authenticate("guest", "guest") is not None
    assert users.grant("guest", "/") == Grant(".*", ".*", ".*")
    assert users.vhosts() == ["/"]


# ---- changes ----


def test_every_change_raises_the_version_and_no_question_does(users):
    versions = [users.version]
    for change in (
        lambda: users.add_user("ann", "secret"),
        lambda: users.set_password("ann", "other"),
        lambda: users.set_tags("ann", ["management"]),
        lambda: users.add_vhost("prod"),
        lambda: users.set_permissions("ann", "prod", "", "", ""),
        lambda: users.set_topic_permissions("ann", "prod", "amq.topic", "", ""),
        lambda: users.clear_topic_permissions("ann", "prod", "amq.topic"),
        lambda: users.clear_permissions("ann", "prod"),
        lambda: users.delete_vhost("prod"),
        lambda: users.delete_user("ann"),
    ):
        change()
        versions.append(users.version)
        users.authenticate("guest", "guest")
        users.list_users(), users.list_permissions(), users.vhosts(), users.grant("guest", "/")
        assert users.version == versions[-1]
    assert versions == sorted(set(versions))


def test_with_a_user_go_its_permissions_also_for_the_next_of_that_name(users):
    users.add_user("ann", "secret")
    users.set_permissions("ann", "/", ".*", ".*", ".*")
    users.set_topic_permissions("ann", "/", "amq.topic", "x", "x")
    users.delete_user("ann")
    users.add_user("ann", "secret")
    assert users.grant("ann", "/") is None
    users.set_permissions("ann", "/", ".*", ".*", ".*")
    assert users.grant("ann", "/").topics == {}
    assert users.list_topic_permissions() == []


def test_with_a_vhost_go_the_permissions_in_it_also_for_the_next_of_that_name(tmp_path):
    with Users(tmp_path) as users:
        users.delete_vhost("/")
        assert users.deleted_vhosts() == ["/"]
        with pytest.raises(AlreadyKnownError, match="vhost '/' is being deleted"):
            users.add_vhost("/")
    with Users(tmp_path) as users:
        assert (users.vhosts(), users.deleted_vhosts()) == ([], ["/"])
        users.vhost_is_gone("/")
        users.add_vhost("/")
        assert users.grant("guest", "/") is None
        assert not users.has_vhost("prod")
    with Users(tmp_path) as users:
        assert users.list_permissions() == []


def test_the_stamp_changes_with_the_password_and_with_the_user_of_that_name(users):
    users.add_user("ann", "secret")
    seen = [users.stamp("ann")]
    users.set_tags("ann", ["monitoring"])
    users.set_permissions("ann", "/", "", "", "")
    assert users.stamp("ann") == seen[0]
    users.set_password("ann", "secret")
    seen.append(users.stamp("ann"))
    users.delete_user("ann")
    assert users.stamp("ann") is None
    users.add_user("ann", "secret")
    seen.append(users.stamp("ann"))
    assert len(set(seen)) == 3


def test_the_stamp_in_a_vhost_changes_with_the_password_and_with_what_the_user_may_read_there(users):
    users.add_vhost("other")
    users.add_user("ann", "secret")
    assert users.stamp_in("/", "ann") is None
    assert users.stamps("ann") == {}
    users.set_permissions("ann", "/", "", "", "^a$")
    users.set_permissions("ann", "other", "", "", ".*")
    first, before = users.stamp_in("/", "ann"), users.stamp("ann")
    other = users.stamp_in("other", "ann")
    users.set_permissions("ann", "/", ".*", ".*", "^a$")
    users.set_topic_permissions("ann", "/", "amq.topic", "", "")
    assert users.stamp_in("/", "ann") == first
    users.set_permissions("ann", "/", "", "", "^b$")
    assert users.stamp_in("/", "ann") not in (first, None)
    assert users.stamp_in("other", "ann") == other
    assert users.stamps("ann") == {"/": users.stamp_in("/", "ann"), "other": other}
    users.set_password("ann", "secret")
    assert users.stamp_in("other", "ann") != other
    assert users.stamp_in("other", "ann", before) == other  # as he has it who showed the old one
    users.clear_permissions("ann", "/")
    assert list(users.stamps("ann")) == ["other"]
    users.delete_user("ann")
    assert users.stamps("ann") == {}


def test_lists_can_be_narrowed_to_a_user_or_a_vhost(users):
    users.add_user("ann", "secret")
    users.add_vhost("prod")
    for vhost in ("/", "prod"):
        users.set_permissions("ann", vhost, "", "", vhost)
        users.set_topic_permissions("ann", vhost, "amq.topic", "", vhost)
    assert [row.vhost for row in users.list_permissions(user="ann")] == ["/", "prod"]
    assert [row.user for row in users.list_permissions(vhost="/")] == ["ann", "guest"]
    assert [row.read for row in users.list_topic_permissions(vhost="prod")] == ["prod"]
    users.clear_topic_permissions("ann", "/")
    assert [row.vhost for row in users.list_topic_permissions()] == ["prod"]


def test_what_is_not_there_or_there_already_is_told_by_name(users):
    for change in (
        lambda: users.delete_user("bob"),
        lambda: users.set_password("bob", "x"),
        lambda: users.set_tags("bob", []),
        lambda: users.set_permissions("bob", "/", "", "", ""),
        lambda: users.clear_permissions("bob", "/"),
        lambda: users.set_topic_permissions("bob", "/", "x", "", ""),
    ):
        with pytest.raises(NotKnownError, match="there is no user 'bob'"):
            change()
    for change in (
        lambda: users.delete_vhost("prod"),
        lambda: users.set_permissions("guest", "prod", "", "", ""),
        lambda: users.clear_topic_permissions("guest", "prod"),
    ):
        with pytest.raises(NotKnownError, match="there is no vhost 'prod'"):
            change()
    with pytest.raises(AlreadyKnownError, match="there is a user 'guest'"):
        users.add_user("guest", "x")
    with pytest.raises(AlreadyKnownError, match="there is a vhost '/'"):
        users.add_vhost("/")


@pytest.mark.parametrize("expression", ["orders(", "*", "[a", "(?P<x", "[[:alnum:]]+", "[a&&b]"])
def test_a_bad_expression_is_named_and_changes_nothing(users, expression):
    users.set_permissions("guest", "/", "", "ok", "")
    for position in range(3):
        three = ["", "", ""]
        three[position] = expression
        kind = ("configure", "write", "read")[position]
        with pytest.raises(InvalidAccessError, match=f"the {kind} permission {re.escape(repr(expression))}"):
            users.set_permissions("guest", "/", *three)
    with pytest.raises(InvalidAccessError, match=re.escape(repr(expression))):
        users.set_topic_permissions("guest", "/", "amq.topic", "", expression)
    assert users.grant("guest", "/") == Grant("", "ok", "")


@pytest.mark.parametrize("name", ["", "x" * 256, "é" * 128, "a\nb", "a\0b"])
def test_names_that_cannot_be_are_refused(users, name):
    with pytest.raises(InvalidAccessError):
        users.add_user(name, "x")
    with pytest.raises(InvalidAccessError):
        users.add_vhost(name)


def test_an_empty_password_and_odd_tags_are_refused(users):
    with pytest.raises(InvalidAccessError, match="the password of user 'ann' is empty"):
        users.add_user("ann", "")
    with pytest.raises(InvalidAccessError, match="the password of user 'guest' is empty"):
        users.set_password("guest", "")
    with pytest.raises(InvalidAccessError, match="'two words' cannot be a tag"):
        users.set_tags("guest", ["two words"])
    with pytest.raises(InvalidAccessError, match=re.escape("write ['administrator']")):
        users.set_tags("guest", "administrator")


# ---- login ----


def test_only_the_right_password_of_a_known_user_gets_in(users):
    users.add_user("ann", "pässword")
    assert users.authenticate("ann", "pässword") == User("ann")
    assert users.authenticate("ann", "pässword".encode()) == User("ann")
    for name, password in (("ann", "password"), ("ann", ""), ("Ann", "pässword"), ("bob", "pässword"), ("", "")):
        assert users.authenticate(name, password) is None


def test_a_thousand_reconnects_cost_one_hash(users, hasher, scale):
    for _ in range(scale.scale(1000)):
        assert users.authenticate("guest", "guest") is not None
    assert len(hasher.verified) == 1


def test_a_wrong_password_is_hashed_each_time_also_after_a_right_one(users, hasher):
    users.authenticate("guest", "guest")
    for _ in range(3):
        assert users.authenticate("guest", "wrong") is None
    assert len(hasher.verified) == 4


def test_an_unknown_name_costs_one_hash_with_the_parameters_of_a_known_one(users, hasher):
    assert users.authenticate("nobody", "guest") is None
    assert users.authenticate("guest", "wrong") is None
    unknown, known = hasher.verified
    assert unknown != known
    parameters = [argon2.extract_parameters(each) for each in (unknown, known)]
    assert parameters[0] == parameters[1]


def test_after_a_change_of_the_password_the_old_one_is_worth_nothing(users):
    assert users.authenticate("guest", "guest") is not None
    users.set_password("guest", "new")
    assert users.authenticate("guest", "guest") is None
    assert users.authenticate("guest", "new") is not None


def test_a_login_that_crosses_a_change_of_the_password_leaves_nothing_behind(users, hasher):
    def change():
        hasher.during_verify = lambda: None
        users.set_password("guest", "new")

    hasher.during_verify = change
    users.authenticate("guest", "guest")
    assert users.authenticate("guest", "guest") is None


def test_a_deleted_user_is_out_though_its_password_was_remembered(users):
    assert users.authenticate("guest", "guest") is not None
    users.delete_user("guest")
    assert users.authenticate("guest", "guest") is None


def test_a_remembered_login_has_the_tags_of_now(users):
    users.authenticate("guest", "guest")
    users.set_tags("guest", ["monitoring"])
    assert users.authenticate("guest", "guest") == User("guest", ("monitoring",))


def test_many_threads_may_log_in_and_change_at_once(users):
    failures = []

    def work(number):
        try:
            for _ in range(20):
                name = f"user{number}"
                users.add_user(name, "x")
                users.set_permissions(name, "/", "", "", "")
                if users.authenticate(name, "x") is None or users.authenticate("guest", "guest") is None:
                    failures.append(name)
                users.delete_user(name)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [user.name for user in users.list_users()] == ["guest"]


def test_a_login_is_dear_enough_to_make_guessing_slow(monkeypatch, tmp_path):
    monkeypatch.undo()
    with Users(tmp_path) as users:
        password_hash = users._accounts["guest"].password_hash
        parameters = argon2.extract_parameters(password_hash)
        assert parameters.type is argon2.Type.ID
        assert parameters.memory_cost >= 16 * 1024
        began = time.perf_counter()
        assert users.authenticate("guest", "wrong") is None
        assert time.perf_counter() - began > 0.002


# ---- permissions ----


def test_an_expression_is_searched_in_the_name(users):
    users.set_permissions("guest", "/", configure="^orders$", write="orders", read="^orders")
    permissions = Permissions(users, "guest", "/")
    names = ("orders", "orders.eu", "reorders")
    assert [permissions.check("configure", "queue", name) for name in names] == [True, False, False]
    assert [permissions.check("write", "queue", name) for name in names] == [True, True, True]
    assert [permissions.check("read", "exchange", name) for name in names] == [True, True, False]


@given(st.text())
def test_the_empty_expression_allows_no_name(name):
    permissions = Permissions(Fixed(Grant("", "", "")), "ann", "/")
    assert permissions.check("read", "queue", name) is (name == "")
    assert not permissions.check("write", "exchange", name)


class Fixed:
    """A grant that changes when the test says so."""

    def __init__(self, grant: Grant | None) -> None:
        self.version = 1
        self.current = grant
        self.asked = 0

    def grant(self, user: str, vhost: str) -> Grant | None:
        self.asked += 1
        return self.current


def test_the_default_exchange_is_asked_for_by_its_long_name():
    permissions = Permissions(Fixed(Grant("", "^amq[.]default$", "")), "ann", "/")
    assert permissions.check("write", "exchange", "")
    assert not permissions.check("write", "queue", "")
    assert not permissions.check("read", "exchange", "")


def test_without_a_grant_nothing_is_allowed():
    permissions = Permissions(Fixed(None), "ann", "/")
    assert not permissions.vhost_allowed
    assert not permissions.check("read", "queue", "")
    assert not permissions.check_topic("amq.topic", "write", "a")


def test_a_change_is_seen_by_the_next_question(users):
    permissions = Permissions(users, "guest", "/")
    assert permissions.check("write", "queue", "q")
    users.set_permissions("guest", "/", "", "^x$", "")
    assert not permissions.check("write", "queue", "q")
    users.set_topic_permissions("guest", "/", "t", "^a", "")
    assert not permissions.check_topic("t", "write", "b")
    users.clear_topic_permissions("guest", "/", "t")
    assert permissions.check_topic("t", "write", "b")
    assert permissions.vhost_allowed
    users.clear_permissions("guest", "/")
    assert not permissions.vhost_allowed
    users.set_permissions("guest", "/", "", "^q$", "")
    assert permissions.check("write", "queue", "q")
    users.delete_user("guest")
    assert not permissions.check("write", "queue", "q")


def test_answers_are_remembered_until_the_version_changes_and_never_too_many():
    source = Fixed(Grant(".*", ".*", ".*", {"t": TopicGrant("^{client}", ".*")}))
    permissions = Permissions(source, "ann", "/")
    for number in range(10_000):
        assert permissions.check("write", "queue", f"q{number}")
        assert permissions.check_topic("t", "write", f"c{number}.x", {"client": f"c{number}"})
    assert source.asked == 1
    assert len(permissions._answers) <= 4096
    assert len(permissions._topic_answers) <= 4096
    assert len(permissions._compiled) <= 4096
    source.version += 1
    source.current = None
    assert not permissions.check("write", "queue", "q9999")
    assert source.asked == 2


def test_a_topic_permission_narrows_its_exchange_and_no_other():
    grant = Grant(".*", ".*", ".*", {"amq.topic": TopicGrant(write="^a[.]", read="")})
    permissions = Permissions(Fixed(grant), "ann", "/")
    assert permissions.check_topic("amq.topic", "write", "a.b")
    assert not permissions.check_topic("amq.topic", "write", "b.a")
    assert not permissions.check_topic("amq.topic", "read", "a.b")
    assert permissions.check_topic("other", "write", "b.a")


def test_variables_stand_for_themselves_and_are_taken_literally():
    grant = Grant("", "", "", {"t": TopicGrant(write="^{vhost}[.]{username}[.]{client_id}$", read="^{unknown}$")})
    permissions = Permissions(Fixed(grant), ".*", "v")
    assert permissions.check_topic("t", "write", "v..*.7", {"client_id": "7"})
    assert not permissions.check_topic("t", "write", "v.bob.7", {"client_id": "7"})
    assert not permissions.check_topic("t", "write", "v..*.8", {"client_id": "7"})
    assert not permissions.check_topic("t", "write", "v.bob.7", {"client_id": "7", "username": "bob"})
    assert permissions.check_topic("t", "read", "{unknown}")


@given(st.text(), st.text())
def test_a_name_never_widens_a_topic_permission(name, key):
    expanded = re.compile(expand("^{username}$", {"username": name}))
    assert bool(expanded.search(key)) is (key in (name, name + "\n"))


@pytest.mark.parametrize(
    ("peer", "allowed"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.1", False),
        ("10.0.0.1", False),
        ("fe80::1%eth0", False),
        ("", True),
        ("localhost.example.com", False),
    ],
)
def test_some_users_may_log_in_from_this_machine_only(peer, allowed):
    assert loopback_allowed("guest", peer, ("guest",)) is allowed
    assert loopback_allowed("ann", peer, ("guest",))


# ---- words ----


def test_refusals_are_told_in_the_words_that_clients_know():
    assert access_refused_text("u", "/", "queue", "q") == (
        "ACCESS_REFUSED - access to queue 'q' in vhost '/' refused for user 'u'"
    )
    assert access_refused_text("u", "v", "exchange", "", "write") == (
        "ACCESS_REFUSED - write access to exchange 'amq.default' in vhost 'v' refused for user 'u'"
    )
    assert topic_refused_text("u", "/", "e", "a.b") == (
        "ACCESS_REFUSED - access to topic 'a.b' in exchange 'e' in vhost '/' refused for user 'u'"
    )
    assert vhost_refused_text("u", "v") == "NOT_ALLOWED - access to vhost 'v' refused for user 'u'"
    assert vhost_missing_text("v") == "NOT_ALLOWED - vhost v not found"
    assert login_refused_text("PLAIN").startswith(
        "ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN."
    )


@given(st.text(min_size=0, max_size=300), st.text(max_size=300))
def test_a_reply_text_always_fits_a_short_string(name, user):
    for text in (access_refused_text(user, "/", "queue", name), topic_refused_text(user, "/", name, name)):
        assert len(text.encode("utf-8", "replace")) <= 255
        assert text.startswith("ACCESS_REFUSED - access to ")
