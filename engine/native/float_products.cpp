// Products with weights in 32 or 16 bits, in float32 arithmetic; and bfloat16 products by a processor's bfloat16 units.
//
// Weights in 16 bits become floats in registers, so they cost half the memory traffic at equal results. Each output is
// one sum over the inputs in order. So a row's result depends on the row alone, not on other rows or threads. Matrix
// units (matrix_units.h) add up in another order, which is also the same for all rows.
//
// Packed weights: [panels of PANEL outputs][pairs of inputs][2 vectors of LANES outputs] of
//     float32, float16:  LANES weights of the pair's first input, then LANES of its second
//     bfloat16:          LANES pairs of weights, the first input's in the low half of 32 bits; where there are matrix
//                        units, zeros fill up the last of their steps
//
// Rows of a step: [blocks of INPUT_BLOCK inputs][rows][ROW_FLOATS] of float32, or of bfloat16 for the units.

#include <type_traits>
#include <utility>

#include "matrix_units.h"
#include "products.h"

using namespace products;

namespace {

constexpr int PANEL = 2 * LANES;      // outputs
constexpr int64_t ROW_BLOCK = 240;    // rows that are packed at a time
constexpr int64_t INPUT_BLOCK = 768;  // inputs; ROW_BLOCK rows of them stay in the second-level cache
constexpr int64_t ROW_FLOATS = INPUT_BLOCK + 16;  // not a multiple of a page, so that rows do not share cache sets
constexpr int MAX_PANELS = 4;         // computed together
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int MAX_ROWS = 6, FEW_ROWS = 1;  // their 12 sums leave 4 registers
constexpr bool HAS_FEW_REGISTERS = true;
#else
constexpr int MAX_ROWS = 12, FEW_ROWS = 3;
constexpr bool HAS_FEW_REGISTERS = false;
#endif

// How the weights of a pair of inputs are multiplied, for LANES outputs at a time: in STEPS steps, each with one Input
// of a row. A step loads its weights by itself, so that few registers hold weights.
struct Pair {  // in float32
    static constexpr int STEPS = 2;
    using Input = float;

    static Floats add(Floats weights, Floats sum, float x) { return weights * x + sum; }
};

template <typename Element>
struct PairOf : Pair {
    static constexpr int64_t BYTES = 2 * LANES * sizeof(Element);
    static Floats load(const uint8_t *bytes, int step) {
        return ::load(reinterpret_cast<const Element *>(bytes) + step * LANES);
    }
};

template <>
struct PairOf<BFloat16> : Pair {
    static constexpr int64_t BYTES = 4 * LANES;
    static Floats load(const uint8_t *bytes, int step) {
        const Bits pairs = load_raw<Bits>(bytes);
        return step == 0 ? (Floats)(pairs << 16) : (Floats)(pairs & 0xffff0000);
    }
};

#if defined(__AVX512BF16__)
struct BFloat16Units {
    static constexpr int STEPS = 1;
    static constexpr int64_t BYTES = 4 * LANES;
    using Input = uint32_t;  // a pair

    static __m512i load(const uint8_t *bytes, int) { return _mm512_loadu_si512(bytes); }
    static Floats add(__m512i weights, Floats sum, uint32_t x) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(x));
    }
};
#else
using BFloat16Units = PairOf<BFloat16>;
#endif

constexpr bool HAS_UNITS = !std::is_same_v<BFloat16Units, PairOf<BFloat16>>;

// Adds the products of `num_pairs` pairs of inputs to sums[panel][row][PANEL]; panels' sums lie `stride` floats apart.
template <class Weight, int ROWS, int PANELS>
void sum_tile(const uint8_t *const *panels, const void *rows, int64_t num_pairs, float *sums, int64_t stride,
              Prefetch prefetch) {
    using Input = typename Weight::Input;
    constexpr int64_t ROW_INPUTS = ROW_FLOATS * Weight::STEPS / 2;
    const Input *x = static_cast<const Input *>(rows);
    Floats totals[PANELS][ROWS][2];
    for (int panel = 0; panel < PANELS; ++panel)
        for (int row = 0; row < ROWS; ++row)
            for (int half = 0; half < 2; ++half)
                totals[panel][row][half] = ::load(sums + panel * stride + row * PANEL + half * LANES);
    for (int64_t pair = 0; pair < num_pairs; ++pair) {
        prefetch.step();
        for (int panel = 0; panel < PANELS; ++panel) {
            const uint8_t *bytes = panels[panel] + pair * 2 * Weight::BYTES;
            for (int step = 0; step < Weight::STEPS; ++step) {
                const auto low = Weight::load(bytes, step), high = Weight::load(bytes + Weight::BYTES, step);
                for (int row = 0; row < ROWS; ++row) {
                    Floats(&sums_of_row)[2] = totals[panel][row];
                    sums_of_row[0] = Weight::add(low, sums_of_row[0], x[row * ROW_INPUTS + step]);
                    sums_of_row[1] = Weight::add(high, sums_of_row[1], x[row * ROW_INPUTS + step]);
                }
            }
        }
        x += Weight::STEPS;
    }
    for (int panel = 0; panel < PANELS; ++panel)
        for (int row = 0; row < ROWS; ++row)
            for (int half = 0; half < 2; ++half)
                ::store(sums + panel * stride + row * PANEL + half * LANES, totals[panel][row][half]);
}

using SumTile = void (*)(const uint8_t *const *, const void *, int64_t, float *, int64_t, Prefetch);

template <class Weight, int PANELS, int... ROWS_LESS_1>
SumTile of_rows(int64_t rows, std::integer_sequence<int, ROWS_LESS_1...>) {
    static constexpr SumTile tiles[] = {sum_tile<Weight, ROWS_LESS_1 + 1, PANELS>...};
    return tiles[rows - 1];
}

template <class Weight> SumTile of_weight(int64_t rows, int64_t panels) {
    return panels == MAX_PANELS ? of_rows<Weight, MAX_PANELS>(rows, std::make_integer_sequence<int, FEW_ROWS>())
                                : of_rows<Weight, 1>(rows, std::make_integer_sequence<int, MAX_ROWS>());
}

// Whether panels of these weights become float32 before they are multiplied: widening bfloat16 takes registers that six
// rows need. If `num_rows` is small, weights are widened in registers, for four rows at a time.
bool widens_panels(Type type, int64_t num_rows) { return HAS_FEW_REGISTERS && type == BFLOAT16 && num_rows >= 64; }

int64_t max_rows(Type type, int64_t num_rows) {
    return HAS_FEW_REGISTERS && type == BFLOAT16 && !widens_panels(type, num_rows) ? 4 : MAX_ROWS;
}

// A panel of bfloat16 weights as one of float32.
const uint8_t *widened(const uint8_t *panel, int64_t num_pairs) {
    float *floats = reinterpret_cast<float *>(scratch<2>(num_pairs * 2 * PANEL * 4));
    for (int64_t i = 0; i < 2 * num_pairs; ++i)
        for (int step = 0; step < 2; ++step)
            ::store(floats + (2 * i + step) * LANES, PairOf<BFloat16>::load(panel + i * PairOf<BFloat16>::BYTES, step));
    return reinterpret_cast<const uint8_t *>(floats);
}

SumTile sum_tile_of(Type type, bool by_units, int64_t rows, int64_t panels) {
    if (type == FLOAT32) return of_weight<PairOf<float>>(rows, panels);
    if (type == FLOAT16) return of_weight<PairOf<Float16>>(rows, panels);
    return by_units ? of_weight<BFloat16Units>(rows, panels) : of_weight<PairOf<BFloat16>>(rows, panels);
}

// Inputs of packed weights: zeros after the last input complete a pair, or a step of the matrix units.
int64_t padded_inputs(int64_t num_inputs, Type type) {
    const int64_t multiple = matrix_units::ARE_THERE && type == BFLOAT16 ? matrix_units::STEP : 2;
    return (num_inputs + multiple - 1) / multiple * multiple;
}

// Converts a block of a row: the inputs from `begin` on, with a zero after the last.
void convert_row(const void *row, Type from, int64_t begin, int64_t num_inputs, void *block, Type to) {
    const int64_t end = std::min(num_inputs - begin, INPUT_BLOCK);
    if (from == to) {
        std::memcpy(block, static_cast<const char *>(row) + begin * size_of(from), end * size_of(from));
        std::memset(static_cast<char *>(block) + end * size_of(to), 0, size_of(to));
        return;
    }
    for (int64_t i = 0; i < end; i += LANES) store(block, to, i, load(row, from, begin + i, end - i));
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
    const Type type = static_cast<Type>(weight_type);
    return (num_outputs + PANEL - 1) / PANEL * PANEL * padded_inputs(num_inputs, type) * size_of(type);
}

// Packs weights [outputs][inputs] of 32 or 16 bits.
void float_pack(const uint8_t *weights, int64_t num_outputs, int64_t num_inputs, int64_t weight_type, uint8_t *packed,
                int64_t num_threads) {
    const Type type = static_cast<Type>(weight_type);
    const int64_t size = size_of(type), panel_bytes = PANEL * padded_inputs(num_inputs, type) * size;
    parallel_for((num_outputs + PANEL - 1) / PANEL, 1, static_cast<int>(num_threads), [&](int64_t begin, int64_t end) {
        std::memset(packed + begin * panel_bytes, 0, (end - begin) * panel_bytes);
        for (int64_t output = begin * PANEL; output < std::min(end * PANEL, num_outputs); ++output) {
            const int64_t lane = output % LANES;
            uint8_t *vector = packed + output / PANEL * panel_bytes + output % PANEL / LANES * 2 * LANES * size;
            for (int64_t i = 0; i < num_inputs; ++i) {
                const int64_t place = weight_type == BFLOAT16 ? 2 * lane + i % 2 : i % 2 * LANES + lane;
                std::memcpy(vector + (i / 2 * 2 * PANEL + place) * size,
                            weights + (output * num_inputs + i) * size, size);
            }
        }
    });
}

// A share of y = x @ weight.T + bias, with an epilogue.
static void multiply(const FloatLayer &layer, const Rows &from, const Rows &to, int64_t num_rows, Epilogue epilogue,
                     const Share &share, int num_threads) {
    const Type weight_type = static_cast<Type>(layer.weight_type);
    const bool by_units = HAS_UNITS && layer.by_units != 0, is_gated = epilogue == GATE;
    const Type row_type = by_units ? BFLOAT16 : FLOAT32;
    const int64_t padded = (layer.num_inputs + 1) / 2 * 2, num_blocks = (padded + INPUT_BLOCK - 1) / INPUT_BLOCK;
    const int64_t panel_bytes = PANEL * padded_inputs(layer.num_inputs, weight_type) * size_of(weight_type);
    const int64_t num_outputs = is_gated ? layer.num_outputs / 2 : layer.num_outputs;
    const int64_t num_panels = (num_outputs + PANEL - 1) / PANEL;
    const int64_t first_panel = share.begin(num_panels), own_panels = share.end(num_panels) - first_panel;
#if defined(__AMX_BF16__)
    if (by_units)
        return matrix_units::multiply_rows(layer.weights, layer.bias, layer.num_outputs, layer.num_inputs, from, to,
                                           num_rows, epilogue, share, num_threads);
#endif
    const float *up_bias = layer.bias == nullptr ? nullptr : layer.bias + num_outputs;
    const Tiles row_blocks(num_rows, ROW_BLOCK);
    for (int64_t row_block = 0; row_block < row_blocks.count; ++row_block) {
        const int64_t first = row_blocks.begin(row_block);
        const bool widens = widens_panels(weight_type, row_blocks.size(row_block));
        const Tiles tiles(row_blocks.size(row_block), max_rows(weight_type, row_blocks.size(row_block)));
        const int64_t row_bytes = ROW_FLOATS * size_of(row_type);
        uint8_t *rows = scratch<0>(num_blocks * tiles.num_rows * row_bytes);
        // Waking threads takes longer than converting few rows.
        const int64_t grain = tiles.num_rows * layer.num_inputs < (1 << 15) ? tiles.num_rows : 1;
        parallel_for(tiles.num_rows, grain, num_threads, [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; ++row)
                for (int64_t block = 0; block < num_blocks; ++block)
                    convert_row(from.row(first + row), from.type, block * INPUT_BLOCK, layer.num_inputs,
                                rows + (block * tiles.num_rows + row) * row_bytes, row_type);
        }, parts_for_guests(2 * num_blocks * tiles.num_rows * row_bytes));
        parallel_for(own_panels, 1, num_threads, [&](int64_t begin, int64_t end) {
            begin += first_panel, end += first_panel;
            const int64_t stride = tiles.num_rows * PANEL;  // floats of a panel's sums
            float *sums = reinterpret_cast<float *>(scratch<1>(MAX_PANELS * stride * 4));
            const int64_t step = is_gated ? MAX_PANELS / 2 : MAX_PANELS;
            for (int64_t panel = begin; panel < end; panel += step) {
                const int64_t outputs = std::min(step, end - panel), count = is_gated ? 2 * outputs : outputs;
                std::memset(sums, 0, count * stride * 4);
                for (int64_t block = 0; block < num_blocks; ++block) {
                    const int64_t input = block * INPUT_BLOCK, num_pairs = std::min(INPUT_BLOCK, padded - input) / 2;
                    const uint8_t *panels[MAX_PANELS];
                    for (int64_t i = 0; i < count; ++i)
                        panels[i] = layer.weights + (panel + i % outputs + i / outputs * num_panels) * panel_bytes +
                                    input * PANEL * size_of(weight_type);
                    const bool at_once = count == MAX_PANELS && tiles.num_rows <= FEW_ROWS;
                    for (int64_t i = 0; i < count; i += at_once ? MAX_PANELS : 1) {
                        const uint8_t *next = panels[i] + panel_bytes;
                        if (widens) panels[i] = widened(panels[i], num_pairs);
                        for (int64_t tile = 0; tile < tiles.count; ++tile)
                            sum_tile_of(widens ? FLOAT32 : weight_type, by_units, tiles.size(tile),
                                        at_once ? MAX_PANELS : 1)(
                                panels + i, rows + (block * tiles.num_rows + tiles.begin(tile)) * row_bytes, num_pairs,
                                sums + i * stride + tiles.begin(tile) * PANEL, stride,
                                Prefetch(next, at_once ? 0 : 2 * PANEL * size_of(weight_type), num_pairs, tile,
                                         tiles.count));
                    }
                }
                for (int64_t row = 0; row < tiles.num_rows; ++row)
                    for (int64_t i = 0; i < outputs; ++i) {
                        const int64_t output = (panel + i) * PANEL;
                        const int64_t rest = std::min<int64_t>(PANEL, num_outputs - output);
                        const float *sum = sums + i * stride + row * PANEL;
                        void *y_row = to.row(first + row);
                        if (is_gated)
                            finish_gated(sum, sum + outputs * stride, layer.bias, up_bias, rest, y_row, to.type,
                                         output);
                        else
                            finish(sum, layer.bias, rest, y_row, to.type, output, epilogue);
                    }
            }
        }, parts_for_guests(panel_bytes * own_panels, tiles.num_rows * layer.num_inputs * layer.num_outputs / share.count));
    }
}

// y = x @ weight.T + bias, with an epilogue. x and y: `num_rows` rows of `x_type` and `y_type`, strides in values. With
// GATE, y has half of the layer's outputs, which must be a multiple of 32.
void float_product(const FloatLayer *layer, void *x, int64_t x_stride, int64_t x_type, void *y, int64_t y_stride,
                   int64_t y_type, int64_t num_rows, int64_t epilogue, int64_t num_threads) {
    multiply(*layer, {x, x_stride, static_cast<Type>(x_type)}, {y, y_stride, static_cast<Type>(y_type)}, num_rows,
             static_cast<Epilogue>(epilogue), {}, static_cast<int>(num_threads));
}

// Like `float_product`, for rows of many layers (multiply_each). Row i of the products is row x_order[i] of x, and
// row i of y.
void float_products(const FloatLayer *const *layers, const int64_t *firsts, int64_t num_layers, void *x,
                    int64_t x_stride, int64_t x_type, const int64_t *x_order, void *y, int64_t y_stride, int64_t y_type,
                    int64_t epilogue, int64_t num_threads) {
    multiply_each(layers, firsts, num_layers, {x, x_stride, static_cast<Type>(x_type), x_order},
                  {y, y_stride, static_cast<Type>(y_type)}, static_cast<int>(num_threads),
                  [&](const FloatLayer &layer, const Rows &from, const Rows &to, int64_t num_rows, const Share &share) {
                      multiply(layer, from, to, num_rows, static_cast<Epilogue>(epilogue), share, 1);
                  });
}
}
