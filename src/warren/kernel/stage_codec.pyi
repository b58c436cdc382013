Buffer = bytes | bytearray | memoryview

STAGE_PREFIX_BYTES: int

def encode_stage(heads: list[bytes], numbers: Buffer, ends: Buffer, bodies: Buffer) -> bytes: ...
def decode_stage(
    data: bytes, most: int, heads: list[bytes], counts: list[int], bodies: list[bytes], ends: list[int]
) -> int: ...
