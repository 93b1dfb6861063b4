#!/usr/bin/env python3
"""test_gpu_ten.py: scripts/gpu_ten.py on the emulation, at toy size, and scripts/gpu_table.py on
results written here.

Whole       every step runs, and its figures are what they should be; tools that only a machine with
            a GPU has are imitated, and PyTorch is missing
Trouble     a command that fails, one that hangs, one that is killed, a step that stumbles, the end
            of the time, a kill in the middle: the results are whole, and nothing is left running
Attention   test/bench_attention.cu: which direction cuDNN computes, and that it is told the tensors
Packed      the packed file alone, with no environment: its programs and its Open MPI run
Page        what was measured, beside the estimates
"""

import argparse
import contextlib
import gzip
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
import unittest
import zipfile
from pathlib import Path
from unittest import mock

import harness

ROOT = Path(harness.ROOT)
sys.path.insert(0, str(ROOT / "scripts"))
import gpu_table  # noqa: E402
import gpu_ten  # noqa: E402

TIMEOUT = 600
HANG = '#!/bin/sh\ntrap "" TERM\necho $$ >"$FAKES/pid"\nwhile :; do sleep 1; done\n'
SMI = "#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 580.1, 81559 MiB, 1 MiB, 345 MHz, 1980 MHz, 70 W'\n"
# Runs the program that it is to watch, as compute-sanitizer does.
SANITIZER = (
    '#!/bin/sh\n[ "$1 $2 $3" = "--error-exitcode 9 --tool" ] || exit 8\necho "$4"'
    ' >>"$FAKES/tools"\nshift 4\nexec "$@" >/dev/null\n'
)
NCU = (
    '#!/bin/sh\necho "==PROF== a line"\nprintf \'"ID","Name"\\n"","unit"\\n"1","norm_kernel"\\n\'\n'
)
PYTORCH = "raise ImportError('no PyTorch here')\n"


class InFolder(harness.InFolder):
    def setUp(self):
        super().setUp()
        self.write("modules/torch.py", PYTORCH)
        self.environment = dict(
            os.environ,
            FAKES=str(self.folder),
            PATH=f"{self.folder}/bin:{os.environ['PATH']}",
            PYTHONPATH=str(self.folder / "modules"),
            OMP_NUM_THREADS="1",
        )

    def fake(self, **programs):
        for name, text in programs.items():
            self.write("bin/" + name.replace("_", "-"), text, mode=0o755)

    def start(self, *words, file=ROOT / "scripts/gpu_ten.py", verb=("run", "--toy")):
        command = [sys.executable, file, *verb, "--out", self.out, *words]
        return subprocess.Popen(
            list(map(str, command)), env=self.environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )

    def ten(self, *words, code=1, **more):
        """{name: entry} of a call."""
        process = self.start(*words, **more)
        said = process.communicate(timeout=TIMEOUT)[0]
        self.assertEqual(process.returncode, code, said)
        return self.results()

    def results(self):
        for path in self.out.iterdir():
            self.assertIn(path.name, ("ten.json", "ten_logs.gz", "ten_counters.csv"))
            self.assertLess(path.stat().st_size, 16 << 20)
        entries = json.loads((self.out / "ten.json").read_text())["entries"]
        for entry in entries:
            self.assertIn(entry["status"], ("passed", "failed", "skipped", "out of time"))
            self.assertEqual(bool(entry["reason"]), entry["status"] != "passed", entry)
        return {entry["name"]: entry for entry in entries}

    def logs(self):
        return gzip.decompress((self.out / "ten_logs.gz").read_bytes()).decode()

    def check_gone(self):
        pid = int((self.folder / "pid").read_text())
        end = time.time() + 60
        while os.path.exists(f"/proc/{pid}") and time.time() < end:
            time.sleep(0.05)
        self.assertFalse(os.path.exists(f"/proc/{pid}"), "what hung is still there")


class Whole(InFolder):
    WITHOUT_PYTORCH = {"PyTorch", "PyTorch compiles", "ceilings", "124M, PyTorch", "1558M, PyTorch"}

    def test_every_step(self):
        self.fake(nvidia_smi=SMI, compute_sanitizer=SANITIZER, ncu=NCU)
        self.environment["EMU_GPUS"] = "2"
        entries = self.ten()
        self.assertEqual({entry["step"] for entry in entries.values()}, set(gpu_ten.STEPS))
        failed = {name for name, entry in entries.items() if entry["status"] != "passed"}
        self.assertEqual(failed, self.WITHOUT_PYTORCH, entries)
        for name in self.WITHOUT_PYTORCH:
            self.assertIn("no PyTorch here", entries[name]["reason"])
        of = {name: entry["figures"] for name, entry in entries.items()}
        self.assertEqual(of["GPU"]["name"], "NVIDIA H100 80GB HBM3")
        self.assertIn("train_gpt", of["version"]["said"])
        self.assertLess(of["three steps"]["apart"], harness.SAME)
        for name in ("operations", "operations, production", "suggestion 1", "suggestion 3"):
            self.assertGreater(of[name]["cases"], 0)
        self.assertIn("MATMUL_SUGGESTION=3", entries["suggestion 3"]["command"])
        self.assertEqual((self.folder / "tools").read_text().split(), ["memcheck", "racecheck"])
        for name in ("ncu", "ncu, Llama 1B"):
            self.assertEqual(of[name], {"kernels": 1})
            for word in ("dram__bytes_read.sum", "gpu__time_duration.sum", "smsp__inst_executed"):
                self.assertIn(word, entries[name]["command"])
        counted = (self.out / "ten_counters.csv").read_text().splitlines()
        self.assertEqual([line.split(",")[0] for line in counted], ['"ID"', '""', '"1"', '"1"'])
        self.check_kernels(of["kernels, 124M"]["found"])
        self.check_llama_kernels(of["kernels, Llama 1B"]["found"])
        self.assertEqual(of["attention"]["found"][0]["kv_heads"], 2)
        self.check_expert_kernels(of["kernels, Qwen3-MoE 0.9B"]["found"])
        systems = {n for n, entry in entries.items() if entry["step"] in ("systems", "experts")}
        predicted = json.loads(Path(gpu_table.PREDICTED).read_text())
        self.assertEqual([systems] * 2, [set(predicted[card]) for card in ("H100", "H200")])
        for model in gpu_table.MODELS:
            own, other = (of[f"{model}, {attention}"] for attention in ("own attention", "cuDNN"))
            self.assertEqual(own["losses"], other["losses"], "the same program here")
            self.assertEqual(own["memory"]["predicted"], own["memory"]["measured"])
            self.assertAlmostEqual(own["tokens_per_s"], 32e3 / own["ms"])
            switch = "TRAIN_GPT_OWN_ATTENTION=1"
            self.assertIn(switch, entries[f"{model}, own attention"]["command"])
            self.assertNotIn(switch, entries[f"{model}, cuDNN"]["command"])
        self.assertTrue(of["124M, own attention"]["actions"])
        self.assertIn("three steps.jsonl", self.logs())

    def check_kernels(self, found):
        found = {work["kernel"]: work for work in found}
        self.assertGreater(len(found), 18)
        N, C, V = 16, 16, 128
        self.assertEqual(found["fc, bias and GELU"]["flops"], 2 * N * C * 4 * C)
        self.assertEqual(found["classifier, all of it"]["flops"], 3 * 2 * N * C * V)
        self.assertEqual(found["AdamW, bf16"]["bytes"], (4 * (4 + 3) + 2) * C * V)
        self.assertEqual(found["residual"]["bytes"], 3 * 2 * N * C)
        self.assertEqual(found["GELU"]["bytes"], 2 * 2 * N * 4 * C)
        self.assertNotIn("rmsnorm", found)

    def check_llama_kernels(self, found):
        found = {work["kernel"]: work for work in found}
        N, C, F, D = 16, 16, 32, 8  # two heads of queries, one of keys
        self.assertEqual(found["gate and up"]["flops"], 2 * N * C * 2 * F)
        self.assertEqual(found["qkv"]["flops"], 2 * N * C * 4 * D)
        self.assertEqual(found["rotary"]["bytes"], 2 * 2 * N * 3 * D)
        self.assertEqual(found["SwiGLU backward"]["bytes"], 2 * N * 5 * F)
        self.assertEqual(found["attention"]["bytes"], 2 * N * (2 * C + 2 * D))
        self.assertEqual(found["embedding"]["bytes"], 2 * 2 * N * C)
        self.assertIn("norm of heads backward, weight", found)
        self.assertNotIn("layernorm", found)

    def check_expert_kernels(self, found):
        found = {work["kernel"]: work for work in found}
        N, C, F, E, rows = 16, 16, 32, 4, 2 * 16
        self.assertEqual(found["router and places of rows"]["flops"], 2 * N * E * C)
        self.assertEqual(found["rows to experts"]["bytes"], 2 * C * (N + rows))
        self.assertEqual(found["experts backward, input"]["flops"], 2 * rows * C * 2 * F)
        self.assertEqual(found["sums of tokens' rows, backward"]["bytes"], 2 * C * (N + 2 * rows))
        read = 2 * N * C + 4 * N * E
        self.assertEqual(found["router backward, weight"]["bytes"], read + 8 * E * C)
        self.assertIn("copy", found)

    def test_the_other_attention(self):
        """Steps that are not by the attention that their name says are no figure."""
        options = argparse.Namespace(toy=False, out=str(self.out))
        os.makedirs(self.out)
        log = '{"event":"start","attention":"own"}\n'
        log += '{"event":"step","ms":1,"mfu":1,"loss":1}\n' * 9
        log += '{"event":"end","memory":{"predicted":{"device":1},"measured":{"device":1}}}\n'
        for attention, status in (("own attention", "passed"), ("cuDNN", "failed")):
            run = gpu_ten.Run(options, time.monotonic(), str(self.folder))
            self.write(f"124M, {attention}.jsonl", log)
            run.end, run.shard = run.began + 60, "none"
            with mock.patch.object(run, "program", lambda _: "true"):
                with contextlib.redirect_stdout(io.StringIO()):
                    run.train("124M", attention, 9)
            (entry,) = run.results["entries"]
            self.assertEqual(entry["status"], status, entry)
        self.assertIn("computed by: own", entry["reason"])


class Attention(unittest.TestCase):
    """build/bench_attention_emu, with test/cudnn_frontend.h in place of cuDNN: which direction it
    computes, with which scratch, and that it is told the same tensors as the own kernels."""

    NONE = dict.fromkeys(("cudnn_{}_ms", "cudnn_{}_tflops", "{}_scratch", "{}_apart"))

    def bench(self, *words):
        words = [ROOT / "build/bench_attention_emu", *words]
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def check(self, shape, attention):
        """The attention of (rows, T, heads, heads of keys, channels of a head)."""
        rows, T, heads, kv, D = shape
        found = self.bench(rows, T, heads * D, heads, kv)
        self.assertEqual(found["attention"], attention)
        scratch = {"forward": 0, "backward": rows * heads * (2 * T * T + 4 * T) + 256}
        for direction, expected in scratch.items():
            if attention == "cuDNN" or f"cuDNN {direction}" in attention:
                self.assertEqual(found[direction + "_refused"], "")
                self.assertEqual(found[direction + "_scratch"], expected)
                self.assertLess(found[direction + "_apart"], 0.01)
                self.assertGreater(found[f"cudnn_{direction}_ms"], 0)
            else:
                for key in self.NONE:
                    self.assertIsNone(found[key.format(direction)])
                self.assertTrue(found[direction + "_refused"])
        return found

    def test_both(self):
        for shape in ((2, 24, 3, 3, 16), (2, 24, 4, 2, 8), (1, 16, 6, 1, 24)):
            self.check(shape, "cuDNN")

    def test_scratch(self):
        """In proportion: 2048 tokens with heads of 64 (Llama's) are taken, 4096 are not."""
        self.check((1, 256, 1, 1, 8), "cuDNN")
        found = self.check((1, 512, 1, 1, 8), "cuDNN forward, own backward")
        self.assertEqual(
            found["backward_refused"],
            f"it needs {2 * 512**2 + 4 * 512 + 256} bytes of scratch; the limit is {80 * 512 * 8}",
        )

    def test_refused(self):
        """A reason of cuDNN's; and heads that it is not asked for."""
        found = self.check((1, 16, 1, 1, 80), "own forward, cuDNN backward")
        self.assertEqual(found["forward_refused"], 'no engine for "heads" > 64')
        found = self.check((1, 16, 2, 2, 10), "own")
        self.assertIn("a multiple of 8 channels", found["backward_refused"])

    def test_arguments(self):
        words = [ROOT / "build/bench_attention_emu", "1", "2"]
        done = subprocess.run(words, capture_output=True, text=True)
        self.assertEqual(done.returncode, 2)
        self.assertIn("ROWS T C HEADS [KV_HEADS]", done.stderr)


class Trouble(InFolder):
    def test_a_command_hangs_and_others_fail(self):
        self.fake(ncu=HANG, nvidia_smi="#!/bin/sh\nkill -9 $$\n")
        # What hung is gone by the time of the next step, which fails by itself.
        self.fake(compute_sanitizer='#!/bin/sh\nkill -0 "$(cat "$FAKES/pid")" && exit 7\nexit 3\n')
        entries = self.ten("--only", "machine,counters,memory errors", "--budget", "counters=1")
        status = {name: entry["status"] for name, entry in entries.items()}
        self.assertEqual(status["ncu"], "out of time", entries["ncu"])
        self.assertIn("exit status -9", entries["GPU"]["reason"])
        self.assertEqual(status["system"], "passed")
        self.assertIn("exit status 3", entries["memcheck"]["reason"])
        self.assertEqual(entries["racecheck"]["status"], "failed")
        self.check_gone()

    def test_killed(self):
        self.fake(ncu=HANG.replace('trap "" TERM\n', ""), nvidia_smi=SMI)
        process = self.start("--only", "machine,counters")
        self.addCleanup(process.stdout.close)
        end = time.time() + TIMEOUT
        while not (self.folder / "pid").exists() and time.time() < end:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        entries = self.results()
        self.assertEqual(entries["GPU"]["figures"]["driver_version"], "580.1")
        self.assertNotIn("ncu", entries)
        self.check_gone()

    def test_no_time(self):
        entries = self.ten("--only", "first steps,kernels", "--seconds", 1)
        self.assertEqual({entry["reason"] for entry in entries.values()}, {"no time was left"})

    def in_process(self, steps):
        """Entries of steps that are functions of a test."""
        options = dict(only=list(steps), seconds=600, budget=[], toy=True, out=str(self.out))
        options = argparse.Namespace(**options)
        with mock.patch.dict(gpu_ten.STEPS, steps), contextlib.redirect_stdout(io.StringIO()):
            self.assertEqual(gpu_ten.run(options), 1)
        return self.results()

    def test_a_step_stumbles(self):
        """In its own lines, in what reads its figures; then a command prints more than is kept."""

        def noisy(t):
            t.run("noisy", ["sh", "-c", "yes | head -c 1000000; echo the end; exit 1"], 9)

        steps = {
            "machine": (9, lambda t: {}["no such key"]),
            "ceilings": (9, lambda t: t.run("figures", ["echo", "nonsense"], 9, json.loads)),
            "kernels": (9, noisy),
        }
        entries = self.in_process(steps)
        self.assertIn("no such key", entries["the step itself"]["reason"])
        self.assertIn("JSONDecodeError", entries["figures"]["reason"])
        self.assertEqual(entries["noisy"]["status"], "failed")
        self.assertIn("the end", self.logs())
        self.assertLess(len(self.logs()), gpu_ten.LOG_BYTES + 1000)

    def test_what_is_left_of_a_budget(self):
        """A step may use what those before it have left, and no step more than that."""
        ends = {}
        steps = {
            name: (seconds, lambda t: ends.update({t.step: t.end - t.began}))
            for name, seconds in (("machine", 10), ("ceilings", 20), ("kernels", 40))
        }
        steps["124M"] = (1, lambda t: t.run("fails", ["false"], 9))
        self.in_process(steps)
        self.assertEqual(
            {name: round(end) for name, end in ends.items()},
            {"machine": 100, "ceilings": 300, "kernels": 600 - 2 * gpu_ten.GRACE},
        )

    def test_all_budgets_fit(self):
        total = sum(seconds for seconds, _ in gpu_ten.STEPS.values())
        self.assertLessEqual(total + 2 * gpu_ten.GRACE, gpu_ten.SECONDS)

    def test_wrong_losses(self):
        """Steps whose losses are not PyTorch's are no success."""
        golden = harness.golden_run()
        wrong = [loss * (1 + 3 * harness.SAME) for loss in golden[0]], golden[1]
        with mock.patch.object(harness, "golden_run", lambda: wrong):
            entries = self.in_process({"first steps": (30, gpu_ten.first_steps)})
        self.assertIn("are not PyTorch's", entries["three steps"]["reason"])

    def test_skipped_is_not_passed(self):
        """The GPU's tests skip themselves where they find no GPU."""
        self.environment["TEST_ALL"] = "0"
        with mock.patch.object(
            gpu_ten, "together", lambda *calls: [call() for call in calls[-4:-1]]
        ):
            real = {
                "correctness": (60, lambda t: gpu_ten.correctness(mock.Mock(wraps=t, toy=False)))
            }
            entries = self.in_process(real)
        self.assertEqual({entry["status"] for entry in entries.values()}, {"failed"})
        self.assertIn("skipped=1", entries["test_bf16"]["reason"])

    def test_arguments(self):
        for words, said in (
            (("--only", "speeed"), "no step 'speeed'"),
            (("--budget", "nccl"), "'nccl' is not STEP=SECONDS"),
        ):
            process = self.start(*words)
            self.assertIn(said, process.communicate()[0])
            self.assertEqual(process.returncode, 2)


class Packed(InFolder):
    def test_alone(self):
        """With no environment: Open MPI is found where it was unpacked, which is gone then."""
        packed, temporary = self.folder / "ten.pyz", self.folder / "tmp"
        with contextlib.redirect_stdout(io.StringIO()):
            gpu_ten.pack(argparse.Namespace(toy=True, archs="90", out=str(packed)))
        self.assertLess(packed.stat().st_size, 30e6)
        with zipfile.ZipFile(packed) as file, tarfile.open(
            fileobj=io.BytesIO(file.read("files.tar.xz"))
        ) as files:
            names = files.getnames()
        tests = (ROOT / "test/test_gpu_device.py").read_text()
        read = set(re.findall(r"test/golden/[\w.]+", tests))
        self.assertTrue(read <= set(names) and read, read)
        for name in ("mpi/bin/mpirun", "lib/libmpi.so.40", "lib/libgomp.so.1", "train_gpt_emu"):
            self.assertIn(name, names)
        self.assertFalse([name for name in names if "libc.so" in name or "libcuda" in name])
        temporary.mkdir()
        self.environment = {"PATH": "/usr/bin:/bin", "TMPDIR": str(temporary), "EMU_GPUS": "2"}
        entries = self.ten("--only", "nccl", code=0, file=packed, verb=())
        for name in ("NCCL, one rank", "NCCL, two ranks", "NCCL, two ranks, a pipeline"):
            self.assertEqual(entries[name]["status"], "passed", entries[name])
        self.assertIn("gpu_ten_", self.logs())
        self.assertEqual(list(temporary.iterdir()), [])


class Page(harness.InFolder):
    def test_estimates(self):
        """What was committed is plausible: a faster attention or memory makes no step slower."""
        found = json.loads(Path(gpu_table.ESTIMATES).read_text())
        self.assertEqual(set(found), {"H100", "H200"})
        for name in gpu_table.MODELS:
            case, (own, other) = gpu_ten.CASES[name], found["H100"][name].values()
            self.assertLess(other["ms"], own["ms"])
            self.assertLess(found["H200"][name][gpu_ten.OWN]["ms"], own["ms"])
            self.assertTrue(0.2 < own["mfu"] < other["mfu"] < 0.76)
            tokens = own["tokens_per_s"] * own["ms"] / 1e3
            self.assertAlmostEqual(tokens / (case.rows * case.T), 1, delta=0.001)
            self.assertAlmostEqual(math.fsum(own["parts"].values()), own["ms"], delta=0.4)

    def test_pages(self):
        """They say first what was measured on which card; one is the script's."""
        page = (ROOT / "docs/gpu.md").read_text()
        self.assertIn("One NVIDIA H200 has run it", "\n".join(page.split("\n")[:8]))
        page = (ROOT / "docs/results/gpu.md").read_text()
        self.assertEqual(page, gpu_table.results_page([ROOT / "docs/results/logs/gpu_h200"]))
        self.assertIn("Measured on one NVIDIA H200", page.split("\n")[2])
        self.assertIn("No GPU has run this program yet", gpu_table.results_page([]).split("\n")[2])

    def test_measured(self):
        """The error of an estimate, PyTorch beside it, and the reason where there is no figure."""
        estimate = json.loads(Path(gpu_table.ESTIMATES).read_text())["H200"]["124M"]
        entry = {"status": "passed", "reason": "", "seconds": 1.0, "command": "", "figures": {}}
        speed = {"ms": estimate["own attention"]["ms"] / 1.25, "tokens_per_s": 500_000}
        peer = {"found": [{"what": "steps", "rows": 32, "ms": 90.0, "tokens_per_s": 364_089}]}
        entries = [
            dict(entry, step="machine", name="GPU", figures={"name": "NVIDIA H200"}),
            dict(entry, step="124M", name="124M, own attention", figures=speed),
            dict(entry, step="124M", name="124M, PyTorch", figures=peer),
            dict(entry, step="1558M", name="1558M, cuDNN", status="failed", reason="a | b"),
            dict(entry, step="correctness", name="test_bits", status="failed", reason="no bits"),
            dict(entry, step="kernels", name="attention", figures={"found": [{"T": 4}, {"T": 5}]}),
        ]
        results = {"toy": False, "began": "", "entries": entries}
        self.write("ten.json", json.dumps(results))
        page = gpu_table.results_page([self.folder])
        self.assertIn("**Measured on one NVIDIA H200**", page)
        self.assertIn("Without a result: 1558M, cuDNN; test_bits.", page)
        self.assertRegex(page, r"\| 124M, B=64, T=1024 \| own attention \| .* \| \+25 % \| ")
        self.assertRegex(page, r"\| 124M, B=32, T=1024 \| PyTorch \| – \| 90.0 \| – \| 364,089 ")
        self.assertIn(r"failed: a \| b", page)
        self.assertIn("| correctness | test_bits | 0 of 1; test_bits failed: no bits | 1 |", page)
        kernels = "attention:\n\n| T |\n| --- |\n| 4 |\n| 5 |\n"
        self.assertNotIn(kernels, page)
        self.assertIn(kernels, gpu_table.results_page([self.folder], True))
        self.write("ten.json", json.dumps(dict(results, toy=True)))
        self.assertIn("no figure here is a measurement", gpu_table.results_page([self.folder]))


if __name__ == "__main__":
    os.chdir(ROOT)
    harness.main()
