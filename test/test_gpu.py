#!/usr/bin/env python3
"""test_gpu.py: the GPU build without a GPU. train_gpt_emu is train_gpt.cu on the processor (test/emu.h).

    python3 test/test_gpu.py            TEST_ALL=1: the exhaustive forms; TEST_SEED=N: the orders in which the emulation runs things

    Program     a run gives the losses of train_gpt, whatever the order of threads and streams; the same bits again; a resumed run too
    Compiler    nvcc takes the same source, warnings as errors; skipped where there is none
"""
import glob
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
MODEL, TOKENS = (os.path.join(ROOT, "test/golden/gpt_tiny" + end) for end in ("_model.bin", "_tokens.bin"))
FLAGS = {"model": MODEL, "train": TOKENS, "val": TOKENS, "shuffle": 0, "seq-len": 20, "micro-batch": 3, "batch-tokens": 60, "steps": 10, "lr": "1e-3",
         "lr-schedule": "constant", "weight-decay": 0.1, "grad-clip": 1, "val-every": 10, "threads": 1}
SAME = 1e-5        # fp32, summed in another order, 10 updates
SAME_BF16 = 0.02   # 8 bits a number; losses are averages


def run(program, ranks=1, seed=SEED, **changes):
    """Losses of the steps, then of the validation, and the log's last norm."""
    with tempfile.TemporaryDirectory() as folder:
        flags = dict(FLAGS, log=os.path.join(folder, "log"), **{name.replace("_", "-"): value for name, value in changes.items()})
        command = ["mpirun", "--oversubscribe", "-np", str(ranks), os.path.join(ROOT, program)] + [str(w) for n, v in flags.items() for w in ("--" + n, v)]
        done = subprocess.run(command, env=dict(ENVIRONMENT, EMU_SEED=str(seed)), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise AssertionError(f"{shlex.join(command)}: exit {done.returncode}\n{done.stderr}")
        with open(flags["log"]) as log:
            events = [json.loads(line) for line in log]
    return [e["loss"] for e in events if e["event"] in ("step", "val")], [e["grad_norm"] for e in events if e["event"] == "step"]


class Program(unittest.TestCase):
    def check_near(self, got, expected, tolerance):
        self.assertEqual(len(got), len(expected))
        for a, b in zip(got, expected):
            self.assertLessEqual(abs(a - b), tolerance * abs(b))

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
        same = dict(val_every=0, dtype="bf16", stochastic_rounding=1)  # the hardest: draws must be those of the whole run
        whole = run("train_gpt_emu", **same)[0]
        with tempfile.TemporaryDirectory() as out:
            begun = run("train_gpt_emu", out=out, steps=6, save_every=6, **same)[0]
            resumed = run("train_gpt_emu", out=out, resume=1, **same)[0]
        self.assertEqual(begun + resumed, whole)

    def test_stochastic_rounding(self):
        """The same masters give the same bf16 parameters on both builds and any number of ranks; to nearest, others."""
        def exported(program, **changes):
            with tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "model.bin")
                run(program, export=path, steps=0, val_every=0, dtype="bf16", **changes)
                with open(path, "rb") as file:
                    return file.read()
        by_chance = exported("train_gpt", stochastic_rounding=1)
        self.assertEqual(by_chance, exported("train_gpt_emu", ranks=2, stochastic_rounding=1))
        self.assertNotEqual(by_chance, exported("train_gpt"))


class Compiler(unittest.TestCase):
    @unittest.skipUnless(shutil.which("nvcc"), "no nvcc: the source was not compiled for a GPU")
    def test_nvcc(self):
        """Plain: for one architecture; TEST_ALL: as `make cuda` does."""
        self.compile(*([] if ALL else [self.ONE_GPU]))

    @unittest.skipUnless(ALL and shutil.which("nvcc") and glob.glob(os.path.join(ROOT, ".venv/lib/python3*/site-packages/include/cudnn_frontend.h")),
                         "only under TEST_ALL, with nvcc and what scripts/setup.sh cudnn installs")
    def test_cudnn(self):
        self.compile(self.ONE_GPU, "USE_CUDNN=1")

    ONE_GPU = "GPUS=-gencode arch=compute_80,code=sm_80"

    def compile(self, *variables):
        with tempfile.TemporaryDirectory() as folder:
            command = subprocess.run(["make", "-s", "-n", "-B", "cuda", *variables], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            command = re.sub(r"-o \S+", "-o " + shlex.quote(os.path.join(folder, "program")), command)
            done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    os.chdir(ROOT)
    print("seed:", SEED, file=sys.stderr)
    unittest.main()
