"""What can go wrong between Spark and a store or a broker, as exceptions that name the value and the remedy.

No message has a secret in it: these texts reach Spark's logs, its user interface and the user's terminal.
"""

from __future__ import annotations

from warren.errors import WarrenError


class PipelineError(WarrenError):
    """The base of every error of the pipeline."""


class BrokerError(PipelineError):
    """The broker refused a request. `code` is one of its error codes ("forbidden", "fenced"), `reason` its words."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.reason} ({self.code})"


class BrokerDownError(PipelineError):
    """Nothing answers at the broker's address, or not for long enough."""


class CredentialsError(PipelineError):
    """No user or token was given, or they cannot be read, or they were about to leave the driver."""


class OptionError(PipelineError, ValueError):
    """An option that is not known, is missing, or has a value that cannot be."""


class ColumnError(PipelineError, ValueError):
    """A column that the table does not have, or has with another type."""


class VhostNotFoundError(PipelineError, LookupError):
    """The data directory has no such vhost."""


class DamagedMessageError(PipelineError):
    """A message that is there and cannot be read. `file` is below the vhost's directory; `offset` is where its bytes are."""

    def __init__(self, file: str, offset: int, seq_id: int, queue: str, why: str) -> None:
        super().__init__(file, offset, seq_id, queue, why)
        self.file = file
        self.offset = offset
        self.seq_id = seq_id
        self.queue = queue
        self.why = why

    def __str__(self) -> str:
        return (
            f"message {self.seq_id} of queue {self.queue!r} cannot be read: {self.why}, in {self.file} at offset "
            f"{self.offset}. failOnDataLoss=false passes over such messages; `warren store verify` lists all damage"
        )
