/* Linked into every instrumented module: what the compiler calls at each branch and comparison. Hidden, because the address
   sanitizer has empty functions of some of these names, and comes first. */
#include <stdint.h>

#define HIDDEN __attribute__((visibility("hidden")))

extern void warren_fuzz_branch(uintptr_t pc, int module);
extern void warren_fuzz_compared(uint64_t a, uint64_t b, int size);

HIDDEN void __sanitizer_cov_trace_pc(void) { warren_fuzz_branch((uintptr_t)__builtin_return_address(0), MODULE); }

#define COMPARED(bytes, type)                                                                                      \
    HIDDEN void __sanitizer_cov_trace_cmp##bytes(type a, type b) { warren_fuzz_compared(a, b, bytes); }            \
    HIDDEN void __sanitizer_cov_trace_const_cmp##bytes(type a, type b) { warren_fuzz_compared(a, b, bytes); }

COMPARED(1, uint8_t)
COMPARED(2, uint16_t)
COMPARED(4, uint32_t)
COMPARED(8, uint64_t)

HIDDEN void __sanitizer_cov_trace_cmpf(float a, float b) { (void)a, (void)b; }
HIDDEN void __sanitizer_cov_trace_cmpd(double a, double b) { (void)a, (void)b; }

/* cases[0] of them, cases[1] bits wide, then their values */
HIDDEN void __sanitizer_cov_trace_switch(uint64_t value, uint64_t *cases) {
    for (uint64_t i = 0; i < cases[0]; i++) warren_fuzz_compared(value, cases[2 + i], (int)(cases[1] / 8));
}
