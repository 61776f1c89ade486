// One query of a request. Keys and values are read in place, once for the heads of a kv head.
//
// Keys are transposed in a core's own cache. So scores are vectors of keys, and each score is summed up over the depth
// in the same order as in a chunk.

#pragma once

#include "attention_units.h"

constexpr int HEADS = 4;  // computed together

// How many vectors, of keys or of a value, are summed together for `heads` heads. AVX2 has 16 registers; sums in steps
// take two registers each.
constexpr int cols_of(int heads, int most_heads, bool in_steps) {
    return (LANES == 8 && heads > most_heads) || (in_steps && heads > 3) ? 2 : 4;
}

// Pointers to the keys of a tile, and then to their values, for its first kv head. The next kv head's keys and values
// lie `head_size` further. After the last key there are pointers to other keys, which may be read, but do not count.
template <typename Stored>
struct KeyTile {
    const Stored *keys[TILE_KEYS];
    int64_t count;

    void find(const LayerPool<Stored> &pool, const int64_t *block_ids_M, int64_t kv_head, int64_t key, int64_t end) {
        count = end - key;
        pool.find_keys(block_ids_M, kv_head, key, end, keys);
        std::fill(keys + count, keys + TILE_KEYS, keys[0]);
    }
};

// The keys, or the values, of one kv head in a tile.
template <typename Stored>
struct HeadTile {
    const Stored *const *keys;
    int64_t offset;

    const Stored *operator[](int64_t k) const { return keys[k] + offset; }
    HeadTile moved(int64_t by) const { return {keys, offset + by}; }
};

// LANES units of a key, from unit `i` on. Pairs beyond `depth` are zeros; they are half a vector at most.
template <typename Stored>
inline Floats key_units(const Stored *key, int64_t i, int64_t, float) { return load(key + i); }
template <typename Stored>
inline Floats key_units(const Stored *key, int64_t i, int64_t depth, Pair) {
    BFloat16 values[2 * LANES] = {};
    store(values, load(key + 2 * i));
    if (i + LANES <= depth) store(values + LANES, load(key + 2 * i + LANES));
    return load_raw<Floats>(values);
}
inline Floats key_units(const BFloat16 *key, int64_t i, int64_t depth, Pair) {
    return i + LANES <= depth ? load_raw<Floats>(key + 2 * i) : key_units<BFloat16>(key, i, depth, Pair{});
}

// Transposes keys to [depth][key], so that scores are vectors of keys.
template <typename Unit, typename Stored>
void transpose_keys(HeadTile<Stored> keys, int64_t num_keys, int64_t head_dim, Unit *to) {
    const int64_t depth = head_dim / PER_UNIT<Unit>;
    for (int64_t k = 0; k < num_keys; k += LANES)
        for (int64_t i = 0; i < depth; i += LANES) {
            Floats units[LANES];
            for (int j = 0; j < LANES; ++j) units[j] = key_units(keys[k + j], i, depth, Unit{});
            transpose(units);
            for (int64_t j = 0; j < std::min<int64_t>(LANES, depth - i); ++j)
                store(reinterpret_cast<float *>(to + (i + j) * TILE_KEYS + k), units[j]);
        }
}

// Pairs of bfloat16 are moved together, and become floats only after that. This halves the number of moves.
inline void transpose_keys(HeadTile<BFloat16> keys, int64_t num_keys, int64_t head_dim, float *to) {
    const int64_t depth = head_dim / 2;
    for (int64_t k = 0; k < num_keys; k += LANES)
        for (int64_t i = 0; i < depth; i += LANES) {
            Floats pairs[LANES];
            for (int j = 0; j < LANES; ++j) pairs[j] = key_units(keys[k + j], i, depth, Pair{});
            transpose(pairs);
            for (int64_t j = 0; j < std::min<int64_t>(LANES, depth - i); ++j) {
                float *both = to + 2 * (i + j) * TILE_KEYS + k;
                store(both, (Floats)((Bits)pairs[j] << 16));
                store(both + TILE_KEYS, (Floats)((Bits)pairs[j] & 0xffff0000));
            }
        }
}

// Prefetches the next keys from `key` on, WIDTH numbers with each call. The numbers behind a key's last number belong
// to the next key, except at the end of a block.
template <int64_t WIDTH, typename Stored>
struct NextKeys {
    HeadTile<Stored> keys;
    int64_t head_dim, key, i = 0;

    void operator()() {
        prefetch(keys[key] + i, WIDTH);
        for (i += WIDTH; i >= head_dim; i -= head_dim) ++key;
    }
};

// The values of key `k`, or of keys 2 k and 2 k + 1, from dimension `i` on.
template <typename Stored>
inline Floats value_units(HeadTile<Stored> values, int64_t k, int64_t i, float) { return load(values[k] + i); }
template <typename Stored>
inline Floats value_units(HeadTile<Stored> values, int64_t k, int64_t i, Pair) {
    return paired(load(values[2 * k] + i), load(values[2 * k + 1] + i));
}

// out[h] = out[h] x kept[h] + sum over keys of weights[h][k] x values[k], for `cols` vectors from `i` on.
template <int heads, int cols, bool in_steps, typename Unit, typename Stored>
inline void weighted_sum(const Unit *weights, const float *kept, HeadTile<Stored> values, HeadTile<Stored> next,
                         int64_t num_units, int64_t i, float *out, int64_t head_dim) {
    if constexpr (in_steps) {
        for (int h = 0; h < heads; ++h)
            for (int c = 0; c < cols; ++c) {
                float *at = out + h * head_dim + i + c * LANES;
                store(at, load(at) * kept[h]);
            }
        asm volatile("" : : "r"(out) : "memory");  // the product is rounded, as in a chunk
        const auto prefetch_next = [&next, i, k = int64_t{0}]() mutable { prefetch(next[k++] + i, cols * LANES); };
        product_in_steps<heads, cols, true>(weights, TILE_KEYS,
                                            [&](int64_t k, int c) { return load(values[k] + i + c * LANES); }, out + i,
                                            head_dim, num_units, prefetch_next);
        return;
    }
    Floats sums[heads][cols];
    for (int h = 0; h < heads; ++h)
        for (int c = 0; c < cols; ++c) sums[h][c] = load(out + h * head_dim + i + c * LANES) * kept[h];
    for (int64_t k = 0; k < num_units; ++k) {
        for (int64_t at = k * PER_UNIT<Unit>; at < (k + 1) * PER_UNIT<Unit>; ++at) prefetch(next[at] + i, cols * LANES);
        Floats weight[heads];
        for (int h = 0; h < heads; ++h) weight[h] = broadcast(weights[h * TILE_KEYS / PER_UNIT<Unit> + k]);
        for (int c = 0; c < cols; ++c) {
            const Floats value = value_units(values, k, i + c * LANES, Unit{});
            for (int h = 0; h < heads; ++h) sums[h][c] = multiply_add(weight[h], value, sums[h][c], Unit{});
        }
    }
    for (int h = 0; h < heads; ++h)
        for (int c = 0; c < cols; ++c) store(out + h * head_dim + i + c * LANES, sums[h][c]);
}

// Writes the weights of a row's scores, of which the row does not see the first `num_hidden`; `num_keys` is a multiple
// of LANES. Returns the factor by which earlier results must be multiplied.
template <bool in_steps, typename Unit>
inline float weigh(float *scores, int64_t num_hidden, int64_t end, int64_t num_keys, float scale, float *reference,
                   float *sum, Unit *weights) {
    std::fill(scores, scores + num_hidden, -INFINITY);
    std::fill(scores + end, scores + num_keys, -INFINITY);
    Floats most = all(*reference);
    for (int64_t k = 0; k < num_keys; k += LANES) most = larger(load(scores + k), most);
    most = all(largest_of(most));
    const float before = *reference, now = next_reference(all(before), most, scale)[0];
    const float kept = exp2_of((before - now) * scale);
    const Floats shift = scaled_reference(all(now), most, scale);
    Floats sums = {};
    for (int64_t k = 0; k < num_keys; k += LANES) {
        const Floats weight = weight_of(load(scores + k), scale, shift);
        if constexpr (PER_UNIT<Unit> == 2) store(reinterpret_cast<BFloat16 *>(weights) + k, weight);
        else store(weights + k, in_steps ? rounded_to_bfloat16(weight) : weight);
        sums += weight;
    }
    *reference = now;
    *sum = fused(all(*sum), all(kept), all(sum_of(sums)))[0];
    return kept;
}

template <int heads, bool in_steps, typename Unit, typename Stored>
void decode_heads(const Unit *queries, const Unit *transposed, HeadTile<Stored> values, HeadTile<Stored> next_keys,
                  HeadTile<Stored> next_values, int64_t num_hidden, int64_t end, float *scores, float tanh_scale,
                  float scale, Softmax state) {
    const int64_t D = state.head_dim, depth = D / PER_UNIT<Unit>, num_keys = (end + LANES - 1) / LANES * LANES;
    const auto score = [&](auto cols, int64_t k) {
        constexpr int COLS = decltype(cols)::value;
        const NextKeys<COLS * LANES * PER_UNIT<Unit>, Stored> prefetch_next{next_keys, D, k};
        if constexpr (in_steps)
            product_in_steps<heads, COLS, false>(
                queries, depth, [&](int64_t i, int c) { return load(transposed + i * TILE_KEYS + k + c * LANES); },
                scores + k, TILE_KEYS, depth, prefetch_next);
        else
            product<heads, COLS, false>(queries, depth, 1, transposed + k, TILE_KEYS, scores + k, TILE_KEYS, depth,
                                        prefetch_next);
    };
    constexpr int KEY_COLS = cols_of(heads, 2, in_steps), VALUE_COLS = cols_of(heads, 3, in_steps);
    int64_t k = 0;
    for (; k + KEY_COLS * LANES <= num_keys; k += KEY_COLS * LANES) score(std::integral_constant<int, KEY_COLS>{}, k);
    for (; k < num_keys; k += LANES) score(std::integral_constant<int, 1>{}, k);

    for (int h = 0; tanh_scale != 0.0f && h < heads; ++h)
        for (k = h * TILE_KEYS; k < h * TILE_KEYS + num_keys; k += LANES)
            store(scores + k, tanh_of(load(scores + k), tanh_scale));

    float kept[heads];
    Unit weights[heads * TILE_KEYS / PER_UNIT<Unit>];
    for (int h = 0; h < heads; ++h)
        kept[h] = weigh<in_steps>(scores + h * TILE_KEYS, num_hidden, end, num_keys, scale, &state.reference[h],
                                  &state.sum[h], weights + h * TILE_KEYS / PER_UNIT<Unit>);
    const int64_t num_units = in_steps ? (end + 1) / 2 * 2 : (end + PER_UNIT<Unit> - 1) / PER_UNIT<Unit>;
    const auto add = [&](auto cols, int64_t i) {
        weighted_sum<heads, decltype(cols)::value, in_steps>(weights, kept, values, next_values, num_units, i, state.out, D);
    };
    int64_t i = 0;
    for (; i + VALUE_COLS * LANES <= D; i += VALUE_COLS * LANES) add(std::integral_constant<int, VALUE_COLS>{}, i);
    for (; i < D; i += LANES) add(std::integral_constant<int, 1>{}, i);
}

// Adds a tile's keys, except the first `num_hidden`, to the rows of `num_kv_heads` kv heads. `next` is the tile that
// will be added next. `in_steps`: adds up in the order of matrix units.
template <typename Unit, bool in_steps, typename Stored>
void decode_tile(const LayerPool<Stored> &pool, const KeyTile<Stored> &tile, const KeyTile<Stored> &next,
                 int64_t num_kv_heads, int64_t num_hidden, Scratch &scratch, float tanh_scale, float scale,
                 const Softmax &state) {
    const int64_t G = state.num_rows / num_kv_heads, D = state.head_dim, depth = D / PER_UNIT<Unit>;
    const Unit *queries = reinterpret_cast<const Unit *>(scratch.queries);
    Unit *transposed = reinterpret_cast<Unit *>(scratch.keys);
    for (int64_t k = tile.count; k < next.count; ++k)  // of the next tile, those that nothing below prefetches
        prefetch(next.keys[k], D), prefetch(next.keys[k] + pool.values, D);
    for (int64_t kv_head = 0; kv_head < num_kv_heads; ++kv_head) {
        const HeadTile<Stored> keys{tile.keys, kv_head * pool.head_size};
        const HeadTile<Stored> after = kv_head + 1 < num_kv_heads ? keys.moved(pool.head_size) : HeadTile<Stored>{next.keys, 0};
        transpose_keys(keys, tile.count, D, transposed);
        for (int64_t head = kv_head * G; head < (kv_head + 1) * G; head += HEADS) {
            const auto run = [&](auto heads) {
                decode_heads<decltype(heads)::value, in_steps>(queries + head * depth, transposed, keys.moved(pool.values), after,
                                                     after.moved(pool.values), num_hidden, tile.count, scratch.scores,
                                                     tanh_scale, scale, state.of_rows(head, heads));
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
