// One query of a request: keys and values are read where they lie, once for the heads of a kv head.
//
// Reading them takes most of the time, so the products are those that need no other layout: dot products with keys, and
// sums of weighted values.

#pragma once

#include <type_traits>

#include "attention_step.h"

constexpr int HEADS = 4;                     // computed together
constexpr int COLS = LANES == 8 ? 2 : 4;     // vectors of a value that are summed together; AVX2 has 16 registers
constexpr int KEYS = 4;                      // whose dot products are computed together

// scores[h][k] = queries[h] . keys[k], for `heads` heads and KEYS keys. Rows of `scores` have TILE_KEYS columns.
template <int heads, typename Stored>
inline void dot_products(const float *queries, const Stored *const *keys, float *scores, int64_t head_dim) {
    Floats sums[heads][KEYS] = {};
    for (int64_t i = 0; i < head_dim; i += LANES) {
        Floats key[KEYS];
        for (int k = 0; k < KEYS; ++k) key[k] = load(keys[k] + i);
        for (int h = 0; h < heads; ++h) {
            const Floats query = load(queries + h * head_dim + i);
            for (int k = 0; k < KEYS; ++k) sums[h][k] += query * key[k];
        }
    }
    for (int h = 0; h < heads; ++h) {
        const Floats4 result = sums_of(sums[h][0], sums[h][1], sums[h][2], sums[h][3]);
        std::memcpy(scores + h * TILE_KEYS, &result, sizeof result);
    }
}

// out[h] = out[h] x kept[h] + sum over keys of weights[h][k] x values[k], for `cols` vectors from `i` on.
template <int heads, int cols, typename Stored>
inline void weighted_sum(const float *weights, const float *kept, const Stored *const *values, int64_t num_keys,
                         int64_t i, float *out, int64_t head_dim) {
    Floats sums[heads][cols] = {};
    for (int64_t k = 0; k < num_keys; ++k) {
        Floats value[cols];
        for (int c = 0; c < cols; ++c) value[c] = load(values[k] + i + c * LANES);
        for (int h = 0; h < heads; ++h)
            for (int c = 0; c < cols; ++c) sums[h][c] += value[c] * weights[h * TILE_KEYS + k];
    }
    for (int h = 0; h < heads; ++h)
        for (int c = 0; c < cols; ++c) {
            float *at = out + h * head_dim + i + c * LANES;
            store(at, load(at) * kept[h] + sums[h][c]);
        }
}

// Replaces a row's scores by their weights, and returns by what factor earlier results count from now on.
inline float weigh(float *scores, int64_t num_keys, float scale, float *largest, float *sum) {
    const int64_t padded = (num_keys + LANES - 1) / LANES * LANES;
    std::fill(scores + num_keys, scores + padded, -INFINITY);
    Floats most = all(*largest);
    for (int64_t k = 0; k < padded; k += LANES) most = larger(load(scores + k), most);
    const float before = *largest, now = largest_of(most), kept = exp2_of((before - now) * scale);
    Floats sums = {};
    for (int64_t k = 0; k < padded; k += LANES) {
        const Floats weight = exp2(load(scores + k) * scale - now * scale);
        store(scores + k, weight);
        sums += weight;
    }
    *largest = now;
    *sum = *sum * kept + sum_of(sums);
    return kept;
}

template <int heads, typename Stored>
void decode_heads(const float *queries, const Stored *const *keys, const Stored *const *values, int64_t num_keys,
                  float *scores, float scale, Softmax state, int64_t head) {
    const int64_t D = state.head_dim;
    for (int64_t k = 0; k < num_keys; k += KEYS) dot_products<heads>(queries + head * D, keys + k, scores + k, D);
    float kept[heads];
    for (int h = 0; h < heads; ++h)
        kept[h] = weigh(scores + h * TILE_KEYS, num_keys, scale, &state.largest[head + h], &state.sum[head + h]);
    float *out = state.out + head * D;
    int64_t i = 0;
    for (; i + COLS * LANES <= D; i += COLS * LANES) weighted_sum<heads, COLS>(scores, kept, values, num_keys, i, out, D);
    for (; i < D; i += LANES) weighted_sum<heads, 1>(scores, kept, values, num_keys, i, out, D);
}

// Asks for the keys and values of a tile: blocks are scattered, so the processor does not foresee them.
template <typename Stored>
void prefetch_tile(const LayerPool<Stored> &pool, const int64_t *block_ids_M, int64_t kv_head, int64_t key, int64_t end) {
    constexpr int64_t LINE = 64 / sizeof(Stored);
    const Stored *keys[TILE_KEYS];
    pool.find_keys(block_ids_M, kv_head, key, end, keys);
    for (int64_t k = 0; k < end - key; ++k)
        for (int64_t i = 0; i < pool.head_dim; i += LINE) {
            __builtin_prefetch(keys[k] + i);
            __builtin_prefetch(keys[k] + pool.values + i);
        }
}

// Adds keys `key` to `end`, at most a tile of them, to the rows of one kv head.
template <typename Stored>
void decode_tile(const LayerPool<Stored> &pool, const int64_t *block_ids_M, int64_t kv_head, int64_t key, int64_t end,
                 const float *queries, float *scores, float scale, const Softmax &state) {
    const Stored *keys[TILE_KEYS + KEYS], *values[TILE_KEYS];
    const int64_t num_keys = end - key;
    pool.find_keys(block_ids_M, kv_head, key, end, keys);
    for (int64_t k = 0; k < num_keys; ++k) values[k] = keys[k] + pool.values;
    std::fill_n(keys + num_keys, KEYS, keys[0]);  // scores beyond the last are overwritten
    for (int64_t head = 0; head < state.num_rows; head += HEADS) {
        const auto run = [&](auto heads) {
            decode_heads<decltype(heads)::value>(queries, keys, values, num_keys, scores, scale, state, head);
        };
        switch (state.num_rows - head) {
            case 1: run(std::integral_constant<int, 1>{}); break;
            case 2: run(std::integral_constant<int, 2>{}); break;
            case 3: run(std::integral_constant<int, 3>{}); break;
            default: run(std::integral_constant<int, HEADS>{});
        }
    }
}
