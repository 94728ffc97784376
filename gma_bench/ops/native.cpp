// GMA on a CPU, float32: what native.py calls. Plain C++ with the compiler's vector types; no library.
//
// Everything happens inside a block of TOKENS tokens that stays in the cache. Blocks are copied to
// scratch and padded with zeros there, so that no loop over one has a remainder. Logits and their gradients
// are formed from x − μ directly, never by expanding the square: a subtraction takes a port of its own beside
// the multiply-adds, so it costs nothing, and nothing cancels far from the origin.
//
// A call is cut into tasks by its shapes alone; workers take them from a counter. Each task has its own
// place for what it sums, so results do not depend on the number of threads.
//
// Letters: T tokens of a block, K components, D routing width, E value width, each padded to lanes.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

namespace {

#if defined(__AVX512F__)
constexpr int64_t LANES = 16, ROWS = 8;
#elif defined(__AVX__)
constexpr int64_t LANES = 8, ROWS = 4;
#else
constexpr int64_t LANES = 4, ROWS = 4;
#endif
constexpr int64_t TOKENS = 32;         // of a block, and of a causal chunk
constexpr int64_t CHUNKS = 16;         // between two saved states; native.py: STATE_TOKENS
constexpr float LARGEST = 68719476736; // 2^36: beyond it a square or a product may overflow

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4))); // of a tensor, at any address
typedef uint32_t ivec __attribute__((vector_size(4 * LANES)));
#define UNROLL _Pragma("GCC unroll 16")

int64_t padded(int64_t n) { // to whole vectors, and to eights
    constexpr int64_t size = std::max<int64_t>(LANES, 8);
    return (n + size - 1) / size * size;
}
vec load(const float *p) { return *reinterpret_cast<const vec *>(p); }
void store(float *p, vec x) { *reinterpret_cast<vec *>(p) = x; }
vec larger(vec a, vec b) { return a > b ? a : b; }

// Sum and maximum over the lanes: fold the upper half onto the lower until one is left.
template <size_t... I> struct Fold {
    static constexpr size_t N = sizeof...(I);
    template <class V> static auto low(V x) { return __builtin_shufflevector(x, x, I...); }
    template <class V> static auto high(V x) { return __builtin_shufflevector(x, x, (N + I)...); }
};
template <size_t... I> Fold<I...> half_of(std::index_sequence<I...>);
template <size_t N, class V> float total(V x) {
    if constexpr (N == 2)
        return x[0] + x[1];
    else {
        using Half = decltype(half_of(std::make_index_sequence<N / 2>()));
        return total<N / 2>(Half::low(x) + Half::high(x));
    }
}
template <size_t N, class V> float largest(V x) {
    if constexpr (N == 2)
        return std::max(x[0], x[1]);
    else {
        using Half = decltype(half_of(std::make_index_sequence<N / 2>()));
        const auto low = Half::low(x), high = Half::high(x);
        return largest<N / 2>(low > high ? low : high);
    }
}
float total(vec x) { return total<LANES>(x); }
float largest(vec x) { return largest<LANES>(x); }

vec exponential(vec x) { // of x <= 0; Cephes' polynomial, relative error below 2e-7
    constexpr float round = 12582912;
    vec n = x * 1.44269504088896341f + round;
    ivec exponent = reinterpret_cast<ivec>(n) << 23;
    n -= round;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    vec result = reinterpret_cast<vec>(reinterpret_cast<ivec>(p) + exponent);
    return x < -87.0f ? vec{} : result;
}

// ------------------------------------------------------------------------------------ the call

struct View { // a tensor (B, H, N, width) whose last dimension is contiguous; strides in floats
    float *data;
    int64_t batch, head, token;
    float *at(int64_t b, int64_t h, int64_t n) const { return data + b * batch + h * head + n * token; }
    // Hints that a row, of the tensor or not, will soon be read or overwritten.
    void fetch(int64_t b, int64_t h, int64_t n, int64_t width) const { hint<0>(b, h, n, width); }
    void claim(int64_t b, int64_t h, int64_t n, int64_t width) const { hint<1>(b, h, n, width); }
    template <int WRITE> void hint(int64_t b, int64_t h, int64_t n, int64_t width) const {
        const uintptr_t row = reinterpret_cast<uintptr_t>(data) + 4 * (b * batch + h * head + n * token);
        for (int64_t c = 0; c < width; c += 16)
            __builtin_prefetch(reinterpret_cast<const void *>(row + 4 * c), WRITE, 3);
        asm volatile(""); // GCC takes a function of nothing but hints for one without effect
    }
};

struct Side { // the queries or the keys: how many, and how they are cut
    int64_t length, splits, parts;
};

} // namespace

extern "C" struct Call { // as native.py declares it
    int64_t batch, heads, components, width, value_width;
    Side queries, keys;
    float eps;
    View q, k, v, out, grad_out, grad_q, grad_k, grad_v;
    const float *means, *variances, *log_priors; // (H, K, D), (H, K, D), (H, K)
    const uint8_t *key_mask;                     // (B, M) or null
    const float *centre;                         // (B, H, E), or null: see blocks.lone_values
    float *written, *mass;                       // a split or a saved state: (S, B, H, K, E), (S, B, H, K)
    float *grad_memory, *grad_bias;              // (S, B, H, K, E), (S, B, H, K)
    float *sums;                                 // (P, H, 2·K·D + K)
    float *grad_means, *grad_variances, *grad_log_priors;
    float *scratch;
    int64_t scratch_size; // floats of one worker
    int64_t step;         // an index of STEPS
    int64_t workers;      // how many have begun
    int64_t next;         // the next task
    int64_t too_large;    // set where a number was met that float32 may not bear

    // Where a split or saved state of a sequence and head lies, in components.
    int64_t place(int64_t split, int64_t b, int64_t h) const {
        return ((split * batch + b) * heads + h) * components;
    }
};

namespace {

// Hands out a worker's memory from the front. A step takes all that it needs first; where scratch only
// counts, it goes no further.
struct Scratch {
    // Floats between two pieces, whole cache lines: loops walk several pieces at once, and at the same place
    // of their pages they would contend for the same sets of the cache.
    static constexpr int64_t GAP = 3 * 16;
    float *start;
    bool counts;
    int64_t used = 0; // floats
    float *take(int64_t floats) {
        float *piece = counts ? nullptr : start + used;
        used += (floats + 15) / 16 * 16 + GAP;
        return piece;
    }
};

// ------------------------------------------------------------------------------------ products

// Which part of a square matrix there is: of the left factor's rows (LOWER: up to the diagonal;
// UPPER, for its transpose: from the diagonal on) or of the result's (RESULT).
enum Triangle { WHOLE, LOWER, UPPER, RESULT };

// o (rows, cols) = or += a b for C·LANES columns, a (rows, n) with any strides, b (n, cols).
template <int C, bool ADD, Triangle SHAPE>
void columns(float *o, int64_t ldo, int64_t rows, const float *a, int64_t ra, int64_t ja, const float *b,
             int64_t ldb, int64_t n, int64_t column) {
    int64_t first = SHAPE == RESULT ? column / ROWS * ROWS : 0;
    for (int64_t row = first; row < rows; row += ROWS) {
        vec sum[ROWS][C];
        UNROLL for (int r = 0; r < ROWS; r++) UNROLL
            for (int c = 0; c < C; c++)
                sum[r][c] = ADD ? load(o + (row + r) * ldo + c * LANES) : vec{};
        const int64_t begin = SHAPE == UPPER ? row : 0, end = SHAPE == LOWER ? std::min(n, row + ROWS) : n;
        const float *left = a + row * ra;
        for (int64_t j = begin; j < end; j++) {
            vec right[C];
            UNROLL for (int c = 0; c < C; c++)
                right[c] = load(b + j * ldb + c * LANES);
            UNROLL for (int r = 0; r < ROWS; r++) {
                const float scale = left[r * ra + j * ja];
                UNROLL for (int c = 0; c < C; c++)
                    sum[r][c] += scale * right[c];
            }
        }
        UNROLL for (int r = 0; r < ROWS; r++) UNROLL
            for (int c = 0; c < C; c++)
                store(o + (row + r) * ldo + c * LANES, sum[r][c]);
    }
}

template <bool ADD, Triangle SHAPE = WHOLE>
void product(float *o, int64_t rows, int64_t cols, const float *a, int64_t ra, int64_t ja, const float *b,
             int64_t n) {
    int64_t c = 0;
    for (; c + 2 * LANES <= cols; c += 2 * LANES)
        columns<2, ADD, SHAPE>(o + c, cols, rows, a, ra, ja, b + c, cols, n, c);
    if (c < cols)
        columns<1, ADD, SHAPE>(o + c, cols, rows, a, ra, ja, b + c, cols, n, c);
}

// o (T, K) = bias − Σ_d (x − μ)² w; `terms` are (K / LANES, D, 2, LANES), in the order of their use: μ and w.
// Eight are summed, then such sums: one after another they would lose what a pairwise sum keeps.
// `ahead(n)` is called for each n < TOKENS, spread over the work: it hints at a row of the blocks that are
// read or written next, and a processor takes only so many hints at once.
template <class Ahead>
void log_densities(float *o, int64_t components, const float *x, int64_t width, const float *terms,
                   const float *bias, Ahead ahead) {
    constexpr int SOME = 8; // tokens at a time
    const int64_t pieces = components / LANES * (TOKENS / SOME);
    int64_t piece = 0, hinted = 0;
    for (int64_t k = 0; k < components; k += LANES, terms += width * 2 * LANES)
        for (int64_t row = 0; row < TOKENS; row += SOME) {
            for (piece++; hinted < TOKENS * piece / pieces; hinted++)
                ahead(hinted);
            vec total[SOME];
            UNROLL for (int r = 0; r < SOME; r++)
                total[r] = vec{};
            for (int64_t first = 0; first < width; first += 8) { // a multiple of 8: see padded
                vec sum[SOME];
                UNROLL for (int r = 0; r < SOME; r++)
                    sum[r] = vec{};
                UNROLL for (int64_t d = first; d < first + 8; d++) {
                    const vec m = load(terms + d * 2 * LANES), w = load(terms + (d * 2 + 1) * LANES);
                    UNROLL for (int r = 0; r < SOME; r++) {
                        const vec difference = m - x[(row + r) * width + d];
                        sum[r] += (difference * w) * difference;
                    }
                }
                UNROLL for (int r = 0; r < SOME; r++)
                    total[r] += sum[r];
            }
            UNROLL for (int r = 0; r < SOME; r++)
                store(o + (row + r) * components + k, load(bias + k) - total[r]);
        }
}

// In place of x: dx (T, D) = Σ_k dL (μ − x) / σ²; added up: Σ_n dL (x − μ) and Σ_n dL (x − μ)², both (K, D).
// The three share their difference; a strip of tokens stays in registers while the components pass by.
void logit_gradients(float *x, float *first, float *second, int64_t width, const float *grad,
                     int64_t components, const float *mean, const float *precision) {
    for (int64_t c = 0; c < width; c += LANES)
        for (int64_t row = 0; row < TOKENS; row += ROWS) {
            vec token[ROWS], sum[ROWS];
            UNROLL for (int r = 0; r < ROWS; r++)
                token[r] = load(x + (row + r) * width + c), sum[r] = vec{};
            for (int64_t k = 0; k < components; k++) {
                const int64_t at = k * width + c;
                const vec m = load(mean + at), p = load(precision + at);
                vec one = load(first + at), two = load(second + at);
                UNROLL for (int r = 0; r < ROWS; r++) {
                    const vec difference = token[r] - m,
                              scaled = difference * grad[(row + r) * components + k];
                    one += scaled;
                    two += scaled * difference;
                    sum[r] -= scaled * p;
                }
                store(first + at, one), store(second + at, two);
            }
            UNROLL for (int r = 0; r < ROWS; r++)
                store(x + (row + r) * width + c, sum[r]);
        }
}

// ------------------------------------------------------------------------------------ rows of a block

void multiply(float *to, float scale, int64_t cols) {
    for (int64_t c = 0; c < cols; c += LANES)
        store(to + c, load(to + c) * scale);
}

// One row at a time, each step would wait for the reduction before it; so each goes over all rows.
void softmax(float *rows, int64_t cols) {
    float most[TOKENS], sums[TOKENS];
    for (int64_t row = 0; row < TOKENS; row++) {
        vec top = load(rows + row * cols);
        for (int64_t c = LANES; c < cols; c += LANES)
            top = larger(load(rows + row * cols + c), top);
        most[row] = largest(top);
    }
    for (int64_t row = 0; row < TOKENS; row++) {
        vec sum = {};
        for (int64_t at = row * cols; at < (row + 1) * cols; at += LANES) {
            const vec e = exponential(load(rows + at) - most[row]);
            store(rows + at, e);
            sum += e;
        }
        sums[row] = total(sum);
    }
    for (int64_t row = 0; row < TOKENS; row++)
        multiply(rows + row * cols, 1 / sums[row], cols);
}

float dot(const float *a, const float *b, int64_t cols) {
    vec sum = {};
    for (int64_t c = 0; c < cols; c += LANES)
        sum += load(a + c) * load(b + c);
    return total(sum);
}

void add_scaled(float *to, const float *from, float scale, int64_t cols) {
    for (int64_t c = 0; c < cols; c += LANES)
        store(to + c, load(to + c) + load(from + c) * scale);
}

// g <- γ (g − Σ g γ), its column sums added to `sums`. The mean goes out twice: where one γ is nearly 1,
// its gradient is what rounding leaves of the rest.
void softmax_backward(float *grad, const float *gamma, float *sums, int64_t cols) {
    float mean[TOKENS], rest[TOKENS];
    for (int64_t row = 0; row < TOKENS; row++)
        mean[row] = dot(grad + row * cols, gamma + row * cols, cols);
    for (int64_t row = 0; row < TOKENS; row++) {
        vec sum = {};
        for (int64_t at = row * cols; at < (row + 1) * cols; at += LANES) {
            const vec centred = load(grad + at) - mean[row];
            store(grad + at, centred);
            sum += centred * load(gamma + at);
        }
        rest[row] = total(sum);
    }
    for (int64_t c = 0; c < cols; c += LANES) {
        vec sum = load(sums + c);
        for (int64_t row = 0; row < TOKENS; row++) {
            const int64_t at = row * cols + c;
            const vec value = load(gamma + at) * (load(grad + at) - rest[row]);
            store(grad + at, value);
            sum += value;
        }
        store(sums + c, sum);
    }
}

void add_rows(float *sums, const float *rows, int64_t cols) {
    for (int64_t row = 0; row < TOKENS; row++)
        add_scaled(sums, rows + row * cols, 1, cols);
}

void keep_lower(float *square) {
    for (int64_t row = 0; row < TOKENS; row++)
        for (int64_t c = row + 1; c < TOKENS; c++)
            square[row * TOKENS + c] = 0;
}

// (rows, cols) -> (cols, rows), both multiples of LANES
void transpose(float *to, const float *from, int64_t rows, int64_t cols) {
    for (int64_t row = 0; row < rows; row += LANES)
        for (int64_t c = 0; c < cols; c++) {
            vec column;
            UNROLL for (int i = 0; i < LANES; i++)
                column[i] = from[(row + i) * cols + c];
            store(to + c * rows + row, column);
        }
}

// ------------------------------------------------------------------------------------ blocks

struct Mixture { // of one head, in the layouts that the products want
    int64_t width, K, D;
    int64_t set_to = -1;     // which head
    float *terms, *constant; // see log_densities, and (K)
    float *mean, *weight;    // (K, D): gradients; null in forward
    float *precision;        // (D): of one component

    Mixture(const Call &call, Scratch &scratch, bool backward)
        : width(call.width), K(padded(call.components)), D(padded(call.width)),
          terms(scratch.take(2 * K * D)), constant(scratch.take(K)),
          mean(backward ? scratch.take(K * D) : nullptr), weight(backward ? scratch.take(K * D) : nullptr),
          precision(scratch.take(D)) {}

    void set(Call &call, int64_t head) {
        if (head == set_to)
            return;
        set_to = head;
        const float *means = call.means + head * call.components * width;
        const float *variances = call.variances + head * call.components * width;
        bool too_large = false;
        if (mean)
            std::memset(mean, 0, 4 * K * D), std::memset(weight, 0, 4 * K * D);
        std::memset(terms, 0, 8 * K * D);
        for (int64_t k = 0; k < K; k++)
            constant[k] = -1e30f; // what pads K is never chosen
        for (int64_t k = 0; k < call.components; k++, means += width, variances += width) {
            for (int64_t d = 0; d < width; d++)
                precision[d] = 1 / variances[d];
            double logs = 0, determinant[4] = {1, 1, 1, 1}; // of sixteen at a time: logarithms are slow
            for (int64_t d = 0; d < width; d++) {
                too_large |= !(std::fabs(means[d]) <= LARGEST && variances[d] <= LARGEST &&
                               variances[d] * LARGEST >= 1);
                float *term = terms + (k / LANES * D + d) * 2 * LANES + k % LANES;
                term[0] = means[d], term[LANES] = 0.5f * precision[d];
                determinant[d % 4] *= variances[d];
                if (d % 16 == 15 || d + 1 == width) {
                    logs += std::log((determinant[0] * determinant[1]) * (determinant[2] * determinant[3]));
                    std::fill(determinant, determinant + 4, 1);
                }
            }
            if (mean) {
                std::memcpy(mean + k * D, means, 4 * width);
                std::memcpy(weight + k * D, precision, 4 * width);
            }
            constant[k] = call.log_priors[head * call.components + k] - 0.5 * logs;
            too_large |= !(std::fabs(constant[k]) <= 1e30f);
        }
        if (too_large)
            call.too_large = 1;
    }

    template <class Ahead>
    void responsibilities(float *gamma, const float *x, const float *bias, Ahead ahead) const {
        log_densities(gamma, K, x, D, terms, bias, ahead);
        softmax(gamma, K);
    }
};

// Copy tokens first … first+count of one sequence to (TOKENS, padded width), less `centre` where there is
// one; what is absent or masked is zero.
void take(Call &call, float *to, const View &from, int64_t b, int64_t h, int64_t first, int64_t count,
          int64_t width, bool keys, const float *centre = nullptr) {
    const int64_t size = padded(width);
    const uint8_t *mask = keys && call.key_mask ? call.key_mask + b * call.keys.length + first : nullptr;
    vec top = {};
    auto keep = [&](int64_t c, vec x) {
        store(to + c, centre ? x - load(centre + c) : x);
        top = larger(larger(x, -x), top);
    };
    for (int64_t n = 0; n < TOKENS; n++, to += size) {
        if (n >= count || (mask && !mask[n])) {
            std::memset(to, 0, 4 * size);
            continue;
        }
        const float *row = from.at(b, h, first + n);
        int64_t c = 0;
        for (; c + LANES <= width; c += LANES)
            keep(c, *reinterpret_cast<const loose *>(row + c));
        if (c == size)
            continue;
        std::memset(to + c, 0, 4 * (size - c));
        std::memcpy(to + c, row + c, 4 * (width - c));
        for (; c < size; c += LANES)
            keep(c, load(to + c));
    }
    if (!(largest(top) <= LARGEST))
        call.too_large = 1;
}

void put(const View &to, const float *from, int64_t b, int64_t h, int64_t first, int64_t count,
         int64_t width) {
    for (int64_t n = 0; n < count; n++, from += padded(width)) {
        float *row = to.at(b, h, first + n);
        int64_t c = 0;
        for (; c + LANES <= width; c += LANES)
            *reinterpret_cast<loose *>(row + c) = load(from + c);
        if (c < width)
            std::memcpy(row + c, from + c, 4 * (width - c));
    }
}

// Zero the responsibilities of tokens that are absent or masked.
void clear(const Call &call, float *gamma, int64_t b, int64_t first, int64_t count, int64_t K) {
    const uint8_t *mask = call.key_mask ? call.key_mask + b * call.keys.length + first : nullptr;
    for (int64_t n = 0; n < TOKENS; n++)
        if (n >= count || (mask && !mask[n]))
            std::memset(gamma + n * K, 0, 4 * K);
}

// A block of keys and values, and the keys' responsibilities; `claim(n)`: see log_densities.
template <class Claim>
void take_keys(Call &call, const Mixture &mixture, float *x, float *v, float *gamma, int64_t b, int64_t h,
               int64_t first, int64_t count, const float *centre, Claim claim) {
    take(call, x, call.k, b, h, first, count, call.width, true);
    take(call, v, call.v, b, h, first, count, call.value_width, true, centre);
    mixture.responsibilities(gamma, x, mixture.constant, [&](int64_t n) {
        call.k.fetch(b, h, first + TOKENS + n, call.width);
        call.v.fetch(b, h, first + TOKENS + n, call.value_width);
        claim(n);
    });
    clear(call, gamma, b, first, count, mixture.K);
}

// (K, E) of the tensors between the passes, added to (padded K, padded E); and back.
void expand(float *to, const float *from, int64_t rows, int64_t width) {
    const int64_t size = padded(width);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < width; c++)
            to[r * size + c] += from[r * width + c];
}

void compact(float *to, const float *from, int64_t rows, int64_t width) {
    for (int64_t r = 0; r < rows; r++)
        std::memcpy(to + r * width, from + r * padded(width), 4 * width);
}

// What is taken from the values of a sequence and head, padded with zeros.
void take_centre(const Call &call, float *to, int64_t b, int64_t h) {
    std::memset(to, 0, 4 * padded(call.value_width));
    if (call.centre)
        std::memcpy(to, call.centre + (b * call.heads + h) * call.value_width, 4 * call.value_width);
}

struct Span { // tokens [first, last) of one split
    int64_t first, last;
    Span(const Side &side, int64_t split) {
        const int64_t blocks = (side.length + TOKENS - 1) / TOKENS;
        first = blocks * split / side.splits * TOKENS;
        last = std::min(side.length, blocks * (split + 1) / side.splits * TOKENS);
    }
};

// Run `work(head, part, first unit, last unit)` for every task: a unit is a split of a sequence.
template <class Work> void each_task(Call &call, const Side &side, Work work) {
    const int64_t units = call.batch * side.splits, tasks = call.heads * side.parts;
    for (;;) {
        const int64_t task = __atomic_fetch_add(&call.next, 1, __ATOMIC_RELAXED);
        if (task >= tasks)
            return;
        const int64_t head = task / side.parts, part = task % side.parts;
        work(head, part, units * part / side.parts, units * (part + 1) / side.parts);
    }
}

struct Sums { // of a part, for the gradients of the mixture: Σ dL (x − μ), Σ dL (x − μ)², Σ dL
    float *first, *second, *constant;
    int64_t K, D;

    Sums(const Call &call, Scratch &scratch) : K(padded(call.components)), D(padded(call.width)) {
        first = scratch.take(K * D), second = scratch.take(K * D), constant = scratch.take(K);
    }
    void clear() {
        std::memset(first, 0, 4 * K * D), std::memset(second, 0, 4 * K * D), std::memset(constant, 0, 4 * K);
    }

    void add_to(const Call &call, int64_t head, int64_t part) const {
        const int64_t rows = call.components, width = call.width;
        float *to = call.sums + (part * call.heads + head) * rows * (2 * width + 1);
        for (int64_t k = 0; k < rows; k++) {
            for (int64_t d = 0; d < width; d++) {
                to[k * width + d] += first[k * D + d];
                to[(rows + k) * width + d] += second[k * D + d];
            }
            to[2 * rows * width + k] += constant[k];
        }
    }
};

// Gradients for the mixture and, in place of a block's tokens, for these, given that of their logits.
void logits_backward(const Mixture &mixture, const Sums &sums, const float *grad, float *x) {
    logit_gradients(x, sums.first, sums.second, mixture.D, grad, mixture.K, mixture.mean, mixture.weight);
}

// What queries read: U = Ṽ / (Z + ε), weighted by Z + ε. Where a centre c was taken from the values, Ṽ is
// smaller by Z c: forward adds it again, backward wants U − c = (Ṽ − ε c) / (Z + ε), which keeps what tells
// keys apart.
struct Memory {
    int64_t K, E;
    float *values;       // (K, E): U or U − c
    float *scale, *bias; // (K): Z + ε, and what it adds to the logits
    float *centre;       // (E)
    Memory(const Call &call, Scratch &scratch)
        : K(padded(call.components)), E(padded(call.value_width)), values(scratch.take(K * E)),
          scale(scratch.take(K)), bias(scratch.take(K)), centre(scratch.take(E)) {}
    void set(const Call &call, const Mixture &mixture, int64_t b, int64_t h, bool centred) {
        std::memset(values, 0, 4 * K * E), std::memset(scale, 0, 4 * K);
        for (int64_t s = 0; s < call.keys.splits; s++) {
            const int64_t at = call.place(s, b, h);
            expand(values, call.written + at * call.value_width, call.components, call.value_width);
            expand(scale, call.mass + at, 1, call.components);
        }
        take_centre(call, centre, b, h);
        for (int64_t k = 0; k < K; k++) {
            add_scaled(values + k * E, centre, centred ? -call.eps : scale[k], E);
            scale[k] += call.eps;
            bias[k] = mixture.constant[k] + std::log(scale[k]);
            multiply(values + k * E, 1 / scale[k], E);
        }
    }
};

// ------------------------------------------------------------------------------------ bidirectional

void write(Call &call, Scratch &scratch) { // Ṽ = Γ_Kᵀ (V − c), Z = Γ_Kᵀ 1
    Mixture mixture(call, scratch, false);
    const int64_t K = mixture.K, D = mixture.D, E = padded(call.value_width);
    float *x = scratch.take(TOKENS * D), *gamma = scratch.take(TOKENS * K), *v = scratch.take(TOKENS * E);
    float *written = scratch.take(K * E), *mass = scratch.take(K), *centre = scratch.take(E);
    if (scratch.counts)
        return;
    each_task(call, call.keys, [&](int64_t h, int64_t, int64_t unit, int64_t last_unit) {
        mixture.set(call, h);
        for (; unit < last_unit; unit++) {
            const int64_t b = unit / call.keys.splits, split = unit % call.keys.splits;
            const Span span(call.keys, split);
            take_centre(call, centre, b, h);
            std::memset(written, 0, 4 * K * E), std::memset(mass, 0, 4 * K);
            for (int64_t first = span.first; first < span.last; first += TOKENS) {
                const int64_t count = std::min(TOKENS, span.last - first);
                take_keys(call, mixture, x, v, gamma, b, h, first, count, centre, [](int64_t) {});
                product<true>(written, K, E, gamma, 1, K, v, TOKENS);
                add_rows(mass, gamma, K);
            }
            const int64_t at = call.place(split, b, h);
            compact(call.written + at * call.value_width, written, call.components, call.value_width);
            std::memcpy(call.mass + at, mass, 4 * call.components);
        }
    });
}

void read(Call &call, Scratch &scratch) { // O = Γ_Q Ṽ / (Γ_Q Z + ε)
    Mixture mixture(call, scratch, false);
    Memory memory(call, scratch);
    const int64_t K = mixture.K, D = mixture.D, E = memory.E;
    float *x = scratch.take(TOKENS * D), *weights = scratch.take(TOKENS * K), *out = scratch.take(TOKENS * E);
    if (scratch.counts)
        return;
    each_task(call, call.queries, [&](int64_t h, int64_t, int64_t unit, int64_t last_unit) {
        mixture.set(call, h);
        for (; unit < last_unit; unit++) {
            const int64_t b = unit / call.queries.splits;
            const Span span(call.queries, unit % call.queries.splits);
            memory.set(call, mixture, b, h, false);
            for (int64_t first = span.first; first < span.last; first += TOKENS) {
                const int64_t count = std::min(TOKENS, span.last - first);
                take(call, x, call.q, b, h, first, count, call.width, false);
                mixture.responsibilities(weights, x, memory.bias, [&](int64_t n) {
                    call.q.fetch(b, h, first + TOKENS + n, call.width);
                    call.out.claim(b, h, first + n, call.value_width);
                });
                product<false>(out, TOKENS, E, weights, K, 1, memory.values, K);
                put(call.out, out, b, h, first, count, call.value_width);
            }
        }
    });
}

void read_backward(Call &call, Scratch &scratch) {
    Mixture mixture(call, scratch, true);
    Sums sums(call, scratch);
    Memory memory(call, scratch);
    const int64_t K = mixture.K, D = mixture.D, E = memory.E;
    float *x = scratch.take(TOKENS * D), *weights = scratch.take(TOKENS * K),
          *grad = scratch.take(TOKENS * K);
    float *upstream = scratch.take(TOKENS * E);
    float *by_width = scratch.take(K * E), *grad_values = scratch.take(K * E), *grad_bias = scratch.take(K);
    if (scratch.counts)
        return;
    each_task(call, call.queries, [&](int64_t h, int64_t part, int64_t unit, int64_t last_unit) {
        mixture.set(call, h);
        sums.clear();
        for (; unit < last_unit; unit++) {
            const int64_t b = unit / call.queries.splits, split = unit % call.queries.splits;
            const Span span(call.queries, split);
            memory.set(call, mixture, b, h, true);
            transpose(by_width, memory.values, K, E);
            std::memset(grad_values, 0, 4 * K * E), std::memset(grad_bias, 0, 4 * K);
            for (int64_t first = span.first; first < span.last; first += TOKENS) {
                const int64_t count = std::min(TOKENS, span.last - first);
                take(call, x, call.q, b, h, first, count, call.width, false);
                take(call, upstream, call.grad_out, b, h, first, count, call.value_width, false);
                mixture.responsibilities(weights, x, memory.bias, [&](int64_t n) {
                    call.q.fetch(b, h, first + TOKENS + n, call.width);
                    call.grad_out.fetch(b, h, first + TOKENS + n, call.value_width);
                    call.grad_q.claim(b, h, first + n, call.width);
                });
                product<true>(grad_values, K, E, weights, 1, K, upstream, TOKENS);
                product<false>(grad, TOKENS, K, upstream, E, 1, by_width, E);
                softmax_backward(grad, weights, grad_bias, K);
                logits_backward(mixture, sums, grad, x);
                put(call.grad_q, x, b, h, first, count, call.width);
            }
            for (int64_t k = 0; k < K; k++)
                sums.constant[k] += grad_bias[k];
            // of Ṽ and Z, which U and log(Z + ε) are made of
            const int64_t at = call.place(split, b, h);
            for (int64_t k = 0; k < call.components; k++) {
                const float inner = dot(grad_values + k * E, memory.values + k * E, E);
                call.grad_bias[at + k] = (grad_bias[k] - inner) / memory.scale[k];
                multiply(grad_values + k * E, 1 / memory.scale[k], E);
            }
            compact(call.grad_memory + at * call.value_width, grad_values, call.components, call.value_width);
        }
        sums.add_to(call, h, part);
    });
}

void write_backward(Call &call, Scratch &scratch) {
    Mixture mixture(call, scratch, true);
    Sums sums(call, scratch);
    const int64_t K = mixture.K, D = mixture.D, E = padded(call.value_width);
    float *x = scratch.take(TOKENS * D), *gamma = scratch.take(TOKENS * K), *grad = scratch.take(TOKENS * K);
    float *v = scratch.take(TOKENS * E);
    float *memory = scratch.take(K * E), *by_width = scratch.take(K * E), *bias = scratch.take(K);
    float *centre = scratch.take(E);
    if (scratch.counts)
        return;
    each_task(call, call.keys, [&](int64_t h, int64_t part, int64_t unit, int64_t last_unit) {
        mixture.set(call, h);
        sums.clear();
        for (; unit < last_unit; unit++) {
            const int64_t b = unit / call.keys.splits;
            const Span span(call.keys, unit % call.keys.splits);
            std::memset(memory, 0, 4 * K * E), std::memset(bias, 0, 4 * K);
            for (int64_t s = 0; s < call.queries.splits; s++) {
                const int64_t at = call.place(s, b, h);
                expand(memory, call.grad_memory + at * call.value_width, call.components, call.value_width);
                expand(bias, call.grad_bias + at, 1, call.components);
            }
            transpose(by_width, memory, K, E);
            take_centre(call, centre, b, h);
            for (int64_t first = span.first; first < span.last; first += TOKENS) {
                const int64_t count = std::min(TOKENS, span.last - first);
                take_keys(call, mixture, x, v, gamma, b, h, first, count, centre, [&](int64_t n) {
                    call.grad_k.claim(b, h, first + n, call.width);
                    call.grad_v.claim(b, h, first + n, call.value_width);
                });
                product<false>(grad, TOKENS, K, v, E, 1, by_width, E);
                for (int64_t n = 0; n < TOKENS; n++)
                    add_scaled(grad + n * K, bias, 1, K);
                product<false>(v, TOKENS, E, gamma, K, 1, memory, K);
                put(call.grad_v, v, b, h, first, count, call.value_width);
                softmax_backward(grad, gamma, sums.constant, K);
                logits_backward(mixture, sums, grad, x);
                put(call.grad_k, x, b, h, first, count, call.width);
            }
        }
        sums.add_to(call, h, part);
    });
}

// ------------------------------------------------------------------------------------ causal

// A sequence is one unit: chunks follow one another, each with the state of all before it.

int64_t saved_states(const Call &call) {
    return (call.queries.length + CHUNKS * TOKENS - 1) / (CHUNKS * TOKENS);
}

// Affinity Γ_Q Γ_Kᵀ of a chunk, zero above the diagonal, and what each query finds, Γ_Q Z: its denominator
// without ε.
void affinities(float *affinity, float *found, const float *gamma_q, const float *gamma_k, const float *mass,
                float *by_component, int64_t K) {
    transpose(by_component, gamma_k, TOKENS, K);
    product<false, RESULT>(affinity, TOKENS, TOKENS, gamma_q, K, 1, by_component, K);
    keep_lower(affinity);
    for (int64_t n = 0; n < TOKENS; n++) {
        vec sum = {};
        for (int64_t c = 0; c <= n; c += LANES)
            sum += load(affinity + n * TOKENS + c);
        found[n] = total(sum) + dot(gamma_q + n * K, mass, K);
    }
}

void causal(Call &call, Scratch &scratch) {
    Mixture mixture(call, scratch, false);
    const int64_t K = mixture.K, D = mixture.D, E = padded(call.value_width);
    float *x = scratch.take(TOKENS * D), *gamma_q = scratch.take(TOKENS * K),
          *gamma_k = scratch.take(TOKENS * K);
    float *by_component = scratch.take(K * TOKENS), *affinity = scratch.take(TOKENS * TOKENS);
    float *found = scratch.take(TOKENS), *v = scratch.take(TOKENS * E), *out = scratch.take(TOKENS * E);
    float *state = scratch.take(K * E), *mass = scratch.take(K), *centre = scratch.take(E);
    if (scratch.counts)
        return;
    each_task(call, call.queries, [&](int64_t h, int64_t, int64_t b, int64_t last) {
        mixture.set(call, h);
        for (; b < last; b++) {
            take_centre(call, centre, b, h);
            std::memset(state, 0, 4 * K * E), std::memset(mass, 0, 4 * K);
            for (int64_t first = 0; first < call.queries.length; first += TOKENS) {
                const int64_t count = std::min(TOKENS, call.queries.length - first);
                if (first % (CHUNKS * TOKENS) == 0) {
                    const int64_t index = first / (CHUNKS * TOKENS);
                    const int64_t at = call.place(index, b, h);
                    compact(call.written + at * call.value_width, state, call.components, call.value_width);
                    std::memcpy(call.mass + at, mass, 4 * call.components);
                }
                take(call, x, call.q, b, h, first, count, call.width, false);
                mixture.responsibilities(gamma_q, x, mixture.constant, [&](int64_t n) {
                    call.q.fetch(b, h, first + TOKENS + n, call.width);
                });
                take_keys(call, mixture, x, v, gamma_k, b, h, first, count, centre,
                          [&](int64_t n) { call.out.claim(b, h, first + n, call.value_width); });
                affinities(affinity, found, gamma_q, gamma_k, mass, by_component, K);
                product<false>(out, TOKENS, E, gamma_q, K, 1, state, K);
                product<true, LOWER>(out, TOKENS, E, affinity, TOKENS, 1, v, TOKENS);
                for (int64_t n = 0; n < count; n++) {
                    if (call.centre && found[n] > 0)
                        add_scaled(out + n * E, centre, found[n], E);
                    multiply(out + n * E, 1 / (found[n] + call.eps), E);
                }
                put(call.out, out, b, h, first, count, call.value_width);
                product<true>(state, K, E, gamma_k, 1, K, v, TOKENS);
                add_rows(mass, gamma_k, K);
            }
        }
    });
}

void causal_backward(Call &call, Scratch &scratch) {
    Mixture mixture(call, scratch, true);
    Sums sums(call, scratch);
    const int64_t K = mixture.K, D = mixture.D, E = padded(call.value_width);
    float *gammas = scratch.take(CHUNKS * TOKENS * K);                                // of the keys
    float *states = scratch.take(CHUNKS * E * K), *masses = scratch.take(CHUNKS * K); // before each chunk
    float *later_by_width = scratch.take(E * K), *later = scratch.take(K * E), *later_mass = scratch.take(K);
    float *x = scratch.take(TOKENS * D), *gamma_q = scratch.take(TOKENS * K),
          *by_component = scratch.take(K * TOKENS);
    float *grad_query = scratch.take(TOKENS * K), *grad_key = scratch.take(TOKENS * K);
    float *v = scratch.take(TOKENS * E), *v_by_width = scratch.take(E * TOKENS),
          *grad_v = scratch.take(TOKENS * E);
    float *upstream = scratch.take(TOKENS * E), *affinity = scratch.take(TOKENS * TOKENS);
    float *grad_affinity = scratch.take(TOKENS * TOKENS), *found = scratch.take(TOKENS);
    float *grad_denominator = scratch.take(TOKENS), *centre = scratch.take(E);
    const int64_t length = call.queries.length;

    // The states before each chunk from a saved one, and the keys' responsibilities.
    auto forward = [&](int64_t h, int64_t b, int64_t index) {
        const int64_t at = call.place(index, b, h);
        std::memset(masses, 0, 4 * K);
        expand(masses, call.mass + at, 1, call.components);
        std::memset(states, 0, 4 * E * K);
        const float *from = call.written + at * call.value_width;
        for (int64_t k = 0; k < call.components; k++)
            for (int64_t e = 0; e < call.value_width; e++)
                states[e * K + k] = from[k * call.value_width + e];
        const int64_t start = index * CHUNKS * TOKENS,
                      chunks = std::min(CHUNKS, (length - start + TOKENS - 1) / TOKENS);
        for (int64_t c = 0; c < chunks; c++) {
            const int64_t first = start + c * TOKENS, count = std::min(TOKENS, length - first);
            float *gamma = gammas + c * TOKENS * K;
            take(call, x, call.k, b, h, first, count, call.width, true);
            mixture.responsibilities(gamma, x, mixture.constant, [&](int64_t n) {
                call.k.fetch(b, h, first + TOKENS + n, call.width);
                call.v.fetch(b, h, first + n, call.value_width);
            });
            clear(call, gamma, b, first, count, K);
            if (c + 1 == chunks)
                break;
            take(call, v, call.v, b, h, first, count, call.value_width, true, centre);
            std::memcpy(states + (c + 1) * E * K, states + c * E * K, 4 * E * K);
            std::memcpy(masses + (c + 1) * K, masses + c * K, 4 * K);
            product<true>(states + (c + 1) * E * K, E, K, v, 1, E, gamma, TOKENS);
            add_rows(masses + (c + 1) * K, gamma, K);
        }
        return chunks;
    };

    if (scratch.counts)
        return;
    each_task(call, call.queries, [&](int64_t h, int64_t part, int64_t b, int64_t last) {
        mixture.set(call, h);
        sums.clear();
        for (; b < last; b++) {
            take_centre(call, centre, b, h);
            std::memset(later_by_width, 0, 4 * K * E), std::memset(later_mass, 0, 4 * K);
            for (int64_t index = saved_states(call) - 1; index >= 0; index--) {
                for (int64_t c = forward(h, b, index) - 1; c >= 0; c--) {
                    const int64_t first = (index * CHUNKS + c) * TOKENS,
                                  count = std::min(TOKENS, length - first);
                    const float *gamma_k = gammas + c * TOKENS * K, *mass = masses + c * K;
                    take(call, x, call.q, b, h, first, count, call.width, false);
                    take(call, v, call.v, b, h, first, count, call.value_width, true, centre);
                    take(call, upstream, call.grad_out, b, h, first, count, call.value_width, false);
                    mixture.responsibilities(gamma_q, x, mixture.constant, [&](int64_t n) {
                        call.k.fetch(b, h, first + n, call.width);
                        call.q.fetch(b, h, first - TOKENS + n, call.width);
                        call.v.fetch(b, h, first - TOKENS + n, call.value_width);
                        call.grad_out.fetch(b, h, first - TOKENS + n, call.value_width);
                        call.grad_q.claim(b, h, first + n, call.width);
                        call.grad_k.claim(b, h, first + n, call.width);
                        call.grad_v.claim(b, h, first + n, call.value_width);
                    });
                    affinities(affinity, found, gamma_q, gamma_k, mass, by_component, K);
                    for (int64_t n = 0; n < TOKENS; n++)
                        multiply(upstream + n * E, 1 / (found[n] + call.eps), E);
                    // of the affinity and of the queries' responsibilities
                    transpose(v_by_width, v, TOKENS, E);
                    product<false, RESULT>(grad_affinity, TOKENS, TOKENS, upstream, E, 1, v_by_width, E);
                    product<false>(grad_query, TOKENS, K, upstream, E, 1, states + c * E * K, E);
                    keep_lower(grad_affinity);
                    for (int64_t n = 0; n < TOKENS; n++) {
                        float *row = grad_affinity + n * TOKENS;
                        float inner = dot(row, affinity + n * TOKENS, TOKENS) +
                                      dot(grad_query + n * K, gamma_q + n * K, K);
                        if (call.centre && found[n] > 0)
                            inner -= call.eps * dot(upstream + n * E, centre, E);
                        const float grad = grad_denominator[n] = -inner / (found[n] + call.eps);
                        for (int64_t j = 0; j <= n; j++)
                            row[j] += grad;
                        add_scaled(grad_query + n * K, mass, grad, K);
                    }
                    product<true, LOWER>(grad_query, TOKENS, K, grad_affinity, TOKENS, 1, gamma_k, TOKENS);
                    // of the keys' responsibilities and the values, those that later chunks want among them
                    transpose(later, later_by_width, E, K);
                    product<false>(grad_v, TOKENS, E, gamma_k, K, 1, later, K);
                    product<true, UPPER>(grad_v, TOKENS, E, affinity, 1, TOKENS, upstream, TOKENS);
                    put(call.grad_v, grad_v, b, h, first, count, call.value_width);
                    product<false>(grad_key, TOKENS, K, v, E, 1, later_by_width, E);
                    product<true, UPPER>(grad_key, TOKENS, K, grad_affinity, 1, TOKENS, gamma_q, TOKENS);
                    for (int64_t n = 0; n < TOKENS; n++)
                        add_scaled(grad_key + n * K, later_mass, 1, K);
                    // what earlier chunks will want
                    product<true>(later_by_width, E, K, upstream, 1, E, gamma_q, TOKENS);
                    for (int64_t n = 0; n < TOKENS; n++)
                        add_scaled(later_mass, gamma_q + n * K, grad_denominator[n], K);
                    // of the logits
                    softmax_backward(grad_query, gamma_q, sums.constant, K);
                    logits_backward(mixture, sums, grad_query, x);
                    put(call.grad_q, x, b, h, first, count, call.width);
                    take(call, x, call.k, b, h, first, count, call.width, true);
                    softmax_backward(grad_key, gamma_k, sums.constant, K);
                    logits_backward(mixture, sums, grad_key, x);
                    put(call.grad_k, x, b, h, first, count, call.width);
                }
            }
        }
        sums.add_to(call, h, part);
    });
}

// Gradients of means, variances and log priors from the sums of all parts, which are added in double.
void finish(Call &call, Scratch &scratch) {
    if (scratch.counts)
        return;
    constexpr int64_t SOME = 16; // of the width at a time
    const int64_t rows = call.components, width = call.width, size = rows * (2 * width + 1);
    const int64_t parts = std::max(call.queries.parts, call.keys.parts);
    for (int64_t h = 0; h < call.heads; h++)
        for (int64_t k = 0; k < rows; k++) {
            double constant = 0;
            for (int64_t p = 0; p < parts; p++)
                constant += call.sums[(p * call.heads + h) * size + 2 * rows * width + k];
            call.grad_log_priors[h * rows + k] = constant;
            for (int64_t begin = 0; begin < width; begin += SOME) {
                const int64_t count = std::min(SOME, width - begin), at = (h * rows + k) * width + begin;
                double first[SOME] = {}, second[SOME] = {};
                for (int64_t p = 0; p < parts; p++) {
                    const float *sums = call.sums + (p * call.heads + h) * size + begin;
                    for (int64_t d = 0; d < count; d++) {
                        first[d] += sums[k * width + d];
                        second[d] += sums[(rows + k) * width + d];
                    }
                }
                for (int64_t d = 0; d < count; d++) {
                    const double precision = 1.0 / call.variances[at + d];
                    call.grad_means[at + d] = first[d] * precision;
                    call.grad_variances[at + d] = 0.5 * (second[d] * precision - constant) * precision;
                }
            }
        }
}

void (*const STEPS[])(Call &, Scratch &) = {
    // native.py: STEPS
    write, read, read_backward, write_backward, causal, causal_backward, finish,
};

} // namespace

extern "C" {

// Floats of scratch that one worker needs for the call's step.
int64_t gma_scratch(Call *call) {
    Scratch none{nullptr, true};
    STEPS[call->step](*call, none);
    return none.used;
}

void gma_work(Call *call) { // what every thread of a team runs
    const int64_t worker = __atomic_fetch_add(&call->workers, 1, __ATOMIC_RELAXED);
    Scratch scratch{call->scratch + worker * call->scratch_size, false};
    STEPS[call->step](*call, scratch);
}

int64_t gma_state_tokens() { return CHUNKS * TOKENS; }
int64_t gma_call_bytes() { return sizeof(Call); }
}
