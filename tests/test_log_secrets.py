"""What goes wrong is logged with its way through the code, and without the values on that way: some of them are secrets."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import logging
from warren.node.logs import configure

def check(password):
    raise RuntimeError("no such user")

configure({format!r}, "info")
try:
    check("hunter2" * 2)
except RuntimeError:
    logging.getLogger("warren.node").exception("a login failed")
"""


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_traceback_in_the_log_shows_no_values(log_format):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(format=log_format)], capture_output=True, text=True, check=True, timeout=60
    )
    assert "a login failed" in done.stderr
    assert "in check" in done.stderr
    assert "RuntimeError: no such user" in done.stderr
    assert "hunter2hunter2" not in done.stderr


FORGED = """
import logging
from warren.node.logs import configure

configure({format!r}, "info")
logging.getLogger("warren.amqp").info("no queue %s", "a\\n2026-01-01 [error] forged\\x1b[2J\\u2028\\x9b\\r!")
"""


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_name_that_a_client_chose_neither_begins_a_line_of_the_log_nor_moves_the_cursor(log_format):
    done = subprocess.run(
        [sys.executable, "-c", FORGED.format(format=log_format)], capture_output=True, check=True, timeout=60
    )
    text = done.stderr.decode()
    assert text.count("forged") == 1
    assert text.endswith("\n")
    assert not any(ord(each) < 32 or 127 <= ord(each) < 160 or each == "\u2028" for each in text[:-1])
