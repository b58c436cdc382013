# cython: language_level=3
"""What exists per message in RAM, and the loops over many of them.

An `Entry` is one message in one queue. It is an alpha while it has its body, a beta when the body is only on disk.
A `Delivery` is the base of the public `Message`: an entry that was handed out, with its queue.
"""

cimport cython
from cpython.bytes cimport PyBytes_GET_SIZE
from cpython.dict cimport PyDict_DelItem, PyDict_SetItem
from cpython.object cimport PyObject, PyTypeObject
from libc.stdint cimport int64_t, uint32_t, uint64_t

from warren.kernel.ranges cimport RangeSet

from operator import attrgetter


cdef extern from "Python.h":
    bint PyType_IS_GC(PyTypeObject *kind)
    void PyObject_GC_UnTrack(void *tracked)


_by_seq = attrgetter("seq")


@cython.no_gc
@cython.freelist(8192)
cdef class Entry:
    def __init__(self, uint64_t seq, head, body, uint8_t flags=0, uint64_t published_at=0, uint64_t expiry=0,
                 msg_id=None, uint32_t size=0, uint64_t offset=0, uint32_t body_size=0):
        self.seq = seq
        self.head = head
        self.body = body
        self.flags = flags
        self.published_at = published_at
        self.expiry = expiry
        self.msg_id = msg_id
        self.offset = offset
        if body is not None:
            body_size = <uint32_t>len(body)
            if size == 0:
                size = 4 + <uint32_t>len(head) + body_size
        self.size = size
        self.body_size = body_size

    def copy(self):
        """The same message in a second object: what is done to the one is not seen in the other."""
        cdef Entry other = Entry.__new__(Entry)
        other.head = self.head
        other.body = self.body
        other.msg_id = self.msg_id
        other.seq = self.seq
        other.expiry = self.expiry
        other.published_at = self.published_at
        other.offset = self.offset
        other.size = self.size
        other.body_size = self.body_size
        other.flags = self.flags
        other.level = self.level
        return other

    def __repr__(self):
        return f"Entry(seq={self.seq}, size={self.size}, flags={self.flags}, body={'RAM' if self.body is not None else 'disk'})"


@cython.no_gc
cdef class Delivery:
    pass


def make_entries(bodies, bytes head not None, uint64_t first_seq, uint8_t flags, uint64_t published_at, uint64_t expiry):
    """Entries of consecutive seq_ids for `bodies` (all bytes), which share `head`; and the largest payload."""
    cdef list made = []
    cdef Entry entry
    cdef uint64_t seq = first_seq
    cdef uint32_t base = 4 + <uint32_t>PyBytes_GET_SIZE(head)
    cdef uint32_t size, largest = 0
    for body in bodies:
        if type(body) is not bytes:
            if not isinstance(body, (bytes, bytearray, memoryview)):
                raise TypeError(f"a message body is bytes, not {type(body).__name__}: {body!r:.60}")
            body = bytes(body)
        entry = Entry.__new__(Entry)
        entry.seq = seq
        entry.head = head
        entry.body = body
        entry.flags = flags
        entry.published_at = published_at
        entry.expiry = expiry
        entry.body_size = <uint32_t>PyBytes_GET_SIZE(body)
        size = base + entry.body_size
        if size > largest:
            largest = size
        entry.size = size
        made.append(entry)
        seq += 1
    return made, largest


def number_entries(list entries not None, uint64_t first_seq, uint8_t level):
    """Give entries consecutive seq_ids and a priority level."""
    cdef Entry entry
    for item in entries:
        entry = <Entry>item
        entry.seq = first_seq
        entry.level = level
        first_seq += 1


def pop_left(source not None, Py_ssize_t count):
    """The first `count` entries of a deque, which has them no longer."""
    cdef object popleft = source.popleft
    cdef Py_ssize_t i
    cdef list out = []
    for i in range(count):
        out.append(popleft())
    return out


def run_within(entries not None, Py_ssize_t most, int64_t room):
    """How many entries, from the first on, have bodies of at most `room` bytes together: at least one, where there is one,
    and at most `most`."""
    cdef Py_ssize_t count = 0
    for entry in entries:
        room -= (<Entry>entry).body_size
        if count and (room < 0 or count >= most):
            break
        count += 1
    return min(count, most)


def free_ones(list entries not None, dict pending not None, RangeSet lent not None):
    """Those whose seq_id is neither a key of `pending` nor in `lent`."""
    cdef bint none = not pending
    return [entry for entry in entries
            if not lent.contains((<Entry>entry).seq) and (none or (<Entry>entry).seq not in pending)]


def renumber(list entries not None, uint64_t first_seq):
    """Give entries consecutive seq_ids."""
    for item in entries:
        (<Entry>item).seq = first_seq
        first_seq += 1


def place_entries(list entries not None, uint64_t first_seq, uint8_t highest, uint8_t mask, int64_t ttl_us):
    """Make entries from the network those of one queue: consecutive seq_ids, a priority of at most `highest`, only the
    flags of `mask`, and the queue's own time to live (below 0: none), where it ends before the message's."""
    cdef Entry entry
    cdef uint64_t due
    for item in entries:
        entry = <Entry>item
        entry.seq = first_seq
        first_seq += 1
        entry.flags &= mask
        if entry.level > highest:
            entry.level = highest
        if ttl_us >= 0:
            due = entry.published_at + <uint64_t>ttl_us
            if entry.expiry == 0 or due < entry.expiry:
                entry.expiry = due


def copy_entries(list entries not None):
    """The same messages for one more queue."""
    return [(<Entry>entry).copy() for entry in entries]


def seqs_of(list entries not None):
    return [(<Entry>entry).seq for entry in entries]


def split_levels(list entries not None, uint8_t highest):
    """Entries by priority level, none above `highest`: (level, entries), in the order in which the levels occur."""
    cdef list groups = [None] * 256
    cdef list out = []
    cdef Entry entry
    cdef uint8_t level, first
    cdef bint mixed = False
    if not entries:
        return out
    first = min((<Entry>entries[0]).level, highest)
    for item in entries:
        if min((<Entry>item).level, highest) != first:
            mixed = True
            break
    if not mixed:       # the common case: nothing is copied
        return [(first, entries)]
    for item in entries:
        level = min((<Entry>item).level, highest)
        if groups[level] is None:
            groups[level] = []
            out.append((level, groups[level]))
        (<list>groups[level]).append(item)
    return out


def set_level(list entries not None, uint8_t level):
    """Give entries that come from disk, which does not know it, their priority level."""
    for item in entries:
        (<Entry>item).level = level


def summarize(list entries not None):
    """(payload bytes, body bytes, how many are persistent, the largest payload)."""
    cdef uint64_t total = 0, bodies = 0
    cdef Py_ssize_t persistent = 0
    cdef uint32_t largest = 0
    cdef Entry entry
    for item in entries:
        entry = <Entry>item
        total += entry.size
        bodies += entry.body_size
        if entry.flags & PERSISTENT:
            persistent += 1
        if entry.size > largest:
            largest = entry.size
    return total, bodies, persistent, largest


def persistent_ones(list entries not None):
    """Those that are persistent: nearly always all of them, and then nothing is copied."""
    for entry in entries:
        if not (<Entry>entry).flags & PERSISTENT:
            return [entry for entry in entries if (<Entry>entry).flags & PERSISTENT]
    return entries


def some_expire(list entries not None):
    """Has any of them a time to live?"""
    for entry in entries:
        if (<Entry>entry).expiry:
            return True
    return False


def without(entries, uint8_t mask):
    """Those that have none of the flags of `mask`."""
    cdef list found = []
    for entry in entries:
        if not (<Entry>entry).flags & mask:
            found.append(entry)
    return found


def bodiless(entries, uint8_t mask, uint8_t flags):
    """Those whose body is not in RAM and whose flags, of those in `mask`, are `flags`."""
    cdef list found = []
    cdef Entry e
    for entry in entries:
        e = <Entry>entry
        if e.body is None and e.flags & mask == flags:
            found.append(entry)
    return found


def sort_by_seq(list entries not None):
    """Sort in place. Costs one look at each where they are in order, as they nearly always are."""
    cdef uint64_t last = 0
    for entry in entries:
        if (<Entry>entry).seq < last:
            entries.sort(key=_by_seq)
            return
        last = (<Entry>entry).seq


def body_spans(list entries not None, uint32_t segment_size, uint32_t prefix, uint64_t most, uint64_t gap):
    """Entries in order that have offsets, cut into pieces that one read serves: (segment, low, high, from, to) each. A
    piece has at most `most` bytes, unless a single entry has more, and no hole of more than `gap`."""
    cdef list spans = []
    cdef Py_ssize_t i = 0, j, n = len(entries)
    cdef uint64_t number, low, high, end
    cdef Entry e
    while i < n:
        e = <Entry>entries[i]
        number = e.seq // segment_size
        low = e.offset
        high = low + prefix + e.size
        j = i + 1
        while j < n:
            e = <Entry>entries[j]
            if e.seq // segment_size != number or e.offset < low:
                break
            end = e.offset + prefix + e.size
            if end - low > most or (e.offset > high and e.offset - high > gap):
                break
            if end > high:
                high = end
            j += 1
        spans.append((number, low, high, i, j))
        i = j
    return spans


def total_size(entries):
    """Sum of payload bytes."""
    cdef uint64_t total = 0
    for entry in entries:
        total += (<Entry>entry).size
    return total


def body_total(entries):
    """Sum of body bytes."""
    cdef uint64_t total = 0
    for entry in entries:
        total += (<Entry>entry).body_size
    return total


def sizes(entries):
    """(payload bytes, body bytes)."""
    cdef uint64_t total = 0, bodies = 0
    for entry in entries:
        total += (<Entry>entry).size
        bodies += (<Entry>entry).body_size
    return total, bodies


def ram_total(entries):
    """How many entries hold their body, and the payload bytes of those."""
    cdef uint64_t count = 0, total = 0
    cdef Entry e
    for entry in entries:
        e = <Entry>entry
        if e.body is not None:
            count += 1
            total += e.size
    return count, total


def persistent_total(entries):
    """How many entries are persistent, and the body bytes of those."""
    cdef uint64_t count = 0, total = 0
    cdef Entry e
    for entry in entries:
        e = <Entry>entry
        if e.flags & PERSISTENT:
            count += 1
            total += e.body_size
    return count, total


def drop_bodies(entries):
    """Let go of the bodies; the entries become betas. Returns count and bytes that left RAM."""
    cdef uint64_t count = 0, total = 0
    cdef Entry e
    for entry in entries:
        e = <Entry>entry
        if e.body is not None:
            e.body = None
            e.head = None
            count += 1
            total += e.size
    return count, total


def record_pending(dict pending not None, list entries not None):
    """pending[seq] = entry, for all."""
    for entry in entries:
        PyDict_SetItem(pending, (<Entry>entry).seq, entry)


def take_pending(dict pending not None, seqs):
    """Remove `seqs` from `pending`: the entries found, and the seq_ids that were not there."""
    cdef list found = []
    cdef list missing = []
    for seq in seqs:
        entry = pending.get(seq)
        if entry is None:
            missing.append(seq)
        else:
            PyDict_DelItem(pending, seq)
            found.append(entry)
    return found, missing


def entry_ranges(entries):
    """The seq_ids of `entries` as a flat list first, count, first, count, ...; one pair where they are dense."""
    cdef list out = []
    cdef uint64_t first = 0, following = 0, seq
    cdef bint some = False
    for entry in entries:
        seq = (<Entry>entry).seq
        if some and seq == following:
            following += 1
            continue
        if some:
            out.append(first)
            out.append(following - first)
        first = seq
        following = seq + 1
        some = True
    if some:
        out.append(first)
        out.append(following - first)
    return out


def seq_ranges(list seqs not None):
    """Sorted seq_ids as a flat list first, count, ..."""
    cdef list out = []
    cdef uint64_t first = 0, following = 0, seq
    cdef bint some = False
    for item in seqs:
        seq = item
        if some and seq == following:
            following += 1
            continue
        if some:
            out.append(first)
            out.append(following - first)
        first = seq
        following = seq + 1
        some = True
    if some:
        out.append(first)
        out.append(following - first)
    return out


def deliveries(type cls not None, list entries not None, queue, uint64_t redelivered_below, RangeSet returned not None,
               dict counts not None):
    """One `cls` (a subclass of Delivery) for each entry. redelivered: below the bound, or in `returned`.

    The collector of garbage does not look at them: a delivery refers to its queue, and no queue to a delivery, so none is
    part of a cycle. Else each batch would be kept for long enough to make it look through all that the program has.
    """
    cdef list made = []
    cdef Delivery delivery
    cdef Entry e
    cdef bint any_returned = returned.n > 0
    cdef bint any_counts = len(counts) > 0
    cdef tuple nothing = ()
    cdef PyTypeObject *kind = <PyTypeObject *>cls
    cdef bint is_tracked = PyType_IS_GC(kind)
    if not issubclass(cls, Delivery):
        raise TypeError("cls must be a Delivery")
    for entry in entries:
        e = <Entry>entry
        delivery = <Delivery>kind.tp_new(cls, <PyObject *>nothing, NULL)
        if is_tracked:
            PyObject_GC_UnTrack(<void *>delivery)
        delivery.entry = e
        delivery.queue = queue
        delivery.redelivered = e.seq < redelivered_below or (any_returned and returned.contains(e.seq))
        if any_counts:
            delivery.delivery_count = counts.get(e.seq, 0)
        made.append(delivery)
    return made


def settle(list messages not None, queue):
    """Mark deliveries of `queue` settled and return their seq_ids; or None, with the first one that is not ours, and then
    nothing was marked."""
    cdef list seqs = []
    cdef Delivery delivery
    for message in messages:
        if not isinstance(message, Delivery):
            return None, message
        delivery = <Delivery>message
        if delivery.settled or delivery.queue is not queue:
            return None, message
        seqs.append(delivery.entry.seq)
    for message in messages:
        (<Delivery>message).settled = True
    return seqs, None
