// Rows in signed bytes, with a scale for each group of 16 or 32 inputs.
//
// [tiles][groups] of [places of the tile][group_size] signed bytes; then for each place x_scale and x_scale * sum(q),
// float32, and the multiple of sum(q) that is added to its products' sums, int32.

#pragma once

#include "products.h"

#pragma GCC visibility push(hidden)  // as in products.h

namespace products {

constexpr int64_t ROW_SUMS_BYTES = 3 * 4;

// Quantizes one row of a tile of `rows` rows. `multiple` times a group's sum is added to the group's products. If a
// group is not finite, its scale is NaN, so its results are NaN.
inline void quantize_row(const void *values, Type type, int64_t num_groups, int64_t group_size, int64_t multiple,
                         int64_t row, int64_t rows, int8_t *tile) {
    const Floats shifter = all(0x1.8p23f);  // adding it rounds to a whole number, which is then in the lowest bits
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

}  // namespace products

#pragma GCC visibility pop
