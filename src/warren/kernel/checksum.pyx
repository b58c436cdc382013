# cython: language_level=3
"""CRC-32C of any buffer."""

from libc.stdint cimport uint32_t

cdef extern from "crc32c.h" nogil:
    void warren_crc_init()
    uint32_t warren_crc(uint32_t crc, const void *data, size_t size)
    uint32_t warren_crc_software(uint32_t crc, const unsigned char *data, size_t size)

warren_crc_init()


def crc32c(const unsigned char[::1] data not None, uint32_t seed=0):
    """The CRC-32C of `data`, going on from `seed`."""
    if data.shape[0] == 0:
        return seed
    return warren_crc(seed, &data[0], data.shape[0])


def crc32c_software(const unsigned char[::1] data not None, uint32_t seed=0):
    """The same without the processor's instruction; for the test that compares the two."""
    if data.shape[0] == 0:
        return seed
    return warren_crc_software(seed, &data[0], data.shape[0])
