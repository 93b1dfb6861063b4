#!/usr/bin/env python3
"""The first ten minutes on a GPU: is the program right there, and how fast is it?

    scripts/gpu_ten.py pack                            # here: builds all, into one file
    python3 build/gpu_ten.pyz --out FOLDER             # there, with nothing but this file
    scripts/gpu_ten.py run --out FOLDER --only 124M    # what a checkout has built; some steps
    scripts/gpu_ten.py table FOLDER                    # here: writes docs/results/gpu.md

The other machine has a GPU with its driver, the CUDA toolkit and Python, perhaps PyTorch, ncu and
compute-sanitizer. It needs no MPI, no network and no checkout: the file brings Open MPI and what
the programs link, but for NVIDIA's libraries, which are the toolkit's or else those of PyTorch's
packages.

A run is a table of steps with a budget each; a step may also use what those before it have left.
No command that fails, hangs or is missing keeps the next one from running. FOLDER/ten.json has the
figures of each command, or the reason why there are none; it is written anew after each command, so
a run that is killed keeps what it has. FOLDER/ten_logs.gz has what the commands print, and
FOLDER/ten_counters.csv what ncu counts. Exit status of a run: 0 if every command passed, else 1.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import ctypes
import datetime
import functools
import glob
import gzip
import io
import json
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zipfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(1, os.path.join(ROOT, "test"))
import harness  # noqa: E402

PASSED, FAILED, SKIPPED, TIMED_OUT = "passed", "failed", "skipped", "out of time"
SECONDS = 575  # of a run, with its unpacking
GRACE = 2  # seconds between asking processes to end and ending them
LOG_BYTES, COUNTER_BYTES = 1 << 18, 15 << 20  # kept of what a command prints, of what ncu does
WARMUP = 3  # steps that do not count
TOY_SLACK = 10  # times as long may everything take in a rehearsal: the machine may be busy
LIBC = ctypes.CDLL(None)
UNPACKED = "GPU_TEN_UNPACKED"  # in the environment: when the packed file was started

PROGRAMS = {  # on a GPU; and the emulation's, for a rehearsal at toy size
    "train": ("train_gpt_cuda", "train_gpt_emu"),
    "operations": ("build/gpu_test_ops", "build/test_ops_emu"),
    "production": ("build/gpu_production_test_ops", "build/test_ops_emu"),
    "kernels": ("build/gpu_bench_kernels", "build/bench_kernels_emu"),
    "attention": ("build/gpu_bench_attention", "build/bench_attention_emu"),
}
Case = collections.namedtuple("Case", "model rows T")
EXPERTS = "layers=8,heads=16,kv_heads=4,channels=1024,vocab=32000"
CASES = {
    "124M": Case("gpt2:124M", 64, 1024),
    "774M": Case("gpt2:774M", 16, 1024),
    "1558M": Case("gpt2:1558M", 16, 1024),
    "Llama 1B": Case("llama3.2:1B", 8, 2048),
    "nano d12": Case("arch=nano,layers=12,heads=6,channels=768,vocab=50304", 64, 1024),
    "Qwen3 0.6B": Case("qwen3:0.6B", 8, 2048),
    "Mixtral 0.8B": Case(f"arch=llama,{EXPERTS},experts=8,top_k=2,expert_ffn=3584", 16, 1024),
    "Qwen3-MoE 0.9B": Case(f"arch=qwen3,{EXPERTS},experts=64,top_k=8,expert_ffn=512", 16, 1024),
}
TOY_CASE = Case("layers=2,heads=2,channels=16,vocab=100", 2, 16)
TOY_EXPERTS = Case("arch=llama,layers=2,heads=2,channels=16,vocab=100,experts=4", 2, 16)
# of bench_kernels: rows, T, C, heads, V, product, of Llama heads of keys and F, experts and choices
KERNELS = {
    "124M": (64, 1024, 768, 12, 50257, 8192),
    "1558M": (16, 1024, 1600, 25, 50257, 8192),
    "Llama 1B": (8, 2048, 2048, 32, 128256, 8192, 8, 8192),
    "Mixtral 0.8B": (16, 1024, 1024, 16, 32000, 8192, 4, 3584, 8, 2),
    "Qwen3-MoE 0.9B": (16, 1024, 1024, 16, 32000, 8192, 4, 512, 64, 8),
}
TOY_KERNELS = 1, 16, 16, 2, 100, 32, 1, 32, 4, 2
OWN, CUDNN = "own attention", "cuDNN"
ATTENTIONS = {OWN: {"TRAIN_GPT_OWN_ATTENTION": "1"}, CUDNN: {}}  # the environment


# --------------------------------------------------------------------------------------------------
# pack

# Of the other machine: the libraries of C and C++, and NVIDIA's
NVIDIA = r"lib(cuda|cudart|cublas|cudnn|nccl|nvrtc|nvJitLink)"
ELSEWHERE = re.compile(rf"ld-linux|lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)\.so|{NVIDIA}")
FILES = [f"scripts/{name}.py" for name in ("gpu_ten", "gpu_peer", "torch_gpt")]
FILES += [f"test/{name}.py" for name in ("harness", "test_gpu", "test_gpu_device")]
FILES += [f"test/golden/gpt_tiny{end}.bin" for end in ("", "_model", "_tokens")]
FILES += ["test/golden/experts.json"]
# The packed file's own program. Python runs a zip file that has one.
UNPACK = f"""
import os, sys, tarfile, tempfile, time, zipfile
os.environ["{UNPACKED}"], folder = str(time.time()), tempfile.mkdtemp(prefix="gpu_ten_")
with zipfile.ZipFile(sys.argv[0]) as packed, packed.open("files.tar.xz") as file:
    with tarfile.open(fileobj=file, mode="r|xz") as files:
        files.extractall(folder)
words = [sys.executable, folder + "/scripts/gpu_ten.py", "run", *KIND, *sys.argv[1:]]
os.execv(words[0], words)
"""


def said_by(*words):
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def libraries_of(*paths):
    """{name: file} of what programs and libraries link and the other machine lacks."""
    found = {}
    for path in paths:
        found.update(re.findall(r"(\S+) => (/\S+)", said_by("ldd", path)))
    return {name: file for name, file in found.items() if not ELSEWHERE.match(name)}


def open_mpi():
    """{place: file} of mpirun, of the libraries of an MPI program, and of the plugins that need no
    others."""
    plugins = re.search(r"Pkglibdir: (\S+)", said_by("ompi_info", "--path", "all"))[1]
    mpirun, folder = os.path.realpath(shutil.which("mpirun")), os.path.basename(plugins)
    libraries = libraries_of(mpirun, shutil.which("ompi_info"), *glob.glob(plugins + "/*pmix_ext*"))
    files = {"mpi/bin/mpirun": mpirun, **{f"lib/{name}": libraries[name] for name in libraries}}
    for path in glob.glob(plugins + "/mca_*.so"):
        if set(libraries_of(path)) <= set(libraries):
            files[f"mpi/lib/{folder}/{os.path.basename(path)}"] = path
    return files


def pack(options):
    programs = list(dict.fromkeys(pair[options.toy] for pair in PROGRAMS.values()))
    if not options.toy:
        subprocess.run([ROOT + "/scripts/setup.sh", "cudnn"], check=True)
    flags = [f"ARCHS={options.archs}", "PORTABLE=1", f"-j{os.cpu_count()}"]
    flags += ["USE_CUDNN=1"] * (not options.toy)
    subprocess.run(["make", "-C", ROOT, *flags, *programs], check=True)
    files = open_mpi()
    files.update({name: os.path.join(ROOT, name) for name in programs})
    linked = libraries_of(*(files[name] for name in programs))
    files.update({f"lib/{name}": file for name, file in linked.items()})
    whole = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder, tarfile.open(
        fileobj=whole, mode="w:xz", preset=1 if options.toy else 9
    ) as tar:
        for name in FILES:
            tar.add(os.path.join(ROOT, name), name)
        for name, path in files.items():
            bare = os.path.join(folder, "bare")
            said_by("strip", "--strip-unneeded", "-o", bare, path)
            os.chmod(bare, 0o755)
            tar.add(bare, name)
    with zipfile.ZipFile(options.out, "w") as packed:
        packed.writestr("__main__.py", UNPACK.replace("KIND", "['--toy']" * options.toy or "[]"))
        packed.writestr("files.tar.xz", whole.getvalue())
    print(f"{options.out}: {os.path.getsize(options.out) / 1e6:.1f} MB")
    return 0


# --------------------------------------------------------------------------------------------------
# run: commands


def session_of(pid):
    """The session of a process; None where it is gone."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rsplit(")", 1)[1].split()[3])


def end_session(process):
    """Ends a command and all it started: mpirun puts its ranks into process groups of their own, in
    the same session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for path in glob.glob("/proc/[0-9]*"):
            pid = int(os.path.basename(path))
            if session_of(pid) == process.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)


def environment():
    """Of the programs: Open MPI and the libraries where they were unpacked, NVIDIA's where the
    machine has them. OPAL_PREFIX and OPAL_LIBDIR say that Open MPI has moved."""
    mpi, packages = ROOT + "/mpi", [place for place in sys.path if place.endswith("-packages")]
    nvidia = [place for base in packages for place in sorted(glob.glob(base + "/nvidia/*/lib"))]
    places = [ROOT + "/lib", "/usr/local/cuda/lib64", *nvidia, os.environ.get("LD_LIBRARY_PATH")]
    moved = {
        "OPAL_PREFIX": mpi,
        "OPAL_LIBDIR": mpi + "/lib",
        "OMPI_MCA_plm": "isolated",  # no program to reach other machines with is looked for
        "PATH": f"{mpi}/bin:{os.environ['PATH']}",
    }
    return {
        **harness.ENVIRONMENT,
        "LD_LIBRARY_PATH": ":".join(filter(None, places)),
        "OMPI_MCA_btl": "self,vader",
        "OMPI_MCA_ess_singleton_isolated": "1",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "PMIX_MCA_pcompress_base_silence_warning": "1",
        **(moved if os.path.isdir(mpi) else {}),
    }


def tool(name):
    """A program of the CUDA toolkit, which may be in no path; its bare name where it is missing."""
    places = ("/usr/local/cuda*/bin/", "/opt/nvidia/*/", "/opt/nvidia/*/*/")
    found = [path for place in places for path in sorted(glob.glob(place + name))]
    return shutil.which(name) or [name, *found][-1]


def json_lines(text):
    return {"found": [json.loads(line) for line in text.splitlines() if line.startswith("{")]}


def write_whole(path, text):
    """Another reader, or a kill, sees the old file or the new one."""
    with open(path + ".new", "w") as file:
        file.write(text)
    os.replace(path + ".new", path)


def together(*calls):
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        list(pool.map(lambda call: call(), calls))


class Run:
    """What a run has, and what it has found so far."""

    def __init__(self, options, began, work):
        self.toy, self.out, self.work = options.toy, os.path.abspath(options.out), work
        self.began, self.end, self.step, self.lock = began, began, "", threading.Lock()
        self.environment = {**environment(), "TRAIN_GPT_UNTIMED": str(int(self.toy))}
        now = datetime.datetime.now().isoformat(timespec="seconds")
        self.results = {"toy": self.toy, "began": now, "entries": []}
        open(os.path.join(self.out, "ten_logs.gz"), "wb").close()

    def passed(self):
        return round(time.monotonic() - self.began, 2)

    def program(self, name):
        return os.path.join(ROOT, PROGRAMS[name][self.toy])

    def entry(self, name, **parts):
        nothing = {"status": FAILED, "reason": "", "seconds": 0.0, "command": "", "figures": {}}
        return {"step": self.step, "name": name, **nothing, **parts}

    def record(self, entry):
        with self.lock:
            self.results["entries"].append(entry)
            text = json.dumps(self.results, indent=1) + "\n"
            write_whole(os.path.join(self.out, "ten.json"), text)
            reason = " ".join(entry["reason"].split())[-100:]
            print(
                f"{self.passed():6.1f} {entry['status']:11} {entry['step']:13} {entry['name']:26}"
                f" {entry['seconds']:6.1f} s  {reason}",
                flush=True,
            )

    def run(self, name, words, seconds, read=None, **variables):
        """Runs a command for so many seconds at most. However it ends, an entry of the results says
        so; it has the figures that `read` finds in what the command printed."""
        words, start = [str(word) for word in words], time.monotonic()
        shown = shlex.join([f"{key}={value}" for key, value in variables.items()] + words)
        entry = self.entry(name, command=shown.replace(ROOT + "/", ""))
        seconds = min(seconds * (TOY_SLACK if self.toy else 1), self.end - start)
        try:
            if seconds <= 0:
                entry.update(status=TIMED_OUT, reason="no time was left")
            elif not shutil.which(words[0], path=self.environment["PATH"]):
                entry.update(status=SKIPPED, reason=f"{os.path.basename(words[0])} is missing")
            else:
                code, text = self.start(words, seconds, variables)
                if code is None:
                    entry.update(
                        status=TIMED_OUT, reason=f"{text[-300:]}: {seconds:.0f} s were over"
                    )
                elif code:
                    entry.update(reason=f"exit status {code}: {text[-500:]}")
                else:
                    entry.update(figures=read(text) if read else {}, status=PASSED)
        except Exception as error:  # whatever this stumbles over, the next command runs
            entry.update(reason=f"{type(error).__name__}: {error}")
        entry["seconds"] = round(time.monotonic() - start, 2)
        self.record(entry)

    def start(self, words, seconds, variables):
        """(exit status, or None if it took too long; what it printed)"""
        with tempfile.TemporaryFile() as said:
            process = subprocess.Popen(
                words,
                cwd=ROOT,
                env={**self.environment, **variables},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
                preexec_fn=lambda: LIBC.prctl(1, signal.SIGTERM),  # if this script is killed
            )
            code = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(seconds)
            end_session(process)
            said.seek(0)
            text = said.read().decode(errors="replace")
        log = f"$ {shlex.join(words)}\n{text[-LOG_BYTES:]}\n"
        with self.lock, open(os.path.join(self.out, "ten_logs.gz"), "ab") as file:
            file.write(gzip.compress(log.encode()))
        return code, text

    @functools.cached_property
    def python(self):
        """A Python whose PyTorch finds a GPU; this one where none does."""
        code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
        for python in (ROOT + "/.venv-peers/bin/python", sys.executable):
            if os.path.exists(python) and not harness.output_of(python, "-c", code).returncode:
                return python
        return sys.executable

    def peer(self, name, words, seconds):
        """PyTorch's side, with the libraries that it brings."""
        words = [self.python, os.path.join(ROOT, "scripts/gpu_peer.py"), *words]
        own = os.environ.get("LD_LIBRARY_PATH", "")
        self.run(name, words + ["--toy"] * self.toy, seconds, json_lines, LD_LIBRARY_PATH=own)

    def golden(self, name, ranks, transport, variables, **changes):
        """Three steps of a small model, whose losses must be PyTorch's."""
        log, steps = os.path.join(self.work, name + ".jsonl"), 3
        flags = harness.command_line(dict(changes, dtype="fp32", steps=steps, log=log))
        mpirun = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", ranks]

        def read(_):
            with open(log) as file:
                events = [json.loads(line) for line in file]
            found = [event["loss"] for event in events if event["event"] == "step"]
            golden = harness.golden_run()[0][:steps]
            apart = max(abs(a - b) / abs(b) for a, b in zip(found, golden, strict=True))
            if not apart <= harness.SAME:
                raise ValueError(f"the losses {found} are not PyTorch's, {golden}")
            if transport not in (None, events[0]["transport"]):
                raise ValueError(f"messages went by {events[0]['transport']}, not {transport}")
            return {"apart": apart, "seconds since the start": self.passed()}

        words = [*(mpirun if ranks > 1 else []), self.program("train"), *flags]
        self.run(name, words, 15, read, **variables)

    @functools.cached_property
    def shard(self):
        """A file of tokens for all models."""
        vocab = TOKENS_OF_TOY if self.toy else TOKENS
        return harness.shard([i * 7919 % vocab for i in range(1 << 20)])

    def train(self, name, attention, seconds, steps=10, title="", micro_steps=1, **flags):
        """Steps of a model in bf16: the median time, the memory."""
        toy = TOY_EXPERTS if "experts" in CASES[name].model else TOY_CASE
        case = toy if self.toy else CASES[name]
        title, tokens = f"{name}, {title or attention}", int(case.rows * case.T * micro_steps)
        log = os.path.join(self.work, title + ".jsonl")
        flags.update({"train": self.shard, "model": case.model, "seq-len": case.T, "log": log})
        flags.update({"micro-batch": case.rows, "batch-tokens": tokens, "steps": steps})
        flags.update({"dtype": "bf16", "val-every": 0, "weight-decay": 0.1, "grad-clip": 0})
        words = [word for flag, value in flags.items() for word in (f"--{flag}", value)]

        def read(_):
            with open(log) as file:
                found = speed_of([json.loads(line) for line in file], tokens)
            if not self.toy and (found["attention"] == "own") != (attention == OWN):
                raise ValueError(f"attention was computed by: {found['attention']}")
            return found

        variables = {**LAZY, **ATTENTIONS[attention]}
        self.run(title, [self.program("train"), *words], seconds, read, **variables)


TOKENS, TOKENS_OF_TOY = 50257, 100
LAZY = {"CUDA_MODULE_LOADING": "LAZY"}  # of one rank, which waits for nobody


def speed_of(events, tokens):
    """Of the log of a run."""
    steps, end = [event for event in events if event["event"] == "step"], events[-1]
    counted = [step for step in steps[WARMUP:] if step["mfu"]]  # a private step may draw nothing
    ms = statistics.median(step["ms"] for step in counted)
    profiles = [event for event in events if event["event"] == "profile"]
    return {
        "ms": ms,
        "tokens_per_s": 1e3 * tokens / ms,
        "mfu": statistics.median(step["mfu"] for step in counted),
        "attention": events[0]["attention"],
        "memory": {side: end["memory"][side]["device"] for side in ("predicted", "measured")},
        "steps_ms": [step["ms"] for step in steps],
        "losses": [step["loss"] for step in steps],
        "actions": [action for profile in profiles for action in profile["actions"]],
    }


# --------------------------------------------------------------------------------------------------
# run: steps


def libraries(text):
    """Where the machine has NVIDIA's."""
    if "not found" in text:
        missing = sorted(set(re.findall(r"(\S+) => not found", text)))
        raise ValueError(f"not found: {', '.join(missing)}")
    return {name: at for name, at in re.findall(r"(\S+) => (/\S+)", text) if re.match(NVIDIA, name)}


def machine(t):
    """What is there"""
    query = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.max.sm,power.draw"
    ask = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    system = {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
    tools = {name: tool(name) for name in ("nvcc", "ncu", "compute-sanitizer")}
    t.run("system", ["uname", "-a"], 2, lambda text: {"uname": text.strip(), **system, **tools})
    t.run("GPU", ask, 5, lambda text: dict(zip(query.split(","), text.strip().split(", "))))
    programs = sorted({t.program(name) for name in PROGRAMS})
    t.run("libraries", ["ldd", *programs], 3, libraries)
    t.run("version", [t.program("train"), "--version"], 5, lambda text: {"said": text.strip()})


def first_steps(t):
    """Three steps of a small model; then, which takes longer, which PyTorch is there"""
    code = "import torch; print(torch.__version__, torch.cuda.get_device_name())"
    t.golden("three steps", 1, None, LAZY)
    t.run("PyTorch", [sys.executable, "-c", code], 15, lambda text: {"version": text.strip()})


def correctness(t):
    """Is it right? Nothing is timed, so everything runs at once"""

    def operations(name, program, tests, **variables):
        def count(text):
            return {"cases": int(re.findall(r"PASSED  \] (\d+) test", text)[-1])}

        tests = "layernorm*" if t.toy else tests
        t.run(name, [t.program(program)], 75, count, OPS_TESTS=tests, **LAZY, **variables)

    def suggestion(k):
        operations(f"suggestion {k}", "production", "*matmul*", MATMUL_SUGGESTION=str(k))

    def ran(text):
        if not re.search(r"\nOK$", text.strip()):  # where it finds no GPU it skips, and says so
            raise ValueError(text.strip()[-200:])
        return {}

    def device(test):
        words = [sys.executable, ROOT + "/test/test_gpu_device.py", "Device." + test]
        t.run(test, words, 75, ran, TEST_ALL=str(int(t.toy)))

    tests = ("test_bf16",) if t.toy else ("test_experts", "test_bf16", "test_golden", "test_bits")
    together(lambda: operations("operations", "operations", "*"),
             lambda: operations("operations, production", "production", "*"),
             *(functools.partial(suggestion, k) for k in (1, 2, 3)),
             *(functools.partial(device, test) for test in tests),
             lambda: t.peer("PyTorch compiles", ["warm", peer(t, "124M"), peer(t, "1558M")], 75))


def peer(t, name):
    return "toy:2" if t.toy else f"{name}:{CASES[name].rows}"


def nccl(t):
    """Ranks of one GPU use NCCL when they are told to"""
    told = {"TRAIN_GPT_NCCL_SHARED": "1", "NCCL_DEBUG": "WARN"}
    two = {"micro_batch": 1}
    t.golden("NCCL, one rank", 1, "nccl", told)
    t.golden("NCCL, two ranks", 2, "nccl", told, **two)
    t.golden("NCCL, two ranks, ZeRO 3", 2, "nccl", told, **two, zero=3)
    t.golden("NCCL, two ranks, a pipeline", 2, "nccl", told, **two, pipeline=2)


def ceilings(t):
    """What the GPU reaches at most, by PyTorch"""
    t.peer("ceilings", ["ceilings"], 30)


def kernels_shape(t, name):
    return TOY_KERNELS[: len(KERNELS[name])] if t.toy else KERNELS[name]


def kernels(t):
    """Every operation, and attention, by themselves"""
    for name in KERNELS:
        words = [t.program("kernels"), *kernels_shape(t, name)]
        t.run(f"kernels, {name}", words, 20, json_lines, **LAZY)
    words = [t.program("attention"), *(TOY_KERNELS[:4] if t.toy else ())]
    t.run("attention", words, 20, json_lines, **LAZY)


def small(t):
    """124M: own attention, cuDNN's, PyTorch"""
    t.train("124M", OWN, 25, 12, **{"profile-steps": "11:12"})
    t.train("124M", CUDNN, 25, 12)
    t.peer("124M, PyTorch", ["steps", peer(t, "124M")], 40)


def large(t):
    """1558M: the same"""
    t.train("1558M", OWN, 35, **{"profile-steps": "9:10"})
    t.train("1558M", CUDNN, 35)
    t.peer("1558M, PyTorch", ["steps", peer(t, "1558M")], 60)


def others(t):
    """774M and Llama 1B: own attention, cuDNN's"""
    for name in ("774M", "Llama 1B"):
        for attention in ATTENTIONS:
            t.train(name, attention, 20, 8)


def systems(t):
    """nano with Muon, Qwen3; private steps beside others, of as many samples; states on the host"""
    profiled = {"profile-steps": "7:8"}
    t.train("nano d12", CUDNN, 30, 8, optimizer="muon", **profiled)
    t.train("Qwen3 0.6B", CUDNN, 30, 8, **profiled)
    batches = 2 if t.toy else 8  # a private step, which draws its samples, seldom needs another
    private = {"dp-noise": 1, "dp-show-private": 1}
    t.train("124M", CUDNN, 30, 8, "not private", batches, **profiled)
    for style in ("unit", "flat"):
        flags = {**private, "dp-clip-style": style, **profiled}
        t.train("124M", CUDNN, 40, 10, f"private, {style}", batches - 0.5, **flags)
    for what in ("optimizer", "params", "all"):
        title = f"--offload {what}"
        t.train("1558M", CUDNN, 90, 8, title, offload=what, **profiled)


def experts(t):
    """Mixtures of experts: few large ones, many small ones; balanced in two ways"""
    profiled = {"profile-steps": "7:8"}
    bias = {"moe-balance": "bias", **profiled}
    t.train("Mixtral 0.8B", CUDNN, 15, 8, **bias)
    t.train("Mixtral 0.8B", CUDNN, 15, 8, "balanced by its loss", **{"moe-balance": "aux"})
    t.train("Qwen3-MoE 0.9B", CUDNN, 15, 8, **bias)


def counters(t):
    """What ncu counts in the third call of each of the program's own kernels"""
    sections = "SpeedOfLight MemoryWorkloadAnalysis WarpStateStats Occupancy LaunchStats".split()
    metrics = "gpu__time_duration.sum dram__bytes_read.sum dram__bytes_write.sum".split()
    metrics = ["--metrics", ",".join([*metrics, "smsp__inst_executed.sum"])]
    kept = []

    def read(text):
        lines = [line for line in text.splitlines() if line.startswith('"')]
        kept.extend(lines[2:] if kept else lines)  # after a line of names, and one of units
        path = os.path.join(t.out, "ten_counters.csv")
        write_whole(path, "\n".join(kept)[:COUNTER_BYTES] + "\n")
        return {"kernels": len(lines) - 2}

    for title, name, own in (
        ("ncu", "124M", "_kernel"),  # all that the program has
        ("ncu, Llama 1B", "Llama 1B", "rmsnorm|head_norm|rotary|swiglu"),
    ):
        words = [tool("ncu"), "--clock-control", "none", "--kernel-id", f"::regex:.*({own}).*:3"]
        words += ["--csv", "--page", "raw", *(word for s in sections for word in ("--section", s))]
        shape = list(kernels_shape(t, name))
        shape[5] = min(shape[5], 1024)  # the product is none of the program's
        words += [*metrics, t.program("kernels"), *shape]
        t.run(title, words, 65, read, **LAZY)


def memory_errors(t):
    """compute-sanitizer: accesses out of bounds, races"""
    sanitizer = [tool("compute-sanitizer"), "--error-exitcode", 9, "--tool"]
    flags = harness.command_line({"dtype": "bf16", "steps": 2})
    t.run("memcheck", [*sanitizer, "memcheck", t.program("train"), *flags], 30, **LAZY)
    tests = "layernorm*" if t.toy else "attention*bf16*"
    words = [*sanitizer, "racecheck", t.program("operations")]
    t.run("racecheck", words, 40, OPS_TESTS=tests, **LAZY)


STEPS = {  # name: (seconds, what it does)
    "machine": (10, machine),
    "first steps": (10, first_steps),
    "correctness": (60, correctness),
    "nccl": (30, nccl),
    "ceilings": (15, ceilings),
    "kernels": (30, kernels),
    "124M": (55, small),
    "1558M": (65, large),
    "others": (40, others),
    "experts": (35, experts),
    "systems": (130, systems),
    "counters": (40, counters),
    "memory errors": (50, memory_errors),
}


def run(options):
    began = time.monotonic() - (time.time() - float(os.environ.get(UNPACKED, time.time())))
    slack = TOY_SLACK if options.toy else 1
    end, last = began, began + (options.seconds or SECONDS * slack) - 2 * GRACE
    os.makedirs(options.out, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        t = Run(options, began, work)
        for t.step in options.only:
            seconds, step = STEPS[t.step]
            end += dict(options.budget).get(t.step, seconds * slack)
            t.end = min(end, last)
            try:
                step(t)
            except Exception as error:  # in the step's own lines
                t.record(t.entry("the step itself", reason=repr(error)))
    if UNPACKED in os.environ:
        shutil.rmtree(ROOT)
    return int(any(entry["status"] != PASSED for entry in t.results["entries"]))


# --------------------------------------------------------------------------------------------------


def table(options):
    import gpu_table  # which is not packed

    text = gpu_table.results_page(options.folders, options.whole)
    if options.page == "-":
        print(text, end="")
    else:
        write_whole(options.page, text)
    return 0


def steps_of(text):
    names = text.split(",")
    for name in names:
        if name not in STEPS:
            raise argparse.ArgumentTypeError(f"no step {name!r}; steps: {', '.join(STEPS)}")
    return [name for name in STEPS if name in names]


def budget_of(text):
    name, _, seconds = text.partition("=")
    if name not in STEPS or not seconds.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not STEP=SECONDS")
    return name, int(seconds)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True)
    packs = verbs.add_parser("pack", help="builds the programs, into one file")
    runs = verbs.add_parser("run", help="the steps, on the other machine")
    tables = verbs.add_parser("table", help="writes the page of what runs found")
    for verb, work in ((packs, pack), (runs, run), (tables, table)):
        verb.set_defaults(work=work)
    for verb in (packs, runs):
        verb.add_argument("--toy", action="store_true", help="the emulation's programs, toy sizes")
    packs.add_argument("--out", metavar="FILE", default=os.path.join(ROOT, "build/gpu_ten.pyz"))
    packs.add_argument("--archs", default="90", help="the GPU's architecture (default: 90)")
    runs.add_argument("--out", metavar="FOLDER", required=True, help="for three files of results")
    runs.add_argument("--only", metavar="STEP[,STEP]", type=steps_of, default=list(STEPS))
    runs.add_argument("--seconds", type=float, help=f"of all (default: {SECONDS})")
    budget = {"type": budget_of, "action": "append", "default": []}
    runs.add_argument("--budget", metavar="STEP=SECONDS", help="another one", **budget)
    tables.add_argument("folders", metavar="FOLDER", nargs="*",
                        help="of runs; none: estimates only")
    page = os.path.join(ROOT, "docs/results/gpu.md")
    tables.add_argument("--page", default=page, help="-: to standard output")
    tables.add_argument("--whole", action="store_true",
                        help="with every ceiling, kernel and command")
    options = parser.parse_args()
    return options.work(options)


if __name__ == "__main__":
    sys.exit(main())
