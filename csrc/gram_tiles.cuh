// What the CUDA kernels of the Gram accumulator share: their arguments, and which block of G is whose.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "gram.h"

namespace cortiq {

// What the device finds out about the rows that enter; zeros, then written by gram_stage.cuh.
struct Rows {
    int count;   // rows with a weight that is not zero
    int plain;   // all these weights are 1
    int broken;  // a row or a weight that enters is not finite, and G is to be kept from it
};

// Which finding of Rows a kernel is for; but for `always`, the count is there too.
enum class When : int { always = 0, plain = 1, weighted = 2 };

// One launch: G += sum over products p of A_p^T B_p, all of them row ranges of one matrix of 16-bit numbers.
struct Products {
    float* gram;
    const Rows* found;
    When when;
    int64_t first;  // where the count is on the device: the rows before it are other launches'
    int rows;       // at most
    int n;
    int count;     // of products
    int a_row[3];  // where each one's operands begin in the matrix
    int b_row[3];
    int* turns;      // zeros, and zeros again afterwards: how far a split tile has been summed (sm_90)
    int* nonfinite;  // or null; set to 1 where the diagonal of what is added is not finite
};

// How many rows a launch for the case `when` has, of `rows` at most from row `first` on.
__device__ __forceinline__ int rows_of(const Rows* found, When when, int64_t first, int rows) {
    if (found->broken) return 0;
    if (when == When::always) return rows;
    if ((found->plain != 0) != (when == When::plain)) return 0;
    const int64_t left = found->count - first;
    return left <= 0 ? 0 : left < rows ? static_cast<int>(left) : rows;
}

constexpr int kBand = 8;

// Block `index` of the upper triangle of `side` x `side` blocks, column by column within bands of 8 rows: blocks that
// are computed at the same time then share their columns of x, which the L2 cache hands out.
__host__ __device__ __forceinline__ void block_at(int side, int index, int& row, int& column) {
    int top = 0;
    for (;;) {
        const int wide = side - top, high = wide < kBand ? wide : kBand;
        const int triangle = high * (high + 1) / 2, all = triangle + (wide - high) * high;
        if (index < all) {
            if (index >= triangle) {
                column = top + high + (index - triangle) / high;
                row = top + (index - triangle) % high;
                return;
            }
            int c = 0;
            while (index > c) index -= ++c;
            column = top + c;
            row = top + index;
            return;
        }
        index -= all;
        top += high;
    }
}

__host__ __device__ __forceinline__ int64_t tile_number(int64_t tiles, int64_t i, int64_t j) {
    return i * tiles - i * (i - 1) / 2 + (j - i);
}

}  // namespace cortiq
