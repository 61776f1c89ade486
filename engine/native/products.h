// What the matrix products share: rows of any type, epilogues of finished sums, and memory of a thread.

#pragma once

#include <cstdlib>
#include <vector>

#include "parallel.h"
#include "vectors.h"

#pragma GCC visibility push(hidden)  // so that calls need no detour through the library's table of addresses

namespace products {

constexpr int64_t size_of(Type type) { return type == FLOAT32 ? 4 : 2; }

// Loads the first `count` of LANES values of a row from `index` on, in 32 or 16 bits; zeros follow them.
inline Floats load(const void *row, Type type, int64_t index, int64_t count = LANES) {
    if (type == FLOAT32) return load_some(static_cast<const float *>(row) + index, count);
    if (type == FLOAT16) return load_some(static_cast<const Float16 *>(row) + index, count);
    return load_some(static_cast<const BFloat16 *>(row) + index, count);
}

// Stores the first `count` of LANES values to a row from `index` on.
inline void store(void *row, Type type, int64_t index, Floats values, int64_t count = LANES) {
    if (type == FLOAT32) return store_some(static_cast<float *>(row) + index, values, count);
    if (type == FLOAT16) return store_some(static_cast<Float16 *>(row) + index, values, count);
    store_some(static_cast<BFloat16 *>(row) + index, values, count);
}

// The epilogue of sums: y = sum, y += sum, or y = silu(first half of the outputs) * second half.
enum Epilogue : int64_t { STORE = 0, ADD = 1, GATE = 2 };

// T rows, which need not be contiguous.
struct Rows {
    void *values;
    int64_t stride;  // values from one row to the next
    Type type;
    const int64_t *order = nullptr;  // the rows' places; null: 0, 1, 2, ...

    void *row(int64_t index) const {
        const int64_t place = order == nullptr ? index : order[index];
        return static_cast<char *>(values) + place * stride * size_of(type);
    }
    // The rows from `first` on.
    Rows skip(int64_t first) const {
        return order == nullptr ? Rows{row(first), stride, type} : Rows{values, stride, type, order + first};
    }
};

// One of `count` equal shares of a layer's outputs.
struct Share {
    int64_t index = 0, count = 1;

    int64_t begin(int64_t size) const { return size * index / count; }
    int64_t end(int64_t size) const { return size * (index + 1) / count; }
};

// Stores the first `count` lanes of final values.
template <typename Element>
inline void put(Element *y, Floats values, int64_t count) {
    if (count >= LANES) return store_normal(y, values);
    store_some(y, values, count);
}

template <typename Element>
void finish_as(const float *sums, const float *bias, int64_t count, Element *y, Epilogue epilogue) {
    for (int64_t i = 0; i < count; i += LANES) {
        Floats value = ::load(sums + i);
        if (bias != nullptr) value += load_some(bias + i, count - i);
        if (epilogue == ADD) value += load_some(y + i, count - i);
        put(y + i, value, count - i);
    }
}

template <typename Element>
void finish_gated_as(const float *gate, const float *up, const float *gate_bias, const float *up_bias, int64_t count,
                     Element *y) {
    for (int64_t i = 0; i < count; i += LANES) {
        Floats g = ::load(gate + i), u = ::load(up + i);
        if (gate_bias != nullptr) {
            g += load_some(gate_bias + i, count - i);
            u += load_some(up_bias + i, count - i);
        }
        put(y + i, silu(g) * u, count - i);
    }
}

// Finishes `count` sums of a row, which are the outputs from `first` on.
inline void finish(const float *sums, const float *bias, int64_t count, void *row, Type type, int64_t first,
                   Epilogue epilogue) {
    if (bias != nullptr) bias += first;
    if (type == FLOAT32) finish_as(sums, bias, count, static_cast<float *>(row) + first, epilogue);
    if (type == BFLOAT16) finish_as(sums, bias, count, static_cast<BFloat16 *>(row) + first, epilogue);
    if (type == FLOAT16) finish_as(sums, bias, count, static_cast<Float16 *>(row) + first, epilogue);
}

// Like `finish`, for silu(gate) * up.
inline void finish_gated(const float *gate, const float *up, const float *gate_bias, const float *up_bias,
                         int64_t count, void *row, Type type, int64_t first) {
    if (gate_bias != nullptr) gate_bias += first, up_bias += first;
    if (type == FLOAT32) finish_gated_as(gate, up, gate_bias, up_bias, count, static_cast<float *>(row) + first);
    if (type == BFLOAT16) finish_gated_as(gate, up, gate_bias, up_bias, count, static_cast<BFloat16 *>(row) + first);
    if (type == FLOAT16) finish_gated_as(gate, up, gate_bias, up_bias, count, static_cast<Float16 *>(row) + first);
}

// Memory of the calling thread, kept for its next call.
template <int PURPOSE> uint8_t *scratch(int64_t num_bytes) {
    struct Buffer {
        uint8_t *bytes = nullptr;
        int64_t size = 0;
        ~Buffer() { std::free(bytes); }
    };
    thread_local Buffer buffer;
    if (buffer.size < num_bytes) {
        std::free(buffer.bytes);
        buffer.size = (num_bytes + 4095) / 4096 * 4096;
        buffer.bytes = static_cast<uint8_t *>(std::aligned_alloc(64, buffer.size));
    }
    return buffer.bytes;
}

// Rows are computed in tiles of at most `largest` rows. The tiles have nearly equal sizes, or all tiles except the last
// have the largest size.
struct Tiles {
    int64_t num_rows, count, full_size;  // 0: nearly equal

    Tiles(int64_t rows, int64_t largest, bool are_full = false)
        : num_rows(rows), count((rows + largest - 1) / largest), full_size(are_full ? largest : 0) {}
    int64_t begin(int64_t tile) const {
        return full_size != 0 ? std::min(tile * full_size, num_rows) : num_rows * tile / count;
    }
    int64_t size(int64_t tile) const { return begin(tile + 1) - begin(tile); }
};

// Weights that a tile of rows prefetches while it computes: its share of the weights that come next. So memory is read
// all the time. Otherwise only the first tile would read memory, and would wait for it.
struct Prefetch {
    const uint8_t *next;
    int64_t lines;  // of 64 bytes, in each step

    // `step_bytes`: how many bytes of the present weights each step of a tile reads.
    Prefetch(const uint8_t *weights, int64_t step_bytes, int64_t num_steps, int64_t tile, int64_t num_tiles) {
        const int64_t step_lines = (step_bytes + 63) / 64, share = (step_lines + num_tiles - 1) / num_tiles;
        lines = std::max<int64_t>(0, std::min(share, step_lines - tile * share));
        next = weights + tile * share * num_steps * 64;
    }
    void step() {
        for (int64_t line = 0; line < lines; ++line) __builtin_prefetch(next + line * 64, 0, 2);
        next += lines * 64;
    }
};

inline int64_t divided_up(int64_t size, int64_t by) { return (size + by - 1) / by; }

// Products of many layers of equal shape at once, such as experts: layer i multiplies the rows from firsts[i] to
// firsts[i + 1], counted from firsts[0]. `multiply(layer, from, to, num_rows, share)` computes a share of one product.
//
// Each thread computes products by itself: it waits for other threads only once in total, not once in each product.
template <typename Layer, typename Multiply>
void multiply_each(const Layer *const *layers, const int64_t *firsts, int64_t num_layers, const Rows &from,
                   const Rows &to, int num_threads, const Multiply &multiply) {
    constexpr int64_t SHARES_OF_THREAD = 4, SHARE_OUTPUTS = 64;
    constexpr int64_t GUEST_PRODUCTS = 64'000'000;  // of a guest's part; not fewer, since each share converts its rows
    struct Part {
        int64_t layer, first, rows;
        Share share;
    };
    std::vector<Part> parts;
    const bool takes_guests = LentCpus::of_process().is_in_step();
    const int64_t num_shares = SHARES_OF_THREAD * num_threads, all_rows = firsts[num_layers] - firsts[0];
    for (int64_t i = 0; i < num_layers; ++i) {
        const int64_t rows = firsts[i + 1] - firsts[i], inputs = layers[i]->num_inputs, outputs = layers[i]->num_outputs;
        if (rows == 0) continue;
        // With `guest_rows` rows, the smallest share (SHARE_OUTPUTS outputs) has at most GUEST_PRODUCTS products.
        const int64_t guest_rows = std::max<int64_t>(1, GUEST_PRODUCTS / (SHARE_OUTPUTS * inputs));
        const Tiles blocks(rows, takes_guests ? guest_rows : rows);
        for (int64_t block = 0; block < blocks.count; ++block) {
            const int64_t size = blocks.size(block);
            // Rounded up: if each of ten layers with one row were one share, four threads would compute 3, 3, 2 and 2.
            int64_t count = divided_up(size * num_shares, all_rows);
            if (takes_guests) count = std::max(count, divided_up(size * inputs * outputs, GUEST_PRODUCTS));
            count = std::min(count, divided_up(outputs, SHARE_OUTPUTS));
            const int64_t first = firsts[i] - firsts[0] + blocks.begin(block);
            for (int64_t share = 0; share < count; ++share) parts.push_back({i, first, size, {share, count}});
        }
    }
    const auto size = [](const Part &part) { return part.rows / part.share.count; };
    std::stable_sort(parts.begin(), parts.end(), [&](const Part &a, const Part &b) { return size(a) > size(b); });
    for_each(parts.size(), num_threads, [&](int64_t index) {
        const Part &part = parts[index];
        multiply(*layers[part.layer], from.skip(part.first), to.skip(part.first), part.rows, part.share);
        return true;
    });
}

}  // namespace products

#pragma GCC visibility pop
