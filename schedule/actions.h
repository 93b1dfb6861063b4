// actions.h: the kinds of actions that a schedule is made of, in one table. A new kind is a row
// here, and a case where its work is done: in the executor, in touches.h (what it needs and
// leaves), and in plan/costs.h (what it costs). Everything else asks the table.
//
// Fields of an action:
//   micro            micro-batch of this step, from 0
//   first_row, rows  its samples: a range of the step's S samples. Ranks and actions may have
//                    different ranges. With 0 rows a rank only joins the collectives of the others.
//   unit, storage    numbers as in gpt.h; schedules know them only through a UnitMap
//   step, version    relative to the step that runs: version 0 of the parameters is the one before
//                    this step's update, version 1 the one after it
//   peer             the other rank of a SEND or RECV
//   secondary        PREFETCH gathers from the hpZ secondary copies, if they exist (zero.h: hpZ)
//   use              borrowed parameters (state/policy.h: borrows): which use of the step this is;
//                    UPDATE, FETCH, EVICT, READ and WRITE: the piece of the storage's states
#ifndef ACTIONS_H
#define ACTIONS_H

#include "base/base.h"

// What an action is, as bits of its row.
enum {
    COMPUTES = 1 << 0, // one unit, one micro-batch
    READS_PARAMETERS = 1 << 1,
    SENDS = 1 << 2, // the row of each SEND is followed by that of its RECV
    RECEIVES = 1 << 3,
    OF_ROWS = 1 << 4,    // a message with rows of a unit and micro-batch
    OF_STASH = 1 << 5,   // moves activations of a unit and micro-batch
    OF_STORAGE = 1 << 6, // has a storage
    OF_MICRO = 1 << 7,   // has a storage and a micro-batch
    OF_PIECES = 1 << 8,  // has a piece of a storage's states
    COLLECTIVE = 1 << 9, // of the ranks that have its storage
    MOVES = 1 << 10,     // between host and device
    ON_DISK = 1 << 11,   // between host and disk
    // a store operation on the parameters of a storage, or on its sums, which may be deferred
    // (executor/deferred.h)
    ON_PARAMETERS = 1 << 12,
    ON_SUM = 1 << 13,
    OF_PART = 1 << 14 // a message inside a unit, with rows of a micro-batch
};

// ROW(name, letter in drawings or 0, what it is)
#define ACTION_TABLE(ROW)                                                                          \
    /* compute */                                                                                  \
    ROW(FORWARD, 'F', COMPUTES | READS_PARAMETERS)                                                 \
    ROW(BACKWARD_INPUT, 'B', COMPUTES | READS_PARAMETERS)                                          \
    ROW(BACKWARD_WEIGHT, 'W', COMPUTES)                                                            \
    ROW(RECOMPUTE, 'B', COMPUTES | READS_PARAMETERS)                                               \
    /* makes each sample's clipping factor; its unit is the first one of the stage */              \
    ROW(CLIP, 'B', COMPUTES)                                                                       \
    /* adds the head's part of the gradient of wte (schedule.h: Clips) */                          \
    ROW(TIED, 'W', COMPUTES)                                                                       \
    /* the message before a part of a unit (architecture.h): of values, of their gradients */      \
    ROW(EXCHANGE, 0, OF_STORAGE | COLLECTIVE | OF_PART)                                            \
    ROW(EXCHANGE_BACK, 0, OF_STORAGE | COLLECTIVE | OF_PART)                                       \
    /* messages of a unit and micro-batch: output of a unit, gradient of its input */              \
    ROW(SEND_FORWARD, 0, SENDS | OF_ROWS)                                                          \
    ROW(RECV_FORWARD, 0, RECEIVES | OF_ROWS)                                                       \
    ROW(SEND_BACKWARD, 0, SENDS | OF_ROWS)                                                         \
    ROW(RECV_BACKWARD, 0, RECEIVES | OF_ROWS)                                                      \
    /* each sample's norm in a stage, to the first stage; unit: the stage's last one */            \
    ROW(SEND_NORM, 0, SENDS | OF_ROWS)                                                             \
    ROW(RECV_NORM, 0, RECEIVES | OF_ROWS)                                                          \
    /* each sample's clipping factor, from the first stage; unit: as for NORM */                   \
    ROW(SEND_FACTOR, 0, SENDS | OF_ROWS)                                                           \
    ROW(RECV_FACTOR, 0, RECEIVES | OF_ROWS)                                                        \
    /* messages of a storage: gradient, summed over the micro-batches so far */                    \
    ROW(SEND_SUM, 0, SENDS | OF_STORAGE | OF_MICRO | ON_SUM)                                       \
    ROW(RECV_SUM, 0, RECEIVES | OF_STORAGE | OF_MICRO | ON_SUM)                                    \
    /* version after the update of this step */                                                    \
    ROW(SEND_PARAMETERS, 0, SENDS | OF_STORAGE | ON_PARAMETERS)                                    \
    ROW(RECV_PARAMETERS, 0, RECEIVES | OF_STORAGE | ON_PARAMETERS)                                 \
    /* one unit's part of a micro-batch's gradient */                                              \
    ROW(SEND_PART, 0, SENDS | OF_STORAGE)                                                          \
    ROW(RECV_PART, 0, RECEIVES | OF_STORAGE)                                                       \
    /* step statistics (loss, norm); not of a storage */                                           \
    ROW(SEND_STATS, 0, SENDS)                                                                      \
    ROW(RECV_STATS, 0, RECEIVES)                                                                   \
    /* states of a storage */                                                                      \
    ROW(PREFETCH, 0, OF_STORAGE | COLLECTIVE)                                                      \
    ROW(ACQUIRE, 0, OF_STORAGE)                                                                    \
    ROW(RELEASE, 0, OF_STORAGE)                                                                    \
    ROW(REDUCE, 0, OF_STORAGE | COLLECTIVE | ON_SUM)                                               \
    ROW(NORM, 0, 0) /* of all storages */                                                          \
    ROW(UPDATE, 'U', OF_STORAGE | OF_PIECES | ON_PARAMETERS | ON_SUM)                              \
    /* the first parts of an update with whole matrices (state/matrices.h): moments and */         \
    /* directions, which begin to travel home; matrices at home, which begin to travel back */     \
    ROW(DIRECT, 'U', OF_STORAGE | OF_PIECES | COLLECTIVE)                                          \
    ROW(ORTHOGONALISE, 'O', OF_STORAGE | COLLECTIVE)                                               \
    /* adds a received part to a sum */                                                            \
    ROW(ADD, 0, OF_STORAGE | OF_MICRO | ON_SUM)                                                    \
    /* version 0: this rank adds its step statistics; 1: this rank has the complete ones */        \
    ROW(STATS, 0, 0)                                                                               \
    /* piece of a storage's states: from the host to the device, and back (state/update.h) */      \
    ROW(FETCH, 0, OF_STORAGE | OF_PIECES | MOVES)                                                  \
    ROW(EVICT, 0, OF_STORAGE | OF_PIECES | MOVES)                                                  \
    /* the same from the disk to the host, and back (state/disk.h) */                              \
    ROW(READ, 0, OF_STORAGE | OF_PIECES | ON_DISK)                                                 \
    ROW(WRITE, 0, OF_STORAGE | OF_PIECES | ON_DISK)                                                \
    /* activations of a unit and micro-batch, from the host to the device, and back */             \
    ROW(FETCH_STASH, 0, OF_STASH | MOVES)                                                          \
    ROW(EVICT_STASH, 0, OF_STASH | MOVES)                                                          \
    /* sum of a storage's gradient, from the host to the device, and back */                       \
    ROW(FETCH_SUM, 0, OF_STORAGE | MOVES)                                                          \
    ROW(EVICT_SUM, 0, OF_STORAGE | MOVES)

#define ACTION_KIND(name, letter, is) ACT_##name,
typedef enum { ACTION_TABLE(ACTION_KIND) ACTION_KINDS } ActionKind;
#undef ACTION_KIND
typedef struct {
    const char *name;
    char letter;
    unsigned is;
} ActionRow;
#define ACTION_ROW(name, letter, is) {#name, letter, is},
static const ActionRow action_table[] = {ACTION_TABLE(ACTION_ROW)};
#undef ACTION_ROW

// Returns whether a kind is any of these.
static inline bool action_is(ActionKind kind, unsigned any) {
    return (action_table[kind].is & any) != 0;
}
static inline const char *action_name(ActionKind kind) { return action_table[kind].name; }
static inline bool action_computes(ActionKind kind) { return action_is(kind, COMPUTES); }
static inline bool action_reads_parameters(ActionKind kind) {
    return action_is(kind, READS_PARAMETERS);
}
static inline bool action_sends(ActionKind kind) { return action_is(kind, SENDS); }
static inline bool action_is_message(ActionKind kind) { return action_is(kind, SENDS | RECEIVES); }
static inline bool action_of_rows(ActionKind kind) { return action_is(kind, OF_ROWS); }
static inline bool action_of_stash(ActionKind kind) { return action_is(kind, OF_STASH); }

typedef struct {
    ActionKind kind;
    int unit, storage, peer; // -1: does not apply
    int64_t micro;           // likewise
    int64_t first_row, rows;
    int64_t step, version;
    bool secondary;
    int use, part; // part: of a unit, of a pass forward or backward, or of the message before it
} Action;
static inline Action action_make(ActionKind kind, int unit, int storage, int64_t micro) {
    Action a = {};
    a.kind = kind;
    a.unit = unit;
    a.storage = storage;
    a.micro = micro;
    a.peer = -1;
    return a;
}

#endif
