"""The configuration of a node: every key, its default, its limits, and where its value came from.

Rules:

1. Sources, the later wins: defaults, the TOML file, environment variables `WARREN_<KEY>`, flags of the command line.
2. The file is the one given, else the one that `WARREN_CONFIG` names, else none. A file that was named must be there.
3. Nested keys: `[tls] port = 5671` in the file, `WARREN_TLS__PORT=5671` in the environment, `--tls-port 5671` as a flag.
   Tables are merged key by key, lists and aliases replaced as a whole.
4. A key that is not known is an error, not a shrug: a misspelt `durabilty = "fsync"` would lose messages years later.
   All that is wrong is told at once, each with its value, its origin and a remedy.
5. `Config(...)` reads nothing but its arguments; only `Config.load` looks at files and the environment. So a test that
   builds one gets what it wrote.

In the environment a list is written `guest,admin`, aliases `quorum=classic`; both may be JSON too. A size may have a unit,
anywhere: `"128MiB"`.

```toml
data_dir = "data"
amqp_port = 5672
durability = "fsync"

[tls]
certfile = "server.pem"
keyfile = "server.key"
```
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from warren.errors import WarrenError
from warren.storage.settings import PRODUCERS_PER_QUEUE

PREFIX = "WARREN_"
FILE_VARIABLE = "WARREN_CONFIG"
DEFAULT = "default"
MASK = "********"

_MAX_MESSAGE_BYTES = 128 * 1024 * 1024  # what the storage engine takes

# Variables that begin like ours and are no keys: other parts of Warren read them, or a container platform sets them for a
# service that is called warren.
_OTHER_VARIABLES = re.compile(
    r"WARREN_(CONFIG|URL|USER|PASSWORD|TOKEN|DEBUG|KERNEL|LOGIC|TEST_\w+|FAULT_\w+|SERVICE_\w+|PORT|PORT_\d+_\w+)"
)


class ConfigError(WarrenError, ValueError):
    """Something in the configuration cannot be; `problems` has a line for each thing."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Entry(NamedTuple):
    """A key of the configuration as it is shown."""

    key: str
    value: Any  # as JSON knows it; a secret is masked
    origin: str
    description: str


# ---- kinds of values ----


def _number(value: object) -> object:
    # Python takes True for 1; a port does not.
    if isinstance(value, bool):
        raise ValueError("it must be a number, not true or false")
    return value


def _size(value: object) -> object:
    return int(TypeAdapter(ByteSize).validate_python(value)) if isinstance(value, str) else _number(value)


def _words(value: object) -> object:
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return json.loads(value)
    return tuple(word.strip() for word in value.split(",") if word.strip())


def _aliases(value: object) -> object:
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("{"):
        return json.loads(value)
    pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
    if not all(separator for _, separator, _ in pairs):
        raise ValueError("it must be written as quorum=classic,stream=classic")
    return {alias.strip(): kind.strip() for alias, _, kind in pairs}


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _path(value: object) -> object:
    return os.path.expanduser(value) if isinstance(value, str) and value else value


def _not_empty(value: object) -> object:
    if value == "":
        raise ValueError("it must not be empty")
    return value


Count = Annotated[int, BeforeValidator(_number)]
Size = Annotated[int, BeforeValidator(_size)]
Port = Annotated[Count, Field(ge=0, le=65535)]
Seconds = Annotated[float, BeforeValidator(_number), Field(ge=0, le=10**9, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1, max_length=255)]
FilePath = Annotated[Path, BeforeValidator(_path), BeforeValidator(_not_empty)]


class Tls(BaseModel):
    """The listener for AMQP over TLS. It is on when there is a certificate.

    >>> Tls(certfile="server.pem", keyfile="server.key").enabled
    True
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    port: Port = Field(default=5671, description="the port for AMQP over TLS; 0: any that is free")
    certfile: FilePath | None = Field(
        default=None, description="the server's certificate and its chain, in PEM; without, no TLS"
    )
    keyfile: FilePath | None = Field(default=None, description="the certificate's private key, in PEM")
    cafile: FilePath | None = Field(
        default=None, description="certificates of those who sign clients' certificates, in PEM"
    )
    verify: bool = Field(
        default=False, description="whether clients must show a certificate that is signed by one in cafile"
    )
    relays: Count = Field(default=1, ge=1, le=64, description="processes that encrypt and decrypt for all clients")
    http: bool = Field(default=False, description="whether HTTP, also that of the data server, is over TLS as well")

    @property
    def enabled(self) -> bool:
        return self.certfile is not None

    @property
    def http_files(self) -> tuple[str, str] | None:
        """Certificate and key for HTTP; None: it is in the clear."""
        if not self.http or self.certfile is None or self.keyfile is None:
            return None
        return str(self.certfile), str(self.keyfile)

    @model_validator(mode="after")
    def _fits_together(self) -> Tls:
        if (self.certfile is None) != (self.keyfile is None):
            raise ValueError("certfile and keyfile need each other; give both, or none")
        if self.http and self.certfile is None:
            raise ValueError("http needs certfile and keyfile")
        if self.verify and self.cafile is None:
            raise ValueError("verify needs cafile, with the certificates to verify by")
        return self


class Config(BaseSettings):
    """All that can be set. Frozen: a node that should be different is a new node.

    >>> Config(amqp_port=0, durability="os").amqp_port
    0
    >>> config = Config.load({"amqp_port": 5673}, environ={"WARREN_HEARTBEAT": "30"})
    >>> config.amqp_port, config.heartbeat, config.origins["heartbeat"]
    (5673, 30, 'environment variable WARREN_HEARTBEAT')
    """

    model_config = SettingsConfigDict(extra="forbid", frozen=True, env_prefix=PREFIX, env_nested_delimiter="__")

    data_dir: FilePath = Field(default=Path("data"), description="the directory of everything that is kept")
    # Not all interfaces: the status page asks nobody who he is.
    host: Text = Field(default="127.0.0.1", description="the address to listen on; 0.0.0.0 or :: for all")
    amqp_port: Port = Field(default=5672, description="the port for AMQP; 0: any that is free")
    http_port: Port = Field(default=15672, description="the port for HTTP; 0: any that is free")
    data_port: Port = Field(default=0, description="the port of the data server, for Spark; 0: any that is free")
    tls: Tls = Field(default=Tls(), description="AMQP over TLS")
    inline: bool = Field(default=False, description="whether all vhosts run in the node's own process")
    durability: Literal["fsync", "os", "memory"] = Field(
        default="fsync",
        description="what a confirm promises: safe from power loss, from a crash of the process, from nothing",
    )
    heartbeat: Count = Field(
        default=60, ge=0, le=65535, description="seconds between heartbeats that clients are offered; 0: none"
    )
    frame_max: Size = Field(
        default=131072, ge=4096, le=2**31 - 1, description="bytes of the largest frame that clients are offered"
    )
    channel_max: Count = Field(default=2047, ge=1, le=65535, description="channels a connection may open")
    max_message_size: Size = Field(
        default=_MAX_MESSAGE_BYTES, ge=1, le=_MAX_MESSAGE_BYTES, description="bytes of the largest body that is taken"
    )
    default_vhost: Text = Field(default="/", description="the vhost that a first start makes")
    default_user: Text = Field(default="guest", description="the administrator that a first start makes")
    default_pass: SecretStr = Field(
        default=SecretStr("guest"), min_length=1, description="the password of default_user"
    )
    loopback_users: Annotated[tuple[str, ...], BeforeValidator(_words), NoDecode] = Field(
        default=("guest",), description="users who may log in from this machine only"
    )
    vhost_processes: Count = Field(
        default=0, ge=0, le=1024, description="processes that share the vhosts; 0: one for each vhost"
    )
    vhost_restart_strategy: Literal["continue", "stop_node"] = Field(
        default="continue", description="what the node does when a vhost was restarted too often"
    )
    vhost_max_restarts: Count = Field(
        default=3, ge=0, le=1000, description="restarts of a vhost within vhost_restart_period"
    )
    vhost_restart_period: Seconds = Field(default=300, description="seconds in which vhost_max_restarts are counted")
    queue_type_aliases: Annotated[dict[str, Literal["classic"]], BeforeValidator(_aliases), NoDecode] = Field(
        default={"quorum": "classic"},
        description="values of x-queue-type that are taken for another, as in quorum=classic",
    )
    queue_decorators: Annotated[tuple[str, ...], BeforeValidator(_words), NoDecode] = Field(
        default=("consumer_capacity",),
        description="what is told of queues and their consumers; your own as module:Class",
    )
    consumer_timeout: Seconds = Field(
        default=0, description="seconds that a consumer may keep a message unacked; 0: for ever"
    )
    producers_per_queue: Count = Field(
        default=PRODUCERS_PER_QUEUE,
        ge=1,
        le=10**6,
        description="producers (x-producer-name) whose last number a queue remembers; the one silent for longest goes first",
    )
    memory_high_watermark: Annotated[float, BeforeValidator(_number)] = Field(
        default=0.4,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description="the part of the memory above which publishers are stopped",
    )
    disk_free_limit: Size = Field(
        default=50_000_000, ge=0, description="free bytes on disk below which publishers are stopped"
    )
    staged_limit: Size = Field(
        default=16 * 1024**3, ge=1, description="bytes that sinks of Spark may have staged in a vhost"
    )
    connection_max: Count = Field(
        default=0,
        ge=0,
        le=10**6,
        description="clients that a vhost process, or a TLS relay, may have; 0: as many as its open files allow",
    )
    handshake_timeout: Seconds = Field(default=10, gt=0, description="seconds that a client has to log in")
    max_handshakes: Count = Field(
        default=4000, ge=1, le=10**6, description="clients that may be logging in at one time"
    )
    max_handshakes_per_address: Count = Field(
        default=1000, ge=1, le=10**6, description="clients of one address that may be logging in at one time"
    )
    log_format: Annotated[Literal["text", "json"], BeforeValidator(_lower)] = Field(
        default="text", description="how the log looks"
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(_lower)] = Field(
        default="info", description="the least that is logged"
    )

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Rule 5: nothing but the arguments."""
        return (init_settings,)

    @classmethod
    def load(
        cls,
        flags: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
        file: str | os.PathLike[str] | None = None,
    ) -> Config:
        """The configuration from all sources. A flag of None was not given. Raises ConfigError.

        >>> Config.load({"amqp_prt": 5673}, environ={})
        Traceback (most recent call last):
        warren.node.config.ConfigError: there is no key amqp_prt, which flag --amqp-prt sets to 5673; did you mean amqp_port?
        """
        environ = os.environ if environ is None else environ
        gathering = _Gathering()
        named = file if file is not None else environ.get(FILE_VARIABLE) or None
        if named is not None:
            gathering.add_file(named)
        gathering.add_environment(environ)
        gathering.add(flags or {}, lambda key: f"flag --{re.sub('[._]', '-', key)}")
        try:
            config = cls(**gathering.nested())
        except ValidationError as error:
            gathering.problems += _explain(error, gathering)
        if gathering.problems:
            raise ConfigError(gathering.problems)
        config._origins = gathering.origins
        return config

    @property
    def origins(self) -> dict[str, str]:
        """Where the value of each key came from; nested keys with a dot, as in `tls.port`."""
        told = {key: "argument" for key in KEYS if key.partition(".")[0] in self.model_fields_set}
        return {key: (self._origins or told).get(key, DEFAULT) for key in KEYS}

    def entries(self) -> list[Entry]:
        """Every key with its value, for people to see: secrets are masked.

        >>> Config().entries()[0][:3]
        ('data_dir', 'data', 'default')
        """
        values = self.model_dump(mode="json")
        origins = self.origins
        entries = []
        for key, field in KEYS.items():
            outer, _, inner = key.partition(".")
            value = values[outer][inner] if inner else values[outer]
            entries.append(
                Entry(key, MASK if field.annotation is SecretStr else value, origins[key], field.description or "")
            )
        return entries


def _all_keys() -> dict[str, FieldInfo]:
    keys: dict[str, FieldInfo] = {}
    for name, field in Config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys |= {f"{name}.{inner}": each for inner, each in field.annotation.model_fields.items()}
        else:
            keys[name] = field
    return keys


KEYS = _all_keys()  # every key that can be set, nested ones with a dot
_TABLES = {key.partition(".")[0] for key in KEYS if "." in key}


# ---- gathering ----


class _Gathering:
    """Values from the sources, by key, with the origin of each; the later ones replace the earlier."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.problems: list[str] = []

    def add(self, values: Mapping[str, Any], origin: Callable[[str], str]) -> None:
        for key, value in _flat(values):
            if value is None:
                continue
            # A flag has no dots: --tls-port arrives as tls_port.
            known = next((each for each in KEYS if key in (each, each.replace(".", "_"))), None)
            if known is not None:
                self.values[known] = value
                self.origins[known] = origin(key)
            elif key in _TABLES:
                inner = ", ".join(each.partition(".")[2] for each in KEYS if each.startswith(f"{key}."))
                self.problems.append(f"{key} = {value!r} ({origin(key)}): it is a table, with the keys {inner}")
            else:
                self.problems.append(_unknown(key, value, origin(key)))

    def add_file(self, file: str | os.PathLike[str]) -> None:
        name = os.fspath(file)
        try:
            text = Path(file).read_bytes().decode("utf-8")
            values = tomllib.loads(text)
        except OSError as error:
            raise ConfigError([f"cannot read the configuration file {name}: {error.strerror}"]) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError([f"the configuration file {name} is not TOML: {error}"]) from None
        lines = _lines(text)

        def origin(key: str) -> str:
            line = lines.get(key) or lines.get(key.partition(".")[0])
            return f"file {name}, line {line}" if line else f"file {name}"

        self.add(values, origin)

    def add_environment(self, environ: Mapping[str, str]) -> None:
        ours = {name: value for name, value in environ.items() if name.startswith(PREFIX)}
        for name, value in ours.items():
            key = name.removeprefix(PREFIX).lower().replace("__", ".")
            if key not in KEYS and key not in _TABLES and not _OTHER_VARIABLES.fullmatch(name):
                self.problems.append(_unknown(key, value, f"environment variable {name}", _variable))
        source = EnvSettingsSource(Config)
        source.env_vars = {name.lower(): value for name, value in ours.items()}
        try:
            values = source()
        except SettingsError:
            tables = [name for name in ours if name.removeprefix(PREFIX).lower() in _TABLES]
            told = ", ".join(f"environment variable {name}: {ours[name]!r}" for name in tables)
            self.problems.append(f"{told} is not JSON; set the keys one by one, as in {PREFIX}TLS__PORT")
            return
        known = {key: value for key, value in _flat(values) if key in KEYS or key in _TABLES}

        def origin(key: str) -> str:
            name = PREFIX + key.replace(".", "__").upper()
            return f"environment variable {name if name in ours else name.partition('__')[0]}"

        self.add(known, origin)

    def nested(self) -> dict[str, Any]:
        nested: dict[str, Any] = {}
        for key, value in self.values.items():
            outer, _, inner = key.partition(".")
            if inner:
                nested.setdefault(outer, {})[inner] = value
            else:
                nested[outer] = value
        return nested


def _flat(values: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if key not in KEYS and isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", each) for inner, each in value.items())
        else:
            yield key, value


def _lines(text: str) -> dict[str, int]:
    """The line of each key of a TOML text, as well as can be told without a parser that keeps them."""
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\s*([\w.\"' -]+?)\s*\]", line):
            table = _plain(header[1]) + "."
            lines.setdefault(table[:-1], number)
        elif key := re.match(r"\s*([\w.\"' -]+?)\s*=", line):
            lines.setdefault(table + _plain(key[1]), number)
    return lines


def _plain(key: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in key.split("."))


# ---- what is wrong, in words ----


def _variable(key: str) -> str:
    """
    >>> _variable("tls.port")
    'WARREN_TLS__PORT'
    """
    return PREFIX + key.replace(".", "__").upper()


def _unknown(key: str, value: object, origin: str, spelt: Callable[[str], str] = str) -> str:
    shown = MASK if "pass" in key else repr(value)
    near = difflib.get_close_matches(key, KEYS, n=1)
    # Somebody who writes `port` means some port.
    parts = [each for each in KEYS if key in re.split("[._]", each)]
    guess = " or ".join(map(spelt, near or parts))
    remedy = f"did you mean {guess}?" if guess else "remove it"
    return f"there is no key {key}, which {origin} sets to {shown}; {remedy}"


def _explain(error: ValidationError, gathering: _Gathering) -> list[str]:
    problems = []
    for each in error.errors(include_url=False):
        where = ".".join(map(str, each["loc"]))
        key = next((known for known in KEYS if where == known or where.startswith(f"{known}.")), where)
        if key not in KEYS:  # a table whose keys do not fit together
            origins = [origin for name, origin in gathering.origins.items() if name.startswith(f"{key}.")]
            problems.append(f"{key} ({'; '.join(origins)}): {_reason(each)}")
            continue
        field = KEYS[key]
        secret = field.annotation is SecretStr
        shown = MASK if secret else repr(gathering.values[key])
        default = MASK if secret else _default(field)
        problems.append(
            f"{key} = {shown} ({gathering.origins[key]}): {_reason(each)}; {key} is {field.description} (default {default})"
        )
    return problems


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True, validated_data={})
    return str(default) if isinstance(default, Path) else repr(default)


def _reason(error: Any) -> str:
    limits = error.get("ctx", {})
    match error["type"]:
        case "int_parsing" | "int_type" | "int_from_float":
            return "it must be a whole number"
        case "float_parsing" | "float_type" | "finite_number":
            return "it must be a number"
        case "bool_parsing" | "bool_type":
            return "it must be true or false"
        case "string_type" | "path_type":
            return "it must be text"
        case "string_too_short" | "too_short":
            return "it must not be empty"
        case "greater_than_equal":
            return f"it must be at least {limits['ge']}"
        case "greater_than":
            return f"it must be more than {limits['gt']}"
        case "less_than_equal":
            return f"it must be at most {limits['le']}"
        case "literal_error":
            near = difflib.get_close_matches(str(error["input"]), re.findall(r"'([^']*)'", limits["expected"]), n=1)
            return f"it must be {limits['expected']}" + (f", did you mean {near[0]!r}?" if near else "")
        case "byte_size" | "byte_size_unit":
            return "it must be a size, such as 131072 or '128KiB'"
        case "value_error":
            return str(limits["error"])
    return str(error["msg"])
