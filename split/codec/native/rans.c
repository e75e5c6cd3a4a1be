/* rANS (Duda 2013, arXiv 1311.2540; layout as in F. Giesen's ryg_rans): a 32-bit state in 2^16 … 2^32 − 1, 16-bit words,
 * last in first out: packing runs backwards over the coefficients, so that unpacking runs forwards. One state: two that
 * take turns were measured to save a sixth of packing and nothing of unpacking, for 4 bytes more. */
#include "klt.h"

/* An escape's bits travel in two parts, since one word is the most that a state takes in at once. */
enum { SLOTS = 1 << KLT_FREQUENCY_BITS, ROW = KLT_SYMBOLS + 1, SPLIT_BITS = 12, LENGTH_MAX = 20 };

static const uint32_t LOWEST = 1u << 16;

static int length_of(uint32_t value) { /* bits of a value ≥ 1 */
    int bits = 0;
    while (value) {
        bits++;
        value >>= 1;
    }
    return bits;
}

/* --- packing ------------------------------------------------------------------------------------------------------ */

typedef struct {
    uint8_t *begin; /* nothing may be written before it */
    uint8_t *at;    /* the stream's first byte */
    int full;
} writer;

static inline uint32_t put_word(writer *out, uint32_t state) {
    if (out->at - out->begin < 2) {
        out->full = 1;
    } else {
        out->at -= 2;
        out->at[0] = (uint8_t)state;
        out->at[1] = (uint8_t)(state >> 8);
    }
    return state >> 16;
}

static inline uint32_t put_symbol(writer *out, uint32_t state, uint32_t start, uint32_t frequency) {
    if (state >> (32 - KLT_FREQUENCY_BITS) >= frequency) state = put_word(out, state);
    return ((state / frequency) << KLT_FREQUENCY_BITS) + state % frequency + start;
}

static inline uint32_t put_bits(writer *out, uint32_t state, uint32_t value, int bits) {
    if (bits && state >> (32 - bits)) state = put_word(out, state);
    return state << bits | value;
}

/* One coefficient, its parts in reverse: sign and low bits, escape, symbol. */
static inline uint32_t put(writer *out, uint32_t state, int32_t q, const uint16_t *row, uint32_t groups, int low_bits) {
    uint32_t symbol = 0;
    if (q != 0) {
        const uint32_t negative = q < 0, rest = (negative ? 0u - (uint32_t)q : (uint32_t)q) - 1;
        const uint32_t group = rest >> low_bits;
        if (group < groups) {
            symbol = 1 + group;
            state = put_bits(out, state, (rest & ((1u << low_bits) - 1)) << 1 | negative, low_bits + 1);
        } else {
            const uint32_t beyond = rest - (groups << low_bits) + 1;
            const int below = length_of(beyond) - 1, low = below < SPLIT_BITS ? below : SPLIT_BITS;
            symbol = 1 + groups;
            state = put_bits(out, state, negative, 1);
            state = put_bits(out, state, beyond & ((1u << low) - 1), low);
            state = put_bits(out, state, (beyond & ((1u << below) - 1)) >> low, below - low);
            state = put_bits(out, state, (uint32_t)below, KLT_ESCAPE_LENGTH_BITS);
        }
    }
    return put_symbol(out, state, row[symbol], (uint32_t)row[symbol + 1] - row[symbol]);
}

int64_t klt_pack(const klt_tables *tables, const klt_order *order, const int32_t *quantised, uint8_t *stream,
                 int64_t capacity) {
    writer out = {.begin = stream, .at = stream + capacity, .full = 0};
    uint32_t state = LOWEST;
    for (int64_t p = order->positions; p-- > 0;) {
        for (int64_t block = order->blocks; block-- > 0;) {
            const int32_t *from = quantised + (p * order->blocks + block) * order->components;
            for (int32_t i = order->first[p + 1]; i-- > order->first[p];) {
                const int32_t q = from[order->component[i]];
                const uint8_t k = order->table[i];
                if (q > KLT_LARGEST || q < -KLT_LARGEST) return KLT_TOO_LARGE;
                state = put(&out, state, q, tables->starts + k * ROW, tables->groups[k], tables->low_bits[k]);
            }
            if (out.full) return KLT_NO_ROOM;
        }
    }
    put_word(&out, state >> 16);
    put_word(&out, state);
    return out.full ? KLT_NO_ROOM : stream + capacity - out.at;
}

/* --- unpacking ---------------------------------------------------------------------------------------------------- */

typedef struct {
    const uint8_t *at;
    const uint8_t *end;
    int damaged;
} reader;

static inline uint32_t take_word(reader *in, uint32_t state) {
    if (in->end - in->at < 2) {
        in->damaged = 1;
        return state << 16;
    }
    state = state << 16 | (uint32_t)in->at[1] << 8 | in->at[0];
    in->at += 2;
    return state;
}

static inline uint32_t take_bits(reader *in, uint32_t *state, int bits) {
    const uint32_t value = *state & ((1u << bits) - 1);
    *state >>= bits;
    if (*state < LOWEST) *state = take_word(in, *state);
    return value;
}

static inline int32_t signed_of(uint32_t magnitude, uint32_t negative) {
    return negative ? -(int32_t)magnitude : (int32_t)magnitude;
}

static inline int32_t take(reader *in, uint32_t *state, const uint16_t *row, uint32_t groups, int low_bits) {
    const uint32_t slot = *state & (SLOTS - 1);
    uint32_t symbol = 0;
    while (slot >= row[symbol + 1]) symbol++; /* ends: the last entry of a row is SLOTS */
    *state = (*state >> KLT_FREQUENCY_BITS) * ((uint32_t)row[symbol + 1] - row[symbol]) + slot - row[symbol];
    if (*state < LOWEST) *state = take_word(in, *state);
    if (symbol == 0) return 0;
    if (symbol <= groups) {
        const uint32_t bits = take_bits(in, state, low_bits + 1);
        return signed_of(((symbol - 1) << low_bits | bits >> 1) + 1, bits & 1);
    }
    const int below = (int)take_bits(in, state, KLT_ESCAPE_LENGTH_BITS);
    const int low = below < SPLIT_BITS ? below : SPLIT_BITS;
    if (below > LENGTH_MAX) {
        in->damaged = 1;
        return 0;
    }
    const uint32_t high = take_bits(in, state, below - low);
    const uint32_t beyond = 1u << below | high << low | take_bits(in, state, low);
    const uint32_t magnitude = (groups << low_bits) + beyond;
    const uint32_t negative = take_bits(in, state, 1);
    if (magnitude > KLT_LARGEST) in->damaged = 1;
    return signed_of(magnitude, negative);
}

static uint32_t take_state(reader *in) {
    const uint32_t low = take_word(in, 0);
    const uint32_t state = take_word(in, 0) << 16 | low;
    if (state < LOWEST) in->damaged = 1;
    return state;
}

int32_t klt_abi(void) { return KLT_ABI; }

int32_t klt_unpack(const klt_tables *tables, const klt_order *order, const uint8_t *stream, int64_t bytes,
                   int32_t *quantised) {
    reader in = {.at = stream, .end = stream + bytes, .damaged = 0};
    uint32_t state = take_state(&in);
    for (int64_t p = 0; p < order->positions; p++) {
        for (int64_t block = 0; block < order->blocks; block++) {
            int32_t *to = quantised + (p * order->blocks + block) * order->components;
            for (int32_t i = order->first[p]; i < order->first[p + 1]; i++) {
                const uint8_t k = order->table[i];
                to[order->component[i]] =
                    take(&in, &state, tables->starts + k * ROW, tables->groups[k], tables->low_bits[k]);
            }
            if (in.damaged) return KLT_DAMAGED;
        }
    }
    /* The state is back where packing began, and nothing is left. Damage seldom leads there, but for damage to bits that
     * were not coded (signs, low bits): it gives other coefficients. The channel is what vouches for bytes. */
    return in.damaged || state != LOWEST || in.at != in.end ? KLT_DAMAGED : 0;
}
