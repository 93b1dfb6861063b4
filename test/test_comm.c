// test_comm.c: the messages between ranks. Run as `mpirun -np N build/test_comm`, N = 1 to 4 (more
// works too).
//
// Every collective runs over every subset of the ranks, in ascending and descending order, on every
// emulated node layout (1, 2, 3, ... ranks per node), with slices that are empty, single, odd, and
// longer than a piece of the staging buffer. Values make sums that depend on their order: 2^24 + 1
// - 2^24 is 0 or 1. The expected result is computed here, slowly, from the order that
// collectives.h promises, and compared bit for bit; so are untouched elements and the byte counters.
//
//   test_comm            all tests; last line "N passed, N failed" counts the groups of cases; exit
//                        code 1 if any failed
//   test_comm bench      bus bandwidth next to MPI's own collectives (as nccl-tests defines it),
//                        and overlap with computing
//   test_comm stuck      the watchdog: rank 0 waits for what rank 1 never starts; must end with
//                        exit code 4
//   test_comm message    the same of a message between two ranks, test_comm full: of the first of
//                        more than there is room for
#include "counts.h" // report

enum { MAX_RANKS = 8, GUARD = 16, LONGEST = 9000, SHAPES = 7, STAGING = 1 << 16 };

static void check(bool good, const char *what, const Group *g, int layout, int shape) {
    passed += good;
    failed += !good;
    if (good || failed > 20) { return; }
    fprintf(stderr, "FAILED on rank %d: %s, %d members, %d ranks per node, shape %d, ranks",
            comm.rank, what, g ? g->n : 0, layout, shape);
    for (int i = 0; g && i < g->n; i++) { fprintf(stderr, " %d", g->ranks[i]); }
    fprintf(stderr, "\n");
}
static const CommLabel LABEL = {"test", 0, 0};
static void complete(CommRequest r) { comm_wait(&comm, &r); }

// -------------------------------------------------------------------------------------------------
// Slow, obvious expectations

// Nearest bf16, ties to even, by comparing distances in double; written without the bits of
// base.h's version.
static float slow_round(float x) {
    uint32_t bits;
    if (x != x || x == 0.0f) { return x; }
    memcpy(&bits, &x, 4);
    // towards zero, away from it
    uint32_t down_bits = bits & 0xffff0000u, up_bits = down_bits + 0x10000u;
    float down, up;
    memcpy(&down, &down_bits, 4);
    memcpy(&up, &up_bits, 4);
    double below = fabs((double)x - (double)down), above = fabs((double)up - (double)x);
    if (below != above) { return below < above ? down : up; }
    return (down_bits >> 16) % 2 == 0 ? down : up;
}
static float on_wire(float x, DType wire, int n) {
    return wire == DTYPE_BF16 && n > 1 ? slow_round(x) : x;
}

// The contribution of a rank to an element: integers, and values whose sum shows the order of
// addition.
static float value(int rank, int64_t element, int shape) {
    static const float odd[8] = {16777216.0f, 1.0f,  -16777216.0f, 3.0f,
                                 0.4375f,     -1.0f, 1.00390625f,  1.01171875f};
    uint64_t draw = random_u64(77, (uint64_t)rank * 16 + (uint64_t)shape, (uint64_t)element);
    return shape % 2 ? odd[draw % 8] : (float)(int)(draw % 200) - 100.0f;
}
static bool two_levels(const Group *g, int layout) {
    int nodes = 0, size = 0;
    for (int i = 0; i < g->n; i++) {
        int count = 0, first = i;
        for (int j = 0; j < g->n; j++) {
            if (g->ranks[j] / layout == g->ranks[i] / layout) {
                count++;
                first = j < first ? j : first;
            }
        }
        nodes += first == i;
        if (size && count != size) { return false; }
        size = count;
    }
    return nodes > 1 && size > 1;
}
static float expected_sum(const Group *g, int layout, int64_t element, int shape, DType wire) {
    bool levels = two_levels(g, layout), used[MAX_RANKS] = {false};
    float total = 0;
    for (int i = 0, sums = 0; i < g->n; i++) {
        if (used[i]) { continue; }
        float sum = on_wire(value(g->ranks[i], element, shape), wire, g->n);
        for (int j = i + 1; j < g->n; j++) {
            if (levels && g->ranks[j] / layout != g->ranks[i] / layout) { continue; }
            used[j] = true;
            sum += on_wire(value(g->ranks[j], element, shape), wire, g->n);
        }
        if (levels) { sum = on_wire(sum, wire, g->n); }
        total = sums++ ? total + sum : sum;
        if (!levels) { break; }
    }
    return total;
}
static bool same_bits(float a, float b) { return memcmp(&a, &b, 4) == 0; }

// Lengths of the slices of a shape: nothing, one each, odd, some empty, all in the last, longer
// than a piece, uneven and long.
static int64_t shape_length(int shape, int i, int n) {
    switch (shape) {
    case 0: return 0;
    case 1: return 1;
    case 2: return 3 + 7 * i;
    case 3: return i % 2 ? 0 : 129;
    case 4: return i == n - 1 ? 333 : 0;
    case 5: return LONGEST - 17 * i;
    default: return i == 1 ? LONGEST : 4099 * (i % 3);
    }
}
static int64_t make_bounds(int64_t *bounds, int shape, int n) {
    bounds[0] = 0;
    for (int i = 0; i < n; i++) { bounds[i + 1] = bounds[i] + shape_length(shape, i, n); }
    return bounds[n];
}

// Did the counters grow by exactly what was predicted, and only in this kind?
static void check_counters(CommKind kind, const Group *g, const int64_t *bounds,
                           size_t element_bytes, int layout, int shape) {
    int64_t predicted[LINK_KINDS] = {0, 0};
    comm_bytes_sent(kind, g, g->me, bounds, element_bytes, predicted);
    for (int k = 0; k < COMM_KINDS; k++) {
        for (int l = 0; l < LINK_KINDS; l++) {
            check(comm.bytes[k][l] == (k == (int)kind ? predicted[l] : 0), "byte counters", g,
                  layout, shape);
        }
    }
    comm_reset_counters(&comm);
}

// -------------------------------------------------------------------------------------------------
// One collective at a time. Buffers have GUARD elements before and behind.
typedef struct {
    float in[GUARD + MAX_RANKS * LONGEST + GUARD], out[GUARD + MAX_RANKS * LONGEST + GUARD];
    unsigned char sent[MAX_RANKS * LONGEST], received[GUARD + MAX_RANKS * LONGEST + GUARD];
} Buffers;
static Buffers *buffers;

static void fill(float *data, int64_t n, int shape) {
    for (int64_t e = 0; e < GUARD; e++) { data[e] = data[GUARD + n + e] = -7.0f; }
    for (int64_t e = 0; e < n; e++) { data[GUARD + e] = value(comm.rank, e, shape); }
}
static bool guards_hold(const float *data, int64_t n) {
    bool good = true;
    for (int64_t e = 0; e < GUARD; e++) {
        good = good && same_bits(data[e], -7.0f) && same_bits(data[GUARD + n + e], -7.0f);
    }
    return good;
}
static bool inputs_hold(const float *data, int64_t begin, int64_t end, int shape) {
    for (int64_t e = begin; e < end; e++) {
        if (!same_bits(data[GUARD + e], value(comm.rank, e, shape))) { return false; }
    }
    return true;
}

static void test_reduce_scatter(const Group *g, int layout, int shape, DType wire, bool in_place) {
    int64_t bounds[MAX_RANKS + 1], n = make_bounds(bounds, shape, g->n), begin = bounds[g->me],
                                   end = bounds[g->me + 1];
    float *out = in_place ? buffers->in : buffers->out;
    fill(buffers->in, n, shape);
    fill(out, n, shape);
    complete(comm_reduce_scatter_begin(&comm, LABEL, g, buffers->in + GUARD, out + GUARD + begin,
                                       bounds, wire));
    bool sums = true, others = inputs_hold(out, 0, begin, shape) && inputs_hold(out, end, n, shape);
    for (int64_t e = begin; e < end; e++) {
        sums = sums && same_bits(out[GUARD + e], expected_sum(g, layout, e, shape, wire));
    }
    check(sums, wire == DTYPE_BF16 ? "reduce_scatter bf16" : "reduce_scatter fp32", g, layout,
          shape);
    check(others && guards_hold(out, n), "reduce_scatter wrote outside its slice", g, layout,
          shape);
    check(in_place || inputs_hold(buffers->in, 0, n, shape), "reduce_scatter changed its input", g,
          layout, shape);
    check_counters(COMM_REDUCE_SCATTER, g, bounds, dtype_size(wire), layout, shape);
}
static void test_all_reduce(const Group *g, int layout, int shape, DType wire) {
    int64_t bounds[MAX_RANKS + 1], n = make_bounds(bounds, shape, g->n);
    fill(buffers->in, n, shape);
    complete(comm_all_reduce_begin(&comm, LABEL, g, buffers->in + GUARD, bounds, wire));
    bool sums = true;
    for (int64_t e = 0; e < n; e++) {
        sums = sums && same_bits(buffers->in[GUARD + e],
                                 on_wire(expected_sum(g, layout, e, shape, wire), wire, g->n));
    }
    check(sums, wire == DTYPE_BF16 ? "all_reduce bf16" : "all_reduce fp32", g, layout, shape);
    check(guards_hold(buffers->in, n), "all_reduce wrote outside its array", g, layout, shape);
    check_counters(COMM_ALL_REDUCE, g, bounds, dtype_size(wire), layout, shape);
}
static unsigned char byte_of(int from, int to, int64_t i) {
    return (unsigned char)random_u64(78, (uint64_t)(from * 16 + to), (uint64_t)i);
}

static void test_all_gather(const Group *g, int layout, int shape, size_t element_bytes) {
    int64_t bounds[MAX_RANKS + 1], n = make_bounds(bounds, shape, g->n),
                                   width = (int64_t)element_bytes;
    unsigned char *data = buffers->received;
    memset(data, 0xa5, sizeof buffers->received);
    for (int64_t i = bounds[g->me] * width; i < bounds[g->me + 1] * width; i++) {
        data[GUARD + i] = byte_of(comm.rank, 0, i);
    }
    complete(comm_all_gather_begin(&comm, LABEL, g, data + GUARD, bounds, element_bytes));
    bool good = data[GUARD - 1] == 0xa5 && data[GUARD + n * width] == 0xa5;
    for (int m = 0; m < g->n; m++) {
        for (int64_t i = bounds[m] * width; i < bounds[m + 1] * width; i++) {
            good = good && data[GUARD + i] == byte_of(g->ranks[m], 0, i);
        }
    }
    check(good, "all_gather", g, layout, shape);
    check_counters(COMM_ALL_GATHER, g, bounds, element_bytes, layout, shape);
}
// Lengths depend on both ends; every pair has its own.
static int64_t pair_length(int shape, int from, int to, int n) {
    return shape_length(shape, (from + 2 * to) % n, n) / (1 + (from + to) % 2);
}

static void test_all_to_all(const Group *g, int layout, int shape, size_t element_bytes) {
    int64_t send_bounds[MAX_RANKS + 1] = {0}, recv_bounds[MAX_RANKS + 1] = {0},
                                    width = (int64_t)element_bytes;
    for (int i = 0; i < g->n; i++) {
        send_bounds[i + 1] = send_bounds[i] + pair_length(shape, g->me, i, g->n);
        recv_bounds[i + 1] = recv_bounds[i] + pair_length(shape, i, g->me, g->n);
    }
    for (int to = 0; to < g->n; to++) {
        int64_t begin = send_bounds[to] * width;
        for (int64_t i = begin; i < send_bounds[to + 1] * width; i++) {
            buffers->sent[i] = byte_of(comm.rank, g->ranks[to], i - begin);
        }
    }
    memset(buffers->received, 0xa5, sizeof buffers->received);
    complete(comm_all_to_all_begin(&comm, LABEL, g, buffers->sent, send_bounds,
                                   buffers->received + GUARD, recv_bounds, element_bytes));
    bool good = buffers->received[GUARD - 1] == 0xa5 &&
                buffers->received[GUARD + recv_bounds[g->n] * width] == 0xa5;
    for (int from = 0; from < g->n; from++) {
        int64_t begin = recv_bounds[from] * width;
        for (int64_t i = begin; i < recv_bounds[from + 1] * width; i++) {
            good = good &&
                   buffers->received[GUARD + i] == byte_of(g->ranks[from], comm.rank, i - begin);
        }
    }
    check(good, "all_to_all", g, layout, shape);
    check_counters(COMM_ALL_TO_ALL, g, send_bounds, element_bytes, layout, shape);
}

// The same with GAP bytes before each slice: they stay as they are.
static void test_ranges(const Group *g, int layout, int shape) {
    enum { GAP = 3 };
    int64_t send[2 * MAX_RANKS], recv[2 * MAX_RANKS], bounds[MAX_RANKS + 1] = {0}, out = 0, in = 0;
    bool good = true;
    for (int i = 0; i < g->n; i++) {
        send[2 * i] = out + GAP;
        recv[2 * i] = in + GAP;
        send[2 * i + 1] = out = send[2 * i] + pair_length(shape, g->me, i, g->n);
        recv[2 * i + 1] = in = recv[2 * i] + pair_length(shape, i, g->me, g->n);
        bounds[i + 1] = bounds[i] + slice_length(send, 2 * i);
        for (int64_t k = send[2 * i]; k < out; k++) {
            buffers->sent[k] = byte_of(comm.rank, g->ranks[i], k - send[2 * i]);
        }
    }
    memset(buffers->received, 0xa5, sizeof buffers->received);
    complete(comm_all_to_all_ranges_begin(&comm, LABEL, g, buffers->sent, send, buffers->received,
                                          recv, 1));
    for (int i = 0; i < g->n; i++) {
        for (int64_t k = recv[2 * i] - GAP; k < recv[2 * i + 1]; k++) {
            const int64_t at = k - recv[2 * i];
            good = good &&
                   buffers->received[k] == (at < 0 ? 0xa5 : byte_of(g->ranks[i], comm.rank, at));
        }
    }
    check(good && buffers->received[in] == 0xa5, "all_to_all of ranges", g, layout, shape);
    check_counters(COMM_ALL_TO_ALL, g, bounds, 1, layout, shape);
}

// What the members send together, from the definitions of the collectives; no messages.
static void test_totals(const Group *g, int layout, int shape) {
    int64_t bounds[MAX_RANKS + 1], n = make_bounds(bounds, shape, g->n),
                                   gather[LINK_KINDS] = {0, 0}, reduce[LINK_KINDS] = {0, 0};
    int64_t both[LINK_KINDS] = {0, 0};
    for (int i = 0; i < g->n; i++) {
        comm_bytes_sent(COMM_ALL_GATHER, g, i, bounds, 4, gather);
        comm_bytes_sent(COMM_REDUCE_SCATTER, g, i, bounds, 4, reduce);
        comm_bytes_sent(COMM_ALL_REDUCE, g, i, bounds, 4, both);
    }
    int64_t all = 4 * n * (g->n - 1); // every slice reaches, or is fed by, every other member once
    check(gather[0] + gather[1] == all && reduce[0] + reduce[1] == all, "total of a collective", g,
          layout, shape);
    check(both[0] == gather[0] + reduce[0] && both[1] == gather[1] + reduce[1],
          "total of an all_reduce", g, layout, shape);
    if (two_levels(g, layout)) { // every slice crosses to every other node once
        check(gather[LINK_INTER] == 4 * n * (g->nodes - 1) &&
                  reduce[LINK_INTER] == gather[LINK_INTER],
              "total between nodes", g, layout, shape);
    }
}

typedef void GroupTest(const Group *g, int layout, int shape);
static void reduce_cases(const Group *g, int layout, int shape) {
    if (g->me < 0) { return; }
    test_reduce_scatter(g, layout, shape, DTYPE_FP32, false);
    test_reduce_scatter(g, layout, shape, DTYPE_FP32, true);
    test_reduce_scatter(g, layout, shape, DTYPE_BF16, false);
    test_reduce_scatter(g, layout, shape, DTYPE_BF16, true);
}
static void all_reduce_cases(const Group *g, int layout, int shape) {
    if (g->me < 0) { return; }
    test_all_reduce(g, layout, shape, DTYPE_FP32);
    test_all_reduce(g, layout, shape, DTYPE_BF16);
}
static void exchange_cases(const Group *g, int layout, int shape) {
    if (g->me < 0) { return; }
    size_t widest = shape < 5 ? 8 : 1; // the buffers hold MAX_RANKS * LONGEST bytes
    test_all_gather(g, layout, shape, 1);
    test_all_gather(g, layout, shape, widest);
    test_all_to_all(g, layout, shape, 1);
    test_all_to_all(g, layout, shape, widest);
    if (shape < 5) { test_ranges(g, layout, shape); } // the buffers have room for gaps
}
// Subset `mask` of the ranks, ascending or descending, as a group.
static Group subset(int mask, bool descending) {
    int ranks[MAX_RANKS], n = 0;
    for (int i = 0; i < comm.ranks; i++) {
        int r = descending ? comm.ranks - 1 - i : i;
        if (mask >> r & 1) { ranks[n++] = r; }
    }
    return group_make(ranks, n, comm.rank, comm.node_of);
}
static void over_groups(GroupTest *test, const char *name) {
    for (int layout = 1; layout <= comm.ranks; layout++) {
        comm_place(&comm, layout);
        for (int mask = 1; mask < 1 << comm.ranks; mask++) {
            for (int order = 0; order < 2; order++) {
                Group g = subset(mask, order == 1);
                for (int shape = 0; shape < SHAPES; shape++) { test(&g, layout, shape); }
                group_free(&g);
            }
        }
    }
    report(name);
}

// -------------------------------------------------------------------------------------------------
// Many at once: all subsets' collectives in flight together, completed in another order than
// started.
enum { FLIGHT = 12, FLIGHT_ELEMENTS = 3000 };
typedef struct {
    Group group;
    CommRequest request;
    int64_t bounds[MAX_RANKS + 1];
    float data[MAX_RANKS * FLIGHT_ELEMENTS], sent[MAX_RANKS * FLIGHT_ELEMENTS];
    int kind, shape;
} Flight;

static void flight_start(Flight *f, int index, uint64_t seed) {
    int subsets = (1 << comm.ranks) - 1;
    f->group = subset(1 + (int)(random_u64(seed, 1, (uint64_t)index) % (uint64_t)subsets),
                      random_u64(seed, 2, (uint64_t)index) % 2);
    f->kind = (int)(random_u64(seed, 3, (uint64_t)index) % 3);
    f->shape = index;
    f->request.number = 0;
    f->bounds[0] = 0;
    int n = f->group.n;
    for (int i = 0; i < n; i++) {
        f->bounds[i + 1] =
            f->bounds[i] +
            (int64_t)(random_u64(seed, 4, (uint64_t)(index * 16 + i)) % FLIGHT_ELEMENTS);
    }
    if (f->group.me < 0) { return; }
    for (int64_t e = 0; e < f->bounds[n]; e++) { f->data[e] = value(comm.rank, e, f->shape); }
    const CommLabel label = {"test", index, (int64_t)seed};
    if (f->kind == 0) {
        f->request = comm_all_gather_begin(&comm, label, &f->group, f->data, f->bounds, 4);
    }
    if (f->kind == 1) {
        f->request = comm_all_reduce_begin(&comm, label, &f->group, f->data, f->bounds, DTYPE_FP32);
    }
    if (f->kind == 2) {
        float *slice = f->data + f->bounds[f->group.me];
        f->request = comm_reduce_scatter_begin(&comm, label, &f->group, f->data, slice, f->bounds,
                                               DTYPE_FP32);
    }
}
static void flight_check(const Flight *f, int layout) {
    bool good = true;
    for (int m = 0; m < f->group.n && f->group.me >= 0; m++) {
        for (int64_t e = f->bounds[m]; e < f->bounds[m + 1]; e++) {
            bool summed = f->kind == 1 || (f->kind == 2 && m == f->group.me);
            int from = f->kind == 0 ? f->group.ranks[m] : comm.rank;
            good = good && same_bits(f->data[e], summed ? expected_sum(&f->group, layout, e,
                                                                       f->shape, DTYPE_FP32)
                                                        : value(from, e, f->shape));
        }
    }
    check(good, "several operations in flight", &f->group, layout, f->kind);
}
// comm_progress() alone must complete an operation.
static bool finish_by_progress(CommRequest r) {
    for (double begin = seconds_now(); comm.first < r.number && seconds_now() - begin < 30.0;
         sched_yield()) {
        comm_progress();
    }
    return comm.first >= r.number;
}
static void test_flights(void) {
    Flight *flights = (Flight *)checked_calloc(FLIGHT, sizeof(Flight), "flights");
    for (uint64_t seed = 0; seed < 24; seed++) {
        int layout = 1 + (int)(seed % (uint64_t)comm.ranks);
        comm_place(&comm, layout);
        for (int i = 0; i < FLIGHT; i++) { flight_start(&flights[i], i, seed); }
        for (int i = 0; i < FLIGHT; i++) {
            // 5 and FLIGHT have no common factor
            int pick = (int)((uint64_t)(i * 5 + comm.rank) % FLIGHT);
            if ((i + (int)seed) % 2) {
                comm_wait(&comm, &flights[pick].request);
                check(!flights[pick].request.number, "a request that was waited for is complete",
                      &flights[pick].group, layout, pick);
            } else {
                check(finish_by_progress(flights[pick].request), "never complete",
                      &flights[pick].group, layout, pick);
            }
        }
        for (int i = 0; i < FLIGHT; i++) {
            flight_check(&flights[i], layout);
            group_free(&flights[i].group);
        }
    }
    free(flights);
    comm_reset_counters(&comm);
    report("several collectives in flight, any order of waiting");
}

// -------------------------------------------------------------------------------------------------
// Messages between two ranks: between all pairs, both ways, several of each in flight, waited for
// in another order.
enum { MESSAGES = 6, MESSAGE_LONGEST = (3 << 20) + 5, MANY = COMM_MESSAGES * 3 / 2 };
static const size_t message_bytes[MESSAGES] = {1, 0, 4097, MESSAGE_LONGEST, 37, 1 << 20};

// Neighbours differ, and so do the same places of other messages.
static unsigned char message_byte(int from, int to, int k, size_t i) {
    return (unsigned char)((size_t)(from * 89 + to * 31 + k * 7) + i + (i >> 8) + (i >> 16));
}
static unsigned char *make_message(int from, int to, int k) {
    unsigned char *data = (unsigned char *)checked_malloc(message_bytes[k] + 1, "message");
    for (size_t i = 0; i < message_bytes[k]; i++) { data[i] = message_byte(from, to, k, i); }
    data[message_bytes[k]] = 0xa5;
    return data;
}
static bool same_message(const unsigned char *data, int from, int to, int k) {
    bool good = data[message_bytes[k]] == 0xa5;
    for (size_t i = 0; i < message_bytes[k]; i++) {
        good = good && data[i] == message_byte(from, to, k, i);
    }
    return good;
}
static void messages_in_layout(int layout) {
    unsigned char *data[2 * MAX_RANKS * MESSAGES];
    CommRequest requests[2 * MAX_RANKS * MESSAGES];
    const int all = 2 * comm.ranks * MESSAGES; // of them those of no pair are empty
    int64_t sent[LINK_KINDS] = {0, 0};
    comm_place(&comm, layout);
    for (int i = 0; i < all; i++) {
        const int k = i / (2 * comm.ranks), peer = i / 2 % comm.ranks;
        const bool send = (i + comm.rank) % 2;
        data[i] = NULL;
        requests[i].number = 0;
        if (peer == comm.rank) { continue; }
        data[i] = send ? make_message(comm.rank, peer, k)
                       : (unsigned char *)checked_calloc(message_bytes[k] + 1, 1, "message");
        data[i][message_bytes[k]] = 0xa5;
        requests[i] = send ? comm_send_begin(&comm, LABEL, peer, data[i], message_bytes[k])
                           : comm_receive_begin(&comm, LABEL, peer, data[i], message_bytes[k]);
        if (send) {
            sent[peer / layout == comm.rank / layout ? LINK_INTRA : LINK_INTER] +=
                (int64_t)message_bytes[k];
        }
    }
    for (int i = 0; i < all; i++) {
        // 65537 is prime
        const int at = (int)((int64_t)(i + comm.rank) * 65537 % all), k = at / (2 * comm.ranks),
                  peer = at / 2 % comm.ranks;
        if (!data[at]) { continue; }
        comm_wait(&comm, &requests[at]);
        const bool send = (at + comm.rank) % 2;
        check(send ? same_message(data[at], comm.rank, peer, k)
                   : same_message(data[at], peer, comm.rank, k),
              "a message", NULL, layout, k);
        free(data[at]);
    }
    for (int kind = 0; kind < COMM_KINDS; kind++) {
        for (int l = 0; l < LINK_KINDS; l++) {
            check(comm.bytes[kind][l] == (kind == COMM_SEND ? sent[l] : 0), "bytes of messages",
                  NULL, layout, kind);
        }
    }
    comm_reset_counters(&comm);
}
// More than there is room for, around a ring of ranks; the first are waited for when their places
// have long been taken again.
static void many_messages(void) {
    const int next = (comm.rank + 1) % comm.ranks, last = (comm.rank + comm.ranks - 1) % comm.ranks;
    static int sent[MANY], received[MANY];
    static CommRequest requests[2 * MANY];
    for (int i = 0; i < MANY && comm.ranks > 1; i++) {
        sent[i] = comm.rank * MANY + i;
        received[i] = -1;
        requests[i] = comm_send_begin(&comm, LABEL, next, &sent[i], sizeof sent[i]);
        requests[MANY + i] =
            comm_receive_begin(&comm, LABEL, last, &received[i], sizeof received[i]);
    }
    for (int i = 2 * MANY - 1; i >= 0 && comm.ranks > 1; i--) { comm_wait(&comm, &requests[i]); }
    for (int i = 0; i < MANY && comm.ranks > 1; i++) {
        check(received[i] == last * MANY + i, "one of many messages", NULL, 0, i);
    }
    check(comm.settled <= comm.posted && comm.posted - comm.settled <= COMM_MESSAGES,
          "room for messages", NULL, 0, 0);
    comm_reset_counters(&comm);
}
static void test_messages(void) {
    for (int layout = 1; layout <= comm.ranks; layout++) { messages_in_layout(layout); }
    many_messages();
    report("messages between two ranks, any order of waiting");
}

// Setup exchanges, and the text for the dying.
static void test_small(void) {
    int mine = 100 + comm.rank, all[MAX_RANKS], word = comm.rank == comm.ranks - 1 ? 4711 : 0;
    comm_all_gather_small(&comm, &mine, all, sizeof mine);
    for (int r = 0; r < comm.ranks; r++) {
        check(all[r] == 100 + r, "all_gather_small", NULL, 0, r);
    }
    comm_broadcast(&comm, &word, sizeof word, comm.ranks - 1);
    check(word == 4711, "broadcast", NULL, 0, 0);
    check(comm_agree_max(&comm, comm.rank) == comm.ranks - 1 &&
              comm_agree_min(&comm, comm.rank) == 0,
          "agree", NULL, 0, 0);
    double data[3 * MAX_RANKS];
    int64_t bounds[MAX_RANKS + 1] = {0};
    // one of them has none
    for (int r = 0; r < comm.ranks; r++) { bounds[r + 1] = bounds[r] + r % 3; }
    for (int64_t i = 0; i < bounds[comm.ranks]; i++) {
        data[i] = i >= bounds[comm.rank] && i < bounds[comm.rank + 1] ? 0.1 * (double)i : -1;
    }
    comm_all_gather_doubles(&comm, data, bounds);
    for (int64_t i = 0; i < bounds[comm.ranks]; i++) {
        check(data[i] == 0.1 * (double)i, "all_gather_doubles", NULL, 0, (int)i);
    }
    for (int k = 0; k < COMM_KINDS; k++) {
        check(!comm.bytes[k][0] && !comm.bytes[k][1], "setup is not counted", NULL, 0, k);
    }
    Group world = subset((1 << comm.ranks) - 1, false);
    int64_t slices[MAX_RANKS + 1];
    make_bounds(slices, 5, comm.ranks);
    memset(buffers->received, 0, sizeof buffers->received);
    const CommLabel label = {"block", 33, 1234567};
    CommRequest request = {.number = 0};
    if (comm.rank == 0) {
        request = comm_all_gather_begin(&comm, label, &world, buffers->received, slices, 1);
    }
    SignalText text = {"", 0};
    comm_describe_waiting(&comm, &text);
    // the log counts from 1
    bool named = !strcmp(text.text, "all_gather of block 33, step 1234568");
    check(named || comm.rank != 0 || comm.ranks == 1, "describe_waiting names kind, unit and step",
          &world, 0, 0);
    MPI_Barrier(MPI_COMM_WORLD); // only now the others join
    if (comm.rank != 0) {
        request = comm_all_gather_begin(&comm, label, &world, buffers->received, slices, 1);
    }
    comm_wait(&comm, &request);
    comm_reset_counters(&comm);
    group_free(&world);
    report("setup exchanges, description");
}

// -------------------------------------------------------------------------------------------------
// Bandwidth. Bus bandwidth is bytes moved per rank over time: (n - 1) / n of the array, twice that
// for an all-reduce.
enum { BENCH_OURS, BENCH_OURS_BF16, BENCH_MPI, BENCH_SIDES };
typedef struct {
    float *data, *other;
    int64_t bounds[MAX_RANKS + 1], n;
    Group world;
} Bench;

static void bench_once(Bench *b, CommKind kind, int side) {
    int part = (int)(b->n / comm.ranks);
    DType wire = side == BENCH_OURS_BF16 ? DTYPE_BF16 : DTYPE_FP32;
    if (side != BENCH_MPI) {
        const Group *g = &b->world;
        if (kind == COMM_ALL_GATHER) {
            complete(comm_all_gather_begin(&comm, LABEL, g, b->data, b->bounds, dtype_size(wire)));
        }
        if (kind == COMM_REDUCE_SCATTER) {
            complete(comm_reduce_scatter_begin(&comm, LABEL, g, b->data, b->data + b->bounds[g->me],
                                               b->bounds, wire));
        }
        if (kind == COMM_ALL_REDUCE) {
            complete(comm_all_reduce_begin(&comm, LABEL, g, b->data, b->bounds, wire));
        }
        if (kind == COMM_ALL_TO_ALL) {
            complete(comm_all_to_all_begin(&comm, LABEL, g, b->data, b->bounds, b->other, b->bounds,
                                           dtype_size(wire)));
        }
        return;
    }
    if (kind == COMM_ALL_GATHER) {
        MPI_Allgather(MPI_IN_PLACE, 0, MPI_FLOAT, b->data, part, MPI_FLOAT, MPI_COMM_WORLD);
    }
    if (kind == COMM_REDUCE_SCATTER) {
        MPI_Reduce_scatter_block(b->data, b->other, part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    }
    if (kind == COMM_ALL_REDUCE) {
        MPI_Allreduce(MPI_IN_PLACE, b->data, (int)b->n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    }
    if (kind == COMM_ALL_TO_ALL) {
        MPI_Alltoall(b->data, part, MPI_FLOAT, b->other, part, MPI_FLOAT, MPI_COMM_WORLD);
    }
}
// Seconds of the fastest of several repetitions, each timed from barrier to barrier.
static double bench_time(Bench *b, CommKind kind, int side) {
    double best = 1e30;
    int repeats = (int)max_i64(5, min_i64(200, ((int64_t)1 << 24) / b->n));
    for (int i = 0; i < repeats; i++) {
        comm_barrier(&comm);
        double t = seconds_now();
        bench_once(b, kind, side);
        comm_barrier(&comm);
        t = seconds_now() - t;
        best = t < best ? t : best;
    }
    return best;
}
// An all-reduce while computing for `tile` seconds between two calls of comm_progress(): how much
// of it stays visible.
static void bench_overlap(Bench *b, double tile) {
    double seen[3]; // all-reduce alone, computing alone, both
    volatile float sink = 0;
    for (int pass = 0; pass < 3; pass++) {
        comm_barrier(&comm);
        double begin = seconds_now();
        CommRequest r = {.number = 0};
        if (pass != 1) {
            r = comm_all_reduce_begin(&comm, LABEL, &b->world, b->data, b->bounds, DTYPE_FP32);
        }
        double work = pass == 0 ? 0 : 0.4, done = 0; // seconds of computing
        while (done < work) {
            double t = seconds_now();
            while (seconds_now() - t < tile) { sink = sink * 0.5f + 1.0f; }
            done += tile;
            comm_progress();
        }
        comm_wait(&comm, &r);
        comm_barrier(&comm);
        seen[pass] = seconds_now() - begin;
    }
    if (comm.rank == 0) {
        printf("overlap, progress every %4.1f ms, %" PRId64
               " MiB: all_reduce %.1f ms, computing %.1f ms, both %.1f ms\n",
               tile * 1e3, b->n >> 18, seen[0] * 1e3, seen[1] * 1e3, seen[2] * 1e3);
    }
}
static void bench(void) {
    Bench b;
    int64_t longest = (int64_t)1 << 24;
    b.data = (float *)checked_calloc((size_t)longest, 4, "bench");
    b.other = (float *)checked_calloc((size_t)longest, 4, "bench");
    memset(b.other, 1, (size_t)longest * 4);
    b.world = subset((1 << comm.ranks) - 1, false);
    if (comm.rank == 0) {
        printf("%-15s %10s %10s %10s %10s %10s\n", "GB/s per rank", "KiB", "ours", "ours bf16",
               "MPI", "ours/MPI");
    }
    for (int kind = 0; kind < COMM_SEND; kind++) {
        for (b.n = (int64_t)1 << 12; b.n <= longest; b.n <<= 4) {
            double rate[BENCH_SIDES];
            for (int i = 0; i <= comm.ranks; i++) { b.bounds[i] = part_begin(b.n, comm.ranks, i); }
            for (int side = 0; side < BENCH_SIDES; side++) {
                double bytes = (double)b.n * 4 * (comm.ranks - 1) / comm.ranks *
                               (kind == COMM_ALL_REDUCE ? 2 : 1);
                // bf16: as if it were fp32, so higher is faster
                rate[side] = bytes / bench_time(&b, (CommKind)kind, side) * 1e-9;
            }
            if (comm.rank == 0) {
                printf("%-15s %10" PRId64 " %10.2f %10.2f %10.2f %10.2f\n", comm_kind_names[kind],
                       b.n >> 8, rate[0], rate[1], rate[2], rate[0] / rate[2]);
                fflush(stdout);
            }
        }
    }
    b.n = longest;
    for (int i = 0; i <= comm.ranks; i++) { b.bounds[i] = part_begin(b.n, comm.ranks, i); }
    bench_overlap(&b, 1e-3);
    bench_overlap(&b, 5e-3);
    bench_overlap(&b, 10e-3);
    group_free(&b.world);
    free(b.data);
    free(b.other);
}

// Must not return: rank 0 waits in vain for ranks that sleep, and the watchdog ends the job.
static int test_stuck(void) {
    Group world = subset((1 << comm.ranks) - 1, false);
    int64_t bounds[MAX_RANKS + 1];
    make_bounds(bounds, 5, comm.ranks);
    comm.timeout_s = 1;
    const CommLabel label = {"block", 3, 17};
    if (comm.rank == 0) {
        complete(comm_all_gather_begin(&comm, label, &world, buffers->received, bounds, 1));
    }
    struct timespec nap = {20, 0};
    nanosleep(&nap, NULL);
    return 1;
}

// The same of messages. `full`: nobody waits for one, but there is no room for another.
static int test_stuck_message(bool full) {
    static char data[COMM_MESSAGES + 1];
    comm.timeout_s = 1;
    const CommLabel label = {"activations", 3, 17}, other = {"gradients", 4, 17};
    if (comm.rank == 0) {
        CommRequest first = comm_receive_begin(&comm, label, 1, data, 1);
        for (int i = 1; i <= COMM_MESSAGES && full; i++) {
            comm_receive_begin(&comm, other, 1, data + i, 1);
        }
        comm_wait(&comm, &first);
    }
    struct timespec nap = {20, 0};
    nanosleep(&nap, NULL);
    return 1;
}

int main(int argc, char **argv) {
    comm_start(&comm, &argc, &argv);
    bool benchmark = argc > 1 && !strcmp(argv[1], "bench");
    if (comm.ranks > MAX_RANKS) {
        die(EXIT_INPUT, "", "test_comm runs on at most %d ranks, not %d", MAX_RANKS, comm.ranks);
    }
    comm_place(&comm, 0);
    size_t staging = benchmark ? (size_t)8 << 20 : STAGING;
    comm_allocate(&comm, checked_malloc(staging, "staging"), staging);
    comm.timeout_s = 120;
    buffers = (Buffers *)checked_calloc(1, sizeof(Buffers), "buffers");
    if (argc > 1 && !benchmark) {
        return strcmp(argv[1], "stuck") ? test_stuck_message(!strcmp(argv[1], "full"))
                                        : test_stuck();
    }
    if (benchmark) {
        bench();
    } else {
        over_groups(test_totals, "predicted totals of all members");
        over_groups(reduce_cases, "reduce_scatter, fp32 and bf16, in and out of place");
        over_groups(all_reduce_cases, "all_reduce, fp32 and bf16");
        over_groups(exchange_cases, "all_gather and all_to_all, 1- and 8-byte elements");
        test_flights();
        test_messages();
        test_small();
        if (comm.rank == 0) { printf("%d passed, %d failed\n", groups - red_groups, red_groups); }
    }
    free(buffers);
    comm_end(&comm);
    return red_groups ? 1 : 0;
}
