// Products with weights in 4 or 8 bits: w = scale * u + min, with a scale and a min per group of 16 or 32 inputs. Of
// floats of 4 bits, u is what the table E2M1 has for their bits.
//
// Rows are quantised to signed bytes first, each group of a row with a scale of its own: x = x_scale * q. So a group's
// part of an output is
//
//     scale * x_scale * sum(u * q) + min * x_scale * sum(q)
//
// where sum(u * q) is exact in 32-bit integers. Each sum runs over the groups in order, whatever the other rows and
// threads are: a row's result depends on the row alone.
//
// Packed weights: [blocks of 16 outputs][groups] of
//     16 scales, 16 mins    float16, both times a power of two that the layer's `factor` takes out again
//     8 bits: [group_size / 4][16 outputs][4 inputs]     a byte each
//     4 bits: [group_size / 8][16 outputs][4 inputs]     low nibbles: the group's first half of inputs; high: the other
//
// Quantised rows: [tiles][groups] of [rows of the tile][group_size] signed bytes, then of each row x_scale and
// x_scale * sum(q), float32, and sum(q), int32, which only AVX2 reads.

#include <type_traits>
#include <utility>

#include "products.h"

using namespace products;

namespace {

constexpr int BLOCK = 16;  // outputs
constexpr int64_t SCALE_BYTES = 2 * BLOCK * 2;
constexpr int64_t ROW_SUMS_BYTES = 3 * 4;
constexpr int64_t ROW_BLOCK = 256;  // rows that are quantised at a time
// As engine/layers/grouped_weight.py has them: floats of 4 bits, in halves, plus 12.
alignas(16) constexpr uint8_t E2M1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// Bytes of a vector register, and their products with the 4 bytes of a row that all outputs share. A dot's sums of a
// group stay below 2^31, and with values of 4 bits, which stand for 24 at most, below 2^15.
#if defined(__AVX512BW__)
constexpr int MAX_ROWS = 16;
constexpr bool FEW_REGISTERS = false;
using Bytes = __m512i;
inline Bytes load_bytes(const uint8_t *bytes) { return _mm512_loadu_si512(bytes); }
inline Bytes low_nibbles(Bytes v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes v) { return low_nibbles(_mm512_srli_epi16(v, 4)); }
inline Bytes from_e2m1(Bytes v) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i *>(E2M1))), v);
}
inline Bytes four(const int8_t *x) {
    int32_t word;
    std::memcpy(&word, x, 4);
    return _mm512_set1_epi32(word);
}
#if defined(__AVX512VNNI__)
template <int BITS> struct Dot {
    Bytes sums = _mm512_setzero_si512();
    void add(Bytes u, Bytes x) { sums = _mm512_dpbusd_epi32(sums, u, x); }
    Ints total() const { return (Ints)(sums); }
};
#else
// Sums of 16 bits: of a group's 32 products, of at most 24 * 127, each has 8, and stays below 2^15.
struct Dot4 {
    Bytes sums = _mm512_setzero_si512();
    void add(Bytes u, Bytes x) { sums = _mm512_add_epi16(sums, _mm512_maddubs_epi16(u, x)); }
    Ints total(int16_t factor = 1) const { return (Ints)(_mm512_madd_epi16(sums, _mm512_set1_epi16(factor))); }
};
#define DOT_OF_NIBBLES
#endif

#elif defined(__AVX2__)
constexpr int MAX_ROWS = 6;  // their sums stay in 16 registers
constexpr bool FEW_REGISTERS = true;
using Bytes = __m256i;
inline Bytes load_bytes(const uint8_t *bytes) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(bytes)); }
inline Bytes low_nibbles(Bytes v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes v) { return low_nibbles(_mm256_srli_epi16(v, 4)); }
inline Bytes from_e2m1(Bytes v) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i *>(E2M1))), v);
}
inline Bytes four(const int8_t *x) {
    int32_t word;
    std::memcpy(&word, x, 4);
    return _mm256_set1_epi32(word);
}
struct Dot4 {
    Bytes sums = _mm256_setzero_si256();
    void add(Bytes u, Bytes x) { sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(u, x)); }
    Ints total(int16_t factor = 1) const { return (Ints)(_mm256_madd_epi16(sums, _mm256_set1_epi16(factor))); }
};
// 128 * sum(q) + sum((u - 128) * q). Two products, of at most 128 * 127, fit into 16 bits. It needs one register for a
// row, where Dot8 needs two, so that twice as many rows share a load of weights.
struct OffsetDot8 {
    Bytes sums = _mm256_setzero_si256();
    void begin(int32_t sum_of_q) { sums = _mm256_set1_epi32(128 * sum_of_q); }
    void add(Bytes u, Bytes x) {
        const Bytes less = _mm256_xor_si256(u, _mm256_set1_epi8(-128));
        const Bytes products = _mm256_maddubs_epi16(_mm256_abs_epi8(less), _mm256_sign_epi8(x, less));
        sums = _mm256_add_epi32(sums, _mm256_madd_epi16(products, _mm256_set1_epi16(1)));
    }
    Ints total() const { return (Ints)sums; }
};
constexpr int LEAST_ROWS_OF_OFFSET_DOTS = 3;  // for fewer, Dot8 is as fast
#define DOT_OF_NIBBLES

#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int MAX_ROWS = 8;
constexpr bool FEW_REGISTERS = false;
using Bytes = uint8x16_t;
inline Bytes load_bytes(const uint8_t *bytes) { return vld1q_u8(bytes); }
inline Bytes low_nibbles(Bytes v) { return vandq_u8(v, vdupq_n_u8(15)); }
inline Bytes high_nibbles(Bytes v) { return vshrq_n_u8(v, 4); }
inline Bytes from_e2m1(Bytes v) { return vqtbl1q_u8(vld1q_u8(E2M1), v); }
inline int8x16_t four(const int8_t *x) {
    int32_t word;
    std::memcpy(&word, x, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(word));
}
// The instruction takes signed bytes: values of 8 bits are multiplied less 128, which is added again.
template <int BITS> struct Dot {
    int32x4_t sums = vdupq_n_s32(0);
    void add(Bytes u, int8x16_t x) {
        if constexpr (BITS == 4) {
            sums = vdotq_s32(sums, vreinterpretq_s8_u8(u), x);
        } else {
            sums = vdotq_s32(sums, vreinterpretq_s8_u8(veorq_u8(u, vdupq_n_u8(128))), x);
            sums = vdotq_s32(sums, vdupq_n_s8(64), x);
            sums = vdotq_s32(sums, vdupq_n_s8(64), x);
        }
    }
    Ints total() const { return (Ints)(sums); }
};

#else
constexpr int MAX_ROWS = 4;
constexpr bool FEW_REGISTERS = true;
struct Bytes {
    uint8_t values[4 * LANES];
};
inline Bytes load_bytes(const uint8_t *bytes) {
    Bytes v;
    std::memcpy(v.values, bytes, sizeof(v));
    return v;
}
inline Bytes low_nibbles(Bytes v) {
    for (uint8_t &value : v.values) value &= 15;
    return v;
}
inline Bytes high_nibbles(Bytes v) {
    for (uint8_t &value : v.values) value >>= 4;
    return v;
}
inline Bytes from_e2m1(Bytes v) {
    for (uint8_t &value : v.values) value = E2M1[value];
    return v;
}
inline const int8_t *four(const int8_t *x) { return x; }
template <int BITS> struct Dot {
    Ints sums = {};
    void add(const Bytes &u, const int8_t *x) {
        for (int lane = 0; lane < LANES; ++lane)
            for (int i = 0; i < 4; ++i) sums[lane] += u.values[4 * lane + i] * x[i];
    }
    Ints total() const { return sums; }
};
#endif

#if defined(DOT_OF_NIBBLES)
// Without VNNI, products of 8 bits would exceed the 16 bits of their sums; those of their halves do not. OffsetDot8 is
// another way.
struct Dot8 {
    Dot4 low, high;
    void add(Bytes u, Bytes x) {
        low.add(low_nibbles(u), x);
        high.add(high_nibbles(u), x);
    }
    Ints total() const { return low.total() + high.total(16); }
};
template <int BITS> using Dot = std::conditional_t<BITS == 4, Dot4, Dot8>;
#endif

#if defined(__AVX2__) && !defined(__AVX512BW__)
template <int BITS, int ROWS>
using RowDot = std::conditional_t<BITS == 8 && ROWS >= LEAST_ROWS_OF_OFFSET_DOTS, OffsetDot8, Dot<BITS>>;
#else
template <int BITS, int ROWS> using RowDot = Dot<BITS>;
#endif

// The weights of a group, for the outputs of one vector, times those of each row: calls `then(row, products' sums)`.
template <int BITS, int GROUP, bool IS_E2M1, int ROWS, typename Then>
inline void multiply_group(const uint8_t *bytes, const int8_t *q, const int32_t *sums_of_q, const Then &then) {
    constexpr int STEPS = GROUP / 4, LOADS = STEPS * BITS / 8;
    const auto unpacked = [](Bytes nibbles) { return IS_E2M1 ? from_e2m1(nibbles) : nibbles; };
    const auto x = [q](int row, int step) { return four(q + row * GROUP + 4 * step); };
    if constexpr (FEW_REGISTERS) {  // they hold the sums of all rows, and the weights of one load
        RowDot<BITS, ROWS> dots[ROWS];
        if constexpr (!std::is_same_v<RowDot<BITS, ROWS>, Dot<BITS>>)
            for (int row = 0; row < ROWS; ++row) dots[row].begin(sums_of_q[row]);
#pragma GCC unroll 2  // unrolled further, GCC 12 stores all products before it adds them
        for (int i = 0; i < LOADS; ++i) {
            const Bytes loaded = load_bytes(bytes + 4 * BLOCK * i);
            const Bytes u = BITS == 8 ? loaded : unpacked(low_nibbles(loaded));
            for (int row = 0; row < ROWS; ++row) dots[row].add(u, x(row, i));
            if constexpr (BITS == 4) {
                const Bytes high = unpacked(high_nibbles(loaded));
                for (int row = 0; row < ROWS; ++row) dots[row].add(high, x(row, i + LOADS));
            }
        }
        for (int row = 0; row < ROWS; ++row) then(row, dots[row].total());
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
        Dot<BITS> even, odd;  // two, so that neither waits for its own last product
        for (int i = 0; i < STEPS; i += 2) {
            even.add(u[i], x(row, i));
            odd.add(u[i + 1], x(row, i + 1));
        }
        then(row, even.total() + odd.total());
    }
}

// Sums of one block of outputs for the rows of one tile: sums[row][BLOCK], before `factor`.
template <int BITS, int GROUP, bool IS_E2M1, int ROWS>
void sum_tile(const uint8_t *weights, const int8_t *x, int64_t num_groups, float *sums, Prefetch prefetch) {
    constexpr int64_t GROUP_BYTES = SCALE_BYTES + BLOCK * GROUP * BITS / 8;
    for (int part = 0; part < BLOCK; part += LANES) {
        Floats totals[ROWS] = {};
        const uint8_t *group = weights;
        const int8_t *q = x;
        for (int64_t g = 0; g < num_groups; ++g) {
            const Float16 *halves = reinterpret_cast<const Float16 *>(group);
            const Floats scales = ::load(halves + part), mins = ::load(halves + BLOCK + part);
            const float *x_scales = reinterpret_cast<const float *>(q + ROWS * GROUP), *x_sums = x_scales + ROWS;
            const int32_t *sums_of_q = reinterpret_cast<const int32_t *>(x_sums + ROWS);
            if (part == 0) prefetch.step();
            const auto add = [&](int row, Ints dot) {
                totals[row] = mins * x_sums[row] + totals[row];
                totals[row] = __builtin_convertvector(dot, Floats) * (scales * x_scales[row]) + totals[row];
            };
            multiply_group<BITS, GROUP, IS_E2M1, ROWS>(group + SCALE_BYTES + 4 * part, q, sums_of_q, add);
            group += GROUP_BYTES;
            q += ROWS * (GROUP + ROW_SUMS_BYTES);
        }
        for (int row = 0; row < ROWS; ++row)
            ::store(sums + BLOCK * row + part, totals[row]);
    }
}

using SumTile = void (*)(const uint8_t *, const int8_t *, int64_t, float *, Prefetch);

template <int BITS, int GROUP, bool IS_E2M1, int... ROWS_LESS_1>
SumTile of_rows(int64_t rows, std::integer_sequence<int, ROWS_LESS_1...>) {
    static constexpr SumTile tiles[] = {sum_tile<BITS, GROUP, IS_E2M1, ROWS_LESS_1 + 1>...};
    return tiles[rows - 1];
}

SumTile sum_tile_of(int64_t bits, int64_t group_size, bool is_e2m1, int64_t rows) {
    constexpr auto all = std::make_integer_sequence<int, MAX_ROWS>();
    if (is_e2m1) return group_size == 32 ? of_rows<4, 32, true>(rows, all) : of_rows<4, 16, true>(rows, all);
    if (bits == 4) return group_size == 32 ? of_rows<4, 32, false>(rows, all) : of_rows<4, 16, false>(rows, all);
    return group_size == 32 ? of_rows<8, 32, false>(rows, all) : of_rows<8, 16, false>(rows, all);
}

// Quantises one row of a tile of `rows` rows. The sum of a group that is not finite is NaN, so its results are NaN.
void quantise_row(const void *values, Type type, int64_t num_groups, int64_t group_size, int64_t row, int64_t rows,
                  int8_t *tile) {
    const Floats shifter = all(0x1.8p23f);  // a sum with it is a whole number, in its lowest bits
    const int num_vectors = static_cast<int>(group_size / LANES);
    for (int64_t g = 0; g < num_groups; ++g) {
        int8_t *q = tile + g * rows * (group_size + ROW_SUMS_BYTES);
        Floats x[32 / LANES], largest = {}, sums = {};  // sums of whole numbers below 2^24 are exact
        for (int i = 0; i < num_vectors; ++i) {
            x[i] = load(values, type, g * group_size + i * LANES);
            largest = larger(x[i] < 0.0f ? -x[i] : x[i], largest);
        }
        const float top = largest_of(largest), inverse = top > 0.0f ? 127.0f / top : 0.0f;
        for (int i = 0; i < num_vectors; ++i) {
            const Floats shifted = x[i] * inverse + shifter;
            const Bits8 bytes = lowest_8((Bits)shifted - (Bits)shifter);
            std::memcpy(q + row * group_size + i * LANES, &bytes, sizeof bytes);
            sums += shifted - shifter;
        }
        float *scales = reinterpret_cast<float *>(q + rows * group_size);
        scales[row] = top / 127.0f;
        const float sum_of_q = sum_of(sums);
        const int32_t whole = std::abs(sum_of_q) <= 127.0f * 32 ? static_cast<int32_t>(sum_of_q) : 0;  // 0 for NaN
        scales[rows + row] = top / 127.0f * sum_of_q;
        std::memcpy(scales + 2 * rows + row, &whole, sizeof whole);
    }
}

}  // namespace

extern "C" {

struct GroupedLayer {
    const uint8_t *weights;  // packed
    const float *bias;       // or null
    int64_t num_outputs, num_inputs, bits, group_size, is_e2m1;
    double factor;
};

// Bytes of packed weights.
int64_t grouped_packed_bytes(int64_t num_outputs, int64_t num_inputs, int64_t bits, int64_t group_size) {
    const int64_t blocks = (num_outputs + BLOCK - 1) / BLOCK, groups = num_inputs / group_size;
    return blocks * groups * (SCALE_BYTES + BLOCK * group_size * bits / 8);
}

// Packs values [outputs][inputs], one per byte, and scales and mins [outputs][groups], already divided by `factor` and
// rounded to float16.
void grouped_pack(const uint8_t *values, const uint16_t *scales, const uint16_t *mins, int64_t num_outputs,
                  int64_t num_inputs, int64_t bits, int64_t group_size, uint8_t *packed, int64_t num_threads) {
    const int64_t groups = num_inputs / group_size, group_bytes = SCALE_BYTES + BLOCK * group_size * bits / 8;
    parallel_for((num_outputs + BLOCK - 1) / BLOCK, 1, static_cast<int>(num_threads), [&](int64_t begin, int64_t end) {
        std::memset(packed + begin * groups * group_bytes, 0, (end - begin) * groups * group_bytes);
        for (int64_t output = begin * BLOCK; output < std::min(end * BLOCK, num_outputs); ++output) {
            const int64_t lane = output % BLOCK;
            for (int64_t g = 0; g < groups; ++g) {
                uint8_t *group = packed + (output / BLOCK * groups + g) * group_bytes;
                std::memcpy(group + 2 * lane, scales + output * groups + g, 2);
                std::memcpy(group + 2 * (BLOCK + lane), mins + output * groups + g, 2);
                const uint8_t *from = values + output * num_inputs + g * group_size;
                uint8_t *to = group + SCALE_BYTES + 4 * lane;
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
    const int64_t block_bytes = groups * (SCALE_BYTES + BLOCK * group_size * layer->bits / 8);
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
                    quantise_row(from.row(first + tiles.begin(tile) + row), from.type, groups, group_size, row,
                                 tiles.size(tile), quantised + tiles.begin(tile) * row_bytes);
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
                    const SumTile sum = sum_tile_of(layer->bits, group_size, layer->is_e2m1 != 0, rows);
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
