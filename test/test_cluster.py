#!/usr/bin/env python3
"""test_cluster.py: the emulated cluster (scripts/cluster.sh), and the program's own figures against
what its network counted.

    python3 test/test_cluster.py        TEST_ALL=1: also how exactly rates and quotas are kept

    Endings     after success, failure, Ctrl-C, SIGTERM and kill -9 nothing is left: no process,
                namespace, link, mount, cgroup, file
    Refusals    what is missing is named, with a status of its own; bad usage; an `up` that fails
                half-way
    Nodes       host names, shared memory, cores and quotas per node; clusters side by side; a cable
                pulled and plugged in again
    Figures     traffic and idle share of a training run as the program tells them
    Rates       the link's rate and the quota (TEST_ALL)

Where a cluster cannot be made the tests are skipped, and the reason is printed. Ranks that need no
MPI are shell or Python programs which mpirun starts as it would start any. Standard library only.
"""

import glob
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import harness
from harness import ALL, BINARY, ROOT, TIMEOUT, TOKENS

os.environ["TRAIN_GPT_UNTIMED"] = "0"  # forecasts are compared with runs
CLUSTER = os.path.join(ROOT, "scripts/cluster.sh")
EXIT_INPUT, EXIT_FAILED, EXIT_MISSING = 2, 3, 77
names = (f"test{os.getpid()}_{i}" for i in itertools.count())
missing = ""  # why no cluster can be made

# Every rank says that it runs; it ends with status $2 when the file "go" is there.
WAIT = [
    "sh",
    "-c",
    'touch "$1/rank$OMPI_COMM_WORLD_RANK"; while [ ! -e "$1/go" ]; do sleep 0.05; done; exit $2',
    "wait",
]

# Every rank leaves a mark in its node's shared memory, waits for those of its neighbours ($1 in
# all), and tells what it sees.
DESCRIBE = """
import json, os, socket, sys, time

mark = "/dev/shm/mark"
open(mark + os.environ["OMPI_COMM_WORLD_RANK"], "w").close()
marks = lambda: sorted(int(name[4:]) for name in os.listdir("/dev/shm") if name.startswith("mark"))
while len(marks()) < int(sys.argv[1]):
    time.sleep(0.02)
print(
    json.dumps(
        {
            "rank": int(os.environ["OMPI_COMM_WORLD_RANK"]),
            "host": socket.gethostname(),
            "address": socket.gethostbyname("node1"),
            "ranks_here": marks(),
            "cores": sorted(os.sched_getaffinity(0)),
        }
    )
    + "\\n",
    end="",
    flush=True,
)
"""

# Rank 1 sends numbers to rank 0, which writes down (file $1) the newest.
TALK = """
import os, socket, sys, time
if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
    peer = socket.create_server(("node0", 7000)).accept()[0]
    while peer.recv(1):
        with open(sys.argv[1], "a") as file:
            file.write(".")
while True:
    try:
        peer = socket.create_connection(("node0", 7000))
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
while True:
    peer.send(b".")
    time.sleep(0.02)
"""

# Both ranks send each other $1 bytes at once; prints the seconds from the first byte received to
# the last.
TRANSFER = """
import os, socket, sys, threading, time
total, rank = int(sys.argv[1]), int(os.environ["OMPI_COMM_WORLD_RANK"])
server = socket.create_server((f"node{rank}", 7000))
def send():
    while True:
        try:
            socket.create_connection((f"node{1 - rank}", 7000)).sendall(bytes(total))
            return
        except ConnectionRefusedError:
            time.sleep(0.05)
threading.Thread(target=send).start()
peer = server.accept()[0]
got, start = len(peer.recv(1)), time.monotonic()
while got < total:
    got += len(peer.recv(1 << 20))
print(time.monotonic() - start)
"""

# Computes for 4 seconds; prints the part of them it got.
SPIN = """
import time
start, used = time.monotonic(), time.process_time()
while time.monotonic() - start < 4:
    pass
print((time.process_time() - used) / (time.monotonic() - start))
"""


def setUpModule():
    global missing
    check = subprocess.run(
        [CLUSTER, "check", "--cpu", "25", "--memory", "64M"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if check.returncode == EXIT_MISSING:
        missing = check.stdout.strip()
        print("skipped:", missing)
    elif check.returncode:
        raise AssertionError(check.stdout)


def cluster(*words, status=0, **options):
    """Runs the script to its end, which must have this exit status."""
    run = subprocess.run(
        [CLUSTER, *map(str, words)], capture_output=True, text=True, timeout=TIMEOUT,
        stdin=subprocess.DEVNULL, **options,
    )
    if run.returncode != status:
        raise AssertionError(
            f"exit status {run.returncode} instead of {status}:"
            f" {' '.join(map(str, words))}\n{run.stdout[-2000:]}\n{run.stderr[-3000:]}"
        )
    return run


def python(program, *arguments):
    return ["--", sys.executable, "-c", program, *map(str, arguments)]


def wait_until(condition, what):
    end = time.time() + TIMEOUT
    while not condition():
        if time.time() > end:
            raise AssertionError(f"{what} did not come")
        time.sleep(0.02)


def read(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""  # a process that has ended meanwhile


def link_of(path):
    try:
        return os.readlink(path)
    except OSError:
        return ""


# --------------------------------------------------------------------------------------------------
# What a cluster is made of, as the machine sees it


def cluster_namespaces(name):
    """All namespaces of the cluster's processes but those of the machine. The processes are those
    of the switch's PID namespace."""
    inside = {
        link_of(file.replace("cmdline", "ns/pid_for_children"))
        for file in glob.glob("/proc/[0-9]*/cmdline")
        if read(file).split(b"\0")[-3:-1] == [b"hold-switch", name.encode()]
    }
    processes = [ns for ns in glob.glob("/proc/[0-9]*/ns") if link_of(ns + "/pid") in inside]
    return (
        {link_of(file) for ns in processes for file in glob.glob(ns + "/*")}
        - {link_of(file) for file in glob.glob("/proc/self/ns/*")}
        - {""}
    )


def living_namespaces():
    return {link_of(file) for file in glob.glob("/proc/[0-9]*/ns/*")}


def cgroups(name):
    return [
        folder
        for folder, _, _ in os.walk("/sys/fs/cgroup")
        if folder.endswith("train_gpt_cluster." + name)
    ]


def machine():
    """What belongs to no cluster in particular. Other tests mount file systems in temporary
    folders."""
    mounts = [
        line
        for line in read("/proc/self/mounts").decode().splitlines()
        if "/tmp" not in line.split()[1]
    ]
    return {
        "mounts": mounts,
        "links": sorted(os.listdir("/sys/class/net")),
        "temporary": glob.glob("/tmp/ompi.node*"),
    }


def processor_times():
    """Of all cores: idle, and in all."""
    times = list(map(int, read("/proc/stat").split(b"\n")[0].split()[1:9]))
    return times[3], sum(times)


class TestCase(unittest.TestCase):
    def setUp(self):
        if missing:
            self.skipTest(missing)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder, self.name, self.before = folder.name, next(names), machine()
        self.addCleanup(
            subprocess.run, [CLUSTER, "down", "--name", self.name], stderr=subprocess.DEVNULL
        )  # what a failed test has left

    def path(self, name):
        return os.path.join(self.folder, name)

    def start(self, *words, ranks, status=0):
        """Starts the script with ranks that wait, and returns when all of them do."""
        with open(self.path("messages"), "wb") as messages:
            process = subprocess.Popen(
                [CLUSTER, *words, "--name", self.name, "--", *WAIT, self.folder, str(status)],
                stdin=subprocess.DEVNULL,
                stdout=messages,
                stderr=messages,
                start_new_session=True,
            )
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        wait_until(
            lambda: len(glob.glob(self.path("rank*"))) == ranks or process.poll() is not None,
            "the ranks",
        )
        self.assertIsNone(process.poll(), f"ended before its time: {read(self.path('messages'))}")
        self.namespaces = cluster_namespaces(self.name)
        self.assertGreaterEqual(
            len(self.namespaces),
            1 + 2 + 4 * 2,
            "the switch's PID, network and mounts; four of every node",
        )
        return process

    def assert_nothing_left(self):
        self.assertFalse(os.path.exists("/run/train_gpt_cluster/" + self.name), "a folder is left")
        self.assertEqual([], cgroups(self.name))
        wait_until(
            lambda: not self.namespaces & living_namespaces(), "the end of the last process"
        )  # the kernel is still at it
        self.assertEqual(self.before, machine())


# --------------------------------------------------------------------------------------------------
MODEL = [
    "--model", "layers=2,heads=4,channels=256,vocab=256", "--train", TOKENS, "--val-every", "0",
    "--seq-len", "20", "--lr", "1e-3",
]


class Endings(TestCase):
    SHAPE = ["2x2", "--rate", "200mbit", "--cpu", "25", "--memory", "200M"]

    def begin(self, status=0):
        signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # of what runs in the background it is ignored, and that is inherited
        process = self.start(*self.SHAPE, ranks=4, status=status)
        self.assertEqual(bool(cgroups(self.name)), True, "the test looks in the wrong place")
        return process

    def test_success(self):
        process = self.begin()
        open(self.path("go"), "w").close()
        self.assertEqual(process.wait(TIMEOUT), 0)
        self.assert_nothing_left()

    def test_failing_command(self):
        process = self.begin(status=7)
        open(self.path("go"), "w").close()
        self.assertEqual(process.wait(TIMEOUT), 7)
        self.assert_nothing_left()

    def test_ctrl_c(self):
        process = self.begin()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all in the foreground
        self.assertEqual(process.wait(TIMEOUT), 128 + signal.SIGINT)
        self.assert_nothing_left()

    def test_sigterm(self):
        process = self.begin()
        process.terminate()
        self.assertEqual(process.wait(TIMEOUT), 128 + signal.SIGTERM)
        self.assert_nothing_left()

    def test_kill_and_down(self):
        process = self.begin()
        process.kill()
        process.wait()
        self.assertTrue(
            self.namespaces & living_namespaces(),
            "kill -9 leaves the cluster: else this shows nothing",
        )
        cluster("down", "--name", self.name)
        self.assert_nothing_left()

    def test_lasting_cluster(self):
        self.assertEqual(cluster("up", "2x1", "--name", self.name).stdout, self.name + "\n")
        self.assertIn(self.name, cluster("list").stdout.split())
        self.assertIn(
            "there is a cluster",
            cluster("up", "2x1", "--name", self.name, status=EXIT_INPUT).stderr,
        )
        process = self.start("run", ranks=2)
        self.assertIn(
            "busy", cluster("run", "--name", self.name, "--", "true", status=EXIT_INPUT).stderr
        )
        process.terminate()
        self.assertEqual(process.wait(TIMEOUT), 128 + signal.SIGTERM)
        self.assertEqual(
            cluster("run", "--name", self.name, "--", "echo", "a  'b'").stdout,
            "a  'b'\n" * 2,
            "words arrive as they are",
        )
        cluster("down", "--name", self.name)
        self.assert_nothing_left()


# --------------------------------------------------------------------------------------------------
class Refusals(TestCase):
    namespaces = set()

    def test_bad_usage(self):
        cores = len(os.sched_getaffinity(0))
        for words, message in (
            (["up", "2"], "'2' is no cluster"),
            (["2x2"], "what shall run"),
            (["up", "2x2", "--rate", "fast"], "--rate fast"),
            (["up", "2x2", "--cpu", "9"], "--cpu 9"),
            (["up", "2x1", "--cpu", "20,9"], "--cpu 20,9"),
            (["up", "2x1", "--cpu", "20,20,20"], "3 shares for 2 nodes"),
            (["up", "2x1+", "--cpu", "20"], "'2x1+' is no cluster"),
            (["up", "99x1+1x1"], "at most 99 nodes"),
            (["up", f"{cores}x2", "--cpu", "51"], "get at most 50 each"),
            (["up", "2x2", "--memory", "much"], "--memory much"),
            (["up", "2x2", "--name", "../x"], "--name ../x"),
            (["up", "2x2", "--speed", "1"], "unknown option --speed"),
            (["up", "2x2", "--rate"], "--rate needs a value"),
            (["stop"], "'stop' is no command"),
            (["run", "--name", "nobody", "--", "true"], "there is no cluster nobody"),
        ):
            self.assertIn(message, cluster(*words, status=EXIT_INPUT).stderr)
        self.assert_nothing_left()

    def test_up_that_fails_half_way(self):
        """The second node's link is refused."""
        with open(self.path("tc"), "w") as file:
            file.write(
                '#!/bin/sh\ncase "$*" in *"add dev port1"*) echo no such luck >&2; exit 1 ;;'
                f' esac\nexec {shutil.which("tc")} "$@"\n'
            )
        os.chmod(self.path("tc"), 0o755)
        environment = dict(os.environ, PATH=f"{self.folder}:{os.environ['PATH']}")
        words = ["up", "2x1", "--rate", "100mbit", "--memory", "64M", "--name", self.name]
        self.assertIn("no such luck", cluster(*words, status=EXIT_FAILED, env=environment).stderr)
        self.assert_nothing_left()


class Missing(unittest.TestCase):
    """These need no cluster."""

    def setUp(self):
        if sys.platform != "linux":
            self.skipTest("not Linux")
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        os.chmod(folder.name, 0o755)
        self.script = shutil.copy(CLUSTER, folder.name)
        self.folder = folder.name

    def refusal(self, **options):
        run = subprocess.run(
            [self.script, "check"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            **options,
        )
        self.assertEqual(run.returncode, EXIT_MISSING, run.stderr)
        return run.stderr.strip()

    def test_commands(self):
        for (
            command
        ) in "bash env realpath uname id sed ip unshare nsenter setsid flock mpirun".split():
            if shutil.which(command):
                os.symlink(shutil.which(command), os.path.join(self.folder, command))
        found = self.refusal(env={"PATH": self.folder})
        self.assertIn("the command tc", found)
        self.assertIn("the command taskset", found)
        self.assertNotIn("the command bash", found)

    def test_root(self):
        if os.geteuid() == 0:
            found = self.refusal(preexec_fn=lambda: os.setuid(65534))
        else:
            found = self.refusal()
        self.assertIn("to be root", found)


# --------------------------------------------------------------------------------------------------
class Nodes(TestCase):
    def describe(self, shape, *options):
        """Starts a cluster whose ranks tell about themselves."""
        return subprocess.Popen(
            [CLUSTER, shape, *options, *python(DESCRIBE, shape.split("x")[1])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def test_shapes_side_by_side(self):
        cores = sorted(os.sched_getaffinity(0))
        runs = {
            shape: self.describe(shape)
            for shape in ("2x1", "4x2", *(("3x1", "2x3") if ALL else ()))
        }
        for shape, run in runs.items():
            nodes, ranks = map(int, shape.split("x"))
            output = run.communicate(timeout=TIMEOUT)[0]
            self.assertEqual(run.returncode, 0, output)
            told = sorted(map(json.loads, output.splitlines()), key=lambda one: one["rank"])
            self.assertEqual([one["rank"] for one in told], list(range(nodes * ranks)))
            for one in told:
                node = one["rank"] // ranks
                self.assertEqual((one["host"], one["address"]), (f"node{node}", "10.98.0.2"))
                self.assertEqual(one["ranks_here"], list(range(node * ranks, (node + 1) * ranks)))
            seen = [core for one in told[::ranks] for core in one["cores"]]
            each = ranks * max(1, len(cores) // (nodes * ranks))  # of a node
            self.assertEqual(
                seen,
                (
                    [cores[i % len(cores)] for i in range(nodes * each)]
                    if each <= len(cores)
                    else cores * nodes
                ),
            )

    def test_nodes_that_differ(self):
        """A node of one rank, then one of two, each with a share of its own."""
        cluster("up", "1x1+1x2", "--cpu", "20,30", "--name", self.name)
        output = cluster(
            *("run", "--name", self.name),
            *("--", "sh", "-c", "echo $OMPI_COMM_WORLD_RANK $(hostname)"),
        ).stdout
        self.assertEqual(sorted(output.splitlines()), ["0 node0", "1 node1", "2 node1"])
        top = next(folder for folder in cgroups(self.name) if "rank" not in folder)
        for rank, share in enumerate((2000, 3000, 3000)):
            told = [read(f"{top}/rank{rank}/{name}") for name in ("cpu.max", "cpu.cfs_quota_us")]
            self.assertEqual(int(b"".join(told).split()[0]), share)

    def test_memory(self):
        take = python("bytearray(150 << 20)")  # zeroes are written
        cluster("2x1", "--memory", "200M", *take)
        cluster("2x1", "--memory", "100M", *take, status=128 + signal.SIGKILL)
        tokens = os.path.join(ROOT, "test/golden/gpt_tiny_tokens.bin")
        train = [
            "--",
            BINARY,
            "--model",
            "layers=12,heads=8,channels=512,vocab=50257",
            "--train",
            tokens,
            "--val",
            tokens,
            "--seq-len",
            64,
            "--steps",
            1,
        ]
        untimed = dict(env=dict(os.environ, TRAIN_GPT_UNTIMED="1"))
        # Before it takes what the kernel would kill it for.
        refused = cluster("2x1", "--memory", "300M", *train, status=3, **untimed)
        self.assertIn("1 ranks on this machine need", refused.stdout + refused.stderr)
        dry = cluster("2x1", "--memory", "300M", *train, "--dry-run", status=3, **untimed)
        self.assertIn("memory of rank 0:", dry.stdout)
        self.assertIn("1 ranks on this machine need", dry.stdout + dry.stderr)
        dry = cluster("2x1", "--memory", "2G", *train, "--dry-run", **untimed).stdout
        self.assertIn("memory     fits: 1 rank on this machine needs", dry)

    def test_cable(self):
        heard, said = self.path("heard"), lambda: len(read(heard))
        cluster("up", "2x1", "--name", self.name)
        run = subprocess.Popen(
            [CLUSTER, "run", "--name", self.name, *python(TALK, heard)],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.addCleanup(run.wait)
        self.addCleanup(run.terminate)
        wait_until(lambda: said() > 10, "a word of node 1")
        cluster("cut", "1", "--name", self.name)
        time.sleep(0.2)  # what was on its way
        before = said()
        time.sleep(1)
        self.assertEqual(said(), before, "heard through a cable that is cut")
        cluster("mend", "1", "--name", self.name)
        wait_until(lambda: said() > before + 10, "a word of node 1 after the cable was mended")


# --------------------------------------------------------------------------------------------------
class Lost(TestCase):
    """A rank that other machines wait for. On its own machine nobody is there to see it stopped."""

    LIMIT = 3  # --watchdog, seconds

    def lose(self, how):
        cluster("up", "2x1", "--name", self.name)
        log = self.path("log")
        with open(self.path("messages"), "wb") as messages:
            run = subprocess.Popen(
                [
                    CLUSTER, "run", "--name", self.name, "--", BINARY, *MODEL, "--steps", "1000000",
                    "--watchdog", str(self.LIMIT), "--log", log,
                ],
                stdin=subprocess.DEVNULL,
                stdout=messages,
                stderr=messages,
            )
        self.addCleanup(run.wait)
        self.addCleanup(run.kill)
        wait_until(lambda: os.path.exists(log) and read(log).count(b'"event":"step"') > 2, "a step")
        how()
        self.assertNotIn(run.wait(self.LIMIT + 30), (0, None))
        self.assertRegex(
            read(self.path("messages")).decode(errors="replace"),
            r"lost rank 1 on node1: no sign of progress for 3\.\d s, in [a-z_ ]+( of [a-z]+ \d+)?,"
            r" step \d+",
        )
        wait_until(lambda: not self.ranks(), "the end of both ranks")

    def ranks(self):
        """Processes of the program, in the order of their numbers: the ranks'."""
        found = [
            file
            for file in glob.glob("/proc/[0-9]*/cmdline")
            if read(file).startswith(BINARY.encode() + b"\0")
            and self.path("log").encode() in read(file)
        ]
        return sorted(int(file.split("/")[2]) for file in found)

    def test_cut_cable(self):
        self.lose(lambda: cluster("cut", "1", "--name", self.name))

    def test_stopped(self):
        def stop():
            node1 = [
                pid
                for pid in self.ranks()
                if b"OMPI_COMM_WORLD_RANK=1\0" in read(f"/proc/{pid}/environ")
            ]
            self.assertEqual(len(node1), 1)
            os.kill(node1[0], signal.SIGSTOP)

        self.lose(stop)


# --------------------------------------------------------------------------------------------------
class Figures(TestCase):
    """Of a training run. Its model has 1.6 million parameters: what is not training traffic stays
    below a hundredth of it."""

    def train(self, *flags, steps):
        """Trains on the cluster; the end event of the log, and the bytes each node sent."""
        log, traffic = self.path("log"), self.path("traffic")
        cluster(
            "run", "--name", self.name, "--json", traffic, "--", BINARY, *MODEL, *flags, "--steps",
            steps, "--log", log,
        )
        return json.loads(read(log).splitlines()[-1]), [
            node["sent"] for node in json.loads(read(traffic))["nodes"]
        ]

    def test_traffic(self):
        """The difference of two runs: starting up cancels. What remains beyond the counted bytes is
        headers (66 bytes for a frame of 9000, 0.7 %), acknowledgements (fewer than that) and a few
        scalars a step. Rank 0 stands for its neighbours, whose slices are cut at multiples of 2048
        of 200000 elements: 1 %."""
        cluster("up", "2x2", "--rate", "1gbit", "--name", self.name)
        few, many = (
            self.train("--micro-batch", "1", "--batch-tokens", "80", steps=steps)
            for steps in (1, 6)
        )
        told = 2 * 5 * many[0]["traffic"]["measured"]["total"]["inter"]
        self.assertGreater(told, 20e6, "too little for the tolerance")
        for node in range(2):
            self.assertTrue(
                0.98 <= (many[1][node] - few[1][node]) / told <= 1.05,
                f"node {node} sent {few[1]} and {many[1]}; told {told}",
            )


@unittest.skipUnless(ALL, "TEST_ALL=1: measures for seconds")
class Rates(TestCase):
    def test_link(self):
        """Both directions at once. Of 9000 bytes 66 are headers."""
        total, rate = 50 * 10**6, 200e6 / 8
        for seconds in cluster("2x1", "--rate", "200mbit", *python(TRANSFER, total)).stdout.split():
            self.assertTrue(0.9 <= total / float(seconds) / rate <= 1.0, seconds)

    def test_quota(self):
        """Never more than the quota, and less only on a machine that others keep busy."""
        before = processor_times()
        shares = cluster("2x1", "--cpu", "10", *python(SPIN)).stdout.split()
        idle, total = (after - start for after, start in zip(processor_times(), before))
        self.assertEqual(len(shares), 2)
        for share in shares:
            self.assertLessEqual(float(share), 0.105)
            if idle > 0.2 * total:
                self.assertGreaterEqual(float(share), 0.09)

    def test_idle_share(self):
        """An idle share f of a step is 1 - (computing / step). The rates that the prediction rests
        on are measured at start, within 10 % each for computing and messages; that shifts f by at
        most f (1 - f) 0.2 <= 0.05. The tolerance is twice that.
        """
        cluster("up", "2x1", "--rate", "100mbit", "--cpu", "25", "--name", self.name)
        for tokens, least in ((40, 0.5), (2560, 0.1)):
            end, _ = Figures.train(self, "--micro-batch", "8", "--batch-tokens", tokens, steps=5)
            if "idle" not in end:
                self.skipTest("the program does not tell its idle share")
            predicted, measured = end["idle"]["predicted"], end["idle"]["measured"]
            self.assertGreater(measured, least, "a link this slow makes ranks wait")
            self.assertLessEqual(
                abs(predicted - measured), 0.1, f"batch of {tokens} tokens: {end['idle']}"
            )


if __name__ == "__main__":
    harness.main()
