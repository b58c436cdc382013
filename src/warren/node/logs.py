"""The node's log: one line an event, as text for people or as JSON for machines."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

# Clients choose names, also before they log in, and errors show them: a line break would begin a line of their own, an
# escape sequence would paint the operator's terminal. C1 controls, and Unicode's own line breaks, are of that kind as well.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def one_line(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A processor: an event is one line of text, whatever it quotes.

    >>> one_line(None, "info", {"event": "no queue 'a\\nb'"})
    {'event': "no queue 'a\\\\nb'"}
    """
    text = event.get("event")
    if isinstance(text, str):
        event["event"] = _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
    return event


def configure(log_format: str, level: str) -> None:
    """Send everything that the standard logging gets to standard error."""
    before: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.stdlib.PositionalArgumentsFormatter(),
    ]
    renderer: Any
    if log_format == "json":
        before.append(structlog.processors.format_exc_info)
        renderer = structlog.processors.JSONRenderer()
    else:
        before.append(one_line)
        # Without rich: its tracebacks show the values of all variables, and those of a login are secrets.
        renderer = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=before,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
