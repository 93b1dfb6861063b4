#!/usr/bin/env python3
"""test_gpu_device.py: the GPU build on a GPU (`make test-gpu`), and what is for GPUs only and can
be tried without one.

Device      the operations' case table, PyTorch's golden numbers, 1, 2 and 4 ranks on one GPU, also
            by NCCL, experts, graphs, resume, too little memory.
            Skipped without a GPU; TEST_ALL=1 then runs the same tests on the emulation
Recipes     scripts/recipes: every flag is one, and what their headers say of tokens, memory and
            time is what the program says
Peaks       which device has which peak
"""

import json
import os
import re
import shutil
import subprocess
import tempfile
import unittest

import harness
import test_gpu  # not its classes, which would be run again
from harness import ALL, ROOT, SAME, SAME_NORM, TestCase, golden_run
from test_gpu import ENVIRONMENT, SAME_BF16, job, losses_of, run

test_gpu.FLAGS["model"] = harness.MODEL  # the model of the golden numbers


def find_gpu():
    try:
        return "GPU" in subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    except FileNotFoundError:
        return False


HERE, PROGRAM, OPERATIONS = (
    (True, "train_gpt_cuda", "build/gpu_test_ops")
    if find_gpu()
    else (ALL, "train_gpt_emu", "build/test_ops_emu")
)


@unittest.skipUnless(HERE, "no GPU is at hand")
class Device(TestCase):
    def test_operations(self):
        done = subprocess.run([os.path.join(ROOT, OPERATIONS)], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
        self.assertRegex(done.stdout + done.stderr, r"\[  PASSED  \] \d+ test")

    def test_golden(self):
        losses, norms = golden_run()
        for ranks, changes in (
            (1, {}),
            (1, {"recompute": "block", "micro_batch": 2}),
            (2, {"micro_batch": 1}),
            (4, {"micro_batch": 1}),
        ):
            with self.subTest(ranks=ranks, **changes):
                found = run(PROGRAM, ranks, steps=10, val_every=0, **changes)
                self.assert_close(found[0], losses, SAME)
                self.assert_close(found[1], norms, SAME_NORM)

    def test_nccl_on_one_gpu(self):
        """NCCL itself, between two ranks that share the GPU and in a run of one rank: what ranks
        compute whose messages are staged, or which have none."""
        for ranks, changes in (
            (1, {}),
            (2, {"zero": 3, "recompute": "block"}),
            (2, {"dtype": "bf16"}),
        ):
            changes = dict(changes, micro_batch=1, steps=4, val_every=0)
            found = {}
            for asked in "01":
                environment = {"TRAIN_GPT_NCCL_SHARED": asked}
                events, _ = job(PROGRAM, ranks, environment=environment, **changes)
                expected = "staged" if ranks > 1 and asked == "0" else "nccl"
                self.assertEqual(events[0]["transport"], expected)
                found[asked] = losses_of(events)
            with self.subTest(ranks=ranks, **changes):
                self.assert_close(found["1"][0], found["0"][0], SAME)
                self.assert_close(found["1"][1], found["0"][1], SAME_NORM)

    def test_experts(self):
        """What train_gpt computed (test/make_experts_golden.py); on two ranks, the same experts on
        both, and divided, through the host and by NCCL."""
        with open(os.path.join(ROOT, "test/golden/experts.json")) as file:
            golden = json.load(file)
        cases = [(name, 1, {}, "0") for name in golden]
        cases += [("llama", 2, {"zero": 2}, "0")]
        cases += [(name, 2, {"expert_parallel": 2}, nccl) for name, nccl in zip(golden, "0101")]
        for name, ranks, changes, nccl in cases:
            flags = test_gpu.Experts.flags(name, **golden[name]["flags"], **changes)
            with self.subTest(name, ranks=ranks, nccl=nccl, **changes):
                asked = {"TRAIN_GPT_NCCL_SHARED": nccl}
                losses, norms = losses_of(job(PROGRAM, ranks, environment=asked, **flags)[0])
                self.assert_close(losses, golden[name]["losses"], SAME)
                self.assert_close(norms, golden[name]["norms"], SAME_NORM)

    def test_bf16(self):
        losses = run(PROGRAM, val_every=0, dtype="bf16")[0]
        exact = golden_run()[0][: len(losses)]
        self.assert_close(losses, exact, SAME_BF16)
        self.assertGreater(max(abs(a - b) / b for a, b in zip(losses, exact)), SAME)

    def test_bits(self):
        """The same bits again; launched one by one; resumed, also where algorithms were timed."""
        changes = dict(micro_batch=1, steps=10, val_every=0, autotune=0)
        whole = run(PROGRAM, **changes)
        self.assertEqual(run(PROGRAM, **changes), whole)
        self.assertEqual(run(PROGRAM, **changes, profile_steps="1:10"), whole)
        self.resume(whole, **changes)
        self.resume(None, **dict(changes, autotune=1))

    def resume(self, whole, **changes):
        """In two halves, and the second half again, which is the first run's where there is one."""
        with tempfile.TemporaryDirectory() as out:
            begun = run(PROGRAM, **changes, out=out, save_every=6)
            shutil.rmtree(os.path.join(out, "step_00000010"))
            resumed = run(PROGRAM, **changes, out=out, resume=1)
        self.assertEqual(resumed, tuple(part[6:] for part in begun))
        self.assertEqual(begun, whole or begun)

    def test_too_large(self):
        with self.assertRaisesRegex(
            AssertionError,
            r"(?s)exit code 3 .*GiB more, .* GiB are available.*no --micro-batch fits",
        ):
            run(
                PROGRAM,
                model="gpt3:175B",
                train=os.path.join(ROOT, "test/golden/gpt_tiny_tokens.bin"),
            )


class Recipes(unittest.TestCase):
    def dry_run(self, path, *flags, program="./train_gpt_emu", ranks=1):
        done = subprocess.run(
            [path, "--dry-run", "--json", *flags],
            env=dict(ENVIRONMENT, PROGRAM=program, RANKS=str(ranks)),
            capture_output=True,
            text=True,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def check(self, name, tokens, place="GPU", **program):
        path = os.path.join(ROOT, "scripts/recipes", f"{name}.sh")
        with open(path) as script:
            text = script.read()
        start = self.dry_run(path, "--ranks-per-node", "8", **program)
        flags = start["flags"]
        said = [
            int(n.replace(",", ""))
            for n in re.search(
                r"Tokens +([\d,]+) steps x ([\d,]+) tokens = ([\d,]+)", text
            ).groups()
        ]
        self.assertEqual(said, [flags["steps"], flags["batch-tokens"], tokens])
        self.assertEqual(flags["steps"] * flags["batch-tokens"], tokens)
        self.assertEqual(flags["ranks-per-node"], 8, "what is given goes before the recipe's")
        memory = float(re.search(rf"Memory +([\d.]+) GiB on each {place}", text)[1])
        self.assertAlmostEqual(
            start["predicted"]["memory"]["device"] / 2**30 / memory, 1, delta=0.01
        )
        if place == "GPU":
            self.check_time(path, text)

    def check_time(self, path, text):
        """On the cluster of the header's own command."""
        time, unit, gpus = re.search(
            r"Time +([\d.]+) (minutes|hours) on (one|8) H100, predicted by", text
        ).groups()
        cluster = re.search(r'--cluster "([^"]+)"; not measured', text)[1]
        self.assertEqual(cluster, f"1x{1 if gpus == 'one' else 8},gpu=h100")
        start = self.dry_run(path, "--cluster", cluster)
        seconds = start["predicted"]["step_ms"] / 1000 * start["flags"]["steps"]
        said = float(time) * {"minutes": 60, "hours": 3600}[unit]
        self.assertAlmostEqual(seconds / said, 1, delta=0.02)

    def test_124M(self):
        self.check("gpt2_124M", 9_999_745_024)

    def test_1558M(self):
        self.check("gpt2_1558M", 33_554_432_000)

    def test_nano(self):
        self.check("nano_d12", 1_703_936_000)
        self.check("nano_d20", 4_805_099_520)
        self.check("english_nano", 81_920_000)
        self.check("english_cpu", 6_553_600, "rank", program="./train_gpt", ranks=2)

    def test_all_are_checked(self):
        names = {n for n in os.listdir(os.path.join(ROOT, "scripts/recipes")) if n.endswith(".sh")}
        gpt2, nano = {"gpt2_124M.sh", "gpt2_1558M.sh"}, {"nano_d12.sh", "nano_d20.sh"}
        self.assertEqual(names, {*gpt2, *nano, "english_nano.sh", "english_cpu.sh"})


class Peaks(unittest.TestCase):
    def peak(self, device, dtype="bf16"):
        done = subprocess.run(
            [
                os.path.join(ROOT, "train_gpt_emu"), "--dry-run", "--json", "--model",
                "layers=1,heads=1,channels=8,vocab=10", "--seq-len", "16", "--dtype", dtype,
            ],
            env=dict(ENVIRONMENT, EMU_DEVICE=device),
            capture_output=True,
            text=True,
            check=True,
        )
        start = json.loads(done.stdout)
        self.assertEqual(start["device"], device)
        return start["peak_flops"]

    def test_names(self):
        for device, peak in (
            ("NVIDIA H100 80GB HBM3", 989.4e12),
            ("NVIDIA H100 PCIe", 756e12),
            ("NVIDIA A100-SXM4-80GB", 312e12),
            ("NVIDIA L4", 121e12),
        ):
            self.assertEqual(self.peak(device), peak)
        for device, dtype in (
            ("NVIDIA A10G", "bf16"),
            ("NVIDIA H100 80GB HBM3", "fp32"),
        ):  # not in the table; a peak of bf16 only
            self.assertLess(self.peak(device, dtype), 1e12, "measured on the emulation")


if __name__ == "__main__":
    os.chdir(ROOT)
    harness.main()
