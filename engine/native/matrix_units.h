// Products by a processor's matrix units (AMX): tiles of 16 rows and 16 outputs, in steps of 32 inputs.
//
// A step sums the products of even inputs and the products of odd inputs, each in order, and adds both sums to the
// tile's sums. So a row's result depends on this row alone, not on the other rows of its tile.
//
// Weights of a panel: [steps][16 pairs of inputs][PANEL outputs][2 inputs] of bfloat16.
// Rows: [tiles of TILE rows][steps][rows][STEP inputs] of bfloat16. Inputs after the last are zero in weights and rows.

#pragma once

#include <algorithm>

#include "products.h"

namespace matrix_units {

constexpr int TILE = 16;                                    // rows, and outputs
constexpr int64_t PANEL = 2 * TILE;                         // outputs that are computed together
constexpr int64_t STEP = 32;                                // inputs
constexpr int64_t TILE_BYTES = TILE * STEP * 2;             // of rows or weights, for one step
constexpr int64_t PANEL_STEP_BYTES = PANEL * STEP * 2;      // of a panel's weights
constexpr int64_t ROW_BLOCK_BYTES = 1 << 20;                // rows that are computed at a time: half a second-level cache
constexpr int64_t MIN_ROW_BLOCK = 64, MAX_ROW_BLOCK = 512;  // rows

inline int64_t num_steps(int64_t num_inputs) { return (num_inputs + STEP - 1) / STEP; }

#if defined(__AMX_BF16__)
constexpr bool ARE_THERE = true;

// During its lifetime, subnormal numbers count as 0 in this thread, as they always do in the units.
class NoSubnormals {
  public:
    NoSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
    NoSubnormals(const NoSubnormals &) = delete;
    ~NoSubnormals() { _mm_setcsr(before_); }

  private:
    unsigned before_;
};

// The shapes of the units' registers, which are set anew only if they change. The destructor gives the registers back.
class Shape {
  public:
    Shape() = default;
    Shape(const Shape &) = delete;
    ~Shape() {
        if (current_ != 0) _tile_release();
    }

    // Registers 0 to 3 for the sums of `multiply`, 4 and 5 for weights, 6 and 7 for rows.
    void for_panels(int64_t first_rows, int64_t second_rows) {
        const int64_t rows[] = {first_rows, first_rows, second_rows, second_rows, TILE, TILE, first_rows, second_rows};
        const int64_t bytes[] = {64, 64, 64, 64, 64, 64, 64, 64};
        set(first_rows << 8 | second_rows, rows, bytes);
    }
    // Registers 0 to 3 for sums of 32 bits, 4 and 5 for rows of `num_inputs` bytes, 6 and 7 for weights.
    void for_bytes(int64_t num_inputs) {
        const int64_t quads = num_inputs / 4;
        const int64_t rows[] = {TILE, TILE, TILE, TILE, TILE, TILE, quads, quads};
        const int64_t bytes[] = {64, 64, 64, 64, num_inputs, num_inputs, 64, 64};
        set(-num_inputs, rows, bytes);
    }

  private:
    struct alignas(64) Registers {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t bytes_of_row[16] = {};
        uint8_t rows[16] = {};
    };

    void set(int64_t shape, const int64_t (&rows)[8], const int64_t (&bytes)[8]) {
        if (shape == current_) return;
        current_ = shape;
        Registers registers;
        for (int i = 0; i < 8; ++i) {
            registers.rows[i] = static_cast<uint8_t>(rows[i]);
            registers.bytes_of_row[i] = rows[i] == 0 ? 0 : static_cast<uint16_t>(bytes[i]);
        }
        asm volatile("" : : "r"(&registers) : "memory");  // GCC 12 thinks that only the first bytes are read
        _tile_loadconfig(&registers);
    }

    int64_t current_ = 0;
};

// sums[row][PANEL] of one or two tiles of rows. `rows`: the rows of the first tile; the rows of the second tile follow.
// `meanwhile` is called with every step: vectors work while the units multiply.
template <bool TWO, typename Meanwhile>
void multiply(const uint8_t *rows, const uint8_t *panel, int64_t steps, float *sums, const Meanwhile &meanwhile) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (TWO) {
        _tile_zero(2);
        _tile_zero(3);
    }
    const uint8_t *second = rows + steps * TILE_BYTES;
    for (int64_t step = 0; step < steps; ++step) {
        meanwhile();
        _tile_stream_loadd(6, rows, 64);
        _tile_loadd(4, panel, PANEL * 4);
        _tile_dpbf16ps(0, 6, 4);
        _tile_loadd(5, panel + 64, PANEL * 4);
        _tile_dpbf16ps(1, 6, 5);
        if constexpr (TWO) {
            _tile_stream_loadd(7, second, 64);
            _tile_dpbf16ps(2, 7, 4);
            _tile_dpbf16ps(3, 7, 5);
            second += TILE_BYTES;
        }
        rows += TILE_BYTES;
        panel += PANEL_STEP_BYTES;
    }
    _tile_stored(0, sums, PANEL * 4);
    _tile_stored(1, sums + TILE, PANEL * 4);
    if constexpr (TWO) {
        _tile_stored(2, sums + TILE * PANEL, PANEL * 4);
        _tile_stored(3, sums + TILE * PANEL + TILE, PANEL * 4);
    }
}

// c[i][j] (+)= sum over k of a[i][k] b[k][j], for `rows` x `cols` of c and `depth` k, by registers shaped
// for_panels(TILE, TILE). Elements of a and b are pairs of bfloat16. All three numbers are multiples of TILE.
template <bool adds, typename Pair>
void add_product(const Pair *a, int64_t a_row, const Pair *b, int64_t b_row, float *c, int64_t c_row, int64_t depth,
                 int64_t rows, int64_t cols) {
    asm volatile("" : : "r"(a), "r"(b), "r"(c) : "memory");
    for (int64_t i = 0; i < rows; i += 2 * TILE)
        for (int64_t j = 0; j < cols; j += 2 * TILE) {
            const bool has_two = i + TILE < rows, is_wide = j + TILE < cols;
            float *first = c + i * c_row + j, *second = first + TILE * c_row;
            if constexpr (adds) {
                _tile_loadd(0, first, c_row * 4);
                if (is_wide) _tile_loadd(1, first + TILE, c_row * 4);
                if (has_two) _tile_loadd(2, second, c_row * 4);
                if (has_two && is_wide) _tile_loadd(3, second + TILE, c_row * 4);
            } else {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
            }
            for (int64_t k = 0; k < depth; k += TILE) {
                _tile_loadd(4, b + k * b_row + j, b_row * 4);
                _tile_loadd(6, a + i * a_row + k, a_row * 4);
                _tile_dpbf16ps(0, 6, 4);
                if (is_wide) {
                    _tile_loadd(5, b + k * b_row + j + TILE, b_row * 4);
                    _tile_dpbf16ps(1, 6, 5);
                }
                if (!has_two) continue;
                _tile_loadd(7, a + (i + TILE) * a_row + k, a_row * 4);
                _tile_dpbf16ps(2, 7, 4);
                if (is_wide) _tile_dpbf16ps(3, 7, 5);
            }
            _tile_stored(0, first, c_row * 4);
            if (is_wide) _tile_stored(1, first + TILE, c_row * 4);
            if (has_two) _tile_stored(2, second, c_row * 4);
            if (has_two && is_wide) _tile_stored(3, second + TILE, c_row * 4);
        }
}

// Converts a row of a block to bfloat16, and lays it out in its tile.
inline void lay_out_row(const void *row, Type type, int64_t num_inputs, int64_t index, uint8_t *rows) {
    const int64_t steps = num_steps(num_inputs);
    uint8_t *to = rows + index / TILE * steps * TILE_BYTES + index % TILE * STEP * 2;
    for (int64_t step = 0; step < steps; ++step, to += TILE_BYTES) {
        const int64_t begin = step * STEP, rest = std::min(num_inputs - begin, STEP);
        if (type == BFLOAT16 && rest == STEP) {
            std::memcpy(to, static_cast<const uint16_t *>(row) + begin, STEP * 2);
            continue;
        }
        for (int64_t i = 0; i < STEP; i += LANES)
            products::store(to, BFLOAT16, i, i < rest ? products::load(row, type, begin + i, rest - i) : Floats{});
    }
}

// A share of y = x @ weight.T + bias, with an epilogue. `weights`: panels.
inline void multiply_rows(const uint8_t *weights, const float *bias, int64_t num_outputs, int64_t num_inputs,
                          const products::Rows &from, const products::Rows &to, int64_t num_rows,
                          products::Epilogue epilogue, const products::Share &share, int num_threads) {
    using namespace products;
    const bool is_gated = epilogue == GATE;
    if (is_gated) num_outputs /= 2;
    const int64_t steps = num_steps(num_inputs), num_panels = (num_outputs + PANEL - 1) / PANEL;
    const int64_t first_panel = share.begin(num_panels), own_panels = share.end(num_panels) - first_panel;
    const float *up_bias = bias == nullptr ? nullptr : bias + num_outputs;
    const int64_t fitting = ROW_BLOCK_BYTES / (steps * STEP * 2) / PANEL * PANEL;
    const Tiles row_blocks(num_rows, std::clamp(fitting, MIN_ROW_BLOCK, MAX_ROW_BLOCK));
    for (int64_t row_block = 0; row_block < row_blocks.count; ++row_block) {
        const int64_t first = row_blocks.begin(row_block), count = row_blocks.size(row_block);
        const int64_t num_tiles = (count + TILE - 1) / TILE, num_pairs = (num_tiles + 1) / 2;
        uint8_t *rows = scratch<0>(num_tiles * steps * TILE_BYTES);
        // Waking threads takes longer than converting few rows.
        parallel_for(count, count * num_inputs < (1 << 15) ? count : 1, num_threads, [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; ++row)
                lay_out_row(from.row(first + row), from.type, num_inputs, row, rows);
        });
        parallel_for(own_panels, 1, num_threads, [&](int64_t begin, int64_t end) {
            Shape shape;
            const int64_t pair_size = 2 * TILE * PANEL;  // floats
            float *sums = reinterpret_cast<float *>(scratch<1>((num_pairs + 2) * pair_size * 4)), *former = sums + pair_size;
            float *gates = former + pair_size;  // of all pairs
            // Rows of the previous pair of tiles, whose sums are not finished yet. They are finished before units store
            // new sums.
            const int64_t rows_of_step = (2 * TILE + steps - 1) / steps;
            struct {
                const float *gate;
                int64_t panel, row, end;
            } unfinished{};
            const auto finish_row = [&] {
                const int64_t output = unfinished.panel * PANEL, num = std::min(PANEL, num_outputs - output);
                const int64_t at = unfinished.row % (2 * TILE) * PANEL;
                void *y = to.row(first + unfinished.row++);
                if (is_gated)
                    finish_gated(unfinished.gate + at, former + at, bias, up_bias, num, y, to.type, output);
                else
                    finish(former + at, bias, num, y, to.type, output, epilogue);
            };
            for (int64_t panel = first_panel + begin; panel < first_panel + end; ++panel) {
                for (int64_t half = 0; half <= is_gated; ++half) {
                    const uint8_t *values = weights + (panel + half * num_panels) * steps * PANEL_STEP_BYTES;
                    asm volatile("" : : "r"(rows), "r"(values) : "memory");
                    for (int64_t pair = 0; pair < num_pairs; ++pair) {
                        const int64_t row = pair * 2 * TILE, rest = count - row;
                        const uint8_t *tile = rows + pair * 2 * steps * TILE_BYTES;
                        float *gate = gates + pair * pair_size, *of_pair = half < is_gated ? gate : sums;
                        Prefetch prefetch(values + steps * PANEL_STEP_BYTES, PANEL_STEP_BYTES, steps, pair, num_pairs);
                        const auto meanwhile = [&] {
                            prefetch.step();
                            for (int64_t i = 0; i < rows_of_step && unfinished.row < unfinished.end; ++i) finish_row();
                        };
                        shape.for_panels(std::min<int64_t>(rest, TILE), std::clamp<int64_t>(rest - TILE, 0, TILE));
                        if (rest > TILE) multiply<true>(tile, values, steps, of_pair, meanwhile);
                        else multiply<false>(tile, values, steps, of_pair, meanwhile);
                        if (half < is_gated) continue;
                        std::swap(sums, former);
                        unfinished = {gate, panel, row, std::min(row + 2 * TILE, count)};
                    }
                }
            }
            while (unfinished.row < unfinished.end) finish_row();
        }, parts_for_guests(own_panels * steps * PANEL_STEP_BYTES, count * num_inputs * own_panels * PANEL));
    }
}
#else
constexpr bool ARE_THERE = false;

struct NoSubnormals {
    NoSubnormals() {}
};
struct Shape {
    void for_panels(int64_t, int64_t) {}
    void for_bytes(int64_t) {}
};
template <bool adds, typename... Arguments> void add_product(const Arguments &...);  // never called
#endif

}  // namespace matrix_units
