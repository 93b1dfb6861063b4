// records.h: what one rank knows about its operations and the other ranks: labels, requests,
// operations, transports, and all of it together (Comm). comm.h has the functions.
#ifndef COMM_RECORDS_H
#define COMM_RECORDS_H

#include "base/base.h"
#include "comm/group.h"
#include "comm/mpi.h"

enum {
    COMM_QUEUE = 1024,    // limit of collectives begun and not complete
    COMM_MESSAGES = 4096, // limit of messages between two ranks, begun and not complete
    COMM_SLOTS = 8,       // pieces of a reduction in flight
    TAG_COLLECTIVE = 1,   // tag of the messages of collectives
    TAG_QUESTION = 2,     // from a waiting rank to the ranks that it waits for
    TAG_ANSWER = 3,       //
    TAG_MESSAGE = 4,      // messages between two ranks on channel 0; other channels: higher tags
};

// Names an operation in error messages: `what` of a unit or storage (-1: of none) in a step, which
// counts from 0.
typedef struct {
    const char *what;
    int unit;
    int64_t step;
} CommLabel;

// An operation that has begun. A copy may be waited for after the operation is complete.
typedef struct {
    bool message; // between two ranks; otherwise a collective
    // counts the operations by MPI up from 1, and those of the transport down from -1; 0: there is
    // none, or it is complete
    int64_t number;
} CommRequest;

// A collective of a group, or a message between two ranks (COMM_SEND, at both ends).
typedef struct {
    CommKind kind;
    CommLabel label;
    bool on_host; // by MPI, whatever the transport is
    bool counted; // bytes are counted (all operations except setup and scalars)
    bool send;    // of a message: direction, the other rank, its channel
    int peer, channel;
    const Group *group;                  // of a collective
    const int64_t *bounds, *recv_bounds; // recv_bounds: of an all-to-all
    bool apart;                          // both are ranges: where each slice begins and ends
    const char *in;                      // the whole array that is sent from
    char *out;            // the whole array that is received, or a message; NULL: reduce-scatter
    char *slice;          // where this rank's slice of the result goes
    size_t element_bytes; // of a message: all of its bytes
    DType wire;
    int phase; // PHASE_NEW: no messages yet; otherwise the phase whose messages are in flight
} CommOp;

// A piece of a reduction in flight. Slot 0 also holds the messages of all other collectives.
typedef struct {
    int state; // 0: free, 1: waits for contributions, 2: waits for the sums of other nodes
    int64_t piece;
    int requests, open; // requests posted; those of them that are not complete
    MPI_Request *request;
    int *peer; // the other rank of each request
} CommSlot;

// A message between two ranks by MPI.
typedef struct {
    CommLabel label;
    bool send;
    int peer;
} CommMessage;

// Bounds of the messages between two ranks, for which a transport takes memory and makes
// connections.
typedef struct {
    size_t bytes; // of the longest message; 0: no rank sends any
    int most;     // messages under way at a time; further ones wait for each other
    int *peers;   // [count] the other ranks, ascending
    int count;
} CommTraffic;

// Where a rank runs, as that rank reports it.
typedef struct {
    char host[64];
    // began: start time, field 22 of /proc/PID/stat; detects a pid that the system has reused
    int64_t pid, began;
} CommPlace;
// What this rank knows about another one.
typedef struct {
    CommPlace place;
    bool visible;         // its entry in /proc can be read from here
    bool awaited;         // an operation of this rank waits for its messages
    double last_progress; // time of its last known progress, on the watch's clock
    double asked;         // time of the last question to it
    double answered;      // time of its last answer
    double stopped;       // since when it is seen stopped; negative: not stopped
    int64_t sent[2];      // the last question and answer, while in flight
    MPI_Request sending[2];
} CommPeer;

// Carries operations over memory that MPI does not reach. With MPI alone all functions are NULL.
typedef struct Comm Comm;
typedef struct {
    const char *name; // "mpi", "nccl", "staged"; "none": one rank, built without MPI
    // Prepares a group. All members call it before the first collective of the group. May be NULL.
    void (*join)(Comm *c, Group *g);
    // Announces memory over which collectives of the group will run; may be NULL.
    void (*share)(Comm *c, const Group *g, void *memory, size_t bytes);
    // Begins an operation that runs after the work which the compute stream holds now. Returns the
    // number of its request, which is 0 if nothing is to be waited for.
    int64_t (*begin)(Comm *c, const CommOp *op);
    // Later work of the compute stream sees the result. The host need not wait.
    void (*wait)(Comm *c, CommRequest request);
    // Updates `waits` and looks for errors; may be NULL.
    void (*poll)(Comm *c);
    void (*end)(Comm *c);
    void *state;
    const CommOp *waits; // the oldest operation for which the device waits for other ranks, or NULL
    int sharing;         // number of ranks that share this rank's device
} CommTransport;

struct Comm {
    int rank, ranks;
    // local_*: among the ranks of this machine, whatever --ranks-per-node says
    int node, nodes, local_rank, local_ranks;
    int *node_of;        // [ranks] node of each rank
    bool oversubscribed; // more local ranks than cores: a waiting rank yields at once
    Group everyone;      // the group of all ranks, in order
    // time without progress after which a rank counts as lost, in seconds; 0: no limit
    double timeout_s;
    int64_t step; // that this rank is in, for the labels of setup and scalars
    int64_t bytes[COMM_KINDS][LINK_KINDS]; // sent by this rank since comm_reset_counters()
    double waited_s;                       // time spent waiting since then
    // Called repeatedly while this rank waits; NULL: nothing else to do.
    void (*idle_callback)(void *of);
    void *idle_context;
    CommTransport transport;
    // private: messages by MPI
    MPI_Comm world, questions;
    CommOp queue[COMM_QUEUE]; // ring: collectives first .. started - 1 are not complete
    int64_t first, started;
    CommSlot slot[COMM_SLOTS];
    CommMessage message[COMM_MESSAGES]; // ring: message t is at t modulo its size
    MPI_Request message_request[COMM_MESSAGES];
    // the last posted; all up to it are complete; the one that this rank waits for now, or 0
    int64_t posted, settled, awaited;
    int request_capacity, *completed; // [request_capacity] indices from MPI_Testsome
    // of the reduction at the head of the queue: pieces begun, pieces complete, elements of a piece
    int64_t next_piece, done_pieces, piece_elements;
    char *staging;
    size_t staging_bytes;
    const float **sources; // [ranks] the terms of a sum
    int64_t *small_bounds; // [ranks + 1] for setup exchanges
    int *small_values;     // [ranks]
    // private: the watch
    CommPeer *peers;      // [ranks]
    double clock;         // seconds for which this rank has been seen waiting
    double looked;        // seconds_now() of the watch's last look
    double last_progress; // on that clock: the last progress of what this rank waits for
    double answered;      // seconds_now() of the last look for questions
    int64_t heard;        // the question or answer that arrives next
    MPI_Request hearing;
};

#endif
