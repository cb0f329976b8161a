// The encodings of tierstore/layout/encodings.py in one pass over memory, with the bits of torch's
// operations.
//
// Each operation is exact or rounded by IEEE 754, and -ffp-contract=off fuses none. The compiler
// may therefore vectorize the loops. torch may round roots differently, but this changes no number;
// see RootState.
//
// Addresses come from tierstore/layout/encoding_kernels.py, which checks the layout. Tensors do not
// overlap. The kernels use torch's threads: OpenMP functions come from the library that torch has
// loaded.

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace nb = nanobind;

namespace {

constexpr std::int32_t kInfinity = 0x7f800000;  // Larger magnitudes are NaNs.
constexpr std::int32_t kMagnitude = 0x7fffffff;
constexpr std::int64_t kBlock = 256;  // Columns that share one scale.

inline std::int32_t bits_of(float value) {
    std::int32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

template <class T>
T *at(std::uintptr_t address) {
    return reinterpret_cast<T *>(address);
}

// SplitMaster: a parameter of 16 bits, and a remainder of 16 or 8.

template <class Remainder>
constexpr int kShift = 16 - 8 * static_cast<int>(sizeof(Remainder));  // Bits that it does not have.

template <class Remainder>
void decode_split_part(const std::int16_t *parameter, const Remainder *remainder, std::int32_t *out,
                       std::int64_t numel) {
    for (std::int64_t i = 0; i < numel; ++i) {
        const auto high = static_cast<std::uint32_t>(parameter[i]) << 16;
        const auto low = static_cast<std::uint32_t>(remainder[i]) << kShift<Remainder>;
        const auto sum = static_cast<std::int32_t>(high + low);
        out[i] = (sum & kMagnitude) <= kInfinity ? sum : static_cast<std::int32_t>(high);
    }
}

template <class Remainder>
void encode_split_part(const std::int32_t *values, std::int16_t *parameter, Remainder *remainder,
                       std::int64_t numel) {
    constexpr int shift = kShift<Remainder>;
    for (std::int64_t i = 0; i < numel; ++i) {
        const std::int32_t sign = values[i] & ~kMagnitude;
        const bool is_nan = (values[i] & kMagnitude) > kInfinity;
        const std::uint32_t number = is_nan ? sign | 0x7fc00000 : values[i];
        const std::uint32_t bits = number + (1u << shift >> 1);
        remainder[i] = static_cast<Remainder>(bits >> shift);
        parameter[i] = static_cast<std::int16_t>((bits + 0x8000) >> 16);
    }
}

// Calls part(first element, elements) for parts of a tensor, in threads.
template <class Part>
void in_parallel(std::int64_t numel, int threads, Part part) {
    constexpr std::int64_t size = 4096;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (std::int64_t begin = 0; begin < numel; begin += size) {
        part(begin, std::min(size, numel - begin));
    }
}

template <class Remainder>
void decode_split(std::uintptr_t parameter, std::uintptr_t remainder, std::uintptr_t values,
                  std::int64_t numel, int threads) {
    in_parallel(numel, threads, [=](std::int64_t begin, std::int64_t count) {
        decode_split_part(at<std::int16_t>(parameter) + begin, at<Remainder>(remainder) + begin,
                          at<std::int32_t>(values) + begin, count);
    });
}

template <class Remainder>
void encode_split(std::uintptr_t values, std::uintptr_t parameter, std::uintptr_t remainder,
                  std::int64_t numel, int threads) {
    in_parallel(numel, threads, [=](std::int64_t begin, std::int64_t count) {
        encode_split_part(at<std::int32_t>(values) + begin, at<std::int16_t>(parameter) + begin,
                          at<Remainder>(remainder) + begin, count);
    });
}

// RootState: fourth powers of whole numbers, with the sign of the number if its type has one.

template <class Number>
struct Root {
    static constexpr float kLast = std::is_signed_v<Number> ? 127 : 255;
    static constexpr float kLargest = kLast * kLast * kLast * kLast;

    static float decode(Number number) {
        const float power = power_of(number);
        return number < 0 ? -power : power;
    }

    static float encode(float ratio, float chance) {
        const float size = std::abs(ratio);
        const float below = std::min(std::floor(std::sqrt(std::sqrt(size))), kLast - 1);
        const float low = power_of(below);
        const float part = (size - low) / (power_of(below + 1) - low);
        const float number = below + (part > chance ? 1.0f : 0.0f);
        if constexpr (std::is_signed_v<Number>) return std::copysign(number, ratio);
        return ratio > 0 ? std::max(number, 1.0f) : 0.0f;
    }

   private:
    static float power_of(float number) {
        const float square = number * number;
        return square * square;
    }
};

template <class Number>
void decode_block(const Number *numbers, float scale, float *values, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) values[i] = Root<Number>::decode(numbers[i]) * scale;
}

// Returns the scale.
template <class Number>
float encode_block(const float *values, const float *chances, Number *numbers, std::int64_t count) {
    std::int32_t largest = 0;  // Magnitudes are in the order of their bits, NaNs last.
    for (std::int64_t i = 0; i < count; ++i) {
        largest = std::max(largest, bits_of(values[i]) & kMagnitude);
    }
    float scale;
    std::memcpy(&scale, &largest, sizeof scale);
    scale /= Root<Number>::kLargest;
    if (largest >= kInfinity) scale = std::numeric_limits<float>::quiet_NaN();
    const float divisor = scale > 0 ? scale : 1.0f;
    auto encode = [=](auto chance) {
        for (std::int64_t i = 0; i < count; ++i) {
            const float ratio = values[i] / divisor;
            const bool is_finite = (bits_of(ratio) & kMagnitude) < kInfinity;
            const float number = Root<Number>::encode(is_finite ? ratio : 0.0f, chance(i));
            numbers[i] = static_cast<Number>(static_cast<std::int32_t>(number));
        }
    };
    if (chances == nullptr) {
        encode([](std::int64_t) { return 0.5f; });
    } else {
        encode([=](std::int64_t i) { return chances[i]; });
    }
    return scale;
}

// Calls body(first element, elements, index) for each block, in threads.
template <class Body>
void by_blocks(std::int64_t rows, std::int64_t columns, int threads, Body body) {
    const std::int64_t blocks = (columns + kBlock - 1) / kBlock;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (std::int64_t index = 0; index < rows * blocks; ++index) {
        const std::int64_t begin = index % blocks * kBlock;
        body(index / blocks * columns + begin, std::min(kBlock, columns - begin), index);
    }
}

template <class Number>
void decode_blocks(std::uintptr_t numbers, std::uintptr_t scales, std::uintptr_t values,
                   std::int64_t rows, std::int64_t columns, int threads) {
    by_blocks(rows, columns, threads, [=](auto begin, auto count, auto index) {
        decode_block(at<Number>(numbers) + begin, at<float>(scales)[index],
                     at<float>(values) + begin, count);
    });
}

template <class Number>
void encode_blocks(std::uintptr_t values, std::uintptr_t chances, std::uintptr_t numbers,
                   std::uintptr_t scales, std::int64_t rows, std::int64_t columns, int threads) {
    by_blocks(rows, columns, threads, [=](auto begin, auto count, auto index) {
        const float *of_block = chances == 0 ? nullptr : at<float>(chances) + begin;
        at<float>(scales)[index] =
            encode_block(at<float>(values) + begin, of_block, at<Number>(numbers) + begin, count);
    });
}

}  // namespace

NB_MODULE(_encodings, module) {
    using release = nb::call_guard<nb::gil_scoped_release>;
    module.def("decode_split_16", &decode_split<std::int16_t>, release());
    module.def("decode_split_8", &decode_split<std::int8_t>, release());
    module.def("encode_split_16", &encode_split<std::int16_t>, release());
    module.def("encode_split_8", &encode_split<std::int8_t>, release());
    module.def("decode_int8", &decode_blocks<std::int8_t>, release());
    module.def("decode_uint8", &decode_blocks<std::uint8_t>, release());
    module.def("encode_int8", &encode_blocks<std::int8_t>, release());
    module.def("encode_uint8", &encode_blocks<std::uint8_t>, release());
}
