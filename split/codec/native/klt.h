/* Compiled core of codec `klt`: C11, no Python, no allocation, no globals, no I/O. Loaded by split/codec/core.py.
 *
 * split/codec/fallback.py does the same in numpy and plain Python: the same integers and the same stream, bit for bit.
 * So no fused multiply-add where the order of operations decides an integer (build with -ffp-contract=off), and never
 * -ffast-math. The caller checks shapes and sizes of all arrays; streams and coefficients are checked here.
 */
#ifndef ISTHMUS_KLT_H
#define ISTHMUS_KLT_H

#include <stdint.h>

#if defined(__GNUC__)
#define KLT_PUBLIC __attribute__((visibility("default")))
#else
#define KLT_PUBLIC
#endif

/* Counted up with every change of a signature or of a struct below; core.py refuses another one. */
#define KLT_ABI 2

/* As in laplace.py, transform.py and calibration.py. */
enum {
    KLT_SYMBOLS = 32,
    KLT_FREQUENCY_BITS = 14,
    KLT_ESCAPE_LENGTH_BITS = 5,
    KLT_LARGEST = 1 << 20,
    KLT_BLOCK_MAX = 32,
};

enum { KLT_SPILLED = 1, KLT_UNFIT = 2 };

enum { KLT_DAMAGED = -1, KLT_NO_ROOM = -2, KLT_TOO_LARGE = -3 };

/* laplace.Tables */
typedef struct {
    const uint16_t *starts;  /* [64][33] */
    const uint8_t *groups;   /* [64] */
    const uint8_t *low_bits; /* [64] */
} klt_tables;

/* Which coefficients travel, position by position of a block: those of position p are first[p] … first[p + 1] − 1. */
typedef struct {
    int64_t positions;         /* rows × columns of a block */
    int64_t blocks;
    int64_t components;
    const int32_t *first;      /* [positions + 1] */
    const uint16_t *component; /* [first[positions]] */
    const uint8_t *table;      /* [first[positions]] */
} klt_order;

/* A map of FP32 [batch][height][width][components] and its blocks. */
typedef struct {
    int64_t batch, height, width, components;
    int64_t rows, columns;     /* of a block, 1 … KLT_BLOCK_MAX */
    const float *dct_rows;     /* [rows][rows], orthonormal DCT-II */
    const float *dct_columns;  /* [columns][columns] */
} klt_map;

/* Coefficients are INT32 [rows × columns][blocks][components]; blocks run over batch, block row, block column. */

KLT_PUBLIC int32_t klt_abi(void);

/* Blocks of `map` − offset (edges repeated), transformed and quantised. KLT_SPILLED: a coefficient outside `coded` is
 * not 0; KLT_UNFIT: a magnitude is above KLT_LARGEST or not a number, and `quantised` is of no use. */
KLT_PUBLIC int32_t klt_forward(const klt_map *shape, const float *map, const float *offset, float inverse_step,
                               const float *rounding, const int32_t *kept, const int32_t *spilled,
                               int32_t *quantised);

/* The inverse: (|q| + bias)·step, transformed back, into `map`. */
KLT_PUBLIC void klt_inverse(const klt_map *shape, const int32_t *quantised, float step, const float *bias,
                            float *map);

/* The stream of the coefficients in `order`, at the END of `stream`; its length, or KLT_NO_ROOM, KLT_TOO_LARGE. */
KLT_PUBLIC int64_t klt_pack(const klt_tables *tables, const klt_order *order, const int32_t *quantised,
                            uint8_t *stream, int64_t capacity);

/* Fills in the coefficients of `order` and leaves the others as they are; 0, or KLT_DAMAGED for a stream that
 * klt_pack has not made (work and memory are bounded by `order`). */
KLT_PUBLIC int32_t klt_unpack(const klt_tables *tables, const klt_order *order, const uint8_t *stream,
                              int64_t bytes, int32_t *quantised);

#endif
