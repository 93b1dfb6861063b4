// test_comm_nccl.cu: collectives and messages over the memory of GPUs. Run as `mpirun -np N
// build/test_comm_nccl`, N = 1 to 4.
//
// Every collective over subsets of the ranks (TEST_ALL=1: all of them, in ascending and descending
// order, each with every shape of slices), by NCCL and staged, must leave every bit as comm.h's
// messages between processors do (which test_comm.c checks), guards and bytes sent included; but
// not what the room behind an array holds. Values are such that all sums are exact, in any order and in bf16 too; what rounding to
// bf16 takes away shows. NCCL is called once for each collective.
//
// All collectives of a round are in flight together. Their inputs are still being written when they
// are started, their results are copied away and overwritten as soon as they are waited for, all on
// the compute stream without the host: the emulation runs streams in any order that events allow,
// so a missing event shows as a wrong bit. Messages likewise; all ranks post them in one order, so
// they may wait for each other.
//
// With TRAIN_GPT_NCCL_SHARED=1 NCCL carries them where the ranks share a GPU, too (EMU_GPUS=1 in the
// emulation), and those of a single rank.
//
//   test_comm_nccl stuck   rank 0 has a message open for longer than the watchdog, and says so;
//                          then it needs it: must end with exit code 4
#define OPS_IMPLEMENTATION
#define STAGED_LEAST 4096
#include "ops/cuda/clip_cuda.cuh" // with ops_cuda.cuh: all operations
#include "comm/comm_nccl.cuh"

enum {
    MAX_RANKS = 4,
    GUARD = 16,
    LONGEST = 1500,
    SHAPES = 7,
    CAPACITY = GUARD + MAX_RANKS * LONGEST + GUARD,
    STAGING = 1 << 16
};
static const size_t BYTES = CAPACITY * sizeof(float);

typedef struct {
    CommKind kind;
    DType wire;
    size_t element_bytes;
    bool in_place;
} Case;
static const Case cases[] = {
    {COMM_ALL_GATHER, DTYPE_FP32, 4, true},      {COMM_REDUCE_SCATTER, DTYPE_FP32, 4, true},
    {COMM_REDUCE_SCATTER, DTYPE_BF16, 4, true},  {COMM_ALL_REDUCE, DTYPE_BF16, 4, true},
    {COMM_ALL_TO_ALL, DTYPE_FP32, 4, false},     {COMM_REDUCE_SCATTER, DTYPE_BF16, 4, false},
    {COMM_REDUCE_SCATTER, DTYPE_FP32, 4, false}, {COMM_ALL_REDUCE, DTYPE_FP32, 4, true},
    {COMM_ALL_TO_ALL, DTYPE_FP32, 1, false},     {COMM_ALL_GATHER, DTYPE_FP32, 2, true},
};
enum { CASES = sizeof cases / sizeof cases[0] };
typedef struct {
    float *in, *out; // [ROOM]
} Arrays;
typedef struct {
    int64_t slices[MAX_RANKS + 1], sent[MAX_RANKS + 1], received[MAX_RANKS + 1]; // bounds
    int64_t sent_ranges[2 * MAX_RANKS], received_ranges[2 * MAX_RANKS];          // with gaps
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
static void use(Carrier c) {
    comm.transport = c.transport;
    comm_allocate(&comm, c.staging, c.staging_bytes);
}

// Nothing, equal, equal with more in the last, some empty, all in the first, nearly equal, long and
// unequal
static int64_t shape_length(int shape, int i, int n) {
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
// Equal slices, of which the last ones lack so many elements: none, the last one a few or all but
// one, the last ones all.
typedef struct {
    int64_t slice, lacks;
} Cut;
static const Cut cuts[SHAPES] = {{0, 0},         {640, 0},   {1024, 223}, {129, 129 + 40},
                                 {333, 3 * 333}, {101, 100}, {LONGEST, 1}};

// NCCL wants slices that are cut so; others take any.
static Bounds make_bounds(const Group *g, int shape, bool any) {
    Bounds b;
    memset(&b, 0, sizeof b);
    const int64_t elements = max_i64(0, g->n * cuts[shape].slice - cuts[shape].lacks);
    for (int i = 0; i < g->n; i++) { // of an all-to-all every pair has its own length
        b.slices[i + 1] = any ? b.slices[i] + shape_length(shape, i, g->n)
                              : min_i64((i + 1) * cuts[shape].slice, elements);
        b.sent[i + 1] = b.sent[i] + shape_length(shape, (g->me + 2 * i) % g->n, g->n);
        b.received[i + 1] = b.received[i] + shape_length(shape, (i + 2 * g->me) % g->n, g->n);
        for (int k = 0; k < 2; k++) {
            b.sent_ranges[2 * i + k] = b.sent[i + k] + 5 * (i + 1);
            b.received_ranges[2 * i + k] = b.received[i + k] + 3 * (i + 1);
        }
    }
    return b;
}
// 1/1024 more than an integer other than 0: bf16 takes it away, sums of four are exact with and
// without it.
static void fill(int which, int shape) {
    for (int64_t e = 0; e < CAPACITY; e++) {
        int k = (int)(random_u64((uint64_t)(which * 16 + shape), (uint64_t)comm.rank, (uint64_t)e) %
                      16);
        filled[e] = (float)(k < 8 ? k - 8 : k - 7) + 0x1p-10f;
    }
}
static CommRequest begin(const Case *k, const Group *g, const Arrays *a, const Bounds *b) {
    float *in = (k->in_place ? a->out : a->in) + GUARD, *out = a->out + GUARD;
    const CommLabel label = {comm_kind_names[k->kind], (int)(k - cases), 0};
    switch (k->kind) {
    case COMM_ALL_GATHER:
        return comm_all_gather_begin(&comm, label, g, out, b->slices, k->element_bytes);
    case COMM_REDUCE_SCATTER:
        return comm_reduce_scatter_begin(&comm, label, g, in, out + b->slices[g->me], b->slices,
                                         k->wire);
    case COMM_ALL_REDUCE: return comm_all_reduce_begin(&comm, label, g, out, b->slices, k->wire);
    default:
        if (k->element_bytes == 1) {
            return comm_all_to_all_ranges_begin(&comm, label, g, in, b->sent_ranges, out,
                                                b->received_ranges, 1);
        }
        return comm_all_to_all_begin(&comm, label, g, in, b->sent, out, b->received,
                                     k->element_bytes);
    }
}

static void complete(CommRequest r) { comm_wait(&comm, &r); }
// What must come out, and the bytes that are sent for it.
static void run_on_cpu(const Group *g, const Bounds *b, int shape) {
    for (int i = 0; i < CASES; i++) {
        fill(2 * i, shape);
        memcpy(expected[i].in, filled, BYTES);
        fill(2 * i + 1, shape);
        memcpy(expected[i].out, filled, BYTES);
        complete(begin(&cases[i], g, &expected[i], b));
    }
}
static void run_on_device(const Group *g, const Bounds *b, int shape) {
    CommRequest requests[CASES];
    for (int i = 0; i < CASES; i++) {
        fill(2 * i, shape);
        ops_from_host(&stream, device[i].in, filled, BYTES);
        fill(2 * i + 1, shape);
        ops_from_host(&stream, device[i].out, filled, BYTES);
        requests[i] = begin(&cases[i], g, &device[i], b);
    }
    for (int i = 0; i < CASES; i++) {
        int k = (i * 3 + 7) % CASES; // in another order than they were started
        comm_wait(&comm, &requests[k]);
        ops_copy(&stream, taken[k], device[k].out, BYTES);
        ops_zero(&stream, device[k].out, BYTES);
    }
}
// Has the device what the processor has? What an all-gather or a reduce-scatter leaves in the room
// behind an array is nobody's.
static bool same_results(const Case *k, const Group *g, const Bounds *b, bool slot) {
    const bool reads = slot && (k->kind == COMM_ALL_GATHER || k->kind == COMM_REDUCE_SCATTER);
    const size_t all = (size_t)b->slices[g->n],
                 end = reads ? (size_t)bounds_padded(b->slices, g->n) : all;
    const size_t size = k->element_bytes, guard = GUARD * sizeof(float);
    const char *a = (const char *)found, *e = (const char *)expected[k - cases].out;
    return !memcmp(a, e, guard + all * size) &&
           !memcmp(a + guard + end * size, e + guard + end * size, BYTES - guard - end * size);
}
// Collectives of a round for which NCCL is called, and calls: without emulation nobody counts them.
static int expected_calls(const Group *g, const Bounds *b) {
    const bool carried = g->n > 1 || (comm.ranks == 1 && environment_asks(ENVIRONMENT_NCCL_SHARED));
    int calls = 0;
    for (int i = 0; i < CASES; i++) {
        calls += cases[i].kind != COMM_ALL_TO_ALL && carried && b->slices[g->n];
    }
    return calls;
}
static int nccl_calls(void) {
#ifdef __CUDACC__
    return -1;
#else
    return emu_nccl_collectives;
#endif
}
static void test_round(const Group *g, int shape, Carrier processor, Carrier gpu) {
    const bool nccl = !strcmp(gpu.transport.name, "nccl");
    const Bounds b = make_bounds(g, shape, !nccl);
    const int called = nccl_calls();
    int64_t bytes[COMM_KINDS][LINK_KINDS];
    bool good = true;
    comm_reset_counters(&comm);
    use(processor);
    run_on_cpu(g, &b, shape);
    memcpy(bytes, comm.bytes, sizeof bytes);
    comm_reset_counters(&comm);
    use(gpu);
    run_on_device(g, &b, shape);
    for (int i = 0; i < CASES; i++) {
        ops_to_host(&stream, found, taken[i], BYTES);
        bool same = same_results(&cases[i], g, &b, nccl);
        if (!same) {
            fprintf(stderr, "FAILED on rank %d: %s, case %d, by %s, %d members, shape %d\n",
                    comm.rank, comm_kind_names[cases[i].kind], i, comm.transport.name, g->n, shape);
        }
        good = good && same;
    }
    if (memcmp(bytes, comm.bytes, sizeof bytes)) {
        good = false;
        fprintf(stderr, "FAILED on rank %d: bytes sent, by %s\n", comm.rank, comm.transport.name);
    }
    if (nccl && called >= 0 && nccl_calls() - called != expected_calls(g, &b)) {
        good = false;
        fprintf(stderr,
                "FAILED on rank %d: %d calls of NCCL for %d collectives, %d members, shape %d\n",
                comm.rank, nccl_calls() - called, expected_calls(g, &b), g->n, shape);
    }
    passed += good;
    failed += !good;
}
// -------------------------------------------------------------------------------------------------
// Messages
enum { MESSAGES = 3, MESSAGE_CAPACITY = 3, PAIRS = MAX_RANKS * MAX_RANKS, MANY = NCCL_MOST + 40 };
static const size_t message_elements[MESSAGES] = {1, CAPACITY, 0};
static float *sent[MESSAGES * PAIRS], *received[MESSAGES * PAIRS], *arrived[MESSAGES * PAIRS];
static int peers[MAX_RANKS];

static CommTraffic traffic(void) {
    CommTraffic t = {comm.ranks > 1 ? BYTES : 0, MESSAGE_CAPACITY, peers, 0};
    for (int r = 0; r < comm.ranks; r++) {
        if (r != comm.rank) { peers[t.count++] = r; }
    }
    return t;
}
static void check_round(bool good, const char *what) {
    passed += good;
    failed += !good;
    if (!good) {
        fprintf(stderr, "FAILED on rank %d: %s, by %s\n", comm.rank, what, comm.transport.name);
    }
}
// Of one of the messages between all pairs: its ends; false: this rank has no part in it.
static bool message_ends(int m, int *from, int *to) {
    *from = m / MAX_RANKS % MAX_RANKS;
    *to = m % MAX_RANKS;
    return *from != *to && *from < comm.ranks && *to < comm.ranks &&
           (*from == comm.rank || *to == comm.rank);
}
static float message_value(int m, int round, size_t e) {
    return (float)(m * 8 + round) + (float)e * 0x1p-12f;
}
static void fill_message(int m, int round) {
    for (size_t e = 0; e < CAPACITY; e++) { filled[e] = message_value(m, round, e); }
}
// All under way together; each is filled behind what is in the stream, and overwritten once it is
// waited for.
static void post_messages(int round, CommRequest *requests) {
    const CommLabel label = {"messages", round, 0};
    for (int m = 0, from, to; m < MESSAGES * PAIRS; m++) {
        if (!message_ends(m, &from, &to)) { continue; }
        size_t bytes = message_elements[m / PAIRS] * sizeof(float);
        fill_message(from == comm.rank ? m : -m, round);
        ops_from_host(&stream, from == comm.rank ? sent[m] : received[m], filled, BYTES);
        requests[m] = from == comm.rank
                          ? comm_send_begin(&comm, label, to, sent[m], bytes)
                          : comm_receive_begin(&comm, label, from, received[m], bytes);
    }
}
static void take_messages(CommRequest *requests) {
    for (int i = 0, from, to; i < MESSAGES * PAIRS; i++) {
        int m = (i * 11 + 5) % (MESSAGES * PAIRS);
        if (!message_ends(m, &from, &to)) { continue; }
        comm_wait(&comm, &requests[m]);
        if (to == comm.rank) { ops_copy(&stream, arrived[m], received[m], BYTES); }
        ops_zero(&stream, from == comm.rank ? sent[m] : received[m], BYTES);
    }
}
static bool messages_arrived(int round) {
    bool good = true;
    for (int m = 0, from, to; m < MESSAGES * PAIRS; m++) {
        if (!message_ends(m, &from, &to) || to != comm.rank) { continue; }
        ops_to_host(&stream, found, arrived[m], BYTES);
        for (size_t e = 0; e < CAPACITY; e++) {
            good = good &&
                   found[e] == message_value(e < message_elements[m / PAIRS] ? m : -m, round, e);
        }
    }
    return good;
}
static void test_messages(void) {
    CommRequest requests[MESSAGES * PAIRS];
    int64_t expected_bytes[LINK_KINDS] = {0, 0};
    comm_reset_counters(&comm);
    const bool all = getenv("TEST_ALL") && atoi(getenv("TEST_ALL"));
    for (int round = 0; round < (all ? 4 : 2); round++) {
        for (int m = 0, from, to; m < MESSAGES * PAIRS; m++) {
            bool mine = message_ends(m, &from, &to) && from == comm.rank;
            if (mine) {
                expected_bytes[comm.node_of[to] != comm.node] +=
                    (int64_t)(message_elements[m / PAIRS] * sizeof(float));
            }
        }
        post_messages(round, requests);
        take_messages(requests);
        check_round(messages_arrived(round), "messages");
    }
    check_round(!memcmp(expected_bytes, comm.bytes[COMM_SEND], sizeof expected_bytes),
                "bytes of messages");
}
// More than there is room for.
static void test_many_messages(void) {
    static CommRequest requests[2 * MANY];
    const int next = (comm.rank + 1) % comm.ranks, last = (comm.rank + comm.ranks - 1) % comm.ranks;
    const CommLabel label = {"many messages", 0, 0};
    for (int i = 0; i < MANY; i++) { filled[i] = (float)(comm.rank * MANY + i); }
    ops_from_host(&stream, sent[0], filled, MANY * sizeof(float));
    ops_zero(&stream, received[0], BYTES);
    for (int i = 0; i < MANY * comm.ranks; i++) { // in the order of all
        const int from = i % comm.ranks, k = i / comm.ranks;
        if (from == comm.rank) {
            requests[k] = comm_send_begin(&comm, label, next, sent[0] + k, sizeof(float));
        }
        if (from == last) {
            requests[MANY + k] =
                comm_receive_begin(&comm, label, last, received[0] + k, sizeof(float));
        }
    }
    for (int i = 2 * MANY - 1; i >= 0; i--) { comm_wait(&comm, &requests[i]); }
    ops_to_host(&stream, found, received[0], MANY * sizeof(float));
    bool good = true;
    for (int i = 0; i < MANY; i++) { good = good && found[i] == (float)(last * MANY + i); }
    check_round(good, "many messages");
}
// One after another, with nothing that would let the host wait for the device: a place is filled
// again before what came first has left it.
static void test_one_way(void) {
    enum { TURNS = 4 * MESSAGE_CAPACITY };
    bool good = true;
    const CommLabel label = {"one way", 0, 0};
    for (int i = 0; i < TURNS && comm.rank < 2; i++) {
        fill_message(i, 7);
        if (comm.rank) { ops_from_host(&stream, sent[i], filled, BYTES); }
        complete(comm.rank ? comm_send_begin(&comm, label, 0, sent[i], BYTES)
                           : comm_receive_begin(&comm, label, 1, received[i], BYTES));
    }
    for (int i = 0; i < TURNS && comm.rank == 0; i++) {
        fill_message(i, 7);
        ops_to_host(&stream, found, received[i], BYTES);
        good = good && !memcmp(found, filled, BYTES);
    }
    check_round(good, "messages one way");
}
// A collective of both ends of a message that waits.
static void test_message_beside_collective(void) {
    const int64_t bounds[MAX_RANKS + 1] = {0, 1, 2, 3, 4};
    const CommLabel label = {"beside", 0, 0};
    CommRequest r = {.number = 0};
    if (comm.rank == 0) { r = comm_receive_begin(&comm, label, 1, received[0], sizeof(float)); }
    ops_zero(&stream, taken[0], BYTES);
    complete(comm_all_reduce_begin(&comm, label, &comm.everyone, taken[0], bounds, DTYPE_FP32));
    ops_to_host(&stream, found, taken[0], sizeof(float)); // only now the other end comes
    filled[0] = 42 + found[0];
    ops_from_host(&stream, sent[0], filled, sizeof(float));
    if (comm.rank == 1) { r = comm_send_begin(&comm, label, 0, sent[0], sizeof(float)); }
    comm_wait(&comm, &r);
    ops_to_host(&stream, found, received[0], sizeof(float));
    check_round(comm.rank || found[0] == 42, "a message beside a collective");
}
static void test_all_messages(void) {
    if (comm.ranks == 1) { return; }
    test_messages();
    test_many_messages();
    test_one_way();
    test_message_beside_collective();
}
static int test_stuck(void) {
    comm.timeout_s = 1;
    const CommLabel label = {"activations", 3, 17};
    if (comm.rank == 0) {
        CommRequest r = comm_receive_begin(&comm, label, 1, received[0], BYTES);
        for (double end = seconds_now() + 3; seconds_now() < end; usleep(1000)) { comm_progress(); }
        printf("still open, by %s\n", comm.transport.name);
        fflush(stdout);
        comm_wait(&comm, &r);
        ops_wait(&stream);
    }
    sleep(20);
    return 1;
}

static bool test_groups(Carrier processor) { // were all good?
    bool all = getenv("TEST_ALL") && atoi(getenv("TEST_ALL"));
    Carrier gpu = carrier();
    for (int mask = 1; mask < 1 << comm.ranks; mask++) {
        for (int order = 0; order < 2; order++) {
            // of these neighbours, and the first with the last
            const bool small = comm.ranks > 1 && __builtin_popcount((unsigned)mask) <= 2;
            if (!all && (order == mask % 2 || (small && mask % 3))) { continue; }
            int ranks[MAX_RANKS], n = 0;
            for (int i = 0; i < comm.ranks; i++) {
                int r = order ? comm.ranks - 1 - i : i;
                if (mask >> r & 1) { ranks[n++] = r; }
            }
            Group g = group_make(ranks, n, comm.rank, comm.node_of);
            comm_join(&comm, &g);
            gpu = carrier();
            for (int shape = 0; shape < SHAPES && g.me >= 0; shape++) {
                // of many groups each has some of the shapes
                if (!all && comm.ranks > 2 && (shape + mask + order) % 3) { continue; }
                test_round(&g, shape, processor, gpu);
                gpu = carrier();
            }
            group_free(&g);
        }
    }
    test_all_messages();
    int mine[2] = {passed, failed}, sums[2 * MAX_RANKS], sum[2] = {0, 0};
    comm_all_gather_small(&comm, mine, sums, sizeof mine);
    for (int r = 0; r < comm.ranks; r++) {
        sum[0] += sums[2 * r];
        sum[1] += sums[2 * r + 1];
    }
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
    stream.threads = 1;
    stream.progress = comm_progress;
    ops_open(&stream, comm.local_rank, DTYPE_FP32);
    filled = (float *)checked_malloc(BYTES, "filled");
    found = (float *)checked_malloc(BYTES, "found");
    for (int i = 0; i < CASES; i++) {
        expected[i].in = (float *)checked_malloc(BYTES, "expected");
        expected[i].out = (float *)checked_malloc(BYTES, "expected");
        device[i].in = on_device();
        device[i].out = on_device();
        taken[i] = on_device();
    }
    for (int m = 0; m < MESSAGES * PAIRS; m++) {
        sent[m] = on_device();
        received[m] = on_device();
        arrived[m] = on_device();
    }
    comm_allocate(&comm, checked_malloc(STAGING, "staging"), STAGING);
    Carrier processor = carrier();
    bool good = true, stuck = argc > 1;
    const CommTraffic messages = traffic();
    int sharing;
    if (nccl_connects(&comm, &sharing)) {
        comm_allocate(&comm, on_device(), BYTES);
        nccl_open(&comm, &stream, &messages);
        if (stuck) { return test_stuck(); }
        good = test_groups(processor);
        comm.transport.end(&comm);
    } else {
        good = !environment_asks(ENVIRONMENT_NCCL_SHARED);
    }
    // an all-to-all may send and receive as much, and needs more than was planned
    staged_open(&comm, &stream, BYTES, STAGING, &messages);
    if (stuck) { return test_stuck(); }
    good = test_groups(processor) && good;
    comm_end(&comm);
    return !good;
}
