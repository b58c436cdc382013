# cython: language_level=3
"""The message store's bytes: its table of messages, and the records of its files.

The table: msg_id -> file, offset, size, references, in rows of 32 bytes.

    256 shards, each an array of rows with open addressing and linear probing. A shard grows by half when it is 85 %
    full, so a row costs between 32 / 0.85 = 38 and 32 / (0.85 / 1.5) = 57 bytes, and growing needs room for one shard
    twice, never for the table twice. A deleted row is filled from behind (no tombstones), so a lookup stays short
    however many messages came and went. A shard less than a third full shrinks.

A row of size 0 is an empty slot. Every method holds the GIL from beginning to end and is atomic.

The records (the format is written down in `storage/store_format.py`) are packed, checked and searched for here,
because each of them needs a checksum. Packing and scanning let go of the GIL, where there is enough to do.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy, memset

cdef extern from "crc32c.h" nogil:
    void warren_crc_init()
    uint32_t warren_crc(uint32_t crc, const void *data, size_t size)

cdef extern from "<sys/mman.h>" nogil:
    void *mmap(void *address, size_t size, int protection, int flags, int fd, long offset)
    int munmap(void *address, size_t size)
    int PROT_READ, PROT_WRITE, MAP_PRIVATE, MAP_ANONYMOUS
    void *MAP_FAILED

warren_crc_init()

cdef enum:
    SHARDS = 256
    FIRST_CAPACITY = 16  # of a shard, in rows
    PAGE_ROWS = 128  # rows in a page of memory
    MAPPED_FROM_ROWS = 4 * PAGE_ROWS
    ID_BYTES = 16
    HEAD_BYTES = 28  # of a record: length, msg_id, CRC
    OVERHEAD_BYTES = 29  # the head and the end marker
    END_MARKER = 0xFF
    NO_GIL_ABOVE_BYTES = 65536  # below that, letting go of the GIL costs more than it gives

cdef struct Row:
    uint64_t head  # the first 8 bytes of the msg_id
    uint64_t tail  # the last 8
    uint32_t file
    uint32_t offset
    uint32_t size  # 0: the slot is empty
    uint32_t refs

cdef struct HintRow:
    uint64_t head
    uint64_t tail
    uint64_t offset
    uint64_t size

cdef struct Shard:
    Row *rows
    uint32_t capacity
    uint32_t count

ROW_BYTES = sizeof(Row)
HINT_ROW_BYTES = sizeof(HintRow)


cdef inline int id_of(bytes msg_id, uint64_t *head, uint64_t *tail) except -1:
    if msg_id is None or PyBytes_GET_SIZE(msg_id) != ID_BYTES:
        raise ValueError(f"a msg_id has 16 bytes, not {msg_id!r}")
    cdef const char *data = PyBytes_AS_STRING(msg_id)
    memcpy(head, data, 8)
    memcpy(tail, data + 8, 8)
    return 0


cdef inline bytes bytes_of(uint64_t head, uint64_t tail):
    cdef bytes out = PyBytes_FromStringAndSize(NULL, ID_BYTES)
    cdef char *data = PyBytes_AS_STRING(out)
    memcpy(data, &head, 8)
    memcpy(data + 8, &tail, 8)
    return out


cdef inline uint64_t mix(uint64_t head, uint64_t tail) noexcept nogil:
    """Ids are a constant and a counter, so every bit of both has to reach every bit of the hash."""
    cdef uint64_t x = head ^ (tail * <uint64_t>0x9E3779B97F4A7C15)
    x = (x ^ (x >> 32)) * <uint64_t>0xD6E8FEB86659FD93
    x = (x ^ (x >> 32)) * <uint64_t>0xD6E8FEB86659FD93
    return x ^ (x >> 32)


cdef inline uint32_t home_of(uint64_t hashed, uint32_t capacity) noexcept nogil:
    return <uint32_t>(((hashed & <uint64_t>0xFFFFFFFF) * capacity) >> 32)


cdef Row *new_rows(uint32_t capacity) noexcept nogil:
    """Zeroed rows, or NULL. Larger arrays are mapped, so that outgrown ones go back to the system at once instead of
    becoming holes in the heap."""
    cdef void *rows
    if capacity < MAPPED_FROM_ROWS:
        return <Row *>calloc(capacity, sizeof(Row))
    rows = mmap(NULL, capacity * sizeof(Row), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    return NULL if rows == MAP_FAILED else <Row *>rows


cdef void drop_rows(Shard *shard) noexcept nogil:
    if shard.capacity < MAPPED_FROM_ROWS:
        free(shard.rows)
    else:
        munmap(shard.rows, shard.capacity * sizeof(Row))


cdef inline uint32_t room_for(uint32_t rows) noexcept nogil:
    """A capacity near `rows`; a mapped array wastes no part of a page."""
    if rows < MAPPED_FROM_ROWS:
        return max(<uint32_t>FIRST_CAPACITY, rows)
    return rows - rows % PAGE_ROWS


cdef int resize(Shard *shard, uint32_t capacity) noexcept nogil:
    """Move the rows of `shard` to a new array. 0, or -1 where there is no memory; then nothing has changed."""
    cdef Row *rows = new_rows(capacity)
    cdef Row *row
    cdef uint32_t i, slot
    if rows == NULL:
        return -1
    for i in range(shard.capacity):
        row = &shard.rows[i]
        if row.size == 0:
            continue
        slot = home_of(mix(row.head, row.tail), capacity)
        while rows[slot].size != 0:
            slot += 1
            if slot == capacity:
                slot = 0
        rows[slot] = row[0]
    drop_rows(shard)
    shard.rows = rows
    shard.capacity = capacity
    return 0


cdef class StoreTable:
    cdef Shard shards[SHARDS]
    cdef readonly Py_ssize_t count

    def __cinit__(self):
        memset(self.shards, 0, sizeof(self.shards))
        self.count = 0

    def __dealloc__(self):
        self.free_rows()

    cdef void free_rows(self) noexcept:
        cdef int i
        for i in range(SHARDS):
            drop_rows(&self.shards[i])
        memset(self.shards, 0, sizeof(self.shards))
        self.count = 0

    # ---- one row ----

    cdef inline Row *find(self, uint64_t head, uint64_t tail) noexcept:
        cdef uint64_t hashed = mix(head, tail)
        cdef Shard *shard = &self.shards[hashed >> 56]
        cdef uint32_t slot
        cdef Row *row
        if shard.count == 0:
            return NULL
        slot = home_of(hashed, shard.capacity)
        while True:
            row = &shard.rows[slot]
            if row.size == 0:
                return NULL
            if row.tail == tail and row.head == head:
                return row
            slot += 1
            if slot == shard.capacity:
                slot = 0

    cdef Row *insert(self, uint64_t head, uint64_t tail) except NULL:
        """An empty slot for a row that is not there yet. The caller fills it; its size must not stay 0."""
        cdef uint64_t hashed = mix(head, tail)
        cdef Shard *shard = &self.shards[hashed >> 56]
        cdef uint32_t slot, capacity = shard.capacity
        if <uint64_t>(shard.count + 1) * 20 > <uint64_t>capacity * 17:
            capacity = room_for(capacity + (capacity >> 1))
            if resize(shard, capacity) != 0:
                raise MemoryError
        slot = home_of(hashed, capacity)
        while shard.rows[slot].size != 0:
            slot += 1
            if slot == capacity:
                slot = 0
        shard.count += 1
        self.count += 1
        shard.rows[slot].head = head
        shard.rows[slot].tail = tail
        return &shard.rows[slot]

    cdef void erase(self, Row *row) noexcept:
        cdef Shard *shard = &self.shards[mix(row.head, row.tail) >> 56]
        cdef Row *rows = shard.rows
        cdef uint32_t capacity = shard.capacity
        cdef uint32_t hole = <uint32_t>(row - rows)
        cdef uint32_t slot = hole, from_home, from_hole
        while True:
            slot += 1
            if slot == capacity:
                slot = 0
            if rows[slot].size == 0:
                break
            # A row may move back into the hole if that is not in front of its home.
            from_home = (slot + capacity - home_of(mix(rows[slot].head, rows[slot].tail), capacity)) % capacity
            from_hole = (slot + capacity - hole) % capacity
            if from_home >= from_hole:
                rows[hole] = rows[slot]
                hole = slot
        memset(&rows[hole], 0, sizeof(Row))
        shard.count -= 1
        self.count -= 1
        if capacity > 4 * FIRST_CAPACITY and shard.count * 3 < capacity:
            # Without memory for a smaller array the larger one stays.
            resize(shard, room_for(shard.count + (shard.count >> 1) + FIRST_CAPACITY))

    cdef int fill(self, uint64_t head, uint64_t tail, uint64_t file, uint64_t offset, uint64_t size,
                  uint64_t refs) except -1:
        cdef Row *row
        if size == 0 or refs == 0 or (file | offset | size | refs) >> 32:
            raise ValueError(f"no row can hold file {file}, offset {offset}, size {size}, refs {refs}")
        if self.find(head, tail) != NULL:
            raise ValueError(f"msg_id {bytes_of(head, tail).hex()} is in the table already")
        row = self.insert(head, tail)
        row.file = <uint32_t>file
        row.offset = <uint32_t>offset
        row.size = <uint32_t>size
        row.refs = <uint32_t>refs
        return 0

    def __len__(self):
        return self.count

    def __contains__(self, bytes msg_id):
        cdef uint64_t head = 0, tail = 0
        id_of(msg_id, &head, &tail)
        return self.find(head, tail) != NULL

    def put(self, bytes msg_id, uint64_t file, uint64_t offset, uint64_t size, uint64_t refs):
        cdef uint64_t head = 0, tail = 0
        id_of(msg_id, &head, &tail)
        self.fill(head, tail, file, offset, size, refs)

    def get(self, bytes msg_id):
        cdef uint64_t head = 0, tail = 0
        cdef Row *row
        id_of(msg_id, &head, &tail)
        row = self.find(head, tail)
        if row == NULL:
            return None
        return row.file, row.offset, row.size, row.refs

    def change_refs(self, bytes msg_id, long long delta):
        cdef uint64_t head = 0, tail = 0
        cdef long long refs
        cdef Row *row
        id_of(msg_id, &head, &tail)
        row = self.find(head, tail)
        if row == NULL:
            return None
        refs = row.refs + delta
        if refs > <long long>0xFFFFFFFF:
            raise OverflowError(f"{refs} references to message {msg_id.hex()}")
        if refs <= 0:
            self.erase(row)
            return 0
        row.refs = <uint32_t>refs
        return refs

    def move(self, bytes msg_id, uint32_t file, uint32_t offset):
        cdef uint64_t head = 0, tail = 0
        cdef Row *row
        id_of(msg_id, &head, &tail)
        row = self.find(head, tail)
        if row == NULL:
            return False
        row.file = file
        row.offset = offset
        return True

    def delete(self, bytes msg_id):
        cdef uint64_t head = 0, tail = 0
        cdef Row *row
        id_of(msg_id, &head, &tail)
        row = self.find(head, tail)
        if row == NULL:
            return False
        self.erase(row)
        return True

    def clear(self):
        self.free_rows()

    def allocated_bytes(self):
        """What the rows take, empty slots included."""
        cdef uint64_t total = sizeof(self.shards)
        cdef int i
        for i in range(SHARDS):
            total += <uint64_t>self.shards[i].capacity * sizeof(Row)
        return total

    # ---- many rows in one call ----

    def put_run(self, list msg_ids not None, uint64_t file, uint64_t offset, list sizes not None, list refs not None):
        cdef Py_ssize_t i
        cdef uint64_t head = 0, tail = 0, size
        for i in range(len(msg_ids)):
            id_of(<bytes?>msg_ids[i], &head, &tail)
            size = sizes[i]
            self.fill(head, tail, file, offset, size, refs[i])
            offset += size

    def release(self, list msg_ids not None):
        cdef list gone = []
        cdef dict freed = {}
        cdef bytes msg_id
        cdef uint64_t head = 0, tail = 0, bytes_freed = 0
        cdef uint32_t file = 0
        cdef Row *row
        for msg_id in msg_ids:
            id_of(msg_id, &head, &tail)
            row = self.find(head, tail)
            if row == NULL:
                continue
            if row.refs > 1:
                row.refs -= 1
                continue
            # Neighbours in a batch mostly lie in one file: add up before touching the dict.
            if row.file != file:
                if bytes_freed:
                    freed[file] = freed.get(file, 0) + bytes_freed
                file = row.file
                bytes_freed = 0
            bytes_freed += row.size
            gone.append(msg_id)
            self.erase(row)
        if bytes_freed:
            freed[file] = freed.get(file, 0) + bytes_freed
        return gone, freed

    def count_refs(self, list msg_ids not None, uint32_t count=1):
        cdef bytes msg_id
        cdef uint64_t head = 0, tail = 0
        cdef Row *row
        for msg_id in msg_ids:
            id_of(msg_id, &head, &tail)
            row = self.find(head, tail)
            if row == NULL:
                self.fill(head, tail, 0, 0, 1, count)
            elif <uint64_t>row.refs + count > <uint64_t>0xFFFFFFFF:
                raise OverflowError(f"too many references to message {msg_id.hex()}")
            else:
                row.refs += count

    def live(self, const unsigned char[::1] hint_rows not None, uint32_t file):
        cdef Py_ssize_t i, n = hint_rows.shape[0] // sizeof(HintRow), kept = 0
        cdef HintRow hint
        cdef Row *row
        cdef bytearray out = bytearray(n * sizeof(HintRow))
        cdef char *to = out
        for i in range(n):
            memcpy(&hint, &hint_rows[i * sizeof(HintRow)], sizeof(HintRow))
            row = self.find(hint.head, hint.tail)
            if row != NULL and row.file == file and row.offset == hint.offset:
                memcpy(to + kept * sizeof(HintRow), &hint, sizeof(HintRow))
                kept += 1
        return bytes(out[:kept * sizeof(HintRow)])

    def move_run(self, const unsigned char[::1] hint_rows not None, uint32_t file, uint32_t new_file,
                 uint64_t new_offset):
        cdef Py_ssize_t i, n = hint_rows.shape[0] // sizeof(HintRow)
        cdef HintRow hint
        cdef Row *row
        cdef uint64_t moved = 0
        for i in range(n):
            memcpy(&hint, &hint_rows[i * sizeof(HintRow)], sizeof(HintRow))
            row = self.find(hint.head, hint.tail)
            if row != NULL and row.file == file and row.offset == hint.offset:
                row.file = new_file
                row.offset = <uint32_t>new_offset
                moved += row.size
            new_offset += hint.size
        return moved

    def recover(self, const unsigned char[::1] hint_rows not None, uint32_t file, StoreTable refs not None):
        cdef Py_ssize_t i, n = hint_rows.shape[0] // sizeof(HintRow)
        cdef HintRow hint
        cdef Row *counted
        cdef uint64_t valid = 0
        for i in range(n):
            memcpy(&hint, &hint_rows[i * sizeof(HintRow)], sizeof(HintRow))
            counted = refs.find(hint.head, hint.tail)
            if counted == NULL or self.find(hint.head, hint.tail) != NULL:
                continue
            self.fill(hint.head, hint.tail, file, hint.offset, hint.size, counted.refs)
            valid += hint.size
        return valid

    def absent_from(self, StoreTable other not None):
        cdef list out = []
        cdef int i
        cdef uint32_t slot
        cdef Row *row
        for i in range(SHARDS):
            for slot in range(self.shards[i].capacity):
                row = &self.shards[i].rows[slot]
                if row.size != 0 and other.find(row.head, row.tail) == NULL:
                    out.append(bytes_of(row.head, row.tail))
        return out

    def items(self):
        cdef list out = []
        cdef int i
        cdef uint32_t slot
        cdef Row *row
        for i in range(SHARDS):
            for slot in range(self.shards[i].capacity):
                row = &self.shards[i].rows[slot]
                if row.size != 0:
                    out.append((bytes_of(row.head, row.tail), row.refs))
        return out

    def rows_of(self, uint32_t file):
        cdef list found = []
        cdef int i
        cdef uint32_t slot
        cdef Row *row
        cdef HintRow hint
        for i in range(SHARDS):
            for slot in range(self.shards[i].capacity):
                row = &self.shards[i].rows[slot]
                if row.size != 0 and row.file == file:
                    hint.head = row.head
                    hint.tail = row.tail
                    hint.offset = row.offset
                    hint.size = row.size
                    found.append((row.offset, PyBytes_FromStringAndSize(<char *>&hint, sizeof(HintRow))))
        found.sort()
        return b"".join([row_bytes for _, row_bytes in found])

    def dump(self):
        cdef bytes out = PyBytes_FromStringAndSize(NULL, self.count * sizeof(Row))
        cdef char *to = PyBytes_AS_STRING(out)
        cdef int i
        cdef uint32_t slot
        for i in range(SHARDS):
            for slot in range(self.shards[i].capacity):
                if self.shards[i].rows[slot].size != 0:
                    memcpy(to, &self.shards[i].rows[slot], sizeof(Row))
                    to += sizeof(Row)
        return out

    def load(self, const unsigned char[::1] rows not None):
        cdef Py_ssize_t i, n = rows.shape[0] // sizeof(Row)
        cdef Row row
        if rows.shape[0] % sizeof(Row):
            raise ValueError(f"{rows.shape[0]} bytes are not a whole number of rows")
        for i in range(n):
            memcpy(&row, &rows[i * sizeof(Row)], sizeof(Row))
            self.fill(row.head, row.tail, row.file, row.offset, row.size, row.refs)


# ---- records ----

cdef struct Part:
    const char *data
    size_t size

cdef struct Packed:
    const char *msg_id
    uint64_t size  # of the payload
    Py_ssize_t parts


cdef void fill_records(char *to, Packed *records, Py_ssize_t count, Part *part) noexcept nogil:
    cdef Py_ssize_t i, k
    cdef uint32_t crc
    cdef char *head
    for i in range(count):
        head = to
        memcpy(head, &records[i].size, 8)
        memcpy(head + 8, records[i].msg_id, ID_BYTES)
        crc = warren_crc(0, head, 24)
        to += HEAD_BYTES
        for k in range(records[i].parts):
            crc = warren_crc(crc, part.data, part.size)
            memcpy(to, part.data, part.size)
            to += part.size
            part += 1
        memcpy(head + 24, &crc, 4)
        (<unsigned char *>to)[0] = END_MARKER
        to += 1


def pack_records(list msg_ids not None, list payloads not None):
    cdef Py_ssize_t i, count = len(msg_ids), parts = 0, total = 0
    cdef Packed *records = NULL
    cdef Part *part_array = NULL
    cdef Part *part
    cdef char *to
    cdef bytes out, piece
    cdef object payload
    for payload in payloads:
        parts += len(<tuple>payload) if type(payload) is tuple else 1
    if len(payloads) != count:
        raise ValueError(f"{count} ids and {len(payloads)} payloads")
    records = <Packed *>malloc((count + 1) * sizeof(Packed))
    part_array = <Part *>malloc((parts + 1) * sizeof(Part))
    try:
        if records == NULL or part_array == NULL:
            raise MemoryError
        part = part_array
        for i in range(count):
            piece = <bytes?>msg_ids[i]
            if PyBytes_GET_SIZE(piece) != ID_BYTES:
                raise ValueError(f"a msg_id has 16 bytes, not {piece!r}")
            records[i].msg_id = PyBytes_AS_STRING(piece)
            records[i].size = 0
            payload = payloads[i]
            if type(payload) is tuple:
                records[i].parts = len(<tuple>payload)
                for piece in <tuple>payload:
                    if piece is None:
                        raise TypeError("a part of a payload is None")
                    part.data = PyBytes_AS_STRING(piece)
                    part.size = PyBytes_GET_SIZE(piece)
                    records[i].size += part.size
                    part += 1
            else:
                piece = <bytes?>payload
                records[i].parts = 1
                part.data = PyBytes_AS_STRING(piece)
                part.size = PyBytes_GET_SIZE(piece)
                records[i].size = part.size
                part += 1
            total += records[i].size + OVERHEAD_BYTES
        out = PyBytes_FromStringAndSize(NULL, total)
        # The two lists keep every id and part alive; bytes do not change.
        to = PyBytes_AS_STRING(out)
        if total > NO_GIL_ABOVE_BYTES:
            with nogil:
                fill_records(to, records, count, part_array)
        else:
            fill_records(to, records, count, part_array)
        return out
    finally:
        free(records)
        free(part_array)


cdef Py_ssize_t record_at(const unsigned char *data, size_t size) noexcept nogil:
    """The size of the good record that begins at `data`, of which there are `size` bytes; 0 where there is none."""
    cdef uint64_t length
    cdef uint32_t crc
    if size < OVERHEAD_BYTES:
        return 0
    memcpy(&length, data, 8)
    if length > size - OVERHEAD_BYTES or data[HEAD_BYTES + length] != END_MARKER:
        return 0
    memcpy(&crc, data + 24, 4)
    if warren_crc(warren_crc(0, data, 24), data + HEAD_BYTES, length) != crc:
        return 0
    return length + OVERHEAD_BYTES


def unpack_record(const unsigned char[::1] data not None, bytes msg_id not None, Py_ssize_t size):
    cdef uint64_t length
    cdef const unsigned char *record
    if data.shape[0] < size or size < OVERHEAD_BYTES:
        raise ValueError(f"the file ends after {data.shape[0]} of {size} bytes")
    record = &data[0]
    memcpy(&length, record, 8)
    if length != <uint64_t>(size - OVERHEAD_BYTES):
        raise ValueError(f"its length field says {length}, not {size - OVERHEAD_BYTES}")
    if PyBytes_GET_SIZE(msg_id) != ID_BYTES or memcmp(record + 8, PyBytes_AS_STRING(msg_id), ID_BYTES) != 0:
        raise ValueError(f"its msg_id is {bytes(data[8:24]).hex()}, not {msg_id.hex()}")
    if record[size - 1] != END_MARKER:
        raise ValueError(f"its end marker is 0x{record[size - 1]:02x}, not 0xff")
    if record_at(record, size) == 0:
        raise ValueError("its CRC is wrong")
    return PyBytes_FromStringAndSize(<const char *>record + HEAD_BYTES, length)


def check_run(const unsigned char[::1] data not None, const unsigned char[::1] hint_rows not None):
    cdef Py_ssize_t i, n = hint_rows.shape[0] // sizeof(HintRow), at = 0, end = data.shape[0]
    cdef HintRow hint
    cdef Py_ssize_t bad = -1
    with nogil:
        for i in range(n):
            memcpy(&hint, &hint_rows[i * sizeof(HintRow)], sizeof(HintRow))
            if (hint.size > <uint64_t>(end - at) or hint.size < OVERHEAD_BYTES
                    or memcmp(&data[at + 8], &hint, ID_BYTES) != 0
                    or record_at(&data[at], hint.size) != <Py_ssize_t>hint.size):
                bad = i
                break
            at += hint.size
    return bad


def scan_records(const unsigned char[::1] data not None, Py_ssize_t start):
    cdef Py_ssize_t at = start, end = data.shape[0], size, bad_from
    cdef HintRow hint
    cdef bytearray rows = bytearray()
    cdef list damage = []
    while at < end:
        with nogil:
            size = record_at(&data[at], end - at)
            bad_from = at
            # Byte by byte: after damage nothing says where the next record begins but its own checksum.
            while size == 0 and at + 1 < end:
                at += 1
                size = record_at(&data[at], end - at)
        if size == 0:
            damage.append((bad_from, end - bad_from))
            break
        if at > bad_from:
            damage.append((bad_from, at - bad_from))
        memcpy(&hint, &data[at + 8], ID_BYTES)
        hint.offset = at
        hint.size = size
        rows += PyBytes_FromStringAndSize(<char *>&hint, sizeof(HintRow))
        at += size
    return bytes(rows), damage


def hint_rows(list msg_ids not None, uint64_t offset, list sizes not None):
    cdef Py_ssize_t i, n = len(msg_ids)
    cdef bytes out = PyBytes_FromStringAndSize(NULL, n * sizeof(HintRow))
    cdef char *to = PyBytes_AS_STRING(out)
    cdef HintRow hint
    for i in range(n):
        id_of(<bytes?>msg_ids[i], &hint.head, &hint.tail)
        hint.offset = offset
        hint.size = sizes[i]
        memcpy(to + i * sizeof(HintRow), &hint, sizeof(HintRow))
        offset += hint.size
    return out
