// The Gram accumulator on mma.sync: every GPU from sm_80 on that is no Hopper.
//
// A block of 8 warps owns a tile of 128 x 128 of G, each warp 64 x 32 of it in registers. Rows of x arrive in four
// stages of 32, as they lie in memory, through cp.async; ldmatrix transposes them. Chunks of 16 bytes are permuted by
// row so that it meets no bank twice. A tile is one block's, and is added to G with plain additions, every 2048 rows:
// over 8192 rows the sums in the matrix units came out 3e-5 too small on an H200.
#pragma once

#include "gram_tiles.cuh"

namespace cortiq {
namespace mma {

constexpr int kRows = 32;                // of x in a stage
constexpr int kSlice = kRows * 128 * 2;  // bytes of 32 rows by 128 columns
constexpr int kStages = 4;
constexpr int kChain = 64;  // stages summed in the matrix units at a time: they cut running sums towards zero
constexpr int kThreads = 256;
constexpr int kShared = kStages * 2 * kSlice;

__device__ __forceinline__ uint32_t shared_at(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ uint32_t place(int row, int chunk) {
    return row * 256 + ((chunk ^ (row & 7)) << 4);
}

// 32 rows of x from `row` on, 128 columns from `column` on; what lies beyond `rows` or n is zero.
__device__ __forceinline__ void fetch(uint32_t to, const uint16_t* x, int64_t pitch, int64_t row, int rows, int column,
                                      int n) {
#pragma unroll
    for (int i = 0; i < kRows * 16 / kThreads; ++i) {
        const int r = i * (kThreads / 16) + threadIdx.x / 16, c = threadIdx.x % 16;
        const int left = r < rows ? min(max(n - column - c * 8, 0), 8) * 2 : 0;
        const uint16_t* from = left ? x + (row + r) * pitch + column + c * 8 : x;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + place(r, c)), "l"(from), "r"(left)
                     : "memory");
    }
}

__device__ __forceinline__ void load(uint32_t (&f)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
                 : "r"(at)
                 : "memory");
}

template <Dtype kType>
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (kType == Dtype::bf16) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

// Adds a warp's 64 x 32 to G, and makes it zero.
__device__ __forceinline__ void store(const Products& p, float (&d)[4][4][4], float* gram, int row, int column,
                                      int rows, int columns, bool diagonal) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                const int r = row + i * 16 + e / 2 * 8, c = column + j * 8;
                const float a = d[i][j][e], b = d[i][j][e + 1];
                d[i][j][e] = d[i][j][e + 1] = 0;
                sum = fmaf(a, 0.0f, fmaf(b, 0.0f, sum));
                if (r >= rows) continue;  // what lies beyond n stays zero, whatever x holds
                float* at = gram + r * kTile + c;
                if (c + 1 < columns) {
                    float2 g = *reinterpret_cast<float2*>(at);
                    g.x += a, g.y += b;
                    *reinterpret_cast<float2*>(at) = g;
                } else if (c < columns) {
                    *at += a;
                }
            }
        }
    }
    if (p.nonfinite && diagonal && sum != 0.0f) *p.nonfinite = 1;
}

template <Dtype kType>
__global__ void __launch_bounds__(kThreads) gram_kernel(const uint16_t* x, int64_t pitch,
                                                        const __grid_constant__ Products p) {
    extern __shared__ __align__(128) char memory[];
    const int rows = rows_of(p.found, p.when, p.first, p.rows);
    if (!rows) return;
    const uint32_t stages = shared_at(memory);
    const int tiles = (p.n + 127) / 128;
    int tile_row, tile_column;
    block_at(tiles, blockIdx.x, tile_row, tile_column);
    const bool apart = tile_row != tile_column || p.count > 1;  // else A is B
    const int steps = (rows + kRows - 1) / kRows * p.count;

    const auto bring = [&](int step) {
        if (step < steps) {
            const uint32_t to = stages + step % kStages * 2 * kSlice;
            const int which = step % p.count, row = step / p.count * kRows;
            fetch(to, x, pitch, p.b_row[which] + row, rows - row, tile_column * 128, p.n);
            if (apart) fetch(to + kSlice, x, pitch, p.a_row[which] + row, rows - row, tile_row * 128, p.n);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_row = warp / 4 * 64, warp_column = warp % 4 * 32;
    float* const gram = p.gram + tile_number(tiles, tile_row, tile_column) * (kTile * kTile);
    float d[4][4][4] = {};
    for (int s = 0; s < kStages - 1; ++s) bring(s);
    for (int step = 0; step < steps; ++step) {
        asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
        __syncthreads();
        bring(step + kStages - 1);
        const uint32_t at_b = stages + step % kStages * 2 * kSlice, at_a = apart ? at_b + kSlice : at_b;
#pragma unroll
        for (int k = 0; k < kRows; k += 16) {
            uint32_t a[4][4], b[2][4];
#pragma unroll
            for (int i = 0; i < 4; ++i)  // 8 x 8 matrices: columns first, then rows of x
                load(a[i], at_a + place(k + lane % 8 + lane / 16 * 8, (warp_row + i * 16) / 8 + lane / 8 % 2));
#pragma unroll
            for (int j = 0; j < 2; ++j)  // rows of x first, then columns
                load(b[j], at_b + place(k + lane % 16, (warp_column + j * 16) / 8 + lane / 16));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    multiply<kType>(d[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
            }
        }
        if (step % kChain == kChain - 1 || step == steps - 1)
            store(p, d, gram, warp_row + lane / 4, warp_column + lane % 4 * 2, p.n - tile_row * 128,
                  p.n - tile_column * 128, tile_row == tile_column);
    }
}

}  // namespace mma
}  // namespace cortiq
