/* Channels that change owner: between the worker's state and the compact blocks that travel to and from the device.
 * Bits are copied; but what becomes visible of a master is rounded. The structure is that of zenflow/native.py. */
#include "rounding.h"

typedef struct { /* of one matrix [rows, cols]: channels `leave` take the block's values, then it takes those of `enter` */
    float *state, *block;          /* block: NULL if nothing travels; the leaving ones become zero then */
    char *shown;                   /* NULL, or the weights [rows, cols] that take the leaving ones' values, rounded */
    const int64_t *leave, *enter;  /* channels, `n_enter` of the second and as many, or none, of the first */
    int64_t n_leave, n_enter;
    int64_t cols, first, length;   /* rows of the columns, or columns of the rows, that the block holds */
    int64_t by_column, clear;      /* clear: what has been taken becomes zero */
    int64_t out_kind;              /* of what is shown */
} order_t;

/* What becomes visible of `length` leaving values, neighbours from element `first` of the matrix on. */
INLINE void show(const order_t *o, long first, const float *values, long length) {
    write_plain(o->shown + first * (o->out_kind == OUT_F32 ? 4 : 2), values, length, o->out_kind);
}

/* A row at a time, so that a cache line is fetched once for all channels in it. block: [length, n_enter]. */
static void columns(const order_t *o, long i) {
    float *restrict x = o->state + (o->first + i) * o->cols;
    if (!o->block) {
        for (long j = 0; j < o->n_leave; j++) x[o->leave[j]] = 0;
    } else {
        float *restrict block = o->block + i * o->n_enter;
        for (long j = 0; j < o->n_leave; j++) x[o->leave[j]] = block[j];
        for (long j = 0; o->shown && j < o->n_leave; j++) {
            show(o, (o->first + i) * o->cols + o->leave[j], block + j, 1);
        }
        for (long j = 0; j < o->n_enter; j++) block[j] = x[o->enter[j]];
    }
    if (o->clear) {
        for (long j = 0; j < o->n_enter; j++) x[o->enter[j]] = 0;
    }
}

/* block: [n_enter, length]. */
static void rows(const order_t *o, long j) {
    const size_t size = sizeof(float) * o->length;
    float *leaving = j < o->n_leave ? o->state + o->leave[j] * o->cols + o->first : NULL;
    float *entering = o->state + o->enter[j] * o->cols + o->first;
    if (o->block) {
        float *block = o->block + j * o->length;
        if (leaving) memcpy(leaving, block, size);
        if (leaving && o->shown) show(o, o->leave[j] * o->cols + o->first, block, o->length);
        memcpy(block, entering, size);
    } else if (leaving) {
        memset(leaving, 0, size);
    }
    if (o->clear) memset(entering, 0, size);
}

/* orders: of matrices, arrays or parts of them that do not overlap. */
void zenflow_exchange(const order_t *orders, long n_orders, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (const order_t *o = orders; o < orders + n_orders; o++) {
        const long count = o->by_column ? o->length : o->n_enter;
#pragma omp for schedule(static) nowait
        for (long i = 0; i < count; i++) {
            if (o->by_column) columns(o, i);
            else rows(o, i);
        }
    }
}
