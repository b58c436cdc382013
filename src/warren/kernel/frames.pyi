from typing import Any

from warren.kernel.frame_writer import HEARTBEAT_FRAME as HEARTBEAT_FRAME
from warren.kernel.frame_writer import ack_frame as ack_frame
from warren.kernel.frame_writer import content as content
from warren.kernel.frame_writer import deliveries as deliveries
from warren.kernel.frame_writer import method_frame as method_frame
from warren.kernel.frame_writer import nack_frame as nack_frame
from warren.kernel.frame_writer import publishes as publishes

METHOD: int
PUBLISH: int
ACK: int
HEARTBEAT: int
TOO_LARGE: int

class FrameScanner:
    frame_max: int
    max_message_size: int
    highest_channel: int
    def __init__(self, frame_max: int = 131072, max_message_size: int = 134217728) -> None: ...
    @property
    def error(self) -> tuple[int, str, int, int] | None: ...
    @property
    def buffered(self) -> int: ...
    @property
    def under_way(self) -> int: ...
    def stray(self, channels: dict[int, Any]) -> int: ...
    def feed(self, data: bytes | bytearray | memoryview, now: int) -> list[tuple[Any, ...]]: ...
    def forget(self, channel: int) -> None: ...
