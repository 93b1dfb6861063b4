// policy.h: the kinds of states, and what decides where they are: the flags of ZeRO (ZeroPolicy),
// what is offloaded (Offload), and what a rank passes on in point-to-point mode (P2p). These are
// plain values: other files fill them from the options, and the rows of storages (table.h) follow
// from them.
#ifndef POLICY_H
#define POLICY_H

#include "base/base.h"
#include "ops/quantize.h"
#include "options.h"
#include "state/optimizer.h"

enum {
    NORM_CHUNK = 256,
    SHARED_SLOTS = 2,   // slots of blocks: one is in use while the data of the other travel
    ALL_SLOTS = 4,      // the same of their experts, behind these
    BORROWED_SLOTS = 2, // slots of stages for borrowed parameters, used in the same way
};

// -------------------------------------------------------------------------------------------------
// Kinds of states: the name, what its device memory counts as, the bytes of n elements (working: of
// n working parameters; the elements of RECORDS are bytes), and what it is called when it is
// allocated. Checkpoints have the numbers up to GRADIENT (docs/formats.md).
// clang-format off
#define STATE_TABLE(ROW)                                                                           \
    /* parameters in fp32; with --dtype fp32 they are the working parameters */                    \
    ROW(MASTER,        MEMORY_OPTIMIZER,  4 * n,   "fp32 parameters")                              \
    /* of the optimizer; as many kinds as its row says */                                          \
    ROW(MOMENT,        MEMORY_OPTIMIZER,  4 * n,   "moments")                                      \
    ROW(SECOND_MOMENT, MEMORY_OPTIMIZER,  4 * n,   "moments")                                      \
    /* p2p: the version before the newest parameters */                                            \
    ROW(PREVIOUS,      MEMORY_BUFFERS,    working, "previous parameters")                          \
    /* files of older versions may have it; it is ignored */                                       \
    ROW(RESERVED,      MEMORY_BUFFERS,    0,       "")                                             \
    /* fp32 sums */                                                                                \
    ROW(GRADIENT,      MEMORY_GRADIENTS,  4 * n,   "gradients")                                    \
    /* working parameters */                                                                       \
    ROW(PARAMETERS,    MEMORY_PARAMETERS, working, "parameters")                                   \
    /* of blocks that use the storage, between forward and backward pass (executor) */             \
    ROW(ACTIVATIONS,   MEMORY_BUFFERS,    0,       "activations")                                  \
    /* hpZ: slices of secondary copies of the parameters */                                        \
    ROW(SECONDARY,     MEMORY_PARAMETERS, working, "secondary parameters")                         \
    /* qwZ: quantized parameters */                                                                \
    ROW(RECORDS,       MEMORY_BUFFERS,    n,       "quantized parameters")                         \
    /* qgZ: errors of quantized gradients, which are fed back */                                   \
    ROW(ERRORS,        MEMORY_BUFFERS,    2 * n,   "errors of quantized gradients")                \
    /* p2p: gradients of micro-batches, if sums stay */                                            \
    ROW(MADE,          MEMORY_BUFFERS,    4 * n,   "gradients")                                    \
    /* p2p: sums from other ranks */                                                               \
    ROW(RECEIVED,      MEMORY_BUFFERS,    4 * n,   "sums of gradients")                            \
    /* p2p, in pieces: each micro-batch's gradient so far, if sums stay; otherwise those of */     \
    /* pieces, in slots that blocks share unless their storages alternate (--share AxB) */         \
    ROW(PIECES,        MEMORY_BUFFERS,    4 * n,   "gradients of pieces")
// clang-format on
#define STATE_KIND(NAME, ...) STATE_##NAME,
enum { STATE_TABLE(STATE_KIND) STATE_KINDS };
enum {
    OPTIMIZER_KINDS = STATE_PREVIOUS, // kinds below are the optimizer's states
    FILE_KINDS = STATE_PARAMETERS,    // kinds below may be in a checkpoint
    HOST_KINDS = STATE_ACTIVATIONS    // kinds below may be on the host
};
typedef int StateKind; // loops count through the kinds
// Returns the bytes of n elements of a kind of state, as they are stored; dtype: of the working
// parameters. Plans, predictions, moves and the disk use this function.
static inline int64_t state_bytes(StateKind kind, DType dtype, int64_t n) {
    const int64_t working = n * (int64_t)dtype_size(dtype);
    switch (kind) {
#define STATE_BYTES(NAME, MEMORY, BYTES, ...)                                                      \
    case STATE_##NAME: return BYTES;
        STATE_TABLE(STATE_BYTES)
    default: return 0;
    }
}
enum { // bits of kinds: states of the optimizer; all states that may be on the host
    OPTIMIZER_STATES = (1 << OPTIMIZER_KINDS) - 1,
    OFFLOAD_ANY = OPTIMIZER_STATES | 1 << STATE_GRADIENT | 1 << STATE_PARAMETERS
};
// Is this a moment that the optimizer keeps?
static inline bool optimizer_keeps(const Optimizer *o, StateKind kind) {
    return kind >= STATE_MOMENT && kind < STATE_MOMENT + o->moments;
}
// Returns the ZeRO stage from which on ranks divide a kind of state.
static inline int state_divided_from(StateKind kind) {
    return kind == STATE_PARAMETERS ? 3 : kind == STATE_GRADIENT ? 2 : 1;
}
// Returns the bytes of one parameter's states up to the kind `last`, on each of n ranks at a ZeRO
// stage, on average over a chunk: the moments, in bf16 the fp32 master, the gradient, the
// parameter. The rows of storages (table.h) have them to the byte.
static inline double parameter_bytes_up_to(StateKind last, const Optimizer *o, DType dtype,
                                           int stage, double n) {
    double bytes = 0;
    for (StateKind kind = STATE_MASTER; kind <= last; kind++) {
        const bool kept = kind == STATE_MASTER ? dtype != DTYPE_FP32
                                               : optimizer_keeps(o, kind) || kind >= STATE_GRADIENT;
        const double whole = (double)state_bytes(kind, dtype, NORM_CHUNK) / NORM_CHUNK;
        bytes += !kept ? 0 : stage >= state_divided_from(kind) ? whole / n : whole;
    }
    return bytes;
}
static inline double parameter_bytes(const Optimizer *o, DType dtype, int stage, double n) {
    return parameter_bytes_up_to(STATE_PARAMETERS, o, dtype, stage, n);
}
// Returns those of the optimizer, which are not divided.
static inline double optimizer_state_bytes(const Optimizer *o, DType dtype) {
    return parameter_bytes_up_to(OPTIMIZER_KINDS - 1, o, dtype, 0, 1);
}

// -------------------------------------------------------------------------------------------------
// What decides where states are

// Which states are in host memory (offload.h chooses them). The host holds slices at every ZeRO
// stage: what the rank updates. States of the optimizer are copied to the device for the update,
// piece by piece, or the host updates them from gradients that are copied there. Of a gradient on
// the host, the device has only a slot for the contribution that is being computed. Parameters are
// gathered for each use, as at stage 3, into slots that blocks share. Parameters in fp32 are their
// own masters, and one state with them.
typedef struct {
    unsigned char *host; // [storages] bits of kinds, which rows take (table.h)
    // the host updates what it holds: of a storage all states of the optimizer, or none
    bool cpu_update;
    // [storages] bits of the optimizer's states that are on a disk (state/disk.h) and are read to
    // the host for their update; NULL: none
    unsigned char *disk;
    const char *folder; // of the files on disk
    bool gradients;     // gradients may be on the host
    bool delays;        // updates are one step late; then all gradients and masters are there
} Offload;
#ifndef OFFLOAD_PIECE // tests make it small
#define OFFLOAD_PIECE (1 << 20)
#endif
// Pieces of states from the host that are on the device at once, at most: one arrives while the
// other leaves.
enum { MOVING_PIECES = 2 };
// Pieces of states from a disk that are on the host at once, at most: one is read, two are moving
// or being updated, one is written.
enum { DISK_PIECES = 4 };

// Where the sum of a storage's gradient is between micro-batches:
//   SUM_STAYS       on the device
//   SUM_COMES_BACK  on the host; it returns to the device before the next gradient is added
//                   (where one rank alone has the storage, so the device adds while it computes)
//   SUM_IS_ADDED    on the host; each micro-batch's gradient is moved there and added
typedef enum { SUM_STAYS, SUM_COMES_BACK, SUM_IS_ADDED } SumPlace;

// The pieces in which the micro-batches of a step are computed. Pieces are numbered in the order of
// their computation. in_turns (a rank has one micro-batch): the first piece of each micro-batch,
// then the second of each, and so on. Otherwise: all pieces of a micro-batch, then of the next.
typedef struct {
    int micros, pieces; // micro-batches of a step; pieces of a micro-batch
    bool in_turns;
} Pieces;
static inline int pieces_of_step(const Pieces *p) { return p->micros * p->pieces; }
static inline int piece_number(const Pieces *p, int micro, int within) {
    return p->in_turns ? within * p->micros + micro : micro * p->pieces + within;
}
static inline int piece_micro(const Pieces *p, int piece) {
    return p->in_turns ? piece % p->micros : piece / p->pieces;
}
static inline int piece_within(const Pieces *p, int piece) {
    return p->in_turns ? piece / p->micros : piece % p->pieces;
}
// Returns whether a piece is the last one of its micro-batch.
static inline bool piece_is_last(const Pieces *p, int piece) {
    return piece_within(p, piece) == p->pieces - 1;
}
// Returns how many of the step's samples a piece has, and writes the first to *first.
// begins: [micros + 1] the first sample of each micro-batch; NULL: micro-batches are nearly equal.
static inline int64_t piece_rows(const Pieces *p, int64_t samples, const int64_t *begins, int piece,
                                 int64_t *first) {
    const int micro = piece_micro(p, piece), within = piece_within(p, piece);
    const int64_t begin = begins ? begins[micro] : part_begin(samples, p->micros, micro);
    const int64_t rows =
        (begins ? begins[micro + 1] : part_begin(samples, p->micros, micro + 1)) - begin;
    *first = begin + part_begin(rows, p->pieces, within);
    return begin + part_begin(rows, p->pieces, within + 1) - *first;
}
// States that travel by p2p messages instead of collectives of all owners (cyclic.h): what a rank
// stores and exchanges.
typedef struct {
    int rank; // this one
    // sums stay on this rank from one micro-batch to the next, and gradients of micro-batches are
    // made in slots; otherwise each gradient has a buffer of its own
    bool stays;
    bool waits; // updates wait for the norm of the whole gradient
    // the owner's buffers of a sum: 2 if the sum of the next step begins before that of this step
    // is used
    int sums;
    // pieces between the head's and the embedding's part of their gradient of wte
    int heads;
    Pieces pieces; // of a step
    // the pieces of a micro-batch are added up here; otherwise there is one, or each is sent
    bool joins_pieces;
    int made, whole; // kinds of states: a piece's gradient, as it is made; its micro-batch's
    int grad_slots;  // slots for received sums
    // only owners keep parameters: other ranks borrow those of a stage for each use, and send its
    // gradients to the owner without adding to them
    bool borrows;
    int stages, uses; // with borrows: stages; uses of a stage's parameters in a step
    // operations that wait for a message are deferred (p2p.h); each gradient that is sent has
    // a buffer of its own
    bool deferred;
    // most steps that begin after the step in which a stop was requested
    int notice;
} P2p;
// Returns the slot that holds the parameters of a use. Uses are counted through all steps.
static inline int p2p_slot(const P2p *r, int use, int64_t step) {
    return (int)((step * r->uses + use) % BORROWED_SLOTS);
}

// The ZeRO and ZeRO++ flags of a run.
typedef struct {
    int stage; // 0 .. 3
    // hpZ: ranks that together keep a secondary copy of the parameters; 1: off
    int partition;
    bool quantized_weights, quantized_gradients, feedback; // qwZ, qgZ; errors of qgZ are fed back
    QuantFormat weights, gradients;
    bool accumulates;                // a step has several micro-steps
    bool keeps_gathered;             // wte stays acquired from the head to the embedding (dp.h)
    bool matrices;                   // the optimizer needs whole matrices of blocks (matrices.h)
    const struct CyclicPlan *cyclic; // cyclic.h; NULL: states travel by collectives
    const Offload *offload;          // NULL: all states are on the device
    bool forward_only;               // --prompt: there are no gradients and no moments
} ZeroPolicy;

static inline ZeroPolicy zero_policy(const Options *o, bool accumulates, bool keeps_gathered) {
    ZeroPolicy z = {};
    z.stage = (int)o->zero;
    z.partition = (int)o->zero_hpz_partition_size;
    z.accumulates = accumulates;
    z.keeps_gathered = keeps_gathered;
    z.matrices = optimizers[o->optimizer].cut == CUT_MATRICES;
    z.quantized_weights = o->zero_quantized_weights;
    z.quantized_gradients = o->zero_quantized_gradients;
    z.feedback = o->zero_error_feedback;
    z.weights.bits = 8;
    z.gradients.bits = o->zero_gradient_bits == GRADIENT_BITS_8 ? 8 : 4;
    z.weights.block = z.gradients.block = o->zero_quant_block;
    return z;
}

#endif
