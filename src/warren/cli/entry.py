"""The entry point of the installed command. It imports nothing of its own before it is ready for a Ctrl-C."""

from __future__ import annotations

import sys

_INTERRUPTED = 130  # as shells have it: 128 and the number of SIGINT


def main() -> None:
    try:
        from warren.cli.main import app

        app()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
