"""The first hour on a GPU: does the program work there, and how fast is it?

Stages run one after another, each with a time limit of its own. A stage that fails, or takes too
long, does not keep the next ones from running. After each stage FOLDER/results.json (every stage:
its name, commands, status, seconds and figures) and FOLDER/results.md (one page) are written anew,
so a run that is killed keeps what it has; what a stage's commands print is in FOLDER/STAGE.log. A
later call with the same FOLDER adds its stages to the results, or replaces them. The status of a
stage is passed, failed, skipped (with the reason) or timed out. Programs (mpirun, nvcc, nsys ...)
are looked for in PATH; LD_LIBRARY_PATH and OPAL_PREFIX are handed on. Without mpirun, runs of one
rank are started alone, and runs of several are skipped. Exit status: 0 when every stage of this
call passed or was skipped, 1 when one did not, 2 for bad arguments.
"""

import argparse
import collections
import ctypes
import datetime
import glob
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
import tempfile
import time

import bench_gpu

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PASSED, FAILED, SKIPPED, TIMED_OUT = "passed", "failed", "skipped", "timed out"
NOT_ENDED = "it began and did not end: this call of the script was killed"
GOLDEN = [os.path.join(ROOT, "test/golden/gpt_tiny" + end) for end in ("_model.bin", "_tokens.bin")]
GRACE = 5  # seconds between asking processes to end and ending them
SUGGESTIONS = 8
LOSS_STEPS = 100
SAME_LOSS = 0.02  # of bf16 runs whose sums differ in order
HOTTEST = 8
# What llm.c states of itself, and what follows from it: tokens/s of one GPU, MFU.
LLM_C = {
    "124M": "218,000 tokens/s, MFU 56 % (one of 8 A100 SXM)",
    "1558M": "47,000 to 49,000 tokens/s, MFU 46 to 48 % (one of 8 H100 SXM)",
}
ORDER = "124M", "1558M"
TOY_CASE = bench_gpu.Case("layers=2,heads=2,channels=16,vocab=100", 2, 2, 16, 100, 2, 16, 2, "none")

TOY_TESTS = "layernorm*"  # of the case table: little to emulate

Programs = collections.namedtuple("Programs", "train cudnn operations production kernels attention")
REAL = Programs(
    "./train_gpt_cuda",
    "build/train_gpt_cudnn",
    "build/gpu_test_ops",
    "build/gpu_production_test_ops",
    "build/gpu_bench_kernels",
    "build/gpu_bench_attention",
)
TOY = Programs(
    "./train_gpt_emu",
    "./train_gpt_emu",
    "build/test_ops_emu",
    "build/test_ops_emu",
    "build/bench_kernels_emu",
    "build/bench_attention_emu",
)


class Skip(Exception):
    """There is nothing to do here, and why."""


class Failure(Exception):
    """What went wrong."""


class TimedOut(Exception):
    """The stage's time is over."""


# --------------------------------------------------------------------------------------------------
# Commands


def die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: the script may be killed


def session_of(pid):
    """The session of a process; None where it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rsplit(")", 1)[1].split()[3])
    except (OSError, ValueError, IndexError):
        return None


def end_session(process):
    """Ends a command and all it started: mpirun puts its ranks into process groups of their own, in
    the same session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for path in glob.glob("/proc/[0-9]*"):
            pid = int(os.path.basename(path))
            if session_of(pid) == process.pid:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    pass
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            pass


class Context:
    """What a stage has: programs, a log, the time it may take; and what it leaves: commands and
    figures."""

    def __init__(self, toy, folder, name, seconds):
        self.toy, self.programs = toy, TOY if toy else REAL
        self.folder, self.log = folder, os.path.join(folder, name + ".log")
        self.end = time.monotonic() + seconds
        self.commands, self.figures = [], {}
        with open(self.log, "w"):
            pass

    def run(self, *words, code=0, **environment):
        """A command's standard output; its exit status must be `code`, unless that is None."""
        words = [str(word) for word in words]
        shown = shlex.join([f"{name}={value}" for name, value in environment.items()] + words)
        entry = {"command": shown, "status": FAILED, "seconds": 0.0}
        self.commands.append(entry)
        start = time.monotonic()
        if start >= self.end:
            entry["status"] = TIMED_OUT
            raise TimedOut(shown)
        with open(self.log, "a+") as log, tempfile.TemporaryFile("w+", errors="replace") as out:
            log.write(f"$ {shown}\n")
            log.flush()
            settings = dict(
                os.environ,
                OMPI_ALLOW_RUN_AS_ROOT="1",
                OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                **environment,
            )
            process = subprocess.Popen(
                words,
                cwd=ROOT,
                env=settings,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
            try:
                process.wait(self.end - start)
            except subprocess.TimeoutExpired:
                entry["status"] = TIMED_OUT
                raise TimedOut(shown) from None
            finally:
                if process.poll() is None:
                    end_session(process)
                entry["seconds"] = round(time.monotonic() - start, 2)
                out.seek(0)
                text = out.read()
                log.write(text)
        if code is not None and process.returncode != code:
            raise Failure(f"exit status {process.returncode} of: {shown}")
        entry["status"] = PASSED
        return text

    def need(self, *programs):
        for program in programs:
            if not (
                os.access(os.path.join(ROOT, program), os.X_OK)
                if "/" in program
                else shutil.which(program)
            ):
                raise Skip(f"{program} is missing")

    def launch(self, ranks):
        """The words before a program that has this many ranks."""
        if shutil.which("mpirun"):
            return ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", ranks]
        if ranks > 1:
            raise Skip("mpirun is missing")
        return []

    def train(self, program, case, steps, *words, micro_steps=1, **environment):
        """The events of a run's log."""
        self.need(program)
        with tempfile.TemporaryDirectory() as folder:
            shard, log = os.path.join(folder, "train.bin"), os.path.join(folder, "log.jsonl")
            bench_gpu.write_shard(shard, case.vocab)
            self.run(
                *self.launch(1),
                program,
                "--train",
                shard,
                "--model",
                case.model,
                "--dtype",
                "bf16",
                "--seq-len",
                case.T,
                "--micro-batch",
                case.rows,
                "--batch-tokens",
                micro_steps * case.rows * case.T,
                "--steps",
                steps,
                "--val-every",
                0,
                "--weight-decay",
                0.1,
                "--log",
                log,
                *words,
                **environment,
            )
            with open(log) as lines:
                return [json.loads(line) for line in lines]


# --------------------------------------------------------------------------------------------------
# Stages: each takes its Context and sets its figures


def versions(c):
    """What is installed, and how it is connected"""
    commands = {
        "gpu": [
            "nvidia-smi",
            "--query-gpu=name,driver_version,memory.total,clocks.max.sm,compute_cap,pci.bus_id",
            "--format=csv,noheader",
        ],
        "topology": ["nvidia-smi", "topo", "-m"],
        "nvcc": ["nvcc", "--version"],
        "mpi": ["mpirun", "--version"],
    }
    c.figures["system"] = (
        f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    )
    for name, words in commands.items():
        c.figures[name] = c.run(*words, code=None).strip() if shutil.which(words[0]) else "missing"
    for name, symbol in (
        ("cublasLt", "cublasLtGetVersion"),
        ("nccl", "ncclGetVersion"),
        ("cudnn", "cudnnGetVersion"),
    ):
        c.figures[name] = library_version(name, symbol)
    if not c.toy and c.figures["gpu"] == "missing":
        raise Failure("nvidia-smi is missing: this is no machine with a GPU")
    c.run("uname", "-a")


def library_version(name, symbol):
    """As the library itself says, wherever the loader or this project's environment has it."""
    places = [f"lib{name}.so", *(f"lib{name}.so.{n}" for n in (13, 12, 9, 8, 2))]
    for path in [
        *places,
        *sorted(
            glob.glob(
                os.path.join(ROOT, f".venv/lib/python3*/site-packages/nvidia/*/lib/lib{name}.so*")
            )
        ),
    ]:
        try:
            function = getattr(ctypes.CDLL(path), symbol)
        except (OSError, AttributeError):
            continue
        if name == "nccl":
            number = ctypes.c_int()
            function(ctypes.byref(number))
            return str(number.value)
        function.restype = ctypes.c_size_t
        return str(function())
    return "missing"


def build(c):
    """Compiles the programs for this GPU"""
    if c.toy:
        c.need(*set(c.programs))
        c.run("make", "-q", "train_gpt_emu", code=None)
        return
    if not shutil.which("nvcc"):
        there = [
            program for program in c.programs if os.access(os.path.join(ROOT, program), os.X_OK)
        ]
        raise Skip(f"nvcc is missing; already built: {', '.join(there) or 'nothing'}")
    arch = (
        c.run("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
        .split()[0]
        .replace(".", "")
    )
    c.figures["arch"] = arch
    c.run("make", f"ARCHS={arch}", "cuda")
    c.run(
        "make",
        "-k",
        f"ARCHS={arch}",
        c.programs.operations,
        c.programs.production,
        c.programs.kernels,
        c.programs.attention,
    )
    if glob.glob(os.path.join(ROOT, ".venv/lib/python3*/site-packages/include/cudnn_frontend.h")):
        c.run("make", f"ARCHS={arch}", c.programs.cudnn)


def run_operations(c, program, **environment):
    """The number of cases that passed."""
    c.need(program)
    c.run(program, **environment, **({"OPS_TESTS": TOY_TESTS} if c.toy else {}))
    with open(c.log, errors="replace") as log:
        return int(re.findall(r"\[  PASSED  \] (\d+) test", log.read())[-1])


def each(c, work, cases):
    """Goes on after a case that fails; then fails. The figures have each case's outcome."""
    bad = []
    for name in cases:
        try:
            c.figures[name] = work(name)
        except Failure as failure:
            c.figures[name] = str(failure)
            bad.append(str(name))
    if bad:
        raise Failure(f"failed: {', '.join(bad)}")


def operations(c):
    """The case table of all operations: test and production workspaces, and each suggestion of the
    library"""
    cases = {
        "test workspace": (c.programs.operations, {}),
        "production workspace": (c.programs.production, {}),
    }
    for k in range(2 if c.toy else SUGGESTIONS):
        cases[f"suggestion {k}"] = (c.programs.production, {"MATMUL_SUGGESTION": str(k)})
    c.need(c.programs.operations, c.programs.production)
    each(c, lambda name: run_operations(c, cases[name][0], **cases[name][1]), cases)


def sanitizers(c):
    """compute-sanitizer on two steps of a small model, and on attention's cases"""
    c.need("compute-sanitizer", c.programs.train, c.programs.operations)

    def check(tool):
        words = ["compute-sanitizer", "--tool", tool, "--error-exitcode", 9]
        small = [
            c.programs.train,
            "--model",
            GOLDEN[0],
            "--train",
            GOLDEN[1],
            "--seq-len",
            20,
            "--micro-batch",
            3,
            "--batch-tokens",
            60,
            "--steps",
            2,
            "--val-every",
            0,
        ]
        c.run(*words, *small)
        c.run(*words, c.programs.operations, OPS_TESTS=TOY_TESTS if c.toy else "*attention*")
        return "no errors"

    each(c, check, ("memcheck", "racecheck", "initcheck", "synccheck"))


def golden(c):
    """PyTorch's golden numbers; 1, 2 and 4 ranks on one GPU; the same bits again, and after a
    resume"""
    c.need(c.programs.train, "mpirun")
    tests = ("test_golden",) if c.toy else ("test_golden", "test_bf16", "test_bits")

    def check(test):
        c.run(
            "python3",
            "test/test_gpu_device.py",
            "Device." + test,
            **({"TEST_ALL": "1"} if c.toy else {}),
        )
        return "passed"

    each(c, check, tests)


def losses_of(events):
    return [event["loss"] for event in events if event["event"] == "step"]


def losses(c):
    """Own attention against cuDNN's: the losses of the same steps"""
    c.need(c.programs.train, c.programs.cudnn)
    case = TOY_CASE if c.toy else bench_gpu.CASES["124M"]._replace(rows=8)
    steps = 4 if c.toy else LOSS_STEPS
    runs = [c.train(c.programs.train, case, steps), c.train(c.programs.cudnn, case, steps)]
    names = [run[0]["attention"] for run in runs]
    own, other = map(losses_of, runs)
    if len(own) != steps or len(other) != steps:
        raise Failure(f"{len(own)} and {len(other)} steps instead of {steps}")
    apart = max(abs(a - b) / abs(b) for a, b in zip(own, other))
    c.figures.update(
        steps=steps,
        attention=names,
        first=[own[0], other[0]],
        last=[own[-1], other[-1]],
        largest_relative_difference=apart,
    )
    if not c.toy and names != ["own", "cuDNN"]:
        raise Failure(f"attention was computed by {names[0]} and {names[1]}")
    if not apart <= SAME_LOSS:
        raise Failure(f"the losses differ by {apart:.3g}")


def kernels(c):
    """Every operation beside what this GPU copies and multiplies at most"""
    c.need(c.programs.kernels)
    found = [
        json.loads(line)
        for line in c.run(
            c.programs.kernels, *([1, 16, 16, 2, 100, 32] if c.toy else [])
        ).splitlines()
    ]
    ceilings = found[0]["gb_per_s"], found[1]["tflops"]
    for work in found:
        by_memory, by_products = (
            1e-9 * work["bytes"] / ceilings[0],
            1e-12 * work["flops"] / ceilings[1],
        )
        work["share_of_ceiling"] = 1e3 * max(by_memory, by_products) / work["ms"]
    c.figures.update(copy_gb_per_s=ceilings[0], product_tflops=ceilings[1], kernels=found)
    c.need(c.programs.attention)
    c.figures["attention"] = [
        json.loads(line)
        for line in c.run(c.programs.attention, *([1, 16, 16, 2] if c.toy else [])).splitlines()
    ]


def middle(values):
    return statistics.median(values[bench_gpu.WARMUP :] or values)


def speed_of(events, case, micro_steps):
    steps, end = [event for event in events if event["event"] == "step"], events[-1]
    return {
        "tokens_per_s": (
            micro_steps * case.rows * case.T / middle([step["ms"] for step in steps]) * 1e3
        ),
        "mfu": middle([step["mfu"] for step in steps]),
        "memory_predicted": end["memory"]["predicted"]["device"],
        "memory_measured": end["memory"]["measured"]["device"],
        "attention": events[0]["attention"],
    }


def speed(c):
    """Whole training steps in bf16: own attention, cuDNN's, PyTorch"""
    c.need(c.programs.train)
    cases = {"toy": TOY_CASE} if c.toy else {name: bench_gpu.CASES[name] for name in ORDER}
    python = None if c.toy else bench_gpu.peer_python()
    work = {}
    for name, case in cases.items():
        for micro_steps in (1, 8):
            for program in dict.fromkeys((c.programs.train, c.programs.cudnn)):
                if os.access(os.path.join(ROOT, program), os.X_OK):
                    work[f"{name}, {micro_steps} micro-steps, {os.path.basename(program)}"] = (
                        program,
                        case,
                        micro_steps,
                    )
        if python:
            work[f"{name}, 1 micro-steps, PyTorch"] = (python, case, name)

    def measure(name):
        program, case, what = work[name]
        if program != python:
            return speed_of(
                c.train(program, case, bench_gpu.WARMUP + min(case.steps, 10), micro_steps=what),
                case,
                what,
            )
        with tempfile.TemporaryDirectory() as folder:
            log = os.path.join(folder, "log")
            c.run(*bench_gpu.peer_command(python, what, case, log))
            with open(log) as lines:
                return {"tokens_per_s": bench_gpu.read_run(lines, case).tokens_per_s}

    if not python:
        c.figures["PyTorch"] = "not installed with a GPU: not measured"
    c.figures["llm.c, published"] = LLM_C
    each(c, measure, work)


def offload(c):
    """Optimizer states on the host: do their copies go on beside the computing?"""
    case = TOY_CASE if c.toy else bench_gpu.CASES["124M"]
    runs = {}
    for name, words in (
        ("none", []),
        (
            "optimizer, updated on the device",
            ["--offload", "optimizer", "--offload-update", "device"],
        ),
        ("optimizer, updated on the host", ["--offload", "optimizer", "--offload-update", "host"]),
    ):
        events = c.train(
            c.programs.train,
            case,
            bench_gpu.WARMUP + (1 if c.toy else 4),
            *words,
            micro_steps=1 if c.toy else 8,
        )
        runs[name] = {
            "step_ms": middle([event["ms"] for event in events if event["event"] == "step"]),
            "bytes": events[-1]["offload"]["measured"],
            "memory_measured": events[-1]["memory"]["measured"]["device"],
        }
        runs[name]["time_over_none"] = runs[name]["step_ms"] / runs["none"]["step_ms"]
        c.figures.update(runs)


def profile(c):
    """Where the time of two steps goes: by action; by kernel (nsys); the hottest kernels (ncu)"""
    case = TOY_CASE if c.toy else bench_gpu.CASES["124M"]
    events = c.train(c.programs.train, case, 6, "--profile-steps", "4:5")
    (told,) = [event for event in events if event["event"] == "profile"]
    c.figures["actions"] = sorted(told["actions"], key=lambda action: -action["ms"])[:12]
    c.figures["waiting_ms"] = told["waiting_ms"]
    hottest = profile_nsys(c, case) if shutil.which("nsys") else []
    if not hottest:
        c.figures["nsys"] = "missing" if not shutil.which("nsys") else "nsys told of no kernels"
        c.figures["ncu"] = "skipped: nsys names the kernels"
    elif not shutil.which("ncu"):
        c.figures["ncu"] = "missing"
    else:
        profile_ncu(c, case, hottest)


def step_words(c, case, shard):
    return [
        c.programs.train,
        "--train",
        shard,
        "--model",
        case.model,
        "--dtype",
        "bf16",
        "--seq-len",
        case.T,
        "--micro-batch",
        case.rows,
        "--steps",
        6,
        "--val-every",
        0,
        "--profile-steps",
        "4:5",
    ]


def profile_nsys(c, case):
    """The names of the kernels that take most of the time."""
    with tempfile.TemporaryDirectory() as folder:
        shard, report = os.path.join(folder, "train.bin"), os.path.join(c.folder, "steps")
        bench_gpu.write_shard(shard, case.vocab)
        c.run(
            "nsys",
            "profile",
            "--force-overwrite=true",
            "-o",
            report,
            "--capture-range=cudaProfilerApi",
            "--capture-range-end=stop",
            *step_words(c, case, shard),
        )
    text = c.run(
        "nsys", "stats", "--report", "cuda_gpu_kern_sum", "--format", "csv", report + ".nsys-rep"
    )
    rows = [line for line in text.splitlines() if re.match(r"\d", line)]
    c.figures["nsys"] = rows[:HOTTEST]
    return [
        re.sub(r"^(?:void )?([\w:]+).*", r"\1", row.split(",", 8)[-1].strip('"'))
        for row in rows[:HOTTEST]
    ]


def profile_ncu(c, case, hottest):
    with tempfile.TemporaryDirectory() as folder:
        shard = os.path.join(folder, "train.bin")
        bench_gpu.write_shard(shard, case.vocab)
        for i, kernel in enumerate(dict.fromkeys(hottest)):
            c.run(
                "ncu",
                "--set",
                "full",
                "--force-overwrite",
                "-o",
                os.path.join(c.folder, f"kernel{i}"),
                "--kernel-name",
                kernel,
                "--launch-count",
                1,
                *step_words(c, case, shard),
            )
        c.figures["ncu"] = list(dict.fromkeys(hottest))


# name -> what it does, and how many seconds it may take on a GPU and as a toy
STAGES = {
    "versions": (versions, 60, 20),
    "build": (build, 590, 30),
    "operations": (operations, 590, 60),
    "golden": (golden, 300, 120),
    "kernels": (kernels, 120, 30),
    "profile": (profile, 400, 30),
    "losses": (losses, 240, 30),
    "speed": (speed, 590, 30),
    "offload": (offload, 240, 30),
    "sanitizers": (sanitizers, 590, 60),
}


# --------------------------------------------------------------------------------------------------
# Results


def write_whole(path, text):
    """Another reader, or a kill, sees the old file or the new one."""
    with open(path + ".new", "w") as file:
        file.write(text)
    os.replace(path + ".new", path)


def figure(value):
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {figure(x)}" for name, x in value.items())
    return str(value)


def table(rows):
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [
        names,
        ["---"] * len(names),
        *([figure(row.get(name, "")).replace("|", "\\|") for name in names] for row in rows),
    ]
    return ["| " + " | ".join(line) + " |" for line in lines]


def page(results):
    title = "# First hour on a GPU" + (
        ": a rehearsal on the emulation, at toy size; none of its figures is a measurement"
        if results["toy"]
        else ""
    )
    lines = [title, "", f"Machine: {results['host']}. Made by `scripts/gpu_hour.sh`.", ""]
    lines += table(
        [
            {
                "stage": s["name"],
                "status": s["status"],
                "seconds": s["seconds"],
                "what": s["what"],
                "reason": s["reason"],
            }
            for s in results["stages"]
        ]
    )
    missing = [
        name for name in STAGES if name not in [stage["name"] for stage in results["stages"]]
    ]
    lines += ["", f"Not run: {', '.join(missing)}." if missing else "Every stage was run."]
    for stage in results["stages"]:
        lines += ["", f"## {stage['name']}: {stage['status']}", ""]
        for name, value in stage["figures"].items():
            if isinstance(value, list) and value and isinstance(value[0], dict):
                lines += ["", f"{name}:", "", *table(value), ""]
            elif isinstance(value, str) and "\n" in value:
                lines += [f"- {name}:", "", *("      " + line for line in value.splitlines()), ""]
            else:
                lines.append(f"- {name}: {figure(value)}")
        lines += [""] + [
            f"    {command['command']}    # {command['status']}, {command['seconds']} s"
            for command in stage["commands"]
        ]
    return "\n".join(lines) + "\n"


def write_results(folder, results):
    order = list(STAGES)
    results["stages"].sort(key=lambda stage: order.index(stage["name"]))
    write_whole(os.path.join(folder, "results.json"), json.dumps(results, indent=1) + "\n")
    write_whole(os.path.join(folder, "results.md"), page(results))


def read_results(folder, toy):
    empty = {"format": 1, "toy": toy, "host": platform.node(), "stages": []}
    path = os.path.join(folder, "results.json")
    if not os.path.exists(path):
        return empty
    with open(path) as file:
        found = json.load(file)
    if found["toy"] != toy:
        raise Failure(
            f"{path} is of a run {'with' if found['toy'] else 'without'} --toy: give another --out"
        )
    return found


def run_stage(name, options, results, seconds):
    """Runs a stage and writes the results before and after it."""
    work = STAGES[name][0]
    entry = {
        "name": name,
        "what": work.__doc__,
        "status": FAILED,
        "reason": NOT_ENDED,
        "began": datetime.datetime.now().isoformat(timespec="seconds"),
        "seconds": 0.0,
        "limit": round(seconds),
        "commands": [],
        "figures": {},
    }
    results["stages"] = [stage for stage in results["stages"] if stage["name"] != name] + [entry]
    write_results(options.out, results)
    start = time.monotonic()
    context = Context(options.toy, options.out, name, seconds)
    entry["commands"], entry["figures"] = context.commands, context.figures
    try:
        if seconds <= 0:
            raise Skip("the time of --minutes is over")
        work(context)
        entry.update(status=PASSED, reason="")
    except Skip as reason:
        entry.update(status=SKIPPED, reason=str(reason))
    except TimedOut as reason:
        entry.update(status=TIMED_OUT, reason=f"{seconds:.0f} s were over in: {reason}")
    except Exception as reason:  # whatever a stage stumbles over, the next one runs
        entry.update(
            status=FAILED,
            reason=(
                f"{type(reason).__name__}: {reason}"
                if not isinstance(reason, Failure)
                else str(reason)
            ),
        )
    entry["seconds"] = round(time.monotonic() - start, 2)
    write_results(options.out, results)
    print(f"{entry['status']:9} {name:10} {entry['seconds']:7.1f} s  {entry['reason']}", flush=True)
    return entry["status"]


def stages_of(text):
    names = text.split(",")
    for name in names:
        if name not in STAGES:
            raise argparse.ArgumentTypeError(f"no stage {name!r}: --list names them")
    return [name for name in STAGES if name in names]


def limit_of(text):
    name, _, seconds = text.partition("=")
    if name not in STAGES or not seconds.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not STAGE=SECONDS")
    return name, int(seconds)


def main():
    parser = argparse.ArgumentParser(
        prog="gpu_hour.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", metavar="FOLDER", help="where results are written, and added to")
    parser.add_argument("--list", action="store_true", help="names the stages")
    parser.add_argument(
        "--only", metavar="STAGE[,STAGE]", type=stages_of, default=list(STAGES), help="these stages"
    )
    parser.add_argument(
        "--minutes",
        metavar="N",
        type=float,
        default=60,
        help="for all stages of this call (default 60)",
    )
    parser.add_argument(
        "--limit",
        metavar="STAGE=SECONDS",
        type=limit_of,
        action="append",
        default=[],
        help="another time limit for a stage",
    )
    parser.add_argument(
        "--toy",
        action="store_true",
        help=(
            "a rehearsal: the emulation of a GPU (make emu and the programs of the tests), toy"
            " sizes"
        ),
    )
    options = parser.parse_args()
    if options.list:
        for name, (work, seconds, _) in STAGES.items():
            print(f"{name:10} {seconds:4} s  {work.__doc__}")
        return 0
    if not options.out:
        parser.error("--out FOLDER is missing")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    options.out = os.path.abspath(options.out)
    os.makedirs(options.out, exist_ok=True)
    try:
        results = read_results(options.out, options.toy)
    except (Failure, ValueError, KeyError) as failure:
        parser.error(str(failure))
    limits, end, found = dict(options.limit), time.monotonic() + 60 * options.minutes, []
    for name in options.only:
        seconds = limits.get(name, STAGES[name][2 if options.toy else 1])
        found.append(run_stage(name, options, results, min(seconds, end - time.monotonic())))
    print(os.path.join(options.out, "results.md"))
    return 0 if set(found) <= {PASSED, SKIPPED} else 1


if __name__ == "__main__":
    sys.exit(main())
