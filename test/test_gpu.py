#!/usr/bin/env python3
"""test_gpu.py: the GPU build without a GPU. train_gpt_emu is train_gpt.cu on the processor
(test/emu.h).

python3 test/test_gpu.py            TEST_ALL=1: the exhaustive forms; TEST_SEED=N: the orders in
                                    which the emulation runs things

Program     a run gives the losses of train_gpt, whatever the order of threads and streams; the same
            bits again; a resumed run too
Failures    what cuBLASLt and CUDA may answer: algorithms that it cannot run, errors that come late
Step        the host waits once in a step, blocks are replayed as graphs with the same bits, what a
            profile tells
Memory      what is taken from the device is what was predicted; what does not fit is refused with
            the flags that would
Experts     blocks with experts: losses, loads and messages are train_gpt's, also where more rows
            come than were planned for; the host never waits for a whole stream inside a step
Ranks       with a GPU each they use NCCL, with one for all MPI; what is sent is what was predicted;
            a lost rank is named
Checked     each access of the kernels of a step is looked at (docs/gpu.md), and counted
Compiler    nvcc takes the same source, warnings as errors; skipped where there is none
"""

import concurrent.futures
import functools
import glob
import json
import os
import re
import shlex
import shutil
import struct
import subprocess
import tempfile
import unittest

import harness
from harness import (
    ALL, EXIT_INPUT, EXIT_PEER, EXIT_RESOURCES, Job, MODEL, ROOT, SAME, SEED, TOKENS, TestCase, get,
    sample,
)

ENVIRONMENT = dict(harness.ENVIRONMENT, OMP_NUM_THREADS="1")
# Of both builds. A step is computed one way the first time, recorded the second, and replayed then.
SMALL = "layers=3,heads=3,channels=24,vocab=101"
FLAGS = dict(model=SMALL, steps=4, val_every=4, val_batches=2, threads=1, dtype="fp32")
MASK = (1 << 64) - 1
SAME_MESSAGES = 1e-4  # 8 bits an element of the gradient, of which a loss sees thousands, 4 updates
SAME_BF16 = 0.02  # 8 bits a number; losses are averages


def job(program, ranks=1, code=0, environment=(), **changes):
    """The log's events and what was said on stderr."""
    binary = os.path.join(ROOT, program)
    ended = Job(ranks, binary, environment=environment, **dict(FLAGS, **changes)).done(code)
    events = get(ended.log_path).decode() if ended.events else ""  # refused before it began
    return [json.loads(line) for line in events.splitlines()], ended.err


def losses_of(events):
    """Losses of the steps, then of the validation, and norms."""
    return [e["loss"] for e in events if e["event"] in ("step", "val")], [
        e["grad_norm"] for e in events if e["event"] == "step"
    ]


def run(program, ranks=1, seed=SEED, gpus=1, environment=(), **changes):
    return losses_of(
        job(
            program,
            ranks,
            environment={"EMU_SEED": str(seed), "EMU_GPUS": str(gpus), **dict(environment)},
            **changes,
        )[0]
    )


class Program(TestCase):
    def test_losses(self):
        cases = [(1, {}), (2, {"recompute": "block", "micro_batch": 2})]
        for ranks, changes in cases + [(3, {}), (2, {"optimizer": "sgd"})] * ALL:
            changes = dict(changes, model=MODEL)
            with self.subTest(ranks=ranks, **changes):
                losses, norms = run(
                    "train_gpt_emu", ranks, sample_every=4, sample_tokens=20, **changes
                )  # sampling: more shapes than plans are kept
                expected = run("train_gpt", ranks, **changes)
                self.assert_close(losses, expected[0], SAME)
                self.assert_close(norms, expected[1], 10 * SAME)

    def test_order(self):
        """Threads and streams in another order: the same bits."""
        self.assertEqual(run("train_gpt_emu", seed=SEED + 1), run("train_gpt_emu", seed=SEED + 2))

    def test_bf16(self):
        """--dtype bf16 computes in bf16 here, and trains as fp32 does, to its precision."""
        losses, exact = run("train_gpt_emu", dtype="bf16")[0], run("train_gpt")[0]
        self.assert_close(losses, exact, SAME_BF16)
        self.assertNotEqual(losses, run("train_gpt", dtype="bf16")[0])

    def test_resume(self):
        same = dict(
            val_every=0, dtype="bf16", stochastic_rounding=1
        )  # the hardest: draws must be those of the whole run
        whole = run("train_gpt_emu", **same)[0]
        with tempfile.TemporaryDirectory() as out:
            begun = run("train_gpt_emu", out=out, **same, steps=2, save_every=2)[0]
            resumed = run("train_gpt_emu", out=out, resume=1, **same)[0]
        self.assertEqual(begun + resumed, whole)

    def test_stochastic_rounding(self):
        """The same masters give the same bf16 parameters on both builds and any number of ranks; to
        nearest, others."""

        def exported(program, **changes):
            with tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "model.bin")
                run(program, export=path, steps=0, val_every=0, dtype="bf16", **changes)
                with open(path, "rb") as file:
                    return file.read()

        stochastic = exported("train_gpt", stochastic_rounding=1)
        self.assertEqual(stochastic, exported("train_gpt_emu", ranks=2, stochastic_rounding=1))
        self.assertNotEqual(stochastic, exported("train_gpt"))


class Matmuls(TestCase):
    """Which algorithm computes a product is chosen by timing, which the emulation makes up:
    EMU_MATMULS=SEED, or SEED+rank where ranks differ."""

    SAME = dict(
        val_every=0,
        val=None,
        dtype="bf16",
        steps=4,
        model="layers=2,heads=2,channels=32,vocab=256",
        seq_len=16,
        micro_batch=2,
        batch_tokens=64,
    )

    @classmethod
    def losses(cls, times, ranks=2, **changes):
        environment = {"EMU_MATMULS": times} if times else {}
        return run("train_gpt_emu", ranks, environment=environment, **dict(cls.SAME, **changes))

    @classmethod
    @functools.cache
    def chosen(cls, times):
        return cls.losses(times)

    def test_rank_0_chooses_for_all(self):
        """What other ranks measure does not matter; the choices do change bits here."""
        self.assertEqual(self.losses("7+rank"), self.chosen("7"))
        self.assertNotEqual(self.chosen("6"), self.chosen("7"))
        self.assertNotEqual(self.losses(None), self.chosen("7"))

    def test_without(self):
        """With --autotune 0 what would be measured does not matter."""
        first = self.losses("7", autotune=0)
        self.assertEqual(self.losses("6+rank", autotune=0), first)
        self.assertNotEqual(self.chosen("6"), first)

    def test_resume(self):
        """A resumed run computes by the choices of its checkpoint, whatever it would measure
        now."""
        whole = self.chosen("7")
        with tempfile.TemporaryDirectory() as out:
            begun = self.losses("7", out=out, steps=2, save_every=2)
            resumed = self.losses("6+rank", out=out, resume=1)
            self.assertEqual([a + b for a, b in zip(begun, resumed)], [*whole])
            manifest = os.path.join(out, "step_00000002", "manifest")
            # A choice that is cut off: none is used.
            with open(manifest) as file:
                last = re.findall(r"(?m)^matmul\d+ \w+$", file.read())[-1]
            self.rewrite(manifest, last, last[:-1])
            shutil.rmtree(os.path.join(out, "step_00000004"), ignore_errors=True)
            self.assertNotEqual(self.losses("6", out=out, resume=1), resumed)
            self.rewrite(manifest, last[:-1], last)
            # Another library: the choices are not used, and the run says so.
            self.rewrite(manifest, "emulated, cuBLASLt 1", "emulated, cuBLASLt 2")
            shutil.rmtree(os.path.join(out, "step_00000004"), ignore_errors=True)
            other = self.losses("6", out=out, resume=1)
            self.assertNotEqual(other, resumed)
            self.assert_close(other[0], resumed[0], SAME_BF16)

    def rewrite(self, manifest, old, new):
        """Changes a manifest's text, and its checksum with it: base.h's, four lanes of a
        multiply-rotate round."""
        with open(manifest, "rb") as file:
            lines = file.read().replace(old.encode(), new.encode()).splitlines(keepends=True)[:-1]
        text = b"".join(lines)
        with open(manifest, "wb") as file:
            file.write(text + b"checksum %016x\n" % checksum(text))


def mix64(x):
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
    return x ^ x >> 31


def checksum(data):
    """docs/formats.md: the checksum of manifests."""

    def turn(lane, word):
        lane = (lane + word * 0xC2B2AE3D27D4EB4F) & MASK
        return ((lane << 31 | lane >> 33) * 0x9E3779B185EBCA87) & MASK

    lanes, whole = [mix64(i) for i in range(4)], len(data) // 32 * 32
    for at in range(0, whole, 32):
        lanes = [
            turn(lane, int.from_bytes(data[at + 8 * i : at + 8 * i + 8], "little"))
            for i, lane in enumerate(lanes)
        ]
    h = mix64(len(data))
    for lane in lanes:
        h = turn(h, lane)
    for byte in data[whole:]:
        h = turn(h, byte)
    return mix64(h)


class Failures(TestCase):
    """What a library and a device may answer, which the emulation does when it is asked to."""

    SAME = dict(Matmuls.SAME, steps=3)

    def run_with(self, environment, **changes):
        return run("train_gpt_emu", environment=environment, **dict(self.SAME, **changes))[0]

    def test_suggestions(self):
        """An algorithm whose state is an error is not used; where the library refuses to run one
        that it has suggested, another one is taken, or the product is computed without its
        epilogue."""
        for dtype, tolerance in sample([("fp32", SAME), ("bf16", SAME_BF16)], 1):
            plain = self.run_with({}, dtype=dtype)
            for refused in ("state", "first", "fused"):
                with self.subTest(dtype=dtype, refused=refused):
                    losses = self.run_with({"EMU_REFUSES": refused}, dtype=dtype)
                    self.assert_close(losses, plain, tolerance)

    def test_bias_gradient(self):
        """Is fused into the products of weight gradients, whose result is fp32: the type of the
        bias is that of the result. A library that refuses another type is not asked in vain."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "counts")
            for refused, fused in (("", True), ("fused", False)):
                self.run_with({"EMU_COUNTS": path, "EMU_REFUSES": refused})
                with open(path) as counts:
                    self.assertEqual(json.load(counts)["bias_gradients"] > 0, fused)

    def test_asynchronous_error(self):
        """A kernel fails. CUDA tells it at a later call, whichever that is: the program says what
        CUDA said, and nothing about heads, memory or products."""
        kernels = [*range(1, 60), 100, 200] if ALL else [1, 12, 13, 45]
        for dtype, kernel in [("fp32", k) for k in kernels] + [("bf16", 30)]:
            with self.subTest(dtype=dtype, kernel=kernel):
                said = job(
                    "train_gpt_emu", code=EXIT_RESOURCES, environment={"EMU_FAILS": str(kernel)},
                    **dict(self.SAME, dtype=dtype),
                )[1]
                self.assertIn(": an illegal memory access was encountered", said)
                self.assertNotRegex(said, "heads of|cannot allocate|has no product|cannot pin")


class Step(TestCase):
    STEPS, MICRO_BATCHES = 4, 3
    CHANGES = dict(micro_batch=1, steps=STEPS, val_every=0)

    def counted(self, ranks=1, **changes):
        """Losses and norms, and what the emulation counted in the steps."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "counts")
            result = run(
                "train_gpt_emu", ranks, environment={"EMU_COUNTS": path},
                **dict(self.CHANGES, **changes),
            )
            with open(path) as counts:
                return result, json.load(counts)

    def test_waits_and_launches(self):
        result, counts = self.counted()
        plain, one_by_one = self.counted(profile_steps=f"1:{self.STEPS}")  # no graphs
        self.assertEqual(result, plain)
        self.assertEqual(counts["waits"], self.STEPS, "one in each step: losses and norm")
        # Per step: a block's forward and the two parts of its backward are a launch each; a step
        # without gradients before it (accumulate) makes other graphs, and each runs once before it
        # is recorded.
        self.assertLess(counts["launches"], one_by_one["launches"] / 2)
        longer = self.counted(steps=self.STEPS + 2)[1]
        self.assertEqual(longer["waits"], self.STEPS + 2)
        steady, blocks = (longer["launches"] - counts["launches"]) / 2, 3 * 3 * self.MICRO_BATCHES
        kernels = one_by_one["launches"] / self.STEPS
        self.assertEqual(steady, int(steady))
        self.assertLess(blocks, steady)
        self.assertLess(steady, kernels / 3)
        if ALL:  # recorded anew for other shapes
            self.assertEqual(
                self.counted(batch_tokens=100, micro_batch=2)[0],
                self.counted(batch_tokens=100, micro_batch=2, profile_steps="1:4")[0],
            )
            self.assertEqual(
                self.counted(recompute="block", dtype="bf16")[0],
                self.counted(recompute="block", dtype="bf16", profile_steps="1:4")[0],
            )

    def test_the_host_keeps_near(self):
        """A driver takes some thousand launches before it makes the host wait; one step of 30
        micro-batches has more than three times as many."""
        counts = self.counted(steps=1, batch_tokens=600, profile_steps="1:1")[1]
        self.assertGreater(counts["launches"], 3000)
        self.assertLess(counts["queued"], 1000)

    def test_profile(self):
        with tempfile.TemporaryDirectory() as folder:
            for program in ("train_gpt", "train_gpt_emu"):
                log = os.path.join(folder, program)
                run(program, **dict(self.CHANGES, profile_steps="2:3", log=log))
                with open(log) as lines:
                    (profile,) = (e for e in map(json.loads, lines) if e["event"] == "profile")
                self.assertEqual((profile["first"], profile["steps"]), (2, 2))
                found = {(a["action"], a["unit"]): a["count"] for a in profile["actions"]}
                self.assertEqual(found["FORWARD", "block"], 3 * self.MICRO_BATCHES)
                self.assertEqual(
                    (found["BACKWARD_INPUT", "head"], found["NORM", "states"]),
                    (self.MICRO_BATCHES, 1),
                )
                self.assertAlmostEqual(
                    (sum(a["ms"] for a in profile["actions"]) + profile["waiting_ms"])
                    / profile["ms"],
                    1,
                    delta=1e-3,
                )  # events are floats
        command = [
            "./train_gpt", "--model", MODEL, "--train", TOKENS, "--seq-len", "20", "--val-every",
            "0", "--batch-tokens", "200", "--profile-steps", "9:9",
        ]
        short = subprocess.run(
            command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True
        )  # an epoch: its length is not known to the flags
        self.assertIn("nothing is profiled: the run has no step from 9 to 9", short.stderr)
        self.assertNotIn("profile of", short.stdout)
        counts = self.counted(profile_steps="2:3")[1]
        schedule = counts["ranges"] // self.STEPS
        self.assertEqual(counts["ranges"], self.STEPS * schedule)
        self.assertEqual(
            counts["profiled"],
            2 * schedule - 1,
            "from the second step's first action to the end of the third",
        )

    def test_profile_of_skipped_update(self):
        """Of a step whose update is skipped the actions that ran are in the profile."""
        flags = dict(
            self.CHANGES, profile_steps="6:6", steps=6, lr=1e6, weight_decay=100, grad_clip=0,
            val_every=0,
        )
        for program in ("train_gpt", "train_gpt_emu"):
            events, said = job(program, code=EXIT_RESOURCES, **flags)  # it diverges
            self.assertIn("skipped", said)
            (profile,) = (e for e in events if e["event"] == "profile")
            found = {a["action"] for a in profile["actions"]}
            self.assertIn("NORM", found)
            self.assertNotIn("UPDATE", found)


class Memory(TestCase):
    MODEL = "layers=2,heads=2,channels=64,vocab=300"

    def predicted(self, **changes):
        flags = dict(dict(model=self.MODEL, dtype="fp32"), **changes)
        done = subprocess.run(
            [os.path.join(ROOT, "train_gpt_emu"), "--dry-run", "--json"]
            + [str(w) for n, v in flags.items() for w in ("--" + n.replace("_", "-"), v)],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=600,
            check=True,
        )
        return json.loads(done.stdout)["predicted"]["memory"]

    def test_what_is_taken(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "counts")
            run(
                "train_gpt_emu", environment={"EMU_COUNTS": path}, model=self.MODEL, val=TOKENS,
                steps=2, batch_tokens=80, micro_batch=4, val_every=0,
            )
            with open(path) as counts:
                taken = json.load(counts)["device_bytes"]
        self.assertAlmostEqual(
            taken / self.predicted(seq_len=20, batch_tokens=80, micro_batch=4)["device"],
            1,
            delta=0.05,
        )  # pages of 4 KiB

    def test_no_scores(self):
        """The same tokens in longer sequences take the same memory: nothing holds a (T,T)
        matrix."""
        given = dict(cluster="1x1,tflops=1,memory=1")  # nothing needs to be measured
        short = self.predicted(**given, seq_len=32, micro_batch=32)
        long = self.predicted(**given, seq_len=1024, micro_batch=1)
        for kind in ("activations", "buffers"):
            self.assertEqual(short[kind], long[kind])

    def check_refused(self, bytes_, *words, ranks=1, code=3, **changes):
        flags = dict(
            dict(
                model=self.MODEL, train=TOKENS, steps=1, seq_len=64, micro_batch=8, val_every=0,
                dtype="fp32",
            ),
            **changes,
        )
        start = ["mpirun", "-np", str(ranks), "--oversubscribe"] if ranks > 1 else []
        command = [*start, os.path.join(ROOT, "train_gpt_emu")] + [
            str(w) for n, v in flags.items() for w in ("--" + n.replace("_", "-"), v)
        ]
        done = subprocess.run(
            command,
            env=dict(ENVIRONMENT, EMU_DEVICE_MEMORY=str(bytes_), EMU_GPUS=str(ranks)),
            capture_output=True,
            text=True,
            timeout=600,
        )
        self.assertEqual(done.returncode, code, done.stderr)
        self.assertEqual(" GiB more, " in done.stderr, code == 3, done.stderr)
        for word in words:
            self.assertIn(word, done.stderr)

    def test_shared_memory(self):
        """Large heads on a GPU whose blocks have 99 KiB of shared memory."""
        for code, environment in ((2, {"EMU_SHARED": 99 << 10}), (0, {})):
            environment = {name: str(value) for name, value in environment.items()}
            said = job(
                "train_gpt_emu",
                code=code,
                environment=environment,
                model="layers=1,heads=1,channels=224,vocab=101",
                steps=1,
                val_every=0,
            )[1]
            self.assertEqual("bytes of shared memory in a block" in said, code == 2, said)

    def test_refused(self):
        whole, half, recomputed = (
            self.predicted(seq_len=64, micro_batch=b, recompute=r)["device"]
            for b, r in ((8, "none"), (4, "none"), (8, "block"))
        )
        self.assertLess(half, recomputed * 63 // 64)  # a 64th of the device is left to others
        self.check_refused(
            whole * 0.99 // 1, "it fits with --micro-batch 4, or --recompute block\n"
        )
        self.check_refused(
            recomputed,
            "it fits with --micro-batch 4, or --recompute block --micro-batch 4\n",
        )
        self.check_refused(
            recomputed * 0.99 // 1, "it fits with --micro-batch 4\n", recompute="block"
        )
        many = dict(model="layers=2,heads=2,channels=192,vocab=300", micro_batch=1, seq_len=24)
        least = [
            self.predicted(**many, zero=zero, cluster="1x2,intra=1,tflops=1,memory=1")["device"]
            for zero in (0, 1)
        ]
        between = sum(least) // 2
        self.check_refused(between, "it fits with --zero 1\n", ranks=2, **many)
        self.check_refused(between, "--zero 3 over 2 ranks, 1 on a GPU, would fit", **many)
        self.check_refused(between, ranks=2, zero=1, code=0, **many)
        large = self.MODEL.replace("300", "5000")  # more than what is needed to measure the device
        least = self.predicted(model=large, seq_len=64, micro_batch=1, recompute="block")["device"]
        self.check_refused(least * 0.99 // 1, "no --micro-batch fits", model=large)


class Experts(TestCase):
    """Steps of small models in fp32 (test/golden/experts.json has what train_gpt computed)."""

    SHAPE = "layers=2,heads=2,channels=16,vocab=101,experts=6,expert_ffn=12"
    MODELS = {
        "llama": f"arch=llama,tie=1,{SHAPE},top_k=2",
        "qwen3": f"arch=qwen3,{SHAPE},top_k=3",
        "prototypes": f"arch=llama,{SHAPE},top_k=2,prototypes=3",
        "gpt2": f"arch=gpt2,{SHAPE},top_k=2",
    }
    # Rounding may change which expert is chosen: eps keeps small gradients from being all sign.
    RUN = dict(steps=4, lr=1e-2, eps=1e-3, batch_tokens=80, micro_batch=2, val_every=2, seed=3)
    SHORT = dict(steps=3, val_every=0)
    LOADS = ("expert_load_max", "expert_load_entropy", "expert_tokens_dropped")

    @classmethod
    def flags(cls, model, **changes):
        return {**cls.RUN, "model": cls.MODELS[model], **changes}

    @classmethod
    def found(cls, program, ranks, gpus, environment=(), **flags):
        """Losses and norms, loads, traffic; memory is as predicted."""
        environment = {"EMU_SEED": str(SEED), "EMU_GPUS": str(gpus), **dict(environment)}
        events, _ = job(program, ranks, environment=environment, **flags)
        steps = [event for event in events if event["event"] == "step"]
        loads = [[round(event[key], 12) for key in cls.LOADS] for event in steps]
        return (*losses_of(events), loads, events[-1]["traffic"]["measured"]), events

    def check(self, model, ranks=1, gpus=1, environment=(), tolerance=SAME, **changes):
        flags = self.flags(model, **changes)
        with self.subTest(ranks=ranks, gpus=gpus, **flags):
            found, events = self.found("train_gpt_emu", ranks, gpus, environment, **flags)
            expected, _ = self.found("train_gpt", ranks, gpus, **flags)
            self.assert_close(found[0], expected[0], tolerance)
            self.assert_close(found[1], expected[1], 10 * tolerance)
            self.assertEqual(found[2:], expected[2:])
            memory = events[-1]["memory"]
            for kind in ("parameters", "gradients", "optimizer", "activations"):
                self.assertEqual(memory["predicted"][kind], memory["measured"][kind], kind)
            return found, events

    def test_losses(self):
        """Of each architecture, each balance; what is recorded for GPUs is what both compute."""
        with open(os.path.join(ROOT, "test/golden/experts.json")) as file:
            golden = json.load(file)
        for name, run_of in golden.items():
            found, _ = self.check(name, **run_of["flags"])
            self.assert_close(found[0], run_of["losses"], SAME, name)
            self.assert_close(found[1], run_of["norms"], 10 * SAME, name)
        self.assertEqual(set(golden), set(self.MODELS))
        balances = {run_of["flags"].get("moe_balance") for run_of in golden.values()}
        self.assertEqual(balances, {None, "bias", "aux"})

    def test_layouts(self):
        """Recomputed, offloaded, over ranks and stages; by NCCL and through the host."""
        cases = [
            ("llama", 2, 2, dict(zero=3, recompute="block", moe_balance="aux")),
            ("gpt2", 1, 1, dict(zero=2, offload="all", moe_balance="bias")),
            ("qwen3", 2, 1, dict(pipeline=2, moe_balance="bias")),
            ("prototypes", 2, 2, dict(zero=1, share="all", delink_at=2)),
            ("qwen3", 4, 4, dict(zero=2, micro_batch=1, moe_balance="aux")),
        ]
        for model, ranks, gpus, changes in cases if ALL else sample(cases[:-1], 1):
            self.check(model, ranks, gpus, **self.SHORT, **changes)

    def test_exchange(self):
        """Experts are divided over ranks: all rows arrive, however many they are; in pieces, if
        memory is for fewer."""
        few = {"moe_buffer": 0.25}
        cases = [
            ("llama", 2, 2, dict(moe_balance="aux", **few)),
            ("qwen3", 2, 1, dict(zero=2, moe_balance="bias", **few)),
            ("gpt2", 2, 2, dict(zero=1, recompute="block", moe_buffer=0.5)),
            ("prototypes", 3, 1, dict(batch_tokens=120, zero=3)),
            ("llama", 4, 4, dict(expert_parallel=2, micro_batch=1, zero=3, moe_balance="bias")),
            ("qwen3", 4, 1, dict(expert_parallel=2, pipeline="2:2,2:2", moe_balance="aux")),
        ]
        short = dict(steps=2, val_every=0)
        for model, ranks, gpus, changes in cases if ALL else [cases[0], *sample(cases[1:3], 1)]:
            flags = {**short, "expert_parallel": ranks, **changes}
            found, events = self.check(model, ranks, gpus, **flags)
            pieces = [e.get("expert_pieces", 1) for e in events if e["event"] == "step"]
            self.assertTrue(all((n > 1) == ("moe_buffer" in changes) for n in pieces), pieces)

    def test_pieces(self):
        """Rows in pieces have the bits of all rows at once, also where a row is aligned by less
        than what the library's algorithms need."""
        model = "arch=llama,layers=1,heads=2,channels=20,vocab=101,experts=4,top_k=2,expert_ffn=6"
        flags = self.flags("llama", dtype="bf16", expert_parallel=2, **dict(self.SHORT, steps=2))
        flags["model"] = model
        whole = self.found("train_gpt_emu", 2, 2, **flags)[0][:3]
        self.assertEqual(self.found("train_gpt_emu", 2, 2, **flags, moe_buffer=0.25)[0][:3], whole)

    def test_bits(self):
        """Threads and streams in another order, launches one by one, recomputation, ZeRO: the same
        bits."""
        flags = self.flags("llama", moe_balance="aux", **self.SHORT)
        first, _ = self.found("train_gpt_emu", 1, 1, **flags)
        for changes in sample([dict(recompute="block"), dict(profile_steps="1:3"), dict()], 1):
            again = {"EMU_SEED": str(SEED + 1)}
            found, _ = self.found("train_gpt_emu", 1, 1, again, **flags, **changes)
            self.assertEqual(found, first, changes)
        flags = self.flags("qwen3", expert_parallel=2, moe_balance="bias", **self.SHORT)
        first = self.found("train_gpt_emu", 2, 2, **flags)[0][:3]
        for changes in sample([dict(profile_steps="1:3"), dict(zero=1), dict(zero=2)], 1):
            self.assertEqual(self.found("train_gpt_emu", 2, 2, **flags, **changes)[0][:3], first)

    def test_bf16(self):
        """Mixtral's block in bf16 trains as in fp32, to its precision; so does GPT-2's, whose GELU
        is no part of a product here."""
        for model in ("llama", "gpt2"):
            flags = self.flags(model, steps=2, val_every=0)
            losses = self.found("train_gpt_emu", 1, 1, **flags, dtype="bf16")[0][0]
            exact = self.found("train_gpt", 1, 1, **flags)[0][0]
            self.assert_close(losses, exact, SAME_BF16)
            self.assertNotEqual(losses, exact)

    def test_resume(self):
        """On one rank what two have begun."""
        flags = self.flags("llama", moe_balance="bias", val_every=0)
        with tempfile.TemporaryDirectory() as out:
            begun = dict(flags, out=out, steps=2, save_every=2, expert_parallel=2)
            first, _ = self.found("train_gpt_emu", 2, 2, **begun)
            then, _ = self.found("train_gpt_emu", 1, 1, **flags, out=out, resume=1)
        whole, _ = self.found("train_gpt", 1, 1, **flags)
        self.assert_close(first[0] + then[0], whole[0], SAME)
        self.assertEqual(first[2] + then[2], whole[2])

    def test_waits(self):
        """The host waits for the loads alone, not for all that the device was given."""
        with tempfile.TemporaryDirectory() as folder:
            counts = {}
            for model in ("llama", "dense"):
                path = os.path.join(folder, model)
                flags = self.flags("llama", **self.SHORT)
                if model == "dense":
                    flags["model"] = "arch=llama,layers=2,heads=2,channels=16,vocab=101"
                job("train_gpt_emu", 1, environment={"EMU_COUNTS": path}, **flags)
                with open(path) as file:
                    counts[model] = json.load(file)
        self.assertEqual(counts["dense"]["waits"], counts["llama"]["waits"])

    def test_text(self):
        """Generated text, a token at a time."""
        flags = dict(steps=0, prompt="1 2 3", sample_tokens=6, temperature=0, train=None, val=None)
        said = [
            Job(1, os.path.join(ROOT, program), **{**FLAGS, **self.flags("qwen3", **flags)})
            .done()
            .out
            for program in ("train_gpt", "train_gpt_emu")
        ]
        self.assertEqual(said[0], said[1])


class Ranks(TestCase):
    def check_run(self, ranks, gpus, transport, tolerance, environment=(), **changes):
        events, _ = job(
            "train_gpt_emu",
            ranks,
            environment={"EMU_SEED": str(SEED), "EMU_GPUS": str(gpus), **dict(environment)},
            **changes,
        )
        self.assertEqual(events[0]["transport"], transport)
        losses, norms = losses_of(events)
        on_processor, _ = job("train_gpt", ranks, **changes)
        self.assertEqual(on_processor[0]["transport"], "mpi")
        expected = losses_of(on_processor)
        self.assert_close(losses, expected[0], tolerance)
        self.assert_close(norms, expected[1], 10 * tolerance)
        traffic = events[-1]["traffic"]
        self.assertEqual(traffic["measured"], traffic["predicted"])
        self.assertEqual(traffic["predicted"], on_processor[-1]["traffic"]["predicted"])

    def test_gpus_of_their_own(self):
        self.check_run(3, 4, "nccl", SAME, recompute="block", micro_batch=1)
        if ALL:
            self.check_run(2, 4, "nccl", SAME)
            self.check_run(4, 4, "nccl", SAME, ranks_per_node=2)

    def test_nccl_on_one_gpu(self):
        """TRAIN_GPT_NCCL_SHARED=1: NCCL between ranks that share a GPU, and with a single rank. The
        emulation refuses two members on one GPU of a host, and ways between them but sockets."""
        asked = {"TRAIN_GPT_NCCL_SHARED": "1"}
        cases = [
            (2, 1, dict(recompute="block", micro_batch=1)),
            (3, 1, dict(zero=3, micro_batch=1)),
            (3, 2, dict(pipeline=3)),
            (2, 2, dict(zero=2)),  # a GPU each
        ]
        for ranks, gpus, changes in [cases[0], *sample(cases[1:], 1)]:
            changes = dict(dict(steps=4, val_every=0), **changes)
            self.check_run(ranks, gpus, "nccl", SAME, environment=asked, **changes)
        self.check_run(2, 1, "staged", SAME, {"TRAIN_GPT_NCCL_SHARED": "0"}, steps=1, val_every=0)
        for changes in sample([dict(), dict(dtype="bf16", reduce_dtype="bf16")], 1):
            changes = dict(changes, steps=3, val_every=0)
            alone = run("train_gpt_emu", environment=asked, **changes)
            self.assertEqual(alone, run("train_gpt_emu", **changes), "the same bits")

    def test_memory_that_one_rank_cannot_register(self):
        """NCCL wants a buffer registered by all members of a communicator or by none: the emulation
        compares their counts."""
        self.check_run(
            2, 2, "nccl", SAME, environment={"EMU_NCCL_REFUSES": "1"}, steps=4, val_every=0
        )

    def test_a_gpu_for_several(self):
        self.check_run(
            3, 2, "staged", SAME, optimizer="sgd", steps=4
        )  # two ranks on one, one on the other
        if ALL:
            self.check_run(4, 1, "staged", SAME, ranks_per_node=2)

    def test_cyclic(self):
        """Micro-batches that are delayed against each other: parameters, sums and activations go
        from device to device, the tally from host to host."""
        cases = [
            (2, 2, "nccl", dict()),
            (3, 1, "staged", dict(cyclic_mode="model")),
            (3, 4, "nccl", dict(cyclic_mode="zero", val_every=2)),
            (3, 1, "staged", dict(cyclic_mode="zero", val_every=2)),
            (3, 4, "nccl", dict(cyclic_mode="model")),
            (3, 4, "nccl", dict(val_every=4)),
            (3, 1, "staged", dict()),
        ]
        for ranks, gpus, transport, changes in sample(cases, 1):
            changes = dict(dict(cyclic="v1", steps=4, val_every=0), **changes)
            self.check_run(ranks, gpus, transport, SAME, **changes)

    def test_bf16_messages(self):
        """NCCL rounds every partial sum, the processor's messages every contribution."""
        self.check_run(2, 2, "nccl", SAME_MESSAGES, reduce_dtype="bf16", steps=4)
        if ALL:
            self.check_run(2, 1, "staged", SAME, reduce_dtype="bf16")

    def test_private_stages(self):
        """Norms, rows of the classifier's gradient and factors between GPUs, in each style, of both
        transports. All windows are taken: traffic is as predicted."""
        with open(TOKENS, "rb") as tokens:
            head, ids = tokens.read(1024), tokens.read(2 * (9 * 20 + 1))
        folder = self.enterContext(tempfile.TemporaryDirectory())
        shard = os.path.join(folder, "tokens.bin")
        with open(shard, "wb") as file:
            file.write(head[:8] + struct.pack("<i", len(ids) // 2) + head[12:] + ids)
        private = dict(
            shuffle=None, dp_noise=0, dp_key="%064x" % 5, dp_show_private=1, train=shard, val=None,
            val_every=0, batch_tokens=9 * 20, micro_batch=2, optimizer="sgd", lr=0.01, steps=1,
        )
        cases = [
            (3, 4, "nccl", dict(pipeline="2:1,1:1,2:1", dp_clip_style="flat")),
            (3, 2, "staged", dict(pipeline="3:2,2:1")),
            (2, 4, "nccl", dict(pipeline="1:1,4:1", dp_clip_style="stage")),
            (
                4,
                1,
                "staged",
                dict(pipeline="2:1,1:2,2:1", dp_clip_style="flat", pipeline_schedule="gpipe"),
            ),
        ]
        for ranks, gpus, transport, changes in cases if ALL else cases[:2]:
            self.check_run(ranks, gpus, transport, SAME, **private, **changes)

    def test_lost(self):
        """The others' devices wait in a collective; the message names the rank, the collective, the
        storage and the step."""
        faults = [
            ("stop", 1, "REDUCE", "it is stopped, seen"),
            ("hang", 0, "UPDATE", "no sign of progress"),
            ("kill", 2, "FORWARD", "it has ended; waited"),
            ("stop", 0, "FORWARD", "it is stopped, seen"),
            ("hang", 2, "BACKWARD_INPUT", "no sign of progress"),
            ("kill", 1, "UPDATE", "it has ended; waited"),
        ]

        def lose(how, rank, action, words):
            code = EXIT_PEER if how != "kill" else None  # that of what mpirun sees first
            environment = {
                "EMU_SEED": str(SEED), "EMU_GPUS": "4", "FAULT": f"{how} {rank} 3 {action}",
            }
            events, said = job("build/train_gpt_faulty_emu", 3, code, environment, watchdog=3)
            self.assertNotIn("end", [e["event"] for e in events])
            if code:
                self.assertRegex(
                    said,
                    rf"lost rank {rank} on \S+: {words} .* s, in (all_gather of "
                    rf"parameters|reduce_scatter of gradient) \d, step [23]",
                )

        # NCCL finds it before the watch does; the measurements at start take some 60 looks, waiting
        # for a rank any number
        def lose_and_fail():
            environment = {"EMU_GPUS": "2", "EMU_NCCL_ERROR": "200", "FAULT": "hang 1 1 FORWARD"}
            said = job(
                "build/train_gpt_faulty_emu", 2, EXIT_PEER, environment, val_every=0, watchdog=60
            )[1]
            self.assertRegex(
                said,
                r"NCCL: .*, in reduce_scatter of gradient \d, step 1; no answer from rank 1 on "
                r"\S+\n",
            )

        with concurrent.futures.ThreadPoolExecutor(4) as pool:  # they mostly wait
            failing = pool.submit(lose_and_fail)
            list(pool.map(lose, *zip(*(faults if ALL else faults[:3]))))
            failing.result()

    def test_lost_message(self):
        """A message may be open for longer than the watchdog; a rank that the device needs one from
        may not be silent."""
        for gpus, transport in ((2, "nccl"), (1, "staged")):
            command = [
                "mpirun", "--oversubscribe", "-np", "2", os.path.join(ROOT, "build/test_comm_nccl"),
                "stuck",
            ]
            done = subprocess.run(
                command, env=dict(ENVIRONMENT, EMU_GPUS=str(gpus)), stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=60,
            )
            self.assertEqual(done.returncode, EXIT_PEER, done.stderr)
            self.assertIn(f"still open, by {transport}", done.stdout)
            self.assertRegex(
                done.stderr,
                r"lost rank 1 on \S+: no sign of progress for \d.\d s, in activations of unit 3 "
                r"from rank 1, step 18\n",
            )

    def test_nccl_fails(self):
        """An error that NCCL finds by itself, with nobody dead."""
        environment = {"EMU_GPUS": "2", "EMU_NCCL_ERROR": "40"}
        _, said = job("train_gpt_emu", 2, EXIT_PEER, environment, model=MODEL)
        self.assertRegex(
            said,
            r"NCCL: remote process exited or there was a network error: \w+, in (no collective|"
            r"(\w+ of \w+ \d|numbers|broadcast), step \d)\n",
        )


@unittest.skipUnless(ALL, "only under TEST_ALL: test_ops_checked has each operation by itself")
class Checked(TestCase):
    """train_gpt_checked ends at the first race, access outside of its tensors, or read of what
    nobody has written."""

    PRIVATE = dict(
        shuffle=None, dp_noise=0, dp_key="%064x" % 5, dp_show_private=1, optimizer="sgd", lr=0.01
    )
    RUNS = [
        (1, dict()),
        (1, dict(dtype="bf16", recompute="block")),
        (1, dict(PRIVATE)),
        (1, dict(PRIVATE, dtype="bf16", dp_clip_style="flat")),
        (2, dict(zero=3, zero_quantized_weights=1, zero_quantized_gradients=1)),
        (2, dict(zero=1, dtype="bf16", offload="optimizer", offload_update="device")),
        (1, Experts.flags("llama", moe_balance="aux", recompute="block")),
        (1, Experts.flags("gpt2", dtype="bf16", moe_balance="bias")),
        (2, Experts.flags("qwen3", expert_parallel=2, zero=1)),
    ]

    def check(self, ranks, changes):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "sectors")
            environment = {"EMU_SEED": str(SEED), "EMU_GPUS": str(ranks), "EMU_SECTORS": path}
            events, _ = job(
                "build/train_gpt_checked",
                ranks,
                environment=environment,
                **dict(dict(steps=1, val_every=0, val=None), **changes),
            )
            with open(path) as lines:
                kernels = [json.loads(line) for line in lines]
        (memory,) = [e["memory"] for e in events if e["event"] == "end"]
        for kind in ("parameters", "gradients", "optimizer", "activations"):
            self.assertEqual(memory["predicted"][kind], memory["measured"][kind], kind)
        self.assertGreater(len(kernels), 5)
        for k in kernels:
            for way in ("read", "write"):
                self.assertLessEqual(k[way + "_distinct_sectors"], k[way + "_sectors"], k["kernel"])
                self.assertLessEqual(k[way + "_requests"], k[way + "_sectors"], k["kernel"])

    def test_runs(self):
        for ranks, changes in self.RUNS:
            with self.subTest(ranks=ranks, seed=SEED, **changes):
                self.check(ranks, changes)


class Cudnn(TestCase):
    """train_gpt_faulty_emu without faults, which has test/cudnn_frontend.h in place of cuDNN's."""

    PROGRAM = "build/train_gpt_faulty_emu"
    SHAPE = dict(dtype="bf16", model="layers=2,heads=2,channels=16,vocab=101")

    def check(self, attention, environment=(), **changes):
        changes = {**self.SHAPE, **changes}
        events, _ = job(self.PROGRAM, 1, 0, environment, **changes)
        self.assertEqual(events[0]["attention"], attention)
        memory = events[-1]["memory"]
        self.assertEqual(memory["predicted"]["device"], memory["measured"]["device"])
        return losses_of(events)[0]

    def test_steps(self):
        """The steps of own attention, to bf16's precision; the log says which computed."""
        short = dict(steps=2, val_every=0)
        own = self.check("own", {"TRAIN_GPT_OWN_ATTENTION": "1"}, **short)
        losses = self.check("cuDNN", **short)
        self.assertNotEqual(losses, own)
        self.assert_close(losses, own, SAME_BF16)
        start, _ = self.forecast({"TRAIN_GPT_OWN_ATTENTION": "0"})
        self.assertEqual(start["attention"], "cuDNN")

    def test_one_direction(self):
        """Its backward pass needs too much scratch at T = 324 with heads of 8 channels."""
        train = harness.shard([i * 7 % 101 for i in range(1 << 10)])
        shape = dict(seq_len=324, micro_batch=1, batch_tokens=324, val_every=0, train=train)
        shape["model"] = "layers=1,heads=1,channels=8,vocab=101"
        self.check("cuDNN forward, own backward", **shape, steps=1)

    def forecast(self, environment=(), **changes):
        """The start of a run that nothing is measured for, and how many graphs cuDNN makes."""
        counts = os.path.join(harness.scratch(), "counts")
        environment = {"EMU_COUNTS": counts, **dict(environment)}
        given = dict(dry_run=1, json=1, cluster="1x1,tflops=1,memory=1", val_every=0)
        words = harness.command_line({**self.SHAPE, "val": None, **given, **changes}, True)
        said = Job(0, os.path.join(ROOT, self.PROGRAM), words=words, environment=environment).done()
        return json.loads(said.out), json.loads(get(counts))["cudnn_graphs"]

    def test_few_plans(self):
        """One for each direction and number of rows that is computed, and one for planning,
        however many numbers of rows a private run tries."""
        private = dict(dp_noise=0, dp_key="%064x" % 5, dp_show_private=1, shuffle=None)
        large = dict(model="gpt2:124M", seq_len=1024, micro_batch=64, batch_tokens=2**19)
        large["train"] = None  # no figure of it is needed
        self.assertEqual(self.forecast(**private, **large)[1], 2)
        model = "layers=1,heads=1,channels=8,vocab=64"
        small = dict(seq_len=8, micro_batch=2, batch_tokens=24, val_every=0, val=None, model=model)
        train = harness.shard([i * 7 % 64 for i in range(100)])
        for changes, plans in ((private, (2, 4)), ({}, (4,))):  # of drawn rows, all may be 1
            counts = os.path.join(harness.scratch(), "counts")
            changes = dict(changes, **small, steps=2, dtype="bf16", train=train)
            said = job(self.PROGRAM, 1, 0, {"EMU_COUNTS": counts}, **changes)[1]
            self.assertNotIn("warning: own attention", said)
            self.assertIn(json.loads(get(counts))["cudnn_graphs"], plans)

    def test_some_rows_are_refused(self):
        """cuDNN takes one row and not three: own attention computes them, and that is said."""
        environment = {"EMU_CUDNN_REFUSES": "3"}
        short = dict(self.SHAPE, steps=2, val_every=0)
        events, said = job(self.PROGRAM, 1, 0, environment, **short)
        line = "warning: own attention computes the backward pass of 3 sequences (cuDNN: no such"
        self.assertEqual(said.count(line), 1, said)
        own = self.check("own", {"TRAIN_GPT_OWN_ATTENTION": "1"}, **short)
        self.assert_close(losses_of(events)[0], own, SAME_BF16)

    def test_reason(self):
        """Why it is not cuDNN, in the first lines and in the log."""
        wide = "layers=1,heads=1,channels={},vocab=101"
        asked = {"TRAIN_GPT_OWN_ATTENTION": "1"}
        for attention, reason, environment, changes in (
            ("cuDNN", "", {}, {}),
            ("own", "TRAIN_GPT_OWN_ATTENTION is set", asked, {}),
            ("own", "it is used in bf16 only", {}, {"dtype": "fp32"}),
            ("own", "it takes heads of a multiple of 8", {}, {"model": wide.format(20)}),
            ("own forward, cuDNN backward", 'no engine for "', {}, {"model": wide.format(72)}),
        ):
            with self.subTest(attention, **changes):
                start, _ = self.forecast(environment, **changes)
                self.assertEqual(start["attention"], attention)
                self.assertIn(reason, start["attention_reason"])
                self.assertEqual(start["attention_reason"] == "", reason == "")
        binary = os.path.join(ROOT, self.PROGRAM)
        said = Job(1, binary, environment=asked, **{**FLAGS, **self.SHAPE, "steps": 0}).done().out
        shown = "; attention: own (cuDNN: TRAIN_GPT_OWN_ATTENTION is set)"
        self.assertEqual(" ".join(said.split()).count(shown), 1, said)

    def test_ranks_differ(self):
        """A switch that only one of the ranks has."""
        binary = os.path.join(ROOT, self.PROGRAM)
        words = " ".join(map(shlex.quote, harness.command_line(self.SHAPE, True)))
        for which in ("OWN_ATTENTION", "NCCL_SHARED", "LIBRARY_PRODUCTS"):
            name = "TRAIN_GPT_" + which
            ranks = [f"-np 1 env {name}={on} {binary} {words}" for on in (0, 1)]
            command = f"exec mpirun --oversubscribe {' : '.join(ranks)}"
            said = Job(2, binary, shell=command).done(EXIT_INPUT).err
            self.assertIn(f"{name} must be the same on all ranks; it is off on this one", said)
            self.assertIn(f"\n  hint: mpirun -x {name} ", said)

    def test_scratch_does_not_fit(self):
        """The hint names what goes without it."""
        train = harness.shard([i % 101 for i in range(1 << 14)])
        shape = dict(self.SHAPE, seq_len=256, micro_batch=32, batch_tokens=1 << 13, train=train)
        own, binary = {"TRAIN_GPT_OWN_ATTENTION": "1"}, os.path.join(ROOT, self.PROGRAM)
        needed = [
            self.forecast(environment, **shape)[0]["predicted"]["memory"]["device"]
            for environment in ({}, own)
        ]
        between = {"EMU_DEVICE_MEMORY": str(sum(needed) // 2 * 64 // 63)}
        changes = dict(shape, steps=0, val_every=0, threads=1)
        said = Job(1, binary, environment=between, **changes).done(EXIT_RESOURCES).err
        self.assertIn(", or TRAIN_GPT_OWN_ATTENTION=1 in the environment\n", said)

    def test_does_not_start(self):
        environment = {"EMU_NO_CUDNN": "1"}
        _, said = job(self.PROGRAM, 1, EXIT_RESOURCES, environment, **self.SHAPE)
        self.assertIn("cuDNN does not start\n  hint: TRAIN_GPT_OWN_ATTENTION=1 goes without", said)
        own = {**environment, "TRAIN_GPT_OWN_ATTENTION": "1"}
        self.check("own", own, steps=1, val_every=0)
        for changes in ({"dtype": "fp32"}, {"model": "layers=1,heads=1,channels=20,vocab=101"}):
            self.assertEqual(self.forecast(environment, **changes)[0]["attention"], "own")


class Compiler(unittest.TestCase):
    NVCC = [shutil.which("nvcc")] * bool(shutil.which("nvcc")) or glob.glob(
        os.path.join(ROOT, ".venv/lib/python3*/site-packages/nvidia/cu13/bin/nvcc")
    )

    @unittest.skipUnless(
        NVCC, "no nvcc, which scripts/setup.sh cuda installs: the source was not compiled for a GPU"
    )
    def test_nvcc(self):
        """As `make cuda` does. The source is the same for each of its architectures: a sample has
        one of them, does not optimise, and makes no code for the host. What only an optimising
        compiler warns of, the emulation's build shows; that all is linked, TEST_ALL."""
        said = subprocess.run([self.NVCC[0], "--help"], capture_output=True, text=True).stdout
        quick = "--Ofast-compile=max " * ("--Ofast-compile" in said)  # CUDA 12.8 and later
        quick = f"OPTIMISE=-O0 -Xptxas -O0 {quick}-c -Xcompiler -fsyntax-only"
        # The frontend's headers take as long as all else: test_cudnn, and on the emulation Cudnn.
        self.compile(*(() if ALL else (self.ONE_GPU, quick, "USE_CUDNN=0")))

    @unittest.skipUnless(
        ALL
        and NVCC
        and glob.glob(
            os.path.join(ROOT, ".venv/lib/python3*/site-packages/include/cudnn_frontend.h")
        ),
        "only under TEST_ALL, with nvcc and what scripts/setup.sh cudnn installs",
    )
    def test_cudnn(self):
        self.compile(self.ONE_GPU, "USE_CUDNN=1")

    ONE_GPU = "GPUS=-gencode arch=compute_80,code=sm_80"

    def compile(self, *variables):
        with tempfile.TemporaryDirectory() as folder:
            make = [
                "make", "-s", "-n", "-W", "train_gpt.cu", "-o", "build/flags-cuda", "cuda",
                *variables,
            ]  # -o: the flags' file stays as it is
            command = subprocess.run(
                make, cwd=ROOT, capture_output=True, text=True, check=True
            ).stdout.strip()
            command = re.sub(
                r"-o \S+", "-o " + shlex.quote(os.path.join(folder, "program")), command
            )
            done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    os.chdir(ROOT)
    harness.main()
