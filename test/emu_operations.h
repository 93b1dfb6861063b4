// emu_operations.h: at the begin of each operation (ops/ops.h) its scratch holds NaNs that may not be
// read, so that nothing can go from one operation to the next in it. For programs with
// -DEMU_CHECKED; the names of operations are taken from ops.h when such a program is built.
#ifndef EMU_OPERATIONS_H
#define EMU_OPERATIONS_H

#include "ops/cuda/clip_cuda.cuh" // with ops_cuda.cuh: all operations

static inline void emu_operation(Stream *s) {
    char *begin = (char *)scratch(s);
    const int64_t bytes = scratch_bytes(s);
    if (!s->workspace || bytes <= 0) { return; }
    emu_check_placed(s->workspace, MATMUL_WORKSPACE);
    emu_check_placed(begin, (size_t)bytes);
    emu_queue(((Gpu *)s->device)->stream, [=] {
        memset(begin, 0xff, (size_t)bytes);
        emu_check_forget(begin, (size_t)bytes);
    });
}
#include "build/emu_names.h"

#endif
