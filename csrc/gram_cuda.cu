// The Gram accumulator on a GPU: what is launched, over which rows, and in what memory. Nothing here waits for the GPU.
//
// The two kernels of the product (gram_sm90.cuh, gram_mma.cuh) read rows of 16-bit numbers that begin at multiples of
// 16 bytes. A bf16 or f16 x that lies like that, and of which all rows enter, is read in place. Otherwise rows are
// copied to the workspace first (gram_stage.cuh): picked, aligned, f32 as the sum of two bf16 (three products: the
// fourth is below 2^-16 of the result, and so is what two bf16 leave of f32). Weights are on the device, so what they
// ask for is only known there: the rows whose weight is not zero are counted, kernels for the case that all of them are
// 1 and kernels for the other case are both launched, and those that have nothing to do return. Thus a mask gives the
// bits of the rows that it keeps.
//
// A launch takes at most 8192 rows, and where it begins depends on nothing but the rows that enter.
#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <string>

#include "gram_mma.cuh"
#include "gram_sm90.cuh"
#include "gram_stage.cuh"

namespace cortiq {
namespace {

constexpr int64_t kRowsAtOnce = 8192;
constexpr int64_t kHead = 16384;  // bytes of the workspace before its lists and rows: Rows, then turns
constexpr int kLookers = 2048;  // blocks that look for what is not finite
constexpr int kDevices = 64;

void check(cudaError_t error, const char* what) {
    if (error != cudaSuccess)
        throw std::runtime_error(std::string("gram: ") + what + ": " + cudaGetErrorString(error));
}

using Encode = decltype(&cuTensorMapEncodeTiled);

struct Device {
    int major = 0;
    int pairs = 0;            // blocks of gram_sm90.cuh that run at the same time, in pairs
    Encode encode = nullptr;  // where this is null, mma.sync it is
};

template <class Kernel>
void allow_shared(Kernel kernel, int bytes) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "shared memory");
}

cudaLaunchConfig_t configuration(dim3 grid, int threads, int shared, void* stream) {
    cudaLaunchConfig_t c = {};
    c.gridDim = grid;
    c.blockDim = dim3(threads);
    c.dynamicSmemBytes = shared;
    c.stream = static_cast<cudaStream_t>(stream);
    return c;
}

// As `configuration`, for the kernel that runs in pairs of blocks; `pair` outlives the launch.
cudaLaunchConfig_t in_pairs(int blocks, void* stream, cudaLaunchAttribute& pair) {
    auto c = configuration(dim3(blocks), sm90::kThreads, sm90::kShared, stream);
    pair.id = cudaLaunchAttributeClusterDimension;
    pair.val.clusterDim = {2, 1, 1};
    c.attrs = &pair;
    c.numAttrs = 1;
    return c;
}

Device look_at(int number) {
    Device d;
    int multiprocessors = 0;
    check(cudaDeviceGetAttribute(&d.major, cudaDevAttrComputeCapabilityMajor, number), "device");
    check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, number), "device");
    allow_shared(mma::gram_kernel<Dtype::bf16>, mma::kShared);
    allow_shared(mma::gram_kernel<Dtype::f16>, mma::kShared);
#ifdef CORTIQ_SM90A
    if (d.major == 9) {
        void* entry = nullptr;
        cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
        const auto error =
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
#else
        const auto error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &found);
#endif
        if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) entry = nullptr;
        allow_shared(sm90::gram_kernel<Dtype::bf16>, sm90::kShared);
        allow_shared(sm90::gram_kernel<Dtype::f16>, sm90::kShared);
        cudaLaunchAttribute pair;
        auto c = in_pairs(multiprocessors / 2 * 2, nullptr, pair);
        check(cudaOccupancyMaxActiveClusters(&d.pairs, sm90::gram_kernel<Dtype::bf16>, &c), "pairs of blocks");
        if (d.pairs > 0) d.encode = reinterpret_cast<Encode>(entry);
    }
#endif
    (void)cudaGetLastError();
    return d;
}

const Device& device(int number) {
    static std::once_flag seen[kDevices];
    static Device devices[kDevices];
    if (number < 0 || number >= kDevices) throw std::runtime_error("gram: device " + std::to_string(number));
    std::call_once(seen[number], [number] { devices[number] = look_at(number); });
    return devices[number];
}

int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

int64_t positions(const GramArgs& a) { return a.row_index ? a.rows : a.tokens; }

bool in_place(const GramArgs& a) {
    const bool aligned = a.row_stride * 2 % 16 == 0 && reinterpret_cast<uintptr_t>(a.x) % 16 == 0;
    return a.dtype != Dtype::f32 && !a.row_index && !a.row_weight && aligned && a.row_stride >= a.n;
}

int64_t pitch_of(const GramArgs& a) { return up(a.n, 8); }

// Rows of a launch that goes through the workspace in so many planes, and rows of one of the planes.
constexpr int64_t step_of(int planes) { return kRowsAtOnce / planes; }

int64_t plane_of(const GramArgs& a, int planes) { return std::min(step_of(planes), up(positions(a), 64)); }

int64_t workspace_rows(const GramArgs& a) {
    const int planes = a.dtype == Dtype::f32 ? 2 : 1;
    const int64_t weighed = a.row_weight ? 4 * plane_of(a, 4) : 0;
    return in_place(a) ? 0 : std::max(planes * plane_of(a, planes), weighed);
}

int64_t list_bytes(const GramArgs& a) { return a.row_weight ? up(positions(a) * 4, 256) : 0; }

// One launch of the product over `matrix`, rows of 16-bit numbers that are `pitch` elements apart.
template <Dtype kType>
void product(const Device& d, const Products& p, const void* matrix, int64_t matrix_rows, int64_t pitch, void* stream) {
    if (d.encode) {
        CUtensorMap map;
        const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(p.n), static_cast<cuuint64_t>(matrix_rows)};
        const cuuint64_t strides[1] = {static_cast<cuuint64_t>(pitch) * 2};
        const cuuint32_t box[2] = {64, sm90::kRows}, steps[2] = {1, 1};
        const auto type = kType == Dtype::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
        const CUresult result =
            d.encode(&map, type, 2, const_cast<void*>(matrix), sizes, strides, box, steps,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
        if (result != CUDA_SUCCESS) throw std::runtime_error("gram: tensor map: " + std::to_string(result));
        cudaLaunchAttribute pair;
        const auto c = in_pairs(2 * d.pairs, stream, pair);
        check(cudaLaunchKernelEx(&c, sm90::gram_kernel<kType>, map, p), "launch");
        return;
    }
    const int64_t tiles = (p.n + 127) / 128;
    auto c = configuration(dim3(static_cast<unsigned>(tiles * (tiles + 1) / 2)), mma::kThreads, mma::kShared, stream);
    check(cudaLaunchKernelEx(&c, mma::gram_kernel<kType>, static_cast<const uint16_t*>(matrix), pitch, p), "launch");
}

template <Dtype kType, stage::Parts kParts>
void fill(const stage::Rules& r, void* stream) {
    const int64_t width = stage::kThreads * 8, high = up(r.rows, 64);
    auto c = configuration(dim3(static_cast<unsigned>(high), static_cast<unsigned>((r.n + width - 1) / width)),
                           stage::kThreads, 0, stream);
    check(cudaLaunchKernelEx(&c, stage::stage_rows<kType, kParts>, r), "launch");
}

// All rows of x through the workspace: `kParts` of them, by launches that are for the case `when`.
template <Dtype kType, stage::Parts kParts>
void through_workspace(const Device& d, const GramArgs& a, Products p, const int* list) {
    constexpr int planes = kParts == stage::Parts::copy ? 1 : kParts == stage::Parts::split ? 2 : 4;
    constexpr Dtype inside = kParts == stage::Parts::copy ? kType : Dtype::bf16;
    uint16_t* const staged = reinterpret_cast<uint16_t*>(static_cast<char*>(a.workspace) + kHead + list_bytes(a));
    const int64_t pitch = pitch_of(a), step = step_of(planes);
    const int plane = static_cast<int>(plane_of(a, planes));
    p.count = planes == 1 ? 1 : 3;  // A high B high, A high B low, A low B high
    const int b = planes == 4 ? 2 * plane : 0;
    p.a_row[2] = planes == 1 ? 0 : plane;
    p.b_row[0] = p.b_row[2] = b;
    p.b_row[1] = planes == 1 ? 0 : b + plane;
    for (int64_t first = 0; first < positions(a); first += step) {
        const int64_t left = positions(a) - first;
        p.first = first;
        p.rows = static_cast<int>(left < step ? left : step);
        fill<kType, kParts>({a.x, a.row_stride, a.tokens, p.n, a.row_index, a.row_weight, list, p.found, p.when, first,
                             p.rows, staged, pitch, plane},
                            a.stream);
        product<inside>(d, p, staged, static_cast<int64_t>(plane) * planes, pitch, a.stream);
    }
}

template <Dtype kType>
void accumulate(const Device& d, const GramArgs& a) {
    char* const space = static_cast<char*>(a.workspace);
    Rows* const found = reinterpret_cast<Rows*>(space);
    check(cudaMemsetAsync(space, 0, kHead, static_cast<cudaStream_t>(a.stream)), "memset");
    if (a.keep) {
        stage::Rules r = {};
        r.x = a.x, r.row_stride = a.row_stride, r.tokens = a.tokens, r.n = static_cast<int>(a.n);
        r.index = a.row_index, r.weight = a.row_weight, r.rows = static_cast<int>(positions(a));
        auto c = configuration(dim3(r.rows < kLookers ? r.rows : kLookers), stage::kThreads, 0, a.stream);
        check(cudaLaunchKernelEx(&c, stage::look_at_rows<kType>, r, found, a.nonfinite), "launch");
    }
    Products p = {};
    p.found = found;
    p.gram = a.gram;
    p.n = static_cast<int>(a.n);
    p.count = 1;
    p.turns = reinterpret_cast<int*>(space) + 64;
    p.nonfinite = a.nonfinite;
    constexpr auto whole = kType == Dtype::f32 ? stage::Parts::split : stage::Parts::copy;
    if constexpr (kType != Dtype::f32) {
        if (in_place(a)) {
            for (int64_t first = 0; first < a.tokens; first += kRowsAtOnce) {
                const int64_t left = a.tokens - first;
                p.rows = static_cast<int>(left < kRowsAtOnce ? left : kRowsAtOnce);
                const auto* x = static_cast<const uint16_t*>(a.x) + first * a.row_stride;
                product<kType>(d, p, x, p.rows, a.row_stride, a.stream);
            }
            return;
        }
    }
    if (!a.row_weight) {
        through_workspace<kType, whole>(d, a, p, nullptr);
        return;
    }
    int* const list = reinterpret_cast<int*>(space + kHead);
    auto c = configuration(dim3(1), stage::kChoosers, 0, a.stream);
    check(cudaLaunchKernelEx(&c, stage::choose_rows, a.row_weight, positions(a), list, found), "launch");
    p.when = When::plain;
    through_workspace<kType, whole>(d, a, p, list);
    p.when = When::weighted;
    through_workspace<kType, stage::Parts::weigh>(d, a, p, list);
}

}  // namespace

int64_t gram_cuda_workspace(const GramArgs& a) {
    return kHead + list_bytes(a) + workspace_rows(a) * pitch_of(a) * 2;
}

const char* gram_cuda_kernel(int number) {
    check(cudaSetDevice(number), "device");
    return device(number).encode ? "wgmma" : "mma.sync";
}

void gram_cuda(const GramArgs& a) {
    if (positions(a) == 0 || a.n == 0) return;
    check(cudaSetDevice(a.device), "device");
    Device d = device(a.device);
    if (a.isa && std::string(a.isa) == "mma.sync") d.encode = nullptr;
    if (a.isa && std::string(a.isa) == "wgmma" && !d.encode) throw std::runtime_error("gram: no wgmma on this GPU");
    switch (a.dtype) {
        case Dtype::f32: return accumulate<Dtype::f32>(d, a);
        case Dtype::bf16: return accumulate<Dtype::bf16>(d, a);
        case Dtype::f16: return accumulate<Dtype::f16>(d, a);
    }
}

}  // namespace cortiq
