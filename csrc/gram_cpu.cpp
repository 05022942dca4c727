// The Gram accumulator on a CPU (gram.h says what it computes).
//
// Rows that enter are copied, as f32, into panels of 16 columns that one product reads from end to end; every tile of
// the upper triangle then goes through them in blocks of kBlock rows: f32 in registers within a block, f64 from block
// to block, one rounding into G at the end. Each element is one thread's, and its order is fixed, so the bits do not
// depend on how many threads there are. AVX2 and AVX-512 do the same multiply-adds in the same order and agree too.
//
// std::thread and no OpenMP: torch's wheels bring an OpenMP runtime of their own, and a second one in the process has a
// second pool that spins. Starting a thread takes some 20 microseconds, a window of rows takes milliseconds and more.
#include "gram.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace cortiq {
namespace {

constexpr int64_t kPanel = 16;               // columns of a packed panel
constexpr int64_t kBlock = 128;              // rows of a block: a's and b's panels of a product stay in the L1 cache
constexpr int64_t kWorkspace = 128LL << 20;  // most bytes of packed rows at a time
constexpr int64_t kTiny = 1LL << 22;         // multiply-adds that are over before a thread has started
constexpr int64_t kPanels = kTile / kPanel;

using Micro = void (*)(int64_t, const float*, const float*, int64_t, const float*, double*, bool);

struct Kernel {
    const char* name;
    int64_t rows, cols;  // of one product
    Micro plain, weighted;
};

// The innermost product: kRows rows and kVecs registers of kWidth columns of a tile, held in registers.
//
//   c[m, v] (+)= sum_t a[t, m] * (w[t] * b[t, v])    t < kc in order, in f32; then added to c in f64
//
// a, b: panels, [t][kPanel]; b continues in the next panel, `next` floats on. It is compiled for the instruction set of
// the function that it is inlined into.
template <int kWidth, int kRows, int kVecs, bool weighted>
[[gnu::always_inline]] inline void micro(int64_t kc, const float* __restrict__ a, const float* __restrict__ b,
                                         int64_t next, const float* __restrict__ w, double* __restrict__ c,
                                         bool first) {
    typedef float Vec __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));
    constexpr int kCols = kWidth * kVecs;
    Vec acc[kRows][kVecs] = {};
    for (int64_t t = 0; t < kc; ++t) {
        Vec col[kVecs];
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) {
            col[v] = *reinterpret_cast<const Vec*>(b + (v * kWidth / kPanel) * next + t * kPanel + v * kWidth % kPanel);
            if (weighted) col[v] *= w[t];
        }
#pragma GCC unroll 16
        for (int m = 0; m < kRows; ++m) {
            const float row = a[t * kPanel + m];
#pragma GCC unroll 8
            for (int v = 0; v < kVecs; ++v) acc[m][v] += row * col[v];
        }
    }
    alignas(64) float sums[kRows][kCols];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) *reinterpret_cast<Vec*>(&sums[m][v * kWidth]) = acc[m][v];
    for (int m = 0; m < kRows; ++m) {
        double* out = c + m * kTile;
        if (first)
            for (int k = 0; k < kCols; ++k) out[k] = sums[m][k];
        else
            for (int k = 0; k < kCols; ++k) out[k] += sums[m][k];
    }
}

template <bool weighted>
void micro_plain(int64_t kc, const float* a, const float* b, int64_t next, const float* w, double* c, bool first) {
    micro<4, 4, 2, weighted>(kc, a, b, next, w, c, first);
}

#if defined(__x86_64__)
template <bool weighted>
__attribute__((target("avx2,fma"))) void micro_avx2(int64_t kc, const float* a, const float* b, int64_t next,
                                                    const float* w, double* c, bool first) {
    micro<8, 4, 2, weighted>(kc, a, b, next, w, c, first);
}

template <bool weighted>
__attribute__((target("avx512f,avx2,fma"))) void micro_avx512(int64_t kc, const float* a, const float* b, int64_t next,
                                                              const float* w, double* c, bool first) {
    micro<16, 8, 2, weighted>(kc, a, b, next, w, c, first);
}
#endif

constexpr Kernel kKernels[] = {
#if defined(__x86_64__)
    {"avx512", 8, 32, micro_avx512<false>, micro_avx512<true>},
    {"avx2", 4, 16, micro_avx2<false>, micro_avx2<true>},
#endif
    {"plain", 4, 8, micro_plain<false>, micro_plain<true>},
};

bool runs_here(const Kernel& kernel) {
#if defined(__x86_64__)  // __builtin_cpu_supports also asks whether the system saves the registers
    if (!std::strcmp(kernel.name, "avx512")) return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("fma");
    if (!std::strcmp(kernel.name, "avx2")) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    (void)kernel;
    return true;
}

const Kernel* pick(const char* isa) {
    for (const Kernel& kernel : kKernels)
        if ((!isa || !std::strcmp(isa, kernel.name)) && runs_here(kernel)) return &kernel;
    return nullptr;
}

// Call work(k) for every k < count, each once, from up to `threads` threads. Where the system gives no more of them,
// those that there are do it all.
template <class Work>
void each(int64_t count, int threads, const Work& work) {
    std::atomic<int64_t> next{0};
    auto run = [&] {
        for (int64_t k; (k = next.fetch_add(1, std::memory_order_relaxed)) < count;) work(k);
    };
    std::vector<std::thread> others;
    const int64_t wanted = std::min<int64_t>(threads, count) - 1;
    others.reserve(wanted > 0 ? wanted : 0);
    try {
        for (int64_t k = 0; k < wanted; ++k) others.emplace_back(run);
    } catch (const std::system_error&) {
    }
    run();
    for (std::thread& other : others) other.join();
}

inline float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline float widen(float x) { return x; }

struct BFloat16 {
    uint16_t bits;
};
inline float widen(BFloat16 x) { return from_bits(uint32_t(x.bits) << 16); }

struct Float16 {
    uint16_t bits;
};
inline float widen(Float16 x) {
    const uint32_t rest = x.bits & 0x7fffu, sign = (x.bits & 0x8000u) << 16;
    const float tiny = float(int32_t(rest)) * 0x1p-24f;  // below 0x400 the bits count units of 2^-24
    const uint32_t rebased = (rest << 13) + ((rest >= 0x7c00u ? 224u : 112u) << 23);
    uint32_t bits;
    std::memcpy(&bits, &tiny, sizeof bits);
    return from_bits((rest < 0x400u ? bits : rebased) | sign);
}

struct Rows {
    std::vector<int64_t> index;  // the rows of x that enter, in order
    std::vector<float> weight;   // theirs; empty when all are 1
};

// False when row_index points outside x.
bool enter(const GramArgs& args, Rows& rows) {
    const int64_t count = args.row_index ? args.rows : args.tokens;
    bool ones = true;
    rows.index.reserve(count);
    if (args.row_weight) rows.weight.reserve(count);
    for (int64_t k = 0; k < count; ++k) {
        const int64_t row = args.row_index ? args.row_index[k] : k;
        if (row < 0 || row >= args.tokens) return false;
        if (args.row_weight) {
            const float weight = args.row_weight[k];
            if (weight == 0) continue;
            ones = ones && weight == 1;
            rows.weight.push_back(weight);
        }
        rows.index.push_back(row);
    }
    if (ones) rows.weight.clear();
    return true;
}

template <class T>
const T* row_of(const GramArgs& args, int64_t row) {
    return static_cast<const T*>(args.x) + row * args.row_stride;
}

// 1 where x is NaN or infinite, else 0. Integers, because the compiler may not reorder a float's sum into vectors.
inline uint32_t broken(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return (bits & 0x7f800000u) == 0x7f800000u;
}

template <class T>
bool finite(const T* x, int64_t n) {
    uint32_t bad = 0;
    for (int64_t k = 0; k < n; ++k) bad |= broken(widen(x[k]));
    return !bad;
}

// The kc rows of x that index names into out, [panel][t][kPanel], zeros beyond n.
template <class T>
void pack(const GramArgs& args, const int64_t* index, int64_t kc, int64_t panels, float* out) {
    for (int64_t t = 0; t < kc; ++t) {
        const T* x = row_of<T>(args, index[t]);
        for (int64_t p = 0; p < panels; ++p) {
            float* to = out + (p * kBlock + t) * kPanel;
            const int64_t left = std::min(kPanel, args.n - p * kPanel);
            if (left == kPanel)
                for (int64_t k = 0; k < kPanel; ++k) to[k] = widen(x[p * kPanel + k]);
            else
                for (int64_t k = 0; k < kPanel; ++k) to[k] = k < left ? widen(x[p * kPanel + k]) : 0.0f;
        }
    }
}

// One chunk of packed rows, [block][panel][t][kPanel], and what a tile needs of it.
struct Chunk {
    const float* packed;
    const float* weight;  // [rows] or null
    int64_t rows, panels, n;
};

// What one thread does at a time: rows [top, bottom) of tile (i, j), of which `width` columns lie within n.
struct Strip {
    int64_t i, j, top, bottom, width;
};

// The chunk's part of a strip into sums [kTile, kTile]; in a diagonal tile, the products that reach the upper half.
void strip_sums(const Chunk& chunk, const Kernel& kernel, const Strip& s, double* sums) {
    const Micro micro = chunk.weight ? kernel.weighted : kernel.plain;
    for (int64_t row = 0; row < chunk.rows; row += kBlock) {
        const float* block = chunk.packed + row * chunk.panels * kPanel;
        const float* weight = chunk.weight ? chunk.weight + row : nullptr;
        const int64_t kc = std::min(kBlock, chunk.rows - row);
        for (int64_t c = 0; c < s.width; c += kernel.cols) {
            const float* b = block + (s.j * kPanels + c / kPanel) * kBlock * kPanel + c % kPanel;
            const int64_t end = s.i < s.j ? s.bottom : std::min(s.bottom, c + kernel.cols);
            for (int64_t r = s.top; r < end; r += kernel.rows) {
                const float* a = block + (s.i * kPanels + r / kPanel) * kBlock * kPanel + r % kPanel;
                micro(kc, a, b, kBlock * kPanel, weight, sums + r * kTile + c, row == 0);
            }
        }
    }
}

// tile += sums in the strip, each element of a diagonal tile also in its mirror; false when a result is not finite.
bool add_strip(const Strip& s, const double* sums, float* tile) {
    uint32_t bad = 0;
    for (int64_t r = s.top; r < s.bottom; ++r)
        for (int64_t c = s.i == s.j ? r : 0; c < s.width; ++c) {
            const float sum = float(double(tile[r * kTile + c]) + sums[r * kTile + c]);
            tile[r * kTile + c] = sum;
            bad |= broken(sum);
        }
    if (s.i == s.j)
        for (int64_t r = s.top; r < s.bottom; ++r)
            for (int64_t c = r + 1; c < s.width; ++c) tile[c * kTile + r] = tile[r * kTile + c];
    return !bad;
}

struct Free {
    void operator()(void* p) const { std::free(p); }
};

template <class T>
std::unique_ptr<T, Free> allocate(int64_t count) {
    const size_t bytes = (size_t(count) * sizeof(T) + 63) / 64 * 64;
    T* p = static_cast<T*>(std::aligned_alloc(64, bytes));
    if (!p) throw std::bad_alloc();
    return std::unique_ptr<T, Free>(p);
}

template <class T>
GramStatus accumulate(const GramArgs& args, const Kernel& kernel, const Rows& rows) {
    const int64_t count = int64_t(rows.index.size());
    const bool tiny = count * args.n < kTiny / args.n;
    const int threads = tiny ? 1 : std::max(1, args.threads);
    const int64_t tiles = (args.n + kTile - 1) / kTile, panels = tiles * kPanels, row_bytes = panels * kPanel * 4;
    const int64_t most = std::max(kBlock, kWorkspace / row_bytes / kBlock * kBlock);
    const int64_t chunk_rows = std::min(most, (count + kBlock - 1) / kBlock * kBlock);
    const auto packed = allocate<float>(chunk_rows * panels * kPanel);
    // Whole tiles read least; where they are too few to go round, strips of a quarter. The bits are the same.
    const int64_t whole = tiles * (tiles + 1) / 2, parts = threads > 1 && whole < 8 * threads ? 4 : 1;
    const int64_t tasks = whole * parts;
    const int64_t workers = std::min<int64_t>(threads, tasks);
    const auto sums = allocate<double>(workers * kTile * kTile);

    std::atomic<bool> fine{true};
    if (args.keep) {
        if (!finite(rows.weight.data(), int64_t(rows.weight.size()))) return GramStatus::kept;
        each((count + kBlock - 1) / kBlock, threads, [&](int64_t block) {
            const int64_t end = std::min(count, (block + 1) * kBlock);
            for (int64_t k = block * kBlock; k < end; ++k)
                if (!finite(row_of<T>(args, rows.index[k]), args.n)) fine.store(false, std::memory_order_relaxed);
        });
        if (!fine) return GramStatus::kept;
    }

    for (int64_t start = 0; start < count; start += chunk_rows) {
        const int64_t size = std::min(chunk_rows, count - start);
        each((size + kBlock - 1) / kBlock, threads, [&](int64_t block) {
            const int64_t row = block * kBlock;
            float* out = packed.get() + row * panels * kPanel;
            pack<T>(args, &rows.index[start + row], std::min(kBlock, size - row), panels, out);
        });
        const Chunk chunk{packed.get(), rows.weight.empty() ? nullptr : &rows.weight[start], size, panels, args.n};
        std::atomic<int64_t> next{0};
        each(workers, int(workers), [&](int64_t worker) {
            double* mine = sums.get() + worker * kTile * kTile;
            for (int64_t at; (at = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
                int64_t i = 0, j = at / parts;  // tile (i, j) has this number: row i has tiles - i of them
                while (j >= tiles - i) j -= tiles - i++;
                j += i;
                const int64_t top = at % parts * (kTile / parts), height = std::min(kTile, args.n - i * kTile);
                const int64_t bottom = std::min(top + kTile / parts, height);
                const Strip strip{i, j, top, bottom, std::min(kTile, args.n - j * kTile)};
                strip_sums(chunk, kernel, strip, mine);
                float* tile = args.gram + at / parts * kTile * kTile;
                if (!add_strip(strip, mine, tile)) fine.store(false, std::memory_order_relaxed);
            }
        });
    }
    return fine ? GramStatus::ok : GramStatus::nonfinite;
}

}  // namespace

GramStatus gram_cpu(const GramArgs& args) {
    const Kernel* kernel = pick(args.isa);
    if (!kernel) return GramStatus::bad_isa;
    Rows rows;
    if (!enter(args, rows)) return GramStatus::bad_index;
    if (rows.index.empty() || args.n == 0) return GramStatus::ok;
    switch (args.dtype) {
        case Dtype::bf16: return accumulate<BFloat16>(args, *kernel, rows);
        case Dtype::f16: return accumulate<Float16>(args, *kernel, rows);
        case Dtype::f32: break;
    }
    return accumulate<float>(args, *kernel, rows);
}

const char* const* gram_cpu_isas() {
    static const char* names[std::size(kKernels) + 1] = {};
    static const bool filled = [] {
        int k = 0;
        for (const Kernel& kernel : kKernels)
            if (runs_here(kernel)) names[k++] = kernel.name;
        return true;
    }();
    (void)filled;
    return names;
}

}  // namespace cortiq
