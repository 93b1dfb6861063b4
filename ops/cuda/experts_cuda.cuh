// experts_cuda.cuh: mixtures of experts have no kernels for GPUs yet. A run with experts on a GPU
// is refused when it is planned (plan/plan_make.h), so nothing calls these.
#ifndef EXPERTS_CUDA_CUH
#define EXPERTS_CUDA_CUH

#include "ops/cuda/device_cuda.cuh"

__attribute__((noreturn)) static inline void experts_have_no_kernels(void) {
    die(EXIT_INPUT, "use the CPU build", "experts are not done with a GPU");
}
static inline void ops_route(Stream *, Route, int32_t *, float *, const Real *, const Real *,
                             const Real *, int64_t, Router) {
    experts_have_no_kernels();
}
static inline void ops_route_backward_input(Stream *, Real *, const Real *, float *, Route,
                                            const Real *, int64_t, Router, RouterLosses) {
    experts_have_no_kernels();
}
static inline void ops_route_backward_weight(Stream *, float *, float *, const float *, Route,
                                             const int32_t *, const Real *, int64_t, Router, bool) {
    experts_have_no_kernels();
}
static inline void ops_dispatch(Stream *, Real *, const Real *, Route, int64_t) {
    experts_have_no_kernels();
}
static inline void ops_dispatch_backward(Stream *, Real *, const Real *, const Real *, Route,
                                         int64_t) {
    experts_have_no_kernels();
}
static inline void ops_combine_rows(Stream *, Real *, const Real *, Route, int64_t) {
    experts_have_no_kernels();
}
static inline void ops_combine_rows_backward(Stream *, Real *, const Real *, const Real *, Route,
                                             int64_t) {
    experts_have_no_kernels();
}
static inline void ops_experts_forward(Stream *, Real *, Real *, const Real *, const Real *,
                                       ExpertRows, int64_t, int64_t, bool) {
    experts_have_no_kernels();
}
static inline void ops_experts_backward_input(Stream *, Real *, const Real *, const Real *,
                                              const Real *, ExpertRows, int64_t, int64_t) {
    experts_have_no_kernels();
}
static inline void ops_experts_backward_weight(Stream *, float *, const Real *, const Real *,
                                               ExpertRows, int64_t, int64_t, bool) {
    experts_have_no_kernels();
}

#endif
