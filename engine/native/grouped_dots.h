// Dots: sums of products of bytes, for the outputs of one vector and one row, in the best way for each machine.
//
// `Bytes` are 4 inputs of each output: values u of 4 or 8 bits, one per byte. `four` returns the same inputs of a row,
// q, once for each output. A dot adds sum((u - OFFSET) * q). If CAN_BEGIN, its sums may begin with any number of 32
// bits.

#pragma once

#include <type_traits>

#include "vectors.h"

namespace grouped_dots {

// The same table as in engine/layers/grouped_weight.py: floats of 4 bits, in halves, plus 12.
alignas(16) inline constexpr uint8_t E2M1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

inline int32_t word_at(const int8_t *x) {
    int32_t word;
    std::memcpy(&word, x, 4);
    return word;
}

// Bytes of a vector register, and their products with the 4 bytes of a row that all outputs share. Sums of 16 bits must
// stay below 2^15: they hold 8 steps of values up to 15, but only 4 steps of E2M1's values up to 24.
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
inline Bytes four(const int8_t *x) { return _mm512_set1_epi32(word_at(x)); }
#if defined(__AVX512VNNI__)
template <int BITS> struct Dot {
    static constexpr int OFFSET = 0;
    static constexpr bool CAN_BEGIN = true;
    Bytes sums = _mm512_setzero_si512();
    void begin(Ints first) { sums = (Bytes)first; }
    void add(Bytes u, Bytes x) { sums = _mm512_dpbusd_epi32(sums, u, x); }
    Ints total() const { return (Ints)(sums); }
};
#else
// Sums of 16 bits, of at most 4 steps.
struct Dot4 {
    static constexpr int OFFSET = 0;
    static constexpr bool CAN_BEGIN = false;
    Bytes sums = _mm512_setzero_si512();
    void add(Bytes u, Bytes x) { sums = _mm512_add_epi16(sums, _mm512_maddubs_epi16(u, x)); }
    Ints total(int16_t factor = 1) const { return (Ints)(_mm512_madd_epi16(sums, _mm512_set1_epi16(factor))); }
};
// Products of 8 bits would exceed the 16 bits of their sums; products of their halves do not.
struct Dot8 {
    static constexpr int OFFSET = 0;
    static constexpr bool CAN_BEGIN = false;
    Dot4 low, high;
    void add(Bytes u, Bytes x) {
        low.add(low_nibbles(u), x);
        high.add(high_nibbles(u), x);
    }
    Ints total() const { return low.total() + high.total(16); }
};
template <int BITS> using Dot = std::conditional_t<BITS == 4, Dot4, Dot8>;
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
inline Bytes four(const int8_t *x) { return _mm256_set1_epi32(word_at(x)); }
struct Dot4 {
    static constexpr int OFFSET = 0;
    static constexpr bool CAN_BEGIN = false;
    Bytes sums = _mm256_setzero_si256();
    void add(Bytes u, Bytes x) {
        sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(u, x));
        asm("" : "+x"(sums));  // else GCC 12 keeps all products of an unrolled loop in memory, and adds them later
    }
    Ints total() const { return (Ints)(_mm256_madd_epi16(sums, _mm256_set1_epi16(1))); }
};
// sum((u - 128) * q). Two products, of at most 128 * 127, fit into 16 bits.
struct Dot8 {
    static constexpr int OFFSET = 128;
    static constexpr bool CAN_BEGIN = true;
    Bytes sums = _mm256_setzero_si256();
    void begin(Ints first) { sums = (Bytes)first; }
    void add(Bytes u, Bytes x) {
        const Bytes less = _mm256_xor_si256(u, _mm256_set1_epi8(-128));
        const Bytes products = _mm256_maddubs_epi16(_mm256_abs_epi8(less), _mm256_sign_epi8(x, less));
        sums = _mm256_add_epi32(sums, _mm256_madd_epi16(products, _mm256_set1_epi16(1)));
    }
    Ints total() const { return (Ints)sums; }
};
template <int BITS> using Dot = std::conditional_t<BITS == 4, Dot4, Dot8>;

#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int MAX_ROWS = 8;
constexpr bool FEW_REGISTERS = false;
using Bytes = uint8x16_t;
inline Bytes load_bytes(const uint8_t *bytes) { return vld1q_u8(bytes); }
inline Bytes low_nibbles(Bytes v) { return vandq_u8(v, vdupq_n_u8(15)); }
inline Bytes high_nibbles(Bytes v) { return vshrq_n_u8(v, 4); }
inline Bytes from_e2m1(Bytes v) { return vqtbl1q_u8(vld1q_u8(E2M1), v); }
inline int8x16_t four(const int8_t *x) { return vreinterpretq_s8_s32(vdupq_n_s32(word_at(x))); }
// The instruction takes signed bytes, so 128 is subtracted from values of 8 bits.
template <int BITS> struct Dot {
    static constexpr int OFFSET = BITS == 8 ? 128 : 0;
    static constexpr bool CAN_BEGIN = true;
    int32x4_t sums = vdupq_n_s32(0);
    void begin(Ints first) { sums = (int32x4_t)first; }
    void add(Bytes u, int8x16_t x) {
        if constexpr (BITS == 8) u = veorq_u8(u, vdupq_n_u8(128));
        sums = vdotq_s32(sums, vreinterpretq_s8_u8(u), x);
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
    static constexpr int OFFSET = 0;
    static constexpr bool CAN_BEGIN = true;
    Ints sums = {};
    void begin(Ints first) { sums = first; }
    void add(const Bytes &u, const int8_t *x) {
        for (int lane = 0; lane < LANES; ++lane)
            for (int i = 0; i < 4; ++i) sums[lane] += u.values[4 * lane + i] * x[i];
    }
    Ints total() const { return sums; }
};
#endif

}  // namespace grouped_dots
