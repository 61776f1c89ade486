// Tiles of queries by matrix units: a row's scores lie side by side, so that its weights are rows of the next product.

#pragma once

#include "attention_chunk.h"
#include "attention_decode.h"

#if defined(__AMX_BF16__)

constexpr int64_t BLOCK_ROWS = 2 * matrix_units::TILE;  // computed together, while their scores are in the first-level cache

inline Bits lane_numbers() { return (Bits)_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }

// Lays out one tile's values as [pair of keys][D]. Values beyond `count` keys are zeros.
template <typename Stored>
void pair_values(HeadTile<Stored> values, int64_t count, int64_t padded_count, int64_t head_dim, Pair *to) {
    for (int64_t k = 0; k < padded_count; k += 2, to += head_dim)
        for (int64_t i = 0; i < head_dim; i += LANES) {
            const Floats first = k < count ? load(values[k] + i) : Floats{};
            const Floats second = k + 1 < count ? load(values[k + 1] + i) : Floats{};
            store(reinterpret_cast<float *>(to + i), paired(first, second));
        }
}
inline void pair_values(HeadTile<BFloat16> values, int64_t count, int64_t padded_count, int64_t head_dim, Pair *to) {
    const Bits lanes = lane_numbers();
    const __m512i low = (__m512i)(lanes | (lanes + 32) << 16), high = (__m512i)((lanes + 16) | (lanes + 48) << 16);
    for (int64_t k = 0; k < padded_count; k += 2, to += head_dim)
        for (int64_t i = 0; i < head_dim; i += 2 * LANES) {
            const __mmask32 some = i + LANES < head_dim ? 0xffffffff : 0xffff;
            const __m512i first = k < count ? _mm512_maskz_loadu_epi16(some, values[k] + i) : __m512i{};
            const __m512i second = k + 1 < count ? _mm512_maskz_loadu_epi16(some, values[k + 1] + i) : __m512i{};
            _mm512_storeu_si512(to + i, _mm512_permutex2var_epi16(first, low, second));
            if (i + LANES < head_dim) _mm512_storeu_si512(to + i + LANES, _mm512_permutex2var_epi16(first, high, second));
        }
}

// Lays out a chunk's queries as rows of bfloat16; inputs beyond the last are zeros, and so are rows beyond
// `num_rows`.
template <typename Query>
void lay_out_queries(const Query &query, int64_t num_rows, int64_t head_dim, BFloat16 *to) {
    const int64_t padded_dim = matrix_units::num_steps(head_dim) * matrix_units::STEP;
    for (int64_t r = 0; r < padded_rows(num_rows); ++r, to += padded_dim) {
        std::memset(to, 0, padded_dim * sizeof(BFloat16));
        if (r < num_rows) std::memcpy(to, query(r), head_dim * sizeof(BFloat16));
    }
}

// Computes the weights [row][TILE_KEYS / 2 pairs of keys] of LANES rows from their scores [row][TILE_KEYS]. Writes to
// `kept` the factors by which the rows' earlier results must be multiplied. `hides(scores, row, k)` returns the row's
// scores of LANES keys from `k` on, with -inf for keys that the row does not see.
template <typename Hides>
void weigh_rows(float *scores, int64_t num_keys, float scale, float *reference, float *sum, float *kept, Pair *weights,
                const Hides &hides) {
    Floats each[LANES];
#pragma GCC unroll 16
    for (int r = 0; r < LANES; ++r) {
        each[r] = all(LEAST_SCORE);
        for (int64_t k = 0; k < num_keys; k += LANES) {
            float *at = scores + r * TILE_KEYS + k;
            const Floats score = hides(load(at), r, k);
            store(at, score);
            each[r] = larger(score, each[r]);
        }
    }
    const Floats before = load(reference), most = larger(reduced(each, larger), before);
    const Floats now = next_reference(before, most, scale), shifts = scaled_reference(now, most, scale);
    const Floats factor = exp2((before - now) * scale), earlier = load(sum);
    for (int r = 0; r < LANES; ++r) {
        const Floats shift = all(shifts[r]);
        each[r] = Floats{};
        for (int64_t k = 0; k < num_keys; k += 2 * LANES) {
            const float *at = scores + r * TILE_KEYS + k;
            const Floats first = weight_of(load(at), scale, shift), second = weight_of(load(at + LANES), scale, shift);
            each[r] += first, each[r] += second;
            const __m512bh both = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
            std::memcpy(weights + (r * TILE_KEYS + k) / 2, &both, sizeof both);
        }
    }
    store(reference, now);
    store(sum, fused(earlier, factor, reduced(each, [](Floats a, Floats b) { return a + b; })));
    store(kept, earlier == 0.0f ? all(1.0f) : factor);  // results that are still 0 stay so
}

// Adds keys `key` to `end`, at most a tile, to the rows that see any of these keys.
template <typename Stored>
void matrix_tile(const LayerPool<Stored> &pool, const int64_t *block_ids_M, const Item &item, int64_t heads_per_kv_head,
                 int64_t window, int64_t key, int64_t end, Scratch &scratch, float tanh_scale, float scale,
                 const Softmax &state) {
    using matrix_units::STEP, matrix_units::TILE;
    const int64_t D = state.head_dim, depth = matrix_units::num_steps(D) * STEP / 2;
    const int64_t num_keys = (end - key + STEP - 1) / STEP * STEP;
    const auto [first_row, end_row] = item.rows_that_see(key, end, window, heads_per_kv_head);
    const int64_t begin = first_row / TILE * TILE, stop = (end_row + TILE - 1) / TILE * TILE;
    const Pair *queries = reinterpret_cast<const Pair *>(scratch.queries);
    Pair *keys = reinterpret_cast<Pair *>(scratch.keys), *values = reinterpret_cast<Pair *>(scratch.values);
    Pair *weights = reinterpret_cast<Pair *>(scratch.scores + BLOCK_ROWS * TILE_KEYS);  // behind the scores

    KeyTile<Stored> tile;
    tile.find(pool, block_ids_M, item.kv_head, key, end);
    const HeadTile<Stored> of_head{tile.keys, 0};
    std::memset(keys + D / 2 * TILE_KEYS, 0, (depth - D / 2) * TILE_KEYS * sizeof(Pair));
    transpose_keys(of_head, num_keys, D, keys);
    pair_values(of_head.moved(pool.values), end - key, num_keys, D, values);

    const int64_t num_next = std::min(TILE_KEYS, item.end_key - end);  // of the next tile, which is prefetched meanwhile
    const Stored *next[TILE_KEYS];
    pool.find_keys(block_ids_M, item.kv_head, end, end + num_next, next);
    int64_t asked = 0;

    for (int64_t row = begin; row < stop; row += BLOCK_ROWS) {
        const int64_t num_rows = std::min(BLOCK_ROWS, stop - row);
        for (const int64_t share = num_next * (row + num_rows - begin) / (stop - begin); asked < share; ++asked)
            prefetch(next[asked], D), prefetch(next[asked] + pool.values, D);
        float *scores = scratch.scores, *out = state.out + row * D, kept[BLOCK_ROWS];
        matrix_units::add_product<false>(queries + row * depth, depth, keys, TILE_KEYS, scores, TILE_KEYS, depth, num_rows,
                                         num_keys);
        for (int64_t i = 0; tanh_scale != 0.0f && i < num_rows * TILE_KEYS; i += LANES)
            store(scores + i, tanh_of(load(scores + i), tanh_scale));
        for (int64_t r = 0; r < num_rows; r += LANES) {
            const int32_t *positions = scratch.positions + row + r;
            const auto weigh = [&](const auto &hides) {
                weigh_rows(scores + r * TILE_KEYS, num_keys, scale, state.reference + row + r, state.sum + row + r, kept + r,
                           weights + r * TILE_KEYS / 2, hides);
            };
            if (key + num_keys - 1 <= positions[0] && key > positions[LANES - 1] - window)
                weigh([](Floats score, int, int64_t) { return score; });
            else
                weigh([&](Floats score, int r, int64_t k) {
                    const Ints at = (Ints)lane_numbers() + static_cast<int32_t>(key + k);
                    const Ints is_hidden = (at > positions[r]) | (at <= positions[r] - static_cast<int32_t>(window));
                    return is_hidden ? all(-INFINITY) : score;
                });
        }
        for (int64_t r = 0; r < num_rows; ++r)
            if (kept[r] != 1.0f)
                for (int64_t i = r * D; i < (r + 1) * D; i += LANES) store(out + i, load(out + i) * kept[r]);
        matrix_units::add_product<true>(weights, TILE_KEYS / 2, values, D, out, D, num_keys / 2, num_rows, D);
    }
}

#else
template <typename... Arguments> void matrix_tile(const Arguments &...);      // never called
template <typename... Arguments> void lay_out_queries(const Arguments &...);  // never called
#endif
