// emu_nccl.h: an emulation of NCCL between processes that emulate their GPUs (emu.h). It sends MPI
// messages on MPI_COMM_WORLD, which the program itself does not use for messages.
//
// Order      A collective is work in its stream. When it reaches the front, its input is read and
//            sent. When everything it needs from the other members has arrived, its output is
//            written and it is done. Members may reach it in any order, and wait for those that are
//            late, as on a GPU. Sends are synchronous: a send is done when the other end has
//            reached its call, and its data must not change before. Sends and receives between two
//            members match in their order, whatever other calls there are.
// Sums       are added as in a ring: from the member after the owner around to the owner, rounded
//            to the type at each addition.
// Adversary  A call returns "in progress", and puts its work into the stream only when the caller
//            queries it some time later. So an event that is recorded before is recorded too early.
//            The members' descriptions of a collective (kind, count, type, position in the order)
//            are compared. EMU_NCCL_ERROR=N (environment) makes the N-th query for asynchronous
//            errors find one.
// Hosts      Two members on one GPU of one host are refused. NCCL_HOSTID (environment, read once, at
//            the first call) takes the place of the host's name. Members that share a GPU all the
//            same must have been told to use sockets.
#ifndef EMU_NCCL_H
#define EMU_NCCL_H

#include "emu.h"

#define OMPI_SKIP_MPICXX 1
#include <memory> // work is copied, but its state must be shared
#include <mpi.h>

typedef enum {
    ncclSuccess,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7
} ncclResult_t;
typedef enum { ncclUint8 = 1, ncclFloat32 = 7, ncclBfloat16 = 9 } ncclDataType_t;
typedef enum { ncclSum } ncclRedOp_t;
typedef struct {
    char internal[128];
} ncclUniqueId;
typedef struct {
    int blocking;
} ncclConfig_t;
#define NCCL_CONFIG_INITIALIZER                                                                    \
    { 1 }

enum EmuNcclKind { EMU_ALL_GATHER, EMU_REDUCE_SCATTER, EMU_ALL_REDUCE, EMU_SEND, EMU_RECV };
struct EmuNcclOp {
    EmuNcclKind kind;
    const void *in;
    void *out;
    size_t count;
    ncclDataType_t type;
    int peer;            // other end of a message
    uint64_t registered; // registered pieces of memory at the call; equal on all members
};
struct EmuNcclComm {
    int me, n, tag;
    std::vector<int> ranks; // the members' ranks in MPI_COMM_WORLD
    // number of the next group of calls in which all members take part
    uint64_t order;
    std::vector<uint64_t> sends, receives; // [n]: calls so far to and from each member
    bool in_progress;
    std::vector<EmuNcclOp> called; // calls that are not in the stream yet
    cudaStream_t stream;
    int registered;
};
typedef EmuNcclComm *ncclComm_t;

// Header of every message.
struct EmuNcclHeader {
    uint64_t order, kind, count, type, registered;
};
struct EmuNcclMessage {
    std::vector<char> data; // with the header
    MPI_Request request;
    int op, from; // index of the call in its group; the other member
};
// A group of calls that is running.
struct EmuNcclRun {
    EmuNcclComm *comm;
    std::vector<EmuNcclOp> ops;
    std::vector<uint64_t> orders; // number of each call
    // input of each call when the group reached the front of its stream
    std::vector<std::vector<char>> own;
    std::deque<EmuNcclMessage> sent, received;
    bool begun;
};

static inline size_t emu_nccl_size(ncclDataType_t type) {
    return type == ncclFloat32 ? 4 : type == ncclBfloat16 ? 2 : 1;
}

// --- messages ------------------------------------------------------------------------------------
static inline bool emu_nccl_pairwise(const EmuNcclOp &op) {
    return op.kind == EMU_SEND || op.kind == EMU_RECV;
}
// Returns whether this call exchanges data with that member.
static inline bool emu_nccl_with(const EmuNcclOp &op, int me, int other, bool sending) {
    const bool one_way = op.kind == (sending ? EMU_RECV : EMU_SEND);
    return other != me && (!emu_nccl_pairwise(op) || other == op.peer) && !one_way;
}
// Numbers the calls of a group. The other members get the same numbers.
static inline void emu_nccl_number(EmuNcclRun &run) {
    EmuNcclComm *c = run.comm;
    bool all = false;
    for (const EmuNcclOp &op : run.ops) {
        std::vector<uint64_t> &count = op.kind == EMU_SEND ? c->sends : c->receives;
        run.orders.push_back(emu_nccl_pairwise(op) ? count[(size_t)op.peer]++ : c->order);
        all = all || !emu_nccl_pairwise(op);
    }
    c->order += all;
}
static inline EmuNcclHeader emu_nccl_header(const EmuNcclRun &run, size_t i) {
    const EmuNcclOp &op = run.ops[i];
    EmuNcclHeader h = {run.orders[i], (uint64_t)(op.kind == EMU_RECV ? EMU_SEND : op.kind),
                       op.count, (uint64_t)op.type, op.registered};
    return h;
}
static inline void emu_nccl_begin(EmuNcclRun &run) {
    const EmuNcclComm *c = run.comm;
    run.begun = true;
    for (size_t i = 0; i < run.ops.size(); i++) {
        const EmuNcclOp &op = run.ops[i];
        const size_t bytes = op.count * emu_nccl_size(op.type),
                     whole = bytes * (op.kind == EMU_REDUCE_SCATTER ? (size_t)c->n : 1);
        run.own.push_back({});
        if (op.kind != EMU_RECV) {
            run.own.back().assign((const char *)op.in, (const char *)op.in + whole);
        }
        const EmuNcclHeader header = emu_nccl_header(run, i);
        for (int m = 0; m < c->n; m++) {
            if (emu_nccl_with(op, c->me, m, true)) {
                const char *from =
                    run.own[i].data() + (op.kind == EMU_REDUCE_SCATTER ? (size_t)m * bytes : 0);
                run.sent.push_back(
                    {std::vector<char>((const char *)&header, (const char *)(&header + 1)),
                     MPI_REQUEST_NULL, (int)i, m});
                EmuNcclMessage &message = run.sent.back();
                message.data.insert(message.data.end(), from, from + bytes);
                MPI_Issend(message.data.data(), (int)message.data.size(), MPI_BYTE,
                           c->ranks[(size_t)m], c->tag, MPI_COMM_WORLD, &message.request);
            }
            if (emu_nccl_with(op, c->me, m, false)) {
                run.received.push_back(
                    {std::vector<char>(sizeof header + bytes), MPI_REQUEST_NULL, (int)i, m});
                EmuNcclMessage &message = run.received.back();
                MPI_Irecv(message.data.data(), (int)message.data.size(), MPI_BYTE,
                          c->ranks[(size_t)m], c->tag, MPI_COMM_WORLD, &message.request);
            }
        }
    }
}
static inline bool emu_nccl_all_come(std::deque<EmuNcclMessage> &messages) {
    for (EmuNcclMessage &m : messages) {
        int done = 0;
        MPI_Test(&m.request, &done, MPI_STATUS_IGNORE);
        if (!done) { return false; }
    }
    return true;
}

// --- results -------------------------------------------------------------------------------------
// out(count) = the sum of all members' contributions, inputs[member]. If owner is negative
// (all-reduce), element e belongs to member e * n / count.
static inline void emu_nccl_sum(const EmuNcclOp &op, const std::vector<const char *> &inputs,
                                int owner) {
    const int n = (int)inputs.size();
    for (size_t e = 0; e < op.count; e++) {
        const int last = owner < 0 ? (int)(e * (size_t)n / op.count) : owner;
        float sum = 0;
        for (int i = 1; i <= n; i++) {
            const char *x = inputs[(size_t)((last + i) % n)];
            float value;
            if (op.type == ncclBfloat16) {
                value = __bfloat162float(((const __nv_bfloat16 *)(const void *)x)[e]);
                sum = __bfloat162float(__float2bfloat16(i == 1 ? value : sum + value));
            } else {
                memcpy(&value, x + 4 * e, 4);
                sum = i == 1 ? value : sum + value;
            }
        }
        if (op.type == ncclBfloat16) {
            ((__nv_bfloat16 *)op.out)[e] = __float2bfloat16(sum);
        } else {
            ((float *)op.out)[e] = sum;
        }
    }
}
static inline void emu_nccl_end(EmuNcclRun &run) {
    const EmuNcclComm *c = run.comm;
    for (size_t i = 0; i < run.ops.size(); i++) {
        const EmuNcclOp &op = run.ops[i];
        const size_t bytes = op.count * emu_nccl_size(op.type);
        const bool sums = op.kind == EMU_REDUCE_SCATTER || op.kind == EMU_ALL_REDUCE;
        const EmuNcclHeader header = emu_nccl_header(run, i);
        std::vector<const char *> inputs((size_t)c->n, run.own[i].data());
        if (op.kind == EMU_REDUCE_SCATTER) { inputs[(size_t)c->me] += (size_t)c->me * bytes; }
        for (EmuNcclMessage &m : run.received) {
            if (m.op != (int)i) { continue; }
            if (memcmp(m.data.data(), &header, sizeof header)) {
                emu_fail("NCCL: the members disagree about a collective");
            }
            inputs[(size_t)m.from] = m.data.data() + sizeof header;
        }
        if (sums) { emu_nccl_sum(op, inputs, op.kind == EMU_ALL_REDUCE ? -1 : c->me); }
        if (op.kind == EMU_SEND && memcmp(op.in, run.own[i].data(), bytes)) {
            emu_fail("NCCL: what is being sent has changed");
        }
        if (op.kind == EMU_ALL_GATHER) {
            for (size_t m = 0; m < (size_t)c->n; m++) {
                memcpy((char *)op.out + m * bytes, inputs[m], bytes);
            }
        }
        if (op.kind == EMU_RECV) { memcpy(op.out, inputs[(size_t)op.peer], bytes); }
    }
}
static inline bool emu_nccl_attempt(EmuNcclRun &run) {
    if (!run.begun) {
        emu_protect(true);
        emu_nccl_begin(run);
    }
    if (!emu_nccl_all_come(run.received) || !emu_nccl_all_come(run.sent)) { return false; }
    emu_protect(true);
    emu_nccl_end(run);
    return true;
}

// --- the calls -----------------------------------------------------------------------------------
static int emu_nccl_depth;       // of nested ncclGroupStart
static int emu_nccl_collectives; // collectives called so far
static std::vector<ncclComm_t> emu_nccl_touched;

static inline const char *ncclGetErrorString(ncclResult_t r) {
    return r == ncclRemoteError    ? "remote process exited or there was a network error"
           : r == ncclInvalidUsage ? "invalid usage"
                                   : "error";
}
static inline const char *ncclGetLastError(ncclComm_t) { return "emulated"; }
// What a member tells the others about itself.
struct EmuNcclMember {
    int me, world, device;      // index in the communicator; rank of the job; GPU
    char host[64], machine[64]; // what NCCL takes for the host; the host
    bool sockets;               // uses nothing but sockets
};
// Reads the environment at the first call.
static inline const EmuNcclMember &emu_nccl_process() {
    static const EmuNcclMember found = [] {
        EmuNcclMember m;
        memset(&m, 0, sizeof m);
        const auto is = [](const char *name, const char *value) {
            const char *text = getenv(name);
            return text && !strcmp(text, value);
        };
        const char *host = getenv("NCCL_HOSTID");
        gethostname(m.machine, sizeof m.machine - 1);
        snprintf(m.host, sizeof m.host, "%s", host ? host : m.machine);
        m.sockets = is("NCCL_P2P_DISABLE", "1") && is("NCCL_SHM_DISABLE", "1") &&
                    is("NCCL_NET", "Socket") && is("NCCL_SOCKET_IFNAME", "lo");
        return m;
    }();
    return found;
}
// Returns whether another member is on the same GPU, as NCCL sees it.
static inline bool emu_nccl_duplicate(const std::vector<EmuNcclMember> &members, int me) {
    for (const EmuNcclMember &m : members) {
        const EmuNcclMember &mine = members[(size_t)me];
        if (m.me == me || m.device != mine.device || strcmp(m.machine, mine.machine)) { continue; }
        if (!strcmp(m.host, mine.host)) { return true; }
        if (!mine.sockets) { emu_fail("NCCL: members on one GPU have other ways than sockets"); }
    }
    return false;
}
static inline ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    static int made;
    emu_nccl_process();
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    const int numbers[2] = {rank, 100 + 64 * made++ + rank};
    memset(id, 0, sizeof *id);
    memcpy(id->internal, numbers, sizeof numbers);
    return ncclSuccess;
}
// The members describe themselves to the rank that made the id, which sends all of them back.
static inline void emu_nccl_meet(EmuNcclComm *c, int root, std::vector<EmuNcclMember> &members) {
    EmuNcclMember mine = emu_nccl_process();
    const int bytes = (int)sizeof mine, n = c->n;
    MPI_Comm_rank(MPI_COMM_WORLD, &mine.world);
    mine.me = c->me;
    (void)cudaGetDevice(&mine.device);
    members.resize((size_t)n);
    members[(size_t)c->me] = mine;
    if (mine.world != root) {
        MPI_Send(&mine, bytes, MPI_BYTE, root, c->tag, MPI_COMM_WORLD);
        MPI_Recv(members.data(), n * bytes, MPI_BYTE, root, c->tag, MPI_COMM_WORLD,
                 MPI_STATUS_IGNORE);
        return;
    }
    for (int i = 1; i < n; i++) {
        EmuNcclMember m;
        MPI_Recv(&m, bytes, MPI_BYTE, MPI_ANY_SOURCE, c->tag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        members[(size_t)m.me] = m;
    }
    for (const EmuNcclMember &m : members) {
        if (m.me != c->me) {
            MPI_Send(members.data(), n * bytes, MPI_BYTE, m.world, c->tag, MPI_COMM_WORLD);
        }
    }
}
static inline ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int n, ncclUniqueId id, int me,
                                                  ncclConfig_t *config) {
    int numbers[2];
    std::vector<EmuNcclMember> members;
    memcpy(numbers, id.internal, sizeof numbers);
    EmuNcclComm *c = *comm = new EmuNcclComm();
    c->me = me;
    c->n = n;
    c->tag = numbers[1];
    c->sends.resize((size_t)n);
    c->receives.resize((size_t)n);
    c->in_progress = true;
    emu_nccl_meet(c, numbers[0], members);
    for (const EmuNcclMember &m : members) { c->ranks.push_back(m.world); }
    if (emu_nccl_duplicate(members, me)) { return ncclInvalidUsage; }
    // only what the program uses is emulated
    return config->blocking ? ncclInvalidArgument : ncclInProgress;
}
static inline void emu_nccl_enter(ncclComm_t c) {
    if (c->in_progress) { emu_fail("NCCL: a call while another is in progress"); }
}
static inline ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *state) {
    static const long bad = getenv("EMU_NCCL_ERROR") ? atol(getenv("EMU_NCCL_ERROR")) : 0;
    static long looks;
    *state = ++looks >= bad && bad           ? ncclRemoteError
             : c->in_progress && emu_draw(2) ? ncclInProgress
                                             : ncclSuccess;
    if (*state == ncclSuccess) { c->in_progress = false; }
    if (*state == ncclSuccess && !c->called.empty()) {
        auto run = std::make_shared<EmuNcclRun>();
        run->comm = c;
        run->ops.swap(c->called);
        run->begun = false;
        emu_nccl_number(*run);
        c->stream->queue.push_back({NULL, NULL, 0, [=] { return emu_nccl_attempt(*run); }, false});
    }
    return ncclSuccess;
}
static inline ncclResult_t ncclGroupStart() {
    emu_nccl_depth++;
    return ncclSuccess;
}
static inline ncclResult_t ncclGroupEnd() {
    if (--emu_nccl_depth) { return ncclSuccess; }
    for (ncclComm_t c : emu_nccl_touched) { c->in_progress = true; }
    emu_nccl_touched.clear();
    return ncclInProgress;
}
static inline ncclResult_t emu_nccl_call(ncclComm_t c, cudaStream_t stream, EmuNcclOp op) {
    emu_nccl_enter(c);
    ncclGroupStart();
    op.registered = (uint64_t)c->registered;
    emu_nccl_collectives += !emu_nccl_pairwise(op);
    c->called.push_back(op);
    c->stream = stream;
    emu_nccl_touched.push_back(c);
    return ncclGroupEnd();
}
static inline ncclResult_t ncclAllGather(const void *in, void *out, size_t count,
                                         ncclDataType_t type, ncclComm_t c, cudaStream_t s) {
    return emu_nccl_call(c, s, {EMU_ALL_GATHER, in, out, count, type, 0, 0});
}
static inline ncclResult_t ncclReduceScatter(const void *in, void *out, size_t count,
                                             ncclDataType_t type, ncclRedOp_t, ncclComm_t c,
                                             cudaStream_t s) {
    return emu_nccl_call(c, s, {EMU_REDUCE_SCATTER, in, out, count, type, 0, 0});
}
static inline ncclResult_t ncclAllReduce(const void *in, void *out, size_t count,
                                         ncclDataType_t type, ncclRedOp_t, ncclComm_t c,
                                         cudaStream_t s) {
    return emu_nccl_call(c, s, {EMU_ALL_REDUCE, in, out, count, type, 0, 0});
}
static inline ncclResult_t ncclSend(const void *in, size_t count, ncclDataType_t type, int peer,
                                    ncclComm_t c, cudaStream_t s) {
    return emu_nccl_call(c, s, {EMU_SEND, in, NULL, count, type, peer, 0});
}
static inline ncclResult_t ncclRecv(void *out, size_t count, ncclDataType_t type, int peer,
                                    ncclComm_t c, cudaStream_t s) {
    return emu_nccl_call(c, s, {EMU_RECV, NULL, out, count, type, peer, 0});
}
static inline ncclResult_t ncclCommRegister(ncclComm_t c, void *p, size_t bytes, void **handle) {
    const EmuMemory *m = emu_find(p);
    if (!m || m->place != EMU_DEVICE || (char *)p + bytes > m->mapped + m->pages) {
        return ncclInvalidArgument;
    }
    // EMU_NCCL_REFUSES is the rank of the job on which memory cannot be registered.
    const char *refused = getenv("EMU_NCCL_REFUSES");
    if (refused && atoi(refused) == c->ranks[(size_t)c->me]) { return ncclSystemError; }
    c->registered++;
    *handle = p;
    return ncclSuccess;
}
static inline ncclResult_t ncclCommDeregister(ncclComm_t c, void *) {
    c->registered--;
    return ncclSuccess;
}
static inline ncclResult_t ncclCommFinalize(ncclComm_t c) {
    emu_nccl_enter(c);
    c->in_progress = true;
    return ncclInProgress;
}
static inline ncclResult_t ncclCommDestroy(ncclComm_t c) {
    emu_nccl_enter(c);
    if (c->registered) { emu_fail("NCCL: memory is still registered"); }
    delete c;
    return ncclSuccess;
}

#endif
