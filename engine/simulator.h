// simulator.h: predicts how long a program takes. It plays the program (walk.h) with
// clocks. The caller gives the cost of each action (engine/costs.h).
//
// Clocks     Each rank has four: for compute, for its collectives, for what moves between host and
//            device, and for its disk. They run in parallel; each does one thing after another.
// Waits      NORM waits for compute and collectives of all ranks. ACQUIRE waits for the gather of
//            its storage. An action that writes a gradient into a buffer waits for the last REDUCE
//            from it.
// Messages   run in parallel with compute, in both directions at once. A message begins when the
//            sender has reached its SEND, the receiver has reached its RECV (it then has a free
//            buffer), and the sender's outgoing link and the receiver's incoming link are free. The
//            compute actions of its micro-batch wait for it.
// Steps      The step that is timed follows another one, as steps in a run do. (All ranks begin it
//            together if the program has no NORM.)
#ifndef SIMULATOR_H
#define SIMULATOR_H

#include "engine/walk.h" // playing programs

enum { CHANNELS = 4 }; // kinds of messages of rows: inputs, gradients, norms, factors
typedef struct {
    double compute_s, message_s;
} ActionCost;
typedef ActionCost (*ActionCosts)(const void *context, int rank, const Action *action);
typedef struct {
    double begin_s, end_s; // of a RECV: when its wait begins, when the message is received
} ActionTime;
typedef struct {
    const Program *program;
    ActionCosts cost;
    const void *context;
    ActionTime **times;   // [rank][action] output; NULL: not wanted
    double *clock, *comm; // [rank] when compute, when collectives are done
    double *out, *in;     // [rank] when the outgoing, the incoming link is free
    double *link;         // [rank] when moves between host and device are done
    double *disk;         // [rank] when moves between host and disk are done
    // [rank][DISK_PIECES] when the last piece that was read into each buffer is on the host
    double *came;
    double *turns;   // [rank][2] buffer of the last piece that was read, that was used
    double *busy;    // [rank] time spent computing
    double *ready;   // [rank][storage] when its parameters are gathered or received
    double *left;    // [rank][storages, then slots] when the gradient in the buffer has left
    double *arrived; // [rank][micro][CHANNELS] when the last message of a kind is received
    double *sum;     // [rank][storage] when the last sum, or part of one, is received
    double *stash;   // [rank][STASH_SLOTS] when the last move of activations is done
    double meeting;  // when all ranks have reached NORM; negative before
    double stats;    // when the last step statistics are received; nothing waits for them
} Simulation;

// Points to the time at which the buffer of a storage's gradient is free.
static inline double *simulator_left(const Simulation *s, int rank, int storage) {
    const UnitMap *map = &s->program->map;
    bool shares = map->grad_slot && map->grad_slot[storage] >= 0;
    return &s->left[(int64_t)rank * 2 * map->storages +
                    (shares ? map->storages + map->grad_slot[storage] : storage)];
}
// Points to the time at which the data that a message carries, or that a compute action needs, is
// received. Nothing waits for step statistics.
static inline double *simulator_arrived(Simulation *s, int rank, const Action *a) {
    const int64_t at = (int64_t)rank * s->program->map.storages + a->storage;
    if (action_is_message(a->kind) && !action_of_rows(a->kind)) {
        return a->storage < 0                   ? &s->stats
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
// Plays one end of a message; the sender's end fixes the times. What an end computes for the
// message (ActionCost.compute_s) is done before.
static inline void simulator_message(Simulation *s, int rank, const Action *a, ActionCost cost,
                                     int peer) {
    s->clock[rank] += cost.compute_s;
    s->busy[rank] += cost.compute_s;
    if (action_is(a->kind, RECEIVES)) {
        double *arrived = simulator_arrived(s, rank, a);
        *arrived = fmax(*arrived, s->in[rank]);
        simulator_time(s, rank, a, s->clock[rank], s->in[rank]);
        return;
    }
    double begin = fmax(fmax(s->clock[rank], s->clock[peer]), fmax(s->out[rank], s->in[peer]));
    s->out[rank] = s->in[peer] = begin + cost.message_s;
    simulator_time(s, rank, a, begin, s->out[rank]);
}
// A compute action waits for its messages, and for the buffers into which it writes gradients.
static inline void simulator_await(Simulation *s, int rank, const Action *a) {
    const UnitMap *map = &s->program->map;
    // a forward needs its input; later actions need all other messages of the micro-batch
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
// Moves on to the next piece that is read (way 0) or used (way 1), and points to the time
// at which it is on the host.
static inline double *simulator_came(Simulation *s, int rank, int way) {
    double *turn = &s->turns[2 * rank + way];
    return &s->came[rank * DISK_PIECES + (int)(*turn = fmod(*turn + 1, DISK_PIECES))];
}
// A piece on a disk must be on the host before the device fetches it or the host updates it.
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
    // The first rank to pass sees when each rank arrived; the slowest decides for all.
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
    const bool stores = action_is(a->kind, ON_DISK);
    double *beside = stores                                               ? s->disk
                     : action_is(a->kind, MOVES) || a->kind == ACT_UPDATE ? s->link
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
// Plays one step. Returns when the last rank ends.
static inline double simulator_step(Simulation *s, int *at) {
    double end = 0;
    s->meeting = -1;
    memset(s->busy, 0, (size_t)s->program->ranks * sizeof(double));
    schedule_walk(s->program, at, simulator_visit, s);
    for (int r = 0; r < s->program->ranks; r++) { end = fmax(end, s->clock[r]); }
    for (int r = 0; r < s->program->ranks && s->meeting < 0; r++) { s->clock[r] = end; }
    return end;
}

// Allocates the times of all actions of a program: [rank][action]. schedule_times_free frees them.
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

// Returns the predicted seconds of one step in a sequence of steps. busy ([ranks], or NULL)
// receives each rank's compute time, so the bubble of a rank is 1 - busy / step. times
// ([rank][action], or NULL) receives when each action begins and ends, counted from the end of the
// step before.
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
