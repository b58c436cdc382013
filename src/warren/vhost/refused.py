"""Why a request of the data pipeline is not done: an HTTP status, a word for programs, a sentence for people."""

from __future__ import annotations

from warren.errors import WarrenError


class Refused(WarrenError):
    """
    >>> refused = Refused(409, "held", "lease 'etl' is held by another query")
    >>> refused.status, refused.code
    (409, 'held')
    """

    def __init__(self, status: int, code: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.code = code


def bad_request(reason: str) -> Refused:
    return Refused(400, "bad_request", reason)


def not_found(reason: str) -> Refused:
    return Refused(404, "not_found", reason)


def forbidden(reason: str) -> Refused:
    return Refused(403, "forbidden", reason)


def data_loss(reason: str) -> Refused:
    return Refused(409, "data_loss", reason)
