/* One AdamW update of a piece [rows, cols] in one pass over memory: mean gradient in, master and moments updated in
 * place, the rounded weight out. The order of the single operations is that of zenflow_kernels.numerics, each rounded to
 * fp32: build with -ffp-contract=off and without -ffast-math. Every element is computed alone, so threads and cuts
 * change no bit. Also the two memory orderings that Python lacks. */
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#define ALIGNED_CUT 64
#define SERIAL_BELOW 32768
#define INLINE static inline __attribute__((always_inline))

enum { GRAD_F32, GRAD_BF16 };
enum { OUT_NONE, OUT_BF16, OUT_F16 };

typedef struct {
    float beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay, n;
} hyper_t;

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

INLINE void store(void *out, long i, float x, int out_kind) {
    if (out_kind == OUT_BF16) ((uint16_t *)out)[i] = to_bf16(x);
    if (out_kind == OUT_F16) ((uint16_t *)out)[i] = to_f16(x);
}

INLINE void span(float *restrict p, float *restrict m, float *restrict v, const void *restrict grad, void *restrict out,
                 const float *restrict step, const float *restrict scale, long length, hyper_t h,
                 int grad_kind, int out_kind, int by_column) {
    const float step0 = step[0], scale0 = scale[0];
#pragma omp simd
    for (long i = 0; i < length; i++) {
        float g = grad_kind == GRAD_BF16 ? real((uint32_t)((const uint16_t *)grad)[i] << 16) : ((const float *)grad)[i];
        g = g / h.n;
        float first = h.beta1 * m[i] + h.one_minus_beta1 * g;
        float second = h.beta2 * v[i] + h.one_minus_beta2 * (g * g);
        float denominator = sqrtf(second) * (by_column ? scale[i] : scale0) + h.eps;
        float x = p[i] * h.decay - (by_column ? step[i] : step0) * (first / denominator);
        m[i] = first;
        v[i] = second;
        p[i] = x;
        store(out, i, x, out_kind);
    }
}

INLINE void pass(float *p, float *m, float *v, const char *grad, char *out, const float *step, const float *scale,
                 long rows, long cols, hyper_t h, int threads, int grad_kind, int out_kind, int by_column) {
    const long total = rows * cols, grad_item = grad_kind == GRAD_BF16 ? 2 : 4, out_item = out_kind == OUT_NONE ? 0 : 2;
#pragma omp parallel num_threads(threads) if (total >= SERIAL_BELOW)
    {
        const long n = omp_get_num_threads(), k = omp_get_thread_num();
        const long share = (total / n / ALIGNED_CUT + 1) * ALIGNED_CUT;
        const long stop = share * (k + 1) < total ? share * (k + 1) : total;
        for (long i = share * k; i < stop;) {
            const long row = i / cols, col = i - row * cols, left = cols - col;
            const long length = left < stop - i ? left : stop - i, channel = by_column ? col : row;
            span(p + i, m + i, v + i, grad + i * grad_item, out + i * out_item, step + channel, scale + channel, length,
                 h, grad_kind, out_kind, by_column);
            i += length;
        }
    }
}

#define BY_DIM(G, O) \
    if (by_column) pass(p, m, v, grad, out, step, scale, rows, cols, h, threads, G, O, 1); \
    else pass(p, m, v, grad, out, step, scale, rows, cols, h, threads, G, O, 0); \
    return
#define BY_OUT(G) \
    if (out_kind == OUT_NONE) { BY_DIM(G, OUT_NONE); } \
    if (out_kind == OUT_BF16) { BY_DIM(G, OUT_BF16); } \
    BY_DIM(G, OUT_F16)

void zenflow_adamw(float *p, float *m, float *v, const char *grad, char *out, const float *step, const float *scale,
                   long rows, long cols, const float *hyper, int grad_kind, int out_kind, int by_column, int threads) {
    hyper_t h;
    memcpy(&h, hyper, sizeof h);
    if (grad_kind == GRAD_F32) { BY_OUT(GRAD_F32); }
    BY_OUT(GRAD_BF16);
}

/* out = the rounded master, for windows in which nothing is updated. */
void zenflow_round(const float *p, char *out, long total, int out_kind, int threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static) if (total >= SERIAL_BELOW)
    for (long i = 0; i < total; i++) {
        ((uint16_t *)out)[i] = out_kind == OUT_BF16 ? to_bf16(p[i]) : to_f16(p[i]);
    }
}

uint64_t zenflow_load_acquire(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
void zenflow_store_release(uint64_t *word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
