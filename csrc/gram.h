// The C interface of the Gram accumulator, G += X^T diag(w) X, which every back end implements. No Python, no torch.
//
//   x      [tokens, n]   f32, bf16 or f16; rows are row_stride elements apart, the elements of a row adjacent
//   gram   [tiles, 128, 128] f32: the upper triangle in tiles, tile (i, j) with i <= j at i*nt - i*(i-1)/2 + (j-i),
//          nt = ceil(n / 128); each tile row-major and whole (a diagonal tile holds both halves, on a CPU equal bit
//          for bit). What lies beyond n in an edge tile is zero and stays so. On a GPU it begins at a multiple of 16.
//   rows   row_index [rows] says which rows of x enter, in this order, repeats and all; null: all of them.
//   weight row_weight [rows], or [tokens] without row_index: one for each row that enters. A row of weight 0 is not
//          read at all, so what it holds, NaN too, never enters; null: all weights are 1.
//
// The sum is the same bits in every call with the same arguments, whatever the number of threads, and the same for
// rows that are picked by weights of 0 and 1, by an index, or that lie alone in x.
#pragma once

#include <cstdint>

namespace cortiq {

constexpr int64_t kTile = 128;

enum class Dtype : int { f32 = 0, bf16 = 1, f16 = 2 };

enum class GramStatus : int {
    ok = 0,
    nonfinite = 1,  // gram holds NaN or infinity: x or a weight does, a sum is beyond float32, or gram did before
    kept = 2,       // x or a weight that enters is NaN or infinite, and keep was set: gram is as it was
    bad_index = 3,  // row_index points outside x: gram is as it was
    bad_isa = 4,    // this processor does not have the instruction set that was asked for: gram is as it was
};

struct GramArgs {
    float* gram;
    const void* x;
    Dtype dtype;
    int64_t tokens;
    int64_t n;
    int64_t row_stride;
    const int64_t* row_index;  // [rows] or null
    int64_t rows;
    const float* row_weight;  // [rows or tokens] or null
    bool keep;                // look at all that enters first, and add nothing when it is not finite
    int threads;              // CPU: how many may work at a time, this one included
    const char* isa;          // CPU: "avx512", "avx2" or "plain", CUDA: "wgmma" or "mma.sync"; null: the best there is
    // CUDA alone:
    void* stream;        // to launch on
    int device;          // its number, which is the caller's current one
    void* workspace;     // gram_cuda_workspace() bytes of the device, aligned to 256
    int32_t* nonfinite;  // on the device, or null: 1 when what is, or with `keep` would be, added is not finite
};

// Throws std::bad_alloc before gram is touched; nothing else.
GramStatus gram_cpu(const GramArgs& args);

// Launches and returns: no status, nothing waits. `threads` means nothing to it. A row_index outside x reads
// nothing, and makes gram NaN or, with `keep`, leaves it as it is. Throws std::runtime_error with CUDA's words.
void gram_cuda(const GramArgs& args);

// Bytes of workspace that a call with these arguments takes (gram, workspace and nonfinite are not looked at): 16 KB
// for x that is read in place, else also up to 8192 rows of n 16-bit numbers.
int64_t gram_cuda_workspace(const GramArgs& args);

// "wgmma" or "mma.sync": the instruction that this device's products take. Throws as gram_cuda where neither runs.
const char* gram_cuda_kernel(int device);

// The instruction sets that this processor can run, best first, terminated by null.
const char* const* gram_cpu_isas();

}  // namespace cortiq
