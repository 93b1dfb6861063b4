"""harness.py: what the Python tests share. The program is run from outside, as a user would.

How to write a test: a file test_*.py in test/ with classes of harness.TestCase, whose end is
`harness.main()`; test/run.py finds it. A run of the program is

    job = train(ranks=2, zero=1, steps=4)        flags of TRAIN with changes, `_` for `-`
    job.losses(), job.of("val"), job.err         what it left; the exit code is checked

and train_all or at_once make several runs at a time. A run that reaches its end is also checked for
memory and traffic as predicted (Job.check_end). Compare numbers with assert_close. Files go into
folders of scratch(). A loop over many cases takes sample(cases, how_many): all of them with
TEST_ALL=1 (of very many those that combine any three values), otherwise some, drawn by TEST_SEED,
which every module prints. Choose the smallest model
and the fewest steps that show the property; do not measure time, and wait for events, not seconds.
At the end a module says which of its tests cost most: a run costs a fifth of a second of a core for
each rank, so what is to be saved is runs.

TRAIN_GPT=FILE tests another binary than ./train_gpt. Standard library only.
"""

import array
import atexit
import concurrent.futures
import fcntl
import glob
import heapq
import importlib.util
import itertools
import json
import os
import pty
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
# Started in the background, these may be ignored, and no program that a test starts could trap
# them.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads would wait for each other

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ALL = os.environ.get("TEST_ALL") == "1"
SEED = int(os.environ.get("TEST_SEED", random.randrange(1 << 30)))
VENV = os.path.join(ROOT, ".venv/bin/python")
PYTHON = VENV if os.path.exists(VENV) else sys.executable  # which has the packages, if any has


def need_numpy():
    """To be called before `import numpy`: where this Python has none, the program begins again in
    the Python of .venv, which has one."""
    if not importlib.util.find_spec("numpy"):
        if sys.prefix != sys.base_prefix or not os.path.exists(VENV):
            sys.exit(f"{os.path.basename(sys.argv[0])} needs numpy: scripts/setup.sh python")
        shutil.rmtree(TEMPORARY)
        os.execv(VENV, [VENV, *sys.argv])


def apart(environment, **more):
    """Of a process beside others: programs without mpirun would share one folder of MPI's, which
    the first to end removes."""
    return dict(environment, OMPI_MCA_orte_tmpdir_base=scratch(), **more)


def output_of(*command, **options):
    """What a program that is no run of train_gpt left: bytes, or with text=True texts."""
    words = [str(word) for word in command]
    if "env" in options:
        options["env"] = apart(options["env"])
    return subprocess.run(words, **{"capture_output": True, "timeout": TIMEOUT, **options})


def has_package(*names):
    """Whether PYTHON can import all of them."""
    code = "import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))"
    return not output_of(PYTHON, "-c", code, *names).returncode


def need(*names):
    return unittest.skipUnless(has_package(*names), f"needs {' '.join(names)}")


MANY = 200  # cases


def sample(cases, count):
    """Some of the cases, drawn by the seed. With TEST_ALL=1 all, or of more than MANY those that
    covering() chooses."""
    cases = list(cases)
    if not ALL:
        return random.Random(SEED).sample(cases, min(count, len(cases)))
    return covering(cases) if len(cases) > MANY else cases


def leaves(case, path=()):
    """(where it is, value) of everything in nested dictionaries and tuples."""
    if isinstance(case, (dict, tuple)):
        for key, value in case.items() if isinstance(case, dict) else enumerate(case):
            yield from leaves(value, (*path, key))
    else:
        yield path, repr(case)


def covering(cases):
    """Of cases that combine values (dictionaries, tuples) so many that any three values which some
    case combines are together in one of these, too. The seed draws among equals."""
    paths = {path: None for case in cases for path, _ in leaves(case)}
    if len(paths) < 3:
        return cases

    def values(case):
        return {**paths, **dict(leaves(case))}.items()

    left = [(set(itertools.combinations(values(case), 3)), case) for case in cases]
    random.Random(SEED).shuffle(left)
    missing, chosen = set().union(*(threes for threes, _ in left)), []
    # How many a case would add only falls, so what was counted for it before is a limit.
    heap = [(-len(threes), place) for place, (threes, _) in enumerate(left)]
    heapq.heapify(heap)
    while missing:
        place = heapq.heappop(heap)[1]
        threes, case = left[place]
        threes &= missing
        if heap and len(threes) < -heap[0][0]:
            heapq.heappush(heap, (-len(threes), place))
        else:
            chosen.append(case)
            missing -= threes
    return chosen


def make_temporary():
    """The folder that everything is written into; it is removed at the end. In memory where there
    is room: kills do not wait for a disk then."""
    in_memory = os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 1 << 30
    folder = tempfile.mkdtemp(prefix="train_gpt_test_", dir="/dev/shm" if in_memory else None)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


TEMPORARY = make_temporary()


def scratch():
    """A new, empty folder."""
    return tempfile.mkdtemp(dir=TEMPORARY)


BINARY = os.path.join(ROOT, os.environ.get("TRAIN_GPT", "train_gpt"))
EMULATED = os.path.join(ROOT, "train_gpt_emu")
FAULTY = os.path.join(ROOT, "build/train_gpt_faulty")
TOUCHES = dict(binary=FAULTY, environment={"TOUCHES": "1"})  # checks what actions touch
PLANTED = os.path.join(ROOT, "build/train_gpt_planted")
MODEL, TOKENS, GOLDEN = (
    os.path.join(ROOT, "test/golden/gpt_tiny" + end)
    for end in ("_model.bin", "_tokens.bin", ".bin")
)

EXIT_DONE, EXIT_INPUT, EXIT_RESOURCES = 0, 2, 3
EXIT_PEER = 4
# Threads that wait for each other sleep: there are more of them than cores, and on a busy machine
# each would wait in vain for its turn. MPI does not look for devices that it will not use, nor open
# connections to other machines, which takes half of the time of its start; does not start on the
# same core for every run; and starts no daemon for a program without mpirun. Memory that was freed
# is used again instead of going back to the system, which takes a fifth of the time of a short run.
# Nothing is measured at start, which takes half of it (plan/rates.h), but in the runs that Job
# draws.
ENVIRONMENT = dict(
    os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
    OMPI_MCA_rmaps_base_oversubscribe="1", OMPI_MCA_pml="ob1", PMIX_MCA_gds="hash",
    HWLOC_COMPONENTS="-pci,-linuxio", OMPI_MCA_hwloc_base_binding_policy="none",
    OMPI_MCA_ess_singleton_isolated="1", OMPI_MCA_orte_tmpdir_base=TEMPORARY,
    OMPI_MCA_btl="self,vader", OMP_WAIT_POLICY="passive", MALLOC_MMAP_THRESHOLD_="1000000000",
    MALLOC_TRIM_THRESHOLD_="1000000000", TRAIN_GPT_UNTIMED="1",
)
# Where forecasts of time or of the host's memory are compared with what is.
AS_USER = dict(TRAIN_GPT_UNTIMED="0", MALLOC_MMAP_THRESHOLD_=None, MALLOC_TRIM_THRESHOLD_=None)
AT_ONCE = 2 * (os.cpu_count() or 1)  # runs: a start mostly waits
TIMEOUT = 120  # seconds; a run takes one or two, on a busy machine more
STEP_TIMEOUT = 1  # and for each step, which takes some milliseconds

# Equal mathematics in fp32, summed in another order: 24 bits a number, sums of up to 1e5 of them,
# 10 updates.
SAME = 1e-5
SAME_NORM = 1e-4  # norms are sums over gradients that are themselves differences
# Of the golden model.
PARAMETERS, LAYERS, CHANNELS = 92208, 3, 48
VOCAB, PADDED, POSITIONS = 101, 128, 24
T, WINDOWS = 20, 28  # the tests' sequence length; whole windows of it in the 571 golden tokens
NORM_CHUNK = 256  # slices of the gradient are cut at multiples of this (zero.h)

TRAIN = {
    "model": MODEL, "train": TOKENS, "val": TOKENS, "shuffle": 0, "seq-len": T, "micro-batch": 3,
    "batch-tokens": 60, "steps": 10, "lr": "1e-3", "lr-schedule": "constant", "weight-decay": 0.1,
    "grad-clip": 1, "val-every": 0, "threads": 1,
}


# --------------------------------------------------------------------------------------------------
# Files


def put(name, *parts):
    """Writes bytes into a new folder; returns the path."""
    path = os.path.join(scratch(), name)
    with open(path, "wb") as file:
        file.write(b"".join(parts))
    return path


def get(path):
    with open(path, "rb") as file:
        return file.read()


def header(*words):
    return struct.pack("<256i", *words, *[0] * (256 - len(words)))


def shard(tokens, name="tokens.bin"):
    return put(name, header(20240520, 1, len(tokens)), struct.pack(f"<{len(tokens)}H", *tokens))


def tokenizer(texts, eot):
    return put(
        "tokenizer.bin", header(20240328, 2, len(texts), eot), *(bytes([len(t)]) + t for t in texts)
    )


def golden_tokens():
    return list(struct.unpack("<571H", get(TOKENS)[1024:]))


def golden_run():
    """Losses and norms of run 3: see make_golden.py."""
    numbers = struct.unpack("<20d", get(GOLDEN)[-160:])
    return numbers[:10], numbers[10:]


def weights(path):
    return array.array("f", get(path)[1024:])


# Of every kind: with a table of the head's own or the embedding's, with biases, gains, or neither.
ARCHITECTURES = (
    "gpt2",
    *(f"{name},tie={tie}" for name in ("llama", "qwen2", "qwen3") for tie in (0, 1)),
    "nano",
)


def any_model(draw, layers=None, heads=2, channels=16, vocab=101):
    """A small model, as --model's keys, of an architecture that is drawn; of an odd or even number
    of layers."""
    layers = layers or draw.choice((1, 2, 3, 4, 5))
    shape = f"layers={layers},heads={heads},channels={channels},vocab={vocab}"
    return f"arch={draw.choice(ARCHITECTURES)},{shape}"


def is_gpt2(model):
    """Whether llm.c's files can hold a model of these keys."""
    return "arch=" not in str(model) or "arch=gpt2" in str(model)


def export_of(case):
    """A new path for the weights of a run."""
    return os.path.join(scratch(), "export.bin" if is_gpt2(case.get("model")) else "export")


def exported(path):
    """The bytes of exported weights."""
    return get(os.path.join(path, "model.safetensors") if os.path.isdir(path) else path)


def exported_weights(path):
    """The same in fp32, as numbers."""
    data = exported(path)
    first = 8 + struct.unpack("<Q", data[:8])[0] if os.path.isdir(path) else 1024
    return array.array("f", data[first:])


def bf16_words(floats):
    """The upper halves, rounded to nearest even."""
    for bits in array.array("I", floats.tobytes()):
        yield (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def tensors():
    """(elements, decayed) of each tensor in the order of the file: only matrices decay."""
    C, L = CHANNELS, LAYERS
    yield from (
        (PADDED * C, True), (POSITIONS * C, True), (L * C, False), (L * C, False),
        (L * 3 * C * C, True), (L * 3 * C, False), (L * C * C, True), (L * C, False),
        (L * C, False), (L * C, False), (L * 4 * C * C, True), (L * 4 * C, False),
        (L * 4 * C * C, True), (L * C, False), (C, False), (C, False),
    )


def change(path, at, word=None):
    """Changes one byte of a file, or an int32 of it."""
    with open(path, "r+b") as file:
        file.seek(at)
        old = file.read(1)
        file.seek(at)
        file.write(bytes([old[0] ^ 1]) if word is None else struct.pack("<i", word))


def checkpoints(out):
    return sorted(
        int(path[-8:]) for path in glob.glob(os.path.join(glob.escape(out), "step_????????"))
    )


def checkpoint(out, step):
    return os.path.join(out, f"step_{step:08}")


def slices(elements, ranks, grain=NORM_CHUNK):
    """Sizes of a storage's slices: equally many whole grains, but for the last ones, which end
    where the storage does."""
    slice_ = -(-elements // (ranks * grain)) * grain
    bounds = [min(r * slice_, elements) for r in range(ranks + 1)]
    return [b - a for a, b in zip(bounds, bounds[1:])]


# --------------------------------------------------------------------------------------------------
# Runs


def parse_log(text):
    """The log's events. Numbers with a fraction stay text: resumed runs are compared digit by
    digit."""

    def bad(word):
        raise ValueError(f"not JSON: {word}")

    return [json.loads(line, parse_float=str, parse_constant=bad) for line in text.splitlines()]


def command_line(changes, emulated=False):
    """Flags of TRAIN with changes; None leaves a flag out. The GPU build's default precision is
    another: here it is the same."""
    flags = {
        **TRAIN,
        **({"dtype": "fp32"} if emulated else {}),
        **{name.replace("_", "-"): value for name, value in changes.items()},
    }
    return [
        word
        for name, value in flags.items()
        if value is not None
        for word in (f"--{name}", str(value))
    ]


class Job:
    """A launch: of TRAIN with changes, or of `words` as they are. ranks 0: without mpirun. A single
    rank has mpirun where it is asked for. One run in eight, drawn by its flags and the seed, is a
    user's: AS_USER, and with mpirun. environment: what is None is left out."""

    even_steps = True  # False: a private run, whose steps draw more micro-batches or fewer

    def __init__(
        self, ranks=1, binary=BINARY, words=None, shell=None, limit=None, stdout=None, log=None,
        environment=(), mpirun=False, **changes,
    ):
        folder = scratch()
        self.ranks, self.binary, self.log_path = ranks, binary, log or os.path.join(folder, "log")
        self.limit = TIMEOUT + STEP_TIMEOUT * min(changes.get("steps") or 0, 10**4)
        self.out_path, self.err_path = os.path.join(folder, "out"), os.path.join(folder, "err")
        words = (
            command_line(dict(changes, log=self.log_path), binary == EMULATED)
            if words is None
            else words
        )
        words = [str(word) for word in words]
        same = [word for word in words if TEMPORARY not in word]
        users = random.Random(f"{SEED} {ranks} {same}").randrange(8) == 0
        mpirun = ranks > 1 or (ranks == 1 and (users or mpirun))
        launch = ["mpirun", "--oversubscribe", "-np", str(ranks)] if mpirun else []
        command = shell or [*launch, binary, *words]
        # Two mpiruns that make the machine's folder for jobs at once may both fail.
        own = dict(AS_USER if users else {}, OMPI_MCA_orte_tmpdir_base=folder)
        if binary.endswith("_emu"):  # its threads would wait for each other
            own["OMP_NUM_THREADS"] = "1"
        env = {**ENVIRONMENT, **own, **dict(environment)}
        self.command = command if shell else " ".join(command)
        with open(self.out_path, "wb") as out, open(self.err_path, "wb") as err:
            self.process = subprocess.Popen(
                command,
                shell=bool(shell),
                stdin=subprocess.DEVNULL,
                stdout=stdout or out,
                stderr=err,
                env={name: value for name, value in env.items() if value is not None},
                cwd=TEMPORARY,
                preexec_fn=limit,
            )
        atexit.register(self.end_all)

    def pids(self):
        """The program's processes under this mpirun (its children's children too: a shell, a
        daemon), rank 0 first."""
        parents, found, mine = {}, [], {self.process.pid}
        for path in glob.glob("/proc/[0-9]*/stat"):
            try:
                pid = int(path.split("/")[2])
                parents[pid] = int(get(path).rsplit(b") ", 1)[1].split()[1])
                found += (
                    [pid]
                    if get(f"/proc/{pid}/cmdline").startswith(self.binary.encode() + b"\0")
                    else []
                )
            except OSError:
                pass  # it ended meanwhile
        for _ in range(4):
            mine |= {pid for pid, parent in parents.items() if parent in mine}
        return sorted(mine.intersection(found))

    @staticmethod
    def kill(pids, how=signal.SIGKILL):
        for pid in pids:
            try:
                os.kill(pid, how)
            except ProcessLookupError:
                pass

    def end_all(self):
        """Ends what a failed test has left running."""
        if self.process.poll() is None:
            self.kill([*self.pids(), self.process.pid])
            self.process.wait()

    def die(self, victims, how=signal.SIGKILL):
        """Kills or stops ranks; the others must end by themselves. Returns mpirun's exit code, or
        None where mpirun hangs by itself.

        Open MPI 4.1.4 does so now and then when a rank dies while it connects: all ranks are gone,
        and mpirun waits for a mutex in PMIx_server_finalize.
        """
        start = time.time()
        self.kill(victims, how)
        while self.process.poll() is None and self.pids():
            if time.time() - start > 30:  # 1 or 2 s; the machine may be busy
                raise AssertionError(f"ranks {self.pids()} outlive {victims}: {self.command}")
            time.sleep(0.02)
        try:
            return self.process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self.end_all()
            return None

    def wait_until(self, condition, what):
        end = time.time() + TIMEOUT
        while not condition():
            if self.process.poll() is not None or time.time() > end:
                raise AssertionError(
                    f"{what} did not come:"
                    f" {self.command}\n{get(self.err_path).decode(errors='replace')}"
                )
            time.sleep(0.01)

    def logged(self):
        return get(self.log_path).count(b'"event":"step"') if os.path.exists(self.log_path) else 0

    def wait(self):
        """The finished job, with code, out, err and events."""
        try:
            self.code = self.process.wait(timeout=self.limit)
        except subprocess.TimeoutExpired:
            self.end_all()
            raise AssertionError(f"still running after {self.limit} s: {self.command}") from None
        self.out, self.err = (
            get(path).decode(errors="replace") for path in (self.out_path, self.err_path)
        )
        return self

    def done(self, code=EXIT_DONE):
        """The finished job, which must have ended with this code."""
        self.wait()
        if code is not None and self.code != code:
            raise AssertionError(
                f"exit code {self.code} instead of {code}:"
                f" {self.command}\n{self.out[-1500:]}\n{self.err[-3000:]}"
            )
        self.events = (
            parse_log(get(self.log_path).decode()) if os.path.isfile(self.log_path) else []
        )
        self.check_end()
        return self

    def of(self, event):
        return [e for e in self.events if e["event"] == event]

    def steps(self, *fields):
        """Of each step in turn: its loss, or these fields."""
        return [e["loss"] if not fields else tuple(e[f] for f in fields) for e in self.of("step")]

    def losses(self):
        return [float(loss) for loss in self.steps()]

    def end(self):
        return self.of("end")[-1]

    def check_end(self):
        """Memory and traffic are as predicted, exactly. A run that was resumed, made no step or
        skipped updates sent less."""
        ends = self.of("end")
        if not ends:
            return
        memory, traffic = ends[-1]["memory"], ends[-1]["traffic"]
        for kind, predicted in memory["predicted"].items():
            if kind != "host" and memory["measured"][kind] != predicted:
                raise AssertionError(f"memory of {kind}: {memory}: {self.command}")
        complete = (
            self.events[-2]["event"] != "start"
            and self.of("step")
            and "update skipped" not in self.err
        )
        offload = ends[-1]["offload"]
        if "--dp-noise" in self.command and set(self.command.split()) & {
            "--offload",
            "--device-memory",
        }:  # parameters come in as many micro-steps as are drawn
            complete = False
        if offload["predicted"]["bytes"] != offload["measured"]["bytes"] or (
            complete and offload["predicted"] != offload["measured"]
        ):
            raise AssertionError(f"offload: {offload}: {self.command}")
        if "--expert-parallel" in self.command:  # the forecast is that of even loads
            most = self.of("start")[-1]["predicted"].get("all_to_all_most", 0)
            sent = sum(traffic["measured"][link]["all_to_all"] for link in ("intra", "inter"))
            if sent > most:
                raise AssertionError(
                    f"rows of experts: {sent} bytes, at most {most}: {self.command}"
                )
            for found in traffic["predicted"], traffic["measured"]:
                found["total"] = {
                    link: total - found[link].pop("all_to_all")
                    for link, total in found["total"].items()
                }
        if complete and self.even_steps and traffic["predicted"] != traffic["measured"]:
            raise AssertionError(f"traffic: {traffic}: {self.command}")


def train(ranks=1, code=EXIT_DONE, **changes):
    return Job(ranks, **changes).done(code)


def train_on_terminal(width=None, **changes):
    """The job, and the bytes that a terminal of so many columns received."""
    master, slave = pty.openpty()
    if width is not None:
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    job = Job(stdout=slave, mpirun=True, **changes)
    os.close(slave)
    text = b""
    try:
        while chunk := os.read(master, 65536):
            text += chunk
    except OSError:
        pass  # the end of a terminal
    job.done()
    os.close(master)
    return job, text


def at_once(function, cases):
    """Each case in turn, some at a time: they mostly wait. The first that fails speaks."""
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(function, cases))


def train_all(cases):
    """Runs of several sets of changes, some at a time."""
    return at_once(lambda case: train(**case), cases)


# --------------------------------------------------------------------------------------------------
# Runs with a fault in them

# For the end of a run that lost a rank: some seconds, on a busy machine more.
LIMIT_S = 90
SAVED, FAULT_AT, LAST = 2, 4, 6  # steps
# Of what others wait for: parameters of the step before are still on their way
STEPS_THEN = f"[{FAULT_AT - 1}{FAULT_AT}]"


class Faulty:
    """Runs of the program with a fault in it."""

    def __init__(self, how, rank, action, step=FAULT_AT, ranks=3, **changes):
        self.out, self.log = os.path.join(scratch(), "out"), os.path.join(scratch(), "log")
        self.same = dict(
            ranks=ranks, out=self.out, log=self.log, save_every=SAVED, steps=LAST, shuffle=1,
            recompute="block", **changes,
        )
        self.job = Job(
            binary=FAULTY, environment={"FAULT": f"{how} {rank} {step} {action}"}, **self.same
        )

    def ends(self, limit=LIMIT_S):
        """Exit code and messages; mpirun must end by itself, and with it every rank."""
        try:
            self.job.process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            if self.job.pids():  # else mpirun hangs by itself (Job.die)
                raise AssertionError(
                    f"ranks {self.job.pids()} still there: {self.job.command}"
                ) from None
            self.job.end_all()
        return self.job.wait()

    def resumes(self, test, undisturbed):
        test.assertEqual(checkpoints(self.out), [SAVED], "the checkpoint before the fault")
        again = train(**dict(self.same, resume=1))
        steps = {e["step"]: (e["loss"], e["grad_norm"]) for e in again.of("step")}
        test.assertEqual(sorted(steps), list(range(1, LAST + 1)))
        test.assertEqual([steps[s] for s in sorted(steps)], undisturbed)


# --------------------------------------------------------------------------------------------------
# Cases


def small_disk(test, kib):
    """A folder on a disk of its own, or the test is skipped."""
    folder = scratch()
    if (
        os.geteuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", folder], capture_output=True
        ).returncode
    ):
        test.skipTest("cannot mount a small disk")
    test.addCleanup(subprocess.run, ["umount", "-l", folder], check=True)
    return folder


class TestCase(unittest.TestCase):
    def assert_close(self, found, expected, tolerance, what=""):
        self.assertEqual(len(found), len(expected), what)
        for i, (a, b) in enumerate(zip(found, expected)):
            self.assertLessEqual(
                abs(float(a) - float(b)),
                tolerance * abs(float(b)),
                f"{what}: number {i} is {a}, expected {b}",
            )


class InFolder(TestCase):
    """Each test has a folder of its own, with `out` in it, which does not exist."""

    def setUp(self):
        self.folder = Path(scratch())
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.out = self.folder / "out"

    def write(self, name, *parts, mode=0o644):
        """A file of these parts, each bytes or text; the folders above it are made."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(p.encode() if isinstance(p, str) else p for p in parts))
        path.chmod(mode)
        return path


class Costs(unittest.TextTestResult):
    """Says at the end which tests took most of the cores' time, with all that they started:
    TEST_COSTS of them."""

    SHOWN = int(os.environ.get("TEST_COSTS", 3))
    found = []

    @staticmethod
    def seconds():
        used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(one.ru_utime + one.ru_stime for one in used)

    def startTest(self, test):
        super().startTest(test)
        self.begun = self.seconds()

    def stopTest(self, test):
        self.found.append((self.seconds() - self.begun, ".".join(test.id().split(".")[1:])))
        super().stopTest(test)

    def printErrors(self):
        super().printErrors()
        for seconds, name in sorted(self.found, reverse=True)[: self.SHOWN]:
            print(f"{seconds:7.1f} s of cores: {name}", flush=True)


class Runner(unittest.TextTestRunner):
    resultclass = Costs


def main():
    """The end of every test module."""
    print("seed of sampled tests:", SEED, "(set TEST_SEED to repeat)", flush=True)
    unittest.main(testRunner=Runner)
