#!/usr/bin/env python3
"""test_same_bits.py: does same_bits.py see what it should?

    python3 test/test_same_bits.py          TRAIN_GPT=FILE: another program than ./train_gpt

Standard library only. The comparisons are of programs that are scripts around the real one.
"""

import subprocess
import sys
import unittest
from pathlib import Path

import harness
import same_bits
import same_bits_cases
from same_bits_cases import Case

ROOT, BINARY = Path(harness.ROOT), harness.BINARY


def same_bits_py(*words, cwd=None):
    command = [sys.executable, ROOT / "test/same_bits.py", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


class WithScripts(harness.InFolder):
    def script(self, name, body):
        """A program that does something else before it becomes the real one."""
        path = self.folder / name
        path.write_text(f'#!/bin/sh\n{body}\nexec "{BINARY}" "$@"\n')
        path.chmod(0o755)
        return path


class List(WithScripts):
    def test_every_flag_is_used(self):
        done = same_bits_py("--list", cwd=self.folder)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        lines = done.stdout.splitlines()
        self.assertGreaterEqual(len(lines) - 1, 300)
        self.assertGreaterEqual(sum("train_gpt_emu" in line for line in lines), 50)
        for ranks in range(1, 5):
            self.assertTrue(any(f"| -np {ranks} " in line for line in lines), ranks)

    def test_a_flag_that_is_not_used(self):
        body = 'if [ "$1" = --help ]; then echo "  --quantum-leap, -ql  <on|off> jumps"; fi'
        program = self.script("more_flags", body)
        done = same_bits_py("--list", program, program)
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertIn("error: flag --quantum-leap is used by no command line\n", done.stdout)
        self.assertEqual(done.stdout.count("error: "), 1)

    def test_choices(self):
        flags = {"hue": ["red", "blue"], "size": []}
        uses = [Case("a", "--hue red --size 3"), Case("b", "--hue blue", refused=True)]
        missing = same_bits_cases.uncovered(uses, flags)
        self.assertEqual(missing, ["--hue blue is used by no command line"])
        made = [*uses, Case("c", "--hue blue", from_help=True)]
        self.assertEqual(same_bits_cases.uncovered(made, flags), missing, "made from --help")
        self.assertEqual(same_bits_cases.uncovered([*uses, Case("d", "--hue blue")], flags), [])


class Compare(WithScripts):
    def compare(self, body, *words):
        """OLD is the program itself: its results are kept by its content."""
        return same_bits_py(BINARY, self.script("new", body), *words, cwd=self.folder)

    def test_a_planted_difference(self):
        """Another seed for one of the cases."""
        body = 'case "$*" in *"--temperature 0") set -- "$@" --seed 4 ;; esac'
        done = self.compare(body, "--only", "samples", "--verbose")
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertTrue(done.stdout.endswith("\n3 equal, 1 different\n"), done.stdout)
        differing = [line for line in done.stdout.splitlines() if " -> " in line]
        self.assertEqual({line.split(":")[0] for line in differing}, {"samples greedy"})
        self.assertEqual(differing[0], "samples greedy: start flags seed: 3 -> 4")
        for what in ("val 0 loss", "step 1 loss", "step 1 grad_norm", "sha256 of --export"):
            self.assertRegex(done.stdout, rf"(?m)^samples greedy: {what}: \S+ -> \S+$")

    def test_one_line_for_each_case(self):
        done = self.compare('set -- "$@" --lr 0.01', "--only", "linear")
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        lines = done.stdout.splitlines()
        self.assertRegex(lines[0], r"^linear: start flags lr: 0.003 -> 0.01 \(and \d+ more\)$")
        self.assertEqual((len(lines), lines[-1]), (3, "0 equal, 1 different"))

    def test_equal(self):
        done = self.compare("", "--only", "linear")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertTrue(done.stdout.endswith("\n1 equal, 0 different\n"), done.stdout)

    def test_checkpoints_and_messages(self):
        body = 'case "$*" in *"--out out"*) set -- "$@" --beta2 0.96 ;; esac'
        done = self.compare(body, "--only", "resumed plain", "--verbose")
        self.assertIn("1 command lines left out: no emulated programs\n", done.stdout)
        self.assertIn("resumed plain: sha256 of step_00000006/state_00000: ", done.stdout)
        self.assertNotIn("sha256 of step_00000003", done.stdout, "it is OLD's in both")
        body = 'case "$*" in *"--stesp 5"*) shift $(($# - 2)); set -- --stpes 5 ;; esac'
        done = self.compare(body, "--only", "stesp")
        self.assertIn("message: unknown flag --stesp; hint:", done.stdout)

    def test_programs_that_are_not_there(self):
        done = same_bits_py("no_such_program", BINARY)
        self.assertEqual(done.returncode, 2, done.stdout)
        self.assertIn("there is no program", done.stderr)


class Differences(unittest.TestCase):
    def test_what_counts(self):
        old = {"exit code": "0", "step 1 loss": "5.1", "start flags lr": "1", "gone": "1"}
        new = {"exit code": "0", "step 1 loss": "5.2", "start flags new": "1", "more": "2"}
        found = same_bits.differences(old, new)
        expected = [("step 1 loss", "5.1", "5.2"), ("gone", "1", "nothing")]
        self.assertEqual(found, [*expected, ("more", "nothing", "2")])

    def test_times_are_left_out(self):
        found = {}
        event = {"loss": "1", "ms": "2", "memory": {"host": 3, "device": 4}, "rates": {"host": 5}}
        ignored = same_bits.MEASURED | same_bits.TIMED
        same_bits.flatten(found, "step 1", event, ignored)
        self.assertEqual(found, {"step 1 loss": "1", "step 1 memory device": "4"})


if __name__ == "__main__":
    harness.main()
