// simulator.h: predicts how long a program takes. It plays the program (walk.h) with
// clocks. The caller gives the cost of each action (plan/costs.h).
//
// Clocks     Each rank has six: for compute, and for what runs beside it (Beside). They run in
//            parallel; each does one thing after another. Compute is slower while messages travel
//            for which cores move the bytes (ActionCost.slows).
// Waits      Compute waits for what it reads to arrive, and for the buffers that it writes to be
//            free: sent, reduced or moved. NORM waits for the sums of all ranks. What runs beside
//            compute waits for its data and its clock only. No action begins before what it touches
//            (touches.h) is ready: tests compare the times with the touches.
// Messages   run in parallel with compute, in both directions at once. A message begins when the
//            sender has reached its SEND, the receiver has reached its RECV (it then has a free
//            buffer), and the sender's outgoing link and the receiver's incoming link are free. The
//            compute actions of its micro-batch wait for it.
// Steps      The step that is timed follows another one, as steps in a run do. (All ranks begin it
//            together if the program has no NORM.)
#ifndef SIMULATOR_H
#define SIMULATOR_H

#include "base/base.h"
#include "schedule/actions.h"
#include "schedule/schedule.h"
#include "schedule/walk.h"
#include "state/policy.h"
#include "state/table.h"

enum { CHANNELS = 4 }; // kinds of messages of rows: inputs, gradients, norms, factors
typedef struct {
    double compute_s, message_s;
    double slows; // the share of its speed that a rank which computes loses to the message
} ActionCost;
typedef ActionCost (*ActionCosts)(const void *context, int rank, const Action *action);
typedef struct {
    double begin_s, end_s; // of a RECV: when its wait begins, when the message is received
} ActionTime;
// What runs beside compute: collectives, messages that leave and that come, moves between host and
// device, the disk.
typedef enum { COLLECTIVES, OUTGOING, INCOMING, LINK, DISK, BESIDE } Beside;
// Times of a rank.
typedef struct {
    double clock;                       // when compute is done
    double from[BESIDE], until[BESIDE]; // when what runs beside it begins and is done
    double slows[BESIDE];               // ActionCost.slows of it
    double busy;                        // time spent computing
    double sums;                        // when the last part of a sum is where NORM reads it
    double stats; // when the last step statistics are received, or have left their buffer
    double sent[2][SEND_BUFFERS]; // when outputs, gradients of inputs have left their buffers
    int sends[2];                 // the unit whose output, whose input's gradient is sent
    double stash[STASH_SLOTS];    // when the last move of activations is done
    double came[DISK_PIECES];     // when the piece that was read into a buffer is on the host
    int turns[2];                 // buffer of the last piece that was read, that was used
    double (*arrived)[CHANNELS];  // [micro] when the last message of a kind is received
} RankTimes;
// Times of a rank and storage.
typedef struct {
    double ready;        // its parameters are gathered or received
    double newest;       // the rank's slice of its newest version is on the device
    double matrices;     // the last exchange of its matrices is complete
    double left;         // the gradient in its own buffer has left
    double left_of_slot; // the gradient in the slot of this number has left
    double sum;          // the last sum, or part of one, is received
} StorageTimes;
typedef struct {
    const Program *program;
    ActionCosts cost;
    const void *context;
    ActionTime **times; // [rank][action] output; NULL: not wanted
    RankTimes *rank;
    StorageTimes *storage; // [rank][storage]
    double meeting;        // when all ranks have reached NORM; negative before
} Simulation;

static inline StorageTimes *simulator_storage(const Simulation *s, int rank, int storage) {
    return &s->storage[(int64_t)rank * s->program->map.storages + storage];
}
// Points to the time at which the buffer of a storage's gradient is free.
static inline double *simulator_left(const Simulation *s, int rank, int storage) {
    const StorageRow *rows = s->program->map.rows;
    const int slot = rows ? rows[storage].grad_slot : -1;
    return slot >= 0 ? &simulator_storage(s, rank, slot)->left_of_slot
                     : &simulator_storage(s, rank, storage)->left;
}
// Points to the time at which the data that a message carries is received.
static inline double *simulator_arrived(Simulation *s, int rank, const Action *a) {
    if (action_of_rows(a->kind)) {
        return &s->rank[rank].arrived[a->micro][(a->kind - ACT_SEND_FORWARD) / 2];
    }
    return a->storage < 0                   ? &s->rank[rank].stats
           : a->kind == ACT_RECV_PARAMETERS ? &simulator_storage(s, rank, a->storage)->ready
                                            : &simulator_storage(s, rank, a->storage)->sum;
}
static inline void simulator_time(const Simulation *s, int rank, const Action *a, double begin,
                                  double end) {
    const ActionTime time = {begin, end};
    if (s->times) { s->times[rank][a - s->program->rank[rank].actions] = time; }
}
static inline void simulator_wait(RankTimes *r, double until) {
    r->clock = max_f64(r->clock, until);
}
// Computes what takes so many seconds if nothing runs beside it.
static inline void simulator_compute(RankTimes *r, double seconds) {
    const double began = r->clock;
    while (seconds > 0) {
        double speed = 1, until = INFINITY; // the speed is the same until then
        for (int b = 0; b < BESIDE; b++) {
            if (r->until[b] <= r->clock || r->slows[b] == 0) { continue; }
            const bool runs = r->from[b] <= r->clock;
            if (runs) { speed = max_f64(0, speed - r->slows[b]); }
            until = fmin(until, runs ? r->until[b] : r->from[b]);
        }
        const double done = speed > 0 ? fmin(until, r->clock + seconds / speed) : until;
        seconds = done < until ? 0 : seconds - speed * (done - r->clock);
        r->clock = done;
    }
    r->busy += r->clock - began;
}
// Occupies what runs beside compute of a rank. What is left of the last message and this one count
// as one, which slows as much as both.
static inline void simulator_occupy(RankTimes *r, Beside beside, double begin, double end,
                                    double slows) {
    const double start = max_f64(r->from[beside], r->clock),
                 left = max_f64(0, r->until[beside] - start);
    if (left == 0) { r->from[beside] = begin; }
    const double both = end - (left > 0 ? start : begin);
    if (both > 0) { r->slows[beside] = (r->slows[beside] * left + slows * (end - begin)) / both; }
    r->until[beside] = end;
}
// Points to the time at which the buffer is free from which the output of a unit, or the gradient
// of its input, is sent; NULL if it stays on this rank.
static inline double *simulator_sent(RankTimes *r, const Action *a) {
    const bool up = a->kind == ACT_SEND_BACKWARD || a->kind == ACT_BACKWARD_INPUT,
               leaves = up || a->kind == ACT_SEND_FORWARD || a->kind == ACT_FORWARD;
    return leaves && a->unit == r->sends[up] ? &r->sent[up][a->micro % SEND_BUFFERS] : NULL;
}
// Plays one end of a message; the sender's end fixes the times.
static inline void simulator_message(Simulation *s, int rank, const Action *a, ActionCost cost,
                                     int peer) {
    RankTimes *me = &s->rank[rank], *other = &s->rank[peer];
    if (action_is(a->kind, RECEIVES)) {
        double *arrived = simulator_arrived(s, rank, a);
        *arrived = max_f64(*arrived, me->until[INCOMING]);
        simulator_time(s, rank, a, me->clock, me->until[INCOMING]);
        return;
    }
    const double begin = max_f64(max_f64(me->clock, other->clock),
                                 max_f64(me->until[OUTGOING], other->until[INCOMING])),
                 end = begin + cost.message_s;
    simulator_occupy(me, OUTGOING, begin, end, cost.slows);
    simulator_occupy(other, INCOMING, begin, end, cost.slows);
    if (a->kind == ACT_SEND_FORWARD || a->kind == ACT_SEND_BACKWARD) {
        me->sends[a->kind == ACT_SEND_BACKWARD] = a->unit;
        *simulator_sent(me, a) = end;
    }
    if (a->kind == ACT_SEND_STATS) { me->stats = end; }
    if (a->kind == ACT_SEND_SUM) { *simulator_left(s, rank, a->storage) = end; }
    simulator_time(s, rank, a, begin, end);
}
// A compute action waits for its messages, and for the buffers into which it writes gradients.
static inline void simulator_await(Simulation *s, int rank, const Action *a) {
    const UnitMap *map = &s->program->map;
    // a forward needs its input; later actions need all other messages of the micro-batch
    const bool forward = a->kind == ACT_FORWARD;
    const double *arrived = s->rank[rank].arrived[a->micro];
    for (int c = !forward; c < (forward ? 1 : CHANNELS); c++) {
        simulator_wait(&s->rank[rank], arrived[c]);
    }
    const double *sent = simulator_sent(&s->rank[rank], a);
    if (sent) { simulator_wait(&s->rank[rank], *sent); }
    for (int k = 0; k < map->of_unit_count[a->unit]; k++) {
        const int storage = map->of_unit[a->unit][k];
        if (action_contributes(map, a, storage)) {
            simulator_wait(&s->rank[rank], *simulator_left(s, rank, storage));
        }
    }
}
// Moves on to the next piece that is read (way 0) or used (way 1), and points to the time
// at which it is on the host.
static inline double *simulator_came(RankTimes *r, int way) {
    r->turns[way] = (r->turns[way] + 1) % DISK_PIECES;
    return &r->came[r->turns[way]];
}
// An action of states waits for what it reads: pieces on the host, or on the device.
static inline void simulator_await_states(Simulation *s, int rank, const Action *a) {
    const UnitMap *map = &s->program->map;
    RankTimes *me = &s->rank[rank];
    if (a->storage < 0) { return; }
    const StorageTimes *storage = simulator_storage(s, rank, a->storage);
    if (a->kind == ACT_ACQUIRE) { simulator_wait(me, storage->ready); }
    if (a->kind == ACT_REDUCE || a->kind == ACT_ADD) { simulator_wait(me, storage->sum); }
    if (a->kind == ACT_ORTHOGONALISE || a->kind == ACT_UPDATE) {
        simulator_wait(me, storage->matrices);
    }
    if ((a->kind == ACT_UPDATE || a->kind == ACT_DIRECT) && !map->delays && map->rows &&
        map->rows[a->storage].pieces) {
        simulator_wait(me, me->until[LINK]);
    }
    if (a->kind == (map->cpu_update ? ACT_UPDATE : ACT_FETCH) && map->rows &&
        map->rows[a->storage].disk) {
        simulator_wait(me, *simulator_came(me, 1));
    }
}
// Returns what an action occupies beside compute.
static inline Beside simulator_beside(const Action *a) {
    return action_is(a->kind, ON_DISK)                          ? DISK
           : action_is(a->kind, MOVES) || a->kind == ACT_UPDATE ? LINK
                                                                : COLLECTIVES;
}
// Returns when there is what an action moves beside compute.
static inline double simulator_there(const Simulation *s, int rank, const Action *a) {
    switch (a->kind) {
    case ACT_PREFETCH: return simulator_storage(s, rank, a->storage)->newest;
    case ACT_FETCH_SUM:
    case ACT_EVICT_SUM: return *simulator_left(s, rank, a->storage);
    case ACT_WRITE: return s->rank[rank].until[LINK];
    default: return s->rank[rank].clock;
    }
}
// Notes when what an action leaves is complete.
static inline void simulator_leave(Simulation *s, int rank, const Action *a, double done) {
    const UnitMap *map = &s->program->map;
    RankTimes *me = &s->rank[rank];
    if (action_of_stash(a->kind)) { me->stash[stash_slot(a->unit)] = done; }
    if (a->storage < 0) { return; }
    StorageTimes *storage = simulator_storage(s, rank, a->storage);
    switch (a->kind) {
    case ACT_PREFETCH: storage->ready = done; break;
    case ACT_READ: *simulator_came(me, 0) = done; break;
    case ACT_DIRECT:
    case ACT_ORTHOGONALISE: storage->matrices = done; break;
    case ACT_FETCH:
        if (map->cpu_update || map->delays) { storage->newest = done; }
        break;
    case ACT_REDUCE:
    case ACT_EVICT_SUM:
    case ACT_FETCH_SUM:
        if (a->kind != ACT_FETCH_SUM) { me->sums = max_f64(me->sums, done); }
        *simulator_left(s, rank, a->storage) = done;
        break;
    default: break;
    }
}
// All ranks meet. The first one to pass sees when each rank arrived; the slowest decides for all.
static inline void simulator_meet(Simulation *s, int rank) {
    double slowest = 0;
    for (int r = 0; r < s->program->ranks && s->meeting < 0; r++) {
        slowest = max_f64(slowest, max_f64(s->rank[r].clock, s->rank[r].sums));
    }
    if (s->meeting < 0) { s->meeting = slowest; }
    s->rank[rank].clock = s->meeting;
}
static inline void simulator_visit(void *context, int rank, const Action *a, int peer) {
    Simulation *s = (Simulation *)context;
    RankTimes *me = &s->rank[rank];
    const ActionCost cost = s->cost(s->context, rank, a);
    if (action_is_message(a->kind)) {
        simulator_message(s, rank, a, cost, peer);
        return;
    }
    const int slot = action_awaits_stash(&s->program->map, a);
    if (action_computes(a->kind)) { simulator_await(s, rank, a); }
    if (slot >= 0) { simulator_wait(me, me->stash[slot]); }
    if (a->kind == ACT_NORM) { simulator_meet(s, rank); }
    if (a->kind == ACT_STATS) { simulator_wait(me, me->stats); }
    simulator_await_states(s, rank, a);
    const bool moves = action_is(a->kind, COLLECTIVE | MOVES | ON_DISK) || cost.message_s > 0;
    const double there = moves ? simulator_there(s, rank, a) : me->clock;
    if (cost.compute_s > 0) { simulator_wait(me, there); } // it converts the data on the device
    double begin = me->clock;
    simulator_compute(me, cost.compute_s);
    double done = me->clock;
    if (moves) {
        const Beside beside = simulator_beside(a);
        const double from = max_f64(max_f64(me->until[beside], me->clock), there);
        if (cost.compute_s == 0) { begin = from; }
        done = from + cost.message_s;
        simulator_occupy(me, beside, from, done, cost.slows);
    }
    simulator_leave(s, rank, a, done);
    if (action_is(a->kind, OF_PART)) { simulator_wait(me, done); }
    simulator_time(s, rank, a, begin, done);
}
// Plays one step. Returns when the last rank ends.
static inline double simulator_step(Simulation *s) {
    double end = 0;
    int at;
    s->meeting = -1;
    for (int r = 0; r < s->program->ranks; r++) { s->rank[r].busy = 0; }
    walk_program(s->program, &at, false, simulator_visit, s);
    for (int r = 0; r < s->program->ranks; r++) { end = max_f64(end, s->rank[r].clock); }
    for (int r = 0; r < s->program->ranks && s->meeting < 0; r++) { s->rank[r].clock = end; }
    return end;
}

// Allocates the times of all actions of a program: [rank][action]. schedule_times_free frees them.
static inline ActionTime **schedule_times(const Program *p) {
    ActionTime **times = new_array(ActionTime *, p->ranks, "times");
    for (int r = 0; r < p->ranks; r++) {
        times[r] = new_array(ActionTime, p->rank[r].count, "times");
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
    Simulation s = {.program = p,
                    .cost = cost,
                    .context = context,
                    .times = times,
                    .rank = new_array(RankTimes, p->ranks, "simulator"),
                    .storage = new_array(StorageTimes, p->ranks * p->map.storages, "simulator")};
    double(*arrived)[CHANNELS] = (double(*)[CHANNELS])new_array(
        double, CHANNELS *(int64_t)p->ranks * p->micro_batches, "simulator");
    for (int r = 0; r < p->ranks; r++) {
        s.rank[r].arrived = arrived + (int64_t)r * p->micro_batches;
    }
    const double first = simulator_step(&s), second = simulator_step(&s);
    for (int r = 0; r < p->ranks; r++) {
        if (busy) { busy[r] = s.rank[r].busy; }
        for (int i = 0; i < p->rank[r].count && times; i++) {
            times[r][i].begin_s -= first;
            times[r][i].end_s -= first;
        }
    }
    free_all(s.rank, s.storage, arrived);
    return second - first;
}
static inline double schedule_simulate(const Program *p, ActionCosts cost, const void *context,
                                       double *busy) {
    return schedule_simulate_times(p, cost, context, busy, NULL);
}

#endif
