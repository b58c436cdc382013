# cython: language_level=3
"""The bytes of a segment: slots (.qi), bodies (.qs), and the bitmaps that say which slots are alive.

    slot = u64 seq_id, u8 flags, 3 unused, u32 boot id, location (16), u32 payload size, u32 body size, u64 expiry,
           u64 published at, 4 unused, u32 CRC of sid and the 60 bytes before                          64 bytes
    location = msg_id                                        flags has IN_STORE
             | u64 offset in .qs, 8 unused                   otherwise
    body = u32 payload size, u32 CRC of sid, seq_id and payload, u64 seq_id, payload

A slot of zeros was never written.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from warren.kernel.entry cimport Entry, IN_QS, IN_STORE, PERSISTENT, SLOTTED
from warren.kernel.overlay cimport Row
from warren.kernel.records cimport publish_is_whole

cdef extern from "crc32c.h" nogil:
    void warren_crc_init()
    uint32_t warren_crc(uint32_t crc, const void *data, size_t size)

warren_crc_init()

cdef enum:
    SLOT = 64
    BODY_PREFIX = 16
    RECORD_PREFIX = 8
    PUBLISH_FIXED = 24
    TARGET = 16
    PRESENT = 0x80

SLOT_BYTES = SLOT
BODY_PREFIX_BYTES = BODY_PREFIX
PRESENT_FLAG = PRESENT


cdef void _slot(unsigned char *p, uint64_t sid, uint64_t seq, uint8_t flags, uint32_t boot, const unsigned char *msg_id,
                uint64_t offset, uint32_t size, uint32_t body_size, uint64_t expiry,
                uint64_t published_at) noexcept nogil:
    cdef uint32_t crc
    memset(p, 0, SLOT)
    memcpy(p, &seq, 8)
    p[8] = flags | PRESENT
    memcpy(p + 12, &boot, 4)
    if msg_id != NULL:
        memcpy(p + 16, msg_id, 16)
    else:
        memcpy(p + 16, &offset, 8)
    memcpy(p + 32, &size, 4)
    memcpy(p + 36, &body_size, 4)
    memcpy(p + 40, &expiry, 8)
    memcpy(p + 48, &published_at, 8)
    crc = warren_crc(warren_crc(0, &sid, 8), p, 60)
    memcpy(p + 60, &crc, 4)


cdef bint _sound_slot(const unsigned char *p, uint64_t sid, uint64_t seq) noexcept nogil:
    cdef uint32_t crc
    cdef uint64_t found
    memcpy(&found, p, 8)
    memcpy(&crc, p + 60, 4)
    return found == seq and p[8] & PRESENT and warren_crc(warren_crc(0, &sid, 8), p, 60) == crc


cdef bint _blank(const unsigned char *p) noexcept nogil:
    cdef int i
    cdef uint64_t word
    for i in range(8):
        memcpy(&word, p + i * 8, 8)
        if word:
            return False
    return True


cdef inline uint32_t _body_crc(uint64_t sid, uint64_t seq, const unsigned char *payload, size_t size) noexcept nogil:
    return warren_crc(warren_crc(warren_crc(0, &sid, 8), &seq, 8), payload, size)


cdef bint _sound_record(const unsigned char *p, uint32_t length) noexcept nogil:
    """Is there a publish record at `p`, in a group (the CRC is inverted) or not?"""
    cdef uint32_t crc, found = warren_crc(0, p + RECORD_PREFIX, length)
    memcpy(&crc, p + 4, 4)
    return (found == crc or ~found == crc) and p[RECORD_PREFIX] == 1 and publish_is_whole(p + RECORD_PREFIX, length)


def convert_rows(bytes rows not None, bytes data not None, uint64_t base, uint64_t sid, uint64_t segment_size,
                 uint64_t qs_offset, list damaged not None):
    """Journal records become segment bytes: the bodies to append to .qs at `qs_offset`, and runs of slots
    (position in the segment, bytes). `rows` are of one segment and lie in `data`, which begins at offset `base` of
    their journal file. A record that does not check out goes to `damaged` as (seq, offset, size)."""
    cdef Row *row = <Row *>PyBytes_AS_STRING(rows)
    cdef Py_ssize_t n = PyBytes_GET_SIZE(rows) // <Py_ssize_t>sizeof(Row), i, made = 0, run_start = 0
    cdef uint64_t have = PyBytes_GET_SIZE(data), total = 0, following = 0, used
    cdef bytes bodies, slots
    cdef bytearray sound = bytearray(n)
    cdef unsigned char *is_sound = <unsigned char *>sound
    cdef const unsigned char *start = <unsigned char *>PyBytes_AS_STRING(data)
    cdef unsigned char *out
    cdef unsigned char *slot
    cdef list runs = []
    for i in range(n):
        total += row[i].size
    bodies = PyBytes_FromStringAndSize(NULL, total + n * BODY_PREFIX)
    out = <unsigned char *>PyBytes_AS_STRING(bodies)
    slots = PyBytes_FromStringAndSize(NULL, n * SLOT)
    slot = <unsigned char *>PyBytes_AS_STRING(slots)
    with nogil:
        used = _convert(row, n, start, have, base, sid, qs_offset, out, slot, is_sound)
    for i in range(n):
        if not is_sound[i]:
            damaged.append((row[i].seq, row[i].offset, row[i].size))
            continue
        if made and row[i].seq != following:
            runs.append((<uint64_t>(following - (made - run_start)) % segment_size, slots[run_start * SLOT:made * SLOT]))
            run_start = made
        following = row[i].seq + 1
        made += 1
    if made > run_start:
        runs.append((<uint64_t>(following - (made - run_start)) % segment_size, slots[run_start * SLOT:made * SLOT]))
    return bodies[:used], runs


cdef uint64_t _convert(Row *row, Py_ssize_t n, const unsigned char *start, uint64_t have, uint64_t base, uint64_t sid,
                       uint64_t qs_offset, unsigned char *out, unsigned char *slot,
                       unsigned char *is_sound) noexcept nogil:
    """The loop of `convert_rows`; how many body bytes it made."""
    cdef Py_ssize_t i
    cdef const unsigned char *p
    cdef const unsigned char *payload
    cdef uint32_t length, crc, size, body_size
    cdef uint16_t targets
    cdef uint64_t expiry, published_at, seq, place = qs_offset
    for i in range(n):
        seq = row[i].seq
        if row[i].offset < base or row[i].offset - base + row[i].size > have:
            continue
        p = start + (row[i].offset - base)
        memcpy(&length, p, 4)
        if length + RECORD_PREFIX != row[i].size or not _sound_record(p, length):
            continue
        is_sound[i] = 1
        p += RECORD_PREFIX
        memcpy(&targets, p + 2, 2)
        memcpy(&size, p + 4, 4)
        memcpy(&published_at, p + 8, 8)
        memcpy(&expiry, p + 16, 8)
        payload = p + PUBLISH_FIXED + targets * TARGET
        if p[1] & 1:
            payload += 9 + payload[8]
        if p[1] & 2:
            memcpy(&size, payload + 16, 4)
            memcpy(&body_size, payload + 20, 4)
            _slot(slot, sid, seq, PERSISTENT | IN_STORE, 0, payload, 0, size, body_size, expiry, published_at)
        else:
            memcpy(&body_size, payload, 4)
            body_size = size - 4 - body_size
            _slot(slot, sid, seq, PERSISTENT, 0, NULL, place, size, body_size, expiry, published_at)
            crc = _body_crc(sid, seq, payload, size)
            memcpy(out, &size, 4)
            memcpy(out + 4, &crc, 4)
            memcpy(out + 8, &seq, 8)
            memcpy(out + BODY_PREFIX, payload, size)
            out += BODY_PREFIX + size
            place += BODY_PREFIX + size
        slot += SLOT
    return place - qs_offset


def encode_bodies(list entries not None, uint64_t sid, uint64_t qs_offset):
    """Bodies of transient entries of one segment, to append to .qs; each entry learns its offset."""
    cdef Entry entry
    cdef uint64_t total = 0
    cdef bytes bodies
    cdef unsigned char *out
    cdef uint32_t head_size, crc
    for item in entries:
        total += (<Entry>item).size + BODY_PREFIX
    bodies = PyBytes_FromStringAndSize(NULL, total)
    out = <unsigned char *>PyBytes_AS_STRING(bodies)
    for item in entries:
        entry = <Entry>item
        head_size = <uint32_t>PyBytes_GET_SIZE(<bytes>entry.head)
        memcpy(out, &entry.size, 4)
        memcpy(out + 8, &entry.seq, 8)
        memcpy(out + BODY_PREFIX, &head_size, 4)
        memcpy(out + BODY_PREFIX + 4, PyBytes_AS_STRING(<bytes>entry.head), head_size)
        memcpy(out + BODY_PREFIX + 4 + head_size, PyBytes_AS_STRING(<bytes>entry.body), PyBytes_GET_SIZE(<bytes>entry.body))
        crc = _body_crc(sid, entry.seq, out + BODY_PREFIX, entry.size)
        memcpy(out + 4, &crc, 4)
        entry.offset = qs_offset
        entry.flags |= IN_QS
        out += BODY_PREFIX + entry.size
        qs_offset += BODY_PREFIX + entry.size
    return bodies


def encode_slots(list entries not None, uint64_t sid, uint64_t segment_size, uint32_t boot):
    """Runs of slots (position, bytes) of entries of one segment, in order of seq_id; they become SLOTTED."""
    cdef Entry entry
    cdef bytes slots = PyBytes_FromStringAndSize(NULL, len(entries) * SLOT)
    cdef unsigned char *slot = <unsigned char *>PyBytes_AS_STRING(slots)
    cdef uint64_t following = 0
    cdef Py_ssize_t made = 0, run_start = 0
    cdef list runs = []
    cdef unsigned char *msg_id
    for item in entries:
        entry = <Entry>item
        if made and entry.seq != following:
            runs.append((<uint64_t>(following - (made - run_start)) % segment_size, slots[run_start * SLOT:made * SLOT]))
            run_start = made
        following = entry.seq + 1
        msg_id = <unsigned char *>PyBytes_AS_STRING(<bytes>entry.msg_id) if entry.flags & IN_STORE else NULL
        _slot(slot, sid, entry.seq, entry.flags & (PERSISTENT | IN_STORE), boot, msg_id, entry.offset, entry.size,
              entry.body_size, entry.expiry, entry.published_at)
        entry.flags |= SLOTTED
        slot += SLOT
        made += 1
    if made > run_start:
        runs.append((<uint64_t>(following - (made - run_start)) % segment_size, slots[run_start * SLOT:made * SLOT]))
    return runs


def read_slots(bytes data not None, uint64_t first_seq, Py_ssize_t from_slot, uint64_t sid, uint32_t boot,
               bytearray live not None, Py_ssize_t limit, list entries not None, list damaged not None,
               list stale not None):
    """Entries, without bodies, of the slots in `data` (the first one is number `from_slot` of the segment that begins at
    `first_seq`) whose bit in `live` is set; stops at `limit`. A bad slot goes to `damaged` as its number, a transient one of
    another boot to `stale`.
    Returns the number of the slot after the last one looked at."""
    cdef unsigned char *p = <unsigned char *>PyBytes_AS_STRING(data)
    cdef unsigned char *bits = <unsigned char *>live
    cdef Py_ssize_t n = PyBytes_GET_SIZE(data) // SLOT, i, number, found = 0
    cdef uint32_t slot_boot
    cdef Entry entry
    for i in range(n):
        number = from_slot + i
        if not bits[number >> 3] & (1 << (number & 7)):
            continue
        if found == limit:
            return number
        if not _sound_slot(p + i * SLOT, sid, first_seq + number):
            damaged.append(number)
            continue
        memcpy(&slot_boot, p + i * SLOT + 12, 4)
        if slot_boot != boot and not p[i * SLOT + 8] & PERSISTENT:
            stale.append(number)
            continue
        entry = Entry.__new__(Entry)
        entry.seq = first_seq + number
        entry.flags = (p[i * SLOT + 8] & (PERSISTENT | IN_STORE)) | SLOTTED
        if entry.flags & IN_STORE:
            entry.msg_id = PyBytes_FromStringAndSize(<char *>p + i * SLOT + 16, 16)
        else:
            entry.flags |= IN_QS
            memcpy(&entry.offset, p + i * SLOT + 16, 8)
        memcpy(&entry.size, p + i * SLOT + 32, 4)
        memcpy(&entry.body_size, p + i * SLOT + 36, 4)
        memcpy(&entry.expiry, p + i * SLOT + 40, 8)
        memcpy(&entry.published_at, p + i * SLOT + 48, 8)
        entries.append(entry)
        found += 1
    return from_slot + n


def scan_slots(bytes data not None, uint64_t first_seq, uint64_t sid, uint32_t boot, bytearray live not None,
               list store_refs not None, list damaged not None):
    """Recovery: set the bit of every valid slot that is persistent or of this boot. Returns (slots set, their body
    bytes, slots written, lowest and highest published-at). `store_refs` gets (slot number, msg_id)."""
    cdef unsigned char *p = <unsigned char *>PyBytes_AS_STRING(data)
    cdef unsigned char *bits = <unsigned char *>live
    cdef Py_ssize_t n = PyBytes_GET_SIZE(data) // SLOT, i, kept = 0, written = 0
    cdef uint64_t total = 0, stamp, low = 0xFFFFFFFFFFFFFFFF, high = 0
    cdef uint32_t size, slot_boot
    for i in range(n):
        if _blank(p):
            p += SLOT
            continue
        written += 1
        if not _sound_slot(p, sid, first_seq + i):
            damaged.append(i)
            p += SLOT
            continue
        memcpy(&slot_boot, p + 12, 4)
        memcpy(&stamp, p + 48, 8)
        low = min(low, stamp)
        high = max(high, stamp)
        if p[8] & PERSISTENT or slot_boot == boot:
            bits[i >> 3] |= 1 << (i & 7)
            memcpy(&size, p + 36, 4)
            total += size
            kept += 1
            if p[8] & IN_STORE and p[8] & PERSISTENT:
                store_refs.append((i, PyBytes_FromStringAndSize(<char *>p + 16, 16)))
        p += SLOT
    return kept, total, written, low, high


def fill_bodies(list entries not None, bytes data not None, uint64_t base, uint64_t sid, list damaged not None):
    """Give each entry its head and body from .qs bytes that begin at offset `base`. One that does not check out goes to
    `damaged` and stays without."""
    cdef unsigned char *start = <unsigned char *>PyBytes_AS_STRING(data)
    cdef unsigned char *p
    cdef uint64_t have = PyBytes_GET_SIZE(data), seq
    cdef uint32_t size, crc, head_size
    cdef Entry entry
    cdef bytes last_head = b""
    for item in entries:
        entry = <Entry>item
        # The offset is what a slot said: nothing is added to it before it is known to be small.
        if (entry.offset < base or entry.offset - base > have
                or have - (entry.offset - base) < BODY_PREFIX + <uint64_t>entry.size):
            damaged.append(entry)
            continue
        p = start + (entry.offset - base)
        memcpy(&size, p, 4)
        memcpy(&crc, p + 4, 4)
        memcpy(&seq, p + 8, 8)
        if size != entry.size or size < 4 or seq != entry.seq or _body_crc(sid, seq, p + BODY_PREFIX, size) != crc:
            damaged.append(entry)
            continue
        p += BODY_PREFIX
        memcpy(&head_size, p, 4)
        if head_size > size - 4:
            damaged.append(entry)
            continue
        if head_size == PyBytes_GET_SIZE(last_head) and memcmp(PyBytes_AS_STRING(last_head), p + 4, head_size) == 0:
            entry.head = last_head
        else:
            last_head = PyBytes_FromStringAndSize(<char *>p + 4, head_size)
            entry.head = last_head
        entry.body = PyBytes_FromStringAndSize(<char *>p + 4 + head_size, size - 4 - head_size)


def set_bits(bytearray bits not None, Py_ssize_t first, Py_ssize_t count):
    """Set a run of bits; how many were clear."""
    cdef unsigned char *p = <unsigned char *>bits
    cdef Py_ssize_t i, fresh = 0
    for i in range(first, first + count):
        if not p[i >> 3] & (1 << (i & 7)):
            p[i >> 3] |= 1 << (i & 7)
            fresh += 1
    return fresh


def clear_bits(bytearray bits not None, Py_ssize_t first, Py_ssize_t count, list cleared not None):
    """Clear a run of bits; those that were set are appended to `cleared` as pairs first, count. Returns how many."""
    cdef unsigned char *p = <unsigned char *>bits
    cdef Py_ssize_t i, begin = -1, gone = 0
    for i in range(first, first + count):
        if p[i >> 3] & (1 << (i & 7)):
            p[i >> 3] &= ~(1 << (i & 7))
            gone += 1
            if begin < 0:
                begin = i
        elif begin >= 0:
            cleared.append(begin)
            cleared.append(i - begin)
            begin = -1
    if begin >= 0:
        cleared.append(begin)
        cleared.append(first + count - begin)
    return gone


def bit_runs(bytearray bits not None, Py_ssize_t first, Py_ssize_t stop):
    """The set bits in [first, stop) as a flat list first, count, ..."""
    cdef unsigned char *p = <unsigned char *>bits
    cdef Py_ssize_t i, begin = -1
    cdef list out = []
    for i in range(first, stop):
        if p[i >> 3] & (1 << (i & 7)):
            if begin < 0:
                begin = i
        elif begin >= 0:
            out.append(begin)
            out.append(i - begin)
            begin = -1
    if begin >= 0:
        out.append(begin)
        out.append(stop - begin)
    return out


def live_bytes(bytes slots not None, bytearray live not None):
    """Body bytes of the slots whose bit is set."""
    cdef unsigned char *p = <unsigned char *>PyBytes_AS_STRING(slots)
    cdef unsigned char *bits = <unsigned char *>live
    cdef Py_ssize_t i
    cdef uint64_t total = 0
    cdef uint32_t size
    for i in range(PyBytes_GET_SIZE(slots) // SLOT):
        if bits[i >> 3] & (1 << (i & 7)):
            memcpy(&size, p + i * SLOT + 36, 4)
            total += size
    return total


def measure_rows(bytes rows not None, bytes data not None, uint64_t base):
    """How many bytes `convert_rows` will make of these rows; an upper bound where a record is damaged."""
    cdef Row *row = <Row *>PyBytes_AS_STRING(rows)
    cdef Py_ssize_t n = PyBytes_GET_SIZE(rows) // <Py_ssize_t>sizeof(Row), have = PyBytes_GET_SIZE(data), i
    cdef unsigned char *p
    cdef uint64_t total = 0
    cdef uint32_t size
    for i in range(n):
        if row[i].offset >= base and row[i].offset - base + row[i].size <= <uint64_t>have:
            p = <unsigned char *>PyBytes_AS_STRING(data) + (row[i].offset - base) + RECORD_PREFIX
            if not p[1] & 2:
                memcpy(&size, p + 4, 4)
                total += BODY_PREFIX + min(size, row[i].size)
    return total
