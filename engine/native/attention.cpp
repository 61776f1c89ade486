// Attention straight from the paged KV pool, for a whole step: decodes and prefill chunks together.
//
// Keys are visited in tiles with a running softmax (FlashAttention, 2022; Milakov and Gimelshein, 2018). Scores are
// kept for one tile only, and a tile is visited only if a query sees it. The keys of a request are also cut into
// ranges, at fixed positions. Ranges are computed separately and then added up in order: by one thread, or by several
// threads if one thread alone could work much longer than the others (Flash-Decoding, 2023). Decodes and chunks visit the
// same tiles of the same ranges, and add up in the same order. So the result of a token depends only on the tokens
// before it. It does not depend on the number of threads, on the other requests, or on where its chunk begins and ends.

#include "attention_chunk.h"
#include "attention_decode.h"
#include "attention_matrix.h"
#include "parallel.h"

namespace {

thread_local Scratch scratch;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <typename Activation, typename Stored>
class LayerAttention {
  public:
    LayerAttention(const Step &step, int64_t layer, int64_t window, const void *qkv_TPD, const float *sinks_Q,
                   void *out_TQD)
        : s(step), D(step.head_dim), G(step.heads_per_kv_head()), window(window), pool(step, layer),
          qkv_TPD(static_cast<const Activation *>(qkv_TPD)), sinks_Q(sinks_Q), out_TQD(static_cast<Activation *>(out_TQD)),
          tanh_scale(step.cap > 0.0f ? step.scale / step.cap : 0.0f),
          scale(LOG2_E * (step.cap > 0.0f ? step.cap : step.scale)) {}

    // Computes the item's final result, or its partial result. `next` is the item that this thread will probably
    // compute next, or the same item. Returns false, without a result, if this thread is a guest that had to leave.
    bool run(const Item &item, const Item &next, float *partials) const {
        [[maybe_unused]] const AsInUnits as_in_units;
        scratch.lay_out(D);
        convert_queries_of(item);
        const int64_t rows = state_rows(item);
        Softmax total(item.partial < 0 ? scratch.total : partials + item.partial, rows, D);
        Softmax range(scratch.range, rows, D);
        total.clear();
        attend(item, next, item.first_key, total);
        for (int64_t key = end_of_range(item.first_key); key < item.end_key; key = end_of_range(key)) {
            if (Team::must_leave()) return false;
            range.clear();
            attend(item, next, key, range);
            total.add(range, scale);
        }
        if (item.partial < 0) write(item, total, 0, item.num_rows);
        return true;
    }

    void merge(const Merge &merge, const Item *items, float *partials) const {
        [[maybe_unused]] const AsInUnits as_in_units;
        const Item &first = items[merge.first_item];
        const int64_t rows = state_rows(first), count = std::min(MERGED_ROWS, first.num_rows - merge.first_row);
        const auto partial = [&](int64_t i) {
            return Softmax(partials + items[merge.first_item + i].partial, rows, D).of_rows(merge.first_row, count);
        };
        Softmax total = partial(0);
        for (int64_t i = 1; i < merge.num_items; ++i) total.add(partial(i), scale);
        write(first, total, merge.first_row, count);
    }

  private:
    using Unit = std::conditional_t<std::is_same_v<Activation, BFloat16> && HAS_PAIRS, Pair, float>;
    using DecodeUnit = std::conditional_t<BY_MATRIX_UNITS<Unit>, float, Unit>;
    using AsInUnits = std::conditional_t<BY_MATRIX_UNITS<Unit>, matrix_units::NoSubnormals, Nothing>;

    const Step &s;
    const int64_t D, G, window;
    const LayerPool<Stored> pool;
    const Activation *qkv_TPD;
    const float *sinks_Q;  // or null
    Activation *out_TQD;
    const float tanh_scale;  // of scores that are replaced by their tanh; 0: scores stay
    const float scale;       // of scores: weights are powers of 2

    static int64_t state_rows(const Item &item) { return item.is_decode ? item.num_rows : padded_rows(item.num_rows); }

    static int64_t end_of_range(int64_t key) { return (key / RANGE_KEYS + 1) * RANGE_KEYS; }

    void convert_queries_of(const Item &item) const {
        const auto query = [&](int64_t row) {
            const int64_t rows = item.num_kv_heads * G;
            return qkv_TPD + (item.first_token + row / rows) * s.token_size() + (item.kv_head * G + row % rows) * D;
        };
        if (item.is_decode) {
            DecodeUnit *queries = reinterpret_cast<DecodeUnit *>(scratch.queries);
            if constexpr (PER_UNIT<DecodeUnit> == 2) std::memcpy(queries, query(0), item.num_rows * D * sizeof(Activation));
            else for (int64_t i = 0; i < item.num_rows * D; i += LANES) store(queries + i, load(query(0) + i));
            return;
        }
        if constexpr (BY_MATRIX_UNITS<Unit>)
            lay_out_queries(query, item.num_rows, D, reinterpret_cast<BFloat16 *>(scratch.queries));
        else convert_queries<Activation>(query, item.num_rows, D, reinterpret_cast<Unit *>(scratch.queries));
        for (int64_t r = 0; r < padded_rows(item.num_rows); ++r)
            scratch.positions[r] = static_cast<int32_t>(item.first_position + std::min(r, item.num_rows - 1) / G);
    }

    // Adds the keys of one range, from `key` on, to `state`.
    void attend(const Item &item, const Item &next, int64_t key, const Softmax &state) const {
        const int64_t stop = std::min(item.end_key, end_of_range(key));
        if (item.is_decode) return attend_decode(item, next, key, stop, state);
        const int64_t *block_ids_M = s.block_ids_BM + item.request * s.max_blocks;
        matrix_units::Shape shape;
        if (BY_MATRIX_UNITS<Unit>) shape.for_panels(matrix_units::TILE, matrix_units::TILE);
        for (int64_t end; key < stop; key = end) {
            end = std::min(stop, end_of_tile(key));
            if constexpr (BY_MATRIX_UNITS<Unit>)
                matrix_tile(pool, block_ids_M, item, G, window, key, end, scratch, tanh_scale, scale, state);
            else chunk_tile<Unit>(pool, block_ids_M, item, G, window, key, end, scratch, tanh_scale, scale, state);
        }
    }

    void attend_decode(const Item &item, const Item &next_item, int64_t key, int64_t stop, const Softmax &state) const {
        KeyTile<Stored> tile, next;
        find_tile(item, key, tile);
        for (; key < stop; key = end_of_tile(key), tile = next) {
            if (end_of_tile(key) < item.end_key) find_tile(item, end_of_tile(key), next);
            else find_tile(next_item, next_item.first_key, next);
            const int64_t num_hidden = std::max<int64_t>(0, item.first_position - window + 1 - key);
            decode_tile<DecodeUnit, BY_MATRIX_UNITS<Unit>>(pool, tile, next, item.num_kv_heads, num_hidden, scratch, tanh_scale,
                                                     scale, state);
        }
    }

    static int64_t end_of_tile(int64_t key) { return (key / TILE_KEYS + 1) * TILE_KEYS; }

    void find_tile(const Item &item, int64_t key, KeyTile<Stored> &tile) const {
        tile.find(pool, s.block_ids_BM + item.request * s.max_blocks, item.kv_head, key,
                  std::min(item.end_key, end_of_tile(key)));
    }

    // Writes final results. `total`: the softmax of `count` rows of the item, from row `first` on.
    void write(const Item &item, const Softmax &total, int64_t first, int64_t count) const {
        const int64_t rows = item.num_kv_heads * G;
        for (int64_t r = 0; r < count; ++r) {
            const int64_t row = first + r, head = item.kv_head * G + row % rows;
            Activation *out = out_TQD + ((item.first_token + row / rows) * s.num_heads + head) * D;
            float sum = total.sum[r];
            if (sinks_Q) sum += exp2_of(sinks_Q[head] * LOG2_E - total.reference[r] * scale);
            const float inverse = 1.0f / sum;
            // Adding 0 turns -0 into 0. A chunk never has -0, since it adds the zeros of hidden keys; a decode may.
            for (int64_t i = 0; i < D; i += LANES) store(out + i, load(total.out + r * D + i) * inverse + Floats{});
        }
    }
};

// The items of a step, in the order in which they are begun. Chunks come before decodes, and a chunk's last tile comes
// first: large items come first, so that threads end together.
class Plan {
  public:
    Plan(const Step &step, int64_t window, int64_t num_guests, Item *items, Merge *merges)
        : s(step), window(window), num_threads(step.num_threads + num_guests), tile_queries(queries_in(tile_rows())),
          items(items), merges(merges) {
        const int64_t most_heads = std::min(s.num_kv_heads, queries_in(TILE_ROWS));
        for_each_tile([&](Item item) {
            item.num_kv_heads = s.num_kv_heads;
            total_cost += cost(item);
        });
        // The kv heads of a block lie side by side, so one thread reads them all if enough work is left for the other
        // threads.
        const auto for_each_item = [&](const auto &call) {
            for_each_tile([&](Item item) {
                item.num_kv_heads = item.is_decode ? most_heads : 1;
                if (is_large(item)) item.num_kv_heads = 1;
                for (; item.kv_head < s.num_kv_heads; item.kv_head += item.num_kv_heads) {
                    item.num_kv_heads = std::min(item.num_kv_heads, s.num_kv_heads - item.kv_head);
                    if (item.is_decode) item.num_rows = item.num_kv_heads * s.heads_per_kv_head();
                    call(item);
                }
            });
        };
        for_each_item([&](const Item &item) { num_wanted += partials_of(item); });
        for_each_item([&](const Item &item) { add(item); });
    }

    int64_t num_items = 0, num_merges = 0, num_partials = 0;  // partials in floats

  private:
    const Step &s;
    const int64_t window, num_threads, tile_queries;
    Item *items;
    Merge *merges;
    int64_t total_cost = 0;
    int64_t num_wanted = 0;  // partial results of the items that are not added yet, in floats

    int64_t queries_in(int64_t num_rows) const { return std::max<int64_t>(1, num_rows / s.heads_per_kv_head()); }

    // With matrix units, tiles are larger, as long as each thread gets several tiles, and computes a range of keys in
    // much less than a millisecond.
    int64_t tile_rows() const {
        constexpr int64_t TILES_OF_THREAD = 8, MULTIPLE = 32;
        if (s.activation_type != BFLOAT16) return TILE_ROWS;
        const int64_t most = std::max(TILE_ROWS, s.head_dim <= 256 ? MATRIX_ROWS : MATRIX_ROWS / 2);
        const int64_t share = (s.num_tokens - s.num_decodes) * s.num_heads / (num_threads * TILES_OF_THREAD);
        return num_threads == 1 ? most : std::clamp(share / MULTIPLE * MULTIPLE, TILE_ROWS, most);
    }

    template <typename Call>
    void for_each_tile(const Call &call) const {
        for (int64_t i = 0; i < s.num_requests; ++i) {
            const int64_t b = (s.num_decodes + i) % s.num_requests, first_position = s.context_lens_B[b] - s.num_tokens_B[b];
            for (int64_t tile = ceil_div(s.num_tokens_B[b], tile_queries) - 1; tile >= 0; --tile) {
                const int64_t start = tile * tile_queries, end = std::min(start + tile_queries, s.num_tokens_B[b]);
                Item item = {};
                item.request = b;
                item.is_decode = b < s.num_decodes;
                item.first_token = s.starts_B[b] + start;
                item.num_rows = (end - start) * s.heads_per_kv_head();
                item.first_position = first_position + start;
                item.first_key = std::max<int64_t>(0, item.first_position - window + 1);
                item.first_key -= item.first_key % TILE_KEYS;  // tiles begin at multiples
                item.end_key = first_position + end;
                item.partial = -1;
                call(item);
            }
        }
    }

    // The cost of an item. Reading a key for a decode costs about as much as computing 16 rows with a key.
    static int64_t cost(const Item &item) {
        return (item.end_key - item.first_key) * item.num_kv_heads * (item.is_decode ? 16 : item.num_rows);
    }

    // Whether the item is so large that threads could end at very different times.
    bool is_large(const Item &item) const { return num_threads > 1 && cost(item) * num_threads * 4 > total_cost; }

    int64_t partial_size(const Item &item) const {
        return Softmax::size(item.is_decode ? item.num_rows : padded_rows(item.num_rows), s.head_dim);
    }

    // How many floats the item's ranges need to be computed separately; 0 if one thread computes all of them.
    int64_t partials_of(const Item &item) const {
        const int64_t num_ranges = ceil_div(item.end_key, RANGE_KEYS) - item.first_key / RANGE_KEYS;
        return num_ranges > 1 && is_large(item) ? num_ranges * partial_size(item) : 0;
    }

    // Adds an item, or its ranges as separate items. If memory does not suffice for the ranges of all items, only the
    // last items are divided, so that the threads end together.
    void add(const Item &item) {
        const int64_t size = partials_of(item);
        const bool fits = num_wanted <= MAX_PARTIALS;
        num_wanted -= size;
        if (!size || !fits) {
            items[num_items++] = item;
            return;
        }
        const int64_t first_item = num_items;
        for (int64_t key = item.first_key; key < item.end_key; key = (key / RANGE_KEYS + 1) * RANGE_KEYS) {
            Item &part = items[num_items++] = item;
            part.first_key = key;
            part.end_key = std::min(item.end_key, (key / RANGE_KEYS + 1) * RANGE_KEYS);
            part.partial = num_partials;
            num_partials += partial_size(item);
        }
        for (int64_t row = 0; row < item.num_rows; row += MERGED_ROWS)
            merges[num_merges++] = {first_item, num_items - first_item, row};
    }
};

// Calls `call` with null pointers of the types of activations and of the pool.
template <typename Call>
void with_types(const Step &s, const Call &call) {
    const auto with_pool = [&](auto *activation) {
        if (s.pool_type == FLOAT8) call(activation, static_cast<Float8 *>(nullptr));
        else call(activation, activation);
    };
    if (s.activation_type == FLOAT32 && s.pool_type == BFLOAT16)
        return call(static_cast<float *>(nullptr), static_cast<BFloat16 *>(nullptr));
    if (s.activation_type == FLOAT32) with_pool(static_cast<float *>(nullptr));
    if (s.activation_type == BFLOAT16) with_pool(static_cast<BFloat16 *>(nullptr));
    if (s.activation_type == FLOAT16) with_pool(static_cast<Float16 *>(nullptr));
}

// Norms (if there are weights) and rotates a head of F pairs (i, i + F), in place.
template <typename Activation>
void rotate(Activation *x_D, const float *cos_sin_D, const float *norm_D, float eps, int64_t F) {
    float scale = 1.0f;
    if (norm_D) {
        Floats squares = {};
        for (int64_t i = 0; i < 2 * F; i += LANES) squares += load(x_D + i) * load(x_D + i);
        scale = 1.0f / std::sqrt(sum_of(squares) / static_cast<float>(2 * F) + eps);
    }
    for (int64_t i = 0; i < F; i += LANES) {
        const int64_t rest = F - i;
        Floats a = load_some(x_D + i, rest), b = load_some(x_D + F + i, rest);
        if (norm_D) {
            a = a * scale * load_some(norm_D + i, rest);
            b = b * scale * load_some(norm_D + F + i, rest);
        }
        const Floats cosine = load_some(cos_sin_D + i, rest), sine = load_some(cos_sin_D + F + i, rest);
        store_some(x_D + i, a * cosine - b * sine, rest);
        store_some(x_D + F + i, b * cosine + a * sine, rest);
    }
}

}  // namespace

// The keys and values of a token this far ahead are prefetched, since they may lie in any block of the pool.
constexpr int64_t TOKENS_AHEAD = 8;

extern "C" {

// Writes the items and merges of a step for layers with this window; `items` must have room for the items of all
// ranges. Returns in `counts` the numbers of items, of merges, and of floats of partial results.
void baton_plan_attention(const Step *step, int64_t window, Item *items, Merge *merges, int64_t *counts) {
    const Plan plan(*step, window, Team::mine().invite_guests(), items, merges);
    counts[0] = plan.num_items, counts[1] = plan.num_merges, counts[2] = plan.num_partials;
}

// Norms (if there are weights) and rotates queries and keys, in place; stores keys and values in the pool.
// `cos_sin_X2F` has the cosines of F frequencies for every position, followed by the sines.
void baton_rope_store(const Step *step, int64_t layer, const float *cos_sin_X2F, void *qkv_TPD, const float *q_norm_D,
                      const float *k_norm_D, float eps) {
    const Step &s = *step;
    with_types(s, [&](auto *activation, auto *stored) {
        using Activation = std::remove_pointer_t<decltype(activation)>;
        using Stored = std::remove_pointer_t<decltype(stored)>;
        const LayerPool<Stored> pool(s, layer);
        const int64_t D = s.head_dim, rotated = D - s.rotated_from;
        parallel_for(s.num_tokens, ceil_div(4096, s.token_size()), s.num_threads, [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; ++t) {
                for (int64_t head = 0; t + TOKENS_AHEAD < end && head < s.num_kv_heads; ++head) {
                    const Stored *next_D = pool.key(s.slots_T[t + TOKENS_AHEAD], head);
                    for (int64_t i = 0; i < D; i += 64 / static_cast<int64_t>(sizeof(Stored)))
                        __builtin_prefetch(next_D + i, 1), __builtin_prefetch(next_D + pool.values + i, 1);
                }
                Activation *x_D = static_cast<Activation *>(qkv_TPD) + t * s.token_size();
                const float *cos_sin_2F = cos_sin_X2F + s.positions_T[t] * rotated;
                for (int64_t head = 0; head < s.num_heads + s.num_kv_heads; ++head, x_D += D)
                    rotate(x_D + s.rotated_from, cos_sin_2F, head < s.num_heads ? q_norm_D : k_norm_D, eps, rotated / 2);
                const Activation *keys = x_D - s.num_kv_heads * D, *values = s.num_planes > 1 ? x_D : keys;
                for (int64_t head = 0; head < s.num_kv_heads; ++head) {
                    Stored *key_D = pool.key(s.slots_T[t], head), *value_D = key_D + pool.values;
                    for (int64_t i = 0; i < D; i += LANES) {
                        store(key_D + i, load(keys + head * D + i));
                        store(value_D + i, load(values + head * D + i));
                    }
                }
            }
        }, parts_for_guests(s.num_tokens * 2 * s.token_size() * sizeof(Activation)));
    });
}

// out_TQD = attention of the queries in `qkv_TPD`, by the plan for this `window`. `sinks_Q`: a logit of each query head
// that gets weight but has no value, or null.
void baton_attend(const Step *step, int64_t layer, int64_t window, const void *qkv_TPD, const float *sinks_Q,
                  const Item *items, int64_t num_items, const Merge *merges, int64_t num_merges, float *partials,
                  void *out_TQD) {
    with_types(*step, [&](auto *activation, auto *stored) {
        using Activation = std::remove_pointer_t<decltype(activation)>;
        using Stored = std::remove_pointer_t<decltype(stored)>;
        const LayerAttention<Activation, Stored> attention(*step, layer, window, qkv_TPD, sinks_Q, out_TQD);
        const int num_threads = static_cast<int>(step->num_threads);
        for_each(num_items, num_threads, [&](int64_t i) {
            return attention.run(items[i], items[std::min(i + num_threads, num_items - 1)], partials);
        });
        for_each(num_merges, num_threads, [&](int64_t i) {
            attention.merge(merges[i], items, partials);
            return true;
        });
    });
}

}  // extern "C"
