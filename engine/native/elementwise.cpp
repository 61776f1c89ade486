// What a decoder layer computes besides products and attention, each in one pass. Rows are contiguous, and arithmetic
// is in float32. A row's result depends only on this row.
//
// Shape suffixes: T tokens, P pairs of a token and one of its experts, E hidden size, I intermediate size, V vocabulary
// (this rank's share).

#include "parallel.h"
#include "vectors.h"

namespace {

constexpr int64_t GRAIN = 8192;  // elements that are worth another thread

int64_t rows_per_grain(int64_t width) { return std::max<int64_t>(1, GRAIN / width); }

// Calls `call` with a null pointer of the type.
template <typename Call>
void with_type(int64_t type, const Call &call) {
    if (type == FLOAT32) call(static_cast<float *>(nullptr));
    if (type == BFLOAT16) call(static_cast<BFloat16 *>(nullptr));
    if (type == FLOAT16) call(static_cast<Float16 *>(nullptr));
}

// Calls `call` with null pointers of the types of activations and of a norm's weights: the same type, or float32.
template <typename Call>
void with_types(int64_t type, int64_t weight_type, const Call &call) {
    with_type(type, [&](auto *element) {
        if (weight_type == FLOAT32) call(element, static_cast<float *>(nullptr));
        else call(element, element);
    });
}

// residual += branch if there is a branch; out = residual / rms(residual) x weight.
template <typename Element, typename Weight>
void norm_row(const Element *branch_E, Element *residual_E, const Weight *weight_E, Element *out_E, int64_t width,
              float eps) {
    Floats squares = {};
    for (int64_t i = 0; i < width; i += LANES) {
        const int64_t rest = width - i;
        if (branch_E) store_some(residual_E + i, load_some(residual_E + i, rest) + load_some(branch_E + i, rest), rest);
        const Floats x = load_some(residual_E + i, rest);
        squares += x * x;
    }
    const float scale = 1.0f / std::sqrt(sum_of(squares) / static_cast<float>(width) + eps);
    for (int64_t i = 0; i < width; i += LANES) {
        const int64_t rest = width - i;
        store_some(out_E + i, load_some(residual_E + i, rest) * scale * load_some(weight_E + i, rest), rest);
    }
}

// residual += x / rms(x) x weight.
template <typename Element, typename Weight>
void add_normed_row(const Element *x_E, Element *residual_E, const Weight *weight_E, int64_t width, float eps) {
    Floats squares = {};
    for (int64_t i = 0; i < width; i += LANES) {
        const Floats x = load_some(x_E + i, width - i);
        squares += x * x;
    }
    const float scale = 1.0f / std::sqrt(sum_of(squares) / static_cast<float>(width) + eps);
    for (int64_t i = 0; i < width; i += LANES) {
        const int64_t rest = width - i;
        const Floats normed = load_some(x_E + i, rest) * scale * load_some(weight_E + i, rest);
        store_some(residual_E + i, load_some(residual_E + i, rest) + normed, rest);
    }
}

// out_TI = combined(gate, up), where gate_up_TM has T rows of I gates and then I ups.
template <typename Combined>
void gate_mul(int64_t type, const void *gate_up_TM, void *out_TI, int64_t num_tokens, int64_t width, int num_threads,
              const Combined &combined) {
    with_type(type, [&](auto *element) {
        using Element = std::remove_pointer_t<decltype(element)>;
        parallel_for(num_tokens, rows_per_grain(width), num_threads, [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; ++t) {
                const Element *gate = static_cast<const Element *>(gate_up_TM) + t * 2 * width, *up = gate + width;
                Element *out = static_cast<Element *>(out_TI) + t * width;
                for (int64_t i = 0; i < width; i += LANES) {
                    const int64_t rest = width - i;
                    store_some(out + i, combined(load_some(gate + i, rest), load_some(up + i, rest)), rest);
                }
            }
        }, parts_for_guests(num_tokens * 3 * width * sizeof(Element)));
    });
}

}  // namespace

extern "C" {

// out_TE = RMSNorm of residual_TE, to which branch_TE is added first; branch_TE may be null.
void baton_add_rms_norm(int64_t type, int64_t weight_type, const void *branch_TE, void *residual_TE,
                        const void *weight_E, void *out_TE, int64_t num_tokens, int64_t width, float eps,
                        int num_threads) {
    with_types(type, weight_type, [&](auto *element, auto *weight) {
        using Element = std::remove_pointer_t<decltype(element)>;
        using Weight = std::remove_pointer_t<decltype(weight)>;
        const auto *branch = static_cast<const Element *>(branch_TE);
        auto *residual = static_cast<Element *>(residual_TE), *out = static_cast<Element *>(out_TE);
        parallel_for(num_tokens, rows_per_grain(width), num_threads, [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; ++t)
                norm_row(branch ? branch + t * width : nullptr, residual + t * width,
                         static_cast<const Weight *>(weight_E), out + t * width, width, eps);
        }, parts_for_guests(num_tokens * 4 * width * sizeof(Element)));
    });
}

// residual_TE += RMSNorm of x_TE.
void baton_add_normed(int64_t type, int64_t weight_type, const void *x_TE, void *residual_TE, const void *weight_E,
                      int64_t num_tokens, int64_t width, float eps, int num_threads) {
    with_types(type, weight_type, [&](auto *element, auto *weight) {
        using Element = std::remove_pointer_t<decltype(element)>;
        using Weight = std::remove_pointer_t<decltype(weight)>;
        const auto *x = static_cast<const Element *>(x_TE);
        auto *residual = static_cast<Element *>(residual_TE);
        parallel_for(num_tokens, rows_per_grain(width), num_threads, [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; ++t)
                add_normed_row(x + t * width, residual + t * width, static_cast<const Weight *>(weight_E), width, eps);
        }, parts_for_guests(num_tokens * 3 * width * sizeof(Element)));
    });
}

void baton_gate_mul_silu(int64_t type, const void *gate_up_TM, void *out_TI, int64_t num_tokens, int64_t width,
                    int num_threads) {
    gate_mul(type, gate_up_TM, out_TI, num_tokens, width, num_threads,
             [](Floats x, Floats up) { return silu(x) * up; });
}

// GELU by its approximation: x / (1 + e^-2u), where u = sqrt(2 / pi) (x + 0.044715 x^3).
void baton_gate_mul_gelu(int64_t type, const void *gate_up_TM, void *out_TI, int64_t num_tokens, int64_t width,
                    int num_threads) {
    constexpr float FIRST = 1.5957691216f, THIRD = 0.0713548163f;  // factors of x and x^3 in 2u
    gate_mul(type, gate_up_TM, out_TI, num_tokens, width, num_threads,
             [](Floats x, Floats up) { return x / (1.0f + exp2(x * (x * x * -(LOG2_E * THIRD) - LOG2_E * FIRST))) * up; });
}

// The activation of gpt-oss: (up + 1) x / (1 + e^(-alpha x)), where x is the gate. First, gates are clamped to at
// most `limit`, and ups to -limit .. limit. NaN stays.
void baton_gate_mul_swiglu(int64_t type, const void *gate_up_TM, void *out_TI, int64_t num_tokens, int64_t width,
                      int num_threads, float alpha, float limit) {
    const float rate = -LOG2_E * alpha;
    const Floats most = all(limit), least = all(-limit);
    gate_mul(type, gate_up_TM, out_TI, num_tokens, width, num_threads, [=](Floats x, Floats up) {
        x = x > most ? most : x;
        up = up > most ? most : up;
        up = up < least ? least : up;
        return (up + 1.0f) * (x / (1.0f + exp2(x * rate)));
    });
}

// out_TE = rows of weight_VE, which begins with the row of token `first_token`; zeros for tokens of other ranks.
void baton_embed(int64_t element_bytes, const int64_t *ids_T, const void *weight_VE, void *out_TE, int64_t num_tokens,
                 int64_t width, int64_t first_token, int64_t num_rows, int num_threads) {
    const int64_t row_bytes = width * element_bytes;
    parallel_for(num_tokens, rows_per_grain(width), num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            const int64_t row = ids_T[t] - first_token;
            char *out = static_cast<char *>(out_TE) + t * row_bytes;
            if (row >= 0 && row < num_rows)
                std::memcpy(out, static_cast<const char *>(weight_VE) + row * row_bytes, row_bytes);
            else
                std::memset(out, 0, row_bytes);
        }
    }, parts_for_guests(num_tokens * 2 * row_bytes));
}

// out_TE[t] = the sum of weights_P[p] x y_PE[p] over the pairs p of token t, in the order of the pairs.
void baton_sum_pairs(int64_t type, const void *y_PE, const int64_t *tokens_P, const float *weights_P, void *out_TE,
                     int64_t num_pairs, int64_t num_tokens, int64_t width, int num_threads) {
    std::vector<int64_t> ends(num_tokens), by_token(num_pairs);
    for (int64_t p = 0; p < num_pairs; ++p) ++ends[tokens_P[p]];
    std::partial_sum(ends.begin(), ends.end(), ends.begin());
    for (int64_t p = num_pairs; p-- > 0;) by_token[--ends[tokens_P[p]]] = p;  // now `ends` are the tokens' first pairs
    ends.push_back(num_pairs);
    with_type(type, [&](auto *element) {
        using Element = std::remove_pointer_t<decltype(element)>;
        const Element *y = static_cast<const Element *>(y_PE);
        parallel_for(num_tokens, rows_per_grain(width), num_threads, [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; ++t) {
                const int64_t *first = by_token.data() + ends[t], *last = by_token.data() + ends[t + 1];
                for (int64_t i = 0; i < width; i += LANES) {
                    Floats sum = {};
                    for (const int64_t *p = first; p < last; ++p)
                        sum = fused(load_some(y + *p * width + i, width - i), all(weights_P[*p]), sum);
                    store_some(static_cast<Element *>(out_TE) + t * width + i, sum, width - i);
                }
            }
        }, parts_for_guests((num_pairs + num_tokens) * width * sizeof(Element)));
    });
}

}  // extern "C"
