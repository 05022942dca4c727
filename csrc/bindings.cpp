// cortiq_kernels._C: addresses and sizes in, a status out. The only file that knows Python; cortiq_kernels/native.py is
// its one caller and has the tensors.
#include <pybind11/pybind11.h>

#include <string>

#include "gram.h"

namespace py = pybind11;

namespace {

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

int gram_accumulate(uintptr_t gram, uintptr_t x, int dtype, int64_t tokens, int64_t n, int64_t row_stride,
                    uintptr_t row_index, int64_t rows, uintptr_t row_weight, bool keep, int threads,
                    const std::string& isa) {
    const cortiq::GramArgs args{
        at<float>(gram), at<const void>(x), static_cast<cortiq::Dtype>(dtype), tokens, n, row_stride,
        at<const int64_t>(row_index), rows, at<const float>(row_weight), keep, threads,
        isa.empty() ? nullptr : isa.c_str(), nullptr, 0, nullptr, nullptr,
    };
    py::gil_scoped_release others_may_run;
    return static_cast<int>(cortiq::gram_cpu(args));
}

py::list isas() {
    py::list names;
    for (const char* const* name = cortiq::gram_cpu_isas(); *name; ++name) names.append(py::str(*name));
    return names;
}

#ifdef CORTIQ_CUDA
cortiq::GramArgs cuda_args(uintptr_t x, int dtype, int64_t tokens, int64_t n, int64_t row_stride, uintptr_t row_index,
                           int64_t rows, uintptr_t row_weight) {
    cortiq::GramArgs args{};
    args.x = at<const void>(x);
    args.dtype = static_cast<cortiq::Dtype>(dtype);
    args.tokens = tokens, args.n = n, args.row_stride = row_stride;
    args.row_index = at<const int64_t>(row_index), args.rows = rows;
    args.row_weight = at<const float>(row_weight);
    return args;
}

int64_t gram_cuda_workspace(uintptr_t x, int dtype, int64_t tokens, int64_t n, int64_t row_stride,
                            uintptr_t row_index, int64_t rows, uintptr_t row_weight) {
    return cortiq::gram_cuda_workspace(cuda_args(x, dtype, tokens, n, row_stride, row_index, rows, row_weight));
}

void gram_cuda(uintptr_t x, int dtype, int64_t tokens, int64_t n, int64_t row_stride, uintptr_t row_index,
               int64_t rows, uintptr_t row_weight, uintptr_t gram, uintptr_t workspace, uintptr_t nonfinite,
               bool keep, int device, uintptr_t stream, const std::string& isa) {
    auto args = cuda_args(x, dtype, tokens, n, row_stride, row_index, rows, row_weight);
    args.gram = at<float>(gram), args.workspace = at<void>(workspace), args.nonfinite = at<int32_t>(nonfinite);
    args.keep = keep;
    args.device = device, args.stream = at<void>(stream), args.isa = isa.empty() ? nullptr : isa.c_str();
    py::gil_scoped_release others_may_run;
    cortiq::gram_cuda(args);
}
#endif

}  // namespace

PYBIND11_MODULE(_C, m) {
    m.doc() = "Native kernels of cortiq_kernels; cortiq_kernels/native.py is how they are called.";
    m.attr("INTERFACE") = 2;  // counts up when an argument changes; native.py refuses another
#ifdef CORTIQ_CUDA
    m.attr("CUDA") = true;
    m.def("gram_cuda_workspace", &gram_cuda_workspace, "Bytes; csrc/gram.h.");
    m.def("gram_cuda", &gram_cuda, "G += X^T diag(w) X on packed tiles, launched on a stream; csrc/gram.h.");
    m.def("gram_cuda_kernel", &cortiq::gram_cuda_kernel, "Which kernel a device takes; RuntimeError: none, and why.");
#else
    m.attr("CUDA") = false;
#endif
    m.def("isas", &isas, "Instruction sets that this processor can run, best first.");
    m.def("gram_accumulate", &gram_accumulate, py::arg("gram"), py::arg("x"), py::arg("dtype"), py::arg("tokens"),
          py::arg("n"), py::arg("row_stride"), py::arg("row_index"), py::arg("rows"), py::arg("row_weight"),
          py::arg("keep"), py::arg("threads"), py::arg("isa"),
          "G += X^T diag(w) X on packed tiles; the status of csrc/gram.h.");
}
