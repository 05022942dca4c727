// Rows of x made ready for the products: picked, weighed, split into 16-bit parts and laid where rows are aligned.
#pragma once

#include "gram_tiles.cuh"

namespace cortiq {
namespace stage {

constexpr int kThreads = 256;
constexpr int kChoosers = 1024;
constexpr uint16_t kNan = 0x7fff;  // in bf16 and f16 alike

enum class Parts : int {
    copy = 0,   // one plane: x itself, 16 bit
    split = 1,  // two planes: high and low bf16 halves of x
    weigh = 2,  // four planes: high and low halves of w x, then of x
};

struct Rules {
    const void* x;
    int64_t row_stride;
    int64_t tokens;
    int n;
    const int64_t* index;  // or null
    const float* weight;   // of a position, for Parts::weigh
    const int* list;       // positions that enter, or null: all
    const Rows* found;
    When when;
    int64_t first;  // position, or place in the list, of row 0
    int rows;       // at most
    uint16_t* out;
    int64_t pitch;       // elements between rows
    int64_t plane_rows;  // between planes
};

// Which positions have a weight that is not zero, in order. One block; the order of a sum must not depend on chance.
__global__ void __launch_bounds__(kChoosers) choose_rows(const float* weight, int64_t positions, int* list,
                                                         Rows* found) {
    __shared__ int counts[kChoosers / 32];
    __shared__ int total, odd;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) total = odd = 0;
    __syncthreads();
    for (int64_t begin = 0; begin < positions; begin += kChoosers) {
        const int64_t at = begin + threadIdx.x;
        const float w = at < positions ? weight[at] : 0.0f;
        const bool enters = !(w == 0.0f);
        if (enters && w != 1.0f) odd = 1;
        const unsigned mask = __ballot_sync(0xffffffffu, enters);
        if (lane == 0) counts[warp] = __popc(mask);
        __syncthreads();
        int before = total;
        for (int i = 0; i < warp; ++i) before += counts[i];
        if (enters) list[before + __popc(mask & ((1u << lane) - 1))] = static_cast<int>(at);
        __syncthreads();
        if (threadIdx.x == kChoosers - 1) total = before + counts[warp];
        __syncthreads();
    }
    if (threadIdx.x == 0) found->count = total, found->plain = !odd;
}

__device__ __forceinline__ float widen(uint16_t bits, Dtype type) {
    if (type == Dtype::bf16) return __uint_as_float(static_cast<uint32_t>(bits) << 16);
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ uint16_t to_bf16(float value) {
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// Whether a row that enters, or its weight, is not finite. A block takes one row after another.
template <Dtype kType>
__global__ void __launch_bounds__(kThreads) look_at_rows(Rules r, Rows* found, int* nonfinite) {
    bool broken = false;
    for (int64_t position = blockIdx.x; position < r.rows; position += gridDim.x) {
        const float weight = r.weight ? r.weight[position] : 1.0f;
        const int64_t from = r.index ? r.index[position] : position;
        if (weight == 0.0f) continue;
        broken |= from < 0 || from >= r.tokens || !isfinite(weight);
        if (broken) break;
        for (int column = threadIdx.x; column < r.n; column += kThreads) {
            const int64_t at = from * r.row_stride + column;
            if (kType == Dtype::f32) {
                broken |= !isfinite(static_cast<const float*>(r.x)[at]);
            } else {
                broken |= !isfinite(widen(static_cast<const uint16_t*>(r.x)[at], kType));
            }
        }
    }
    if (!broken) return;
    found->broken = 1;
    if (nonfinite) *nonfinite = 1;
}

__device__ __forceinline__ void put(uint16_t* to, const uint16_t (&v)[8]) {
    const uint4 packed = {v[0] | uint32_t(v[1]) << 16, v[2] | uint32_t(v[3]) << 16, v[4] | uint32_t(v[5]) << 16,
                          v[6] | uint32_t(v[7]) << 16};
    *reinterpret_cast<uint4*>(to) = packed;
}

// Both halves of 8 numbers: what a bf16 keeps, and what a second one keeps of the rest.
__device__ __forceinline__ void put_halves(uint16_t* to, int64_t plane, const float (&v)[8]) {
    uint16_t high[8], low[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        high[i] = to_bf16(v[i]);
        low[i] = to_bf16(v[i] - widen(high[i], Dtype::bf16));
    }
    put(to, high);
    put(to + plane, low);
}

// A block is a row, or a stretch of one; rows that fill the last stage are zeros.
template <Dtype kType, Parts kParts>
__global__ void __launch_bounds__(kThreads) stage_rows(Rules r) {
    const int count = rows_of(r.found, r.when, r.first, r.rows);
    const int row = blockIdx.x, column = (blockIdx.y * kThreads + threadIdx.x) * 8;
    if (row >= (count + 63) / 64 * 64 || column >= r.n) return;
    uint16_t* to = r.out + row * r.pitch + column;
    const int64_t plane = r.plane_rows * r.pitch;
    uint16_t bits[8] = {};
    float values[8] = {};
    float weight = 1.0f;
    if (row < count) {
        const int64_t position = r.list ? r.list[r.first + row] : r.first + row;
        const int64_t from = r.index ? r.index[position] : position;
        if (kParts == Parts::weigh) weight = r.weight[position];
        if (from < 0 || from >= r.tokens) {  // no such row: nothing is read, and G says so
#pragma unroll
            for (int i = 0; i < 8; ++i) bits[i] = kNan, values[i] = __uint_as_float(0x7fffffff);
        } else if (kType == Dtype::f32) {
            const float* x = static_cast<const float*>(r.x) + from * r.row_stride + column;
#pragma unroll
            for (int i = 0; i < 8; ++i) values[i] = column + i < r.n ? x[i] : 0.0f;
        } else {
            const uint16_t* x = static_cast<const uint16_t*>(r.x) + from * r.row_stride + column;
            if (column + 8 <= r.n && (reinterpret_cast<uintptr_t>(x) & 15) == 0) {
                const uint4 v = *reinterpret_cast<const uint4*>(x);
                const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int i = 0; i < 8; ++i) bits[i] = static_cast<uint16_t>(words[i / 2] >> i % 2 * 16);
            } else {
#pragma unroll
                for (int i = 0; i < 8; ++i) bits[i] = column + i < r.n ? x[i] : 0;
            }
            if (kParts != Parts::copy) {
#pragma unroll
                for (int i = 0; i < 8; ++i) values[i] = widen(bits[i], kType);
            }
        }
    }
    if (kParts == Parts::copy) {
        put(to, bits);
    } else if (kParts == Parts::split) {
        put_halves(to, plane, values);
    } else {
        float weighed[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) weighed[i] = row < count ? weight * values[i] : 0.0f;
        put_halves(to, plane, weighed);
        put_halves(to + 2 * plane, plane, values);
    }
}

}  // namespace stage
}  // namespace cortiq
