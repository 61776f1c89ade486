// Units in which queries, keys and values are multiplied: float32 or pairs of bfloat16; and small matrix products of
// these units.
//
// Decodes and chunks multiply in the same units, and add up in the same order: a score over the depth, a result over
// the keys. So a query gets the same bits either way. If matrix units multiply chunks, decodes add up in the order of
// matrix units.

#pragma once

#include <type_traits>

#include "attention_step.h"
#include "matrix_units.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
constexpr bool HAS_PAIRS = true;
#else
constexpr bool HAS_PAIRS = false;
#endif

// Two bfloat16 that are multiplied by two others in one operation: twice the rate of float32. Sums are in float32.
struct Pair {
    uint32_t bits;  // the first is in the lower half
};

template <typename Unit>
constexpr int64_t PER_UNIT = std::is_same_v<Unit, Pair> ? 2 : 1;

template <typename Unit>
constexpr bool BY_MATRIX_UNITS = std::is_same_v<Unit, Pair> && matrix_units::ARE_THERE;

inline Floats broadcast(float a) { return all(a); }
inline Floats vector_of(const float *b) { return load(b); }
inline Floats multiply_add(Floats a, Floats b, Floats sum, float) { return fused(a, b, sum); }
#if defined(__AVX512BF16__)
inline Floats broadcast(Pair a) { return (Floats)all_bits(a.bits); }
inline Floats vector_of(const Pair *b) { return load(reinterpret_cast<const float *>(b)); }
inline Floats multiply_add(Floats a, Floats b, Floats sum, Pair) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#endif

struct Nothing {
    void operator()() const {}
};

// c[i][j] (+)= sum over k of a[i x a_row + k x a_step] b[k][j], for `rows` x (`cols` x LANES) of c, in registers.
// `meanwhile` is called for every k.
template <int rows, int cols, bool adds, typename Unit, typename Meanwhile = Nothing>
inline void product(const Unit *a, int64_t a_row, int64_t a_step, const Unit *b, int64_t b_step, float *c, int64_t c_row,
                    int64_t depth, Meanwhile meanwhile = {}) {
    Floats sums[rows][cols];
    for (int i = 0; i < rows; ++i)
        for (int j = 0; j < cols; ++j) sums[i][j] = adds ? load(c + i * c_row + j * LANES) : Floats{};
    for (int64_t k = 0; k < depth; ++k, a += a_step, b += b_step) {
        meanwhile();
        Floats b_k[cols];
        for (int j = 0; j < cols; ++j) b_k[j] = vector_of(b + j * LANES);
        for (int i = 0; i < rows; ++i) {
            const Floats a_i = broadcast(a[i * a_row]);
            for (int j = 0; j < cols; ++j) sums[i][j] = multiply_add(a_i, b_k[j], sums[i][j], Unit{});
        }
    }
    for (int i = 0; i < rows; ++i)
        for (int j = 0; j < cols; ++j) store(c + i * c_row + j * LANES, sums[i][j]);
}

// c[i][j] (+)= the sum in the order of matrix units, for rows and columns of bfloat16 values. The sums of even and of
// odd k begin anew with every step of 32.
template <int rows, int cols, bool adds, typename Vectors, typename Meanwhile = Nothing>
inline void product_in_steps(const float *a, int64_t a_row, const Vectors &b, float *c, int64_t c_row, int64_t depth,
                             Meanwhile meanwhile = {}) {
    for (int64_t first = 0; first < depth; first += matrix_units::STEP) {
        Floats sums[2][rows][cols] = {};
        for (int64_t k = first; k < std::min(first + matrix_units::STEP, depth); k += 2)
            for (int odd = 0; odd < 2; ++odd) {
                meanwhile();
                for (int j = 0; j < cols; ++j) {
                    const Floats b_k = b(k + odd, j);
                    for (int i = 0; i < rows; ++i)
                        sums[odd][i][j] = fused(all(a[i * a_row + k + odd]), b_k, sums[odd][i][j]);
                }
            }
        for (int i = 0; i < rows; ++i)
            for (int j = 0; j < cols; ++j) {
                float *to = c + i * c_row + j * LANES;
                const Floats sum = sums[0][i][j] + sums[1][i][j];
                store(to, adds || first > 0 ? load(to) + sum : sum);
            }
    }
}

inline Floats paired(Floats first, Floats second) {  // of values that bfloat16 holds exactly
    return (Floats)((Bits)first >> 16 | ((Bits)second & 0xffff0000));
}

inline Floats rounded_to_bfloat16(Floats v) {  // to nearest, ties to even; NaN stays
    const Bits x = (Bits)v;
    return (Floats)((x + 0x7fff + (x >> 16 & 1)) & 0xffff0000);
}

// tanh(scores x scale): 1 - 2 / (e^2x + 1).
inline Floats tanh_of(Floats scores, float scale) {
    return 1.0f - 2.0f / (exp2(scores * (2.0f * LOG2_E * scale)) + 1.0f);
}

// The score to which a row's weights will be relative, if `most` is the largest score. It changes only if weights could
// become large, since a change costs a multiplication of all earlier results.
inline Floats next_reference(Floats reference, Floats most, float scale) {
    constexpr float MOST_POWER = 8.0f;
    return (most - reference) * scale > all(MOST_POWER) ? most : reference;
}

// A reference times the scale. NaN if it is so large that its rounding would change weights by powers of 2: a model's
// wrong numbers must show. Rows that see no key yet have no score.
inline Floats scaled_reference(Floats reference, Floats most, float scale) {
    const Floats scaled = reference * scale, power = fused(most, all(scale), -scaled);
    return (power > all(64.0f)) & (most > all(LEAST_SCORE)) ? all(NAN) : scaled;
}

// The weights of scores, as powers of 2, relative to a reference.
inline Floats weight_of(Floats scores, float scale, Floats scaled_reference) {
    return exp2_up_to_127(fused(scores, all(scale), -scaled_reference));
}
