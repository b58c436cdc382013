from warren.kernel.entry import Entry
from warren.kernel.ranges import RangeSet

HEARTBEAT_FRAME: bytes

def fitting(entries: list[Entry], most_bytes: int) -> int: ...
def deliveries(
    channel: int,
    consumer_tag: bytes,
    first_tag: int,
    entries: list[Entry],
    redelivered_below: int,
    returned: RangeSet,
    frame_max: int,
) -> bytes: ...
def content(channel: int, method: bytes, head: bytes, body: bytes, frame_max: int) -> bytes: ...
def method_frame(channel: int, payload: bytes) -> bytes: ...
def ack_frame(channel: int, tag: int, multiple: bool) -> bytes: ...
def nack_frame(channel: int, tag: int, multiple: bool) -> bytes: ...
def publishes(
    channel: int,
    exchange: bytes,
    routing_key: bytes,
    bits: int,
    properties: bytes,
    bodies: list[bytes],
    frame_max: int,
) -> bytes: ...
