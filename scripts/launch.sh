#!/usr/bin/env bash
# launch.sh: starts a training run under mpirun and, after a crash, starts it again from its newest
# checkpoint.
#
#   scripts/launch.sh [option ...] -- ./train_gpt --flag value ...
#
#   --restarts N                how often to start again without progress before giving up (default
#                               3). A newer checkpoint in the program's --out is progress and begins
#                               the count anew.
#   --ranks R                   ranks on this machine, more than cores too; or mpirun's own -np R,
#                               --hostfile FILE ...
#   --continue                  resume at the first start too, if --out holds a checkpoint: one
#                               command for both
#   --retry-resources SECONDS   exit 3 (disk, memory) counts as a crash, after so many seconds; it
#                               ends the run otherwise
#   anything else               an option of mpirun
#
# A restart takes --resume 1 if this run has a checkpoint (never one that lay in --out before a run
# that does not resume), and begins anew otherwise. Before it, what is left of the last start is
# killed, and OUT/lock must be free. SIGTERM, SIGINT, SIGHUP and SIGUSR1 stop the run gracefully: it
# saves and ends with 0. The second one ends it at once, as far as mpirun does; the third kills what
# is on this machine. Exit status: 0 done or stopped, 2 bad input (never retried), 3 resources, 4
# crashed and out of restarts, 128 + n ended by a second signal n.
set -euo pipefail
lock_wait=60  # seconds for another process to let OUT/lock go
alone_limit=5 # looks, 2 seconds apart, that mpirun may live without its ranks

say() { echo "launch: $*" >&2; }
refuse() {
    say "$*"
    exit 2
}
whole_number() { [[ ${2-} =~ ^[0-9]+$ ]] || refuse "$1 takes a whole number, found ${2-nothing}"; }

restarts=3 continue=0 retry_after='' options=()
while (($#)) && [ "$1" != -- ]; do
    case $1 in
    --continue) continue=1 ;;
    --restarts | --ranks | --retry-resources)
        whole_number "$@"
        case $1 in
        --restarts) restarts=$2 ;;
        --ranks) options+=(--oversubscribe -np "$2") ;;
        --retry-resources) retry_after=$2 ;;
        esac
        shift
        ;;
    *) options+=("$1") ;;
    esac
    shift
done
(($# > 1)) || refuse "usage: scripts/launch.sh [--restarts N] [--ranks R] [--continue]" \
    "[mpirun options] -- ./train_gpt --flags"
program=$2
command -v "$program" >/dev/null || refuse "$program cannot be run: build it with make"
shift 2

# Of the program's flags: the folder of its checkpoints, and whether it resumes in any case. The
# last one counts, so starts that resume add theirs behind, and those of a file (--config) come
# first.
out='' resumes=0 resume=$continue flags=("$@") config=''
for ((i = 1; i <= $#; i++)); do
    case ${!i} in
    --config) next=$((i + 1)) config=${!next-} ;;
    --config=*) config=${!i#*=} ;;
    esac
done
if [ -f "$config" ]; then
    mapfile -t lines < <(sed -nE "s/(^|[[:space:]]+)#.*//; s/[[:space:]]+$//
        s/^[[:space:]]*((--)?resume|-y)$/--resume=1/
        s/^[[:space:]]*((--)?out|-o)([[:space:]]*=[[:space:]]*|[[:space:]]+)/--out=/
        s/^[[:space:]]*((--)?resume|-y)([[:space:]]*=[[:space:]]*|[[:space:]]+)/--resume=/
        s/^(--(out|resume)=)[\"']?([^\"']*)[\"']?$/\1\3/p" "$config")
    set -- "${lines[@]}" "$@"
fi
while (($#)); do
    case $1 in
    --out | -o) out=${2-} ;;
    --out=*) out=${1#*=} ;;
    --resume=[01]) resumes=${1#*=} ;;
    --resume | -y) resumes=1 && [ "${2-}" != 0 ] || resumes=0 ;;
    esac
    shift
done

# --------------------------------------------------------------------------------------------------
# Checkpoints: a line "inode OUT/step_N/manifest" each. Names are those that train_gpt makes: 8 to
# 18 digits, zeros only to 8.

names='/step_([0-9]{8}|[1-9][0-9]{8,17})/manifest$'
checkpoints() {
    [ -n "$out" ] || return 0
    stat -c '%i %n' "$out"/step_*[0-9]/manifest 2>/dev/null | grep -E "$names" || true
}
newest() { checkpoints | grep -vxFf <(echo "$earlier") | sort -V -k 2 | tail -n 1 || true; }

# --------------------------------------------------------------------------------------------------
# mpirun has a session of its own, so that Ctrl-C reaches this script alone, and so that its ranks
# are known

# Prints the processes of mpirun's session, those aside that only wait for their parent to take note
# of their end.
session() {
    local file line
    for file in /proc/[0-9]*/stat; do
        { read -r line <"$file"; } 2>/dev/null || continue
        if [[ ${line##*) } =~ ^[^ZX]\ [0-9]+\ [0-9]+\ $mpirun\  ]]; then echo "${line%% *}"; fi
    done
}

start() {
    local command=(mpirun "${options[@]}" "$program" "${flags[@]}")
    if ((resume && !resumes)) && [ -n "$(newest)" ]; then command+=(--resume 1); fi
    setsid "${command[@]}" </dev/null &
    mpirun=$!
    ((stops == 0)) || kill -USR1 "$mpirun"
}

# Waits until mpirun has ended; sets status. Open MPI 4.1 may hang when a rank dies while the ranks
# connect: an mpirun that had ranks here and has been without for some time is killed. It also loses
# a SIGUSR1 that comes before its ranks are there: a stop is asked for again and again.
await() {
    local processes seen=0 alone=0 tick
    while kill -0 "$mpirun" 2>/dev/null; do
        sleep 2 &
        tick=$!
        wait -n "$mpirun" "$tick" 2>/dev/null || true
        if ! kill "$tick" 2>/dev/null; then # two seconds have passed
            processes=$(session | wc -l)
            if ((processes > 1)); then seen=1 alone=0; else alone=$((alone + seen)); fi
            if ((alone > alone_limit)); then kill -KILL "$mpirun" 2>/dev/null || true; fi
            if ((stops == 1)); then kill -USR1 "$mpirun" 2>/dev/null || true; fi
        fi
        wait "$tick" 2>/dev/null || true
    done
    status=0
    wait "$mpirun" 2>/dev/null || status=$?
}

# Kills what is left of the session, and removes what it had: an mpirun that ended by itself leaves
# nothing, a killed one leaves its ranks, on their way or stuck, and Open MPI's files.
end_session() {
    local left pid files='' end=$((SECONDS + 30))
    [ -n "$mpirun" ] || return 0
    while left=$(session) && [ -n "$left" ]; do
        if ((SECONDS > end)); then
            say "processes that cannot be killed: ${left//$'\n'/ }"
            return 1
        fi
        for pid in $left; do
            files+=" $(grep -os '/dev/shm/vader_segment.*' "/proc/$pid/maps" || true)"
        done
        xargs kill -KILL <<<"$left" 2>/dev/null || true
        sleep 0.05
    done
    # shellcheck disable=SC2086 # a list of words
    rm -rf $files "${TMPDIR:-/tmp}"/ompi.*."$(id -u)/pid.$mpirun"
}

# A process of an earlier start, on another machine perhaps, may still hold the lock. Past the limit
# the program says so.
await_lock() {
    [ -z "$out" ] || [ ! -e "$out/lock" ] || flock --timeout "$lock_wait" "$out/lock" true || true
}

stop() { # NAME NUMBER
    stops=$((stops + 1))
    case $stops in
    1)
        say "SIG$1: the run saves and stops after this step (once more: ends at once)"
        [ -z "$mpirun" ] || kill -USR1 "$mpirun" 2>/dev/null || true
        ;;
    2)
        ended_by=$2
        [ -z "$mpirun" ] || kill -TERM "$mpirun" 2>/dev/null || true
        ;;
    *) end_session ;;
    esac
}

pause() { # SECONDS, or until a signal
    sleep "$1" &
    wait $! || true
}

# --------------------------------------------------------------------------------------------------
if [ "$(id -u)" = 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
# By default a crash costs 2 s more.
export OMPI_MCA_odls_base_sigkill_timeout="${OMPI_MCA_odls_base_sigkill_timeout-0}"
# A host that cannot be reached is missed after 5 + 3 x 2 seconds; by default after 8 minutes.
export OMPI_MCA_oob_tcp_keepalive_time="${OMPI_MCA_oob_tcp_keepalive_time-5}"
export OMPI_MCA_oob_tcp_keepalive_intvl="${OMPI_MCA_oob_tcp_keepalive_intvl-2}"
export OMPI_MCA_oob_tcp_keepalive_probes="${OMPI_MCA_oob_tcp_keepalive_probes-3}"
mpirun='' stops=0 ended_by='' failures=0 earlier=''
((resume || resumes)) || earlier=$(checkpoints)
reached=$(newest)
trap end_session EXIT
for name in USR1 TERM INT HUP; do
    # shellcheck disable=SC2064 # the name of this turn
    trap "stop $name $(kill -l $name)" "$name"
done

while :; do
    start
    await
    end_session || exit 4
    [ -z "$ended_by" ] || exit $((128 + ended_by))
    ((status != 0 && status != 2)) || exit "$status"
    if ((stops && status == 138)); then # the signal came before the program could hear it
        say "stopped before the first step"
        exit 0
    fi
    code=$((status == 3 ? 3 : 4))
    if ((stops)) || { ((status == 3)) && [ -z "$retry_after" ]; }; then exit "$code"; fi
    now=$(newest)
    if [ "$now" != "$reached" ]; then reached=$now failures=0; fi
    if ((failures == restarts)); then
        say "crashed (mpirun: $status):" \
            "giving up after $restarts restarts without a newer checkpoint"
        exit "$code"
    fi
    failures=$((failures + 1))
    resume=1
    from=${reached#* } from=${from%/manifest}
    say "crashed (mpirun: $status): restart $failures of $restarts, from ${from:-the beginning}"
    ((status != 3)) || pause "$retry_after"
    await_lock
done
