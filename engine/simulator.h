// simulator.h: how long a program takes, whatever its actions cost (plan/costs.h): plays it
// (schedule.h: walking) with clocks.
//
// Each rank has a clock for compute, one for its collectives, one for what moves between its host
// and its device, and one for its disk, which run beside it, each doing one thing after another.
// NORM waits for the first two and for all ranks; ACQUIRE for the gather of its storage; who writes
// a gradient into a room for the last REDUCE from it. Messages run beside compute too, in both
// directions at once: one begins when the sender comes to its SEND, the receiver to its RECV (it
// has a room by then), and neither the sender's way out nor the receiver's way in carries another;
// the compute actions of its micro-batch wait for it. A step is looked at that follows another (all
// ranks begin together where there is no NORM). Costs come from the caller.
#ifndef SIMULATOR_H
#define SIMULATOR_H

#include "schedule.h" // programs

enum { CHANNELS = 4 }; // kinds of messages: inputs, gradients, norms, factors
typedef struct {
    double compute_s, message_s;
} ActionCost;
typedef ActionCost (*ActionCosts)(const void *context, int rank, const Action *action);
typedef struct {
    double begin_s, end_s; // of a RECV: from when it waits until the message is there
} ActionTime;
typedef struct {
    const Program *program;
    ActionCosts cost;
    const void *context;
    ActionTime **times;   // [rank][action] gets them; NULL: not wanted
    double *clock, *comm; // [rank]
    double *out, *in;     // [rank] when its links are free
    double *link;         // [rank] when what moves between its host and its device is there
    double *disk;         // [rank] when what moves between its host and its disk is there
    // [rank][DISK_PIECES] when what came from there last is: into each of the rooms, in turns
    double *came;
    double *turns;   // [rank][2] pieces that were asked for there, that were used
    double *busy;    // [rank] time spent computing
    double *ready;   // [rank][storage] when its parameters are there
    double *left;    // [rank][storages, then rooms] when the gradient there has left
    double *arrived; // [rank][micro][CHANNELS] when what a kind of message brings is there
    double *sum;     // [rank][storage] when the sum, or part, that came last is there
    double *stash;   // [rank][STASH_SLOTS] when activations that move are there, or gone
    double meeting;  // when all ranks have come to NORM; negative before
    double untold;
} Simulation;

// When the place of a storage's gradient is free.
static inline double *simulator_left(const Simulation *s, int rank, int storage) {
    const UnitMap *map = &s->program->map;
    bool shares = map->grad_slot && map->grad_slot[storage] >= 0;
    return &s->left[(int64_t)rank * 2 * map->storages +
                    (shares ? map->storages + map->grad_slot[storage] : storage)];
}
// Where it is noted when that is there which a compute action, or a message, is about. A tally
// nobody waits for.
static inline double *simulator_arrived(Simulation *s, int rank, const Action *a) {
    const int64_t at = (int64_t)rank * s->program->map.storages + a->storage;
    if (action_is_message(a->kind) && !action_of_rows(a->kind)) {
        return a->storage < 0                   ? &s->untold
               : a->kind == ACT_RECV_PARAMETERS ? &s->ready[at]
                                                : &s->sum[at];
    }
    const int channel = action_is_message(a->kind) ? (a->kind - ACT_SEND_FORWARD) / 2 : 0;
    return &s->arrived[((int64_t)rank * s->program->micro_batches + a->micro) * CHANNELS + channel];
}
static inline void simulator_time(const Simulation *s, int rank, const Action *a, double begin,
                                  double end) {
    if (!s->times) { return; }
    s->times[rank][a - s->program->rank[rank].actions].begin_s = begin;
    s->times[rank][a - s->program->rank[rank].actions].end_s = end;
}
// A message, with its sender's turn. What its ends compute for it (ActionCost) is done before.
static inline void simulator_message(Simulation *s, int rank, const Action *a, ActionCost cost,
                                     int peer) {
    s->clock[rank] += cost.compute_s;
    s->busy[rank] += cost.compute_s;
    if (action_receives(a->kind)) {
        double *arrived = simulator_arrived(s, rank, a);
        *arrived = fmax(*arrived, s->in[rank]);
        simulator_time(s, rank, a, s->clock[rank], s->in[rank]);
        return;
    }
    double begin = fmax(fmax(s->clock[rank], s->clock[peer]), fmax(s->out[rank], s->in[peer]));
    s->out[rank] = s->in[peer] = begin + cost.message_s;
    simulator_time(s, rank, a, begin, s->out[rank]);
}
// A compute action waits for its messages and for the places it writes gradients into.
static inline void simulator_await(Simulation *s, int rank, const Action *a) {
    const UnitMap *map = &s->program->map;
    // a forward needs its input; what follows all that came before it
    const double *arrived = simulator_arrived(s, rank, a);
    for (int c = a->kind == ACT_FORWARD ? 0 : 1; c < (a->kind == ACT_FORWARD ? 1 : CHANNELS); c++) {
        s->clock[rank] = fmax(s->clock[rank], arrived[c]);
    }
    for (int k = 0; k < map->of_unit_count[a->unit]; k++) {
        int storage = map->of_unit[a->unit][k];
        if (action_contributes(map, a, storage)) {
            s->clock[rank] = fmax(s->clock[rank], *simulator_left(s, rank, storage));
        }
    }
}
// When the piece came from the disk that is asked for (way 0) or used (1) next.
static inline double *simulator_came(Simulation *s, int rank, int way) {
    double *turn = &s->turns[2 * rank + way];
    return &s->came[rank * DISK_PIECES + (int)(*turn = fmod(*turn + 1, DISK_PIECES))];
}
// What is on a disk is on the host before the device fetches it, or the host updates it.
static inline void simulator_await_disk(Simulation *s, int rank, const Action *a) {
    const UnitMap *map = &s->program->map;
    const bool uses = a->kind == (map->cpu_update ? ACT_UPDATE : ACT_FETCH) && map->on_disk &&
                      map->on_disk[a->storage];
    if (uses) { s->clock[rank] = fmax(s->clock[rank], *simulator_came(s, rank, 1)); }
}
static inline void simulator_visit(void *context, int rank, const Action *a, int peer) {
    Simulation *s = (Simulation *)context;
    ActionCost cost = s->cost(s->context, rank, a);
    double slowest = 0, *ready = s->ready + (int64_t)rank * s->program->map.storages;
    if (action_is_message(a->kind)) {
        simulator_message(s, rank, a, cost, peer);
        return;
    }
    if (action_computes(a->kind)) { simulator_await(s, rank, a); }
    const int slot = action_awaits_stash(&s->program->map, a);
    if (slot >= 0) { s->clock[rank] = fmax(s->clock[rank], s->stash[rank * STASH_SLOTS + slot]); }
    if (a->kind == ACT_ACQUIRE) { s->clock[rank] = fmax(s->clock[rank], ready[a->storage]); }
    if (a->kind == ACT_REDUCE || a->kind == ACT_ADD) {
        s->clock[rank] =
            fmax(s->clock[rank], s->sum[(int64_t)rank * s->program->map.storages + a->storage]);
    }
    // the first to pass sees everybody's time of arrival; the slowest decides for all
    if (a->kind == ACT_NORM) {
        for (int r = 0; r < s->program->ranks && s->meeting < 0; r++) {
            slowest = fmax(slowest, fmax(s->clock[r], s->comm[r]));
        }
        if (s->meeting < 0) { s->meeting = slowest; }
        s->clock[rank] = s->meeting;
    }
    const bool waits = a->kind == ACT_UPDATE && !s->program->map.delays && s->program->map.pieces &&
                       s->program->map.pieces[a->storage];
    if (waits) { s->clock[rank] = fmax(s->clock[rank], s->link[rank]); }
    simulator_await_disk(s, rank, a);
    double begin = s->clock[rank];
    s->clock[rank] += cost.compute_s;
    s->busy[rank] += cost.compute_s;
    const bool stores = a->kind == ACT_READ || a->kind == ACT_WRITE;
    double *beside = stores                                           ? s->disk
                     : action_moves(a->kind) || a->kind == ACT_UPDATE ? s->link
                                                                      : s->comm;
    if (a->kind == ACT_WRITE) { s->disk[rank] = fmax(s->disk[rank], s->link[rank]); }
    if (cost.message_s > 0) { beside[rank] = fmax(beside[rank], s->clock[rank]) + cost.message_s; }
    double done = cost.message_s > 0 ? beside[rank] : s->clock[rank];
    if (action_of_stash(a->kind)) { s->stash[rank * STASH_SLOTS + stash_slot(a->unit)] = done; }
    if (a->kind == ACT_PREFETCH) { ready[a->storage] = done; }
    if (a->kind == ACT_READ) { *simulator_came(s, rank, 0) = done; }
    if (a->kind == ACT_REDUCE || a->kind == ACT_FETCH_SUM || a->kind == ACT_EVICT_SUM) {
        *simulator_left(s, rank, a->storage) = done;
    }
    simulator_time(s, rank, a, begin, done);
}
static inline double simulator_step(Simulation *s, int *at) { // returns when the last rank ends
    double end = 0;
    s->meeting = -1;
    memset(s->busy, 0, (size_t)s->program->ranks * sizeof(double));
    schedule_walk(s->program, at, simulator_visit, s);
    for (int r = 0; r < s->program->ranks; r++) { end = fmax(end, s->clock[r]); }
    for (int r = 0; r < s->program->ranks && s->meeting < 0; r++) { s->clock[r] = end; }
    return end;
}

// Room for the times of all actions of a program: [rank][action].
static inline ActionTime **schedule_times(const Program *p) {
    ActionTime **times =
        (ActionTime **)checked_malloc((size_t)p->ranks * sizeof(ActionTime *), "times");
    for (int r = 0; r < p->ranks; r++) {
        times[r] =
            (ActionTime *)checked_calloc((size_t)p->rank[r].count, sizeof(ActionTime), "times");
    }
    return times;
}
static inline void schedule_times_free(const Program *p, ActionTime **times) {
    for (int r = 0; r < p->ranks; r++) { free(times[r]); }
    free(times);
}

// Predicted seconds of one step among others; busy (may be NULL) gets each rank's compute time, so
// the bubble of a rank is 1 - busy / step. times (may be NULL): [rank][action] gets when each
// action begins and ends, from the end of the step before on.
static inline double schedule_simulate_times(const Program *p, ActionCosts cost,
                                             const void *context, double *busy,
                                             ActionTime **times) {
    size_t n = (size_t)p->ranks, storages = (size_t)p->map.storages;
    double *all = (double *)checked_calloc(n * (9 + DISK_PIECES + STASH_SLOTS + 4 * storages +
                                                CHANNELS * (size_t)p->micro_batches),
                                           sizeof(double), "simulator"),
           *next = all;
    Simulation s;
    memset(&s, 0, sizeof s);
    s.program = p;
    s.cost = cost;
    s.context = context;
    s.times = times;
    s.meeting = -1;
    double **const arrays[] = {&s.clock, &s.comm, &s.out,   &s.in,   &s.link, &s.disk,  &s.turns,
                               &s.busy,  &s.came, &s.ready, &s.left, &s.sum,  &s.stash, &s.arrived};
    const size_t sizes[] = {1,
                            1,
                            1,
                            1,
                            1,
                            1,
                            2,
                            1,
                            DISK_PIECES,
                            storages,
                            2 * storages,
                            storages,
                            STASH_SLOTS,
                            CHANNELS * (size_t)p->micro_batches};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        *arrays[i] = next;
        next += n * sizes[i];
    }
    int *at = (int *)checked_calloc(n, sizeof(int), "simulator");
    double first = simulator_step(&s, at), second = simulator_step(&s, at);
    if (busy) { memcpy(busy, s.busy, n * sizeof(double)); }
    for (int r = 0; r < p->ranks && times; r++) {
        for (int i = 0; i < p->rank[r].count; i++) {
            times[r][i].begin_s -= first;
            times[r][i].end_s -= first;
        }
    }
    free(all);
    free(at);
    return second - first;
}
static inline double schedule_simulate(const Program *p, ActionCosts cost, const void *context,
                                       double *busy) {
    return schedule_simulate_times(p, cost, context, busy, NULL);
}

#endif
