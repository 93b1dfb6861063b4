#!/usr/bin/env bash
# cluster.sh: one Linux machine as a cluster. N nodes of M ranks, a network of a chosen speed
# between the nodes, and for each rank a share of a core and of memory. For root. What was measured
# on a laptop then says something about a cluster. Nodes may differ: 1x2+2x1 is one node of two
# ranks, then two nodes of one.
#
#   scripts/cluster.sh 2x2 --rate 200mbit --cpu 25 -- ./train_gpt FLAG...
#                                                    makes a cluster of 2 nodes with 2 ranks each,
#                                                    runs the program on its 4 ranks, and removes
#                                                    the cluster
#   scripts/cluster.sh up 2x2 --rate 200mbit         makes one that stays, and prints its name
#   scripts/cluster.sh run -- ./train_gpt FLAG...    runs on it, one run at a time
#   scripts/cluster.sh cut NODE | mend NODE          pulls the cable of node 0, 1, ...; plugs it in
#                                                    again. Also during a run
#   scripts/cluster.sh down [--all]                  removes it, and whatever goes on in it; also
#                                                    what a kill -9 has left
#   scripts/cluster.sh list | check                  which clusters are there; can this machine have
#                                                    one (with these options)?
#
#   --rate RATE      of every node's link, in each direction, as tc writes it: 200mbit, 2.5gbit
#                    (default: unlimited)
#   --latency TIME   added to every message between nodes: 100us, 2ms (default: none; needs
#                    netem in the kernel)
#   --cpu PERCENT    of one core, for each rank, at least 10 (default: no limit). A rank cannot
#                    borrow what another leaves idle. 90,45: for the ranks of each node in turn
#   --memory SIZE    of each rank: 512M, 2G (default: no limit). A rank that takes more is killed
#   --name NAME      of the cluster (default: a free one, or the only one there is)
#   --json FILE      of a run: {"nodes":[{"name":"node0","sent":BYTES,"received":BYTES},...],
#                    "seconds":S,"status":CODE}
#
# After a run, stderr and --json tell what each node's interface sent and received meanwhile.
# SIGUSR1 goes on to mpirun; Ctrl-C and SIGTERM end the run (and the one-shot form's cluster). Exit
# status: the command's, or 0 done, 2 bad usage, 3 the cluster could not be made, 77 this machine
# lacks what it takes: every missing thing is named.
#
# How. One process, the switch, is the first of a PID namespace that everything else of the cluster
# lives in, and has a network namespace with a bridge: when it dies, the kernel ends all other
# processes, and with them go the namespaces, the links and the mounts. A node is a process with its
# own network, host name, /etc/hosts and /dev/shm (or shared memory of Open MPI's nodes would
# collide), and a cable (veth) into the bridge. The rate is set at both ends of the cable; frames
# are those of a cluster, 9000 bytes. mpirun runs on node0 and reaches the others through this
# script in place of ssh. Each node sees only the cores of its own ranks. The machine's own network
# is not touched, so clusters side by side never meet. Quotas are cgroups (version 1 or 2, whichever
# has the controller) below the caller's own, so that limits on the caller hold.
set -euo pipefail

self=$(realpath "$0")
states=/run/train_gpt_cluster # a folder per cluster
network=10.98.0               # node n is .n+1; clusters do not see each other
name='' rate='' latency='' cpu='' memory='' json='' everything='' words=() command=()
status_input=2 status_failed=3 status_missing=77
gso_bytes=16384 # what leaves a node at once: the smaller, the smoother the rate
burst_bytes=20000

say() { echo "cluster: $*" >&2; }
fail() { # STATUS WORD...
    say "${@:2}"
    exit "$1"
}

# --------------------------------------------------------------------------------------------------
# Input
parse() {
    while [ $# -gt 0 ]; do
        case $1 in
        --rate | --latency | --cpu | --memory | --name | --json)
            [ $# -gt 1 ] || fail $status_input "$1 needs a value"
            printf -v "${1#--}" %s "$2"
            shift
            ;;
        --all) everything=yes ;;
        --)
            shift
            command=("$@")
            return
            ;;
        -*) fail $status_input "unknown option $1; \`$0 --help\` lists them" ;;
        *) words+=("$1") ;;
        esac
        shift
    done
}

need_command() { [ ${#command[@]} -gt 0 ] ||
    fail $status_input "what shall run? -- COMMAND ARGUMENT..."; }

take_shape() { # SHAPE: sets nodes, sizes (the ranks of each node) and ranks (of all)
    local part n
    [[ $1 =~ ^[1-9][0-9]?x[1-9][0-9]?(\+[1-9][0-9]?x[1-9][0-9]?)*$ ]] ||
        fail $status_input "'$1' is no cluster: nodes x ranks per node, such as 2x2 or 1x2+2x1"
    nodes=0 sizes='' ranks=0
    for part in ${1//+/ }; do
        for ((n = 0; n < ${part%x*}; n++)); do sizes+=${sizes:+ }${part#*x}; done
        nodes=$((nodes + ${part%x*}))
        ranks=$((ranks + ${part%x*} * ${part#*x}))
    done
    [ $nodes -le 99 ] || fail $status_input "'$1': at most 99 nodes"
}
check_cpu() { # one share, or one for each node
    local share shares most
    [ -n "$cpu" ] || return 0
    [[ $cpu =~ ^[1-9][0-9]{1,5}(,[1-9][0-9]{1,5})*$ ]] ||
        fail $status_input "--cpu $cpu is no percentage of a core of at least 10"
    shares=$(wc -w <<<"${cpu//,/ }")
    [ "$shares" = 1 ] || [ "$shares" = "$nodes" ] ||
        fail $status_input "--cpu $cpu: $shares shares for $nodes nodes; give one, or one for each"
    most=$(most_cpu)
    for share in ${cpu//,/ }; do
        [ "$share" -le "$most" ] ||
            fail $status_input "--cpu $cpu: $ranks ranks on $(wc -w <<<"$cores") cores" \
                "get at most $most each"
    done
}
check_input() { # SHAPE: sets nodes, sizes, ranks, cores
    take_shape "$1"
    cores=$(own_cores)
    [[ $name =~ ^[A-Za-z0-9_-]*$ ]] ||
        fail $status_input "--name $name: letters, digits, - and _ only"
    [[ $memory =~ ^([1-9][0-9]*[KMG]?)?$ ]] ||
        fail $status_input "--memory $memory is no size such as 512M or 2G"
    check_cpu
    [ -z "$rate" ] ||
        probe tc qdisc add dev lo root tbf rate "$rate" burst $burst_bytes latency 400ms ||
        fail $status_input "--rate $rate is no rate that tc knows, such as 200mbit"
    [ -z "$latency" ] || probe tc qdisc add dev lo root netem delay "$latency" ||
        fail $status_input "--latency $latency is no time that tc knows, such as 2ms"
}

# --------------------------------------------------------------------------------------------------
# What the machine has
probe() { unshare --pid --fork --net --uts --ipc --mount -- "$@" >/dev/null 2>&1; }

# check_machine: ends with status 77 and names what is missing, if anything is.
check_machine() {
    local missing=() need
    [ "$(uname -s)" = Linux ] || missing+=("Linux")
    [ "$(id -u)" = 0 ] || missing+=("to be root")
    for need in ip tc unshare nsenter setsid taskset flock mpirun; do
        command -v "$need" >/dev/null || missing+=("the command $need")
    done
    if [ ${#missing[@]} = 0 ]; then
        if probe true; then
            probe ip link add name probe type bridge || missing+=("bridges (CONFIG_BRIDGE)")
            probe ip link add name probe type veth || missing+=("veth links (CONFIG_VETH)")
            probe tc qdisc add dev lo root tbf rate 1mbit burst $burst_bytes latency 400ms ||
                missing+=("the tbf queue (CONFIG_NET_SCH_TBF)")
            [ -z "$latency" ] || probe tc qdisc add dev lo root netem delay 1ms ||
                missing+=("for --latency: the netem queue (CONFIG_NET_SCH_NETEM)")
        else
            missing+=("the right to make namespaces (in a container: a privileged one)")
        fi
        [ -z "$cpu" ] || cgroup_parent cpu >/dev/null ||
            missing+=("for --cpu: a cgroup that passes on the cpu controller")
        [ -z "$memory" ] || cgroup_parent memory >/dev/null ||
            missing+=("for --memory: a cgroup that passes on the memory controller")
    fi
    [ ${#missing[@]} = 0 ] ||
        fail $status_missing "this machine cannot be a cluster; missing:" \
            "$(printf '%s; ' "${missing[@]}" | sed 's/; $//')"
}

own_cores() { # prints the numbers of the cores that this process may use
    local part
    for part in $(sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' /proc/self/status | tr , ' '); do
        seq -s ' ' "${part%-*}" "${part#*-}"
    done | paste -sd' '
}
# Cores of one rank: the largest quota in whole cores, or its part of the machine.
cores_per_rank() {
    local machine each share
    machine=$(wc -w <<<"$cores")
    each=$((machine / ranks))
    [ -z "$cpu" ] || each=0
    for share in ${cpu//,/ }; do
        each=$(((share + 99) / 100 > each ? (share + 99) / 100 : each))
    done
    echo $((each ? each : 1))
}
# The largest quota that all ranks can have at once, each on cores of its own or sharing one.
most_cpu() {
    local machine
    machine=$(wc -w <<<"$cores")
    if ((ranks <= machine)); then
        echo $((100 * (machine / ranks)))
    else
        echo $((100 / ((ranks + machine - 1) / machine)))
    fi
}
# Prints the cores that a node's ranks live on, for taskset; more ranks than cores go round.
node_cores() { # NODE
    local all of list='' i n each first=0 count
    read -ra all <<<"$cores"
    read -ra of <<<"$sizes"
    each=$(cores_per_rank)
    for ((n = 0; n < $1; n++)); do first=$((first + of[n] * each)); done
    count=$((of[$1] * each))
    for ((i = 0; i < count && i < ${#all[@]}; i++)); do
        list+=,${all[(first + i) % ${#all[@]}]}
    done
    echo "${list#,}"
}

# --------------------------------------------------------------------------------------------------
# Quotas: cgroups. Version 2 is told by its cgroup.subtree_control, which names the controllers that
# children have.
cgroup_passes_on() { grep -qw "$2" "$1/cgroup.subtree_control" 2>/dev/null; } # DIRECTORY CONTROLLER

# Prints the directory below which cgroups with this controller can be made: the caller's own
# cgroup; in version 2, where one with processes cannot pass controllers on, its nearest ancestor
# that does, or else the root.
cgroup_parent() { # CONTROLLER
    local mount type options own
    while read -r _ mount type options _; do
        [[ $type = cgroup && ,$options, = *,$1,* ]] || continue
        own=$mount$(awk -F: -v c="$1" '("," $2 ",") ~ ("," c ",") { print $3 }' /proc/self/cgroup)
        # a container may see only its own part
        if [ -d "$own" ]; then echo "$own"; else echo "$mount"; fi
        return
    done </proc/self/mounts
    while read -r _ mount type _; do
        if [ "$type" != cgroup2 ] || ! grep -qw "$1" "$mount/cgroup.controllers"; then continue; fi
        own=$mount$(sed -n 's/^0:://p' /proc/self/cgroup)
        [ -d "$own" ] || own=$mount
        own=${own%/}
        until cgroup_passes_on "$own" "$1" || [ "$own" = "$mount" ]; do own=$(dirname "$own"); done
        # one without processes could; and the root of all, which alone has no type
        if cgroup_passes_on "$own" "$1" || [ -z "$(cat "$own/cgroup.procs")" ] ||
            [ ! -e "$own/cgroup.type" ]; then
            echo "$own"
            return
        fi
    done </proc/self/mounts
    return 1
}

limit_cpu() { # DIRECTORY NODE. The short period makes a rank slow rather than jerky.
    local shares
    read -ra shares <<<"${cpu//,/ }"
    [ ${#shares[@]} -gt 1 ] || shares[$2]=${shares[0]}
    if [ -e "$1/cpu.max" ]; then
        echo "$((shares[$2] * 100)) 10000" >"$1/cpu.max"
    else
        echo 10000 >"$1/cpu.cfs_period_us"
        echo $((shares[$2] * 100)) >"$1/cpu.cfs_quota_us"
    fi
}
limit_memory() { # DIRECTORY NODE. Swapping is no memory.
    if [ -e "$1/memory.max" ]; then
        echo "$memory" >"$1/memory.max"
        [ ! -e "$1/memory.swap.max" ] || echo 0 >"$1/memory.swap.max"
    else
        echo "$memory" >"$1/memory.limit_in_bytes"
        [ ! -e "$1/memory.memsw.limit_in_bytes" ] ||
            echo "$memory" >"$1/memory.memsw.limit_in_bytes"
    fi
}
pass_on() { # DIRECTORY CONTROLLER: version 2 only; noted, to be taken back
    if [ ! -e "$1/cgroup.subtree_control" ] || cgroup_passes_on "$1" "$2"; then return; fi
    echo "$2 $1/cgroup.subtree_control" >>"$state/passed_on"
    echo "+$2" >"$1/cgroup.subtree_control"
}
make_cgroups() { # CONTROLLER: one for each rank, in one of the cluster's own
    local parent top of n i r=0
    parent=$(cgroup_parent "$1")
    read -ra of <<<"$sizes"
    top=$parent/train_gpt_cluster.$name
    echo "$top" >>"$state/cgroups"
    pass_on "$parent" "$1"
    mkdir -p "$top"
    pass_on "$top" "$1"
    for ((n = 0; n < nodes; n++)); do
        for ((i = 0; i < of[n]; i++, r++)); do
            mkdir -p "$top/rank$r"
            "limit_$1" "$top/rank$r" "$n"
        done
    done
    # shellcheck disable=SC2016 # expanded by the rank
    printf 'echo 0 >%q/rank$OMPI_COMM_WORLD_RANK/cgroup.procs\n' "$top" >>"$state/rank"
}
remove_cgroups() {
    local top controller file try
    [ ! -e "$state/cgroups" ] || while read -r top; do
        # ends with the last process in it, which takes the kernel a moment
        for ((try = 0; try < 100; try++)); do
            find "$top" -depth -type d -exec rmdir {} + 2>/dev/null || true
            [ -e "$top" ] || break
            sleep 0.05
        done
        [ ! -e "$top" ] ||
            fail $status_failed "cannot remove $top; what is known of the cluster stays in $state"
    done <"$state/cgroups"
    [ ! -e "$state/passed_on" ] || while read -r controller file; do
        # it may be gone, or somebody else uses it by now
        { echo "-$controller" >"$file"; } 2>/dev/null || true
    done <"$state/passed_on"
}

# --------------------------------------------------------------------------------------------------
# The processes that hold the cluster. These functions run inside of it.
shape_link() { # INTERFACE COMMAND...: the command goes before tc, to reach another network
    local bytes
    if [ -n "$rate" ]; then
        "${@:2}" tc qdisc add dev "$1" root handle 1: tbf rate "$rate" burst $burst_bytes \
            latency 400ms
        # of a second
        bytes=$("${@:2}" tc -j qdisc show dev "$1" | sed -n 's/.*"rate":\([0-9]*\).*/\1/p')
        # timers are good for bursts of a millisecond, not for shorter ones
        ((bytes / 1000 <= burst_bytes)) ||
            "${@:2}" tc qdisc change dev "$1" root handle 1: tbf rate "$rate" \
                burst $((bytes / 1000)) latency 400ms
    fi
}
delay_link() { # INTERFACE
    [ -n "$latency" ] || return 0
    # shellcheck disable=SC2046 # two words or one
    tc qdisc add dev "$1" $([ -n "$rate" ] && echo parent 1:1 || echo root) netem \
        delay "$latency" limit 100000
}
no_ipv6() { # for the links that will be made: it talks unasked, and the bytes are counted
    [ ! -e /proc/sys/net/ipv6 ] || echo 1 >/proc/sys/net/ipv6/conf/default/disable_ipv6
}
hold_switch() { # is process 1: nothing outlives it
    local n
    mount -t proc proc /proc
    no_ipv6
    ip link add name switch mtu 9000 type bridge
    ip link set switch up
    for ((n = 0; n < nodes; n++)); do
        unshare --net --uts --ipc --mount --propagation slave -- \
            bash "$self" hold-node "$name" "$n" &
        until [ -e "$state/node$n" ]; do
            kill -0 $! || exit
            sleep 0.01
        done
    done
    touch "$state/ready"
    while :; do
        sleep infinity &
        wait # and so bury what the nodes' daemons leave
    done
}
hold_node() { # NODE
    local at_switch=(nsenter --target 1 --net --)
    echo "node$1" >/proc/sys/kernel/hostname
    mount --bind "$state/hosts" /etc/hosts
    mount -t tmpfs tmpfs /dev/shm
    no_ipv6
    ip link set lo up
    ip link add name eth0 mtu 9000 gso_max_size $gso_bytes \
        type veth peer name "port$1" mtu 9000 netns 1
    "${at_switch[@]}" ip link set "port$1" master switch gso_max_size $gso_bytes up
    shape_link "port$1" "${at_switch[@]}"
    ip address add "$network.$(($1 + 1))/24" dev eth0
    ip link set eth0 up
    shape_link eth0
    delay_link eth0 # once per message: where it leaves the node
    echo $$ >"$state/node$1"
    exec sleep infinity
}
enter_node() { # NODE WORD...: what mpirun calls in place of ssh; the words are a line for the shell
    exec nsenter --target "$(<"$state/$1")" --net --uts --ipc --mount -- \
        taskset -c "$(node_cores "${1#node}")" bash -c "cd ${CLUSTER_DIRECTORY@Q} && ${*:2}"
}

# --------------------------------------------------------------------------------------------------
# A cluster, seen from outside
claim_name() {
    local i wanted=$name
    for ((i = 1; ; i++)); do
        name=${wanted:-c$i}
        mkdir -p $states || fail $status_failed "cannot write $states"
        if mkdir "$states/$name" 2>/dev/null; then break; fi
        [ -z "$wanted" ] ||
            fail $status_input "there is a cluster $name; to remove it: $0 down --name $name"
    done
    state=$states/$name
}
choose_name() { # the one that is named, or the only one
    local all
    all=$(list)
    if [ -z "$name" ]; then
        [ -n "$all" ] || fail $status_input "there is no cluster; to make one: $0 up 2x2"
        [ "$(wc -w <<<"$all")" = 1 ] ||
            fail $status_input "which one? --name $(paste -sd'|' <<<"$all")"
        name=$all
    fi
    state=$states/$name
    [ -d "$state" ] || fail $status_input "there is no cluster $name"
}
load() {
    # shellcheck source=/dev/null # written by up
    . "$state/settings"
}
list() { [ ! -d $states ] || ls $states; }

# Prints the processes that hold the cluster's switch, as the machine numbers them. They are known
# by their arguments, so that no stale number is ever trusted.
holders() { # [PROGRAM]
    local file words
    for file in /proc/[0-9]*/cmdline; do
        words=()
        { mapfile -d '' words <"$file"; } 2>/dev/null || true
        if [[ ${#words[@]} -gt 3 && "${words[-2]} ${words[-1]}" = "hold-switch $name" &&
            ${words[0]} = "${1-${words[0]}}" ]]; then
            file=${file%/cmdline}
            echo "${file#/proc/}"
        fi
    done
}
find_switch() {
    local holder
    load
    switch=
    # A process that it has forked looks like it until it becomes another program; only it is the
    # first of its namespace.
    for holder in $(holders bash); do
        if grep -qs $'^NSpid:.*\t1$' "/proc/$holder/status"; then switch=$holder; fi
    done
    [[ $switch && -e $state/ready ]] ||
        fail $status_failed "cluster $name is gone; to clean up: $0 down --name $name"
}
inside() { nsenter --target "$switch" --pid --net --mount -- "$@"; }

write_files() {
    local n
    printf '%s=%q\n' nodes "$nodes" sizes "$sizes" ranks "$ranks" rate "$rate" latency "$latency" \
        cpu "$cpu" memory "$memory" cores "$cores" >"$state/settings"
    echo "127.0.0.1 localhost" >"$state/hosts"
    for ((n = 0; n < nodes; n++)); do echo "$network.$((n + 1)) node$n" >>"$state/hosts"; done
    printf 'exec bash %q enter-node %q "$@"\n' "$self" "$name" >"$state/enter"
    echo "set -e" >"$state/rank" # what mpirun starts for each rank
    [ -z "$cpu" ] || make_cgroups cpu
    [ -z "$memory" ] || make_cgroups memory
    # shellcheck disable=SC2016 # expanded by the rank
    echo 'exec "$@"' >>"$state/rank"
}
up() { # SHAPE
    local holder link
    check_machine
    check_input "$1"
    trap remove EXIT # until it is up
    claim_name
    write_files
    # a session of its own: Ctrl-C does not reach it
    setsid unshare --pid --fork --net --mount --propagation slave -- \
        bash "$self" hold-switch "$name" </dev/null >"$state/messages" 2>&1 &
    holder=$!
    disown
    until [ -e "$state/ready" ]; do
        kill -0 $holder 2>/dev/null ||
            fail $status_failed "cannot make the cluster: $(<"$state/messages")"
        sleep 0.02
    done
    link="${rate:+of $rate}"
    say "$name: $1 (nodes x ranks); a link ${link:-without limit}$(
    )${latency:+, latency $latency}${cpu:+; $cpu % of a core for a rank}$(
    )${memory:+; $memory for a rank}"
}
remove() { # all that there is of it, however far it came
    local try left doomed
    trap '' INT TERM HUP
    [ -n "${state-}" ] || return 0
    for ((try = 0; try < 200; try++)); do
        left=$(holders)
        [ -n "$left" ] || break
        # process 1; its parent in the machine buries it and ends, unless the cluster did not come
        # that far
        doomed=$(holders bash)
        ((try < 20)) || doomed=$left
        # shellcheck disable=SC2086 # several numbers
        kill -9 $doomed 2>/dev/null || true
        sleep 0.05
    done
    [ -z "$left" ] ||
        fail $status_failed "processes $left do not end;" \
            "what is known of the cluster stays in $state"
    remove_cgroups
    rm -rf "$state"
    rmdir $states 2>/dev/null || true
}

# --------------------------------------------------------------------------------------------------
# A run
take_turn() { # as long as anything of the run lives, the cluster is its own
    exec 9<"$state"
    flock -n 9 || fail $status_input "cluster $name is busy: one run at a time"
}
read_traffic() { # prints, for each node, the bytes its interface has sent and received
    local n
    for ((n = 0; n < nodes; n++)); do
        # shellcheck disable=SC2016 # awk's
        inside nsenter --target "$(<"$state/node$n")" --net -- \
            awk -F '[: ]+' '$2 == "eth0" { print $11, $3 }' /proc/net/dev
    done
}
report() { # BEFORE AFTER MICROSECONDS STATUS
    paste -d' ' <(echo "$1") <(echo "$2") |
        awk -v microseconds="$3" -v status="$4" -v json="$json" '
        { sent = $3 - $1; received = $4 - $2
          printf "cluster: node%d sent %d bytes, received %d bytes\n", NR - 1, sent, received \
              >"/dev/stderr"
          all = all (NR > 1 ? "," : "") sprintf( \
              "{\"name\":\"node%d\",\"sent\":%d,\"received\":%d}", NR - 1, sent, received) }
        END { if (json) printf "{\"nodes\":[%s],\"seconds\":%.3f,\"status\":%d}\n", \
              all, microseconds / 1e6, status >json }'
}
signal_run() { { inside kill "-$1" "$(<"$state/run")"; } 2>/dev/null || true; } # SIGNAL
end_run() { # kills what a run has left
    [ -e "$state/ready" ] || return 0
    # shellcheck disable=SC2016,SC2046 # expanded inside; several numbers
    inside bash -c 'for p in /proc/[0-9]*; do
            case " 1 $$ $* " in *" ${p#/proc/} "*) ;; *) kill -9 "${p#/proc/}" ;; esac
        done' end_run $(cat "$state"/node*) 2>/dev/null || true
}
stop_run() { # NUMBER of a signal: gently; what does not end in 5 s is killed by the trap of EXIT
    local try
    signal_run TERM
    for ((try = 0; try < 50; try++)); do
        kill -0 "$child" 2>/dev/null || break
        sleep 0.1
    done
    exit $((128 + $1))
}
run() {
    local hosts='' of n line before start status=0 interrupted=''
    read -ra of <<<"$sizes"
    for ((n = 0; n < nodes; n++)); do hosts+=,node$n:${of[n]}; done
    # shellcheck disable=SC2054 # commas within words
    line=(mpirun --oversubscribe --bind-to none --host "${hosts#,}" -np "$ranks"
        --mca plm_rsh_agent "bash $state/enter" --mca orte_tmpdir_base /dev/shm
        --mca pml ob1 --mca btl self,vader,tcp --mca mpi_yield_when_idle 1
        --mca btl_tcp_if_include "$network.0/24" --mca oob_tcp_if_include "$network.0/24"
        bash "$state/rank" "${command[@]}")
    export CLUSTER_DIRECTORY=$PWD OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    [ -z "$json" ] || : >"$json" || fail $status_input "cannot write $json"
    rm -f "$state/run"
    before=$(read_traffic)
    start=${EPOCHREALTIME//[.,]/}
    # shellcheck disable=SC2016 # expanded inside
    inside bash -c 'echo $$ >"$1/run"; exec bash "$1/enter" node0 "$2"' \
        run "$state" "${line[*]@Q}" <&0 &
    child=$!
    trap 'signal_run USR1; interrupted=yes' USR1
    trap 'stop_run 1' HUP
    trap 'stop_run 2' INT
    trap 'stop_run 15' TERM
    while
        interrupted=''
        status=0
        wait $child || status=$?
        [ -n "$interrupted" ]
    do :; done
    report "$before" "$(read_traffic)" $((${EPOCHREALTIME//[.,]/} - start)) "$status"
    exit "$status"
}

# --------------------------------------------------------------------------------------------------
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

case ${1-} in
hold-switch | hold-node | enter-node) # this script, inside: ROLE NAME ARGUMENT...
    role=${1//-/_} name=$2 state=$states/$2
    load
    "$role" "${@:3}"
    exit
    ;;
-h | --help | '')
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$self"
    exit
    ;;
esac
parse "$@"
case ${words[0]-} in
[0-9]*)
    need_command
    up "${words[0]}"
    find_switch
    take_turn
    run
    ;;
up)
    up "${words[1]-}"
    trap - EXIT
    echo "$name"
    ;;
run)
    need_command
    choose_name
    find_switch
    take_turn
    trap end_run EXIT
    run
    ;;
cut | mend)
    choose_name
    find_switch
    [[ ${words[1]-} =~ ^[0-9]+$ && ${words[1]} -lt $nodes ]] ||
        fail $status_input "which node? 0 to $((nodes - 1))"
    inside ip link set "port${words[1]}" "$([ "${words[0]}" = cut ] && echo down || echo up)"
    ;;
down)
    if [ -n "$everything" ]; then
        for name in $(list); do
            state=$states/$name
            remove
        done
    elif [ -n "$name$(list)" ]; then # nothing there is fine
        choose_name
        remove
    fi
    ;;
list) list ;;
check) check_machine ;;
*) fail $status_input "'${words[0]-}' is no command; \`$0 --help\` lists them" ;;
esac
