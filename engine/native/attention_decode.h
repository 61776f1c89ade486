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

// Where the keys of a tile lie, and behind them their values, for its first kv head; those of the next kv head lie
// `head_size` behind. Behind the last key there are more pointers, which may be read, but mean nothing.
template <typename Stored>
struct KeyTile {
    const Stored *keys[TILE_KEYS + KEYS];
    int64_t count;

    void find(const LayerPool<Stored> &pool, const int64_t *block_ids_M, int64_t kv_head, int64_t key, int64_t end) {
        count = end - key;
        pool.find_keys(block_ids_M, kv_head, key, end, keys);
        std::fill(keys + count, keys + TILE_KEYS + KEYS, keys[0]);
    }
};

// The keys, or the values, of one kv head in a tile.
template <typename Stored>
struct HeadTile {
    const Stored *const *keys;
    int64_t offset;

    const Stored *operator[](int64_t k) const { return keys[k] + offset; }
    HeadTile moved(int64_t by_keys, int64_t by) const { return {keys + by_keys, offset + by}; }
};

// Asks for memory of the next tile. Blocks are scattered, so the processor does not foresee them; and it has few requests
// under way at once, so that asking for a whole tile would make it wait. So each load asks for as much of the next tile.
template <typename Stored>
inline void prefetch(const Stored *at, int64_t i) {
    if (i * sizeof(Stored) % 64 == 0) __builtin_prefetch(at + i);
}

// scores[h][k] = queries[h] . keys[k], for `heads` heads and KEYS keys. Rows of `scores` have TILE_KEYS columns.
template <int heads, typename Stored>
inline void dot_products(const float *queries, HeadTile<Stored> keys, HeadTile<Stored> next, float *scores,
                         int64_t head_dim) {
    Floats sums[heads][KEYS] = {};
    for (int64_t i = 0; i < head_dim; i += LANES) {
        Floats key[KEYS];
        for (int k = 0; k < KEYS; ++k) key[k] = load(keys[k] + i), prefetch(next[k], i);
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
inline void weighted_sum(const float *weights, const float *kept, HeadTile<Stored> values, HeadTile<Stored> next,
                         int64_t num_keys, int64_t i, float *out, int64_t head_dim) {
    Floats sums[heads][cols] = {};
    for (int64_t k = 0; k < num_keys; ++k) {
        Floats value[cols];
        for (int c = 0; c < cols; ++c)
            value[c] = load(values[k] + i + c * LANES), prefetch(next[k], i + c * LANES);
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
void decode_heads(const float *queries, HeadTile<Stored> keys, HeadTile<Stored> next, int64_t values, int64_t num_keys,
                  float *scores, float scale, Softmax state) {
    const int64_t D = state.head_dim;
    for (int64_t k = 0; k < num_keys; k += KEYS)
        dot_products<heads>(queries, keys.moved(k, 0), next.moved(k, 0), scores + k, D);
    float kept[heads];
    for (int h = 0; h < heads; ++h)
        kept[h] = weigh(scores + h * TILE_KEYS, num_keys, scale, &state.largest[h], &state.sum[h]);
    const auto add = [&](auto cols, int64_t i) {
        weighted_sum<heads, decltype(cols)::value>(scores, kept, keys.moved(0, values), next.moved(0, values), num_keys, i,
                                                   state.out, D);
    };
    int64_t i = 0;
    for (; i + COLS * LANES <= D; i += COLS * LANES) add(std::integral_constant<int, COLS>{}, i);
    for (; i < D; i += LANES) add(std::integral_constant<int, 1>{}, i);
}

// Adds a tile's keys to the rows of `num_kv_heads` kv heads. `next` is the tile that will be added next.
template <typename Stored>
void decode_tile(const LayerPool<Stored> &pool, const KeyTile<Stored> &tile, const KeyTile<Stored> &next,
                 int64_t num_kv_heads, const float *queries, float *scores, float scale, const Softmax &state) {
    const int64_t G = state.num_rows / num_kv_heads, D = state.head_dim;
    for (int64_t k = tile.count; k < next.count; ++k)  // what no load asks for
        for (int64_t i = 0; i < D; i += LANES) prefetch(next.keys[k], i), prefetch(next.keys[k] + pool.values, i);
    for (int64_t kv_head = 0; kv_head < num_kv_heads; ++kv_head) {
        const HeadTile<Stored> keys{tile.keys, kv_head * pool.head_size};
        const HeadTile<Stored> after = kv_head + 1 < num_kv_heads ? keys.moved(0, pool.head_size) : HeadTile<Stored>{next.keys, 0};
        for (int64_t head = kv_head * G; head < (kv_head + 1) * G; head += HEADS) {
            const auto run = [&](auto heads) {
                decode_heads<decltype(heads)::value>(queries + head * D, keys, after, pool.values, tile.count, scores, scale,
                                                     state.of_rows(head, heads));
            };
            switch ((kv_head + 1) * G - head) {
                case 1: run(std::integral_constant<int, 1>{}); break;
                case 2: run(std::integral_constant<int, 2>{}); break;
                case 3: run(std::integral_constant<int, 3>{}); break;
                default: run(std::integral_constant<int, HEADS>{});
            }
        }
    }
}
