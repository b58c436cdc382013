"""The configuration: which source wins, where a value came from, and what is said when it cannot be."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given
from typer.testing import CliRunner

from warren.cli import config as command
from warren.node.config import DEFAULT, KEYS, MASK, Config, ConfigError


@pytest.fixture
def toml(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "warren.toml"
        path.write_text(text)
        return path

    return write


def problem(flags=None, environ=None, file=None) -> str:
    """The one thing that is wrong."""
    with pytest.raises(ConfigError) as caught:
        Config.load(flags, environ or {}, file)
    [line] = caught.value.problems
    assert str(caught.value) == line
    return line


# ---- sources ----


def test_without_any_source_every_value_is_the_default():
    config = Config.load({}, environ={})
    assert config == Config()
    assert (config.amqp_port, config.http_port, config.durability) == (5672, 15672, "fsync")
    assert (config.heartbeat, config.frame_max, config.channel_max) == (60, 131072, 2047)
    assert (config.default_user, config.default_pass.get_secret_value()) == ("guest", "guest")
    assert config.loopback_users == ("guest",)
    assert set(config.origins) == set(KEYS)
    assert set(config.origins.values()) == {DEFAULT}


def test_a_flag_wins_over_the_environment_and_that_over_the_file(toml):
    file = toml("amqp_port = 1\nhttp_port = 1\nheartbeat = 1\n")
    environ = {"WARREN_HTTP_PORT": "2", "WARREN_HEARTBEAT": "2"}
    config = Config.load({"heartbeat": 3}, environ, file)
    assert (config.amqp_port, config.http_port, config.heartbeat) == (1, 2, 3)
    assert config.origins["amqp_port"] == f"file {file}, line 1"
    assert config.origins["http_port"] == "environment variable WARREN_HTTP_PORT"
    assert config.origins["heartbeat"] == "flag --heartbeat"
    assert config.origins["frame_max"] == DEFAULT


@given(st.sets(st.sampled_from(["file", "environment", "flag"])))
def test_the_highest_source_that_says_something_decides(tmp_path_factory, said):
    file = None
    if "file" in said:
        file = tmp_path_factory.mktemp("config") / "warren.toml"
        file.write_text("[tls]\nport = 1001\n")
    environ = {"WARREN_TLS__PORT": "1002"} if "environment" in said else {}
    flags = {"tls_port": 1003} if "flag" in said else {"tls_port": None}
    expected = [value for name, value in (("flag", 1003), ("environment", 1002), ("file", 1001)) if name in said]
    assert Config.load(flags, environ, file).tls.port == [*expected, 5671][0]


def test_a_table_is_merged_key_by_key_from_all_sources(toml):
    file = toml('[tls]\ncertfile = "file.pem"\nkeyfile = "file.key"\n')
    config = Config.load({"tls": {"port": 7}}, {"WARREN_TLS__KEYFILE": "environ.key"}, file)
    assert (str(config.tls.certfile), str(config.tls.keyfile), config.tls.port) == ("file.pem", "environ.key", 7)
    assert config.tls.enabled
    assert config.origins["tls.certfile"] == f"file {file}, line 2"
    assert config.origins["tls.keyfile"] == "environment variable WARREN_TLS__KEYFILE"
    assert config.origins["tls.port"] == "flag --tls-port"


def test_the_file_that_the_environment_names_is_read_unless_one_is_given(toml, tmp_path):
    other = tmp_path / "other.toml"
    other.write_text("heartbeat = 2\n")
    environ = {"WARREN_CONFIG": str(toml("heartbeat = 1\n"))}
    assert Config.load({}, environ).heartbeat == 1
    assert Config.load({}, environ, other).heartbeat == 2


def test_a_config_that_is_built_by_hand_reads_no_environment(monkeypatch):
    monkeypatch.setenv("WARREN_AMQP_PORT", "1")
    config = Config(http_port=0)
    assert (config.amqp_port, config.http_port) == (5672, 0)
    assert config.origins["http_port"] == "argument"
    assert Config.load().amqp_port == 1


@pytest.mark.parametrize("text", ["ann,bob", " ann , bob ", '["ann", "bob"]'])
def test_a_list_in_the_environment_is_words_or_json(text):
    assert Config.load({}, {"WARREN_LOOPBACK_USERS": text}).loopback_users == ("ann", "bob")


def test_an_empty_list_in_the_environment_is_an_empty_list():
    assert Config.load({}, {"WARREN_LOOPBACK_USERS": ""}).loopback_users == ()


@pytest.mark.parametrize("text", ["quorum=classic,stream=classic", '{"quorum": "classic", "stream": "classic"}'])
def test_aliases_in_the_environment_are_pairs_or_json(text):
    aliases = Config.load({}, {"WARREN_QUEUE_TYPE_ALIASES": text}).queue_type_aliases
    assert aliases == {"quorum": "classic", "stream": "classic"}


def test_aliases_in_the_file_are_a_table(toml):
    config = Config.load({}, {}, toml('[queue_type_aliases]\nquorum = "classic"\n'))
    assert config.queue_type_aliases == {"quorum": "classic"}


@pytest.mark.parametrize(("text", "size"), [("64KiB", 65536), ("64kB", 64000), ("65536", 65536)])
def test_a_size_may_have_a_unit(text, size):
    assert Config.load({}, {"WARREN_FRAME_MAX": text}).frame_max == size


def test_a_table_in_the_environment_may_be_json():
    config = Config.load({}, {"WARREN_TLS": '{"port": 7}'})
    assert config.tls.port == 7
    assert config.origins["tls.port"] == "environment variable WARREN_TLS"


def test_variables_of_other_things_are_left_alone():
    others = ("WARREN_DEBUG", "WARREN_TEST_SCALE", "WARREN_SERVICE_HOST", "WARREN_PORT", "WARREN_PORT_5672_TCP", "PATH")
    assert Config.load({}, dict.fromkeys(others, "tcp://10.0.0.1:5672")) == Config()


def test_a_config_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        Config().amqp_port = 1


# ---- what cannot be ----


def test_an_unknown_key_of_the_file_is_told_with_its_line_and_the_nearest_key(toml):
    file = toml('# comment\n\ndurabilty = "os"\n')
    assert problem(file=file) == (
        f"there is no key durabilty, which file {file}, line 3 sets to 'os'; did you mean durability?"
    )


def test_an_unknown_key_in_a_table_is_told_with_its_line(toml):
    file = toml('amqp_port = 1\n[tls]\n\ncertfil = "x"\n')
    assert problem(file=file) == (
        f"there is no key tls.certfil, which file {file}, line 4 sets to 'x'; did you mean tls.certfile?"
    )


def test_an_unknown_variable_is_told_by_its_name():
    assert problem(environ={"WARREN_AMPQ_PORT": "5"}) == (
        "there is no key ampq_port, which environment variable WARREN_AMPQ_PORT sets to '5'; did you mean WARREN_AMQP_PORT?"
    )


def test_an_unknown_flag_is_told_as_it_was_typed():
    said = problem({"htp_port": 5})
    assert said.startswith("there is no key htp_port, which flag --htp-port sets to 5; did you mean http_port?")


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("amqp_port", 65536, "it must be at most 65535"),
        ("amqp_port", -1, "it must be at least 0"),
        ("amqp_port", "many", "it must be a whole number"),
        ("amqp_port", True, "it must be a number, not true or false"),
        ("amqp_port", 1.5, "it must be a whole number"),
        ("frame_max", 4095, "it must be at least 4096"),
        ("frame_max", "12 parsecs", "it must be a size, such as 131072 or '128KiB'"),
        ("channel_max", 0, "it must be at least 1"),
        ("max_message_size", 134217729, "it must be at most 134217728"),
        ("memory_high_watermark", 1.5, "it must be at most 1.0"),
        ("memory_high_watermark", float("nan"), "it must be a number"),
        ("handshake_timeout", 0, "it must be more than 0.0"),
        ("inline", "perhaps", "it must be true or false"),
        ("host", "", "it must not be empty"),
        ("data_dir", "", "it must not be empty"),
        ("durability", "fsnc", "it must be 'fsync', 'os' or 'memory', did you mean 'fsync'?"),
        ("queue_type_aliases", "quorum", "it must be written as quorum=classic,stream=classic"),
        ("queue_type_aliases", {"quorum": "quorum"}, "it must be 'classic'"),
        ("tls.port", 65536, "it must be at most 65535"),
    ],
)
def test_a_value_that_cannot_be_is_told_with_key_value_origin_reason_and_meaning(key, value, reason):
    flag = "--" + key.replace("_", "-").replace(".", "-")
    said = problem({key: value})
    assert said.startswith(f"{key} = {value!r} (flag {flag}): {reason}; {key} is {KEYS[key].description} (default ")


def test_everything_that_is_wrong_is_told_at_once(toml):
    file = toml('amqp_port = "x"\nheartbeat = -1\nhots = "y"\n')
    with pytest.raises(ConfigError) as caught:
        Config.load({}, {"WARREN_INLINE": "7"}, file)
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"tls_certfile": "x"}, "tls (flag --tls-certfile): certfile and keyfile need each other; give both, or none"),
        ({"tls_verify": True}, "tls (flag --tls-verify): verify needs cafile, with the certificates to verify by"),
    ],
)
def test_keys_of_tls_that_do_not_fit_together_are_refused(flags, said):
    assert problem(flags) == said


def test_a_table_that_is_no_table_is_refused(toml):
    file = toml("tls = true\n")
    assert problem(file=file).startswith(
        f"tls = True (file {file}, line 1): it is a table, with the keys port, certfile"
    )
    assert "WARREN_TLS: '{\"port\":' is not JSON" in problem(environ={"WARREN_TLS": '{"port":'})


def test_a_file_that_is_not_there_or_not_toml_is_refused(toml, tmp_path):
    assert problem(file=tmp_path / "none.toml") == (
        f"cannot read the configuration file {tmp_path / 'none.toml'}: No such file or directory"
    )
    assert "is not TOML: " in problem(file=toml("amqp_port = \n"))
    (tmp_path / "latin.toml").write_bytes(b"host = '\xe9'")
    assert "is not TOML: " in problem(file=tmp_path / "latin.toml")


def test_a_secret_is_in_no_error_and_no_picture_of_the_config(toml):
    config = Config.load({}, {"WARREN_DEFAULT_PASS": "hunter2"})
    assert config.default_pass.get_secret_value() == "hunter2"
    assert "hunter2" not in repr(config) + str(config.entries())
    assert {entry.key: entry.value for entry in config.entries()}["default_pass"] == MASK
    assert "hunter2" not in problem(environ={"WARREN_DEFALT_PASS": "hunter2"})
    assert "hunter2" not in problem(file=toml("default_pass = ['hunter2']\n"))


@given(st.text(max_size=200))
def test_any_text_as_a_file_is_a_config_or_a_config_error(tmp_path_factory, text):
    file = tmp_path_factory.mktemp("any") / "warren.toml"
    file.write_bytes(text.encode("utf-8", "replace"))
    with contextlib.suppress(ConfigError):
        Config.load({}, {}, file)


@given(
    st.dictionaries(
        st.sampled_from([*KEYS, "tls", "nothing"]),
        st.one_of(st.text(max_size=8), st.integers(), st.booleans(), st.floats(), st.lists(st.integers(), max_size=2)),
    )
)
def test_any_value_of_any_key_is_taken_or_told_by_its_key(flags):
    try:
        config = Config.load(flags, {})
    except ConfigError as error:
        for line in error.problems:
            assert any(key in line or key.partition(".")[0] in line for key in flags), line
    else:
        assert all(config.origins[key] != DEFAULT for key in flags)


# ---- the command ----


def run(*arguments: object, **environ: str | None):
    return CliRunner().invoke(command.app, list(map(str, arguments)), env=environ)


def test_config_show_prints_every_key_its_value_and_its_origin(toml):
    file = toml('host = "[::1]"\ndefault_pass = "hunter2"\n')
    done = run("show", "--config", file, WARREN_HEARTBEAT="17")
    assert done.exit_code == 0
    lines = {line.split("│")[1].strip(): line for line in done.stdout.splitlines() if line.startswith("│")}
    assert set(KEYS) <= set(lines)
    assert "[::1]" in lines["host"]
    assert "line 1" in done.stdout
    assert "17" in lines["heartbeat"]
    assert "WARREN_HEARTBEAT" in lines["heartbeat"]
    assert MASK in lines["default_pass"]
    assert "hunter2" not in done.stdout


def test_config_show_prints_json(toml):
    done = run("show", "--config", toml("heartbeat = 5\n"), "--json")
    rows = {row["key"]: row for row in json.loads(done.stdout)}
    assert set(rows) == set(KEYS)
    assert rows["heartbeat"]["value"] == 5
    assert rows["heartbeat"]["origin"].endswith("line 1")
    assert rows["loopback_users"]["value"] == ["guest"]


def test_config_show_says_what_is_wrong_and_fails(toml):
    done = run("show", "--config", toml("hearbeat = 5\namqp_port = -1\n"))
    assert done.exit_code == 1
    assert [line.startswith("warren: ") for line in done.stderr.splitlines()] == [True, True]
    assert done.stdout == ""
