#!/usr/bin/env python3
"""test_gpu.py: the GPU build without a GPU. train_gpt_emu is train_gpt.cu on the processor (test/emu.h).

    python3 test/test_gpu.py            TEST_ALL=1: the exhaustive forms; TEST_SEED=N: the orders in which the emulation runs things

    Program     a run gives the losses of train_gpt, whatever the order of threads and streams; the same bits again; a resumed run too
    Ranks       with a GPU each they use NCCL, with one for all MPI; what is sent is what was predicted; a lost rank is named
    Compiler    nvcc takes the same source, warnings as errors; skipped where there is none
"""
import concurrent.futures
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ALL = os.environ.get("TEST_ALL") == "1"
SEED = int(os.environ.get("TEST_SEED", random.randrange(1 << 30)))
ENVIRONMENT = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMP_NUM_THREADS="1")
EXIT_PEER = 4
MODEL, TOKENS = (os.path.join(ROOT, "test/golden/gpt_tiny" + end) for end in ("_model.bin", "_tokens.bin"))
FLAGS = {"model": MODEL, "train": TOKENS, "val": TOKENS, "shuffle": 0, "seq-len": 20, "micro-batch": 3, "batch-tokens": 60, "steps": 10, "lr": "1e-3",
         "lr-schedule": "constant", "weight-decay": 0.1, "grad-clip": 1, "val-every": 10, "threads": 1}
SAME = 1e-5        # fp32, summed in another order, 10 updates
SAME_MESSAGES = 1e-4  # 8 bits an element of the gradient, of which a loss sees thousands, 4 updates
SAME_BF16 = 0.02   # 8 bits a number; losses are averages


def job(program, ranks=1, code=0, environment=(), **changes):
    """The log's events and what was said on stderr."""
    with tempfile.TemporaryDirectory() as folder:
        flags = dict(FLAGS, log=os.path.join(folder, "log"), **{name.replace("_", "-"): value for name, value in changes.items()})
        command = ["mpirun", "--oversubscribe", "-np", str(ranks), os.path.join(ROOT, program)] + [str(w) for n, v in flags.items() for w in ("--" + n, v)]
        done = subprocess.run(command, env=dict(ENVIRONMENT, **dict(environment)), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)
        if code is not None and done.returncode != code:
            raise AssertionError(f"{shlex.join(command)}: exit {done.returncode}\n{done.stderr}")
        with open(flags["log"]) as log:
            return [json.loads(line) for line in log], done.stderr


def losses_of(events):
    """Losses of the steps, then of the validation, and norms."""
    return [e["loss"] for e in events if e["event"] in ("step", "val")], [e["grad_norm"] for e in events if e["event"] == "step"]


def run(program, ranks=1, seed=SEED, gpus=1, **changes):
    return losses_of(job(program, ranks, environment={"EMU_SEED": str(seed), "EMU_GPUS": str(gpus)}, **changes)[0])


class TestCase(unittest.TestCase):
    def check_near(self, got, expected, tolerance):
        self.assertEqual(len(got), len(expected))
        for a, b in zip(got, expected):
            self.assertLessEqual(abs(a - b), tolerance * abs(b))


class Program(TestCase):
    def test_losses(self):
        for ranks, changes in ((1, {}), (2, {"recompute": "block", "micro_batch": 2})) + (((3, {}), (2, {"optimizer": "sgd"})) if ALL else ()):
            with self.subTest(ranks=ranks, **changes):
                losses, norms = run("train_gpt_emu", ranks, sample_every=10, sample_tokens=20, **changes)  # sampling: more shapes than plans are kept
                expected = run("train_gpt", ranks, **changes)
                self.check_near(losses, expected[0], SAME)
                self.check_near(norms, expected[1], 10 * SAME)

    def test_order(self):
        """Threads and streams in another order: the same bits."""
        self.assertEqual(run("train_gpt_emu", seed=SEED + 1), run("train_gpt_emu", seed=SEED + 2))

    def test_bf16(self):
        """--dtype bf16 computes in bf16 here, and trains as fp32 does, to its precision."""
        losses = run("train_gpt_emu", dtype="bf16", model="layers=3,heads=3,channels=48,vocab=101")[0]
        exact = run("train_gpt", model="layers=3,heads=3,channels=48,vocab=101")[0]
        self.check_near(losses, exact, SAME_BF16)
        self.assertNotEqual(losses, run("train_gpt", dtype="bf16", model="layers=3,heads=3,channels=48,vocab=101")[0])

    def test_resume(self):
        whole = run("train_gpt_emu", val_every=0)[0]
        with tempfile.TemporaryDirectory() as out:
            begun = run("train_gpt_emu", out=out, steps=6, save_every=6, val_every=0)[0]
            resumed = run("train_gpt_emu", out=out, resume=1, val_every=0)[0]
        self.assertEqual(begun + resumed, whole)


class Ranks(TestCase):
    def check_run(self, ranks, gpus, transport, tolerance, **changes):
        events, _ = job("train_gpt_emu", ranks, environment={"EMU_SEED": str(SEED), "EMU_GPUS": str(gpus)}, **changes)
        self.assertEqual(events[0]["transport"], transport)
        losses, norms = losses_of(events)
        on_processor, _ = job("train_gpt", ranks, **changes)
        self.assertEqual(on_processor[0]["transport"], "mpi")
        expected = losses_of(on_processor)
        self.check_near(losses, expected[0], tolerance)
        self.check_near(norms, expected[1], 10 * tolerance)
        traffic = events[-1]["traffic"]
        self.assertEqual(traffic["measured"], traffic["predicted"])
        self.assertEqual(traffic["predicted"], on_processor[-1]["traffic"]["predicted"])

    def test_gpus_of_their_own(self):
        self.check_run(3, 4, "nccl", SAME, recompute="block", micro_batch=1)
        if ALL:
            self.check_run(2, 4, "nccl", SAME)
            self.check_run(4, 4, "nccl", SAME, ranks_per_node=2)

    def test_a_gpu_for_several(self):
        self.check_run(3, 2, "staged", SAME, optimizer="sgd", steps=4)  # two ranks on one, one on the other
        if ALL:
            self.check_run(4, 1, "staged", SAME, ranks_per_node=2)

    def test_bf16_messages(self):
        """NCCL rounds every partial sum, the processor's messages every contribution."""
        self.check_run(2, 2, "nccl", SAME_MESSAGES, reduce_dtype="bf16", steps=4)
        if ALL:
            self.check_run(2, 1, "staged", SAME, reduce_dtype="bf16")

    def test_lost(self):
        """The others' devices wait in a collective; the message names the rank, the collective, the storage and the step."""
        faults = [("stop", 1, "REDUCE", "it is stopped, seen"), ("hang", 0, "UPDATE", "no sign of progress"), ("kill", 2, "FORWARD", "it has ended; waited"),
                  ("stop", 0, "FORWARD", "it is stopped, seen"), ("hang", 2, "BACKWARD_INPUT", "no sign of progress"), ("kill", 1, "UPDATE", "it has ended; waited")]

        def lose(how, rank, action, words):
            code = EXIT_PEER if how != "kill" else None  # that of what mpirun sees first
            environment = {"EMU_SEED": str(SEED), "EMU_GPUS": "4", "FAULT": f"{how} {rank} 3 {action}"}
            events, said = job("build/train_gpt_faulty_emu", 3, code, environment, watchdog=3)
            self.assertNotIn("end", [e["event"] for e in events])
            if code:
                self.assertRegex(said, rf"lost rank {rank} on \S+: {words} .* s, in (all_gather of parameters|reduce_scatter of gradient) \d, step [23]")

        def lose_and_fail():  # NCCL finds it before the watch does
            environment = {"EMU_GPUS": "2", "EMU_NCCL_ERROR": "60", "FAULT": "hang 1 1 FORWARD"}
            said = job("build/train_gpt_faulty_emu", 2, EXIT_PEER, environment, val_every=0)[1]
            self.assertRegex(said, r"NCCL: .*, in reduce_scatter of gradient \d, step 1; no answer from rank 1 on \S+\n")
        with concurrent.futures.ThreadPoolExecutor(4) as pool:  # they mostly wait
            failing = pool.submit(lose_and_fail)
            list(pool.map(lose, *zip(*(faults if ALL else faults[:3]))))
            failing.result()

    def test_nccl_fails(self):
        """An error that NCCL finds by itself, with nobody dead."""
        _, said = job("train_gpt_emu", 2, EXIT_PEER, {"EMU_GPUS": "2", "EMU_NCCL_ERROR": "60"})
        self.assertRegex(said, r"NCCL: remote process exited or there was a network error: \w+, in (no collective|\w+ of \w+ \d, step \d)\n")


class Compiler(unittest.TestCase):
    @unittest.skipUnless(shutil.which("nvcc"), "no nvcc: the source was not compiled for a GPU")
    def test_nvcc(self):
        """Plain: for one architecture, without optimisation; TEST_ALL: as `make cuda` does."""
        with tempfile.TemporaryDirectory() as folder:
            fewer = [] if ALL else ["GPUS=-gencode arch=compute_80,code=sm_80"]
            command = subprocess.run(["make", "-s", "-n", "-B", "cuda", *fewer], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            command = re.sub(r"-o \S+", "-o " + shlex.quote(os.path.join(folder, "program")), command)
            done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    os.chdir(ROOT)
    print("seed:", SEED, file=sys.stderr)
    unittest.main()
