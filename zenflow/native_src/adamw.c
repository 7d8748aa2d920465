/* A slot's AdamW updates in one pass over memory: gradients in, master and moments updated in place, the rounded weights
 * (the master's, or what is predicted from it) out. The order of the single operations is that of
 * zenflow_kernels.numerics, each rounded to fp32: build with -ffp-contract=off and without -ffast-math. Every element is
 * computed alone, so threads and cuts change no bit. The structures are those of zenflow/native.py. */
#include <float.h>
#include <math.h>
#include <string.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif

#include "rounding.h"

#define CUT 64     /* elements: threads meet between cache lines of every array */
#define BLOCK 512  /* elements that stay in the first-level cache from the gradient to the rounded weight */
#define LINE 64    /* bytes in a cache line */
#define CHUNK 65536 /* elements that a thread takes at a time */
#define SERIAL_BELOW 32768

enum { GRAD_F32, GRAD_BF16, GRAD_F16 };

typedef struct { /* the flat arrays of a segment; ring: lane after lane; out: NULL with OUT_NONE, or a lane if in_place */
    float *master, *exp_avg, *exp_avg_sq;
    const char *ring;
    char *out;
    int64_t grad_kind, out_kind, in_place;
} arrays_t;

typedef struct { /* rows of a matrix, contiguous from element `offset` of the flat arrays */
    int64_t matrix, offset, rows, cols, row_start, by_column;
} piece_t;

typedef struct { /* a step's gradient: `offset` bytes into the ring */
    int64_t offset;
    float inv_scale, clip;
} lane_t;

typedef struct {
    float beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay, n;
} constants_t;

typedef struct { /* of a matrix: no update, one with the mean of all lanes, or one a lane; factors [n_updates, n_factors] */
    const constants_t *constants;
    const float *step_size, *denom_scale;
    const lane_t *lanes;
    int64_t n_updates, n_lanes, n_factors;
    double prediction; /* that many times the window's update is added to what goes out */
} plan_t;

INLINE long least(long a, long b) { return a < b ? a : b; }

/* Exact. Subnormals by a subtraction at 2^-14, which no subnormal fp32 slows down. */
INLINE float from_f16(uint16_t h) {
    uint32_t a = (uint32_t)(h & 0x7fff) << 13, sign = (uint32_t)(h & 0x8000) << 16;
    uint32_t normal = a + (112u << 23), subnormal = bits(real(a + (113u << 23)) - real(113u << 23));
    uint32_t u = a < (1u << 23) ? subnormal : normal;
    u = a >= (31u << 23) ? a + (224u << 23) : u;
    return real(u | sign);
}

/* g = the lane's effective gradient, or that much more. */
INLINE void read_lane(float *restrict g, const char *restrict grad, lane_t lane, long length, int kind, int add) {
#pragma omp simd
    for (long i = 0; i < length; i++) {
        float x = kind == GRAD_F32    ? ((const float *)grad)[i]
                  : kind == GRAD_BF16 ? real((uint32_t)((const uint16_t *)grad)[i] << 16)
                                      : from_f16(((const uint16_t *)grad)[i]);
        x = (x * lane.inv_scale) * lane.clip;
        g[i] = add ? g[i] + x : x;
    }
}

static void gradient(float *g, const arrays_t *a, lane_t lane, long first, long length, int add) {
    const char *grad = a->ring + lane.offset + first * (a->grad_kind == GRAD_F32 ? 4 : 2);
#define READ(KIND) \
    if (add) read_lane(g, grad, lane, length, KIND, 1); \
    else read_lane(g, grad, lane, length, KIND, 0); \
    break
    switch (a->grad_kind) {
        case GRAD_F32: READ(GRAD_F32);
        case GRAD_BF16: READ(GRAD_BF16);
        case GRAD_F16: READ(GRAD_F16);
    }
}

/* By a power of two as a product, which is the same number and costs a fifth: the pass of a few cores is bound by this. */
static void divide(float *g, float n, long length) {
    if ((bits(n) & 0x7fffff) == 0) {
        const float inverse = 1 / n;
#pragma omp simd
        for (long i = 0; i < length; i++) g[i] = g[i] * inverse;
    } else {
#pragma omp simd
        for (long i = 0; i < length; i++) g[i] = g[i] / n;
    }
}

/* A sum of finite gradients may have become infinite: its mean counts as the largest number, of which AdamW makes v = inf
 * and no step, as it does of every mean above 1.8e19; inf / inf would be NaN. */
INLINE float within(float mean) {
    mean = mean > FLT_MAX ? FLT_MAX : mean;
    return mean < -FLT_MAX ? -FLT_MAX : mean;
}

INLINE void adamw(float *restrict p, float *restrict m, float *restrict v, const float *restrict g,
                  const float *restrict step, const float *restrict scale, long length, constants_t h, int each) {
    const float step0 = step[0], scale0 = scale[0];
#pragma omp simd
    for (long i = 0; i < length; i++) {
        const float x = within(g[i]);
        float first = h.beta1 * m[i] + h.one_minus_beta1 * x;
        float second = h.beta2 * v[i] + h.one_minus_beta2 * (x * x);
        float denominator = sqrtf(second) * (each ? scale[i] : scale0) + h.eps;
        m[i] = first;
        v[i] = second;
        p[i] = p[i] * h.decay - (each ? step[i] : step0) * (first / denominator);
    }
}

/* The factors of the block's elements; one for all of them if the result is 0. */
static int factors(const piece_t *piece, const plan_t *plan, long update, long first, long length,
                   const float **step, const float **scale, float *step_room, float *scale_room) {
    *step = plan->step_size + update * plan->n_factors;
    *scale = plan->denom_scale + update * plan->n_factors;
    if (plan->n_factors == 1) return 0;
    const long cols = piece->cols, i = first - piece->offset;
    long row = piece->row_start + i / cols, col = i % cols;
    if (length <= cols - col) {
        *step += piece->by_column ? col : row;
        *scale += piece->by_column ? col : row;
        return piece->by_column;
    }
    for (long done = 0; done < length; row++, col = 0) {
        const long part = least(cols - col, length - done);
        for (long j = 0; j < part; j++) {
            step_room[done + j] = (*step)[piece->by_column ? col + j : row];
            scale_room[done + j] = (*scale)[piece->by_column ? col + j : row];
        }
        done += part;
    }
    *step = step_room;
    *scale = scale_room;
    return 1;
}

/* new + a * (new - old), each operation rounded. */
INLINE void predict(float *restrict out, const float *restrict p, const float *restrict old, float a, long length) {
#pragma omp simd
    for (long i = 0; i < length; i++) out[i] = p[i] + a * (p[i] - old[i]);
}

/* Past the caches, which have no use for it: nobody but the copy engine reads it. */
INLINE void stream_line(char *to, const char *from) {
#if defined __AVX512F__
    _mm512_stream_si512((void *)to, _mm512_load_si512((const void *)from));
#elif defined __AVX__
    for (int i = 0; i < 2; i++) _mm256_stream_si256((__m256i *)to + i, _mm256_load_si256((const __m256i *)from + i));
#elif defined __SSE2__
    for (int i = 0; i < 4; i++) _mm_stream_si128((__m128i *)to + i, _mm_load_si128((const __m128i *)from + i));
#else
    memcpy(to, from, LINE);
#endif
}

static void write_past(char *out, const float *p, long length, int kind) {
    union { uint16_t halves[BLOCK]; float singles[BLOCK]; } room __attribute__((aligned(LINE)));
    const char *rounded = (const char *)&room;
    const long size = length * (kind == OUT_F32 ? 4 : 2);
    long done = 0;
    write_plain((char *)&room, p, length, kind);
    if ((uintptr_t)out % LINE == 0) {
        for (; done + LINE <= size; done += LINE) stream_line(out + done, rounded + done);
    }
    memcpy(out + done, rounded + done, size - done);
}

static void block(const arrays_t *a, const piece_t *piece, const plan_t *plan, long first, long length) {
    float g[BLOCK], step_room[BLOCK], scale_room[BLOCK], old[BLOCK];
    float *p = a->master + first, *m = a->exp_avg + first, *v = a->exp_avg_sq + first;
    const float prediction = (float)plan->prediction;
    if (prediction != 0) memcpy(old, p, sizeof(float) * length);
    for (long update = 0; update < plan->n_updates; update++) {
        const constants_t h = plan->constants[update];
        const float *step, *scale;
        gradient(g, a, plan->lanes[update], first, length, 0);
        for (long lane = 1; plan->n_updates == 1 && lane < plan->n_lanes; lane++) {
            gradient(g, a, plan->lanes[lane], first, length, 1);
        }
        if (h.n != 1) divide(g, h.n, length);
        if (factors(piece, plan, update, first, length, &step, &scale, step_room, scale_room)) {
            adamw(p, m, v, g, step, scale, length, h, 1);
        } else {
            adamw(p, m, v, g, step, scale, length, h, 0);
        }
    }
    if (a->out_kind == OUT_NONE) return;
    if (prediction != 0) predict(g, p, old, prediction, length);
    const float *shown = prediction != 0 ? g : p;
    char *out = a->out + first * (a->out_kind == OUT_F32 ? 4 : 2);
    if (a->in_place) write_plain(out, shown, length, a->out_kind);
    else write_past(out, shown, length, a->out_kind);
}

/* Elements [start, stop) of the flat storage, of which those between the pieces are padding. */
static void range(const arrays_t *arrays, const piece_t *pieces, long n_pieces, const plan_t *plans, long start,
                  long stop) {
    for (const piece_t *piece = pieces; piece < pieces + n_pieces; piece++) {
        const long piece_stop = least(stop, piece->offset + piece->rows * piece->cols);
        for (long i = start > piece->offset ? start : piece->offset; i < piece_stop;) {
            const long length = least(piece_stop, (i / BLOCK + 1) * BLOCK) - i;
            block(arrays, piece, plans + piece->matrix, i, length);
            i += length;
        }
    }
}

/* pieces: ascending in offset, `n_pieces` >= 1; plans: one a matrix. */
void zenflow_pass(const arrays_t *arrays, const piece_t *pieces, long n_pieces, const plan_t *plans, int threads) {
    const piece_t *last = pieces + n_pieces - 1;
    const long begin = pieces->offset / CUT * CUT, end = last->offset + last->rows * last->cols;
    const long chunks = (end - begin + CHUNK - 1) / CHUNK;
#pragma omp parallel num_threads(threads) if (end - begin >= SERIAL_BELOW)
    {
        /* First come, first served: a core that others use too would hold up equal shares. */
#pragma omp for schedule(dynamic) nowait
        for (long c = 0; c < chunks; c++) {
            const long start = begin + c * CHUNK;
            range(arrays, pieces, n_pieces, plans, start, least(end, start + CHUNK));
        }
#ifdef __SSE2__
        _mm_sfence(); /* streamed stores obey no other order, and `done` is raised after them */
#endif
    }
}
