// The host step's arithmetic, in one pass over memory.
//
// Element by element what DeepSpeedCPUAdam (clip, update), a cast and torch's lerp_ do one after
// the other, with the same roundings: every fma below is one of theirs, so the build must not
// contract any other (-ffp-contract=off). Plain C functions on plain pointers: nothing of torch or
// Python is compiled, and ctypes lets go of the interpreter's lock while they run.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

// Elements of every stream that are gone through at once. An update's stay in the L1 cache until they
// are averaged and cast, with room for what the processor fetches ahead: 128 took 0.86 of the time of 1,024.
constexpr int64_t BLOCK = 128;
// Where moments are half as long: 128 took 1.1 of the time of 512.
constexpr int64_t LONG_BLOCK = 512;
constexpr int64_t SUMMED = 1024;
// Blocks from which on more than one thread takes less time.
constexpr int64_t WORTH_IT = 64;

enum Kind : int32_t { NONE = 0, FP32 = 1, BF16 = 2, FP16 = 3 };

// Codes of one byte that share a scale.
constexpr int64_t CODED = 256;
// Smallest scale whose inverse is finite; numbers of a block below it become zero.
constexpr float SMALLEST_SCALE = 0x1p-126f;

inline float from_bf16(uint16_t x)
{
    uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

inline uint16_t to_bf16(float value)
{
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : static_cast<uint16_t>(rounded);
}

template <int KIND>
struct Number;

template <>
struct Number<FP32> {
    using type = float;
    static float get(float x) { return x; }
    static float put(float x) { return x; }
};

template <>
struct Number<BF16> {
    using type = uint16_t;
    static float get(uint16_t x) { return from_bf16(x); }
    static uint16_t put(float x) { return to_bf16(x); }
};

#ifdef __FLT16_MANT_DIG__
template <>
struct Number<FP16> {
    using type = _Float16;
    static float get(_Float16 x) { return static_cast<float>(x); }
    static _Float16 put(float x) { return static_cast<_Float16>(x); }
};
#define WITH_FP16(CALL) CALL(FP16)
#else
#define WITH_FP16(CALL)
#endif

#define FOR_KIND(KIND, CALL)                                                                       \
    switch (KIND) {                                                                                \
        case FP32: CALL(FP32); break;                                                              \
        case BF16: CALL(BF16); break;                                                              \
        case FP16: WITH_FP16(CALL); break;                                                         \
        default: break;                                                                            \
    }

}  // namespace

extern "C" {

struct Adam {
    float factor;       // of the gradient: clips and undoes the loss scale
    float beta1;
    float beta2;
    float one_minus_beta1;
    float one_minus_beta2;
    float inverse_root;  // 1 / sqrt(1 - beta2^t)
    float eps;
    float step_size;     // -lr / (1 - beta1^t)
    float decay;         // -lr * weight decay, or the weight decay itself where it is L2
    int32_t decays;      // 0: not at all; 1: decoupled; 2: L2
};

struct TorchAdam {
    float factor;      // of the gradient: clips and undoes the loss scale
    float decay;       // 1 - lr * weight decay, where it is decoupled
    float l2;          // the weight decay, where it is L2
    float first;       // 1 - beta1
    float beta2;
    float second;      // 1 - beta2
    float root;        // sqrt(1 - beta2^t)
    float eps;
    float step_size;   // -lr / (1 - beta1^t)
};

struct EMA {
    float* tensor;
    float weight;
};

// Elements of a slab that are updated by one call together with others.
struct Piece {
    int64_t start;
    int64_t size;
    int64_t position;  // of the first element in the noise
};

// A gradient to be copied, and the sum of its squares.
struct Taken {
    int64_t size;
    const void* source;
    void* target;  // null: no copy
    double squares;
};

// How the weights and moments of a slab are kept in memory.
struct Kept {
    float* weight;      // null where it is split into …
    uint16_t* high;     // … the bf16 weight, rounded to nearest, and …
    uint16_t* low;      // … the low half of the fp32 one
    void* first;
    void* second;
    int32_t moments;    // FP32, or BF16: rounded by chance
    uint32_t noise;     // what the chance is drawn from
};

// Moments as codes, and the largest number of each block of them.
struct Coded {
    uint8_t* first;
    float* first_scale;
    uint8_t* second;
    float* second_scale;
};

}  // extern "C"

namespace {

// The fp32 weight of a bf16 one and of its low half. More than half a unit was rounded up.
inline float joined(uint16_t high, uint16_t low)
{
    const uint32_t up = low > 0x8000u ? 1u : 0u;
    const uint32_t bits = ((static_cast<uint32_t>(high) - up) << 16) | low;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

// What is left of an fp32 weight once it is split. Of a number halfway between two of bf16 that is
// rounded up the low half becomes one more: nothing else would tell it from one that is rounded down.
inline float storable(float value)
{
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    bits += (bits & 0x1ffffu) == 0x18000u ? 1u : 0u;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

// The low half of a storable weight.
inline uint16_t low_half(float value)
{
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return static_cast<uint16_t>(bits);
}

// Random bits repeat from here on, within a step.
constexpr uint32_t PERIOD = 1u << 22;

// 32 random bits of an element: Chris Wellons' "lowbias32".
inline uint32_t drawn(uint32_t key, uint32_t position)
{
    uint32_t x = key ^ (position & (PERIOD - 1u));
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

// Up or down by chance: the carry out of the lower half, to which random bits are added.
inline uint16_t rounded(float value, uint32_t random)
{
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    // Every NaN becomes one that no carry changes.
    return static_cast<uint16_t>(((value == value ? bits : 0x7fc00000u) + random) >> 16);
}

// Weights of a block and how they are kept.
struct WholeWeights {
    float* w;
    float get(int64_t i) const { return w[i]; }
    void put(int64_t i, float value) const { w[i] = value; }
};

struct SplitWeights {
    float* w;  // written for what follows the update, which reads what a later reader would
    uint16_t* high;
    uint16_t* low;
    float get(int64_t i) const { return joined(high[i], low[i]); }
    void put(int64_t i, float value) const
    {
        w[i] = storable(value);
        high[i] = to_bf16(w[i]);
        low[i] = low_half(w[i]);
    }
};

// Moments of a block and how they are kept.
struct WideMoments {
    float* m;
    float* v;
    float first(int64_t i) const { return m[i]; }
    float second(int64_t i) const { return v[i]; }
    void put(int64_t i, float first, float second) const
    {
        m[i] = first;
        v[i] = second;
    }
};

struct SmallMoments {
    uint16_t* m;
    uint16_t* v;
    uint32_t key;
    uint32_t position;
    float first(int64_t i) const { return from_bf16(m[i]); }
    float second(int64_t i) const { return from_bf16(v[i]); }
    void put(int64_t i, float first, float second) const
    {
        const uint32_t random = drawn(key, position + static_cast<uint32_t>(i));
        m[i] = rounded(first, random & 0xffffu);
        v[i] = rounded(second, random >> 16);
    }
};

template <int KIND, int DECAYS, typename WEIGHTS, typename MOMENTS>
void update(int64_t n, WEIGHTS weights, MOMENTS moments, const void* gradients, const Adam a)
{
    const auto* __restrict g = static_cast<const typename Number<KIND>::type*>(gradients);
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        float grad = Number<KIND>::get(g[i]) * a.factor;
        float weight = weights.get(i);
        if (DECAYS == 2) grad = __builtin_fmaf(weight, a.decay, grad);
        const float first = __builtin_fmaf(grad, a.one_minus_beta1, moments.first(i) * a.beta1);
        const float second =
            __builtin_fmaf(grad * grad, a.one_minus_beta2, moments.second(i) * a.beta2);
        const float root = __builtin_fmaf(__builtin_sqrtf(second), a.inverse_root, a.eps);
        if (DECAYS == 1) weight = __builtin_fmaf(weight, a.decay, weight);
        weights.put(i, __builtin_fmaf(first / root, a.step_size, weight));
        moments.put(i, first, second);
    }
}

template <int KIND, typename WEIGHTS, typename MOMENTS>
void update_as(int64_t n, WEIGHTS w, MOMENTS m, const void* g, const Adam& a)
{
    if (a.decays == 0) update<KIND, 0>(n, w, m, g, a);
    else if (a.decays == 1) update<KIND, 1>(n, w, m, g, a);
    else update<KIND, 2>(n, w, m, g, a);
}

// torch counts from the nearer end.
inline bool is_near(float weight) { return std::fabs(weight) < 0.5f; }

void average(int64_t n, const float* __restrict w, const EMA& into)
{
    const bool is_small = is_near(into.weight);
    const float coefficient = is_small ? into.weight : into.weight - 1.0f;
    float* __restrict ema = into.tensor;
    if (is_small) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) ema[i] = __builtin_fmaf(coefficient, w[i] - ema[i], ema[i]);
    } else {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) ema[i] = __builtin_fmaf(coefficient, w[i] - ema[i], w[i]);
    }
}

// Both at once: where all streams lie a power of two apart, one more loop over a block finds it gone
// from the cache, and two EMAs took 1.7 times as long as one.
void average_both(int64_t n, const float* __restrict w, const EMA& one, const EMA& other)
{
    float* __restrict first = one.tensor;
    float* __restrict second = other.tensor;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        const float weight = w[i];
        first[i] = __builtin_fmaf(one.weight, weight - first[i], first[i]);
        second[i] = __builtin_fmaf(other.weight, weight - second[i], second[i]);
    }
}

// What torch's fused Adam and AdamW do, with their roundings. NEAR: `is_near(a.first)`.
template <int KIND, bool L2, bool NEAR, typename WEIGHTS, typename MOMENTS>
void update_torch(int64_t n, WEIGHTS weights, MOMENTS moments, const void* gradients,
                  const TorchAdam a)
{
    const auto* __restrict g = static_cast<const typename Number<KIND>::type*>(gradients);
    const float coefficient = NEAR ? a.first : a.first - 1.0f;
    // As wide as the position in the noise, which is counted with it.
    const int32_t size = static_cast<int32_t>(n);
#pragma omp simd
    for (int32_t i = 0; i < size; i++) {
        const float weight = weights.get(i);
        const float old = moments.first(i);
        float grad = Number<KIND>::get(g[i]) * a.factor;
        if (L2) grad = __builtin_fmaf(weight, a.l2, grad);
        const float first = __builtin_fmaf(coefficient, grad - old, NEAR ? old : grad);
        const float second = __builtin_fmaf(a.second * grad, grad, a.beta2 * moments.second(i));
        const float below = __builtin_sqrtf(second) / a.root + a.eps;
        weights.put(i, weight * a.decay + a.step_size * first / below);
        moments.put(i, first, second);
    }
}

template <int KIND, bool L2, typename WEIGHTS, typename MOMENTS>
void update_near(int64_t n, WEIGHTS w, MOMENTS m, const void* g, const TorchAdam& a)
{
    if (is_near(a.first)) update_torch<KIND, L2, true>(n, w, m, g, a);
    else update_torch<KIND, L2, false>(n, w, m, g, a);
}

template <int KIND, typename WEIGHTS, typename MOMENTS>
void update_as(int64_t n, WEIGHTS w, MOMENTS m, const void* g, const TorchAdam& a)
{
    if (a.l2 == 0.0f) update_near<KIND, false>(n, w, m, g, a);
    else update_near<KIND, true>(n, w, m, g, a);
}

// AdamW where nothing is contracted, so that any chain of single operations has the same bits. The
// largest of each moment becomes its scale.
template <int KIND, typename WEIGHTS>
void update_plainly(int64_t n, WEIGHTS weights, float* __restrict m, float* __restrict v,
                    const void* gradients, const TorchAdam a, float& first_scale,
                    float& second_scale)
{
    const auto* __restrict g = static_cast<const typename Number<KIND>::type*>(gradients);
    const float beta1 = 1.0f - a.first;
    const float inverse_root = 1.0f / a.root;
    float first_largest = 0.0f;
    float second_largest = 0.0f;
#pragma omp simd reduction(max : first_largest, second_largest)
    for (int64_t i = 0; i < n; i++) {
        const float grad = Number<KIND>::get(g[i]) * a.factor;
        const float first = m[i] * beta1 + grad * a.first;
        const float second = v[i] * a.beta2 + grad * grad * a.second;
        const float below = __builtin_sqrtf(second) * inverse_root + a.eps;
        weights.put(i, weights.get(i) * a.decay + a.step_size * first / below);
        m[i] = first;
        v[i] = second;
        first_largest = std::fabs(first) > first_largest ? std::fabs(first) : first_largest;
        second_largest = second > second_largest ? second : second_largest;
    }
    first_scale = first_largest;
    second_scale = second_largest;
}

// A code has a sign, 4 bits of exponent and 3 of mantissa, or without a sign 5 and 3. It is the upper
// part of an fp32 number from 2^-15 (without a sign 2^-31) to 1, times the scale. With a sign, the
// lowest code is 0. Without, no code is: no denominator is 0 where a first moment is not.
template <bool SIGNED>
constexpr int32_t LOWEST = (127 - (SIGNED ? 15 : 31)) << 23;
constexpr int32_t LEFT_OUT = 20;

template <bool SIGNED>
void decode(int64_t n, const uint8_t* __restrict codes, float scale, float* __restrict x)
{
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        const int32_t code = codes[i];
        const int32_t magnitude = SIGNED ? code & 127 : code;
        int32_t bits = (magnitude << LEFT_OUT) + LOWEST<SIGNED>;
        if (SIGNED) bits = (magnitude != 0 ? bits : 0) | static_cast<int32_t>((code & 128u) << 24);
        float share;
        std::memcpy(&share, &bits, sizeof(share));
        x[i] = share * scale;
    }
}

// What is added to a number before its lower bits are left out: to the nearest code …
struct Half {
    int32_t get(int64_t) const { return 1 << (LEFT_OUT - 1); }
};

// … or up or down by chance, alike in all blocks of a step: an element's errors cancel over the steps.
struct Chances {
    explicit Chances(uint32_t key)
    {
        // The largest number of a block, which is its scale but for the last bit, keeps its code.
        for (uint32_t i = 0; i < CODED; i++)
            bits[i] = static_cast<int32_t>(drawn(key, i) >> 16 << (LEFT_OUT - 16)) + 8;
    }
    int32_t get(int64_t i) const { return bits[i]; }
    int32_t bits[CODED];
};

// The codes of the numbers of a block with this scale.
template <bool SIGNED, typename ADDED>
void encode(int64_t n, const float* __restrict x, float scale, const ADDED& added,
            uint8_t* __restrict codes)
{
    const float inverse = scale < SMALLEST_SCALE ? 0.0f : 1.0f / scale;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        const float share = x[i] * inverse;
        int32_t bits;
        std::memcpy(&bits, &share, sizeof(bits));
        const int32_t above = (SIGNED ? bits & 0x7fffffff : bits) - LOWEST<SIGNED>;
        const int32_t code = (above + added.get(i)) >> LEFT_OUT;
        const int32_t sign = SIGNED ? (bits >> 24) & 128 : 0;
        codes[i] = static_cast<uint8_t>(code > 0 ? code | sign : 0);
    }
}

template <int KIND>
void cast(int64_t n, const float* __restrict w, void* out)
{
    auto* __restrict o = static_cast<typename Number<KIND>::type*>(out);
#pragma omp simd
    for (int64_t i = 0; i < n; i++) o[i] = Number<KIND>::put(w[i]);
}

template <int KIND>
double squares(int64_t n, const void* source)
{
    const auto* __restrict x = static_cast<const typename Number<KIND>::type*>(source);
    double sum = 0.0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) {
        const double value = Number<KIND>::get(x[i]);
        sum += value * value;
    }
    return sum;
}

inline int64_t width(int32_t kind) { return kind == FP32 ? 4 : 2; }

inline const char* at(const void* start, int64_t element, int32_t kind)
{
    return static_cast<const char*>(start) + element * width(kind);
}

inline char* at(void* start, int64_t element, int32_t kind)
{
    return static_cast<char*>(start) + element * width(kind);
}

// What follows an update while the weights are in the cache. `first` is the block's first element in the
// EMAs, and `start` that in the slab.
void finish(int64_t first, int64_t start, int64_t size, const float* w, int32_t emas,
            const EMA* into, void* out, int32_t out_kind)
{
    for (int32_t i = 0; i < emas; i++) {
        const EMA one{into[i].tensor + first, into[i].weight};
        if (i + 1 < emas && is_near(into[i].weight) && is_near(into[i + 1].weight)) {
            i++;
            average_both(size, w, one, EMA{into[i].tensor + first, into[i].weight});
        } else {
            average(size, w, one);
        }
    }
    if (out == nullptr) return;
    char* target = at(out, start, out_kind);
#define CAST(KIND) cast<KIND>(size, w, target)
    FOR_KIND(out_kind, CAST)
}

// All blocks of n elements, by their start and size.
template <int64_t SIZE = BLOCK, typename EACH>
void in_blocks(int64_t n, int32_t threads, const EACH& each)
{
    const int64_t blocks = (n + SIZE - 1) / SIZE;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && blocks >= WORTH_IT)
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t start = block * SIZE;
        each(start, n - start < SIZE ? n - start : SIZE);
    }
}

// Have `each` go over all blocks of weights, however these are kept, and what follows it. Every piece has
// `emas` EMAs of its own.
template <int64_t SIZE = BLOCK, typename EACH>
void step(int64_t pieces, const Piece* piece, const Kept& kept, int32_t emas, const EMA* into,
          void* out, int32_t out_kind, int32_t threads, const EACH& each)
{
    for (int64_t p = 0; p < pieces; p++) {
        in_blocks<SIZE>(piece[p].size, threads, [&](int64_t first, int64_t size) {
            const int64_t start = piece[p].start + first;
            const int64_t position = piece[p].position + first;
            float buffer[SIZE];
            float* w = kept.weight == nullptr ? buffer : kept.weight + start;
            if (kept.weight != nullptr) each(start, size, position, WholeWeights{w});
            else each(start, size, position, SplitWeights{w, kept.high + start, kept.low + start});
            finish(first, start, size, w, emas, into + p * emas, out, out_kind);
        });
    }
}

WideMoments wide(const Kept& kept, int64_t start)
{
    return {static_cast<float*>(kept.first) + start, static_cast<float*>(kept.second) + start};
}

SmallMoments small(const Kept& kept, int64_t start, int64_t position)
{
    return {static_cast<uint16_t*>(kept.first) + start,
            static_cast<uint16_t*>(kept.second) + start, kept.noise,
            static_cast<uint32_t>(position)};
}

}  // namespace

extern "C" {

// Whether numbers of that kind can be read and written here.
int32_t zerotune_knows(int32_t kind)
{
#ifdef __FLT16_MANT_DIG__
    return kind >= FP32 && kind <= FP16;
#else
    return kind == FP32 || kind == BF16;
#endif
}

// Adam on all pieces of a slab, their EMAs, and their cast into `out` where that is not null.
void zerotune_adam(int64_t pieces, const Piece* piece, const Kept* kept, const void* g,
                   int32_t gradient_kind, const Adam* adam, int32_t emas, const EMA* into,
                   void* out, int32_t out_kind, int32_t threads)
{
    const auto each = [=](int64_t start, int64_t size, int64_t, auto weights) {
        const char* gradients = at(g, start, gradient_kind);
#define UPDATE(KIND) update_as<KIND>(size, weights, wide(*kept, start), gradients, *adam)
        FOR_KIND(gradient_kind, UPDATE)
    };
    step(pieces, piece, *kept, emas, into, out, out_kind, threads, each);
}

// As zerotune_adam, with torch's roundings.
void zerotune_adam_torch(int64_t pieces, const Piece* piece, const Kept* kept, const void* g,
                         int32_t gradient_kind, const TorchAdam* adam, int32_t emas,
                         const EMA* into, void* out, int32_t out_kind, int32_t threads)
{
    const auto each = [=](int64_t start, int64_t size, int64_t position, auto weights) {
        const char* gradients = at(g, start, gradient_kind);
#define UPDATE_WIDE(KIND) update_as<KIND>(size, weights, wide(*kept, start), gradients, *adam)
#define UPDATE_SMALL(KIND)                                                                         \
    update_as<KIND>(size, weights, small(*kept, start, position), gradients, *adam)
        if (kept->moments == BF16) FOR_KIND(gradient_kind, UPDATE_SMALL)
        else FOR_KIND(gradient_kind, UPDATE_WIDE)
    };
    if (kept->moments == BF16)
        step<LONG_BLOCK>(pieces, piece, *kept, emas, into, out, out_kind, threads, each);
    else
        step(pieces, piece, *kept, emas, into, out, out_kind, threads, each);
}

// As zerotune_adam_torch with decoupled decay, on moments of one byte each; pieces start where a scale does.
void zerotune_adam_coded(int64_t pieces, const Piece* piece, const Kept* kept, const void* g,
                         int32_t gradient_kind, const TorchAdam* adam, int32_t emas,
                         const EMA* into, void* out, int32_t out_kind, int32_t threads,
                         const Coded* coded)
{
    // To the nearest, second moments would keep the codes of their first steps, since one step changes
    // them by a thousandth, and codes lie an eighth apart.
    const Chances chances(kept->noise);
    const auto each = [=, &chances](int64_t start, int64_t size, int64_t, auto weights) {
        const char* gradients = at(g, start, gradient_kind);
        float m[CODED], v[CODED];
        float& first_scale = coded->first_scale[start / CODED];
        float& second_scale = coded->second_scale[start / CODED];
        decode<true>(size, coded->first + start, first_scale, m);
        decode<false>(size, coded->second + start, second_scale, v);
#define UPDATE_PLAINLY(KIND)                                                                       \
    update_plainly<KIND>(size, weights, m, v, gradients, *adam, first_scale, second_scale)
        FOR_KIND(gradient_kind, UPDATE_PLAINLY)
        encode<true>(size, m, first_scale, Half{}, coded->first + start);
        encode<false>(size, v, second_scale, chances, coded->second + start);
    };
    step<CODED>(pieces, piece, *kept, emas, into, out, out_kind, threads, each);
}

// The numbers that codes of one byte stand for.
void zerotune_decode(int64_t n, const uint8_t* codes, const float* scales, int32_t is_signed,
                     float* numbers, int32_t threads)
{
    in_blocks<CODED>(n, threads, [=](int64_t start, int64_t size) {
        const float scale = scales[start / CODED];
        if (is_signed) decode<true>(size, codes + start, scale, numbers + start);
        else decode<false>(size, codes + start, scale, numbers + start);
    });
}

// Codes and scales of n numbers; what was decoded stays what it is.
void zerotune_encode(int64_t n, uint8_t* codes, float* scales, int32_t is_signed,
                     const float* numbers, int32_t threads)
{
    in_blocks<CODED>(n, threads, [=](int64_t start, int64_t size) {
        float largest = 0.0f;
        for (int64_t i = start; i < start + size; i++)
            largest = std::fabs(numbers[i]) > largest ? std::fabs(numbers[i]) : largest;
        scales[start / CODED] = largest;
        if (is_signed) encode<true>(size, numbers + start, largest, Half{}, codes + start);
        else encode<false>(size, numbers + start, largest, Half{}, codes + start);
    });
}

// The fp32 weights of n split ones.
void zerotune_join(int64_t n, const uint16_t* high, const uint16_t* low, float* weights,
                   int32_t threads)
{
    in_blocks<LONG_BLOCK>(n, threads, [=](int64_t start, int64_t size) {
#pragma omp simd
        for (int64_t i = start; i < start + size; i++) weights[i] = joined(high[i], low[i]);
    });
}

void zerotune_split(int64_t n, uint16_t* high, uint16_t* low, const float* weights,
                    int32_t threads)
{
    in_blocks<LONG_BLOCK>(n, threads, [=](int64_t start, int64_t size) {
#pragma omp simd
        for (int64_t i = start; i < start + size; i++) {
            const float weight = storable(weights[i]);
            high[i] = to_bf16(weight);
            low[i] = low_half(weight);
        }
    });
}

// Copy gradients of one kind, and sum up the squares of each.
void zerotune_take(int64_t count, Taken* taken, int32_t kind, int32_t threads)
{
    for (Taken* each = taken; each < taken + count; each++) {
        const int64_t n = each->size;
        const int64_t blocks = (n + SUMMED - 1) / SUMMED;
        double sum = 0.0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(+ : sum) if (threads > 1)
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t start = block * SUMMED;
            const int64_t size = n - start < SUMMED ? n - start : SUMMED;
            const char* from = at(each->source, start, kind);
#define SQUARES(KIND) sum += squares<KIND>(size, from)
            FOR_KIND(kind, SQUARES)
            if (each->target != nullptr)
                std::memcpy(at(each->target, start, kind), from, size * width(kind));
        }
        each->squares = sum;
    }
}

}  // extern "C"
