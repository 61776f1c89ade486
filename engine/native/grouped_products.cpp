// Products with weights in 4 or 8 bits: w = scale * u + min, with a scale and a min per group of 16 or 32 inputs. For
// floats of 4 bits, the table E2M1 gives the u of their bits.
//
// Rows are first quantized to signed bytes. Each group of a row has its own scale: x = x_scale * q. So a group's part
// of an output is
//
//     scale * x_scale * sum(u * q) + min * x_scale * sum(q)
//
// where sum(u * q) is exact in 32-bit integers. In many formats one value of u, the centre, means zero in every group:
// min = -centre * scale. Then mins are not kept, and the part is
//
//     scale * x_scale * (sum(u * q) - centre * sum(q))
//
// Each sum runs over the groups in order. So a row's result depends on the row alone, not on other rows or threads.
//
// Packed weights: [blocks of 16 outputs][groups] of
//     16 scales, 16 mins    float16, both times a power of two that the layer's `factor` takes out again; mins only
//                           without a centre
//     8 bits: [group_size / 4][16 outputs][4 inputs]     a byte each
//     4 bits: [group_size / 8][16 outputs][4 inputs]     low nibbles: the group's first half of inputs; high: the other
//
// Quantized rows: see quantized_rows.h. A tile has `places_of` places.

#include <utility>

#include "grouped_dots.h"
#include "matrix_units.h"
#include "products.h"
#include "quantized_rows.h"

using namespace grouped_dots;
using namespace products;

namespace {

constexpr int BLOCK = 16;  // outputs
constexpr int64_t NO_CENTRE = -1;
constexpr int64_t scale_bytes(bool has_mins) { return (has_mins ? 2 : 1) * BLOCK * 2; }
constexpr int64_t ROW_BLOCK = 256;  // rows that are quantized at a time
constexpr int64_t MIN_UNIT_ROWS = 13;  // of a tile; with fewer rows, matrix units are slower

constexpr bool is_for_units(int64_t rows) { return matrix_units::ARE_THERE && rows >= MIN_UNIT_ROWS; }

// How many places a tile of `rows` rows has; matrix units multiply all of them.
constexpr int64_t places_of(int64_t rows) { return is_for_units(rows) ? MAX_ROWS : rows; }

template <int BITS_, int GROUP_, bool IS_E2M1_, bool HAS_MINS_> struct Format {
    static constexpr int BITS = BITS_, GROUP = GROUP_;
    static constexpr bool IS_E2M1 = IS_E2M1_, HAS_MINS = HAS_MINS_;
    static constexpr int64_t SCALE_BYTES = scale_bytes(HAS_MINS), GROUP_BYTES = SCALE_BYTES + BLOCK * GROUP * BITS / 8;
};

// Multiplies a group's weights, for the outputs of one vector, by the bytes of each row; calls `then(row, sums of the
// products)`. `firsts`: the numbers that are added to the rows' sums.
template <typename Format, int ROWS, typename Then>
inline void multiply_group(const uint8_t *bytes, const int8_t *q, const int32_t *firsts, const Then &then) {
    constexpr int BITS = Format::BITS, GROUP = Format::GROUP, STEPS = GROUP / 4, LOADS = STEPS * BITS / 8;
    using Dot = grouped_dots::Dot<BITS>;
    constexpr bool HAS_FIRST = !Format::HAS_MINS || Dot::OFFSET != 0;
    const auto unpacked = [](Bytes nibbles) { return Format::IS_E2M1 ? from_e2m1(nibbles) : nibbles; };
    const auto x = [q](int row, int step) { return four(q + row * GROUP + 4 * step); };
    const auto begin = [firsts](Dot &dot, int row) {
        if constexpr (HAS_FIRST && Dot::CAN_BEGIN) dot.begin(Ints{} + firsts[row]);
    };
    const auto end = [&](int row, Ints total) {
        then(row, HAS_FIRST && !Dot::CAN_BEGIN ? total + firsts[row] : total);
    };
    if constexpr (FEW_REGISTERS) {  // they hold the sums of all rows, and the weights of one load
        const auto sum = [&](int first, int last, Dot(&dots)[ROWS]) {
#pragma GCC unroll 4
            for (int i = first; i < last; ++i) {
                const Bytes loaded = load_bytes(bytes + 4 * BLOCK * i);
                const Bytes u = BITS == 8 ? loaded : unpacked(low_nibbles(loaded));
                for (int row = 0; row < ROWS; ++row) dots[row].add(u, x(row, i));
                if constexpr (BITS == 4) {
                    const Bytes high = unpacked(high_nibbles(loaded));
                    for (int row = 0; row < ROWS; ++row) dots[row].add(high, x(row, i + LOADS));
                }
            }
        };
        Dot dots[ROWS];
        for (int row = 0; row < ROWS; ++row) begin(dots[row], row);
        if constexpr (Format::IS_E2M1) {  // in halves, whose sums fit into 16 bits
            Dot others[ROWS];
            sum(0, LOADS / 2, dots);
            sum(LOADS / 2, LOADS, others);
            for (int row = 0; row < ROWS; ++row) end(row, dots[row].total() + others[row].total());
        } else {
            sum(0, LOADS, dots);
            for (int row = 0; row < ROWS; ++row) end(row, dots[row].total());
        }
        return;
    }
    Bytes u[STEPS];
    for (int i = 0; i < LOADS; ++i) {
        const Bytes loaded = load_bytes(bytes + 4 * BLOCK * i);
        u[i] = BITS == 8 ? loaded : unpacked(low_nibbles(loaded));
        if constexpr (BITS == 4) u[i + LOADS] = unpacked(high_nibbles(loaded));
    }
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row) {
        Dot even, odd;  // two dots, so that neither waits for its own last product
        begin(even, row);
        for (int i = 0; i < STEPS; i += 2) {
            even.add(u[i], x(row, i));
            odd.add(u[i + 1], x(row, i + 1));
        }
        end(row, even.total() + odd.total());
    }
}

// A group's part of LANES outputs, from output `part` of the block on. `add` adds the part of one row to the row's
// totals; `dot`: the sums of the products.
template <typename Format, int ROWS> struct Group {
    const uint8_t *weights;
    const int8_t *q;
    Floats scales, mins = {};
    const float *x_scales, *x_sums;
    const int32_t *firsts;

    Group(const uint8_t *group, const int8_t *rows, int part) : weights(group + Format::SCALE_BYTES), q(rows) {
        const Float16 *halves = reinterpret_cast<const Float16 *>(group);
        scales = ::load(halves + part);
        if constexpr (Format::HAS_MINS) mins = ::load(halves + BLOCK + part);
        x_scales = reinterpret_cast<const float *>(q + ROWS * Format::GROUP);
        x_sums = x_scales + ROWS;
        firsts = reinterpret_cast<const int32_t *>(x_sums + ROWS);
    }

    void add(int row, Ints dot, Floats &total) const {
        if constexpr (Format::HAS_MINS) total = mins * x_sums[row] + total;
        total = __builtin_convertvector(dot, Floats) * (scales * x_scales[row]) + total;
    }
};

// Sums of one block of outputs for the rows of one tile: sums[row][BLOCK], before `factor`.
template <typename Format, int ROWS>
void sum_tile(const uint8_t *weights, const int8_t *x, int64_t num_groups, float *sums, Prefetch prefetch) {
    for (int part = 0; part < BLOCK; part += LANES) {
        Floats totals[ROWS] = {};
        const uint8_t *group = weights;
        const int8_t *q = x;
        for (int64_t g = 0; g < num_groups; ++g) {
            const Group<Format, ROWS> of(group, q, part);
            if (part == 0) prefetch.step();
            multiply_group<Format, ROWS>(of.weights + 4 * part, q, of.firsts,
                                         [&](int row, Ints dot) { of.add(row, dot, totals[row]); });
            group += Format::GROUP_BYTES;
            q += ROWS * (Format::GROUP + ROW_SUMS_BYTES);
        }
        for (int row = 0; row < ROWS; ++row)
            ::store(sums + BLOCK * row + part, totals[row]);
    }
}

#if defined(__AMX_INT8__)
constexpr int64_t BATCH = 4;  // groups that the units multiply at a time

// Writes a block's weights of 4 bits, one per byte.
template <typename Format> void unpack_block(const uint8_t *weights, int64_t num_groups, uint8_t *bytes) {
    if constexpr (Format::BITS == 4) {
        constexpr int LOADS = Format::GROUP / 8;
        for (int64_t g = 0; g < num_groups; ++g, bytes += BLOCK * Format::GROUP)
            for (int i = 0; i < LOADS; ++i) {
                const Bytes loaded = load_bytes(weights + g * Format::GROUP_BYTES + Format::SCALE_BYTES + 64 * i);
                const Bytes low = low_nibbles(loaded), high = high_nibbles(loaded);
                _mm512_store_si512(bytes + 64 * i, Format::IS_E2M1 ? from_e2m1(low) : low);
                _mm512_store_si512(bytes + 64 * (i + LOADS), Format::IS_E2M1 ? from_e2m1(high) : high);
            }
    }
}

// Like sum_tile, with the same results. While the dots of one batch become floats, the units multiply the next batch.
// `bytes`: the weights that unpack_block has written.
template <typename Format>
void sum_tile_by_units(const uint8_t *weights, const uint8_t *bytes, const int8_t *x, int64_t num_groups, float *sums,
                       Prefetch prefetch) {
    constexpr int ROWS = matrix_units::TILE;
    constexpr int64_t Q_BYTES = ROWS * (Format::GROUP + ROW_SUMS_BYTES);
    alignas(64) int32_t dots[2 * BATCH][ROWS * BLOCK];
    const auto values = [&](int64_t g) {
        return Format::BITS == 4 ? bytes + g * BLOCK * Format::GROUP
                                 : weights + g * Format::GROUP_BYTES + Format::SCALE_BYTES;
    };
    const auto multiply_batch = [&](int64_t first) {
#define MULTIPLY(index, rows_register, weights_register)                                                              \
    if (const int64_t g = first + index; g < num_groups) {                                                            \
        prefetch.step();                                                                                              \
        _tile_zero(index);                                                                                            \
        _tile_loadd(rows_register, x + g * Q_BYTES, Format::GROUP);                                                   \
        _tile_loadd(weights_register, values(g), 64);                                                                 \
        _tile_dpbsud(index, rows_register, weights_register);                                                         \
        _tile_stored(index, dots[g % (2 * BATCH)], 64);                                                               \
    }
        MULTIPLY(0, 4, 6)
        MULTIPLY(1, 5, 7)
        MULTIPLY(2, 4, 6)
        MULTIPLY(3, 5, 7)
#undef MULTIPLY
    };
    Floats totals[ROWS] = {};
    asm volatile("" : : "r"(x), "r"(bytes) : "memory");  // the units read them
    multiply_batch(0);
    for (int64_t g = 0; g < num_groups; ++g) {
        if (g % BATCH == 0) multiply_batch(g + BATCH);
        const Group<Format, ROWS> group(weights + g * Format::GROUP_BYTES, x + g * Q_BYTES, 0);
        const int32_t *of_group = dots[g % (2 * BATCH)];
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; ++row)
            group.add(row, load_raw<Ints>(of_group + row * BLOCK) + (Format::HAS_MINS ? 0 : group.firsts[row]),
                      totals[row]);
    }
    for (int row = 0; row < ROWS; ++row)
        ::store(sums + BLOCK * row, totals[row]);
}
#endif

// How a layer's sums are computed: a function for each number of rows of a tile, and one with units if there are any.
struct Sums {
    using Tile = void (*)(const uint8_t *, const int8_t *, int64_t, float *, Prefetch);
    using TileByUnits = void (*)(const uint8_t *, const uint8_t *, const int8_t *, int64_t, float *, Prefetch);
    const Tile *rows;  // rows[n - 1] is for n rows
    TileByUnits units;
    void (*unpack)(const uint8_t *, int64_t, uint8_t *);
};

template <typename Format, int... ROWS_LESS_1> Sums sums_of(std::integer_sequence<int, ROWS_LESS_1...>) {
    static constexpr Sums::Tile of_rows[] = {sum_tile<Format, ROWS_LESS_1 + 1>...};
#if defined(__AMX_INT8__)
    return {of_rows, sum_tile_by_units<Format>, unpack_block<Format>};
#else
    return {of_rows, nullptr, nullptr};
#endif
}

template <int BITS, bool IS_E2M1, bool HAS_MINS> Sums sums_of(int64_t group_size) {
    constexpr auto all = std::make_integer_sequence<int, MAX_ROWS>();
    if (group_size == 32) return sums_of<Format<BITS, 32, IS_E2M1, HAS_MINS>>(all);
    return sums_of<Format<BITS, 16, IS_E2M1, HAS_MINS>>(all);
}

}  // namespace

extern "C" {

struct GroupedLayer {
    const uint8_t *weights;  // packed
    const float *bias;       // or null
    int64_t num_outputs, num_inputs, bits, group_size, is_e2m1;  // E2M1 has a centre
    int64_t centre;  // the value that means zero; or NO_CENTRE, and there are mins
    double factor;
};

static Sums sums_of(const GroupedLayer &layer) {
    const int64_t size = layer.group_size;
    const bool has_mins = layer.centre == NO_CENTRE;
    if (layer.is_e2m1) return sums_of<4, true, false>(size);
    if (layer.bits == 4) return has_mins ? sums_of<4, false, true>(size) : sums_of<4, false, false>(size);
    return has_mins ? sums_of<8, false, true>(size) : sums_of<8, false, false>(size);
}

// Bytes of packed weights.
int64_t grouped_packed_bytes(int64_t num_outputs, int64_t num_inputs, int64_t bits, int64_t group_size,
                             int64_t has_mins) {
    const int64_t blocks = (num_outputs + BLOCK - 1) / BLOCK, groups = num_inputs / group_size;
    return blocks * groups * (scale_bytes(has_mins) + BLOCK * group_size * bits / 8);
}

// Packs values [outputs][inputs], one per byte, and scales and mins [outputs][groups], already divided by `factor` and
// rounded to float16. `mins` may be null.
void grouped_pack(const uint8_t *values, const uint16_t *scales, const uint16_t *mins, int64_t num_outputs,
                  int64_t num_inputs, int64_t bits, int64_t group_size, uint8_t *packed, int64_t num_threads) {
    const int64_t before_values = scale_bytes(mins != nullptr), groups = num_inputs / group_size;
    const int64_t group_bytes = before_values + BLOCK * group_size * bits / 8;
    parallel_for((num_outputs + BLOCK - 1) / BLOCK, 1, static_cast<int>(num_threads), [&](int64_t begin, int64_t end) {
        std::memset(packed + begin * groups * group_bytes, 0, (end - begin) * groups * group_bytes);
        for (int64_t output = begin * BLOCK; output < std::min(end * BLOCK, num_outputs); ++output) {
            const int64_t lane = output % BLOCK;
            for (int64_t g = 0; g < groups; ++g) {
                uint8_t *group = packed + (output / BLOCK * groups + g) * group_bytes;
                std::memcpy(group + 2 * lane, scales + output * groups + g, 2);
                if (mins != nullptr) std::memcpy(group + 2 * (BLOCK + lane), mins + output * groups + g, 2);
                const uint8_t *from = values + output * num_inputs + g * group_size;
                uint8_t *to = group + before_values + 4 * lane;
                for (int64_t i = 0; i < group_size; ++i) {
                    const int64_t step = i / 4, half = group_size / 8;
                    if (bits == 8)
                        to[4 * BLOCK * step + i % 4] = from[i];
                    else
                        to[4 * BLOCK * (step % half) + i % 4] |= static_cast<uint8_t>(from[i] << (step < half ? 0 : 4));
                }
            }
        }
    });
}

// A share of y = x @ weight.T + bias, with an epilogue.
static void multiply(const GroupedLayer &layer, const Rows &from, const Rows &to, int64_t num_rows, Epilogue epilogue,
                     const Share &share, int num_threads) {
    const int64_t group_size = layer.group_size, groups = layer.num_inputs / group_size;
    const bool has_mins = layer.centre == NO_CENTRE;
    const int64_t multiple = (layer.bits == 8 ? Dot<8>::OFFSET : Dot<4>::OFFSET) - (has_mins ? 0 : layer.centre);
    const int64_t block_bytes = groups * (scale_bytes(has_mins) + BLOCK * group_size * layer.bits / 8);
    const int64_t row_bytes = groups * (group_size + ROW_SUMS_BYTES);
    const int64_t num_outputs = epilogue == GATE ? layer.num_outputs / 2 : layer.num_outputs;
    const int64_t num_blocks = (num_outputs + BLOCK - 1) / BLOCK;
    const int64_t first_block = share.begin(num_blocks), own_blocks = share.end(num_blocks) - first_block;
    const float factor = static_cast<float>(layer.factor);
    const float *up_bias = layer.bias == nullptr ? nullptr : layer.bias + num_outputs;
    const Sums by = sums_of(layer);
    const Tiles row_blocks(num_rows, ROW_BLOCK);
    for (int64_t row_block = 0; row_block < row_blocks.count; ++row_block) {
        const int64_t first = row_blocks.begin(row_block);
        const Tiles tiles(row_blocks.size(row_block), MAX_ROWS, matrix_units::ARE_THERE);
        const bool uses_units = is_for_units(tiles.size(0));
        int8_t *quantized = reinterpret_cast<int8_t *>(scratch<0>(tiles.count * MAX_ROWS * row_bytes));
        // Waking threads takes longer than quantizing few rows.
        const int64_t grain = tiles.num_rows * layer.num_inputs < (1 << 15) ? tiles.count : 1;
        parallel_for(tiles.count, grain, num_threads, [&](int64_t begin, int64_t end) {
            for (int64_t tile = begin; tile < end; ++tile) {
                const int64_t rows = tiles.size(tile), places = places_of(rows);
                int8_t *q = quantized + tiles.begin(tile) * row_bytes;
                if (rows < places) std::memset(q, 0, places * row_bytes);
                for (int64_t row = 0; row < rows; ++row)
                    quantize_row(from.row(first + tiles.begin(tile) + row), from.type, groups, group_size, multiple,
                                 row, places, q);
            }
        }, parts_for_guests(tiles.num_rows * layer.num_inputs * 8));
        parallel_for(own_blocks, 1, num_threads, [&](int64_t begin, int64_t end) {
            alignas(64) float sums[2][MAX_ROWS * BLOCK];
            matrix_units::Shape shape;
            const int64_t num_parts = epilogue == GATE ? 2 : 1, num_bytes = uses_units ? groups * group_size * BLOCK : 0;
            uint8_t *bytes = scratch<1>(2 * num_bytes);
            for (int64_t block = first_block + begin; block < first_block + end; ++block) {
                const int64_t output = block * BLOCK, count = std::min<int64_t>(BLOCK, num_outputs - output);
                const auto weights = [&](int64_t part) { return layer.weights + (block + part * num_blocks) * block_bytes; };
                for (int64_t part = 0; uses_units && part < num_parts; ++part)
                    by.unpack(weights(part), groups, bytes + part * num_bytes);
                for (int64_t tile = 0; tile < tiles.count; ++tile) {
                    const int64_t rows = tiles.size(tile), row = first + tiles.begin(tile);
                    const int8_t *q = quantized + tiles.begin(tile) * row_bytes;
                    for (int64_t part = 0; part < num_parts; ++part) {
                        const Prefetch prefetch(weights(part) + block_bytes, block_bytes / groups, groups, tile,
                                                tiles.count);
                        if (is_for_units(rows)) {
                            shape.for_bytes(group_size);
                            by.units(weights(part), bytes + part * num_bytes, q, groups, sums[part], prefetch);
                        } else {
                            by.rows[rows - 1](weights(part), q, groups, sums[part], prefetch);
                        }
                        for (int64_t i = 0; i < rows * BLOCK; ++i) sums[part][i] *= factor;
                    }
                    for (int64_t r = 0; r < rows; ++r) {
                        const float *sum = sums[0] + r * BLOCK;
                        if (epilogue == GATE)
                            finish_gated(sum, sums[1] + r * BLOCK, layer.bias, up_bias, count, to.row(row + r), to.type,
                                         output);
                        else
                            finish(sum, layer.bias, count, to.row(row + r), to.type, output, epilogue);
                    }
                }
            }
        }, parts_for_guests(block_bytes * own_blocks, tiles.num_rows * layer.num_inputs * layer.num_outputs / share.count));
    }
}

// y = x @ weight.T + bias, with an epilogue. x and y: `num_rows` rows of `x_type` and `y_type`, strides in values. With
// GATE, y has half of the layer's outputs, which must be a multiple of 16.
void grouped_product(const GroupedLayer *layer, void *x, int64_t x_stride, int64_t x_type, void *y, int64_t y_stride,
                     int64_t y_type, int64_t num_rows, int64_t epilogue, int64_t num_threads) {
    multiply(*layer, {x, x_stride, static_cast<Type>(x_type)}, {y, y_stride, static_cast<Type>(y_type)}, num_rows,
             static_cast<Epilogue>(epilogue), {}, static_cast<int>(num_threads));
}

// Like `grouped_product`, for rows of many layers (multiply_each). Row i of the products is row x_order[i] of x, and
// row i of y.
void grouped_products(const GroupedLayer *const *layers, const int64_t *firsts, int64_t num_layers, void *x,
                      int64_t x_stride, int64_t x_type, const int64_t *x_order, void *y, int64_t y_stride,
                      int64_t y_type, int64_t epilogue, int64_t num_threads) {
    multiply_each(layers, firsts, num_layers, {x, x_stride, static_cast<Type>(x_type), x_order},
                  {y, y_stride, static_cast<Type>(y_type)}, static_cast<int>(num_threads),
                  [&](const GroupedLayer &layer, const Rows &from, const Rows &to, int64_t num_rows, const Share &share) {
                      multiply(layer, from, to, num_rows, static_cast<Epilogue>(epilogue), share, 1);
                  });
}
}
