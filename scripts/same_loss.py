#!/usr/bin/env python3
"""same_loss.py: is it still the same training, in another layout or in another program?

    same_loss.py [--ranks N] [--steps N] [--only TEXT] -- FLAGS   layouts of this program
    same_loss.py A B [...] [--tokens] [--floor X] [--out FILE]    logs of any program

Layouts. FLAGS are those of train_gpt. They run on one rank, and then in every layout that these
ranks have and that the program accepts: ZeRO stages, pipelines and their schedules, offload,
recomputation, micro-batches. Flags of FLAGS that choose a layout are one of them, "as given". The
table has the largest relative difference from one rank of the loss and of the gradient norm, over
all steps, and of the final weights, over all tensors (of a tensor: the norm of the difference, by
the norm of the tensor).

The noise floor is measured: on one rank, each initial weight is changed by one rounding (to the
next number of its precision, up or down by lot). Three such runs tell by how much loss, norm and
each tensor then differ. (With --share it is three runs with other micro-batches.) A layout sums in
another order and so may differ as much; beyond --factor times that (default 10) it computes
something else. Layouts that are right were seen to reach 5 times.
Gradients that travel in 8 or 4 bits have a floor of their own: of weights that are rounded to so
many bits, compared all together. With --zero-quantized-weights, which also rounds on one rank, one
rank does so, too. --cyclic v1 and v2 are other trainings: each is compared with itself on one rank.

Logs. Each of the others is compared with A: where the first step is that differs by more than the
floor, and the largest difference; and whether the losses at the end differ by more than they
spread from step to step. Forms: see loss_logs.py; folders are searched. The floor is half of the
last decimal that each log was written with, and 1e-5 of the loss, which is what 24 bits leave when
sums are made in another order; --floor X is relative, too, and replaces the 1e-5. --tokens aligns
by tokens; for a log that does not tell them give LOG@N, N being the tokens of a step. --tag NAME is
the tag of the loss in event files with another one. The picture is beside A, or --out FILE.

Exit status: 0 the same, 1 not the same, 2 bad input, 3 resources.
"""

import argparse
import errno
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where Python is isolated

from loss_logs import read_curve
from plot import pyplot_or_none
from regular_files import one_line
from run_log import EXIT_INPUT, EXIT_RESOURCES, BadLog, events, inner, plain

ROOT = Path(__file__).resolve().parent.parent
EXIT_DIFFERENT = 1
FACTOR = 10
STEPS = 5
NOISE_RUNS = 3
ORDER = 1e-5  # relative: fp32, sums of up to 1e5 numbers in another order
# The floor is not less than one rounding: of losses and norms, sums in fp32, and of weights.
LEAST = 2.0**-23
LEAST_OF_WEIGHTS = {"fp32": LEAST, "bf16": 2.0**-8}
BLOCK = 256  # elements that share a scale, as --zero-quant-block has it
MANY = 20  # steps, from which on a mean of the last ones says something


class Refused(Exception):
    """One line for a person; exit status 2."""


# --------------------------------------------------------------------------------------------------
# Layouts

# Flags that choose a layout, and change nothing of what is computed.
LAYOUT_FLAGS = {
    "zero", "zero-quantized-weights", "zero-hpz-partition-size", "zero-quantized-gradients",
    "zero-quant-block", "zero-gradient-bits", "zero-error-feedback", "reduce-dtype",
    "pipeline", "pipeline-schedule", "pipeline-warmup", "micro-batches", "micro-batch",
    "recompute", "offload", "offload-update", "offload-dir", "device-memory", "host-memory",
    "ranks-per-node", "cyclic-mode", "fit",
}
QWZ = {"zero": "3", "zero-quantized-weights": "1"}
# Flags about what is shown and kept.
OUTPUT_FLAGS = {
    "out", "log", "log-every", "tensorboard", "config", "export", "trace", "profile-steps",
    "val", "val-every", "val-batches", "hellaswag", "sample-every", "save-every", "keep",
    "resume", "steps", "batch-tokens", "json", "watchdog",
}

# What a run is not to do, whatever FLAGS say; the last value of a flag counts.
NOTHING_ELSE = "--out= --resume=0 --save-every=0 --tensorboard= --hellaswag= --val-every=0".split()
NOTHING_ELSE += "--sample-every=0 --log-every=0".split()


@dataclass
class Layout:
    name: str
    ranks: int
    flags: dict
    group: str = ""  # of GROUPS; or "cyclic v1", "cyclic v2"


@dataclass
class Group:
    """Layouts that are compared with the same run on one rank."""

    title: str
    flags: dict = field(default_factory=dict)  # of that run
    bits: int = 0  # gradients travel in so many, so the floor is of weights in so many; 0: exactly


# qwZ rounds on one rank, too; gradients are rounded only where they travel.
GROUPS = {
    "": Group("one rank"),
    "qwZ": Group("qwZ on one rank", QWZ),
    "8 bits": Group("messages of 8 bits or more", {}, 8),
    "4 bits": Group("messages of 4 bits", {}, 4),
    "qwZ, 8 bits": Group("qwZ, and messages of 8 bits", QWZ, 8),
    "qwZ, 4 bits": Group("qwZ, and messages of 4 bits", QWZ, 4),
}


def group_of(flags):
    """The group of a layout, by what its messages carry."""
    found = ["qwZ"] * (flags.get("zero-quantized-weights") == "1")
    if flags.get("zero-quantized-gradients") == "1":
        found.append(f"{flags.get('zero-gradient-bits', 4)} bits")
    elif flags.get("reduce-dtype", "fp32") != "fp32":
        found.append("8 bits")
    return ", ".join(found)


def mixed(layers, parts):
    """Units of the stages of an uneven pipeline: one, ..., and the rest."""
    return [1] * (parts - 1) + [layers + 2 - (parts - 1)]


def one_rank(samples):
    yield "micro-batches of 1", dict(micro_batch=1)
    if samples > 2:
        yield f"micro-batches of {samples - 1}", dict(micro_batch=samples - 1)
    yield "one micro-batch", dict(micro_batch=samples)
    yield "recomputation", dict(recompute="block")
    yield "offload optimizer", dict(offload="optimizer", offload_update="device")
    yield "offload optimizer, host updates", dict(offload="optimizer", offload_update="host")
    yield "offload params", dict(offload="params")
    yield "offload all", dict(offload="all")
    yield "offload to disk", dict(offload="optimizer", offload_dir="DISK")


def divided(ranks):
    for stage in range(4):
        yield f"ZeRO {stage}", dict(zero=stage)
    for stage in 1, 2, 3:
        yield f"ZeRO {stage}, micro-batches of 1", dict(zero=stage, micro_batch=1)
    yield "ZeRO 3, recomputation", dict(zero=3, recompute="block")
    yield "ZeRO 2, offload optimizer", dict(zero=2, offload="optimizer", offload_update="host")
    yield "ZeRO 3, offload all", dict(zero=3, offload="all")
    hpz = dict(zero=3, zero_hpz_partition_size=ranks, ranks_per_node=ranks)
    yield "ZeRO 3, hpZ", hpz


def pipelines(ranks, layers, samples):
    half = max(1, samples // 2)
    stages = min(ranks, layers + 2)
    for schedule in "gpipe", "dapple", "zero-bubble":
        flags = dict(pipeline=stages, pipeline_schedule=schedule, micro_batch=1)
        yield f"pipeline of {stages}, {schedule}", flags
    one = dict(pipeline=stages, micro_batch=1)
    yield f"pipeline of {stages}, more warm-up", dict(one, pipeline_warmup="b")
    yield f"pipeline of {stages}, larger micro-batches", dict(one, micro_batch=half)
    yield f"pipeline of {stages}, recomputation", dict(one, recompute="block")
    yield f"pipeline of {stages}, offload params", dict(one, offload="params")
    units = mixed(layers, stages)
    yield "pipeline, first stage of 1", dict(one, pipeline=",".join(f"{u}:1" for u in units))
    units = units[::-1]
    yield "pipeline, last stage of 1", dict(one, pipeline=",".join(f"{u}:1" for u in units))
    if ranks > 2:
        wide = f"1:1,{layers + 1}:{ranks - 1}"
        for stage in range(4):
            yield f"pipeline of unequal width, ZeRO {stage}", dict(one, pipeline=wide, zero=stage)


def rounding(ranks):
    hpz = dict(zero_hpz_partition_size=ranks, ranks_per_node=ranks)
    qwz = dict(zero=3, zero_quantized_weights=1)
    yield "qwZ", qwz
    yield "qwZ, hpZ", dict(qwz, **hpz)
    for bits in 8, 4:
        qgz = dict(zero_quantized_gradients=1, zero_gradient_bits=bits)
        yield f"qgZ of {bits} bits", dict(qgz, zero=2)
        yield f"qgZ of {bits} bits, error feedback", dict(qgz, zero=2, zero_error_feedback=1)
        yield f"ZeRO++ of {bits} bits", dict(qwz, **qgz, **hpz)


def dashed(flags):
    return {name.replace("_", "-"): str(value) for name, value in flags.items()}


def layouts_of(task):
    """All layouts that are tried; the program refuses some of them."""
    ranks, samples, layers = task.ranks, task.samples, task.layers
    found = []
    if task.given:
        found.append(Layout("as given", ranks, task.given, group_of(task.given)))
    if task.flags.get("cyclic", "off") == "off":
        exact = [Layout(name, 1, dashed(flags)) for name, flags in one_rank(samples)]
        if ranks > 1:
            many = [*divided(ranks), *pipelines(ranks, layers, samples)]
            exact += [Layout(name, ranks, dashed(flags)) for name, flags in many]
            exact.append(Layout("ZeRO 2, a rank more", ranks + 1, {"zero": "2"}))
            wide = {"pipeline": f"{layers + 1}:{ranks},1:1", "micro-batch": "2", "zero": "1"}
            exact.append(Layout("pipeline of unequal width, a rank more", ranks + 1, wide))
            found += exact
            block = {n: v for n, v in task.given.items() if n == "zero-quant-block"}
            found.append(Layout("messages in bf16", ranks, {"reduce-dtype": "bf16"}, "8 bits"))
            rounded = [(name, {**dashed(flags), **block}) for name, flags in rounding(ranks)]
            found += [Layout(name, ranks, flags, group_of(flags)) for name, flags in rounded]
            if task.rules:
                found += [x for rule in ("v1", "v2") for x in cyclic(task, rule, f"cyclic {rule}")]
        else:
            found += exact
    else:
        found += cyclic(task, task.flags["cyclic"], "")
    return found


def cyclic(task, rule, group):
    """Modes of a cyclic run; one rank with as many stages is what they are compared with."""
    names = {"data": "a rank for each micro-batch", "zero": "states divided, too"}
    names["model"] = "a rank for each stage"
    single = task.cyclic_flags(rule)
    stages = int(single["cyclic-stages"])
    for mode, what in names.items() if task.ranks > 1 else ():
        yield Layout(f"cyclic {rule}, {what}", stages, {**single, "cyclic-mode": mode}, group)
    if task.ranks > 1 and stages < 4:
        turns = {**single, "cyclic-mode": "model"}
        yield Layout(f"cyclic {rule}, ranks in turns", stages * (stages + 1) // 2, turns, group)
    yield Layout(f"cyclic {rule}, micro-batches of 1", 1, {**single, "micro-batch": "1"}, group)
    yield Layout(f"cyclic {rule}, recomputation", 1, {**single, "recompute": "block"}, group)


# --------------------------------------------------------------------------------------------------
# Runs

ENVIRONMENT = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                   OMPI_MCA_rmaps_base_oversubscribe="1", OMP_WAIT_POLICY="passive")


def said(text):
    """What the program said when it ended, in one line."""
    found = re.search(r"train_gpt: rank \d+ on \S+, [^:\n]+:\d+: (.*(?:\n  hint: .*)?)", text)
    lines = found[1].replace("\n  hint: ", "; ") if found else " ".join(text.split()[-30:])
    return one_line(lines)


@dataclass
class Run:
    code: int
    said: str
    start: dict = field(default_factory=dict)
    losses: list = field(default_factory=list)
    norms: list = field(default_factory=list)
    folder: Path = None

    def weights(self):
        return read_safetensors(self.folder / "model/model.safetensors")


def words_of(flags):
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


class Task:
    """What is compared: the program, flags of the mathematics, and those of the layout given."""

    def __init__(self, options, folder):
        self.program, self.ranks, self.steps = options.program, options.ranks, options.steps
        self.folder = folder
        first = self.launch(options.ranks, [*options.flags, "--steps", "0"], "first")
        if first.code:
            raise Refused(first.said)
        if not first.start:
            raise Refused("these flags train nothing: leave out what only prints")
        told = {name: str(value) for name, value in inner(first.start, "flags").items()}
        self.shares = told["share"] != "none"
        self.rules = not first.start.get("privacy") and not self.shares
        config = json.loads((first.folder / "model/config.json").read_bytes())
        self.layers = config.get("n_layer") or config["num_hidden_layers"]
        self.precision = told["dtype"]
        changed = self.changed(told, options.flags)
        self.given = {n: v for n, v in changed.items() if n in LAYOUT_FLAGS - {"fit"}}
        if set(self.given) <= {"micro-batch", "cyclic-mode"}:
            self.given = {}  # that is what all begin with
        length, tokens = int(told["seq-len"]), int(told["batch-tokens"])
        # of a step; without --batch-tokens they depend on the ranks
        self.samples = tokens // length if tokens else int(told["micro-batch"]) * self.ranks
        self.flags = {n: v for n, v in changed.items() if n not in LAYOUT_FLAGS | OUTPUT_FLAGS}
        self.flags["batch-tokens"] = self.samples * int(told["seq-len"])
        self.flags["micro-batch"] = min(int(told["micro-batch"]), max(1, self.samples // 2))
        self.flags["val-every"] = 0
        if told["threads"] == "0":
            self.flags["threads"] = max(1, (os.cpu_count() or 1) // self.ranks)
        self.first = first

    def changed(self, told, given):
        """Flags that differ from their default, and secrets, which no log tells."""
        shown = subprocess.run(
            [self.program, "--help", "all"], env=ENVIRONMENT, capture_output=True, check=False
        )
        text = shown.stdout.decode(errors="replace")
        defaults = dict(re.findall(r"(?m)^  --(\S+?),? .*\(default (.*)\)$", text))
        if shown.returncode or not told.keys() & defaults.keys():
            why = one_line(shown.stderr.decode(errors="replace")) or "tells no defaults"
            raise Refused(f"{self.program} --help all (status {shown.returncode}): {why}")
        words = [word.removeprefix("--").partition("=") for word in given if word[:2] == "--"]
        named = {name for name, _, _ in words}
        found = {
            name: value
            for name, value in told.items()
            if name in named & {"dp-noise"} or not is_default(value, defaults.get(name))
        }
        if "dp-key" in found:
            at = max((i for i, word in enumerate(given) if word[:8] == "--dp-key"), default=-1)
            value = given[at].partition("=")[2] or "".join(given[at + 1 : at + 2])
            found["dp-key"] = value
        if "dp-epsilon" in found:
            found.pop("dp-noise", None)
        private = "dp-noise" in found or "dp-epsilon" in found
        if private and not {"dp-key", "dp-show-private"} <= found.keys():
            raise Refused(
                "private runs draw other noise each time, and tell no losses: give"
                " --dp-show-private 1 and a --dp-key, and keep nothing of them"
            )
        return found

    def cyclic_flags(self, rule):
        """A cyclic run of these flags. v2 has no norm of the whole gradient to clip."""
        stages = int(self.flags.get("cyclic-stages", max(2, self.ranks)))
        single = {"cyclic": rule, "cyclic-stages": stages, "cyclic-mode": "single"}
        if rule == "v2" and "cyclic" not in self.flags:
            single["grad-clip"] = None
        return {**single, "micro-batch": -(-self.samples // stages)}

    def noise(self, draw, bits):
        """Flags of a run with other roundings: weights that are changed by one. No file of others
        says that blocks share; then it is micro-batches of other sizes."""
        if self.shares:
            return {"micro-batch": (1, max(1, self.samples - 1), self.samples)[draw]}
        place = self.folder / f"changed {bits} {draw}"
        if not place.exists():
            change_weights(self.first.folder / "model", place, draw, bits)
        return {"model": place, "delink": None}

    def launch(self, ranks, words, name):
        """Runs the program once: exit code, losses and norms; the weights lie in its folder."""
        folder = self.folder / re.sub(r"\W+", "_", name)
        folder.mkdir()
        words = [folder / "disk" if word == "DISK" else word for word in words]
        (folder / "disk").mkdir()
        outputs = ["--log", folder / "log", "--export", folder / "model", *NOTHING_ELSE]
        launch = ["mpirun", "--bind-to", "none", "-np", str(ranks)] if ranks > 1 else []
        command = [*launch, self.program, *words, *outputs]
        environment = dict(ENVIRONMENT, OMPI_MCA_orte_tmpdir_base=str(folder))
        with open(folder / "said", "wb") as out:
            process = subprocess.Popen(
                list(map(str, command)), env=environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=out, start_new_session=True,
            )
        try:
            code = process.wait()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 15)
                process.wait()
        text = (folder / "said").read_text(errors="replace")
        run = Run(code, said(text), folder=folder)
        for event in events(folder / "log") if (folder / "log").exists() else ():
            if event.get("event") == "start":
                run.start = event
            elif event.get("event") == "step":
                run.losses.append(event["loss"])
                run.norms.append(event.get("grad_norm"))
        return run

    def train(self, ranks, flags, name):
        flags = {**self.flags, **flags, "steps": self.steps}
        return self.launch(ranks, words_of({n: v for n, v in flags.items() if v is not None}), name)


def is_default(value, default):
    if default in (None, "none"):
        return value in ("", "none")
    try:
        return float(value) == float(default)
    except ValueError:
        return value == default


DTYPES = {"F32": "<f4", "BF16": "<u2", "F16": "<f2"}  # numpy has no bf16: its bits


def read_safetensors(path):
    """{name: tensor} of a file that the program has written."""
    import numpy as np

    data = np.fromfile(path, np.uint8)
    begin = 8 + int(data[:8].view("<u8")[0])
    found = {}
    for name, entry in json.loads(data[8:begin].tobytes()).items():
        if name != "__metadata__":
            first, end = entry["data_offsets"]
            values = data[begin + first : begin + end].view(DTYPES[entry["dtype"]])
            found[name] = values.reshape(entry["shape"])
    return found


def write_safetensors(path, tensors):
    names, header, at = {dtype: name for name, dtype in DTYPES.items()}, {}, 0
    for name, values in tensors.items():
        header[name] = {
            "dtype": names[values.dtype.str],
            "shape": values.shape,
            "data_offsets": [at, at + values.nbytes],
        }
        at += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the data lie on multiples of 8
    data = b"".join(values.tobytes() for values in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def in_fp32(values):
    return (values.astype("<u4") << 16).view("<f4") if values.dtype == "<u2" else values


def next_number(values, lot):
    """Each one changed to the next of its precision, up or down; zero stays zero."""
    import numpy as np

    bits = values.view(f"<i{values.dtype.itemsize}")
    step = 2 * lot.integers(0, 2, bits.shape, dtype=bits.dtype) - 1
    return np.where(bits << 1 != 0, bits + step, bits).astype(bits.dtype).view(values.dtype)


def of_few_bits(values, lot, bits):
    """In fp32, with such errors as integers of so many bits with a scale for each block leave."""
    import numpy as np

    flat = in_fp32(values).ravel()
    most = [np.abs(flat[at : at + BLOCK]).max() for at in range(0, flat.size, BLOCK)]
    scales = np.repeat(most, BLOCK)[: flat.size] / (2 ** (bits - 1) - 1)
    error = scales * (lot.random(flat.size) - 0.5)
    return (flat + error).astype("<f4").reshape(values.shape)


def change_weights(source, target, draw, bits):
    """Writes the weights of a folder anew, changed by lot: by one rounding to their precision, or
    to so many bits."""
    import numpy as np

    target.mkdir()
    shutil.copy(source / "config.json", target)
    lot, changed = np.random.default_rng(draw), {}
    for name, tensor in read_safetensors(source / "model.safetensors").items():
        values = np.ascontiguousarray(tensor)
        changed[name] = of_few_bits(values, lot, bits) if bits else next_number(values, lot)
    write_safetensors(target / "model.safetensors", changed)


# --------------------------------------------------------------------------------------------------
# Differences


@dataclass
class Difference:
    """Relative ones: the largest of all steps; of each tensor; of all weights together."""

    loss: float
    norm: float
    tensors: dict
    together: float

    def weights(self):
        return max(self.tensors.values(), default=0)


def far(found, expected):
    """The largest relative difference of two lists; infinite where a number is missing."""
    if len(found) != len(expected):
        return math.inf
    worst = 0.0
    for a, b in zip(found, expected):
        if a is None and b is None:
            continue
        if a is None or b is None or not math.isfinite(a):
            return math.inf
        worst = max(worst, abs(a - b) / max(abs(b), 1e-30))
    return worst


def distances(found, expected):
    """(name -> the norm of the difference of two tensors, by the norm of the expected one; the same
    of all tensors together)."""
    import numpy as np
    if found.keys() != expected.keys():
        return {"the names of tensors": math.inf}, math.inf
    distance, away, size = {}, 0.0, 0.0
    for name, tensor in expected.items():
        a, b = (in_fp32(x).astype(float) for x in (found[name], tensor))
        apart = float(np.sum((a - b) ** 2)) if a.shape == b.shape else math.inf
        apart, own = (apart if math.isfinite(apart) else math.inf), float(np.sum(b**2))
        distance[name] = math.sqrt(apart / max(own, 1e-30))
        away, size = away + apart, size + own
    return distance, math.sqrt(away / max(size, 1e-30))


def difference(run, reference):
    losses, norms = far(run.losses, reference.losses), far(run.norms, reference.norms)
    return Difference(losses, norms, *distances(run.weights(), reference.weights()))


class Floor:
    """What some runs with other roundings differ by."""

    def __init__(self, differences, least):
        self.loss = max(LEAST, *(d.loss for d in differences))
        self.norm = max(LEAST, *(d.norm for d in differences))
        self.tensors = {
            name: max(least, *(d.tensors[name] for d in differences))
            for name in differences[0].tensors
        }

    def weights(self):
        return max(self.tensors.values(), default=0)

    def times(self, d):
        """(how many floors a difference is, of what)."""
        found = [(d.loss / self.loss, "loss"), (d.norm / self.norm, "norm")]
        found += [(far / self.tensors.get(name, 1), name) for name, far in d.tensors.items()]
        return max(found)


# --------------------------------------------------------------------------------------------------
# The table


def row(name, ranks, loss, norm, weights, rest=""):
    print(f"  {name:42} {ranks:>5} {loss:>9} {norm:>9} {weights:>9}  {rest}".rstrip(), flush=True)


WIDTH = 160  # columns of what the program said


def short(value):
    return f"{value:.1e}"


class Comparison:
    def __init__(self, task, options):
        self.task, self.options = task, options
        self.beyond, self.compared, self.refused = [], 0, 0

    def group(self, name):
        if name in GROUPS:
            group, rule = GROUPS[name], self.task.flags.get("cyclic")
        else:
            group, rule = Group(name), name.removeprefix("cyclic ")
        block = {"zero-quant-block": self.task.given.get("zero-quant-block")} if group.flags else {}
        cyclic = self.task.cyclic_flags(rule) if rule else {}
        return replace(group, flags={**group.flags, **block, **cyclic})

    def measure_floor(self, group, reference):
        """What runs on one rank with other roundings differ by."""

        def noise(draw):
            changed = {**group.flags, **self.task.noise(draw, group.bits)}
            run = self.task.train(1, changed, f"{group.title} noise {draw}")
            if run.code:
                raise Refused(f"with changed weights: {run.said}")
            found = difference(run, reference)
            shutil.rmtree(run.folder, ignore_errors=True)
            return found

        with ThreadPoolExecutor(self.options.jobs) as pool:
            found = list(pool.map(noise, range(NOISE_RUNS)))
        if group.bits:  # a tensor alone may differ by chance, as far as it moves at all
            found = [replace(d, tensors={"weights": d.together}) for d in found]
        return Floor(found, LEAST_OF_WEIGHTS[self.task.precision])

    def judge(self, layout, run, reference, floor):
        if run.code == EXIT_INPUT and "a defect of train_gpt" not in run.said:
            self.refused += 1
            row(layout.name, layout.ranks, "-", "-", "-", f"refused: {run.said}"[:WIDTH])
            return
        self.compared += 1
        if run.code != 0:
            self.beyond.append(layout.name)
            row(layout.name, layout.ranks, "-", "-", "-", f"FAILS: {run.said}"[:WIDTH])
            return
        d = difference(run, reference)
        if "weights" in floor.tensors:
            d = replace(d, tensors={"weights": d.together})
        times, what = floor.times(d)
        verdict = f"{times:8.2g}  {what}"
        if times > self.options.factor:
            self.beyond.append(layout.name)
            verdict += "  BEYOND"
        row(layout.name, layout.ranks, short(d.loss), short(d.norm), short(d.weights()), verdict)

    def table(self, group, layouts, reference):
        floor = self.measure_floor(group, reference)
        what = "of weights in so many bits; all weights together" if group.bits else ""
        what = "of other micro-batches, since blocks share" if self.task.shares else what
        floors = map(short, (floor.loss, floor.norm, floor.weights()))
        row(f"{group.title}: noise floor", 1, *floors, what)

        def run(layout):
            name = f"{layout.group} {layout.name}"
            return layout, self.task.train(layout.ranks, layout.flags, name)

        with ThreadPoolExecutor(self.options.jobs) as pool:
            for layout, done in pool.map(run, layouts):
                self.judge(layout, done, reference, floor)
                shutil.rmtree(done.folder, ignore_errors=True)  # mpirun may still tidy up in it

    def run(self):
        task = self.task
        only = self.options.only or [""]
        layouts = [x for x in layouts_of(task) if any(t.lower() in x.name.lower() for t in only)]
        if not layouts:
            raise Refused(f"no layout has {' or '.join(only)} in its name")
        row("largest relative difference", "ranks", "loss", "norm", "weights", "x floor")
        references = {}  # of groups with the same flags
        for name in dict.fromkeys(["", *(layout.group for layout in layouts)]):
            of_group, group = [x for x in layouts if x.group == name], self.group(name)
            flags = str(group.flags)
            if flags not in references:
                references[flags] = task.train(1, group.flags, f"reference {name}")
            reference = references[flags]
            if reference.code == EXIT_INPUT and name:
                self.refused += len(of_group)
                row(group.title, 1, "-", "-", "-", f"refused: {reference.said}"[:WIDTH])
            elif reference.code:
                raise Refused(f"on one rank: {reference.said}")
            elif group.bits and task.shares:
                self.refused += len(of_group)
                row(group.title, "-", "-", "-", "-", "not compared: no floor where blocks share")
            elif of_group:
                self.table(group, of_group, reference)
        self.end()

    def end(self):
        refused = f"; {self.refused} could not be compared" if self.refused else ""
        print(f"{self.compared} layouts, {self.compared - len(self.beyond)} the same{refused}")
        if self.beyond:
            print(f"not the same: {'; '.join(self.beyond)}")


def compare_layouts(options):
    with tempfile.TemporaryDirectory(prefix="same_loss_") as folder:
        comparison = Comparison(Task(options, Path(folder)), options)
        comparison.run()
    return EXIT_DIFFERENT if comparison.beyond else 0


# --------------------------------------------------------------------------------------------------
# Logs


@dataclass
class Pair:
    """Two losses at the same place (a step, or tokens)."""

    at: int
    a: float
    b: float
    floor: float

    def apart(self):
        return abs(self.a - self.b)

    def beyond(self):
        return not self.apart() <= self.floor

    def text(self, unit):
        percent = 100 * self.apart() / max(abs(self.a), 1e-30)
        return f"{unit} {self.at}: {self.a:.10g} and {self.b:.10g}, {percent:.2g} %"


def places(curve, kind, by_tokens):
    """Place -> loss."""
    losses = getattr(curve, kind)
    if not by_tokens:
        return losses
    if not curve.tokens:
        raise BadLog(f"{curve.path}: it tells no tokens: give {curve.path}@N, N tokens a step")
    return {curve.tokens[step]: loss for step, loss in losses.items() if step in curve.tokens}


def means_at(losses, steps):
    """The means of the losses since the step before, where each step is there."""
    found, before = {}, 0
    for step in sorted(steps):
        if 0 < step - before <= len(losses):  # else some are missing
            between = [losses.get(at) for at in range(before + 1, step + 1)]
            if None not in between:
                found[step] = sum(between) / len(between)
        before = step
    return found


def align(a, b, kind, options):
    """The pairs of two curves, in order."""
    left, right = (places(curve, kind, options.tokens) for curve in (a, b))
    if kind == "train" and not options.tokens and a.means != b.means:
        if a.means:
            right = {**right, **means_at(right, left)}
        else:
            left = {**left, **means_at(left, right)}
    digits = a.rounding() + b.rounding()
    return [
        Pair(at, left[at], right[at], digits + options.floor * abs(left[at]))
        for at in sorted(left.keys() & right.keys())
    ]


def spread(losses):
    """By how much a loss differs from the mean of its neighbours: different batches do so much."""
    values = [losses[at] for at in sorted(losses)]
    steps = [b - a for a, b in zip(values, values[1:])]
    return math.sqrt(sum(x * x for x in steps) / (2 * len(steps))) if steps else 0


def at_the_end(pairs):
    """What the last tenth says: curves that part may still be equally good."""
    last = pairs[-max(1, len(pairs) // 10) :]
    left, right = (sum(getattr(p, side) for p in last) / len(last) for side in "ab")
    noise = spread({p.at: p.a for p in pairs}) * math.sqrt(2 / len(last))
    near = "within" if abs(right - left) <= 2 * noise else "beyond"
    return (
        f"  mean of the last {len(last)}: {left:.6g} and {right:.6g}, {near} what other batches"
        f" would do (2 x {noise:.2g})"
    )


def shifted(a, b, options):
    """How many steps b must be moved by to be the same as a; 0: it is not, or need not be."""
    for by in (-1, 1):
        moved = {step + by: loss for step, loss in b.train.items()}
        pairs = [
            Pair(at, a.train[at], moved[at], a.rounding() + b.rounding() + options.floor * 10)
            for at in a.train.keys() & moved.keys()
        ]
        if len(pairs) > 2 and not any(pair.beyond() for pair in pairs):
            return by
    return 0


def compare_kind(a, b, kind, options):
    """Prints what there is to say; returns the pairs and whether they are the same."""
    unit = "tokens" if options.tokens else "step"
    pairs = align(a, b, kind, options)
    name = {"train": "training loss", "val": "validation loss"}[kind]
    if not pairs:
        return [], True
    apart = [pair for pair in pairs if pair.beyond()]
    first, last = pairs[0].at, pairs[-1].at
    count = f"{len(pairs)} in common, {unit} {first} to {last}"
    if not apart:
        most = max(pairs, key=Pair.apart)
        print(f"  {name}: the same; {count}; largest difference at {most.text(unit)}")
        return pairs, True
    most = max(apart, key=Pair.apart)
    print(f"  {name}: not the same; {count}")
    print(f"  they part at {apart[0].text(unit)} (floor {apart[0].floor:.2g})")
    print(f"  they are farthest apart at {most.text(unit)}")
    if len(pairs) >= MANY:
        print(at_the_end(pairs))
    by = 0 if options.tokens or kind == "val" else shifted(a, b, options)
    if by:
        print(f"  with the steps of {one_line(b.path)} moved by {by:+} they are the same")
    return pairs, False


def compare_curves(a, b, options):
    print(f"{one_line(b.path)} ({b.form}) against {one_line(a.path)} ({a.form})")
    train, same = compare_kind(a, b, "train", options)
    val, same_val = compare_kind(a, b, "val", options)
    lost = sorted((a.lost & b.train.keys()) | (b.lost & a.train.keys()))
    if lost and not options.tokens:
        print(f"  the loss of step {lost[0]} is a number in one of them only")
    if not train and not val and not lost:
        what = "tokens" if options.tokens else "step"
        raise BadLog(f"{a.path} and {b.path} have no {what} in common")
    return train or val, same and same_val and not lost


def draw(pyplot, a, found, options, out):
    """The losses above, their distance from A below."""
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(8, 7), sharex=True, layout="constrained", height_ratios=(2, 1)
    )
    own = places(a, "train" if a.train else "val", options.tokens)
    above.plot(sorted(own), [own[at] for at in sorted(own)], color="black", label=plain(a.path))
    for index, (b, pairs) in enumerate(found):
        at, color = [pair.at for pair in pairs], f"C{index % 10}"
        above.plot(at, [pair.b for pair in pairs], color=color, linewidth=1, label=plain(b.path))
        below.plot(at, [pair.apart() for pair in pairs], color=color, linewidth=1)
        below.plot(at, [pair.floor for pair in pairs], color=color, linestyle=":")
    below.plot([], [], color="gray", linestyle=":", label="floor")
    above.set(ylabel="loss")
    below.set(xlabel="tokens" if options.tokens else "step", ylabel="difference")
    below.set_yscale("log")
    for axes in above, below:
        axes.grid(alpha=0.3)
        for text in axes.legend(fontsize="small").get_texts():
            text.set_parse_math(False)
    figure.savefig(out, dpi=150)
    print(one_line(out))


def picture(a, found, options):
    pyplot = pyplot_or_none("same_loss")
    if not pyplot:
        return 0
    beside = a.path / "same_loss.png" if a.path.is_dir() else a.path.with_suffix(".same_loss.png")
    try:
        draw(pyplot, a, found, options, options.out or beside)
    except (OSError, ValueError) as error:  # ValueError: no such format
        print(f"same_loss: cannot write the picture: {one_line(error)}", file=sys.stderr)
        return EXIT_RESOURCES
    return 0


def compare_logs(options):
    curves = [read_curve(name, options.tag) for name in options.logs]
    found, all_same = [], True
    for other in curves[1:]:
        pairs, same = compare_curves(curves[0], other, options)
        found.append((other, pairs))
        all_same = all_same and same
    drawn = picture(curves[0], found, options)
    return EXIT_DIFFERENT if not all_same else drawn


# --------------------------------------------------------------------------------------------------


def parse_arguments(words):
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        prog="same_loss.py", description=__doc__.split("\n")[0], epilog="-- FLAGS: see the file"
    )
    parser.add_argument("logs", nargs="*", metavar="LOG", help="two or more, or -- FLAGS")
    parser.add_argument("--ranks", type=int, default=min(4, max(2, os.cpu_count() or 1)))
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default {STEPS}")
    parser.add_argument("--only", action="append", metavar="TEXT",
                        help="layouts with it in their name; may be given several times")
    parser.add_argument("--factor", type=float, default=FACTOR, help=f"default {FACTOR}")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default 2)")
    parser.add_argument("--program", type=Path, default=ROOT / "train_gpt", metavar="FILE")
    parser.add_argument("--tokens", action="store_true", help="align logs by tokens")
    parser.add_argument("--floor", type=float, default=ORDER, help=f"relative (default {ORDER})")
    parser.add_argument("--tag", help="of the training loss in event files")
    parser.add_argument("--out", type=Path, metavar="FILE.png")
    options = parser.parse_args(words[:cut])
    options.flags = words[cut + 1 :]
    given = cut < len(words)
    if given == bool(options.logs) or len(options.logs) == 1:
        parser.error("give two logs or more, or -- and flags of train_gpt")
    if not (1 <= options.ranks <= 1024 and 1 <= options.steps <= 10**6 and options.jobs >= 1):
        parser.error("--ranks, --steps and --jobs are at least 1")
    if not (options.factor > 0 and options.floor >= 0):
        parser.error("--factor and --floor are numbers above 0")
    if given and not options.program.is_file():
        parser.error(f"there is no program {options.program}: make train_gpt")
    return options


def main(words):
    sys.stdout.reconfigure(errors="replace")
    options = parse_arguments(words)
    code, text = EXIT_INPUT, ""
    try:
        return compare_logs(options) if options.logs else compare_layouts(options)
    except (Refused, BadLog) as error:
        text = str(error)
    except OSError as error:
        text = f"{error.filename}: {error.strerror}"
        code = EXIT_RESOURCES if error.errno in (errno.ENOSPC, errno.EDQUOT) else EXIT_INPUT
    print(f"same_loss: {one_line(text)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
