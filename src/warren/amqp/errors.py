"""What ends a channel or a connection, with RabbitMQ's reply codes and the words that RabbitMQ's users search for."""

from __future__ import annotations

NAMES = {
    311: "CONTENT_TOO_LARGE",
    312: "NO_ROUTE",
    313: "NO_CONSUMERS",
    320: "CONNECTION_FORCED",
    402: "INVALID_PATH",
    403: "ACCESS_REFUSED",
    404: "NOT_FOUND",
    405: "RESOURCE_LOCKED",
    406: "PRECONDITION_FAILED",
    501: "FRAME_ERROR",
    502: "SYNTAX_ERROR",
    503: "COMMAND_INVALID",
    504: "CHANNEL_ERROR",
    505: "UNEXPECTED_FRAME",
    506: "RESOURCE_ERROR",
    530: "NOT_ALLOWED",
    540: "NOT_IMPLEMENTED",
    541: "INTERNAL_ERROR",
}
# These close the connection; the others only the channel.
HARD = frozenset((320, 402, 501, 502, 503, 504, 505, 530, 540, 541))
_MOST_TEXT_BYTES = 255


class AmqpError(Exception):
    """A method that cannot be done. `code` says whether its channel or the whole connection is closed for it."""

    def __init__(self, code: int, text: str, class_id: int = 0, method_id: int = 0) -> None:
        super().__init__(f"{code} {NAMES.get(code, '')} - {text}")
        self.code = code
        self.text = f"{NAMES[code]} - {text}" if code in NAMES else text
        self.class_id = class_id
        self.method_id = method_id

    @property
    def hard(self) -> bool:
        return self.code in HARD

    @property
    def reply_text(self) -> str:
        """As much of the text as a short string holds."""
        data = self.text.encode("utf-8", "surrogateescape")
        return data[:_MOST_TEXT_BYTES].decode("utf-8", "ignore" if len(data) > _MOST_TEXT_BYTES else "surrogateescape")


def check_utf8(what: str, name: str) -> None:
    """Names from the network are any bytes; those of what is kept are text, also for whoever reads the files."""
    try:
        name.encode()
    except UnicodeEncodeError:
        shown = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        raise AmqpError(406, f"{what} '{shown}' is not UTF-8") from None


class HardError(AmqpError):
    """An error that closes the connection whatever its code."""

    @property
    def hard(self) -> bool:
        return True
