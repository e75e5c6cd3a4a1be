/* Random maps, tables and streams through the compiled core of codec klt, under the sanitizers: klt ROUNDS SEED TABLES.
 *
 * Every buffer is an allocation of its own, exactly as long as it may be read or written. TABLES: the bytes of starts,
 * groups and low_bits of laplace.Tables. Prints what happened; a sanitizer's complaint or a stream that does not come
 * back ends the run. (scripts/fuzzing/codec.py) */
#include "../../split/codec/native/klt.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TABLES = 64, ROW = KLT_SYMBOLS + 1 };

static uint64_t seed;

static uint32_t below(uint32_t end) { /* xorshift64* (Vigna 2016) */
    seed ^= seed >> 12;
    seed ^= seed << 25;
    seed ^= seed >> 27;
    return (uint32_t)((seed * 2685821657736338717u) >> 32) % end;
}

static void *room(int64_t count, size_t size) {
    void *found = calloc(count ? (size_t)count : 1, size);
    if (!found) exit(2);
    return found;
}

static void fail(const char *what) {
    puts(what);
    exit(1);
}

static float any_float(int wild) { /* wild: any 32 bits, NaN and infinity among them */
    const uint32_t bits = below(0xffffffffu);
    float found;
    if (wild && !below(50)) {
        memcpy(&found, &bits, sizeof found);
        return found;
    }
    return ((float)(bits % 2000) - 1000.0f) / (float)(1 + below(200));
}

static int32_t any_coefficient(void) {
    switch (below(16)) {
        case 0: return (int32_t)below(2 * KLT_LARGEST + 1) - KLT_LARGEST;
        case 1: return (int32_t)below(200) - 100;
        default: return (int32_t)below(5) - 2;
    }
}

static float *floats(int64_t count, float low, float width) {
    float *found = room(count, sizeof *found);
    for (int64_t i = 0; i < count; i++) found[i] = low + width * (float)below(1000) / 1000.0f;
    return found;
}

static long read_back, refused, unfit, no_room, too_large;

static void one(const klt_tables *tables) {
    const int64_t rows = 1 + below(below(30) ? 9 : 32), columns = 1 + below(below(30) ? 9 : 32);
    const int64_t positions = rows * columns, components = 1 + below(below(8) ? 9 : 150);
    float *dct_rows = floats(rows * rows, -1, 2), *dct_columns = floats(columns * columns, -1, 2);
    const klt_map shape = {
        .batch = 1 + below(2), .height = 1 + below(12), .width = 1 + below(12), .components = components,
        .rows = rows, .columns = columns, .dct_rows = dct_rows, .dct_columns = dct_columns,
    };
    const int64_t down = (shape.height + rows - 1) / rows, across = (shape.width + columns - 1) / columns;
    const int64_t blocks = shape.batch * down * across, values = shape.batch * shape.height * shape.width * components;
    const int64_t entries = positions * components;
    float *map = room(values, sizeof *map), *offset = floats(components, -1, 2);
    float *rounding = floats(entries, -0.28f, 0.78f), *bias = floats(entries, -0.02f, 0.45f);
    int32_t *kept = room(entries, sizeof *kept), *spilled = room(entries, sizeof *spilled);
    int32_t *first = room(positions + 1, sizeof *first), *quantised = room(entries * blocks, sizeof *quantised);
    uint16_t *component = room(entries, sizeof *component);
    uint8_t *table = room(entries, sizeof *table);
    int32_t coded = 0;
    const int wild = !below(3);
    for (int64_t i = 0; i < values; i++) map[i] = any_float(wild);
    for (int64_t p = 0; p < positions; p++) {
        first[p] = coded;
        for (int64_t c = 0; c < components; c++) {
            const uint32_t what = below(3); /* never, spilled, coded */
            kept[p * components + c] = what ? -1 : 0;
            spilled[p * components + c] = what == 1 ? -1 : 0;
            if (what == 2) {
                component[coded] = (uint16_t)c;
                table[coded++] = (uint8_t)below(TABLES);
            }
        }
    }
    first[positions] = coded;
    const klt_order order = {.positions = positions, .blocks = blocks, .components = components,
                             .first = first, .component = component, .table = table};
    const float inverse_step = (float)(1 + below(100)) / 10.0f;
    if (klt_forward(&shape, map, offset, inverse_step, rounding, kept, spilled, quantised) & KLT_UNFIT) unfit++;
    if (below(2))
        for (int64_t i = 0; i < entries * blocks; i++) quantised[i] = any_coefficient();
    if (!below(20)) quantised[below((uint32_t)(entries * blocks))] = below(2) ? INT32_MIN : KLT_LARGEST + 1;

    const int64_t enough = (int64_t)coded * blocks * 8 + 4, capacity = below(8) ? enough : below((uint32_t)enough + 1);
    uint8_t *stream = room(capacity, 1);
    const int64_t length = klt_pack(tables, &order, quantised, stream, capacity);
    if (length == KLT_NO_ROOM) {
        no_room++;
        if (capacity == enough) fail("eight bytes a coefficient were not enough");
    } else if (length == KLT_TOO_LARGE) {
        too_large++;
    } else {
        int32_t *again = room(entries * blocks, sizeof *again);
        uint8_t *exact = room(length, 1);
        memcpy(exact, stream + capacity - length, (size_t)length);
        if (klt_unpack(tables, &order, exact, length, again)) fail("a stream was refused that klt_pack has made");
        for (int64_t p = 0; p < positions; p++)
            for (int64_t b = 0; b < blocks; b++)
                for (int32_t i = first[p]; i < first[p + 1]; i++) {
                    const int64_t at = (p * blocks + b) * components + component[i];
                    if (again[at] != quantised[at]) fail("a coefficient came back as another");
                }
        klt_inverse(&shape, again, 0.5f, bias, map);
        for (int hurt = 0; hurt < 6; hurt++) {
            const int64_t bytes = below(3) ? length : below((uint32_t)length + 1);
            uint8_t *damaged = room(bytes, 1);
            memcpy(damaged, exact, (size_t)bytes);
            for (uint32_t changes = below(4); changes && bytes; changes--)
                damaged[below((uint32_t)bytes)] = (uint8_t)below(256);
            if (klt_unpack(tables, &order, damaged, bytes, again)) refused++;
            else read_back++;
            klt_inverse(&shape, again, 0.5f, bias, map);
            free(damaged);
        }
        free(exact);
        free(again);
    }
    free(stream); free(table); free(component); free(quantised); free(first); free(spilled); free(kept);
    free(bias); free(rounding); free(offset); free(map); free(dct_columns); free(dct_rows);
}

int main(int argc, char **argv) {
    static uint16_t starts[TABLES * ROW];
    static uint8_t groups[TABLES], low_bits[TABLES];
    if (argc != 4) return 2;
    FILE *file = fopen(argv[3], "rb");
    if (!file || fread(starts, sizeof starts, 1, file) != 1 || fread(groups, sizeof groups, 1, file) != 1 ||
        fread(low_bits, sizeof low_bits, 1, file) != 1)
        return 2;
    fclose(file);
    const klt_tables tables = {starts, groups, low_bits};
    const long rounds = atol(argv[1]);
    const uint64_t start = strtoull(argv[2], NULL, 10);
    for (long round = 0; round < rounds; round++) {
        seed = (start + (uint64_t)round + 1) * 0x9E3779B97F4A7C15u;
        one(&tables);
    }
    printf("{\"rounds\": %ld, \"read\": %ld, \"refused\": %ld, \"unfit\": %ld, \"no_room\": %ld, \"too_large\": %ld}\n",
           rounds, read_back, refused, unfit, no_room, too_large);
    return 0;
}
