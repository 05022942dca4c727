// The Gram accumulator on Hopper: wgmma over tiles that the copy engine brings, in persistent pairs of blocks.
//
// A pair owns a block of 256 x 256 of G at a time, each block of the pair 128 rows of it, as two warpgroups of 64 x 256
// in registers. Both operands are slices of the same rows of x, so both arrive as they lie in memory, columns adjacent
// ("MN-major"): boxes of 64 rows of x by 64 columns, swizzled by 128 bytes. The 256 columns that the pair shares are
// fetched once, half by each, and sent to both; that halves what the L2 cache has to deliver for them.
//
// Blocks of G are dealt out whole while there are more than two a pair. What remains, one to two blocks a pair, is cut
// along the rows of x into equal shares, so that all pairs end together; shares of one block are added in the order of
// their rows, each waiting for its turn, and depend on pairs that started earlier only. So every sum has one order.
//
// Matrix units cut what a running sum cannot hold, always towards zero. On an H200 sums over 2048, 4096 and 8192 rows
// came out 5e-6, 1e-5 and 3e-5 too small; 4096 rows are summed, and rounded into G.
#pragma once

#include <cuda.h>

#include "gram_tiles.cuh"

namespace cortiq {
namespace sm90 {

constexpr int kRows = 64;                   // of x in a stage
constexpr int kBox = kRows * 64 * 2;        // bytes of 64 rows by 64 columns
constexpr int kStage = 6 * kBox;            // 128 columns for A, 256 for B
constexpr int kStages = 4;
constexpr int kThreads = 384;               // a warpgroup that fetches, two that multiply
constexpr int kOutPitch = 512 + 32;         // bytes between rows of 128 sums on their way out: no bank is met twice
constexpr int kOut = 8 * kOutPitch - 32;    // bytes of 8 such rows, of which each warp that multiplies has its own
constexpr int kBarriers = 128;
constexpr int kShared = 1024 + kStages * kStage + kBarriers + 8 * kOut;  // 1024: where the first stage may begin
constexpr int kChain = 64;                  // stages in a sum of the matrix units: see below
constexpr int kLeast = 32;                  // stages in a share: shares of a block are added one after the other
constexpr int kTurns = 4;                   // of a block: one for each warpgroup of the pair

// How the work is dealt to `pairs` pairs of blocks.
struct Deal {
    int side, whole, split, stages, pairs;
};

struct Share {
    int block;       // number in the order of block_at
    int turn;        // number among the blocks that are split
    int first, last; // stages
};

__host__ __device__ __forceinline__ Deal deal(int n, int stages, int pairs) {
    const int side = (n + 255) / 256, blocks = side * (side + 1) / 2;
    const int over = blocks % pairs;
    const int split = blocks <= pairs ? (blocks == pairs ? 0 : blocks) : (over ? over + pairs : 0);
    const int64_t most = static_cast<int64_t>(split) * stages / kLeast;
    if (split && most < pairs) pairs = static_cast<int>(most > blocks ? most : blocks < pairs ? blocks : pairs);
    return {side, blocks - split, split, stages, pairs};
}

// The `i`-th share of `pair`; false when it has no more. Of the split blocks a pair takes the last one first: its
// beginning, which others wait for.
__host__ __device__ __forceinline__ bool share(const Deal& d, int pair, int i, Share& s) {
    const int mine = pair < d.whole ? (d.whole - pair - 1) / d.pairs + 1 : 0;
    if (pair >= d.pairs) return false;
    if (i < mine) {
        s = {pair + i * d.pairs, 0, 0, d.stages};
        return true;
    }
    if (!d.split) return false;
    const int64_t all = static_cast<int64_t>(d.split) * d.stages;
    const int64_t low = all * pair / d.pairs, high = all * (pair + 1) / d.pairs;
    const int64_t turn = (high - 1) / d.stages - (i - mine), begin = turn * d.stages;
    if (low >= high || turn < low / d.stages) return false;
    s.block = d.whole + static_cast<int>(turn);
    s.turn = static_cast<int>(turn);
    s.first = static_cast<int>((low > begin ? low : begin) - begin);
    s.last = static_cast<int>((high < begin + d.stages ? high : begin + d.stages) - begin);
    return true;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ uint32_t shared_at(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void barrier_init(uint32_t at, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_expect(uint32_t at, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}

// Arrive at the barrier that lies at `at` in block `rank` of the pair. Of the narrowest scope: there are no writes to
// publish, and `.release.cluster` is a fence for the whole GPU, which took half of the time.
__device__ __forceinline__ void barrier_arrive(uint32_t at, uint32_t rank) {
    asm volatile(
        "{\n.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(at), "r"(rank)
        : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t at, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(at), "r"(parity)
            : "memory");
    } while (!done);
}

// Fetch a box of 64 rows by 64 columns; `both` sends it to the same place in both blocks of the pair, and tells both.
__device__ __forceinline__ void fetch(uint32_t to, const CUtensorMap& map, uint32_t barrier, int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            to),
        "l"(&map), "r"(barrier), "r"(column), "r"(row)
        : "memory");
}

__device__ __forceinline__ void fetch_for_both(uint32_t to, const CUtensorMap& map, uint32_t barrier, int column,
                                               int row) {
    const uint16_t both = 3;
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
        "{%3, %4}], [%2], %5;" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(column), "r"(row), "h"(both)
        : "memory");
}

__device__ __forceinline__ uint32_t pair_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void pair_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// 128 threads of one warpgroup.
__device__ __forceinline__ void group_sync(int group) {
    if (group) {
        asm volatile("bar.sync 2, 128;" ::: "memory");
    } else {
        asm volatile("bar.sync 1, 128;" ::: "memory");
    }
}

// A matrix in shared memory for wgmma: columns adjacent, 128-byte swizzle, 8 rows are 1024 bytes, the next 64 columns
// are a box away.
__device__ __forceinline__ uint64_t descriptor(uint32_t at) {
    return (at >> 4 & 0x3fff) | static_cast<uint64_t>(kBox >> 4) << 16 | static_cast<uint64_t>(1024 >> 4) << 32 |
           1ull << 62;
}

#define CORTIQ_WGMMA(type)                                                                                       \
    asm volatile(                                                                                                \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"                                                            \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " "                                         \
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                       \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                       \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                       \
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                       \
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                       \
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "           \
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "      \
        "%128, %129, p, 1, 1, 1, 1;\n}"                                                                          \
        :                                                                                                        \
          "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),        \
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),  \
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), \
          "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), \
          "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), \
          "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), \
          "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), \
          "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), \
          "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), \
          "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), \
          "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127]) \
        : "l"(a), "l"(b), "r"(add))

// d = a^T b, + d with `add`: 64 x 256, over 16 rows of x.
template <Dtype kType>
__device__ __forceinline__ void multiply(float (&d)[128], uint64_t a, uint64_t b, int add) {
    if constexpr (kType == Dtype::bf16) {
        CORTIQ_WGMMA("bf16");
    } else {
        CORTIQ_WGMMA("f16");
    }
}
#undef CORTIQ_WGMMA

// Adds 128 sums in shared memory to G, without waiting.
__device__ __forceinline__ void add_row(float* to, uint32_t from) {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], 512;\n"
        "cp.async.bulk.commit_group;" ::"l"(to), "r"(from)
        : "memory");
}

// Until the rows that this thread added are in G.
__device__ __forceinline__ void await_rows() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Until they have been read, and their place is free.
__device__ __forceinline__ void await_place() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Adds a warpgroup's 64 x 256 to G: half h of its columns belongs to tile (i, j + h). `out`: the warp's place for rows.
__device__ __forceinline__ void store(const Products& p, const float (&d)[128], int i, int j, int group, uint32_t out) {
    const int tiles = (p.n + 127) / 128, lane = threadIdx.x % 32;
    const int first = group * 64 + threadIdx.x / 32 % 4 * 16, column = lane % 4 * 2;
    await_rows();  // what this warp added before comes first
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (i >= tiles || j + h >= tiles || i > j + h) continue;
        float* const to = p.gram + tile_number(tiles, i, j + h) * (kTile * kTile) + first * kTile;
        if (p.nonfinite && i == j + h) {
            float sum = 0;
#pragma unroll
            for (int k = 0; k < 64; ++k) sum = fmaf(d[h * 64 + k], 0.0f, sum);
            if (sum != 0.0f) *p.nonfinite = 1;
        }
        const int rows = p.n - i * 128 - first - lane / 4, columns = p.n - (j + h) * 128 - column;
        const bool edge = p.n - i * 128 < 128 || p.n - (j + h) * 128 < 128;
#pragma unroll
        for (int e = 0; e < 2; ++e) {  // the upper 8 of the warp's rows, then the lower
            await_place();
            __syncwarp();
            const uint32_t at = out + lane / 4 * kOutPitch + column * 4;
#pragma unroll
            for (int k = 0; k < 16; ++k) {
                float a = d[h * 64 + k * 4 + e * 2], b = d[h * 64 + k * 4 + e * 2 + 1];
                if (edge) {  // what lies beyond n stays zero, whatever x holds
                    if (e * 8 >= rows || k * 8 >= columns) a = 0;
                    if (e * 8 >= rows || k * 8 + 1 >= columns) b = 0;
                }
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at + k * 32), "f"(a), "f"(b) : "memory");
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            __syncwarp();
            if (lane < 8) add_row(to + (e * 8 + lane) * kTile, out + lane * kOutPitch);
        }
    }
}

__device__ __forceinline__ void await_turn(const int* turn, int first, int group) {
    if (threadIdx.x % 128 == 0) {
        int reached;
        do {
            asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(reached) : "l"(turn) : "memory");
        } while (reached != first);
    }
    group_sync(group);
    asm volatile("fence.proxy.async.global;" ::: "memory");  // the copy engine adds after it
}

__device__ __forceinline__ void pass_turn(int* turn, int reached, int group) {
    await_rows();
    asm volatile("fence.proxy.async.global;\nfence.acq_rel.gpu;" ::: "memory");
    group_sync(group);
    if (threadIdx.x % 128 == 0)
        asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(turn), "r"(reached) : "memory");
}

// The warp that fetches.
__device__ __forceinline__ void fetch_all(const CUtensorMap& map, const Products& p, const Deal& d, uint32_t stages,
                                          uint32_t full, uint32_t empty, int pair, uint32_t rank) {
    int stage = 0;
    uint32_t parity = 0;
    Share s;
    for (int i = 0; share(d, pair, i, s); ++i) {
        int block_row, block_column;
        block_at(d.side, s.block, block_row, block_column);
        const int a_column = block_row * 256 + static_cast<int>(rank) * 128, b_column = block_column * 256;
        for (int k = s.first; k < s.last; ++k) {
            const int which = p.count == 1 ? 0 : k % p.count, row = (p.count == 1 ? k : k / p.count) * kRows;
            const uint32_t at = stages + stage * kStage, barrier = full + stage * 8;
            barrier_wait(empty + stage * 8, parity ^ 1);
            barrier_expect(barrier, kStage);
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int half = static_cast<int>(rank) * 2 + c;  // of B's boxes, this block's two
                fetch(at + c * kBox, map, barrier, a_column + c * 64, p.a_row[which] + row);
                fetch_for_both(at + (2 + half) * kBox, map, barrier, b_column + half * 64, p.b_row[which] + row);
            }
            if (++stage == kStages) stage = 0, parity ^= 1;
        }
    }
}

// A warpgroup that multiplies.
template <Dtype kType>
__device__ __forceinline__ void multiply_all(const Products& p, const Deal& deal, uint32_t stages, uint32_t full,
                                             uint32_t empty, uint32_t out, int pair, uint32_t rank, int group) {
    float d[128];
    int stage = 0;
    uint32_t parity = 0;
    Share s;
    for (int i = 0; share(deal, pair, i, s); ++i) {
        int block_row, block_column;
        block_at(deal.side, s.block, block_row, block_column);
        int* turn = p.turns + s.turn * kTurns + rank * 2 + group;
        for (int begin = s.first; begin < s.last; begin += kChain) {
            const int end = min(begin + kChain, s.last);
            int before = -1;  // the stage whose products may still be under way
            for (int k = begin; k < end; ++k) {
                barrier_wait(full + stage * 8, parity);
                const uint32_t at = stages + stage * kStage;
                const uint64_t a = descriptor(at + group * kBox), b = descriptor(at + 2 * kBox);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int c = 0; c < kRows / 16; ++c) multiply<kType>(d, a + c * 128, b + c * 128, k > begin || c);
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (before >= 0 && threadIdx.x % 128 < 2) barrier_arrive(empty + before * 8, threadIdx.x % 128);
                before = stage;
                if (++stage == kStages) stage = 0, parity ^= 1;
            }
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            if (threadIdx.x % 128 < 2) barrier_arrive(empty + before * 8, threadIdx.x % 128);
            if (begin == s.first && begin > 0) await_turn(turn, begin, group);
            store(p, d, block_row * 2 + static_cast<int>(rank), block_column * 2, group, out);
        }
        if (s.first > 0 || s.last < deal.stages) pass_turn(turn, s.last < deal.stages ? s.last : 0, group);
    }
    await_rows();  // they are read from the block's memory
}

#endif

template <Dtype kType>
__global__ void __launch_bounds__(kThreads, 1)
    gram_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ Products p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ char memory[];
    const int rows = rows_of(p.found, p.when, p.first, p.rows);
    if (!rows) return;
    const uint32_t stages = (shared_at(memory) + 1023) & ~1023u;
    const uint32_t full = stages + kStages * kStage, empty = full + kStages * 8;
    const uint32_t rank = pair_rank();
    const int pair = blockIdx.x / 2, group = threadIdx.x / 128;
    const Deal d = deal(p.n, p.count * ((rows + kRows - 1) / kRows), gridDim.x / 2);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) {
            barrier_init(full + i * 8, 1);
            barrier_init(empty + i * 8, 4);  // two warpgroups in each of two blocks
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    pair_sync();
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) fetch_all(map, p, d, stages, full, empty, pair, rank);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const uint32_t out = full + kBarriers + (threadIdx.x / 32 - 4) * kOut;
        multiply_all<kType>(p, d, stages, full, empty, out, pair, rank, group - 1);
    }
    __syncwarp();
    pair_sync();  // a block's memory is written, and its barriers are told, by the other
#endif
}

}  // namespace sm90
}  // namespace cortiq
