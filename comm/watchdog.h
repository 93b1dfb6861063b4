// watchdog.h: how a rank that is lost, stopped or stuck is found, and how the job then ends.
//
// A waiting rank watches the ranks that it waits for. For ranks of its own machine it reads in
// /proc whether they have ended or are stopped. It also sends questions to all ranks that it waits
// for. A rank that computes answers from comm_progress(). A rank that waits answers how long ago it
// last saw progress, its own or that of the ranks that it waits for. So a slow rank may take any
// time, and a rank that is lost, stuck or in a circle of waiting ranks is found after timeout_s.
// Time in which this process itself did not run (it was suspended, or the machine was asleep) does
// not count. A lost rank ends all ranks with EXIT_PEER and a message that names the lost rank, the
// operation, the unit and the step.
#ifndef COMM_WATCHDOG_H
#define COMM_WATCHDOG_H

#include "base/base.h"
#include "comm/group.h"
#include "comm/mpi.h"
#include "comm/records.h"
#include <signal.h> // the deadline of MPI's own start and end
#include <spawn.h>  // starts a shell that outlives this rank

// A rank that has answered since this one saw progress is alive: it waits for another one, which it
// finds itself, and says so within this time (die).
static const double COMM_SPEAKS_S = 4;
static const double COMM_STOPPED_S = 2; // a rank of this machine stopped for so long counts as lost
// Seconds between two looks of the watch, between two questions to a rank, and that one look may
// add to the clock.
static const double WATCH_EVERY_S = 0.1, WATCH_ASK_S = 1, WATCH_STEP_S = 0.5;

// -------------------------------------------------------------------------------------------------
// Ending the job

#ifdef OPEN_MPI
// What MPI_Abort() calls after it has sent a notice of eight lines to the screen. Without the
// notice, this program's own message is the last thing there. Weak: another build of the library
// may lack it.
#ifdef __cplusplus
extern "C"
#endif
    int
    ompi_mpi_abort(MPI_Comm comm, int code) __attribute__((weak));
#endif
static inline void comm_abort_job(int code) {
    alarm(5); // in case MPI itself hangs and cannot end the job
#ifdef OPEN_MPI
    if (ompi_mpi_abort) { ompi_mpi_abort(MPI_COMM_WORLD, code); }
#endif
    MPI_Abort(MPI_COMM_WORLD, code);
}

// With Open MPI 4.1, mpirun and its daemons on other hosts wait for ever for a host that they
// cannot reach. This starts a shell that outlives this rank and, after five seconds, kills the
// launcher above this rank if it still runs.
static inline void comm_end_launcher(void) {
    char path[64], name[32] = "", command[96];
    snprintf(path, sizeof path, "/proc/%d/comm", (int)getppid());
    FILE *f = fopen(path, "r");
    bool launcher =
        f && fgets(name, sizeof name, f) &&
        (!strcmp(name, "mpirun\n") || !strcmp(name, "orterun\n") || !strcmp(name, "orted\n"));
    if (f) { fclose(f); }
    if (!launcher) { return; }
    snprintf(command, sizeof command, "exec </dev/null >/dev/null 2>&1; sleep 5; kill -9 %d",
             (int)getppid());
    char shell[] = "sh", option[] = "-c", *words[] = {shell, option, command, NULL};
    pid_t pid;
    posix_spawnattr_t own_session;
    posix_spawnattr_init(&own_session);
    posix_spawnattr_setflags(&own_session, POSIX_SPAWN_SETSID);
    posix_spawnp(&pid, shell, NULL, &own_session, words, environ);
    posix_spawnattr_destroy(&own_session);
}

// The watch cannot cover MPI's own start and end. There a deadline ends this rank; mpirun then ends
// the others.
static int comm_deadline_s;
static void comm_deadline_missed(int signal_number) {
    (void)signal_number;
    SignalText t = {"", 0};
    signal_text_print(&t,
                      "train_gpt: rank %d: MPI's start or end took longer than %d s\n"
                      "  hint: a rank is stopped or cut off, or a host cannot be reached\n",
                      speaker.rank, comm_deadline_s);
    signal_text_write(&t);
    _exit(EXIT_PEER);
}
static inline void comm_deadline(int seconds) { // 0: ends the deadline
    comm_deadline_s = seconds;
    signal(SIGALRM, seconds ? comm_deadline_missed : SIG_DFL);
    alarm((unsigned)seconds);
}

// -------------------------------------------------------------------------------------------------
// What this rank waits for

static inline void comm_describe(SignalText *t, const CommOp *op) {
    const CommLabel *label = &op->label;
    const bool message = op->kind == COMM_SEND;
    if (op->counted) { signal_text_print(t, "%s of ", comm_kind_names[op->kind]); }
    signal_text_add(t, label->what ? label->what : "?");
    if (label->unit >= 0) { signal_text_print(t, message ? " of unit %d" : " %d", label->unit); }
    if (message) { signal_text_print(t, op->send ? " to rank %d" : " from rank %d", op->peer); }
    // steps count from 1, as in the log
    signal_text_print(t, ", step %" PRId64, label->step + 1);
}
// Describes what this rank waits for. Safe in signal handlers.
static inline void comm_describe_waiting(const Comm *c, SignalText *t) {
    if (c->awaited) {
        const CommMessage *m = &c->message[c->awaited % COMM_MESSAGES];
        const CommOp op = {.kind = COMM_SEND, .label = m->label, .send = m->send, .peer = m->peer};
        comm_describe(t, &op);
    } else if (c->transport.waits) {
        comm_describe(t, c->transport.waits);
    } else if (c->first < c->started) {
        comm_describe(t, &c->queue[c->first % COMM_QUEUE]);
    } else {
        signal_text_add(t, "no collective");
    }
}
// Ends the program (EXIT_PEER) if an MPI call for a message failed. peer: the other rank, or -1.
static inline void comm_check(const Comm *c, int error, int peer) {
    if (error == MPI_SUCCESS) { return; }
    char text[MPI_MAX_ERROR_STRING] = "", with[96] = "";
    SignalText what = {"", 0};
    int n;
    MPI_Error_string(error, text, &n);
    comm_describe_waiting(c, &what);
    if (peer >= 0) {
        snprintf(with, sizeof with, " with rank %d on %s", peer, c->peers[peer].place.host);
    }
    die(EXIT_PEER, "another rank has ended; its message says why", "a message%s failed in %s: %s",
        with, what.text, text);
}

// Posts one message of MPI.
static inline void comm_post_part(const Comm *c, bool send, void *data, size_t bytes, int rank,
                                  int tag, MPI_Request *request) {
    const int n = (int)bytes;
    comm_check(c,
               send ? MPI_Isend(data, n, MPI_BYTE, rank, tag, c->world, request)
                    : MPI_Irecv(data, n, MPI_BYTE, rank, tag, c->world, request),
               rank);
}

// Marks the ranks that this rank waits for: those that the device waits for, and the other ends of
// the message or of the collective that the host waits for.
static inline void comm_mark_awaited(Comm *c) {
    const CommOp *far = c->transport.waits;
    for (int r = 0; r < c->ranks; r++) { c->peers[r].awaited = false; }
    if (far && far->kind == COMM_SEND) { c->peers[far->peer].awaited = true; }
    for (int i = 0; far && far->group && i < far->group->n; i++) {
        c->peers[far->group->ranks[i]].awaited = i != far->group->me;
    }
    if (c->awaited) {
        c->peers[c->message[c->awaited % COMM_MESSAGES].peer].awaited = true;
        return;
    }
    for (int i = 0; i < COMM_SLOTS; i++) {
        for (int k = 0; k < c->slot[i].requests; k++) {
            int done = 1;
            if (c->slot[i].request[k] != MPI_REQUEST_NULL) {
                MPI_Request_get_status(c->slot[i].request[k], &done, MPI_STATUS_IGNORE);
            }
            if (!done) { c->peers[c->slot[i].peer[k]].awaited = true; }
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Where the ranks run

// Reads the state letter and the start time of a process from /proc. Returns false if it cannot.
static inline bool process_look(int64_t pid, char *state, int64_t *began) {
    char path[64], line[1024];
    snprintf(path, sizeof path, "/proc/%" PRId64 "/stat", pid);
    FILE *f = fopen(path, "r");
    if (!f) { return false; }
    // the process name before it may contain any character
    char *rest = fgets(line, sizeof line, f) ? strrchr(line, ')') : NULL;
    fclose(f);
    if (!rest || rest[1] != ' ') { return false; }
    *state = rest[2];
    for (int field = 2; rest && field < 22; field++) { rest = strchr(rest + 1, ' '); }
    *began = rest ? atoll(rest) : 0;
    return rest != NULL;
}
// Exchanges where the ranks run, and begins to listen for questions. leader_of: [ranks] the same
// number for all ranks of a machine. All ranks call it.
static inline void comm_meet(Comm *c, const int *leader_of) {
    CommPlace mine, *all = new_array(CommPlace, c->ranks, "ranks");
    memset(&mine, 0, sizeof mine);
    gethostname(mine.host, sizeof mine.host - 1);
    char state;
    mine.pid = getpid();
    process_look(mine.pid, &state, &mine.began);
    MPI_Allgather(&mine, (int)sizeof mine, MPI_BYTE, all, (int)sizeof mine, MPI_BYTE, c->world);
    c->peers = new_array(CommPeer, c->ranks, "ranks");
    for (int r = 0; r < c->ranks; r++) {
        CommPeer *p = &c->peers[r];
        int64_t began;
        p->place = all[r];
        p->stopped = -1;
        p->sending[0] = p->sending[1] = MPI_REQUEST_NULL;
        p->visible = leader_of[r] == leader_of[c->rank] &&
                     process_look(p->place.pid, &state, &began) && began == p->place.began;
    }
    free(all);
    MPI_Recv_init(&c->heard, 1, MPI_INT64_T, MPI_ANY_SOURCE, MPI_ANY_TAG, c->questions,
                  &c->hearing);
    MPI_Start(&c->hearing);
}

// -------------------------------------------------------------------------------------------------
// Questions and answers. A question carries any number. An answer carries the milliseconds since
// the rank last saw progress.

// Sends a question or an answer to a rank. Does nothing while the previous one is still in flight:
// then the rank is not listening.
static inline void comm_send_watch_message(Comm *c, int rank, int tag, int64_t number) {
    CommPeer *p = &c->peers[rank];
    int which = tag == TAG_ANSWER, done = 1;
    if (p->sending[which] != MPI_REQUEST_NULL) {
        MPI_Test(&p->sending[which], &done, MPI_STATUS_IGNORE);
    }
    if (!done) { return; }
    p->sent[which] = number;
    MPI_Isend(&p->sent[which], 1, MPI_INT64_T, rank, tag, c->questions, &p->sending[which]);
}
// Handles the questions and answers that have arrived. working: this rank is computing.
static inline void comm_listen(Comm *c, bool working) {
    MPI_Status status;
    int come = 1;
    for (MPI_Test(&c->hearing, &come, &status); come; MPI_Test(&c->hearing, &come, &status)) {
        CommPeer *p = &c->peers[status.MPI_SOURCE];
        if (status.MPI_TAG == TAG_ANSWER) {
            p->last_progress = fmax(p->last_progress, c->clock - (double)c->heard * 1e-3);
            p->answered = c->clock;
        } else {
            double fresh = working ? c->clock : c->last_progress;
            for (int r = 0; r < c->ranks && !working; r++) {
                fresh = c->peers[r].awaited ? fmax(fresh, c->peers[r].last_progress) : fresh;
            }
            comm_send_watch_message(c, status.MPI_SOURCE, TAG_ANSWER,
                                    (int64_t)((c->clock - fresh) * 1e3));
        }
        MPI_Start(&c->hearing);
    }
}

// -------------------------------------------------------------------------------------------------
// The watch

// Ends the job because a rank is lost.
__attribute__((noreturn)) static inline void comm_lost(const Comm *c, int rank, const char *how,
                                                       double seconds) {
    SignalText what = {"", 0};
    const char *host = c->peers[rank].place.host;
    comm_describe_waiting(c, &what);
    if (strcmp(host, c->peers[c->rank].place.host)) { comm_end_launcher(); }
    die(EXIT_PEER,
        "--resume 1 goes on from the newest checkpoint; --watchdog sets how long a rank may be "
        "silent",
        "lost rank %d on %s: %s for %.1f s, in %s", rank, host, how, seconds, what.text);
}
// Looks in /proc at a rank of this machine; ends the job if it has ended or is stopped.
static inline void comm_look_at(Comm *c, int rank) {
    CommPeer *p = &c->peers[rank];
    char state = 'X';
    int64_t began = 0;
    bool there = process_look(p->place.pid, &state, &began) && began == p->place.began &&
                 state != 'Z' && state != 'X';
    if (!there) { comm_lost(c, rank, "it has ended; waited", c->clock - c->last_progress); }
    if (state != 'T') {
        p->stopped = -1;
    } else if (p->stopped < 0) {
        p->stopped = c->clock;
    } else if (c->clock - p->stopped > COMM_STOPPED_S) {
        comm_lost(c, rank, "it is stopped, seen", c->clock - p->stopped);
    }
}
// Takes the time, handles questions, and looks at the ranks that this one waits for.
static inline void comm_watch(Comm *c) {
    double now = seconds_now();
    // a longer step means that this process did not run
    c->clock += fmin(now - c->looked, WATCH_STEP_S);
    c->looked = now;
    comm_listen(c, false);
    if (c->timeout_s <= 0 || c->clock - c->last_progress < 0.5) { return; }
    comm_mark_awaited(c);
    for (int r = 0; r < c->ranks; r++) {
        CommPeer *p = &c->peers[r];
        if (!p->awaited) { continue; }
        if (p->visible) { comm_look_at(c, r); }
        if (c->clock - p->asked > fmin(WATCH_ASK_S, c->timeout_s / 4)) {
            p->asked = c->clock;
            comm_send_watch_message(c, r, TAG_QUESTION, 0);
        }
        const double silent = c->clock - fmax(p->last_progress, c->last_progress),
                     limit = c->timeout_s + (p->answered > c->last_progress ? COMM_SPEAKS_S : 0);
        if (silent > limit) { comm_lost(c, r, "no sign of progress", silent); }
    }
}

#endif
