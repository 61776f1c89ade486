// Products with weights in 32 or 16 bits, in float32 arithmetic; and bfloat16 products by a processor's units for them.
//
// Weights in 16 bits become floats in registers, so they cost half the memory traffic at equal results. Each output is
// one sum over the inputs in order, whatever the other rows and threads are: a row's result depends on the row alone.
//
// Packed weights: [panels of PANEL outputs][pairs of inputs][2 vectors of LANES outputs] of
//     float32, float16:  LANES weights of the pair's first input, then LANES of its second
//     bfloat16:          LANES pairs of weights, the first input's in the low half of 32 bits
//
// Packed rows: [blocks of inputs][tiles of rows] of
//     float32:           [inputs of the block][rows of the tile]
//     bfloat16 units:    [pairs of inputs][rows of the tile] of a pair

#include <type_traits>
#include <utility>

#include "products.h"

using namespace products;

namespace {

constexpr int PANEL = 2 * LANES;      // outputs
constexpr int64_t ROW_BLOCK = 240;    // rows that are packed at a time
constexpr int64_t INPUT_BLOCK = 768;  // inputs; with ROW_BLOCK, what stays in the second-level cache
constexpr int MAX_PANELS = 4;         // computed together
#if defined(BATON_AVX2)
constexpr int MAX_ROWS = 4, FEW_ROWS = 1;  // 16 registers
#else
constexpr int MAX_ROWS = 12, FEW_ROWS = 3;
#endif

// A pair of inputs' weights of LANES outputs.
struct Pair {
    Floats first, second;

    Floats add(Floats sum, const float *x, int row, int rows) const {
        sum = first * x[row] + sum;
        return second * x[rows + row] + sum;
    }
};

struct Float32 {
    using Input = float;
    static constexpr int64_t BYTES = 8 * LANES;
    static Pair load_pair(const uint8_t *bytes) { return {load(bytes, FLOAT32, 0), load(bytes, FLOAT32, LANES)}; }
};

struct Bfloat16 {
    using Input = float;
    static constexpr int64_t BYTES = 4 * LANES;
    static Pair load_pair(const uint8_t *bytes) {
        const Words words = *reinterpret_cast<const Words *>(bytes);
        return {reinterpret_cast<Floats>(words << 16), reinterpret_cast<Floats>(words & 0xffff0000)};
    }
};

struct Float16 {
    using Input = float;
    static constexpr int64_t BYTES = 4 * LANES;
    static Pair load_pair(const uint8_t *bytes) { return {from_float16(bytes), from_float16(bytes + 2 * LANES)}; }
};

#if defined(__AVX512BF16__) && defined(BATON_AVX512)
struct Bfloat16Units {
    using Input = uint32_t;
    static constexpr int64_t BYTES = 4 * LANES;
    __m512bh weights;

    static Bfloat16Units load_pair(const uint8_t *bytes) { return {(__m512bh)_mm512_loadu_si512(bytes)}; }
    Floats add(Floats sum, const uint32_t *x, int row, int) const {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, weights, (__m512bh)_mm512_set1_epi32(x[row]));
    }
};
#else
using Bfloat16Units = Bfloat16;
#endif

constexpr bool HAS_UNITS = !std::is_same_v<Bfloat16Units, Bfloat16>;

// Adds the products of `num_pairs` pairs of inputs to sums[panel][row][PANEL]; panels' sums lie `stride` floats apart.
template <class Weight, int ROWS, int PANELS>
void sum_tile(const uint8_t *const *panels, const void *packed_x, int64_t num_pairs, float *sums, int64_t stride) {
    using Input = typename Weight::Input;
    constexpr int INPUTS = std::is_same_v<Input, float> ? 2 * ROWS : ROWS;
    const Input *x = static_cast<const Input *>(packed_x);
    Floats totals[PANELS][ROWS][2];
    for (int panel = 0; panel < PANELS; ++panel)
        for (int row = 0; row < ROWS; ++row)
            for (int half = 0; half < 2; ++half)
                totals[panel][row][half] = load(sums + panel * stride + row * PANEL, FLOAT32, half * LANES);
    for (int64_t pair = 0; pair < num_pairs; ++pair) {
        for (int panel = 0; panel < PANELS; ++panel) {
            const uint8_t *bytes = panels[panel] + pair * 2 * Weight::BYTES;
            const auto low = Weight::load_pair(bytes), high = Weight::load_pair(bytes + Weight::BYTES);
            for (int row = 0; row < ROWS; ++row) {
                totals[panel][row][0] = low.add(totals[panel][row][0], x, row, ROWS);
                totals[panel][row][1] = high.add(totals[panel][row][1], x, row, ROWS);
            }
        }
        x += INPUTS;
    }
    for (int panel = 0; panel < PANELS; ++panel)
        for (int row = 0; row < ROWS; ++row)
            for (int half = 0; half < 2; ++half)
                store(sums + panel * stride + row * PANEL, FLOAT32, half * LANES, totals[panel][row][half], LANES);
}

using SumTile = void (*)(const uint8_t *const *, const void *, int64_t, float *, int64_t);

template <class Weight, int PANELS, int... ROWS_LESS_1>
SumTile of_rows(int64_t rows, std::integer_sequence<int, ROWS_LESS_1...>) {
    static constexpr SumTile tiles[] = {sum_tile<Weight, ROWS_LESS_1 + 1, PANELS>...};
    return tiles[rows - 1];
}

template <class Weight> SumTile of_weight(int64_t rows, int64_t panels) {
    return panels == MAX_PANELS ? of_rows<Weight, MAX_PANELS>(rows, std::make_integer_sequence<int, FEW_ROWS>())
                                : of_rows<Weight, 1>(rows, std::make_integer_sequence<int, MAX_ROWS>());
}

SumTile sum_tile_of(Type type, bool by_units, int64_t rows, int64_t panels) {
    if (type == FLOAT32) return of_weight<Float32>(rows, panels);
    if (type == FLOAT16) return of_weight<Float16>(rows, panels);
    return by_units ? of_weight<Bfloat16Units>(rows, panels) : of_weight<Bfloat16>(rows, panels);
}

// Packs inputs `begin` and following of one row of a tile; inputs beyond `end` are zero.
void pack_row(const void *values, Type type, int64_t begin, int64_t end, int64_t num_pairs, bool by_units, int64_t row,
              int64_t rows, uint8_t *tile) {
    alignas(64) float buffer[LANES];
    for (int64_t i = 0; i < 2 * num_pairs; i += LANES) {
        const Floats x = begin + i < end ? load(values, type, begin + i, end - begin - i) : Floats{};
        const int64_t count = std::min<int64_t>(LANES, 2 * num_pairs - i);
        if (by_units) {
            store(buffer, BFLOAT16, 0, x, LANES);
            for (int64_t pair = 0; pair < count / 2; ++pair)
                std::memcpy(tile + 4 * ((i / 2 + pair) * rows + row), reinterpret_cast<uint32_t *>(buffer) + pair, 4);
        } else {
            store(buffer, FLOAT32, 0, x, LANES);
            for (int64_t j = 0; j < count; ++j) reinterpret_cast<float *>(tile)[(i + j) * rows + row] = buffer[j];
        }
    }
}

}  // namespace

extern "C" {

struct FloatLayer {
    const uint8_t *weights;  // packed
    const float *bias;       // or null
    int64_t num_outputs, num_inputs, weight_type, by_units;
};

int64_t float_has_bfloat16_units() { return HAS_UNITS; }

// Bytes of packed weights.
int64_t float_packed_bytes(int64_t num_outputs, int64_t num_inputs, int64_t weight_type) {
    return (num_outputs + PANEL - 1) / PANEL * PANEL * ((num_inputs + 1) / 2 * 2) * size_of(static_cast<Type>(weight_type));
}

// Packs weights [outputs][inputs] of 32 or 16 bits.
void float_pack(const uint8_t *weights, int64_t num_outputs, int64_t num_inputs, int64_t weight_type, uint8_t *packed,
                int64_t num_threads) {
    const int64_t size = size_of(static_cast<Type>(weight_type)), num_pairs = (num_inputs + 1) / 2;
    const int64_t panel_bytes = PANEL * num_pairs * 2 * size;
    parallel_for((num_outputs + PANEL - 1) / PANEL, 1, static_cast<int>(num_threads), [&](int64_t begin, int64_t end) {
        std::memset(packed + begin * panel_bytes, 0, (end - begin) * panel_bytes);
        for (int64_t output = begin * PANEL; output < std::min(end * PANEL, num_outputs); ++output) {
            const int64_t lane = output % LANES;
            uint8_t *vector = packed + output / PANEL * panel_bytes + output % PANEL / LANES * 2 * LANES * size;
            for (int64_t i = 0; i < num_inputs; ++i) {
                const int64_t place = weight_type == BFLOAT16 ? 2 * lane + i % 2 : i % 2 * LANES + lane;
                std::memcpy(vector + (i / 2 * 2 * PANEL + place) * size, weights + (output * num_inputs + i) * size, size);
            }
        }
    });
}

// y = x @ weight.T + bias, with an epilogue. x and y: `num_rows` rows of `x_type` and `y_type`, strides in values. With
// GATE, y has half of the layer's outputs, which must be a multiple of 32.
void float_product(const FloatLayer *layer, void *x, int64_t x_stride, int64_t x_type, void *y, int64_t y_stride,
                   int64_t y_type, int64_t num_rows, int64_t epilogue, int64_t num_threads) {
    const Type weight_type = static_cast<Type>(layer->weight_type);
    const bool by_units = HAS_UNITS && layer->by_units != 0, is_gated = epilogue == GATE;
    const int64_t input_bytes = by_units ? 2 : 4, pairs = (layer->num_inputs + 1) / 2, padded = 2 * pairs;
    const int64_t panel_bytes = PANEL * padded * size_of(weight_type);
    const int64_t num_outputs = is_gated ? layer->num_outputs / 2 : layer->num_outputs;
    const int64_t num_panels = (num_outputs + PANEL - 1) / PANEL;
    const Rows from{x, x_stride, static_cast<Type>(x_type)}, to{y, y_stride, static_cast<Type>(y_type)};
    for (int64_t first = 0; first < num_rows; first += ROW_BLOCK) {
        const Tiles tiles(std::min(ROW_BLOCK, num_rows - first), MAX_ROWS);
        uint8_t *packed = scratch<0>(tiles.num_rows * padded * input_bytes);
        const auto packed_tile = [&](int64_t input, int64_t tile) {
            const int64_t inputs = std::min(INPUT_BLOCK, padded - input);
            return packed + (input * tiles.num_rows + inputs * tiles.begin(tile)) * input_bytes;
        };
        // Waking threads takes longer than packing few rows.
        const int64_t packers = tiles.num_rows * padded < (1 << 15) ? 1 : num_threads;
        parallel_for(tiles.count, 1, static_cast<int>(packers), [&](int64_t begin, int64_t end) {
            for (int64_t tile = begin; tile < end; ++tile)
                for (int64_t row = 0; row < tiles.size(tile); ++row)
                    for (int64_t input = 0; input < padded; input += INPUT_BLOCK)
                        pack_row(from.row(first + tiles.begin(tile) + row), from.type, input, layer->num_inputs,
                                 std::min(INPUT_BLOCK, padded - input) / 2, by_units, row, tiles.size(tile),
                                 packed_tile(input, tile));
        });
        parallel_for(num_panels, 1, static_cast<int>(num_threads), [&](int64_t begin, int64_t end) {
            const int64_t stride = tiles.num_rows * PANEL;  // floats of a panel's sums
            float *sums = reinterpret_cast<float *>(scratch<1>(MAX_PANELS * stride * 4));
            const int64_t step = is_gated ? MAX_PANELS / 2 : MAX_PANELS;
            for (int64_t panel = begin; panel < end; panel += step) {
                const int64_t outputs = std::min(step, end - panel), count = is_gated ? 2 * outputs : outputs;
                std::memset(sums, 0, count * stride * 4);
                for (int64_t input = 0; input < padded; input += INPUT_BLOCK) {
                    const uint8_t *panels[MAX_PANELS];
                    for (int64_t i = 0; i < count; ++i)
                        panels[i] = layer->weights + (panel + i % outputs + i / outputs * num_panels) * panel_bytes +
                                    input * PANEL * size_of(weight_type);
                    const int64_t num_pairs = std::min(INPUT_BLOCK, padded - input) / 2;
                    const bool at_once = count == MAX_PANELS && tiles.num_rows <= FEW_ROWS;
                    for (int64_t i = 0; i < count; i += at_once ? MAX_PANELS : 1)
                        for (int64_t tile = 0; tile < tiles.count; ++tile)
                            sum_tile_of(weight_type, by_units, tiles.size(tile), at_once ? MAX_PANELS : 1)(
                                panels + i, packed_tile(input, tile), num_pairs,
                                sums + i * stride + tiles.begin(tile) * PANEL, stride);
                }
                for (int64_t i = 0; i < outputs; ++i)
                    for (int64_t row = 0; row < tiles.num_rows; ++row) {
                        const int64_t output = (panel + i) * PANEL;
                        const float *sum = sums + i * stride + row * PANEL;
                        void *y_row = to.row(first + row);
                        if (is_gated)
                            finish_gated(sum, sum + outputs * stride, layer->bias,
                                         layer->bias == nullptr ? nullptr : layer->bias + num_outputs, PANEL,
                                         num_outputs - output, y_row, to.type, output);
                        else
                            finish(sum, layer->bias, PANEL, num_outputs - output, y_row, to.type, output,
                                   static_cast<Epilogue>(epilogue));
                    }
            }
        });
    }
}
}
