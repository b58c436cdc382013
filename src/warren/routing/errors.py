"""What routing refuses, with the reply code of AMQP and the words of RabbitMQ.

Clients and their tests compare these texts, so they are RabbitMQ's, letter for letter where it says something useful.
"""

from __future__ import annotations

from warren.errors import WarrenError

ACCESS_REFUSED = 403
NOT_FOUND = 404
PRECONDITION_FAILED = 406
COMMAND_INVALID = 503

_NAMES = {
    ACCESS_REFUSED: "ACCESS_REFUSED",
    NOT_FOUND: "NOT_FOUND",
    PRECONDITION_FAILED: "PRECONDITION_FAILED",
    COMMAND_INVALID: "COMMAND_INVALID",
}


class RoutingError(WarrenError):
    """An exchange or binding that cannot be, or is not there.

    >>> error = RoutingError(NOT_FOUND, "no exchange 'orders' in vhost '/'")
    >>> error.reply_code, error.text
    (404, "no exchange 'orders' in vhost '/'")
    >>> error.reply_text
    "NOT_FOUND - no exchange 'orders' in vhost '/'"
    """

    def __init__(self, reply_code: int, text: str) -> None:
        super().__init__(text)
        self.reply_code = reply_code
        self.text = text

    @property
    def closes_connection(self) -> bool:
        """Hard errors of AMQP close the connection, soft ones only the channel."""
        return self.reply_code == COMMAND_INVALID

    @property
    def reply_text(self) -> str:
        """The text as RabbitMQ sends it in channel.close or connection.close."""
        return f"{_NAMES[self.reply_code]} - {self.text}"


class PolicyError(WarrenError, ValueError):
    """A policy that cannot be: its pattern, a key or a value."""
