/* What one run of a parser did: which branches it took and how often, roughly, and what it compared. */
#include <stdint.h>
#include <string.h>

enum { PLACES = 1 << 18, PAIRS = 256, CHECKSUMS = 16, MODULES = 64 };

static uint8_t count[PLACES]; /* in this run */
static uint8_t seen[PLACES];  /* a bit for each magnitude, in all runs */
static uint32_t taken[PLACES];
static uint32_t taken_count;
static uint8_t module_of[PLACES];
static uint32_t reached[MODULES];
static struct pair { uint64_t a, b; int32_t size, unused; } pairs[PAIRS];
static uint32_t pair_count;
static struct pair checksums[CHECKSUMS];
static uint32_t checksum_count;
static int is_running;

void warren_fuzz_branch(uintptr_t pc, int module) {
    if (!is_running) return;
    uint32_t at = (uint32_t)((pc * 0x9E3779B97F4A7C15ULL) >> 46);
    if (count[at] == 0) {
        taken[taken_count++] = at;
        module_of[at] = (uint8_t)module;
    }
    if (count[at] < 255) count[at]++;
}

void warren_fuzz_compared(uint64_t a, uint64_t b, int size) {
    if (!is_running || a == b) return;
    struct pair *pair = &pairs[pair_count++ % PAIRS];
    pair->a = a;
    pair->b = b;
    pair->size = size;
    if (size == 4 && a >= 1 << 20 && b >= 1 << 20 && checksum_count < CHECKSUMS) checksums[checksum_count++] = *pair;
}

void warren_fuzz_begin(void) {
    pair_count = checksum_count = 0;
    is_running = 1;
}

static uint8_t magnitude(uint8_t n) {
    return n < 4 ? 1 << (n - 1) : n < 8 ? 8 : n < 16 ? 16 : n < 32 ? 32 : n < 128 ? 64 : 128;
}

/* How many branches were taken for the first time, or oftener than ever. */
uint32_t warren_fuzz_end(void) {
    uint32_t news = 0;
    is_running = 0;
    for (uint32_t i = 0; i < taken_count; i++) {
        uint32_t at = taken[i];
        uint8_t bit = magnitude(count[at]);
        if (!(seen[at] & bit)) {
            if (!seen[at]) reached[module_of[at]]++;
            seen[at] |= bit;
            news++;
        }
        count[at] = 0;
    }
    taken_count = 0;
    return news;
}

uint32_t warren_fuzz_reached(int module) { return reached[module]; }

/* One of the comparisons of the last run; its size in bytes, or 0 when there was none. */
int warren_fuzz_pair(uint32_t which, uint64_t *a, uint64_t *b) {
    uint32_t have = pair_count < PAIRS ? pair_count : PAIRS;
    if (!have) return 0;
    *a = pairs[which % have].a;
    *b = pairs[which % have].b;
    return pairs[which % have].size;
}

/* A comparison of the run that looks like one of checksums, two large numbers of four bytes; the first ones are kept. */
int warren_fuzz_checksums(uint32_t which, uint64_t *a, uint64_t *b) {
    if (which >= checksum_count) return 0;
    *a = checksums[which].a;
    *b = checksums[which].b;
    return 1;
}
