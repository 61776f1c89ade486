// Products with weights in 4 or 8 bits: w = scale * u + min, with a scale and a min per group of 16 or 32 inputs. Of
// floats of 4 bits, u is what the table E2M1 has for their bits.
//
// Rows are quantised to signed bytes first, each group of a row with a scale of its own: x = x_scale * q. So a group's
// part of an output is
//
//     scale * x_scale * sum(u * q) + min * x_scale * sum(q)
//
// where sum(u * q) is exact in 32-bit integers. In many formats one value of u, the centre, means zero in every group:
// min = -centre * scale. Then mins are not kept, and the part is
//
//     scale * x_scale * (sum(u * q) - centre * sum(q))
//
// Each sum runs over the groups in order, whatever the other rows and threads are: a row's result depends on the row
// alone.
//
// Packed weights: [blocks of 16 outputs][groups] of
//     16 scales, 16 mins    float16, both times a power of two that the layer's `factor` takes out again; mins only
//                           without a centre
//     8 bits: [group_size / 4][16 outputs][4 inputs]     a byte each
//     4 bits: [group_size / 8][16 outputs][4 inputs]     low nibbles: the group's first half of inputs; high: the other
//
// Quantised rows: [tiles][groups] of [rows of the tile][group_size] signed bytes, then of each row x_scale and
// x_scale * sum(q), float32, and what is added to its products' sums, a multiple of sum(q), int32.

#include <utility>

#include "grouped_dots.h"
#include "products.h"

using namespace grouped_dots;
using namespace products;

namespace {

constexpr int BLOCK = 16;  // outputs
constexpr int64_t NO_CENTRE = -1;
constexpr int64_t scale_bytes(bool has_mins) { return (has_mins ? 2 : 1) * BLOCK * 2; }
constexpr int64_t ROW_SUMS_BYTES = 3 * 4;
constexpr int64_t ROW_BLOCK = 256;  // rows that are quantised at a time

template <int BITS_, int GROUP_, bool IS_E2M1_, bool HAS_MINS_> struct Format {
    static constexpr int BITS = BITS_, GROUP = GROUP_;
    static constexpr bool IS_E2M1 = IS_E2M1_, HAS_MINS = HAS_MINS_;
    static constexpr int64_t SCALE_BYTES = scale_bytes(HAS_MINS), GROUP_BYTES = SCALE_BYTES + BLOCK * GROUP * BITS / 8;
};

// The weights of a group, for the outputs of one vector, times those of each row: calls `then(row, products' sums)`.
// `firsts`: what is added to each row's sums.
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
        Dot even, odd;  // two, so that neither waits for its own last product
        begin(even, row);
        for (int i = 0; i < STEPS; i += 2) {
            even.add(u[i], x(row, i));
            odd.add(u[i + 1], x(row, i + 1));
        }
        end(row, even.total() + odd.total());
    }
}

// Sums of one block of outputs for the rows of one tile: sums[row][BLOCK], before `factor`.
template <typename Format, int ROWS>
void sum_tile(const uint8_t *weights, const int8_t *x, int64_t num_groups, float *sums, Prefetch prefetch) {
    for (int part = 0; part < BLOCK; part += LANES) {
        Floats totals[ROWS] = {};
        const uint8_t *group = weights;
        const int8_t *q = x;
        for (int64_t g = 0; g < num_groups; ++g) {
            const Float16 *halves = reinterpret_cast<const Float16 *>(group);
            const Floats scales = ::load(halves + part);
            Floats mins = {};
            if constexpr (Format::HAS_MINS) mins = ::load(halves + BLOCK + part);
            const float *x_scales = reinterpret_cast<const float *>(q + ROWS * Format::GROUP);
            const float *x_sums = x_scales + ROWS;
            const int32_t *firsts = reinterpret_cast<const int32_t *>(x_sums + ROWS);
            if (part == 0) prefetch.step();
            const auto add = [&](int row, Ints dot) {
                if constexpr (Format::HAS_MINS) totals[row] = mins * x_sums[row] + totals[row];
                totals[row] = __builtin_convertvector(dot, Floats) * (scales * x_scales[row]) + totals[row];
            };
            multiply_group<Format, ROWS>(group + Format::SCALE_BYTES + 4 * part, q, firsts, add);
            group += Format::GROUP_BYTES;
            q += ROWS * (Format::GROUP + ROW_SUMS_BYTES);
        }
        for (int row = 0; row < ROWS; ++row)
            ::store(sums + BLOCK * row + part, totals[row]);
    }
}

using SumTile = void (*)(const uint8_t *, const int8_t *, int64_t, float *, Prefetch);

template <typename Format, int... ROWS_LESS_1>
SumTile of_rows(int64_t rows, std::integer_sequence<int, ROWS_LESS_1...>) {
    static constexpr SumTile tiles[] = {sum_tile<Format, ROWS_LESS_1 + 1>...};
    return tiles[rows - 1];
}

template <int BITS, bool IS_E2M1, bool HAS_MINS> SumTile sum_tile_of(int64_t group_size, int64_t rows) {
    constexpr auto all = std::make_integer_sequence<int, MAX_ROWS>();
    if (group_size == 32) return of_rows<Format<BITS, 32, IS_E2M1, HAS_MINS>>(rows, all);
    return of_rows<Format<BITS, 16, IS_E2M1, HAS_MINS>>(rows, all);
}

// Quantises one row of a tile of `rows` rows. What is added to a group's products is `multiple` times the group's sum.
// The scale of a group that is not finite is NaN, so its results are NaN.
void quantise_row(const void *values, Type type, int64_t num_groups, int64_t group_size, int64_t multiple, int64_t row,
                  int64_t rows, int8_t *tile) {
    const Floats shifter = all(0x1.8p23f);  // a sum with it is a whole number, in its lowest bits
    const int num_vectors = static_cast<int>(group_size / LANES);
    for (int64_t g = 0; g < num_groups; ++g) {
        int8_t *q = tile + g * rows * (group_size + ROW_SUMS_BYTES);
        Floats x[32 / LANES], largest = {}, sums = {};  // sums of whole numbers below 2^24 are exact
        for (int i = 0; i < num_vectors; ++i) {
            x[i] = load(values, type, g * group_size + i * LANES);
            largest = larger(x[i] < 0.0f ? -x[i] : x[i], largest);
        }
        const float top = largest_of(largest), inverse = top > 0x1p-120f ? 127.0f / top : 0.0f;  // finite
        for (int i = 0; i < num_vectors; ++i) {
            const Floats shifted = x[i] * inverse + shifter;
            const Bits8 bytes = lowest_8((Bits)shifted - (Bits)shifter);
            std::memcpy(q + row * group_size + i * LANES, &bytes, sizeof bytes);
            sums += shifted - shifter;
        }
        float *scales = reinterpret_cast<float *>(q + rows * group_size);
        const float sum_of_q = sum_of(sums);
        const bool is_finite = std::abs(sum_of_q) <= 127.0f * 32;
        const int32_t first = is_finite ? static_cast<int32_t>(multiple * static_cast<int64_t>(sum_of_q)) : 0;
        scales[row] = is_finite ? top / 127.0f : NAN;
        scales[rows + row] = scales[row] * sum_of_q;
        std::memcpy(scales + 2 * rows + row, &first, sizeof first);
    }
}

}  // namespace

extern "C" {

struct GroupedLayer {
    const uint8_t *weights;  // packed
    const float *bias;       // or null
    int64_t num_outputs, num_inputs, bits, group_size, is_e2m1;
    int64_t centre;  // the value that means zero; or NO_CENTRE, and there are mins
    double factor;
};

static SumTile sum_tile_for(const GroupedLayer &layer, int64_t rows) {
    const int64_t size = layer.group_size;
    const bool has_mins = layer.centre == NO_CENTRE;
    if (layer.is_e2m1) return has_mins ? sum_tile_of<4, true, true>(size, rows) : sum_tile_of<4, true, false>(size, rows);
    if (layer.bits == 4)
        return has_mins ? sum_tile_of<4, false, true>(size, rows) : sum_tile_of<4, false, false>(size, rows);
    return has_mins ? sum_tile_of<8, false, true>(size, rows) : sum_tile_of<8, false, false>(size, rows);
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

// y = x @ weight.T + bias, with an epilogue. x and y: `num_rows` rows of `x_type` and `y_type`, strides in values. With
// GATE, y has half of the layer's outputs, which must be a multiple of 16.
void grouped_product(const GroupedLayer *layer, void *x, int64_t x_stride, int64_t x_type, void *y, int64_t y_stride,
                     int64_t y_type, int64_t num_rows, int64_t epilogue, int64_t num_threads) {
    const int64_t group_size = layer->group_size, groups = layer->num_inputs / group_size;
    const bool has_mins = layer->centre == NO_CENTRE;
    const int64_t multiple = (layer->bits == 8 ? Dot<8>::OFFSET : Dot<4>::OFFSET) - (has_mins ? 0 : layer->centre);
    const int64_t block_bytes = groups * (scale_bytes(has_mins) + BLOCK * group_size * layer->bits / 8);
    const int64_t row_bytes = groups * (group_size + ROW_SUMS_BYTES);
    const int64_t num_outputs = epilogue == GATE ? layer->num_outputs / 2 : layer->num_outputs;
    const float factor = static_cast<float>(layer->factor);
    const Tiles row_blocks(num_rows, ROW_BLOCK);
    for (int64_t row_block = 0; row_block < row_blocks.count; ++row_block) {
        const int64_t first = row_blocks.begin(row_block);
        const Tiles tiles(row_blocks.size(row_block), MAX_ROWS);
        const Rows from{x, x_stride, static_cast<Type>(x_type)}, to{y, y_stride, static_cast<Type>(y_type)};
        int8_t *quantised = reinterpret_cast<int8_t *>(scratch<0>(tiles.num_rows * row_bytes));
        // Waking threads takes longer than quantising few rows.
        const int64_t quantisers = tiles.num_rows * layer->num_inputs < (1 << 15) ? 1 : num_threads;
        parallel_for(tiles.count, 1, static_cast<int>(quantisers), [&](int64_t begin, int64_t end) {
            for (int64_t tile = begin; tile < end; ++tile)
                for (int64_t row = 0; row < tiles.size(tile); ++row)
                    quantise_row(from.row(first + tiles.begin(tile) + row), from.type, groups, group_size, multiple,
                                 row, tiles.size(tile), quantised + tiles.begin(tile) * row_bytes);
        });
        const int64_t num_blocks = (num_outputs + BLOCK - 1) / BLOCK;
        parallel_for(num_blocks, 1, static_cast<int>(num_threads), [&](int64_t begin, int64_t end) {
            alignas(64) float sums[2][MAX_ROWS * BLOCK];
            for (int64_t block = begin; block < end; ++block) {
                const int64_t output = block * BLOCK, count = std::min<int64_t>(BLOCK, num_outputs - output);
                const uint8_t *weights = layer->weights + block * block_bytes;
                for (int64_t tile = 0; tile < tiles.count; ++tile) {
                    const int64_t rows = tiles.size(tile), row = first + tiles.begin(tile);
                    const int8_t *q = quantised + tiles.begin(tile) * row_bytes;
                    const SumTile sum = sum_tile_for(*layer, rows);
                    const auto prefetch = [&](const uint8_t *next) {
                        return Prefetch(next, block_bytes / groups, groups, tile, tiles.count);
                    };
                    sum(weights, q, groups, sums[0], prefetch(weights + block_bytes));
                    for (int64_t i = 0; i < rows * BLOCK; ++i) sums[0][i] *= factor;
                    if (epilogue != GATE) {
                        for (int64_t r = 0; r < rows; ++r)
                            finish(sums[0] + r * BLOCK, layer->bias, count, to.row(row + r), to.type, output,
                                   static_cast<Epilogue>(epilogue));
                        continue;
                    }
                    const uint8_t *up = weights + num_blocks * block_bytes;
                    sum(up, q, groups, sums[1], prefetch(up + block_bytes));
                    for (int64_t i = 0; i < rows * BLOCK; ++i) sums[1][i] *= factor;
                    const float *up_bias = layer->bias == nullptr ? nullptr : layer->bias + num_outputs;
                    for (int64_t r = 0; r < rows; ++r)
                        finish_gated(sums[0] + r * BLOCK, sums[1] + r * BLOCK, layer->bias, up_bias, count,
                                     to.row(row + r), to.type, output);
                }
            }
        });
    }
}
}
