#!/usr/bin/env python3
"""test_alone.py: the program that is built without MPI, for one rank (make MPI=0), and without
PCRE2 and utf8proc: build/train_gpt_alone, started without mpirun.

Same        the digits of PyTorch; of the program with MPI on one rank every digit, of losses and of
            checkpoints; resume, forecasts, generated text
Refused     mistakes end with the same codes; a flag that needs several ranks gets a hint; a program
            that a launcher starts several times does not train
Words       what the program says of its build
"""

import json
import os
import subprocess

import harness
from harness import (
    BINARY, ENVIRONMENT, EXIT_INPUT, EXIT_RESOURCES, ROOT, SAME, SAME_NORM, TIMEOUT, TestCase,
    checkpoint, get, golden_run, scratch, train,
)

ALONE = os.path.join(ROOT, "build/train_gpt_alone")
WITH_MPI = dict(ranks=1, binary=BINARY)
WITHOUT_MPI = dict(ranks=0, binary=ALONE)
SMALL = "layers=2,heads=2,channels=32,vocab=256"
BUILT_SO = "built for one rank, without MPI"


def run(*words, **environment):
    return subprocess.run(
        words,
        env=dict(ENVIRONMENT, **environment),
        capture_output=True,
        text=True,
        errors="surrogateescape",  # generated text is any bytes
        timeout=TIMEOUT,
    )


class Same(TestCase):
    def trained(self, build, **changes):
        """(loss and norm) of each step and of validations, and the files of the last checkpoint but
        for its manifest, which has the command."""
        out = os.path.join(scratch(), "out")
        job = train(**build, threads=1, out=out, save_every=2, steps=4, **changes)
        folder = checkpoint(out, 4)
        files = {name: get(os.path.join(folder, name)) for name in os.listdir(folder)}
        del files["manifest"]
        self.assertTrue(files)
        return job.steps("loss", "grad_norm"), [e["loss"] for e in job.of("val")], files

    def test_golden(self):
        job = train(**WITHOUT_MPI)
        losses, norms = golden_run()
        self.assert_close(job.losses(), losses, SAME)
        self.assert_close([n for (n,) in job.steps("grad_norm")], norms, SAME_NORM)

    def test_bits(self):
        private = dict(dp_noise=1, dp_key="%064x" % 5, dp_show_private=1, shuffle=None)
        cases = (
            dict(val_every=2),
            dict(recompute="block", micro_batch=2, zero=3, optimizer="muon"),
            dict(dtype="bf16", reduce_dtype="bf16", stochastic_rounding=1),
            dict(private, optimizer="sgd"),
            dict(offload="all"),
            dict(cyclic="v2", cyclic_stages=3, grad_clip=0),
        )
        for changes in cases:
            with self.subTest(**changes):
                expected = self.trained(WITH_MPI, **changes)
                self.assertEqual(self.trained(WITHOUT_MPI, **changes), expected)

    def test_resume(self):
        """Also from a checkpoint of the program with MPI, and the other way round."""
        whole = train(**WITHOUT_MPI, threads=1).steps("loss", "grad_norm")
        for first, then in ((WITHOUT_MPI,) * 2, (WITH_MPI, WITHOUT_MPI), (WITHOUT_MPI, WITH_MPI)):
            out = os.path.join(scratch(), "out")
            same = dict(threads=1, out=out, save_every=4)
            begun = train(**first, **same, steps=4).steps("loss", "grad_norm")
            resumed = train(**then, **same, resume=1).steps("loss", "grad_norm")
            self.assertEqual(begun + resumed, whole)

    def test_forecast(self):
        """--dry-run predicts the same memory and traffic, for one rank and for a cluster."""
        for cluster in ((), ("--cluster", "2x4,gpu=h100", "--zero", "2")):
            flags = ("--dry-run", "--json", "--model", SMALL, "--seq-len", "32", *cluster)
            with_mpi, alone = (json.loads(run(binary, *flags).stdout) for binary in (BINARY, ALONE))
            for kind in ("memory", "traffic", "offload"):
                predicted = [said["predicted"][kind] for said in (alone, with_mpi)]
                for values in predicted:
                    values.pop("host", None)  # what the process has, with MPI's library or without
                self.assertEqual(*predicted)

    def test_prompt(self):
        out = os.path.join(scratch(), "out")
        train(**WITHOUT_MPI, model=SMALL, val=None, steps=1, save_every=1, out=out)
        words = ("--model", checkpoint(out, 1), "--prompt", "Dear reader", "--sample-tokens", "9")
        said = run(ALONE, *words)
        self.assertEqual(said.returncode, 0, said.stderr)
        self.assertTrue(said.stdout)
        self.assertEqual(said.stdout, run(BINARY, *words).stdout)


class Refused(TestCase):
    def test_codes(self):
        for code, changes in (
            (EXIT_INPUT, dict(train="/nowhere/*.bin")),
            (EXIT_INPUT, dict(steps=-7)),
            (EXIT_RESOURCES, dict(device_memory=1)),
        ):
            said = [train(**build, **changes, code=code).err for build in (WITHOUT_MPI, WITH_MPI)]
            self.assertIn("hint: ", said[0])
            self.assertEqual(*(text.split("\n")[0].split("rank 0 on")[1] for text in said))

    def test_text_needs_its_libraries(self):
        """Of a tokenizer.json: its text is cut into words. A vocabulary of bytes needs no cut."""
        out = os.path.join(scratch(), "out")
        train(**WITHOUT_MPI, model=SMALL, val=None, steps=1, save_every=1, out=out)
        file = os.path.join(ROOT, "test/golden/tokenizer_tiny.json")
        words = ("--model", checkpoint(out, 1), "--prompt", "Dear reader", "--tokenizer", file)
        said = run(ALONE, *words)
        self.assertEqual((said.returncode, said.stdout), (EXIT_INPUT, ""), said.stderr)
        self.assertIn("made without PCRE2 and utf8proc", said.stderr)
        self.assertIn("libpcre2-dev and libutf8proc-dev", said.stderr)
        self.assertNotIn("PCRE2", run(BINARY, *words).stderr)

    def test_flags_of_several_ranks(self):
        """Today's message; its hint says that this program has one rank. Other hints do not."""
        for several, changes in (
            (True, dict(pipeline=2)),
            (True, dict(zero=3, zero_hpz_partition_size=2)),
            (True, dict(cyclic="v1", cyclic_mode="data", cyclic_stages=2)),
            (True, dict(cyclic="v1", cyclic_mode="model", cyclic_stages=2)),
            (True, dict(nproc_per_node=2)),
            (True, dict(hostfile="hosts")),
            (False, dict(pipeline=2, cluster="1x3,gpu=h100", dry_run="")),
            (False, dict(learning_rate=1)),
        ):
            changes = {k: v for k, v in changes.items() if v != ""}
            words = ("--dry-run",) if "cluster" in changes else ()
            flags = [*words, *harness.command_line(changes)]
            with self.subTest(**changes):
                alone, with_mpi = run(ALONE, *flags), run(BINARY, *flags)
                self.assertEqual((alone.returncode, with_mpi.returncode), (EXIT_INPUT,) * 2)
                hint = "; this program was " + BUILT_SO + " (make MPI=0)" if several else ""
                self.assertEqual(alone.stderr.count(BUILT_SO), several)
                self.assertEqual(alone.stderr.replace(hint, ""), with_mpi.stderr)

    def check_launch(self, done, variable):
        """Refused with one line, and nothing trained."""
        self.assertEqual(done.returncode, EXIT_INPUT, done.stderr)
        self.assertEqual(done.stderr.count("train_gpt: "), 1, done.stderr)
        self.assertRegex(done.stderr, f"{variable}: a launcher has started .* several times.*MPI=0")
        self.assertNotIn("step", done.stdout)

    def test_mpirun(self):
        flags = harness.command_line(dict(steps=1))
        launch = ("mpirun", "--oversubscribe", "-np")
        self.check_launch(run(*launch, "2", ALONE, *flags), "OMPI_COMM_WORLD_SIZE=2")
        self.assertEqual(run(*launch, "1", ALONE, *flags).returncode, 0)

    def test_other_launchers(self):
        flags = harness.command_line(dict(steps=0))
        for variable, environment in (
            ("OMPI_COMM_WORLD_SIZE=4", dict(OMPI_COMM_WORLD_RANK="0")),
            ("PMI_SIZE=3", dict(PMI_RANK="0")),
            ("MV2_COMM_WORLD_SIZE=2", dict(MV2_COMM_WORLD_RANK="0", PMI_RANK="0")),
            ("PMIX_RANK=1", {}),
            ("SLURM_STEP_NUM_TASKS=8", dict(SLURM_PROCID="0", SLURM_NTASKS="8", PMIX_RANK="0")),
        ):
            with self.subTest(variable):
                environment.update([variable.split("=")])
                self.check_launch(run(ALONE, *flags, **environment), variable)
        # rank 0 speaks for the others
        other = run(ALONE, *flags, PMI_RANK="2", PMI_SIZE="3")
        self.assertEqual((other.returncode, other.stdout, other.stderr), (EXIT_INPUT, "", ""))

    def test_started_once(self):
        """By a launcher, one process; or by hand in the shell of an allocation."""
        flags = harness.command_line(dict(steps=0))
        for environment in (
            dict(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="1", SLURM_STEP_NUM_TASKS="4"),
            dict(PMI_RANK="0", PMI_SIZE="1"),
            dict(PMIX_RANK="0"),
            dict(SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="1"),
            dict(SLURM_NTASKS="8", SLURM_TASKS_PER_NODE="8", SLURM_PROCID="0", SLURM_JOB_ID="7"),
            dict(PMI_SIZE="", PMIX_RANK="none"),
        ):
            done = run(ALONE, *flags, **environment)
            self.assertEqual(done.returncode, 0, (environment, done.stderr))


class Words(TestCase):
    def test_no_library(self):
        self.assertNotIn("libmpi", run("ldd", ALONE).stdout)

    def test_start(self):
        job = train(**WITHOUT_MPI, steps=1)
        self.assertRegex(job.out, r"placement +1 rank on 1 node, \d+ threads? each, built without")
        self.assertEqual(job.of("start")[0]["transport"], "none")
        with_mpi = train(**WITH_MPI, steps=1)
        self.assertIn(" each, messages by mpi;", with_mpi.out)
        self.assertEqual(with_mpi.of("start")[0]["transport"], "mpi")

    def test_version_and_help(self):
        said = {binary: run(binary, "--version").stdout for binary in (ALONE, BINARY)}
        self.assertIn("messages   none: built without MPI for one rank\n", said[ALONE])
        self.assertNotIn("without MPI", said[BINARY])
        self.assertNotIn("mpirun -np RANKS", run(ALONE, "--help").stdout)
        self.assertIn("mpirun -np RANKS", run(BINARY, "--help").stdout)

    def test_command_that_resumes(self):
        for build in (WITHOUT_MPI, WITH_MPI):
            out = scratch()
            open(os.path.join(out, "stop"), "w").close()
            job = train(**build, out=out, steps=3)
            self.assertRegex(job.out, r"stopped at step 1\. To go on: ")
            self.assertEqual("mpirun -np 1" in job.out, build is WITH_MPI)

    def test_recipe(self):
        """The scripts that start several ranks start one, or say so."""
        script = 'set -euo pipefail; . scripts/recipe.sh; recipe "$@"'

        def recipe(ranks, program):
            flags = harness.command_line(dict(steps=0))
            return run("bash", "-c", script, "recipe", ranks, program, *flags)

        os.chdir(ROOT)
        self.assertIn("built without MPI", recipe("1", ALONE).stdout)
        several = recipe("2", ALONE)
        self.assertEqual(several.returncode, EXIT_INPUT)
        self.assertIn("built for one rank (make MPI=0), and this recipe is for 2", several.stderr)
        self.assertIn("2 ranks on 1 node", recipe("2", BINARY).stdout)


if __name__ == "__main__":
    harness.main()
