/* CRC-32C (Castagnoli), the checksum of every Warren file: the processor's instruction where there is one, a table
   of eight where there is not. Both give the same number; a test compares them. */
#ifndef WARREN_CRC32C_H
#define WARREN_CRC32C_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

static uint32_t warren_crc_table[8][256];
static int warren_crc_hardware = 0;

static void warren_crc_init(void) {
    for (uint32_t n = 0; n < 256; n++) {
        uint32_t c = n;
        for (int k = 0; k < 8; k++) c = (c & 1) ? (c >> 1) ^ 0x82F63B78u : c >> 1;
        warren_crc_table[0][n] = c;
    }
    for (uint32_t n = 0; n < 256; n++)
        for (int k = 1; k < 8; k++)
            warren_crc_table[k][n] =
                (warren_crc_table[k - 1][n] >> 8) ^ warren_crc_table[0][warren_crc_table[k - 1][n] & 0xFF];
#if defined(__x86_64__)
    __builtin_cpu_init();
    warren_crc_hardware = __builtin_cpu_supports("sse4.2");
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
    warren_crc_hardware = 1;
#endif
}

static uint32_t warren_crc_software(uint32_t crc, const unsigned char *data, size_t size) {
    crc = ~crc;
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    while (size >= 8) {
        uint64_t word;
        memcpy(&word, data, 8);
        word ^= crc;
        crc = warren_crc_table[7][word & 0xFF] ^ warren_crc_table[6][(word >> 8) & 0xFF] ^
              warren_crc_table[5][(word >> 16) & 0xFF] ^ warren_crc_table[4][(word >> 24) & 0xFF] ^
              warren_crc_table[3][(word >> 32) & 0xFF] ^ warren_crc_table[2][(word >> 40) & 0xFF] ^
              warren_crc_table[1][(word >> 48) & 0xFF] ^ warren_crc_table[0][word >> 56];
        data += 8;
        size -= 8;
    }
#endif
    while (size--) crc = (crc >> 8) ^ warren_crc_table[0][(crc ^ *data++) & 0xFF];
    return ~crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) static uint32_t warren_crc_instruction(uint32_t crc, const unsigned char *data,
                                                                          size_t size) {
    uint64_t state = ~crc;
    while (size >= 8) {
        uint64_t word;
        memcpy(&word, data, 8);
        state = __builtin_ia32_crc32di(state, word);
        data += 8;
        size -= 8;
    }
    uint32_t rest = (uint32_t)state;
    while (size--) rest = __builtin_ia32_crc32qi(rest, *data++);
    return ~rest;
}
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
static uint32_t warren_crc_instruction(uint32_t crc, const unsigned char *data, size_t size) {
    crc = ~crc;
    while (size >= 8) {
        uint64_t word;
        memcpy(&word, data, 8);
        crc = __crc32cd(crc, word);
        data += 8;
        size -= 8;
    }
    while (size--) crc = __crc32cb(crc, *data++);
    return ~crc;
}
#else
#define warren_crc_instruction warren_crc_software
#endif

static inline uint32_t warren_crc(uint32_t crc, const void *data, size_t size) {
    if (warren_crc_hardware) return warren_crc_instruction(crc, (const unsigned char *)data, size);
    return warren_crc_software(crc, (const unsigned char *)data, size);
}

#endif
