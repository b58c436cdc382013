"""Who may log in, which vhosts there are, and what each user may do in each: the SQLite file `node.db`.

Rules:

1. What a method changed is synced when it returns. All of it is in RAM too, and questions are answered from there: this
   process holds the file alone, so nobody else can change it underneath.
2. `version` rises with every change, after the change can be seen. Who keeps an answer reads the version before asking.
3. Passwords are kept as Argon2id hashes, in a file that only its owner may read. A login costs about 20 ms and 16 MiB: enough
   to make guessing dear, not enough to make a thousand clients that come back at once wait for minutes.
4. Those thousand cost one hash: of a password that was right, a digest is kept (BLAKE2b, with a key that lives and dies with
   this process), together with the hash it was right for. A changed password has another hash, so its old digest is worth
   nothing, also when a login and the change cross.
5. A name that nobody has costs as much as a wrong password, so that time does not tell who exists.
6. A first start makes the default vhost, and the default user with all permissions on it, in one commit. Later starts do not:
   a `guest` that was deleted stays deleted.
7. Any thread may call. `authenticate` may take its 20 ms: call it from a thread that may wait. `remembers` does not.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
import sqlite3
import threading
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import argon2

from warren.errors import (
    DiskFullError,
    StoreClosedError,
    StoreFailedError,
    StoreFormatError,
    StoreLockedError,
    StorePathError,
    WarrenError,
)
from warren.storage.running_node import running_node
from warren.vhost.permissions import Grant, TopicGrant

FILE_NAME = "node.db"

_APPLICATION_ID = 0x57524E4E  # "WRNN", in the header of the file
_NAME_BYTES = 255  # an AMQP short string
_LOCK_SECONDS = 5.0  # how long a node waits for one that is just going

# About 20 ms on one core of a server of 2020. More memory rather than more rounds: that is what guessing machines lack.
_HASHER = argon2.PasswordHasher(time_cost=2, memory_cost=16 * 1024, parallelism=1)

# Step n takes the file from format n - 1 to format n. A step that was ever released is not edited.
_MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE vhosts (name TEXT PRIMARY KEY) WITHOUT ROWID",
        "CREATE TABLE users (name TEXT PRIMARY KEY, password_hash TEXT NOT NULL, tags TEXT NOT NULL) WITHOUT ROWID",
        """
        CREATE TABLE permissions (
            user TEXT NOT NULL REFERENCES users (name) ON DELETE CASCADE,
            vhost TEXT NOT NULL REFERENCES vhosts (name) ON DELETE CASCADE,
            configure TEXT NOT NULL, write TEXT NOT NULL, read TEXT NOT NULL,
            PRIMARY KEY (user, vhost)
        ) WITHOUT ROWID
        """,
        """
        CREATE TABLE topic_permissions (
            user TEXT NOT NULL REFERENCES users (name) ON DELETE CASCADE,
            vhost TEXT NOT NULL REFERENCES vhosts (name) ON DELETE CASCADE,
            exchange TEXT NOT NULL,
            write TEXT NOT NULL, read TEXT NOT NULL,
            PRIMARY KEY (user, vhost, exchange)
        ) WITHOUT ROWID
        """,
    ),
    # Vhosts whose deletion was answered, or is about to be, and whose directory may still be there.
    ("CREATE TABLE vhosts_deleted (name TEXT PRIMARY KEY) WITHOUT ROWID",),
)

FORMAT_VERSION = len(_MIGRATIONS)


class UsersError(WarrenError):
    """The base of what can be wrong with a change of users, permissions and vhosts."""


class NotKnownError(UsersError, LookupError):
    """There is no such user or vhost."""


class AlreadyKnownError(UsersError):
    """There is a user or vhost of that name."""


class InvalidAccessError(UsersError, ValueError):
    """A name, password, tag or regular expression that cannot be."""


@dataclass(frozen=True, slots=True)
class User:
    """Somebody who may log in.

    >>> User("ann", ("monitoring",)).is_administrator
    False
    """

    name: str
    tags: tuple[str, ...] = ()  # sorted

    @property
    def is_administrator(self) -> bool:
        return "administrator" in self.tags


@dataclass(frozen=True, slots=True)
class PermissionEntry:
    """A row of `list_permissions`."""

    user: str
    vhost: str
    configure: str
    write: str
    read: str


@dataclass(frozen=True, slots=True)
class TopicPermissionEntry:
    """A row of `list_topic_permissions`."""

    user: str
    vhost: str
    exchange: str
    write: str
    read: str


@dataclass(frozen=True, slots=True)
class _Account:
    user: User
    password_hash: str


class Users:
    """The file `node.db` of a data directory, opened or created.

    >>> import tempfile
    >>> users = Users(tempfile.mkdtemp())
    >>> users.add_user("ann", "secret", tags=["monitoring"])
    >>> users.set_permissions("ann", "/", configure="", write="^orders$", read=".*")
    >>> users.authenticate("ann", "secret")
    User(name='ann', tags=('monitoring',))
    >>> users.authenticate("ann", "wrong") is None
    True
    >>> users.grant("ann", "/").write
    '^orders$'
    >>> users.close()
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        *,
        default_user: str = "guest",
        default_pass: str = "guest",
        default_vhost: str = "/",
        lock_seconds: float = _LOCK_SECONDS,
    ) -> None:
        """Raises StoreLockedError when another process has the file, StoreFormatError when it is not ours or too new."""
        self.path = os.path.join(os.fspath(data_dir), FILE_NAME)
        self._lock = threading.RLock()
        self._version = 1
        self._accounts: dict[str, _Account] = {}
        self._vhosts: dict[str, None] = {}  # a dict for its order
        self._deleted: set[str] = set()  # vhosts whose directories may still be there
        self._permissions: dict[tuple[str, str], Grant] = {}  # by user and vhost; without topics
        self._topics: dict[tuple[str, str], dict[str, TopicGrant]] = {}
        self._grants: dict[tuple[str, str], Grant] = {}  # the two before, put together
        self._verified: dict[str, tuple[str, bytes]] = {}  # name -> hash, digest of the password that fits it
        self._secret = secrets.token_bytes(64)
        self._nobodys_hash = _HASHER.hash(secrets.token_bytes(16))
        self._open = True
        with self._clear_errors():
            _create_private(self.path)
            self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=lock_seconds)
        try:
            with self._clear_errors():
                # Held from the first read until the close.
                self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
                version = self._check_format()
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = FULL")
                self._db.execute("PRAGMA foreign_keys = ON")
                self._migrate(version, default_user, default_pass, default_vhost)
                self._load()
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """Rises with every change."""
        return self._version

    # ---- users ----

    def add_user(self, name: str, password: str, tags: Iterable[str] = ()) -> None:
        """Raises AlreadyKnownError, InvalidAccessError."""
        _check_name("a user", name)
        account = _Account(User(name, _check_tags(tags)), _hash(name, password))
        with self._lock:
            if name in self._accounts:
                raise AlreadyKnownError(f"there is a user {name!r}; set a password or tags, or delete it first")
            self._commit(("INSERT INTO users VALUES (?, ?, ?)", _user_row(account)))
            self._accounts[name] = account
            self._version += 1

    def delete_user(self, name: str) -> None:
        """Delete a user and all of its permissions. Raises NotKnownError."""
        with self._lock:
            self._account(name)
            self._commit(("DELETE FROM users WHERE name = ?", (name,)))
            del self._accounts[name]
            self._verified.pop(name, None)
            self._forget([key for key in {*self._permissions, *self._topics} if key[0] == name])
            self._version += 1

    def set_password(self, name: str, password: str) -> None:
        """Raises NotKnownError, InvalidAccessError. Connections that are open stay open."""
        self._account(name)  # before the hash is paid for
        password_hash = _hash(name, password)
        with self._lock:
            account = replace(self._account(name), password_hash=password_hash)
            self._commit(("UPDATE users SET password_hash = ? WHERE name = ?", (password_hash, name)))
            self._accounts[name] = account
            self._verified.pop(name, None)
            self._version += 1

    def set_tags(self, name: str, tags: Iterable[str]) -> None:
        """Give a user these tags in place of those it has. Raises NotKnownError, InvalidAccessError."""
        checked = _check_tags(tags)
        with self._lock:
            account = replace(self._account(name), user=User(name, checked))
            self._commit(("UPDATE users SET tags = ? WHERE name = ?", (json.dumps(checked), name)))
            self._accounts[name] = account
            self._version += 1

    def user(self, name: str) -> User | None:
        """A user by name."""
        account = self._accounts.get(name)
        return account.user if account else None

    def list_users(self) -> list[User]:
        """Every user, by name."""
        with self._lock:
            return [self._accounts[name].user for name in sorted(self._accounts)]

    def stamp(self, name: str) -> str | None:
        """What changes with a user's password, and is another one for another user of the same name; None: there is no
        such user. Tokens and tickets carry it, so that they end with the password that they stem from."""
        account = self._accounts.get(name)
        return None if account is None else _stamp(account.password_hash)

    def stamp_in(self, vhost: str, name: str, stamp: str | None = None) -> str | None:
        """What changes also with what the user may read in a vhost; None: he may not enter it. Tickets carry it, so that they
        end with that right. With `stamp` it is that of who had this stamp, and has what the user has now."""
        stamp = self.stamp(name) if stamp is None else stamp
        grant = self._permissions.get((name, vhost))
        return None if stamp is None or grant is None else f"{stamp}.{_stamp(grant.read)}"

    def stamps(self, name: str) -> dict[str, str]:
        """Of a user, by vhost: all that he may enter."""
        with self._lock:
            found = {vhost: self.stamp_in(vhost, name) for vhost in self._vhosts}
        return {vhost: stamp for vhost, stamp in found.items() if stamp is not None}

    def authenticate(self, name: str, password: str | bytes) -> User | None:
        """The user, if the password is right; None, after as long a time, if it is not or there is no such user."""
        account = self._accounts.get(name)
        if account is not None and self._is_verified(account, self._digest(password)):
            return account.user
        right = _fits(account.password_hash if account else self._nobodys_hash, _as_bytes(password))
        if account is None or not right:
            return None
        with self._lock:
            # Deleted or changed while the hash was computed: the next login decides anew.
            if self._accounts.get(name) is account:
                self._verified[name] = (account.password_hash, self._digest(password))
        return account.user

    def remembers(self, name: str, password: str | bytes) -> bool:
        """Was this password of this user right before, and is it still his? At once; False says nothing."""
        account = self._accounts.get(name)
        return account is not None and self._is_verified(account, self._digest(password))

    def _digest(self, password: str | bytes) -> bytes:
        return hashlib.blake2b(_as_bytes(password), key=self._secret, digest_size=32).digest()

    def _is_verified(self, account: _Account, digest: bytes) -> bool:
        known_hash, known_digest = self._verified.get(account.user.name, ("", b""))
        return known_hash == account.password_hash and hmac.compare_digest(known_digest, digest)

    # ---- permissions ----

    def set_permissions(self, user: str, vhost: str, configure: str, write: str, read: str) -> None:
        """Allow a user what these expressions are found in; see `permissions.py`. Raises NotKnownError, InvalidAccessError.

        >>> import tempfile
        >>> users = Users(tempfile.mkdtemp())
        >>> users.set_permissions("guest", "/", configure="", write="orders(", read="")
        Traceback (most recent call last):
        warren.node.users.InvalidAccessError: the write permission 'orders(' is not a regular expression: missing ), \
unterminated subpattern at position 6
        >>> users.close()
        """
        for kind, expression in (("configure", configure), ("write", write), ("read", read)):
            _check_expression(f"the {kind} permission", expression)
        with self._lock:
            self._account(user)
            self._check_vhost(vhost)
            row = (user, vhost, configure, write, read)
            self._commit(("INSERT OR REPLACE INTO permissions VALUES (?, ?, ?, ?, ?)", row))
            self._permissions[user, vhost] = Grant(configure, write, read)
            self._compose(user, vhost)
            self._version += 1

    def clear_permissions(self, user: str, vhost: str) -> None:
        """Allow a user nothing in a vhost. Topic permissions stay, and have no effect until there are others again."""
        with self._lock:
            self._account(user)
            self._check_vhost(vhost)
            self._commit(("DELETE FROM permissions WHERE user = ? AND vhost = ?", (user, vhost)))
            self._permissions.pop((user, vhost), None)
            self._compose(user, vhost)
            self._version += 1

    def list_permissions(self, user: str | None = None, vhost: str | None = None) -> list[PermissionEntry]:
        """Permissions, by user and vhost; of one user or of one vhost, if given."""
        with self._lock:
            return [
                PermissionEntry(*key, grant.configure, grant.write, grant.read)
                for key, grant in sorted(self._permissions.items(), key=lambda item: item[0])
                if user in (None, key[0]) and vhost in (None, key[1])
            ]

    def set_topic_permissions(self, user: str, vhost: str, exchange: str, write: str, read: str) -> None:
        """Narrow a topic exchange for a user to some routing keys; `{username}` and `{vhost}` stand for themselves.

        Raises NotKnownError, InvalidAccessError.
        """
        _check_expression("the write permission for topics", write)
        _check_expression("the read permission for topics", read)
        with self._lock:
            self._account(user)
            self._check_vhost(vhost)
            row = (user, vhost, exchange, write, read)
            self._commit(("INSERT OR REPLACE INTO topic_permissions VALUES (?, ?, ?, ?, ?)", row))
            # A new dict: the old one is in grants that others hold.
            self._topics[user, vhost] = {**self._topics.get((user, vhost), {}), exchange: TopicGrant(write, read)}
            self._compose(user, vhost)
            self._version += 1

    def clear_topic_permissions(self, user: str, vhost: str, exchange: str | None = None) -> None:
        """Narrow an exchange no more; all exchanges of the vhost, if none is given."""
        with self._lock:
            self._account(user)
            self._check_vhost(vhost)
            condition, row = "user = ? AND vhost = ?", [user, vhost]
            if exchange is not None:
                condition, row = condition + " AND exchange = ?", [*row, exchange]
            self._commit((f"DELETE FROM topic_permissions WHERE {condition}", row))
            topics = self._topics.get((user, vhost), {})
            self._topics[user, vhost] = {name: topic for name, topic in topics.items() if exchange not in (None, name)}
            self._compose(user, vhost)
            self._version += 1

    def list_topic_permissions(self, user: str | None = None, vhost: str | None = None) -> list[TopicPermissionEntry]:
        """Topic permissions, by user, vhost and exchange; of one user or of one vhost, if given."""
        with self._lock:
            return [
                TopicPermissionEntry(*key, exchange, topic.write, topic.read)
                for key, topics in sorted(self._topics.items(), key=lambda item: item[0])
                if user in (None, key[0]) and vhost in (None, key[1])
                for exchange, topic in sorted(topics.items(), key=lambda item: item[0])
            ]

    def grant(self, user: str, vhost: str) -> Grant | None:
        """What a user may do in a vhost; None: nothing. For `Permissions`, or to be sent to a vhost's process."""
        return self._grants.get((user, vhost))

    # ---- vhosts ----

    def add_vhost(self, name: str) -> None:
        """Raises AlreadyKnownError, InvalidAccessError. Nobody has permissions in a new vhost."""
        _check_name("a vhost", name)
        with self._lock:
            if name in self._vhosts:
                raise AlreadyKnownError(f"there is a vhost {name!r}; use it, or delete it first")
            if name in self._deleted:
                raise AlreadyKnownError(f"vhost {name!r} is being deleted; try again when that is done")
            self._commit(("INSERT INTO vhosts VALUES (?)", (name,)))
            self._vhosts[name] = None
            self._version += 1

    def delete_vhost(self, name: str) -> None:
        """Forget a vhost and all permissions in it. Raises NotKnownError.

        Its messages are not touched here: until `vhost_is_gone` is called its name stays among `deleted_vhosts`, and cannot
        be given again, or the next vhost of that name would come up with the messages of this one."""
        with self._lock:
            self._check_vhost(name)
            self._commit(
                ("INSERT OR REPLACE INTO vhosts_deleted VALUES (?)", (name,)),
                ("DELETE FROM vhosts WHERE name = ?", (name,)),
            )
            del self._vhosts[name]
            self._deleted.add(name)
            self._forget([key for key in {*self._permissions, *self._topics} if key[1] == name])
            self._version += 1

    def deleted_vhosts(self) -> list[str]:
        """Those that were deleted, and whose directories may still be there."""
        with self._lock:
            return sorted(self._deleted)

    def vhost_is_gone(self, name: str) -> None:
        """The directory of a deleted vhost is not there any more."""
        with self._lock:
            self._commit(("DELETE FROM vhosts_deleted WHERE name = ?", (name,)))
            self._deleted.discard(name)

    def vhosts(self) -> list[str]:
        """The name of every vhost, sorted."""
        with self._lock:
            return sorted(self._vhosts)

    def has_vhost(self, name: str) -> bool:
        return name in self._vhosts

    # ---- the state in RAM ----

    def _account(self, name: str) -> _Account:
        account = self._accounts.get(name)
        if account is None:
            raise NotKnownError(f"there is no user {name!r}; `warren users list` shows those there are")
        return account

    def _check_vhost(self, name: str) -> None:
        if name not in self._vhosts:
            raise NotKnownError(f"there is no vhost {name!r}; `warren vhosts list` shows those there are")

    def _compose(self, user: str, vhost: str) -> None:
        key = (user, vhost)
        grant = self._permissions.get(key)
        if not self._topics.get(key):
            self._topics.pop(key, None)
        if grant is None:
            self._grants.pop(key, None)
        else:
            self._grants[key] = replace(grant, topics=self._topics.get(key, {}))

    def _forget(self, keys: Iterable[tuple[str, str]]) -> None:
        for key in keys:
            self._permissions.pop(key, None)
            self._topics.pop(key, None)
            self._grants.pop(key, None)

    def _load(self) -> None:
        self._vhosts = dict.fromkeys(name for (name,) in self._db.execute("SELECT name FROM vhosts ORDER BY name"))
        self._deleted = {name for (name,) in self._db.execute("SELECT name FROM vhosts_deleted")}
        for name, password_hash, tags in self._db.execute("SELECT name, password_hash, tags FROM users"):
            self._accounts[name] = _Account(User(name, tuple(json.loads(tags))), password_hash)
        for user, vhost, *expressions in self._db.execute(
            "SELECT user, vhost, configure, write, read FROM permissions"
        ):
            self._permissions[user, vhost] = Grant(*expressions)
        columns = "user, vhost, exchange, write, read"
        for user, vhost, exchange, write, read in self._db.execute(f"SELECT {columns} FROM topic_permissions"):
            self._topics.setdefault((user, vhost), {})[exchange] = TopicGrant(write, read)
        for key in {*self._permissions, *self._topics}:
            self._compose(*key)

    # ---- the file ----

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        with self._lock:
            if self._open:
                self._open = False
                self._db.close()

    def __enter__(self) -> Users:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _commit(self, *statements: tuple[str, Iterable[object]]) -> None:
        with self._clear_errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                for statement, values in statements:
                    self._db.execute(statement, tuple(values))
                self._db.execute("COMMIT")
            except BaseException:
                # On a full disk SQLite may have rolled back by itself.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _check_format(self) -> int:
        application_id, version, tables = (
            int(self._db.execute(question).fetchone()[0])
            for question in ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_schema")
        )
        if application_id != _APPLICATION_ID and (application_id, version, tables) != (0, 0, 0):
            raise StoreFormatError(
                f"{self.path} is an SQLite database, but not one of Warren's nodes (application id {application_id:#x}, "
                f"not {_APPLICATION_ID:#x}); choose another data directory, or move that file away"
            )
        if version > FORMAT_VERSION:
            raise StoreFormatError(
                f"{self.path} has format version {version}, this Warren supports {FORMAT_VERSION} and older; "
                f"open it with the Warren that wrote it, or a newer one"
            )
        return version

    def _migrate(self, version: int, default_user: str, default_pass: str, default_vhost: str) -> None:
        for number, statements in enumerate(_MIGRATIONS[version:], version + 1):
            rows: list[tuple[str, Iterable[object]]] = [(statement, ()) for statement in statements]
            if number == 1:
                _check_name("a user", default_user)
                _check_name("a vhost", default_vhost)
                first = _Account(User(default_user, ("administrator",)), _hash(default_user, default_pass))
                rows += [
                    ("INSERT INTO vhosts VALUES (?)", (default_vhost,)),
                    ("INSERT INTO users VALUES (?, ?, ?)", _user_row(first)),
                    ("INSERT INTO permissions VALUES (?, ?, '.*', '.*', '.*')", (default_user, default_vhost)),
                ]
            rows.append((f"PRAGMA application_id = {_APPLICATION_ID}", ()))
            rows.append((f"PRAGMA user_version = {number}", ()))
            self._commit(*rows)

    @contextlib.contextmanager
    def _clear_errors(self) -> Iterator[None]:
        """Errors of SQLite become ours, with the path and the remedy."""
        try:
            yield
        except sqlite3.Error as error:
            if not self._open:
                raise StoreClosedError(f"{self.path} was closed") from None
            raise _clear_error(self.path, error) from error


def _clear_error(path: str, error: sqlite3.Error) -> WarrenError:
    kind = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if kind == sqlite3.SQLITE_FULL:
        return DiskFullError(f"no room to write {path}: {error}; free some space, then try again")
    if kind == sqlite3.SQLITE_NOTADB:
        return StoreFormatError(
            f"{path} is not a file of Warren's users; choose another data directory, or move it away"
        )
    if kind in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return StorePathError(f"cannot open {path} to write: {error}; the directory must exist and be writable")
    if kind in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        node = running_node(os.path.dirname(path))
        return StoreLockedError(
            f"{path} is in use by {node or 'another node'}; stop that one, or choose another data directory"
        )
    return StoreFailedError(f"{path}: {error}; stop the node and start it again")


def _create_private(path: str) -> None:
    """The file holds password hashes, so it is its owner's alone from the first moment on."""
    directory = os.path.dirname(path)
    try:
        os.makedirs(directory or ".", exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise StorePathError(
            f"cannot open {path} to write: {error.strerror}; the data directory must be a directory, and writable"
        ) from None


def _user_row(account: _Account) -> tuple[str, str, str]:
    return account.user.name, account.password_hash, json.dumps(account.user.tags)


def _stamp(text: str) -> str:
    # Of a hash of a password, whose salt is new each time, also when the same password is set again.
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


# ---- what can be ----


def _check_name(what: str, name: str) -> None:
    if not isinstance(name, str) or not name:
        raise InvalidAccessError(f"{name!r} cannot be the name of {what}; a name is text, and not empty")
    if len(name.encode("utf-8", "replace")) > _NAME_BYTES:
        raise InvalidAccessError(f"the name of {what}, {name[:20]!r}..., is longer than {_NAME_BYTES} bytes")
    if not name.isprintable():
        raise InvalidAccessError(f"{name!r} cannot be the name of {what}: it holds a character that cannot be seen")


def _check_tags(tags: Iterable[str]) -> tuple[str, ...]:
    if isinstance(tags, str):
        raise InvalidAccessError(f"tags are a list of words, not {tags!r}; write [{tags!r}]")
    checked = tuple(sorted(set(tags)))
    for tag in checked:
        if not re.fullmatch(r"[\w.-]+", tag):
            raise InvalidAccessError(f"{tag!r} cannot be a tag; a tag is one word, such as administrator or monitoring")
    return checked


def _check_expression(what: str, expression: str) -> None:
    if "[[:" in expression:  # Python would take it for a set of other characters
        raise InvalidAccessError(
            f"{what} {expression!r} has a POSIX class, which is not known; write \\w, \\d or [a-z]"
        )
    try:
        with warnings.catch_warnings():
            # What a later Python will read in another way must not become a permission.
            warnings.simplefilter("error", FutureWarning)
            re.compile(expression)
    except (re.error, FutureWarning, OverflowError, RecursionError) as error:
        raise InvalidAccessError(f"{what} {expression!r} is not a regular expression: {error}") from None


def _hash(name: str, password: str) -> str:
    if not isinstance(password, str) or not password:
        raise InvalidAccessError(f"the password of user {name!r} is empty; nobody could log in with it, so choose one")
    return _HASHER.hash(password.encode("utf-8", "surrogatepass"))


def _as_bytes(password: str | bytes) -> bytes:
    return password.encode("utf-8", "surrogatepass") if isinstance(password, str) else bytes(password)


def _fits(password_hash: str, password: bytes) -> bool:
    try:
        return _HASHER.verify(password_hash, password)
    except (argon2.exceptions.VerificationError, argon2.exceptions.InvalidHashError):
        return False
