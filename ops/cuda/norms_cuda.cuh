// norms_cuda.cuh: layernorm and RMSNorm on a GPU, a warp per row. Part of ops_cuda.cuh. The
// contract is ops.h.
//
// Rows     A lane takes EACH neighbouring numbers at a time, a piece. Where its pieces fit into
//          registers and lie at multiples of 16 bytes, it reads all of them before it computes, and
//          each only once; else (PIECES = 0) it reads them again from memory for each pass.
#ifndef NORMS_CUDA_CUH
#define NORMS_CUDA_CUH

enum { NORM_STEP = 32 * EACH }; // numbers between two pieces of a lane
template <class R> struct alignas(16) LanePiece { R x[EACH]; };
// Returns the piece. The compiler takes it for another one, so that it converts the numbers again
// for each pass: to keep them as fp32 would take twice as many registers.
template <class R> __device__ LanePiece<R> unknown(LanePiece<R> piece) {
#ifdef __CUDACC__
    unsigned words[sizeof piece / sizeof(unsigned)];
    memcpy(words, &piece, sizeof piece);
    UNROLL for (unsigned &word : words) { asm volatile("" : "+r"(word)); }
    memcpy(&piece, words, sizeof piece);
#endif
    return piece;
}
// Returns how many pieces a lane keeps; 0: none. places: the arrays' addresses, or-ed.
static inline int pieces_of_row(int64_t C, uintptr_t places) {
    const int64_t pieces = ceil_div(C, NORM_STEP);
    return C % EACH || places % 16 || pieces > 8 ? 0 : pieces > 4 ? 8 : 4;
}
// Blocks on a multiprocessor, which limits the registers of a thread.
#define NORM_BOUNDS __launch_bounds__(THREADS, (PIECES == 8 ? 4 : 8) / sizeof(R))
#define LAUNCH_NORM(s, kernel, pieces, N, ...)                                                     \
    FOR_REAL(const unsigned blocks = blocks_for(N, WARPS); switch (pieces) {                       \
        case 4: launch(s, kernel<R, 4>, blocks, __VA_ARGS__, N); break;                            \
        case 8: launch(s, kernel<R, 8>, blocks, __VA_ARGS__, N); break;                            \
        default: launch(s, kernel<R, 0>, blocks, __VA_ARGS__, N);                                  \
    })
#define PLACE(p) ((uintptr_t)(const void *)(p))

// A row of C numbers, as a lane sees it.
template <class R, int PIECES> struct NormRow {
    const R *from;
    int C;
    LanePiece<R> kept[PIECES ? PIECES : 1];

    __device__ int begin(int k) const { return (int)threadIdx.x % 32 * EACH + k * NORM_STEP; }
    // Calls f(k, c) for each of the lane's pieces, which begins at number c.
    template <class F> __device__ void each(F f) const {
        if (PIECES) {
            UNROLL for (int k = 0; k < PIECES; k++) {
                if (begin(k) < C) { f(k, begin(k)); }
            }
        } else {
            for (int k = 0; begin(k) < C; k++) { f(k, begin(k)); }
        }
    }
    // x = the numbers of `row` from c on
    __device__ void read_at(float *x, const R *row, int c, float padding = 0.0f) const {
        if (PIECES) {
            const LanePiece<R> piece = *(const LanePiece<R> *)(row + c);
            UNROLL for (int j = 0; j < EACH; j++) { x[j] = read(&piece.x[j]); }
        } else {
            read_numbers<EACH>(x, row + c, C - c, padding);
        }
    }
    __device__ void write_at(R *row, int c, const float *x) const {
        if (PIECES) {
            LanePiece<R> piece;
            UNROLL for (int j = 0; j < EACH; j++) { write(&piece.x[j], x[j]); }
            *(LanePiece<R> *)(row + c) = piece;
        } else {
            write_numbers<EACH>(row + c, x, C - c);
        }
    }
    __device__ void load(const R *row, int channels) {
        from = row;
        C = channels;
        UNROLL for (int k = 0; k < PIECES; k++) {
            if (begin(k) < C) { kept[k] = *(const LanePiece<R> *)(row + begin(k)); }
        }
    }
    __device__ void get(float *x, int k, float padding = 0.0f) const {
        if (PIECES) {
            const LanePiece<R> piece = unknown(kept[k]);
            UNROLL for (int j = 0; j < EACH; j++) { x[j] = read(&piece.x[j]); }
        } else {
            read_at(x, from, begin(k), padding);
        }
    }
    // Adds another row, and writes the sum, which is the row from then on.
    __device__ void add(const R *row, R *sum) {
        NormRow other;
        other.load(row, C);
        each([&](int k, int c) {
            float x[EACH], y[EACH];
            get(x, k);
            other.get(y, k);
            UNROLL for (int j = 0; j < EACH; j++) { x[j] = rounded<R>(x[j] + y[j]); }
            write_at(sum, c, x);
            if (PIECES) {
                UNROLL for (int j = 0; j < EACH; j++) { write(&kept[k].x[j], x[j]); }
            }
        });
        from = sum;
    }
};

template <class R, int PIECES>
__global__ void NORM_BOUNDS layernorm_kernel(R *out, float *mean, float *rstd, R *sum, const R *a,
                                             const R *b, const R *weight, const R *bias, int C,
                                             int64_t N) {
    const int64_t n = warp_index();
    if (n >= N) { return; } // whole warps return
    NormRow<R, PIECES> row;
    float total = 0.0f, squares = 0.0f;
    row.load(a + n * C, C);
    if (b) { row.add(b + n * C, sum + n * C); }
    row.each([&](int k, int) {
        float x[EACH];
        row.get(x, k);
        UNROLL for (int j = 0; j < EACH; j++) { total += x[j]; }
    });
    const float m = warp_sum(total) / (float)C;
    // The mean is subtracted first, which avoids cancellation.
    row.each([&](int k, int) {
        float x[EACH];
        row.get(x, k, m);
        UNROLL for (int j = 0; j < EACH; j++) { squares += (x[j] - m) * (x[j] - m); }
    });
    const float r = 1.0f / sqrtf(warp_sum(squares) / (float)C + 1e-5f);
    row.each([&](int k, int c) {
        float x[EACH], w[EACH], y[EACH];
        row.get(x, k);
        row.read_at(w, weight, c);
        row.read_at(y, bias, c);
        UNROLL for (int j = 0; j < EACH; j++) { y[j] += (x[j] - m) * r * w[j]; }
        row.write_at(out + n * C, c, y);
    });
    if (threadIdx.x % 32 == 0) {
        mean[n] = m;
        rstd[n] = r;
    }
}
static inline void ops_layernorm_forward(Stream *s, Real *out, float *mean, float *rstd, Real *sum,
                                         const Real *a, const Real *b, const Real *weight,
                                         const Real *bias, int64_t N, int64_t C) {
    const uintptr_t places =
        PLACE(out) | PLACE(sum) | PLACE(a) | PLACE(b) | PLACE(weight) | PLACE(bias);
    LAUNCH_NORM(s, layernorm_kernel, pieces_of_row(C, places), N, out, mean, rstd, sum, a, b,
                weight, bias, (int)C);
}

// With h = (x - mean) rstd and g = dout * weight: dx = rstd (g - average(g) - h average(g h)).
template <class R, int PIECES>
__global__ void NORM_BOUNDS layernorm_backward_kernel(R *din, const R *before, const R *dout,
                                                      const R *in, const R *weight,
                                                      const float *mean, const float *rstd, int C,
                                                      int64_t N) {
    const int64_t n = warp_index();
    if (n >= N) { return; }
    NormRow<R, PIECES> dy_row, x_row;
    dy_row.load(dout + n * C, C);
    x_row.load(in + n * C, C);
    const float m = mean[n], r = rstd[n];
    float g_sum = 0.0f, gh_sum = 0.0f;
    x_row.each([&](int k, int c) {
        float dy[EACH], x[EACH], w[EACH];
        dy_row.get(dy, k);
        x_row.get(x, k);
        x_row.read_at(w, weight, c);
        UNROLL for (int j = 0; j < EACH; j++) {
            g_sum += dy[j] * w[j];
            gh_sum += dy[j] * w[j] * ((x[j] - m) * r);
        }
    });
    const float g_mean = warp_sum(g_sum) / (float)C, gh_mean = warp_sum(gh_sum) / (float)C;
    __syncwarp(); // the weights are read again: registers do not suffice to keep them
    x_row.each([&](int k, int c) {
        float dy[EACH], x[EACH], w[EACH], to[EACH] = {};
        if (before) { x_row.read_at(to, before + n * C, c); }
        dy_row.get(dy, k);
        x_row.get(x, k);
        x_row.read_at(w, weight, c);
        UNROLL for (int j = 0; j < EACH; j++) {
            to[j] += r * (dy[j] * w[j] - g_mean - (x[j] - m) * r * gh_mean);
        }
        x_row.write_at(din + n * C, c, to);
    });
}
static inline void ops_layernorm_backward_input(Stream *s, Real *din, const Real *before,
                                                const Real *dout, const Real *in,
                                                const Real *weight, const float *mean,
                                                const float *rstd, int64_t N, int64_t C) {
    const uintptr_t places = PLACE(din) | PLACE(before) | PLACE(dout) | PLACE(in) | PLACE(weight);
    LAUNCH_NORM(s, layernorm_backward_kernel, pieces_of_row(C, places), N, din, before, dout, in,
                weight, mean, rstd, (int)C);
}
static inline void ops_layernorm_backward_weight(Stream *s, float *dweight, float *dbias,
                                                 const Real *dout, const Real *in,
                                                 const float *mean, const float *rstd, int64_t N,
                                                 int64_t C, bool accumulate) {
    column_sums(s, dweight, dbias, dout, in, mean, rstd, N, C, accumulate);
}

// --- RMSNorm -------------------------------------------------------------------------------------
template <class R, int PIECES>
__device__ void read_gains(float *w, const NormRow<R, PIECES> &row, const R *weight, int c) {
    UNROLL for (int j = 0; j < EACH; j++) { w[j] = 1.0f; }
    if (weight) { row.read_at(w, weight, c); }
}
template <class R, int PIECES>
__global__ void NORM_BOUNDS rmsnorm_kernel(R *out, float *rstd, R *sum, const R *a, const R *b,
                                           const R *weight, float eps, int C, int64_t N) {
    const int64_t n = warp_index();
    if (n >= N) { return; } // whole warps return
    NormRow<R, PIECES> row;
    float squares = 0.0f;
    row.load(a + n * C, C);
    if (b) { row.add(b + n * C, sum + n * C); }
    row.each([&](int k, int) {
        float x[EACH];
        row.get(x, k);
        UNROLL for (int j = 0; j < EACH; j++) { squares += x[j] * x[j]; }
    });
    const float r = 1.0f / sqrtf(warp_sum(squares) / (float)C + eps);
    row.each([&](int k, int c) {
        float x[EACH], w[EACH];
        row.get(x, k);
        read_gains(w, row, weight, c);
        UNROLL for (int j = 0; j < EACH; j++) { x[j] *= r * w[j]; }
        row.write_at(out + n * C, c, x);
    });
    if (threadIdx.x % 32 == 0) { rstd[n] = r; }
}
static inline void ops_rmsnorm_forward(Stream *s, Real *out, float *rstd, Real *sum, const Real *a,
                                       const Real *b, const Real *weight, int64_t N, int64_t C,
                                       float eps) {
    const uintptr_t places = PLACE(out) | PLACE(sum) | PLACE(a) | PLACE(b) | PLACE(weight);
    LAUNCH_NORM(s, rmsnorm_kernel, pieces_of_row(C, places), N, out, rstd, sum, a, b, weight, eps,
                (int)C);
}

// With h = x rstd and g = dout * weight: dx = rstd (g - h average(g h)).
template <class R, int PIECES>
__global__ void NORM_BOUNDS rmsnorm_backward_kernel(R *din, const R *before, const R *dout,
                                                    const R *in, const R *weight, const float *rstd,
                                                    int C, int64_t N) {
    const int64_t n = warp_index();
    if (n >= N) { return; }
    NormRow<R, PIECES> dy_row, x_row;
    dy_row.load(dout + n * C, C);
    x_row.load(in + n * C, C);
    const float r = rstd[n];
    float gh_sum = 0.0f;
    x_row.each([&](int k, int c) {
        float dy[EACH], x[EACH], w[EACH];
        dy_row.get(dy, k);
        x_row.get(x, k);
        read_gains(w, x_row, weight, c);
        UNROLL for (int j = 0; j < EACH; j++) { gh_sum += dy[j] * w[j] * (x[j] * r); }
    });
    const float gh_mean = warp_sum(gh_sum) / (float)C;
    __syncwarp(); // as above
    x_row.each([&](int k, int c) {
        float dy[EACH], x[EACH], w[EACH], to[EACH] = {};
        if (before) { x_row.read_at(to, before + n * C, c); }
        dy_row.get(dy, k);
        x_row.get(x, k);
        read_gains(w, x_row, weight, c);
        UNROLL for (int j = 0; j < EACH; j++) { to[j] += r * (dy[j] * w[j] - x[j] * r * gh_mean); }
        x_row.write_at(din + n * C, c, to);
    });
}
static inline void ops_rmsnorm_backward_input(Stream *s, Real *din, const Real *before,
                                              const Real *dout, const Real *in, const Real *weight,
                                              const float *rstd, int64_t N, int64_t C) {
    const uintptr_t places = PLACE(din) | PLACE(before) | PLACE(dout) | PLACE(in) | PLACE(weight);
    LAUNCH_NORM(s, rmsnorm_backward_kernel, pieces_of_row(C, places), N, din, before, dout, in,
                weight, rstd, (int)C);
}
static inline void ops_rmsnorm_backward_weight(Stream *s, float *dweight, const Real *dout,
                                               const Real *in, const float *rstd, int64_t N,
                                               int64_t C, bool accumulate) {
    column_sums(s, dweight, NULL, dout, in, NULL, rstd, N, C, accumulate);
}

#endif
