/* The two memory orderings that Python lacks. */
#include <stdint.h>

uint64_t zenflow_load_acquire(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
void zenflow_store_release(uint64_t *word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
