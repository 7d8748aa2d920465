/* STREAM's triad, a[i] = b[i] + s * c[i] in fp32: what the pass's speed is compared with. */
#include <stdint.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif

#define S 3.0f

/* `n` a multiple of 16, arrays aligned to 64 bytes; streaming: stores past the caches where the processor can. */
void zenflow_triad(float *restrict a, const float *restrict b, const float *restrict c, long n, int streaming,
                   int threads) {
#pragma omp parallel num_threads(threads)
    {
#ifdef __SSE2__
        if (streaming) {
#pragma omp for schedule(static)
            for (long i = 0; i < n; i += 16) {
#if defined __AVX512F__
                __m512 product = _mm512_mul_ps(_mm512_set1_ps(S), _mm512_load_ps(c + i));
                _mm512_stream_ps(a + i, _mm512_add_ps(_mm512_load_ps(b + i), product));
#else
                for (int j = 0; j < 16; j += 4) {
                    __m128 product = _mm_mul_ps(_mm_set1_ps(S), _mm_load_ps(c + i + j));
                    _mm_stream_ps(a + i + j, _mm_add_ps(_mm_load_ps(b + i + j), product));
                }
#endif
            }
            _mm_sfence();
        } else
#endif
        {
#pragma omp for simd schedule(static)
            for (long i = 0; i < n; i++) a[i] = b[i] + S * c[i];
        }
    }
}
