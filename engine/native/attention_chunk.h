// Tiles of queries: scores and results are small matrix products, whose operands lie in a core's own cache.
//
// Scores are computed as keys x rows, so that the running softmax of 4, 8 or 16 rows is one vector operation per key.

#pragma once

#include <type_traits>

#include "attention_step.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
constexpr bool HAS_PAIRS = true;
#else
constexpr bool HAS_PAIRS = false;
#endif

// Two bfloat16 that are multiplied together with two others: twice the rate of float32, and sums are in float32.
struct Pair {
    uint32_t bits;  // the first is in the lower half
};

inline Floats broadcast(float a) { return all(a); }
inline Floats vector_of(const float *b) { return load(b); }
inline Floats multiply_add(Floats a, Floats b, Floats sum, float) { return sum + a * b; }
#if defined(__AVX512BF16__)
inline Floats broadcast(Pair a) { return (Floats)all_bits(a.bits); }
inline Floats vector_of(const Pair *b) { return load(reinterpret_cast<const float *>(b)); }
inline Floats multiply_add(Floats a, Floats b, Floats sum, Pair) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#endif

// c[i][j] (+)= sum over k of a[i x a_row + k x a_step] b[k][j], for `rows` x (`cols` x LANES) of c, in registers.
template <int rows, int cols, bool adds, typename Unit>
inline void product(const Unit *a, int64_t a_row, int64_t a_step, const Unit *b, int64_t b_step, float *c, int64_t c_row,
                    int64_t depth) {
    Floats sums[rows][cols];
    for (int i = 0; i < rows; ++i)
        for (int j = 0; j < cols; ++j) sums[i][j] = adds ? load(c + i * c_row + j * LANES) : Floats{};
    for (int64_t k = 0; k < depth; ++k, a += a_step, b += b_step) {
        Floats b_k[cols];
        for (int j = 0; j < cols; ++j) b_k[j] = vector_of(b + j * LANES);
        for (int i = 0; i < rows; ++i) {
            const Floats a_i = broadcast(a[i * a_row]);
            for (int j = 0; j < cols; ++j) sums[i][j] = multiply_add(a_i, b_k[j], sums[i][j], Unit{});
        }
    }
    for (int i = 0; i < rows; ++i)
        for (int j = 0; j < cols; ++j) store(c + i * c_row + j * LANES, sums[i][j]);
}

// Sizes of the products that fill the registers: 16 of AVX2, 32 of AVX-512 and NEON.
constexpr int SCORE_KEYS = LANES == 8 ? 4 : 8, SCORE_COLS = 3;
constexpr int OUT_ROWS = 6, OUT_COLS = LANES == 8 ? 2 : 4;
constexpr int64_t ROW_PANEL = SCORE_COLS * LANES;  // rows are padded to a multiple, which is one of OUT_ROWS, too
static_assert(TILE_ROWS % ROW_PANEL == 0 && TILE_ROWS % OUT_ROWS == 0 && TILE_KEYS % SCORE_KEYS == 0, "");

inline int64_t padded_rows(int64_t num_rows) { return (num_rows + ROW_PANEL - 1) / ROW_PANEL * ROW_PANEL; }

// Units of one tile of keys [key][depth], and of values [key or pair of keys][D]. `count` is even for pairs; a null
// pointer stands for zeros.
template <typename Stored>
void take_keys(const Stored *const *keys, int64_t count, int64_t head_dim, float *to) {
    for (int64_t k = 0; k < count; ++k)
        for (int64_t i = 0; i < head_dim; i += LANES) store(to + k * head_dim + i, keys[k] ? load(keys[k] + i) : Floats{});
}
template <typename Stored>
void take_keys(const Stored *const *keys, int64_t count, int64_t head_dim, Pair *to) {
    BFloat16 *each = reinterpret_cast<BFloat16 *>(to);
    for (int64_t k = 0; k < count; ++k)
        for (int64_t i = 0; i < head_dim; i += LANES)
            store(each + k * head_dim + i, keys[k] ? load(keys[k] + i) : Floats{});
}
template <typename Stored>
void take_values(const Stored *const *keys, int64_t values, int64_t count, int64_t head_dim, float *to) {
    for (int64_t k = 0; k < count; ++k)
        for (int64_t i = 0; i < head_dim; i += LANES)
            store(to + k * head_dim + i, keys[k] ? load(keys[k] + values + i) : Floats{});
}
inline Floats paired(Floats first, Floats second) {  // of values that bfloat16 has
    return (Floats)((Bits)first >> 16 | ((Bits)second & 0xffff0000));
}
template <typename Stored>
void take_values(const Stored *const *keys, int64_t values, int64_t count, int64_t head_dim, Pair *to) {
    for (int64_t k = 0; k < count; k += 2, to += head_dim)
        for (int64_t i = 0; i < head_dim; i += LANES) {
            const Floats first = keys[k] ? load(keys[k] + values + i) : Floats{};
            const Floats second = keys[k + 1] ? load(keys[k + 1] + values + i) : Floats{};
            store(reinterpret_cast<float *>(to + i), paired(first, second));
        }
}

// Weights of two keys, of LANES rows; rounded for pairs.
inline void put_weights(Floats first, Floats second, float *weights, int64_t k) {
    store(weights + k * TILE_ROWS, first);
    store(weights + (k + 1) * TILE_ROWS, second);
}
inline Floats rounded_to_bfloat16(Floats v) {  // to nearest, ties to even; NaN stays
    const Bits x = (Bits)v;
    return (Floats)((x + 0x7fff + (x >> 16 & 1)) & 0xffff0000);
}
inline void put_weights(Floats first, Floats second, Pair *weights, int64_t k) {
    const Floats pair = paired(rounded_to_bfloat16(first), rounded_to_bfloat16(second));
    store(reinterpret_cast<float *>(weights + k / 2 * TILE_ROWS), pair);
}

// Replaces scores [key][row] of LANES rows by weights, and writes by what factor the rows' earlier results count from
// now on. `hides` says which rows do not see a key.
template <typename Unit, typename Hides>
void weigh(float *scores, int64_t num_keys, float scale, float *largest, float *sum, float *kept, const Hides &hides) {
    Floats most = load(largest);
    for (int64_t k = 0; k < num_keys; ++k) {
        const Floats score = hides(load(scores + k * TILE_ROWS), k);
        store(scores + k * TILE_ROWS, score);
        most = larger(score, most);
    }
    const Floats factor = exp2((load(largest) - most) * scale);
    Floats sums = load(sum) * factor;
    for (int64_t k = 0; k < num_keys; k += 2) {
        const Floats first = exp2(load(scores + k * TILE_ROWS) * scale - most * scale);
        const Floats second = exp2(load(scores + (k + 1) * TILE_ROWS) * scale - most * scale);
        sums += first + second;
        put_weights(first, second, reinterpret_cast<Unit *>(scores), k);
    }
    store(largest, most);
    store(sum, sums);
    store(kept, factor);
}

// A chunk's queries as units [depth][row]; rows beyond `num_rows` are zeros.
template <typename Activation, typename Query>
void take_queries(const Query &query, int64_t num_rows, int64_t head_dim, float *to) {
    float values[MAX_HEAD_DIM] = {};
    for (int64_t r = 0; r < padded_rows(num_rows); ++r) {
        for (int64_t i = 0; i < head_dim; i += LANES) store(values + i, r < num_rows ? load(query(r) + i) : Floats{});
        for (int64_t i = 0; i < head_dim; ++i) to[i * TILE_ROWS + r] = values[i];
    }
}
template <typename Activation, typename Query>
void take_queries(const Query &query, int64_t num_rows, int64_t head_dim, Pair *to) {
    Pair values[MAX_HEAD_DIM / 2] = {};
    for (int64_t r = 0; r < padded_rows(num_rows); ++r) {
        if (r < num_rows) std::memcpy(values, query(r), head_dim * sizeof(Activation));
        else std::memset(values, 0, sizeof values);
        for (int64_t i = 0; i < head_dim / 2; ++i) to[i * TILE_ROWS + r] = values[i];
    }
}

// Adds keys `key` to `end`, at most a tile of them, to the rows that see any of them.
template <typename Unit, typename Stored>
void chunk_tile(const LayerPool<Stored> &pool, const int64_t *block_ids_M, const Item &item, int64_t heads_per_kv_head,
                int64_t window, int64_t key, int64_t end, Scratch &scratch, float scale, const Softmax &state) {
    constexpr int64_t per_unit = std::is_same_v<Unit, Pair> ? 2 : 1;
    const int64_t D = state.head_dim, depth = D / per_unit, num_keys = end - key;
    const int64_t padded_keys = (num_keys + SCORE_KEYS - 1) / SCORE_KEYS * SCORE_KEYS;
    const int64_t first_row = std::max<int64_t>(0, (key - item.first_position) * heads_per_kv_head);
    const int64_t end_row = std::min(item.num_rows, (end - 1 + window - item.first_position) * heads_per_kv_head);
    const int64_t begin = first_row / ROW_PANEL * ROW_PANEL, stop = padded_rows(end_row);
    Unit *queries = reinterpret_cast<Unit *>(scratch.queries), *weights = reinterpret_cast<Unit *>(scratch.scores);
    Unit *keys = reinterpret_cast<Unit *>(scratch.keys), *values = reinterpret_cast<Unit *>(scratch.values);

    const Stored *found[TILE_KEYS] = {};
    pool.find_keys(block_ids_M, item.kv_head, key, end, found);
    take_keys(found, padded_keys, D, keys);
    for (int64_t r = begin; r < stop; r += ROW_PANEL)
        for (int64_t k = 0; k < padded_keys; k += SCORE_KEYS)
            product<SCORE_KEYS, SCORE_COLS, false>(keys + k * depth, depth, 1, queries + r, TILE_ROWS,
                                                   scratch.scores + k * TILE_ROWS + r, TILE_ROWS, depth);

    float kept[TILE_ROWS];
    const bool all_see_all = key + padded_keys - 1 <= scratch.positions[begin] && key > scratch.positions[stop - 1] - window;
    for (int64_t r = begin; r < stop; r += LANES) {
        const Ints positions = load_raw<Ints>(scratch.positions + r), oldest = positions - static_cast<int32_t>(window);
        const auto weigh_rows = [&](const auto &hides) {
            weigh<Unit>(scratch.scores + r, padded_keys, scale, state.largest + r, state.sum + r, kept + r, hides);
        };
        if (all_see_all) {
            weigh_rows([](Floats score, int64_t) { return score; });
        } else {
            weigh_rows([&](Floats score, int64_t k) {
                const Ints at = Ints{} + static_cast<int32_t>(key + k);
                const Ints is_hidden = (at > positions) | (at <= oldest);
                return is_hidden ? all(-INFINITY) : score;
            });
        }
    }

    take_values(found, pool.values, padded_keys, D, values);
    for (int64_t r = begin; r < stop; ++r)
        if (kept[r] != 1.0f)
            for (int64_t i = r * D; i < (r + 1) * D; i += LANES) store(state.out + i, load(state.out + i) * kept[r]);
    for (int64_t i = 0; i < D;) {
        const bool is_wide = i + OUT_COLS * LANES <= D;
        for (int64_t r = first_row / OUT_ROWS * OUT_ROWS; r < stop; r += OUT_ROWS) {
            const auto add = is_wide ? product<OUT_ROWS, OUT_COLS, true, Unit> : product<OUT_ROWS, 1, true, Unit>;
            add(weights + r, 1, TILE_ROWS, values + i, D, state.out + r * D + i, D, padded_keys / per_unit);
        }
        i += (is_wide ? OUT_COLS : 1) * LANES;
    }
}
