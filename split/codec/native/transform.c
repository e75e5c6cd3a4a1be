/* Block DCT and quantiser. Components lie innermost, so every loop runs over neighbours and is vectorised as it stands. */
#include "klt.h"

#include <math.h>

/* Floats of a block that are worked on at once: 16 KiB, so that both copies stay in the first cache. */
enum { TILE = KLT_BLOCK_MAX * KLT_BLOCK_MAX * 4 };

/* out[u] = Σ_k m[u][k]·x[k] over n rows of `lanes`; halved by symmetry: m[u][n−1−k] is m[u][k] for even u, −m[u][k]
 * for odd u. The sum runs over k in order: fallback.py adds in the same one. */
static inline void rows_forward(const float *restrict x, float *restrict out, const float *restrict m, int n,
                                int64_t lanes) {
    const int half = n / 2;
    for (int64_t lane = 0; lane < lanes; lane++) {
        float sum[KLT_BLOCK_MAX], difference[KLT_BLOCK_MAX];
        for (int k = 0; k < half; k++) {
            const float a = x[k * lanes + lane], b = x[(n - 1 - k) * lanes + lane];
            sum[k] = a + b;
            difference[k] = a - b;
        }
        if (n & 1) sum[half] = x[half * lanes + lane];
        for (int u = 0; u < n; u += 2) {
            float total = m[u * n] * sum[0];
            for (int k = 1; k < half + (n & 1); k++) total = total + m[u * n + k] * sum[k];
            out[u * lanes + lane] = total;
        }
        for (int u = 1; u < n; u += 2) {
            float total = m[u * n] * difference[0];
            for (int k = 1; k < half; k++) total = total + m[u * n + k] * difference[k];
            out[u * lanes + lane] = total;
        }
    }
}

/* x[k] = Σ_u m[u][k]·in[u]: even and odd u apart, which give both halves. */
static inline void rows_inverse(const float *restrict in, float *restrict x, const float *restrict m, int n,
                                int64_t lanes) {
    const int half = n / 2;
    for (int64_t lane = 0; lane < lanes; lane++) {
        for (int k = 0; k < half + (n & 1); k++) {
            float even = m[k] * in[lane], odd = 0.0f;
            for (int u = 2; u < n; u += 2) even = even + m[u * n + k] * in[u * lanes + lane];
            for (int u = 1; u < n; u += 2) odd = odd + m[u * n + k] * in[u * lanes + lane];
            x[k * lanes + lane] = even + odd;
            x[(n - 1 - k) * lanes + lane] = k == n - 1 - k ? even : even - odd;
        }
    }
}

/* The two sizes that are used most get loops of known length. */
static void forward_pass(const float *x, float *out, const float *m, int n, int64_t lanes) {
    switch (n) {
        case 7: rows_forward(x, out, m, 7, lanes); break;
        case 8: rows_forward(x, out, m, 8, lanes); break;
        default: rows_forward(x, out, m, n, lanes);
    }
}

static void inverse_pass(const float *in, float *x, const float *m, int n, int64_t lanes) {
    switch (n) {
        case 7: rows_inverse(in, x, m, 7, lanes); break;
        case 8: rows_inverse(in, x, m, 8, lanes); break;
        default: rows_inverse(in, x, m, n, lanes);
    }
}

static int64_t blocks_along(int64_t size, int64_t side) { return (size + side - 1) / side; }

static int64_t chunk_of(const klt_map *shape) { return TILE / (shape->rows * shape->columns); }

/* One row of coefficients: whole numbers, and whether any is unfit or spilled. */
static int32_t quantise(const float *restrict y, int64_t count, float inverse_step, const float *restrict rounding,
                        const int32_t *restrict kept, const int32_t *restrict spilled, int32_t *restrict q) {
    const float limit = (float)(KLT_LARGEST + 1);
    int32_t largest = 0, outside = 0;
    for (int64_t i = 0; i < count; i++) {
        float scaled = fabsf(y[i]) * inverse_step + rounding[i];
        scaled = scaled < limit ? scaled : limit; /* NaN, too */
        const int32_t magnitude = (int32_t)scaled & kept[i];
        largest = magnitude > largest ? magnitude : largest;
        outside |= magnitude & spilled[i];
        q[i] = y[i] < 0.0f ? -magnitude : magnitude;
    }
    return (outside ? KLT_SPILLED : 0) | (largest > KLT_LARGEST ? KLT_UNFIT : 0);
}

int32_t klt_forward(const klt_map *shape, const float *map, const float *offset, float inverse_step,
                    const float *rounding, const int32_t *kept, const int32_t *spilled, int32_t *quantised) {
    const int64_t rows = shape->rows, columns = shape->columns, components = shape->components;
    const int64_t down = blocks_along(shape->height, rows), across = blocks_along(shape->width, columns);
    const int64_t blocks = shape->batch * down * across, chunk = chunk_of(shape);
    float a[TILE], b[TILE];
    int32_t flags = 0;
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t image = block / (down * across);
        const int64_t top = block / across % down * rows, left = block % across * columns;
        for (int64_t c = 0; c < components; c += chunk) {
            const int64_t width = components - c < chunk ? components - c : chunk;
            for (int64_t r = 0; r < rows; r++) {
                const int64_t y = top + r < shape->height ? top + r : shape->height - 1;
                for (int64_t s = 0; s < columns; s++) {
                    const int64_t x = left + s < shape->width ? left + s : shape->width - 1;
                    const float *from = map + ((image * shape->height + y) * shape->width + x) * components + c;
                    float *to = a + (r * columns + s) * width;
                    for (int64_t i = 0; i < width; i++) to[i] = from[i] - offset[c + i];
                }
            }
            if (rows > 1) forward_pass(a, b, shape->dct_rows, (int)rows, columns * width);
            const float *half_way = rows > 1 ? b : a;
            float *done = rows > 1 ? a : b;
            for (int64_t u = 0; u < rows; u++) {
                const float *line = half_way + u * columns * width;
                float *coefficients = done + u * columns * width;
                if (columns > 1) forward_pass(line, coefficients, shape->dct_columns, (int)columns, width);
                for (int64_t v = 0; v < columns; v++) {
                    const int64_t p = u * columns + v;
                    flags |= quantise((columns > 1 ? coefficients : line) + v * width, width, inverse_step,
                                      rounding + p * components + c, kept + p * components + c,
                                      spilled + p * components + c, quantised + (p * blocks + block) * components + c);
                }
            }
        }
    }
    return flags;
}

static void dequantise(const int32_t *restrict q, int64_t count, float step, const float *restrict bias,
                       float *restrict y) {
    for (int64_t i = 0; i < count; i++) {
        const float magnitude = ((float)(q[i] < 0 ? -q[i] : q[i]) + bias[i]) * step;
        y[i] = q[i] == 0 ? 0.0f : q[i] < 0 ? -magnitude : magnitude;
    }
}

void klt_inverse(const klt_map *shape, const int32_t *quantised, float step, const float *bias, float *map) {
    const int64_t rows = shape->rows, columns = shape->columns, components = shape->components;
    const int64_t down = blocks_along(shape->height, rows), across = blocks_along(shape->width, columns);
    const int64_t blocks = shape->batch * down * across, chunk = chunk_of(shape);
    float a[TILE], b[TILE];
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t image = block / (down * across);
        const int64_t top = block / across % down * rows, left = block % across * columns;
        for (int64_t c = 0; c < components; c += chunk) {
            const int64_t width = components - c < chunk ? components - c : chunk;
            for (int64_t u = 0; u < rows; u++) {
                float *line = a + u * columns * width;
                for (int64_t v = 0; v < columns; v++) {
                    const int64_t p = u * columns + v;
                    dequantise(quantised + (p * blocks + block) * components + c, width, step,
                               bias + p * components + c, line + v * width);
                }
                if (columns > 1) inverse_pass(line, b + u * columns * width, shape->dct_columns, (int)columns, width);
            }
            const float *half_way = columns > 1 ? b : a;
            float *done = columns > 1 ? a : b;
            if (rows > 1) inverse_pass(half_way, done, shape->dct_rows, (int)rows, columns * width);
            const float *pixels = rows > 1 ? done : half_way;
            for (int64_t r = 0; r < rows && top + r < shape->height; r++) {
                for (int64_t s = 0; s < columns && left + s < shape->width; s++) {
                    const float *from = pixels + (r * columns + s) * width;
                    float *to = map + ((image * shape->height + top + r) * shape->width + left + s) * components + c;
                    for (int64_t i = 0; i < width; i++) to[i] = from[i];
                }
            }
        }
    }
}
