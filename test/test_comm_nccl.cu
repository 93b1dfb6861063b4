// test_comm_nccl.cu: collectives over the memory of GPUs. Run as `mpirun -np N build/test_comm_nccl`, N = 1 to 4.
//
// Every collective over subsets of the ranks (TEST_ALL=1: all of them, in ascending and descending order), by NCCL and staged, must
// leave every bit as comm.h's messages between processors do (which test_comm.c checks), guards and bytes sent included. Values are
// such that all sums are exact, in any order and in bf16 too; what rounding to bf16 takes away shows.
//
// All collectives of a round are in flight together. Their inputs are still being written when they are started, their results are
// copied away and overwritten as soon as they are waited for, all on the compute stream without the host: the emulation runs streams
// in any order that events allow, so a missing event shows as a wrong bit.
#define OPS_IMPLEMENTATION
#include "attention_cuda.cuh" // all of ops.h
#include "comm_nccl.cuh"

enum { MAX_RANKS = 4, GUARD = 16, LONGEST = 1500, SHAPES = 7, ROOM = GUARD + MAX_RANKS * LONGEST + GUARD, STAGING = 1 << 16 };
static const size_t BYTES = ROOM * sizeof(float);

typedef struct {
    CommKind kind;
    DType wire;
    size_t element_bytes;
    bool in_place;
} Case;
static const Case cases[] = {
    {COMM_ALL_GATHER, DTYPE_FP32, 4, true},      {COMM_REDUCE_SCATTER, DTYPE_FP32, 4, true}, {COMM_REDUCE_SCATTER, DTYPE_BF16, 4, true},
    {COMM_ALL_REDUCE, DTYPE_BF16, 4, true},      {COMM_ALL_TO_ALL, DTYPE_FP32, 4, false},    {COMM_REDUCE_SCATTER, DTYPE_BF16, 4, false},
    {COMM_REDUCE_SCATTER, DTYPE_FP32, 4, false}, {COMM_ALL_REDUCE, DTYPE_FP32, 4, true},     {COMM_ALL_TO_ALL, DTYPE_FP32, 1, false},
    {COMM_ALL_GATHER, DTYPE_FP32, 2, true},
};
enum { CASES = sizeof cases / sizeof cases[0] };
typedef struct {
    float *in, *out; // [ROOM]
} Arrays;
typedef struct {
    int64_t slices[MAX_RANKS + 1], sent[MAX_RANKS + 1], received[MAX_RANKS + 1]; // bounds
} Bounds;
typedef struct {
    CommTransport transport;
    char *staging;
    size_t staging_bytes;
} Carrier;

static Comm comm;
static Stream stream;
static Arrays expected[CASES], device[CASES];
static float *taken[CASES], *filled, *found; // results on the device; [ROOM] on the host
static int passed, failed;                   // rounds

static Carrier carrier(void) {
    Carrier c = {comm.transport, comm.staging, comm.staging_bytes};
    return c;
}
static void use(Carrier c) { comm.transport = c.transport, comm_allocate(&comm, c.staging, c.staging_bytes); }

// Nothing, equal, equal with more in the last, some empty, all in the first, nearly equal, long and unequal
static int64_t slice_length(int shape, int i, int n) {
    switch (shape) {
    case 0: return 0;
    case 1: return 640;
    case 2: return i == n - 1 ? 1201 : 1024;
    case 3: return i % 2 ? 0 : 129;
    case 4: return i ? 0 : 333;
    case 5: return 100 + i % 2;
    default: return LONGEST - 17 * i;
    }
}
static Bounds make_bounds(const Group *g, int shape) {
    Bounds b;
    memset(&b, 0, sizeof b);
    for (int i = 0; i < g->n; i++) { // of an all-to-all every pair has its own length
        b.slices[i + 1] = b.slices[i] + slice_length(shape, i, g->n);
        b.sent[i + 1] = b.sent[i] + slice_length(shape, (g->me + 2 * i) % g->n, g->n);
        b.received[i + 1] = b.received[i] + slice_length(shape, (i + 2 * g->me) % g->n, g->n);
    }
    return b;
}
// 1/1024 more than an integer other than 0: bf16 takes it away, sums of four are exact with and without it.
static void fill(int which, int shape) {
    for (int64_t e = 0; e < ROOM; e++) {
        int k = (int)(random_u64((uint64_t)(which * 16 + shape), (uint64_t)comm.rank, (uint64_t)e) % 16);
        filled[e] = (float)(k < 8 ? k - 8 : k - 7) + 0x1p-10f;
    }
}
static CommHandle start(const Case *k, const Group *g, const Arrays *a, const Bounds *b) {
    float *in = (k->in_place ? a->out : a->in) + GUARD, *out = a->out + GUARD;
    comm_label(&comm, comm_kind_names[k->kind], (int)(k - cases), 0);
    switch (k->kind) {
    case COMM_ALL_GATHER: return comm_all_gather(&comm, g, out, b->slices, k->element_bytes);
    case COMM_REDUCE_SCATTER: return comm_reduce_scatter(&comm, g, in, out + b->slices[g->me], b->slices, k->wire);
    case COMM_ALL_REDUCE: return comm_all_reduce(&comm, g, out, b->slices, k->wire);
    default: return comm_all_to_all(&comm, g, in, b->sent, out, b->received, k->element_bytes);
    }
}

// What must come out, and the bytes that are sent for it.
static void run_on_processor(const Group *g, const Bounds *b, int shape) {
    for (int i = 0; i < CASES; i++) {
        fill(2 * i, shape), memcpy(expected[i].in, filled, BYTES);
        fill(2 * i + 1, shape), memcpy(expected[i].out, filled, BYTES);
        comm_wait(&comm, start(&cases[i], g, &expected[i], b));
    }
}
static void run_on_device(const Group *g, const Bounds *b, int shape) {
    CommHandle handles[CASES];
    for (int i = 0; i < CASES; i++) {
        fill(2 * i, shape), ops_from_host(&stream, device[i].in, filled, BYTES);
        fill(2 * i + 1, shape), ops_from_host(&stream, device[i].out, filled, BYTES);
        handles[i] = start(&cases[i], g, &device[i], b);
    }
    for (int i = 0; i < CASES; i++) {
        int k = (i * 3 + 7) % CASES; // in another order than they were started
        comm_wait(&comm, handles[k]);
        ops_copy(&stream, taken[k], device[k].out, BYTES);
        ops_zero(&stream, device[k].out, BYTES);
    }
}
static void test_round(const Group *g, int shape, Carrier processor, Carrier gpu) {
    const Bounds b = make_bounds(g, shape);
    int64_t bytes[COMM_KINDS][LINK_KINDS];
    bool good = true;
    comm_reset_counters(&comm), use(processor);
    run_on_processor(g, &b, shape);
    memcpy(bytes, comm.bytes, sizeof bytes);
    comm_reset_counters(&comm), use(gpu);
    run_on_device(g, &b, shape);
    for (int i = 0; i < CASES; i++) {
        ops_to_host(&stream, found, taken[i], BYTES);
        bool same = !memcmp(found, expected[i].out, BYTES);
        if (!same) {
            fprintf(stderr, "FAILED on rank %d: %s, case %d, by %s, %d members, shape %d\n", comm.rank, comm_kind_names[cases[i].kind], i, comm.transport.name,
                    g->n, shape);
        }
        good = good && same;
    }
    if (memcmp(bytes, comm.bytes, sizeof bytes)) { good = false, fprintf(stderr, "FAILED on rank %d: bytes sent, by %s\n", comm.rank, comm.transport.name); }
    passed += good, failed += !good;
}
static bool test_groups(Carrier processor) { // were all good?
    bool all = getenv("TEST_ALL") && atoi(getenv("TEST_ALL"));
    Carrier gpu = carrier();
    for (int mask = 1; mask < 1 << comm.ranks; mask++) {
        for (int order = 0; order < 2; order++) {
            if (!all && order == mask % 2) { continue; }
            int ranks[MAX_RANKS], n = 0;
            for (int i = 0; i < comm.ranks; i++) {
                int r = order ? comm.ranks - 1 - i : i;
                if (mask >> r & 1) { ranks[n++] = r; }
            }
            Group g = group_make(ranks, n, comm.rank, comm.node_of);
            comm.transport.join(&comm, &g), gpu = carrier();
            for (int shape = 0; shape < SHAPES && g.me >= 0; shape++) { test_round(&g, shape, processor, gpu), gpu = carrier(); }
            group_free(&g);
        }
    }
    int mine[2] = {passed, failed}, sums[2 * MAX_RANKS], sum[2] = {0, 0};
    comm_all_gather_small(&comm, mine, sums, sizeof mine);
    for (int r = 0; r < comm.ranks; r++) { sum[0] += sums[2 * r], sum[1] += sums[2 * r + 1]; }
    if (comm.rank == 0) { printf("%d passed, %d failed\n", sum[0], sum[1]); }
    passed = failed = 0;
    return !sum[1];
}

static float *on_device(void) {
    float *p = (float *)ops_alloc(BYTES);
    if (!p) { die(EXIT_RESOURCES, NULL, "no memory"); }
    return p;
}
int main(int argc, char **argv) {
    setenv("EMU_GPUS", "4", 0); // where there is emulation
    comm_start(&comm, &argc, &argv);
    comm_place(&comm, comm.ranks == 4 ? 2 : 0); // two levels
    if (comm.ranks > MAX_RANKS) { die(EXIT_INPUT, NULL, "at most %d ranks", (int)MAX_RANKS); }
    comm.timeout_s = 60;
    stream.threads = 1, stream.progress = comm_progress;
    ops_open(&stream, comm.local_rank, DTYPE_FP32);
    filled = (float *)checked_malloc(BYTES, "filled"), found = (float *)checked_malloc(BYTES, "found");
    for (int i = 0; i < CASES; i++) {
        expected[i].in = (float *)checked_malloc(BYTES, "expected"), expected[i].out = (float *)checked_malloc(BYTES, "expected");
        device[i].in = on_device(), device[i].out = on_device(), taken[i] = on_device();
    }
    comm_allocate(&comm, checked_malloc(STAGING, "staging"), STAGING);
    Carrier processor = carrier();
    bool good = true;
    int sharing;
    if (gpus_apart(&comm, &sharing)) {
        comm_allocate(&comm, on_device(), BYTES);
        nccl_open(&comm, &stream);
        good = test_groups(processor);
        comm.transport.end(&comm);
    }
    staged_open(&comm, &stream, 2 * BYTES, STAGING);
    good = test_groups(processor) && good;
    comm_end(&comm);
    return !good;
}
