#!/usr/bin/env python3
"""test_gpu_hour.py: scripts/gpu_hour.sh on the emulation, at toy size, and scripts/gpu_table.py on
a listing written here.

Whole       every stage runs, and its figures are what they should be; tools that only a machine
            with a GPU has are imitated
Trouble     a stage that fails, one that hangs, a kill in the middle: the results are whole, and
            nothing is left running
Table       registers, spills and instructions are read as the compiler tells them; the estimate's
            sums
"""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import unittest
from pathlib import Path

import harness

ROOT = Path(harness.ROOT)
sys.path.insert(0, str(ROOT / "scripts"))
import gpu_hour  # noqa: E402
import gpu_table  # noqa: E402

TIMEOUT = 600
HANG = '#!/bin/sh\necho $$ >"$FAKES/pid"\nexec sleep 600\n'
# Runs the program that it is to watch, as compute-sanitizer does.
SANITIZER = (
    '#!/bin/sh\n[ "$1 $3 $4" = "--tool --error-exitcode 9" ] || exit 8\necho "$2"'
    ' >>"$FAKES/tools"\nshift 4\nexec "$@" >/dev/null\n'
)
NSYS = """#!/bin/sh
case $1 in
profile) while [ "$1" != -o ]; do shift; done; touch "$2.nsys-rep" ;;
stats) printf 'Time (%%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name\\n'
    printf '60.0,600,3,200.0,200.0,1,2,0.1,"void layernorm_kernel<float>(T1 *, float)"\\n40.0,400,3,1.0,1.0,1,2,0.1,adamw_kernel(float *)\\n' ;;
esac
"""
NCU = (
    '#!/bin/sh\nwhile [ "$1" != --kernel-name ]; do shift; done\necho "$2" >>"$FAKES/ncu_kernels"\n'
)


class InFolder(harness.InFolder):
    def setUp(self):
        super().setUp()
        (self.folder / "bin").mkdir()
        self.environment = dict(
            os.environ,
            FAKES=str(self.folder),
            PATH=f"{self.folder}/bin:{os.environ['PATH']}",
            OMP_NUM_THREADS="1",
            OMP_WAIT_POLICY="passive",
        )

    def fake(self, **programs):
        for name, text in programs.items():
            path = self.folder / "bin" / name.replace("_", "-")
            path.write_text(text)
            path.chmod(0o755)

    def start(self, *words):
        command = [
            str(ROOT / "scripts/gpu_hour.sh"),
            "--toy",
            "--out",
            str(self.out),
            *map(str, words),
        ]
        return subprocess.Popen(
            command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def hour(self, *words, code=0):
        """What a call printed, and its results."""
        process = self.start(*words)
        said = process.communicate(timeout=TIMEOUT)[0]
        self.assertEqual(process.returncode, code, said)
        return said, self.results()

    def results(self):
        """{stage: what results.json says of it}; the page must say the same."""
        found = json.loads((self.out / "results.json").read_text())["stages"]
        page = (self.out / "results.md").read_text()
        for stage in found:
            self.assertIn(stage["status"], ("passed", "failed", "skipped", "timed out"))
            self.assertIn(f"| {stage['name']} | {stage['status']} | ", page)
            self.assertIn(f"## {stage['name']}: {stage['status']}", page)
            for command in stage["commands"]:
                self.assertIn(f"    {command['command']}    # {command['status']}, ", page)
        self.assertEqual(
            [stage["name"] for stage in found],
            [name for name in gpu_hour.STAGES if name in [stage["name"] for stage in found]],
        )
        return {stage["name"]: stage for stage in found}

    def check_gone(self):
        pid = int((self.folder / "pid").read_text())
        end = time.time() + 60
        while os.path.exists(f"/proc/{pid}") and time.time() < end:
            time.sleep(0.05)
        self.assertFalse(os.path.exists(f"/proc/{pid}"), "what hung is still there")


class Whole(InFolder):
    def test_every_stage(self):
        self.fake(compute_sanitizer=SANITIZER, nsys=NSYS, ncu=NCU)
        said, stages = self.hour()
        self.assertEqual(
            {name: stage["status"] for name, stage in stages.items()},
            dict.fromkeys(gpu_hour.STAGES, "passed"),
            said,
        )
        self.assertIn("Every stage was run.", (self.out / "results.md").read_text())
        of = {name: stage["figures"] for name, stage in stages.items()}
        self.assertIn("Open MPI", of["versions"]["mpi"])
        self.assertEqual(
            set(of["operations"]),
            {"test workspace", "production workspace", "suggestion 0", "suggestion 1"},
        )
        self.assertGreater(min(of["operations"].values()), 5)
        self.assertEqual(set(of["golden"].values()), {"passed"})
        self.check_kernels(of["kernels"])
        self.check_profile(of["profile"])
        self.assertEqual(of["losses"]["steps"], 4)
        self.assertTrue(all(2 < loss < 8 for loss in of["losses"]["first"] + of["losses"]["last"]))
        speeds = [value for name, value in of["speed"].items() if name.startswith("toy, ")]
        self.assertEqual(len(speeds), 2)
        for speed in speeds:
            self.assertGreater(speed["tokens_per_s"], 0)
            self.assertEqual(speed["memory_predicted"], speed["memory_measured"])
        self.assertEqual(of["offload"]["none"]["time_over_none"], 1)
        self.assertEqual(
            [run["bytes"]["bytes"] > 0 for run in of["offload"].values()], [False, True, True]
        )
        self.assertEqual(
            (self.folder / "tools").read_text().split(),
            [tool for tool in of["sanitizers"] for _ in range(2)],
        )

    def check_kernels(self, figures):
        found = {work["kernel"]: work for work in figures["kernels"]}
        self.assertGreater(len(found), 18)
        N, C, V = 16, 16, 128
        self.assertEqual(found["fc, bias and GELU"]["flops"], 2 * N * C * 4 * C)
        self.assertEqual(found["classifier, all of it"]["flops"], 3 * 2 * N * C * V)
        self.assertEqual(
            found["AdamW, bf16"]["bytes"], (4 * (4 + 3) + 2) * C * V
        )  # four states read, three written, one rounded
        self.assertEqual(found["residual"]["bytes"], 3 * 2 * N * C)
        for work in found.values():
            self.assertTrue(0 < work["share_of_ceiling"] < math.inf, work)
        self.assertEqual(found["copy"]["share_of_ceiling"] > 0.99, True)

    def check_profile(self, figures):
        self.assertIn(
            ("FORWARD", "block"),
            [(action["action"], action["unit"]) for action in figures["actions"]],
        )
        self.assertEqual(figures["ncu"], ["layernorm_kernel", "adamw_kernel"])
        self.assertEqual((self.folder / "ncu_kernels").read_text().split(), figures["ncu"])
        self.assertEqual(len(figures["nsys"]), 2)


class Trouble(InFolder):
    def test_a_stage_hangs_and_one_fails(self):
        self.fake(
            nvcc=HANG,
            nsys="#!/bin/sh\nexit 3\n",
            compute_sanitizer='#!/bin/sh\n! kill -0 "$(cat "$FAKES/pid")"\n',
        )  # what hung is gone by now
        said, stages = self.hour(
            "--only", "versions,profile,sanitizers", "--limit", "versions=2", code=1
        )
        self.assertEqual(
            {name: stage["status"] for name, stage in stages.items()},
            {"versions": "timed out", "profile": "failed", "sanitizers": "passed"},
            said,
        )
        self.assertIn("nvcc --version", stages["versions"]["reason"])
        self.assertIn("exit status 3 of: nsys", stages["profile"]["reason"])
        self.assertTrue(
            stages["profile"]["figures"]["actions"], "what it had found before it failed"
        )
        self.check_gone()

    def test_killed_and_called_again(self):
        self.fake(compute_sanitizer=HANG)
        process = self.start("--only", "versions,sanitizers")
        self.addCleanup(process.stdout.close)
        end = time.time() + TIMEOUT
        while not (self.folder / "pid").exists() and time.time() < end:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        stages = self.results()
        self.assertEqual(
            {name: stage["status"] for name, stage in stages.items()},
            {"versions": "passed", "sanitizers": "failed"},
        )
        self.assertEqual(stages["sanitizers"]["reason"], gpu_hour.NOT_ENDED)
        self.check_gone()
        self.fake(compute_sanitizer="#!/bin/sh\n")
        merged = self.hour("--only", "sanitizers")[1]
        self.assertEqual(merged["versions"], stages["versions"], "as the first call left it")
        self.assertEqual(merged["sanitizers"]["status"], "passed")
        self.assertRegex(
            (self.out / "results.md").read_text(), r"Not run: build, operations, .*offload\."
        )

    def test_no_time_and_no_tool(self):
        stages = self.hour("--only", "build", "--minutes", 0)[1]
        self.assertEqual(
            (stages["build"]["status"], stages["build"]["reason"]),
            ("skipped", "the time of --minutes is over"),
        )

    def test_arguments(self):
        self.assertIn("no stage 'speeed'", self.start("--only", "speeed").communicate()[0])
        self.out.mkdir()
        (self.out / "results.json").write_text('{"toy": false, "stages": []}')
        process = self.start("--only", "versions")
        self.assertIn("without --toy: give another --out", process.communicate()[0])
        self.assertEqual(process.returncode, 2)
        listed = subprocess.run(
            [ROOT / "scripts/gpu_hour.sh", "--list"], capture_output=True, text=True, check=True
        ).stdout
        self.assertEqual(re.findall(r"(?m)^(\w+) ", listed), list(gpu_hour.STAGES))


class Table(unittest.TestCase):
    PTXAS = """ptxas info    : Compiling entry function '_Z3addPf' for 'sm_90'
ptxas info    : Function properties for _Z3addPf
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 2048 bytes smem
ptxas info    : Function properties for _Z3subPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers
"""
    SASS = """\t\tFunction : _Z3addPf
        /*0000*/                   LDC R1, c[0x0][0x28] ;      /* 0x00000a00ff017b82 */
        /*0010*/              @!P0 LDG.E.U16 R2, desc[UR4] ;   /* 0x0 */
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8 ; /* 0x0 */
        /*0030*/              @UP1 FFMA.FTZ R4, R4, R5, R6 ;   /* 0x0 */
        /*0040*/                   NOP ;                       /* 0x0 */
"""

    def test_what_the_compiler_says(self):
        self.assertEqual(
            gpu_table.read_ptxas(self.PTXAS),
            {"_Z3addPf": (40, 12, 16, 2048), "_Z3subPf": (8, 0, 0, 0)},
        )
        self.assertEqual(
            gpu_table.read_sass(self.SASS),
            {"_Z3addPf": {"other": 1, "global": 1, "tensor": 1, "fp32": 1}},
        )

    def test_sums(self):
        m = gpu_table.MODELS[0][0]
        self.assertEqual(gpu_table.parameters_of(m), 124_475_904)
        # All FLOP of a step are in the products and in the two products of attention's forward,
        # taken three times.
        flops = sum(flops for flops, _ in gpu_table.products(m, False))
        attention = sum(
            launch.flops * launch.calls
            for launch in gpu_table.kernel_launches(m)
            if launch.kernel.startswith("attention_mma_kernel")
        )
        self.assertAlmostEqual((flops + 3 * attention) / gpu_table.model_flops(m), 1, places=9)
        self.assertAlmostEqual(
            gpu_table.launch_seconds(
                gpu_table.Code(8, 0, 0, 0, {"global": 1}),
                gpu_table.Launch("k", 1, 3.35e12, 0, 0, False),
            )[0],
            1 / 0.85,
        )

    def test_page(self):
        """It is the script's, of these kernels, and says that nothing was measured."""
        page = (ROOT / "docs/gpu.md").read_text()
        made = page[page.index(gpu_table.BEGIN) : page.index(gpu_table.END)]
        for m, _ in gpu_table.MODELS:
            for launch in gpu_table.kernel_launches(m):
                self.assertIn(f"| `{launch.kernel}` | {launch.calls} | ", made)
        self.assertIn("No GPU has run this program.", page)


if __name__ == "__main__":
    os.chdir(ROOT)
    harness.main()
