// A step's attention, how it is cut into items, and the running softmax that adds them up.
//
// Shape suffixes: T tokens of the step, B its requests, M blocks of a padded table, Q query heads, H kv heads,
// G = Q / H, P = Q + K x H, D head dimension, F frequencies, K = 2 (keys and values), or 1: a latent, which is both.

#pragma once

#include <algorithm>

#include "vectors.h"

constexpr int64_t TILE_KEYS = 64;
constexpr int64_t RANGE_KEYS = 256;  // a multiple of TILE_KEYS
constexpr int64_t TILE_ROWS = 96;  // of a chunk: queries x heads of a kv head that are computed together
#if defined(__AMX_BF16__)
constexpr int64_t MATRIX_ROWS = 384;  // with matrix units: more rows share the work of laying out keys and values
#else
constexpr int64_t MATRIX_ROWS = TILE_ROWS;
#endif
constexpr int64_t MAX_HEAD_DIM = 576;
constexpr int64_t MAX_PARTIALS = 1 << 24;  // floats of a step's partial results: 64 MiB
constexpr float LEAST_SCORE = -1e30f;  // finite, also times any usual scale: hidden scores (-inf) minus this are -inf, not NaN

// A step; the same for all layers. The same structure as in engine/native/attention.py.
struct Step {
    int64_t activation_type, pool_type;
    int64_t num_layers, num_planes, num_heads, num_kv_heads, head_dim, block_size;
    int64_t rotated_from;           // the first dimension that is rotated; pairs (i, i + F) follow
    char *pool;                     // [blocks, layers, K, H, block size, D]; see engine/kv_cache.py
    int64_t num_tokens, num_requests, num_decodes, max_blocks, num_threads;
    const int64_t *positions_T;
    const int64_t *slots_T;         // block x block size + offset
    const int64_t *starts_B;        // the first token of each request; decodes, which have one token, come first
    const int64_t *num_tokens_B;
    const int64_t *context_lens_B;  // up to the request's last token of this step
    const int64_t *block_ids_BM;
    float scale, cap;               // of scores; 0: no cap, else a scaled score s becomes cap x tanh(s / cap)

    int64_t heads_per_kv_head() const { return num_heads / num_kv_heads; }
    int64_t token_size() const { return (num_heads + num_planes * num_kv_heads) * head_dim; }
};

// Queries of a request that are computed together, and the keys that they visit. An item of a chunk has one kv head:
// row r is query r / G and head r % G of the kv head. An item of a decode has several kv heads: row r is query head r.
struct Item {
    int64_t request, is_decode, kv_head, num_kv_heads, first_token, num_rows, first_position, first_key, end_key;
    int64_t partial;  // where its result lies among the partial results, in floats; -1: the item visits all keys

    // For a chunk: the first row whose query sees any of the keys `key` to `end`, and the row after the last such row.
    std::pair<int64_t, int64_t> rows_that_see(int64_t key, int64_t end, int64_t window, int64_t heads_per_kv_head) const {
        return {std::max<int64_t>(0, (key - first_position) * heads_per_kv_head),
                std::min(num_rows, (end - 1 + window - first_position) * heads_per_kv_head)};
    }
};

// Consecutive items with the same queries, whose partial results are added up: at most MERGED_ROWS rows, from
// `first_row` on. A guest does not leave during a merge.
constexpr int64_t MERGED_ROWS = 48;
struct Merge {
    int64_t first_item, num_items, first_row;
};

// Attention over the keys visited so far. `sum` and `out` are relative to a row's reference, one of its scores.
struct Softmax {
    float *reference, *sum, *out;  // out: rows x D
    int64_t num_rows, head_dim;

    static int64_t size(int64_t num_rows, int64_t head_dim) { return num_rows * (head_dim + 2); }
    Softmax(float *memory, int64_t num_rows, int64_t head_dim)
        : reference(memory), sum(memory + num_rows), out(memory + 2 * num_rows), num_rows(num_rows), head_dim(head_dim) {}

    Softmax of_rows(int64_t first, int64_t count) const {
        Softmax part = *this;
        part.reference += first, part.sum += first, part.out += first * head_dim, part.num_rows = count;
        return part;
    }

    void clear() {
        std::fill_n(reference, num_rows, LEAST_SCORE);
        std::fill_n(sum, num_rows * (head_dim + 1), 0.0f);
    }

    // Adds the next keys' result. `scale`: the factor that turns scores into powers of 2.
    void add(const Softmax &next, float scale) {
        for (int64_t first = 0; first < num_rows; first += LANES) {
            const int64_t count = std::min<int64_t>(LANES, num_rows - first);
            const Floats ours = load_some(reference + first, count), theirs = load_some(next.reference + first, count);
            const Floats both = larger(ours, theirs), a = exp2((ours - both) * scale), b = exp2((theirs - both) * scale);
            store_some(reference + first, both, count);
            store_some(sum + first, fused(load_some(sum + first, count), a, load_some(next.sum + first, count) * b), count);
            for (int64_t r = 0; r < count; ++r)
                for (int64_t i = (first + r) * head_dim; i < (first + r + 1) * head_dim; i += LANES)
                    store(out + i, fused(load(out + i), all(a[r]), load(next.out + i) * b[r]));
        }
    }
};

// One layer's share of the pool.
template <typename Stored>
struct LayerPool {
    Stored *first;
    int64_t head_dim, head_size, values, block_stride, block_size;

    LayerPool(const Step &s, int64_t layer)
        : head_dim(s.head_dim), head_size(s.block_size * s.head_dim),
          values((s.num_planes - 1) * s.num_kv_heads * head_size),
          block_stride(s.num_layers * s.num_planes * s.num_kv_heads * head_size), block_size(s.block_size) {
        first = reinterpret_cast<Stored *>(s.pool) + layer * s.num_planes * s.num_kv_heads * head_size;
    }

    Stored *key(int64_t slot, int64_t kv_head) const {
        return first + slot / block_size * block_stride + kv_head * head_size + slot % block_size * head_dim;
    }

    // Writes to `found` the addresses of a request's keys from `key` to `end`. The value of a key lies `values`
    // numbers after the key.
    void find_keys(const int64_t *block_ids_M, int64_t kv_head, int64_t key, int64_t end, const Stored **found) const {
        for (int64_t block = key / block_size; key < end; ++block) {
            const Stored *at = this->key(block_ids_M[block] * block_size + key % block_size, kv_head);
            const int64_t stop = end < (block + 1) * block_size ? end : (block + 1) * block_size;
            for (; key < stop; ++key, at += head_dim) *found++ = at;
        }
    }
};

// Prefetches `count` values of the next tile. Blocks are scattered, so the processor does not foresee their addresses.
// The processor can do only a few loads at once, so it would have to wait if a whole tile were prefetched at once.
// Therefore the scores of a tile prefetch the next keys bit by bit, and its weighted sums prefetch the next values.
template <typename Stored>
inline void prefetch(const Stored *at, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / static_cast<int64_t>(sizeof(Stored))) __builtin_prefetch(at + i);
}

// Memory of one thread, reused from layer to layer. Small heads lie close together in it.
struct alignas(64) Scratch {
    float *queries;  // a chunk's: D x rows; a decode's, and those of matrix units: rows x D
    float *keys, *values;
    float *scores;  // a chunk's: keys x rows; a decode's, and those of matrix units: rows x keys
    float *range, *total;
    int32_t *positions;  // of a chunk's rows

    void lay_out(int64_t head_dim) {
        queries = memory;
        keys = queries + head_dim * MATRIX_ROWS;
        values = keys + TILE_KEYS * head_dim;
        scores = values + TILE_KEYS * head_dim;
        range = scores + TILE_KEYS * TILE_ROWS;
        total = range + MATRIX_ROWS * (head_dim + 2);
        positions = reinterpret_cast<int32_t *>(total + MATRIX_ROWS * (head_dim + 2));
    }

  private:
    alignas(64) float memory[MATRIX_ROWS * (3 * MAX_HEAD_DIM + 5) + TILE_KEYS * (2 * MAX_HEAD_DIM + TILE_ROWS)];
};
