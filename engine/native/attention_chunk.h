// Tiles of queries: scores and results are small matrix products, whose operands lie in a core's own cache.
//
// Scores are computed as keys x rows, so that the running softmax of 4, 8 or 16 rows is one vector operation per key.

#pragma once

#include "attention_units.h"

// Sizes of the products that fill the registers: 16 of AVX2, 32 of AVX-512 and NEON.
constexpr int SCORE_KEYS = LANES == 8 ? 4 : 8, SCORE_COLS = 3;
constexpr int KEY_PANEL = SCORE_KEYS > LANES ? SCORE_KEYS : LANES;  // keys are padded to a multiple
constexpr int OUT_ROWS = 6, OUT_COLS = LANES == 8 ? 2 : 4;
constexpr int64_t ROW_PANEL = SCORE_COLS * LANES;  // rows are padded to a multiple, which is also a multiple of OUT_ROWS
static_assert(TILE_ROWS % ROW_PANEL == 0 && MATRIX_ROWS % ROW_PANEL == 0 && TILE_ROWS % OUT_ROWS == 0, "");
static_assert(KEY_PANEL % SCORE_KEYS == 0 && KEY_PANEL % LANES == 0 && TILE_KEYS % KEY_PANEL == 0, "");

inline int64_t padded_rows(int64_t num_rows) { return (num_rows + ROW_PANEL - 1) / ROW_PANEL * ROW_PANEL; }

// Convert one tile's keys to units [key][depth], and its values to units [key or pair of keys][D]. `count` is even
// for pairs; a null pointer stands for zeros.
template <typename Stored>
void convert_keys(const Stored *const *keys, int64_t count, int64_t head_dim, float *to) {
    for (int64_t k = 0; k < count; ++k)
        for (int64_t i = 0; i < head_dim; i += LANES) store(to + k * head_dim + i, keys[k] ? load(keys[k] + i) : Floats{});
}
template <typename Stored>
void convert_keys(const Stored *const *keys, int64_t count, int64_t head_dim, Pair *to) {
    BFloat16 *each = reinterpret_cast<BFloat16 *>(to);
    for (int64_t k = 0; k < count; ++k, each += head_dim)
        for (int64_t i = 0; i < head_dim; i += LANES) store(each + i, keys[k] ? load(keys[k] + i) : Floats{});
}
template <typename Stored>
void convert_values(const Stored *const *keys, int64_t values, int64_t count, int64_t head_dim, float *to) {
    for (int64_t k = 0; k < count; ++k)
        for (int64_t i = 0; i < head_dim; i += LANES)
            store(to + k * head_dim + i, keys[k] ? load(keys[k] + values + i) : Floats{});
}
template <typename Stored>
void convert_values(const Stored *const *keys, int64_t values, int64_t count, int64_t head_dim, Pair *to) {
    for (int64_t k = 0; k < count; k += 2, to += head_dim)
        for (int64_t i = 0; i < head_dim; i += LANES) {
            const Floats first = keys[k] ? load(keys[k] + values + i) : Floats{};
            const Floats second = keys[k + 1] ? load(keys[k + 1] + values + i) : Floats{};
            store(reinterpret_cast<float *>(to + i), paired(first, second));
        }
}

// Stores the weights of two keys for LANES rows; rounded for pairs.
inline void put_weights(Floats first, Floats second, float *weights, int64_t k) {
    store(weights + k * TILE_ROWS, first);
    store(weights + (k + 1) * TILE_ROWS, second);
}
inline void put_weights(Floats first, Floats second, Pair *weights, int64_t k) {
    const Floats pair = paired(rounded_to_bfloat16(first), rounded_to_bfloat16(second));
    store(reinterpret_cast<float *>(weights + k / 2 * TILE_ROWS), pair);
}

// Replaces scores [key][row] of LANES rows by weights. Writes to `kept` the factors by which the rows' earlier results
// must be multiplied. `hides(scores, k)` returns the scores of a key, with -inf for rows that do not see it.
template <typename Unit, typename Hides>
void weigh(float *scores, int64_t num_keys, float scale, float *reference, float *sum, float *kept, const Hides &hides) {
    Floats most = load(reference);
    for (int64_t k = 0; k < num_keys; ++k) {
        const Floats score = hides(load(scores + k * TILE_ROWS), k);
        store(scores + k * TILE_ROWS, score);
        most = larger(score, most);
    }
    const Floats before = load(reference), now = next_reference(before, most, scale);
    const Floats shift = scaled_reference(now, most, scale), factor = exp2((before - now) * scale);
    Floats sums[LANES] = {};
    for (int64_t k = 0; k < num_keys; k += LANES)
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i += 2) {
            const Floats first = weight_of(load(scores + (k + i) * TILE_ROWS), scale, shift);
            const Floats second = weight_of(load(scores + (k + i + 1) * TILE_ROWS), scale, shift);
            sums[i] += first, sums[i + 1] += second;
            put_weights(first, second, reinterpret_cast<Unit *>(scores), k + i);
        }
    for (int width = LANES / 2; width > 0; width /= 2)  // in the order in which `sum_of` adds the lanes of a vector
        for (int i = 0; i < width; ++i) sums[i] += sums[i + width];
    store(reference, now);
    store(sum, fused(load(sum), factor, sums[0]));
    store(kept, factor);
}

// Converts a chunk's queries to units [depth][row]; rows beyond `num_rows` are zeros.
template <typename Activation, typename Query>
void convert_queries(const Query &query, int64_t num_rows, int64_t head_dim, float *to) {
    float values[MAX_HEAD_DIM];
    for (int64_t r = 0; r < padded_rows(num_rows); ++r) {
        for (int64_t i = 0; i < head_dim; i += LANES) store(values + i, r < num_rows ? load(query(r) + i) : Floats{});
        for (int64_t i = 0; i < head_dim; ++i) to[i * TILE_ROWS + r] = values[i];
    }
}
template <typename Activation, typename Query>
void convert_queries(const Query &query, int64_t num_rows, int64_t head_dim, Pair *to) {
    Pair values[MAX_HEAD_DIM / 2];
    for (int64_t r = 0; r < padded_rows(num_rows); ++r) {
        if (r < num_rows) std::memcpy(values, query(r), head_dim * sizeof(Activation));
        else std::memset(values, 0, head_dim * sizeof(Activation));
        for (int64_t i = 0; i < head_dim / 2; ++i) to[i * TILE_ROWS + r] = values[i];
    }
}

// Adds keys `key` to `end`, at most a tile, to the rows that see any of these keys.
template <typename Unit, typename Stored>
void chunk_tile(const LayerPool<Stored> &pool, const int64_t *block_ids_M, const Item &item, int64_t heads_per_kv_head,
                int64_t window, int64_t key, int64_t end, Scratch &scratch, float tanh_scale, float scale,
                const Softmax &state) {
    const int64_t D = state.head_dim, depth = D / PER_UNIT<Unit>;
    const int64_t padded_keys = (end - key + KEY_PANEL - 1) / KEY_PANEL * KEY_PANEL;
    const auto [first_row, end_row] = item.rows_that_see(key, end, window, heads_per_kv_head);
    const int64_t begin = first_row / ROW_PANEL * ROW_PANEL, stop = padded_rows(end_row);
    Unit *queries = reinterpret_cast<Unit *>(scratch.queries), *weights = reinterpret_cast<Unit *>(scratch.scores);
    Unit *keys = reinterpret_cast<Unit *>(scratch.keys), *values = reinterpret_cast<Unit *>(scratch.values);

    const Stored *found[TILE_KEYS] = {};
    pool.find_keys(block_ids_M, item.kv_head, key, end, found);
    convert_keys(found, padded_keys, D, keys);
    const int64_t num_next = std::min(TILE_KEYS, item.end_key - end);  // of the next tile, which is prefetched meanwhile
    const Stored *next[TILE_KEYS];
    pool.find_keys(block_ids_M, item.kv_head, end, end + num_next, next);
    for (int64_t r = begin; r < stop; r += ROW_PANEL)
        for (int64_t k = 0; k < padded_keys; k += SCORE_KEYS) {
            for (int64_t i = k; r == begin && i < std::min(k + SCORE_KEYS, num_next); ++i)
                prefetch(next[i], D), prefetch(next[i] + pool.values, D);
            product<SCORE_KEYS, SCORE_COLS, false>(keys + k * depth, depth, 1, queries + r, TILE_ROWS,
                                                   scratch.scores + k * TILE_ROWS + r, TILE_ROWS, depth);
        }

    for (int64_t k = 0; tanh_scale != 0.0f && k < padded_keys; ++k)
        for (int64_t r = begin; r < stop; r += LANES) {
            float *score = scratch.scores + k * TILE_ROWS + r;
            store(score, tanh_of(load(score), tanh_scale));
        }

    float kept[TILE_ROWS];
    const bool all_see_all = key + padded_keys - 1 <= scratch.positions[begin] && key > scratch.positions[stop - 1] - window;
    for (int64_t r = begin; r < stop; r += LANES) {
        const Ints positions = load_raw<Ints>(scratch.positions + r), oldest = positions - static_cast<int32_t>(window);
        const auto weigh_rows = [&](const auto &hides) {
            weigh<Unit>(scratch.scores + r, padded_keys, scale, state.reference + r, state.sum + r, kept + r, hides);
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

    convert_values(found, pool.values, padded_keys, D, values);
    for (int64_t r = begin; r < stop; ++r)
        if (kept[r] != 1.0f)
            for (int64_t i = r * D; i < (r + 1) * D; i += LANES) store(state.out + i, load(state.out + i) * kept[r]);
    for (int64_t i = 0; i < D;) {
        const bool is_wide = i + OUT_COLS * LANES <= D;
        for (int64_t r = first_row / OUT_ROWS * OUT_ROWS; r < stop; r += OUT_ROWS) {
            const auto add = is_wide ? product<OUT_ROWS, OUT_COLS, true, Unit> : product<OUT_ROWS, 1, true, Unit>;
            add(weights + r, 1, TILE_ROWS, values + i, D, state.out + r * D + i, D, padded_keys / PER_UNIT<Unit>, {});
        }
        i += (is_wide ? OUT_COLS : 1) * LANES;
    }
}
