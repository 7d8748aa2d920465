/* fp32 to what weights are made of, to the nearest, ties to even, with one NaN for all. */
#ifndef ZENFLOW_ROUNDING_H
#define ZENFLOW_ROUNDING_H
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum { OUT_NONE, OUT_BF16, OUT_F16, OUT_F32 };

INLINE uint32_t bits(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
INLINE float real(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

INLINE uint16_t to_bf16(float x) {
    uint32_t u = bits(x);
    uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return (u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (uint16_t)rounded;
}

/* Round to nearest even without a half type: below 2^-14 adding 0.5 lets the FPU round at the last subnormal place. */
INLINE uint16_t to_f16(float x) {
    uint32_t u = bits(x), sign = (u >> 16) & 0x8000, a = u & 0x7fffffff;
    uint32_t normal = (a + 0xc8000fff + ((a >> 13) & 1)) >> 13;
    uint32_t subnormal = bits(real(a) + 0.5f) - 0x3f000000;
    uint32_t h = a < 0x38800000 ? subnormal : normal;
    h = a >= 0x47800000 ? 0x7c00 : h;
    return a > 0x7f800000 ? 0x7e00 : (uint16_t)(h | sign);
}

INLINE float to_f32(float x) { return (bits(x) & 0x7fffffff) > 0x7f800000 ? real(0x7fc00000) : x; }

INLINE void round_to(uint16_t *restrict out, const float *restrict p, long length, int kind) {
#pragma omp simd
    for (long i = 0; i < length; i++) out[i] = kind == OUT_BF16 ? to_bf16(p[i]) : to_f16(p[i]);
}

INLINE void copy(float *restrict out, const float *restrict p, long length) {
#pragma omp simd
    for (long i = 0; i < length; i++) out[i] = to_f32(p[i]);
}

/* As OUT kind, by plain stores: also over the gradient that has just been read, and is in the caches. */
INLINE void write_plain(char *out, const float *p, long length, int kind) {
    if (kind == OUT_BF16) round_to((uint16_t *)out, p, length, OUT_BF16);
    else if (kind == OUT_F16) round_to((uint16_t *)out, p, length, OUT_F16);
    else copy((float *)out, p, length);
}

#endif
