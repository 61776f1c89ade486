// What the matrix products share: vectors of floats, rows in 32 or 16 bits, and what becomes of finished sums.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "parallel.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace products {

// Floats of one vector register, and the conversions that compilers have no operator for. BATON_PORTABLE is for tests: it
// compiles what other processors get.
#if defined(__AVX512F__) && defined(__AVX512BW__) && !defined(BATON_PORTABLE)
#define BATON_AVX512
constexpr int LANES = 16;
#define CONVERT_FROM_FLOAT16(halves) (Floats) _mm512_cvtph_ps((__m256i)(halves))
#define CONVERT_TO_FLOAT16(floats) (Shorts) _mm512_cvtps_ph((__m512)(floats), _MM_FROUND_TO_NEAREST_INT)
#elif defined(__AVX2__) && !defined(BATON_PORTABLE)
#define BATON_AVX2
constexpr int LANES = 8;
#define CONVERT_FROM_FLOAT16(halves) (Floats) _mm256_cvtph_ps((__m128i)(halves))
#define CONVERT_TO_FLOAT16(floats) (Shorts) _mm256_cvtps_ph((__m256)(floats), _MM_FROUND_TO_NEAREST_INT)
#elif defined(__aarch64__)
constexpr int LANES = 4;
#define CONVERT_FROM_FLOAT16(halves) (Floats) vcvt_f32_f16((float16x4_t)(halves))
#define CONVERT_TO_FLOAT16(floats) (Shorts) vcvt_f16_f32((float32x4_t)(floats))
#else
constexpr int LANES = 4;
#define CONVERT_FROM_FLOAT16(halves) (Floats) _mm_cvtph_ps(_mm_cvtsi64_si128((long long)(halves)))
#define CONVERT_TO_FLOAT16(floats) \
    (Shorts) _mm_cvtsi128_si64(_mm_cvtps_ph((__m128)(floats), _MM_FROUND_TO_NEAREST_INT))
#endif

// Compilers extend these types' operators to all lanes, and fuse a product with the sum that it is added to.
typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t Shorts __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int8_t Chars __attribute__((vector_size(LANES), aligned(1), may_alias));

enum Type : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

inline int64_t size_of(Type type) { return type == FLOAT32 ? 4 : 2; }

inline Floats from_float16(const void *halves) {
    Shorts loaded;
    std::memcpy(&loaded, halves, sizeof(loaded));
    return CONVERT_FROM_FLOAT16(loaded);
}

inline Shorts to_float16(Floats values) { return CONVERT_TO_FLOAT16(values); }

// To the nearest, ties to even; NaN stays NaN.
inline Shorts to_bfloat16(Floats values) {
    const Words bits = reinterpret_cast<Words>(values);
    const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Words quiet = (bits >> 16) | 0x40;
    return __builtin_convertvector(values == values ? rounded : quiet, Shorts);
}

// LANES values of a row, as floats.
inline Floats load(const void *row, Type type, int64_t index) {
    if (type == FLOAT32) return *reinterpret_cast<const Floats *>(static_cast<const float *>(row) + index);
    const uint16_t *halves = static_cast<const uint16_t *>(row) + index;
    if (type == FLOAT16) return from_float16(halves);
    return reinterpret_cast<Floats>(__builtin_convertvector(*reinterpret_cast<const Shorts *>(halves), Words) << 16);
}

inline void store(void *row, Type type, int64_t index, Floats values) {
    if (type == FLOAT32) {
        *reinterpret_cast<Floats *>(static_cast<float *>(row) + index) = values;
        return;
    }
    *reinterpret_cast<Shorts *>(static_cast<uint16_t *>(row) + index) =
        type == FLOAT16 ? to_float16(values) : to_bfloat16(values);
}

// The first `count` of LANES values.
inline void store(void *row, Type type, int64_t index, Floats values, int64_t count) {
    if (count >= LANES) return store(row, type, index, values);
    uint8_t buffer[4 * LANES];
    store(buffer, type, 0, values);
    std::memcpy(static_cast<char *>(row) + index * size_of(type), buffer, count * size_of(type));
}

// The first `count` of LANES values; zero beyond.
inline Floats load(const void *row, Type type, int64_t index, int64_t count) {
    if (count >= LANES) return load(row, type, index);
    uint8_t buffer[4 * LANES] = {};
    std::memcpy(buffer, static_cast<const char *>(row) + index * size_of(type), count * size_of(type));
    return load(buffer, type, 0);
}

// x / (1 + exp(-x)). The polynomial of exp is that of Cephes' expf, within 2 units of the last place.
inline Floats silu(Floats x) {
    Floats y = -x;
    y = y < -87.0f ? Floats{} - 87.0f : y;
    y = y > 88.0f ? Floats{} + 88.0f : y;
    const Floats shifter = Floats{} + 12582912.0f;  // 1.5 x 2^23: a sum with it is a whole number in its low bits
    const Floats shifted = y * 1.44269504088896341f + shifter;
    const Floats whole = shifted - shifter;
    const Floats r = (y - whole * 0.693359375f) - whole * -2.12194440e-4f;
    Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const Words exponent = reinterpret_cast<Words>(shifted) << 23;
    return x / (1.0f + reinterpret_cast<Floats>(reinterpret_cast<Words>(p) + exponent));
}

// What becomes of sums: y = sum, y += sum, or y = silu(first half of the outputs) * other half.
enum Epilogue : int64_t { STORE = 0, ADD = 1, GATE = 2 };

// T rows, which may lie apart.
struct Rows {
    void *values;
    int64_t stride;  // values from one row to the next
    Type type;

    void *row(int64_t index) const { return static_cast<char *>(values) + index * stride * size_of(type); }
};

// Finishes `width` (a multiple of LANES) sums of a row, of which `count` exist: outputs `first` and following.
inline void finish(const float *sums, const float *bias, int64_t width, int64_t count, void *row, Type type,
                   int64_t first, Epilogue epilogue) {
    for (int64_t at = 0; at < width && at < count; at += LANES) {
        Floats value = *reinterpret_cast<const Floats *>(sums + at);
        if (bias != nullptr) value += load(bias, FLOAT32, first + at, count - at);
        if (epilogue == ADD) value += load(row, type, first + at, count - at);
        store(row, type, first + at, value, count - at);
    }
}

// Finishes silu(gate) * up likewise.
inline void finish_gated(const float *gate, const float *up, const float *gate_bias, const float *up_bias,
                         int64_t width, int64_t count, void *row, Type type, int64_t first) {
    for (int64_t at = 0; at < width && at < count; at += LANES) {
        Floats g = *reinterpret_cast<const Floats *>(gate + at), u = *reinterpret_cast<const Floats *>(up + at);
        if (gate_bias != nullptr) {
            g += load(gate_bias, FLOAT32, first + at, count - at);
            u += load(up_bias, FLOAT32, first + at, count - at);
        }
        store(row, type, first + at, silu(g) * u, count - at);
    }
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

// Rows are computed in tiles of nearly equal size, at most `largest`: tile i begins at row i * rows / num_tiles.
struct Tiles {
    int64_t num_rows, count;

    Tiles(int64_t rows, int64_t largest) : num_rows(rows), count((rows + largest - 1) / largest) {}
    int64_t begin(int64_t tile) const { return num_rows * tile / count; }
    int64_t size(int64_t tile) const { return begin(tile + 1) - begin(tile); }
};

}  // namespace products
