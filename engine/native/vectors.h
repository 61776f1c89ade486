// Vectors of float32 as wide as the machine's registers, loaded from and stored to every type of activations and KV.
//
// GCC's and Clang's vector extensions: operators work lane by lane, a comparison gives 0 or -1 in each lane, and a cast
// between vectors of one size keeps the bits. Every function here keeps NaN and infinity, so that a model's wrong
// numbers show in its logits.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Bits __attribute__((vector_size(LANES * 4)));
typedef uint16_t Bits16 __attribute__((vector_size(LANES * 2)));
typedef uint8_t Bits8 __attribute__((vector_size(LANES)));

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};
struct Float8 {  // float8_e4m3fn: 1 bit of sign, 4 of exponent, 3 of mantissa; no infinity
    uint8_t bits;
};

enum Type : int64_t { FLOAT32, BFLOAT16, FLOAT16, FLOAT8 };  // as in engine/native/types.py

template <typename Vector, typename Element>
inline Vector load_raw(const Element *from) {
    Vector v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

inline Floats all(float x) { return x - Floats{}; }  // `x + Floats{}` would be slower: a compiler must keep the addition of 0
inline Bits all_bits(uint32_t x) { return Bits{} + x; }

// Integers of other widths, in one instruction or a few. For a conversion that is written with vector types, GCC 12
// makes six instructions, and more than thirty if it is a conversion to bytes.
#if defined(__AVX512F__)
inline Bits widened(Bits16 x) { return (Bits)_mm512_cvtepu16_epi32((__m256i)x); }
inline Bits widened(Bits8 x) { return (Bits)_mm512_cvtepu8_epi32((__m128i)x); }
inline Bits16 lowest_16(Bits x) { return (Bits16)_mm512_cvtepi32_epi16((__m512i)x); }
inline Bits8 lowest_8(Bits x) { return (Bits8)_mm512_cvtepi32_epi8((__m512i)x); }
#elif defined(__AVX2__)
inline Bits widened(Bits16 x) { return (Bits)_mm256_cvtepu16_epi32((__m128i)x); }
inline Bits widened(Bits8 x) { return (Bits)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)x)); }
inline Bits16 lowest_16(Bits x) { return __builtin_convertvector(x, Bits16); }
inline Bits8 lowest_8(Bits x) {
    const __m256i lowest = _mm256_set1_epi32(12 << 24 | 8 << 16 | 4 << 8);
    const __m256i bytes = _mm256_shuffle_epi8((__m256i)x, lowest);  // in each half, four copies of its four bytes
    return (Bits8)_mm_cvtsi128_si64(_mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)));
}
#else
template <typename Narrow> inline Bits widened(Narrow x) { return __builtin_convertvector(x, Bits); }
inline Bits16 lowest_16(Bits x) { return __builtin_convertvector(x, Bits16); }
inline Bits8 lowest_8(Bits x) { return __builtin_convertvector(x, Bits8); }
#endif

inline Floats load(const float *from) { return load_raw<Floats>(from); }

inline Floats load(const BFloat16 *from) { return (Floats)(widened(load_raw<Bits16>(from)) << 16); }

// The exponent and mantissa of a smaller float are moved to the places of float32. Then the exponent is too small by
// the difference of the biases. The product corrects this, also for subnormal numbers. For float16 there may be an
// instruction.
inline Floats load(const Float16 *from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps((__m256i)load_raw<Bits16>(from));
#elif defined(__F16C__) && defined(__AVX2__)
    return (Floats)_mm256_cvtph_ps((__m128i)load_raw<Bits16>(from));
#else
    const Bits x = widened(load_raw<Bits16>(from)), magnitude = x & 0x7fff;
    const Bits finite = (Bits)((Floats)(magnitude << 13) * all(0x1p112f));
    const Bits special = magnitude << 13 | 0x7f800000;  // infinity and NaN
    return (Floats)((magnitude >= all_bits(0x7c00) ? special : finite) | (x & 0x8000) << 16);
#endif
}

inline Floats load(const Float8 *from) {
    // The exponent's bias differs by 120. Subnormal numbers have the least exponent, and no leading 1. They do not
    // become subnormal numbers of float32, which may count as 0.
    const Bits x = widened(load_raw<Bits8>(from)), magnitude = x & 0x7f, normal = (magnitude << 20) + (120u << 23);
    const Bits subnormal = (Bits)((Floats)(normal + (1u << 23)) - all(0x1p-6f));
    const Bits finite = magnitude < all_bits(8) ? subnormal : normal;
    return (Floats)((magnitude == all_bits(0x7f) ? all_bits(0x7fc00000) : finite) | (x & 0x80) << 24);
}

inline void store(float *to, Floats v) { std::memcpy(to, &v, sizeof v); }

// All stores round to nearest, ties to even.
inline void store(BFloat16 *to, Floats v) {
    const Bits x = (Bits)v, rounded = (x + 0x7fff + (x >> 16 & 1)) >> 16;
    const Bits16 result = lowest_16(v != v ? all_bits(0x7fc0) : rounded);
    std::memcpy(to, &result, sizeof result);
}

// The bits of a float with `mantissa` bits of mantissa and the given bias, for magnitudes that it can represent.
// Adding `magic` moves a subnormal number's mantissa to the lowest bits, and rounds it.
template <int mantissa, int bias>
inline Bits narrowed(Bits magnitude) {
    constexpr int shift = 23 - mantissa;
    constexpr uint32_t rebias = static_cast<uint32_t>(bias - 127) << 23;
    const Bits normal = (magnitude + rebias + ((1u << (shift - 1)) - 1) + (magnitude >> shift & 1)) >> shift;
    const Floats magic = (Floats)all_bits((127 - bias + shift + 1) << 23);
    const Bits subnormal = (Bits)((Floats)magnitude + magic) - (Bits)magic;
    return magnitude < all_bits((128 - bias) << 23) ? subnormal : normal;
}

inline void store(Float16 *to, Floats v) {
    const Bits x = (Bits)v, magnitude = x & 0x7fffffff;
    const Bits special = v != v ? all_bits(0x7e00) : all_bits(0x7c00);
    const Bits result = magnitude >= (Bits)all(65520.0f) ? special : narrowed<10, 15>(magnitude);
    const Bits16 bits = lowest_16(result | (x >> 16 & 0x8000));
    std::memcpy(to, &bits, sizeof bits);
}

// Values beyond +-448 become +-448.
inline void store(Float8 *to, Floats v) {
    const Bits x = (Bits)v, magnitude = x & 0x7fffffff;
    const Bits special = v != v ? all_bits(0x7f) : all_bits(0x7e);
    const Bits result = magnitude >= (Bits)all(448.0f) ? special : narrowed<3, 7>(magnitude);
    const Bits8 bits = lowest_8(result | (x >> 24 & 0x80));
    std::memcpy(to, &bits, sizeof bits);
}

// The first `count` lanes; all other lanes are 0.
template <typename Element>
inline Floats load_some(const Element *from, int64_t count) {
    if (count >= LANES) return load(from);
    Element padded[LANES] = {};
    std::memcpy(padded, from, count * sizeof(Element));
    return load(padded);
}

template <typename Element>
inline void store_some(Element *to, Floats v, int64_t count) {
    if (count >= LANES) return store(to, v);
    Element padded[LANES];
    store(padded, v);
    std::memcpy(to, padded, count * sizeof(Element));
}

// Like store, but subnormal numbers may become 0. This saves most of the work if there is an instruction for it.
template <typename Element>
inline void store_normal(Element *to, Floats v) {
    store(to, v);
}
#if defined(__AVX512BF16__)
template <>
inline void store_normal(BFloat16 *to, Floats v) {
    const __m256bh result = _mm512_cvtneps_pbh((__m512)v);
    std::memcpy(to, &result, sizeof result);
}
#endif

// One instruction each. If one argument is NaN, the result is the second argument.
#if defined(__AVX512F__)
inline Floats larger(Floats a, Floats b) { return (Floats)_mm512_max_ps((__m512)a, (__m512)b); }
inline Floats smaller(Floats a, Floats b) { return (Floats)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined(__AVX2__)
inline Floats larger(Floats a, Floats b) { return (Floats)_mm256_max_ps((__m256)a, (__m256)b); }
inline Floats smaller(Floats a, Floats b) { return (Floats)_mm256_min_ps((__m256)a, (__m256)b); }
#else
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
#endif

// a x b + c, rounded once if the machine can. Two pieces of code must give the same bits, but what a compiler makes
// of `a * b + c` depends on the code around it.
inline Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// Combines all lanes: the first half of the lanes with the second half, and so on until one lane remains.
template <typename Combine>
inline float folded(Floats v, const Combine &combine) {
    typedef float Floats4 __attribute__((vector_size(16)));
    typedef float Floats8 __attribute__((vector_size(32)));
#if defined(__AVX512F__)
    const Floats8 x = combine((Floats8)_mm512_castps512_ps256((__m512)v), (Floats8)_mm512_extractf32x8_ps((__m512)v, 1));
#elif defined(__AVX2__)
    const Floats8 x = v;
#endif
#if defined(__AVX2__)
    const Floats4 y = combine((Floats4)_mm256_castps256_ps128((__m256)x), (Floats4)_mm256_extractf128_ps((__m256)x, 1));
#else
    const Floats4 y = v;
#endif
    return combine(combine(y[0], y[2]), combine(y[1], y[3]));
}

inline float sum_of(Floats v) {
    return folded(v, [](auto a, auto b) { return a + b; });
}

// Lane i of the result is lane `lanes[i]` of a and b side by side.
template <int... lanes>
inline Floats shuffled(Floats a, Floats b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, lanes...);
#else
    return __builtin_shuffle(a, b, Ints{lanes...});
#endif
}

// Exchanges the lanes of a whose numbers have the bit `WIDTH` for the lanes of b whose numbers do not have it.
template <int WIDTH, size_t... lane>
inline void exchange(Floats &a, Floats &b, std::index_sequence<lane...>) {
    const Floats first = shuffled<(lane & WIDTH ? LANES + lane - WIDTH : lane)...>(a, b);
    b = shuffled<(lane & WIDTH ? LANES + lane : lane + WIDTH)...>(a, b);
    a = first;
}

// Lane j of vector i becomes lane i of vector j.
template <int WIDTH = LANES / 2>
inline void transpose(Floats (&v)[LANES]) {
    for (int i = 0; i < LANES; ++i)
        if (!(i & WIDTH)) exchange<WIDTH>(v[i], v[i + WIDTH], std::make_index_sequence<LANES>());
    if constexpr (WIDTH > 1) transpose<WIDTH / 2>(v);
}

// Lane i of the result combines all lanes of vector i: first each lane with the one that lies LANES / 2 further, then
// half as far, and so on.
template <int WIDTH = LANES / 2, typename Combine>
inline Floats reduced(Floats (&v)[LANES], const Combine &combine) {
    for (int i = 0; i < WIDTH; ++i) {
        exchange<WIDTH>(v[i], v[i + WIDTH], std::make_index_sequence<LANES>());
        v[i] = combine(v[i], v[i + WIDTH]);
    }
    if constexpr (WIDTH > 1) return reduced<WIDTH / 2>(v, combine);
    return v[0];
}

inline float largest_of(Floats v) {
    return folded(v, [](auto a, auto b) { return a > b ? a : b; });
}

// 2 to the power of x, for x up to 127.5, or NaN; 0 below -126.5. The relative error is at most 1.7e-7. Of the
// polynomials of this degree that are 1 at 0, this one has the least relative error from -0.5 to 0.5.
inline Floats exp2_up_to_127(Floats x) {
    x = larger(all(-127.0f), x);  // NaN stays
    // Adding `magic` rounds to an integer. Its sum with 127, which is the exponent of the result, is then in the lowest bits.
    const Floats magic = all(0x1.8p23f + 127.0f), shifted = x + magic, f = x - (shifted - magic);
    Floats p = all(1.326472731e-3f);
    p = p * f + 9.671512991e-3f;
    p = p * f + 5.550733581e-2f;
    p = p * f + 2.402224243e-1f;
    p = p * f + 6.931470037e-1f;
    p = p * f + 1.0f;
    return p * (Floats)((Bits)shifted << 23);
}

// 2 to the power of any x; infinity above 127.5.
inline Floats exp2(Floats x) { return exp2_up_to_127(smaller(all(128.0f), x)); }

inline float exp2_of(float x) { return exp2(all(x))[0]; }

constexpr float LOG2_E = 1.44269504f;

inline Floats silu(Floats x) { return x / (1.0f + exp2(x * -LOG2_E)); }
