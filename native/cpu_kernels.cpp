// Update rules of muon.kernels.plain in one pass over memory, with the bits of torch's operations.
//
// Where torch rounds a product and a sum once, fma() does so here. Nothing else may be fused:
// -ffp-contract=off ensures this.
//
// Addresses come from muon/kernels/cpu.py, which checks dtypes and layout. Tensors do not overlap.
// The kernels use torch's threads: OpenMP functions come from the library that torch has loaded.

#include <immintrin.h>
#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <tuple>

namespace nb = nanobind;

namespace {

constexpr std::int64_t kLanes = 8;
using Floats = __m256;  // Elements in float32.
using BFloat16 = std::uint16_t;

inline Floats load(const float *at) { return _mm256_loadu_ps(at); }

inline Floats load(const BFloat16 *at) {
    const auto bits = _mm_loadu_si128(reinterpret_cast<const __m128i *>(at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

// Returns bfloat16 in the upper halves of 32 bits, to nearest, ties to even: 0x3f808000 ->
// 0x3f800000, 0x3f818000 -> 0x3f820000.
inline __m256i rounded_bits(Floats values) {
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i raised =
        _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), is_odd);
    const Floats is_nan = _mm256_cmp_ps(values, values, _CMP_UNORD_Q);
    return _mm256_and_si256(
        _mm256_blendv_epi8(raised, _mm256_set1_epi32(0x7fc00000), _mm256_castps_si256(is_nan)),
        _mm256_set1_epi32(static_cast<int>(0xffff0000)));
}

inline void store(float *at, Floats values) { _mm256_storeu_ps(at, values); }

inline void store(BFloat16 *at, Floats values) {
    const __m256i bits = _mm256_srli_epi32(rounded_bits(values), 16);
    const __m128i packed =
        _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(at), packed);
}

inline Floats all(float value) { return _mm256_set1_ps(value); }

// torch's lerp: exact at both ends.
class Lerp {
   public:
    explicit Lerp(double weight)
        : from_start_(std::abs(float(weight)) < 0.5f),
          weight_(all(from_start_ ? float(weight) : float(weight) - 1.0f)) {}

    Floats operator()(Floats start, Floats end) const {
        return _mm256_fmadd_ps(weight_, _mm256_sub_ps(end, start), from_start_ ? start : end);
    }

   private:
    bool from_start_;
    Floats weight_;
};

// Calls body(addresses...) for each of the eight elements from ``begin``; for the last ones, which
// may be fewer, with addresses of copies.
template <class Body, class... T>
void by_eight(std::int64_t begin, std::int64_t end, Body body, T *...tensors) {
    for (; begin + kLanes <= end; begin += kLanes) body((tensors + begin)...);
    if (begin == end) return;
    std::tuple<std::array<std::remove_const_t<T>, kLanes>...> copies{};
    std::apply(
        [&](auto &...copy) {
            (std::copy(tensors + begin, tensors + end, copy.begin()), ...);
            body(copy.data()...);
            auto put_back = [&](auto *tensor, const auto &values) {
                if constexpr (!std::is_const_v<std::remove_pointer_t<decltype(tensor)>>) {
                    std::copy_n(values.begin(), end - begin, tensor + begin);
                }
            };
            (put_back(tensors, copy), ...);
        },
        copies);
}

// Does the same in parts, one for each thread.
template <class Body, class... T>
void in_parallel(std::int64_t numel, int threads, Body body, T *...tensors) {
    // Whole cache lines, also for 16-bit elements.
    const std::int64_t part = (numel / threads + 64) / 64 * 64;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int index = 0; index < threads; ++index) {
        const std::int64_t begin = std::min(index * part, numel);
        by_eight(begin, std::min(begin + part, numel), body, tensors...);
    }
}

// Calls function with the address, cast to the type of its elements.
template <class Function>
void typed(std::uintptr_t address, bool is_bfloat16, Function function) {
    if (is_bfloat16) {
        function(reinterpret_cast<BFloat16 *>(address));
    } else {
        function(reinterpret_cast<float *>(address));
    }
}

void momentum(std::uintptr_t grad_at, bool grad_is_bfloat16, std::uintptr_t buffer_at,
              bool buffer_is_bfloat16, std::uintptr_t out_at, bool out_is_bfloat16,
              std::int64_t numel, double momentum, bool nesterov, bool maximize, int threads) {
    const Lerp to_grad(1 - momentum), to_average(momentum);
    const Floats sign = all(maximize ? -1.0f : 1.0f);
    auto rule = [=](const auto *narrow_grad, auto *buffer, auto *out) {
        const Floats grad = _mm256_mul_ps(sign, load(narrow_grad));
        const Floats average = to_grad(load(buffer), grad);
        store(buffer, average);
        store(out, nesterov ? to_average(grad, average) : average);
    };
    typed(grad_at, grad_is_bfloat16, [&](const auto *grad) {
        typed(buffer_at, buffer_is_bfloat16, [&](auto *buffer) {
            typed(out_at, out_is_bfloat16, [&](auto *out) {
                in_parallel(numel, threads, rule, grad, buffer, out);
            });
        });
    });
}

// Updates masters by rule(master, addresses...). Parameters are the rounded masters. A parameter
// that differs was changed, and replaces its master. Returns whether a parameter was changed.
template <class Rule, class... T>
bool update_masters(std::uintptr_t master_at, std::uintptr_t parameter_at, std::int64_t numel,
                    int threads, Rule rule, T *...tensors) {
    auto *masters = reinterpret_cast<float *>(master_at);
    auto *parameters = reinterpret_cast<BFloat16 *>(parameter_at);
    if (parameters == nullptr) {
        auto body = [=](float *master, T *...at) {
            store(master, rule(load(master), at...));
        };
        in_parallel(numel, threads, body, masters, tensors...);
        return false;
    }
    bool is_changed = false;
    auto body = [=, &is_changed](float *wide, BFloat16 *parameter, T *...at) {
        const Floats master = load(wide), value = load(parameter);
        const Floats rounded = _mm256_castsi256_ps(rounded_bits(master));
        const Floats both_nan = _mm256_and_ps(_mm256_cmp_ps(value, value, _CMP_UNORD_Q),
                                              _mm256_cmp_ps(rounded, rounded, _CMP_UNORD_Q));
        const Floats differs =
            _mm256_andnot_ps(both_nan, _mm256_cmp_ps(value, rounded, _CMP_NEQ_UQ));
        if (_mm256_movemask_ps(differs) != 0) {
#pragma omp atomic write
            is_changed = true;
        }
        const Floats updated = rule(_mm256_blendv_ps(master, value, differs), at...);
        store(wide, updated);
        store(parameter, updated);
    };
    in_parallel(numel, threads, body, masters, parameters, tensors...);
    return is_changed;
}

bool muon(std::uintptr_t master_at, std::uintptr_t parameter_at, std::uintptr_t update_at,
          bool update_is_bfloat16, std::int64_t numel, double decay, double alpha, int threads) {
    const Floats decays = all(float(decay)), alphas = all(float(alpha));
    auto rule = [=](Floats master, const auto *update) {
        return _mm256_fmadd_ps(alphas, load(update), _mm256_mul_ps(master, decays));
    };
    bool is_changed = false;
    typed(update_at, update_is_bfloat16, [&](const auto *update) {
        is_changed = update_masters(master_at, parameter_at, numel, threads, rule, update);
    });
    return is_changed;
}

// AdamW as defined in muon/kernels/plain.py: each operation is rounded separately.
bool adamw(std::uintptr_t master_at, std::uintptr_t parameter_at, std::uintptr_t grad_at,
           bool grad_is_bfloat16, std::uintptr_t mean_at, std::uintptr_t mean_sq_at,
           std::int64_t numel, double decay, double beta1, double beta2, double size,
           double epsilon, bool maximize, int threads) {
    const Floats decays = all(float(decay)), sign = all(maximize ? -1.0f : 1.0f);
    const Floats past = all(float(beta1)), present = all(float(1 - beta1));
    const Floats past_sq = all(float(beta2)), present_sq = all(float(1 - beta2));
    const Floats sizes = all(float(size)), epsilons = all(float(epsilon));
    auto rule = [=](Floats master, const auto *narrow_grad, float *means, float *mean_sqs) {
        const Floats grad = _mm256_mul_ps(sign, load(narrow_grad));
        const Floats mean =
            _mm256_add_ps(_mm256_mul_ps(past, load(means)), _mm256_mul_ps(present, grad));
        const Floats square = _mm256_mul_ps(present_sq, _mm256_mul_ps(grad, grad));
        const Floats mean_sq = _mm256_add_ps(_mm256_mul_ps(past_sq, load(mean_sqs)), square);
        store(means, mean);
        store(mean_sqs, mean_sq);
        const Floats divisor = _mm256_add_ps(_mm256_sqrt_ps(mean_sq), epsilons);
        const Floats step = _mm256_div_ps(_mm256_mul_ps(sizes, mean), divisor);
        return _mm256_sub_ps(_mm256_mul_ps(master, decays), step);
    };
    bool is_changed = false;
    typed(grad_at, grad_is_bfloat16, [&](const auto *grad) {
        is_changed =
            update_masters(master_at, parameter_at, numel, threads, rule, grad,
                           reinterpret_cast<float *>(mean_at), reinterpret_cast<float *>(mean_sq_at));
    });
    return is_changed;
}

// 16 random bits for each element of a matrix: a 32-bit hash of a number of the row and the column
// (https://nullprogram.com/blog/2018/07/31/).
void random_bits(std::uintptr_t rows_at, std::uintptr_t out_at, std::int64_t rows,
                 std::int64_t first_column, std::int64_t columns, int threads) {
    const auto *of_rows = reinterpret_cast<const std::uint32_t *>(rows_at);
    auto *out = reinterpret_cast<std::uint32_t *>(out_at);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t column = 0; column < columns; ++column) {
            const auto index = static_cast<std::uint32_t>(first_column + column);
            std::uint32_t x = of_rows[row] ^ (index * 0x9e3779b1u);
            x = (x ^ (x >> 16)) * 0x7feb352du;
            x = (x ^ (x >> 15)) * 0x846ca68bu;
            out[row * columns + column] = x >> 16;
        }
    }
}

}  // namespace

NB_MODULE(_cpu_kernels, module) {
    using release = nb::call_guard<nb::gil_scoped_release>;
    module.def("momentum", &momentum, release());
    module.def("muon", &muon, release());
    module.def("adamw", &adamw, release());
    module.def("random_bits", &random_bits, release());
}
