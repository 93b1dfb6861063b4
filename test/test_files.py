#!/usr/bin/env python3
"""test_files.py: what a run writes and removes, and that it touches nothing else. On the real
binary, from outside.

python3 test/test_files.py          TRAIN_GPT=FILE: another binary than ./train_gpt; TEST_SEED=N:
                                    the random choices

Removing    no link is followed, and only the program's own files are removed from folders
Names       of folders that are not a checkpoint's; files, folders, links and pipes where something
            else was expected
Outputs     --log, --trace and --export that name what is read or written elsewhere are refused
            before anything is written
Inputs      pipes, devices, folders and files without an end, where a file is read: refused, never
            waited for
Bytes       JSON is JSON, in UTF-8, whatever bytes a path has, and gives them back
"""

import json
import os
import random
import shutil
import subprocess

import harness
from harness import (
    ALL, ENVIRONMENT, EXIT_DONE, EXIT_INPUT, MODEL, SEED, TIMEOUT, TOKENS, apart, at_once,
    checkpoint, checkpoints, command_line, get, put, scratch,
)
import unittest

SAVES = dict(steps=1, save_every=1)


def tree(folder):
    """Every entry under a folder, as it is: a link's target, a file's bytes, or the kind of
    anything else."""
    found = {}
    for place, folders, files in os.walk(folder):
        for name in folders + files:
            path = os.path.join(place, name)
            kind = (
                os.readlink(path)
                if os.path.islink(path)
                else (
                    get(path)
                    if os.path.isfile(path)
                    else "folder" if os.path.isdir(path) else "other"
                )
            )
            found[os.path.relpath(path, folder)] = kind
    return found


def victim():
    """A folder of somebody's with files that are called as a checkpoint's, and others."""
    folder = os.path.join(scratch(), "victim")
    os.mkdir(folder)
    for name in ("manifest", "state_00000", "thesis.txt", ".hidden"):
        with open(os.path.join(folder, name), "w") as file:
            file.write(name)
    return folder


def new_out(**changes):
    out = os.path.join(scratch(), "out")
    if changes:
        train(out=out, **changes)
    else:
        os.mkdir(out)
    return out


def run(words, ranks=1, folder=None, text=True, stdin=subprocess.DEVNULL):
    """A run in a folder; words may be bytes. One rank needs no mpirun, but a folder of its own for
    Open MPI: two that begin at once would share one."""
    launch = ["mpirun", "--oversubscribe", "-np", str(ranks)] if ranks > 1 else []
    command = [os.fsencode(word) for word in (*launch, harness.BINARY, *words)]
    return subprocess.run(
        command, capture_output=True, text=text, errors="replace" if text else None,
        env=apart(ENVIRONMENT), timeout=TIMEOUT, cwd=folder or harness.TEMPORARY, stdin=stdin,
    )


class Ended:
    """A run that has ended: its code, messages and log."""

    def __init__(self, done, log):
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr
        self.events = harness.parse_log(get(log).decode()) if os.path.isfile(log) else []

    def steps(self):
        return [e["step"] for e in self.events if e["event"] == "step"]


def train(ranks=1, code=EXIT_DONE, **changes):
    """A run of harness.TRAIN with changes, which must end with this code (None: any)."""
    log = os.path.join(scratch(), "log")
    job = Ended(run(command_line(dict(changes, log=log)), ranks), log)
    if code is not None and job.code != code:
        raise AssertionError(
            f"exit code {job.code} instead of {code}:"
            f" {changes}\n{job.out[-1500:]}\n{job.err[-3000:]}"
        )
    return job


# --------------------------------------------------------------------------------------------------
class Removing(unittest.TestCase):
    def test_link_in_the_way_of_a_half(self):
        """OUT/step_1.tmp is a link to somebody's folder: before the run, or when it saves."""
        for resume in (0, 1):
            there, out = victim(), new_out(**SAVES)
            step = 1 + resume
            link = checkpoint(out, step) + ".tmp"
            os.symlink(there, link)
            before = tree(there)
            job = train(2, out=out, resume=resume, steps=step, save_every=1)
            self.assertEqual(tree(there), before)
            self.assertTrue(os.path.islink(link))
            self.assertEqual(checkpoints(out)[-1], step, "it is saved all the same")
            self.assertRegex(
                job.err, r"warning: .*step_0000000\d\.tmp is left as it is: it is a symbolic link"
            )
            self.assertEqual(
                sorted(name for name in os.listdir(out) if name.endswith(".tmp")),
                [os.path.basename(link)],
            )
            train(out=out, resume=1, steps=step + 1, save_every=1)

    def test_links_to_files_in_a_half(self):
        """What looks like a half that a crash left, with a link in it: the half's own files go, the
        link and its target stay."""
        there, out = put("precious", b"precious"), new_out()
        half = checkpoint(out, 1) + ".tmp"
        os.mkdir(half)
        for name in ("state_00000", "manifest"):
            os.symlink(there, os.path.join(half, name + ".tmp"))
        os.mkdir(os.path.join(half, "state_00001"))
        for name in (
            "state_00002", "state_123456", "manifest", "state_00002.tmp", "state_2", "state_000002",
            "notes", "state_00002.bak", ".state",
        ):
            with open(os.path.join(half, name), "w") as file:
                file.write(name)
        job = train(out=out, **SAVES)
        self.assertEqual(get(there), b"precious")
        self.assertEqual(
            set(os.listdir(half)),
            {
                "state_00000.tmp", "manifest.tmp", "state_00001", "state_2", "state_000002",
                "notes", "state_00002.bak", ".state",
            },
        )
        self.assertRegex(job.err, r"warning: .*step_00000001\.tmp cannot be removed")
        self.assertEqual(checkpoints(out), [1])

    def test_other_things_in_the_way(self):
        """A file or a pipe where a half, or a checkpoint, is to be: it stays, under this or the
        half's name."""
        begun = new_out(**SAVES)

        def one(case):
            kind, suffix = case
            out = os.path.join(scratch(), "out")
            shutil.copytree(begun, out)
            path = checkpoint(out, 2) + suffix
            if kind == "file":
                with open(path, "w") as file:
                    file.write("precious")
            elif kind == "pipe":
                os.mkfifo(path)
            else:
                os.symlink("nothing", path)
            before = tree(out)[os.path.basename(path)]
            job = train(out=out, steps=2, resume=1, save_every=1)
            found = tree(out)
            self.assertEqual(found["step_00000002.tmp"], before, case)
            self.assertIn("step_00000002/manifest", found)
            self.assertIn("is left as it is", job.err)

        at_once(
            one,
            [
                (kind, suffix)
                for kind in ("file", "pipe", "link to nothing")
                for suffix in (".tmp", "")
            ],
        )

    def test_checkpoint_that_was_moved_and_linked_back(self):
        """It is resumed from; --keep leaves it alone, and does not count it."""
        out, disk = new_out(steps=3, save_every=1), scratch()
        for step in (2, 3):
            shutil.move(checkpoint(out, step), disk)
            with open(os.path.join(disk, f"step_{step:08}", "notes.txt"), "w") as file:
                file.write("mine")
        os.symlink(os.path.join(disk, "step_00000002"), checkpoint(out, 2))
        os.symlink(os.path.relpath(os.path.join(disk, "step_00000003"), out), checkpoint(out, 3))
        before = tree(disk)
        job = train(out=out, steps=5, resume=1, save_every=1, keep=1)
        self.assertIn(f"resumed from {checkpoint(out, 3)}: step 3", job.out)
        self.assertEqual(checkpoints(out), [2, 3, 5])
        self.assertEqual(tree(disk), before)
        train(out=out, steps=1)  # a new run sets them aside: the links still lead there
        earlier = os.path.join(out, "earlier-1")
        self.assertEqual(checkpoints(earlier), [2, 3, 5])
        for step in (2, 3):
            self.assertEqual(get(os.path.join(checkpoint(earlier, step), "notes.txt")), b"mine")
        self.assertEqual(tree(disk), before)

    def test_same_step_where_a_link_is(self):
        """A torn checkpoint that is a link is saved anew: what it leads to stays as it was."""
        out, disk = new_out(steps=2, save_every=1), scratch()
        shutil.move(checkpoint(out, 2), disk)
        os.truncate(os.path.join(disk, "step_00000002", "state_00000"), 100)
        os.symlink(os.path.join(disk, "step_00000002"), checkpoint(out, 2))
        before = tree(disk)
        train(out=out, steps=2, resume=1, save_every=1)
        self.assertEqual(tree(disk), before)
        self.assertFalse(os.path.islink(checkpoint(out, 2)))
        self.assertEqual(train(out=out, steps=2, resume=1).steps(), [], "the new one is whole")

    def test_foreign_files_in_a_checkpoint(self):
        """--keep removes a checkpoint's own files, and says once that the rest stays."""
        out = new_out(**SAVES)
        notes = os.path.join(checkpoint(out, 1), "notes.txt")
        with open(notes, "w") as file:
            file.write("mine")
        job = train(out=out, steps=4, resume=1, save_every=1, keep=1)
        self.assertEqual(os.listdir(checkpoint(out, 1)), ["notes.txt"])
        self.assertEqual(get(notes), b"mine")
        self.assertEqual(job.err.count("cannot be removed"), 1, job.err)
        self.assertEqual(checkpoints(out), [1, 4])

    def test_out_is_a_link(self):
        folder = scratch()
        os.symlink(folder, os.path.join(scratch(), "out"))
        out = os.path.join(scratch(), "link")
        os.symlink(folder, out)
        train(out=out, steps=3, save_every=1, keep=1)
        self.assertEqual(checkpoints(folder), [3])

    def test_temporary_file_of_an_export(self):
        """MODEL.bin.tmp is a link: refused. What a crash left there, a hard link perhaps, is
        replaced, not written into."""
        for kind in ("link", "hard link", "dangling"):
            folder, there = scratch(), put("precious", b"precious")
            model = os.path.join(folder, "model.bin")
            if kind == "hard link":
                os.link(there, model + ".tmp")
            else:
                os.symlink(there if kind == "link" else os.path.join(folder, "new"), model + ".tmp")
            job = train(
                steps=0,
                model=MODEL,
                export=model,
                code=EXIT_DONE if kind == "hard link" else EXIT_INPUT,
            )
            self.assertEqual(get(there), b"precious", kind)
            self.assertEqual(os.path.exists(model), kind == "hard link", job.err)
            self.assertFalse(os.path.exists(os.path.join(folder, "new")))

    def test_links_in_the_way_of_private_files(self):
        """dp_key and dp_steps are written anew; a link of that name, or of their temporary names,
        is never written through."""
        private = dict(steps=1, dp_noise=1, dp_delta=0.01, shuffle=None)

        def link(name):
            out, there = new_out(), put("precious", b"precious")
            os.symlink(there, os.path.join(out, name))
            job = train(out=out, code=None, **private)
            self.assertIn(job.code, (EXIT_DONE, EXIT_INPUT), job.err)
            self.assertEqual(get(there), b"precious", name)

        def folder(name):
            out = new_out()
            os.mkdir(os.path.join(out, name))
            self.assertIn(
                os.path.join(out, name).removesuffix(".tmp"),
                train(out=out, code=EXIT_INPUT, **private).err,
            )

        at_once(link, ("dp_key", "dp_steps", "dp_key.tmp", "dp_steps.tmp"))
        at_once(folder, ("dp_key", "dp_steps", "dp_key.tmp"))


# --------------------------------------------------------------------------------------------------
class Names(unittest.TestCase):
    ODD = (
        "step_99999999999999999999", "step_9223372036854775808", "step_+5", "step_ 5", "step_5",
        "step_0000005", "step_000000005", "step_-0000005", "step_00000005 ", "step_0x000005",
        "step_", "step_00000005.old", "step_00000005.1.tmp", "step_00000005.tmp.tmp",
    )

    def test_odd_names_are_left_alone(self):
        """Whatever is called so stays where it is, in a new run and in one that resumes, and both
        go on."""
        for resume in (0, 1):
            out = new_out(**SAVES)
            for name in self.ODD:
                shutil.copytree(checkpoint(out, 1), os.path.join(out, name))
            before = {
                path: kind for path, kind in tree(out).items() if path.split("/")[0] in self.ODD
            }
            job = train(out=out, resume=resume, steps=3, save_every=1, keep=1)
            found = tree(out)
            self.assertEqual({path: found.get(path) for path in before}, before)
            self.assertEqual(job.err.count("no checkpoint has such a name"), 1, job.err)
            self.assertRegex(
                job.err, rf"warning: .*/step_\S* ?\d? and {len(self.ODD) - 1} others of "
            )
            self.assertIn("step_00000003/manifest", found)
            self.assertEqual(
                [len(job.steps()), "earlier-1/step_00000001/manifest" in found],
                [3 - resume, not resume],
            )

    def test_the_largest_number(self):
        """A folder with the largest number that is one: newest, and no checkpoint."""
        out = new_out(**SAVES)
        os.mkdir(os.path.join(out, "step_" + "9" * 18))
        job = train(out=out, resume=1, steps=2, save_every=1, keep=1)
        self.assertIn("step_" + "9" * 18, job.err)
        self.assertEqual(checkpoints(out), [2])
        train(out=out, steps=1)
        self.assertEqual(
            sorted(os.listdir(os.path.join(out, "earlier-1"))),
            ["step_00000002", "step_" + "9" * 18],
        )

    def test_nothing_but_odd_names(self):
        out = new_out()
        os.mkdir(os.path.join(out, "step_" + "9" * 20))
        self.assertIn(
            f"no valid checkpoint in {out}", train(out=out, resume=1, code=EXIT_INPUT).err
        )

    def test_earlier_runs_by_odd_numbers(self):
        """Numbers that are taken, by whatever it is, are passed over."""
        out = new_out(**SAVES)
        os.mkdir(os.path.join(out, "earlier-" + "9" * 20))
        os.symlink("nothing", os.path.join(out, "earlier-1"))
        with open(os.path.join(out, "earlier-2"), "w"):
            pass
        train(out=out, steps=1)
        self.assertEqual(os.listdir(os.path.join(out, "earlier-3")), ["step_00000001"])

    def test_lock_is_something_else(self):
        there = put("precious", b"precious")

        def one(case):
            ranks, kind, make = case
            out = new_out()
            os.mkdir(checkpoint(out, 1))
            make(os.path.join(out, "lock"))
            self.assertIn(f"{out}/lock is {kind}", train(ranks, out=out, code=EXIT_INPUT).err)
            self.assertEqual(checkpoints(out), [1])
            self.assertFalse(os.path.exists(there + ".new"))

        at_once(
            one,
            [
                (2, "a folder", os.mkdir),
                (1, "a pipe", os.mkfifo),
                (1, "a symbolic link", lambda path: os.symlink(there, path)),
                (1, "a symbolic link", lambda path: os.symlink(there + ".new", path)),
            ],
        )

    def test_stop_is_a_folder(self):
        """Before the run: refused. While it runs it stops it, and is told of."""
        out = new_out(**SAVES)
        os.mkdir(os.path.join(out, "stop"))
        self.assertIn(f"{out}/stop is a folder", train(2, out=out, code=EXIT_INPUT).err)
        self.assertEqual(checkpoints(out), [1], "nothing was moved")
        out = os.path.join(scratch(), "out")
        job = harness.Job(2, out=out, steps=10**9)
        job.wait_until(lambda: job.logged() > 2, "a step")
        os.mkdir(os.path.join(out, "stop"))
        job.done()
        self.assertIn(f"warning: cannot remove {out}/stop", job.err)
        self.assertEqual(len(checkpoints(out)), 1)

    def test_stop_is_a_link_or_a_pipe(self):
        there = put("precious", b"precious")
        for make in (os.mkfifo, lambda path: os.symlink(there, path)):
            out = new_out()
            make(os.path.join(out, "stop"))
            job = train(out=out, steps=5)
            self.assertEqual(len(job.steps()), 1)
            self.assertFalse(os.path.lexists(os.path.join(out, "stop")))
            self.assertEqual(get(there), b"precious")


# --------------------------------------------------------------------------------------------------
class Outputs(unittest.TestCase):
    """A folder of data, in which outputs are aimed at inputs."""

    def setUp(self):
        self.folder = scratch()
        self.data = os.path.join(self.folder, "data")
        os.mkdir(self.data)
        for name in ("a_train_000000.bin", "a_train_000001.bin", "a_val_000000.bin"):
            shutil.copy(TOKENS, os.path.join(self.data, name))
        shutil.copy(harness.tokenizer([b"x"] * 101, 0), os.path.join(self.data, "a_tokenizer.bin"))
        shutil.copy(
            os.path.join(self.data, "a_tokenizer.bin"),
            os.path.join(self.data, "other_tokenizer.bin"),
        )
        shutil.copy(MODEL, os.path.join(self.data, "model.bin"))
        shutil.copy(TOKENS, os.path.join(self.data, "choices.bin"))
        os.symlink("a_train_000001.bin", os.path.join(self.data, "link"))
        os.link(os.path.join(self.data, "a_train_000001.bin"), os.path.join(self.folder, "hard"))
        os.symlink("data", os.path.join(self.folder, "linked"))
        os.symlink("data/new.bin", os.path.join(self.folder, "to_new"))
        os.mkfifo(os.path.join(self.folder, "pipe"))
        self.flags = dict(
            train="data/a_train_*.bin", val="./linked/{a,b}_val_*.bin", model="data/model.bin",
            steps=1,
        )

    def run_with(self, ranks=1, **changes):
        return run(command_line({**self.flags, **changes}), ranks, self.folder)

    def refused(self, *cases):
        """Of each case (flag, what the message also names, changes): refused by one message, and
        nothing is written."""
        before = tree(self.folder)
        jobs = at_once(lambda case: self.run_with(**case[2]), cases)
        for (flag, other, changes), job in zip(cases, jobs):
            with self.subTest(flag=flag, **changes):
                self.assertEqual(job.returncode, EXIT_INPUT, job.stdout[-500:] + job.stderr)
                lines = [
                    line for line in job.stderr.splitlines() if line.startswith("train_gpt: rank")
                ]
                self.assertEqual(len(lines), 1, job.stderr)
                self.assertRegex(lines[0], rf"--{flag}\b")
                self.assertRegex(lines[0], other)
        self.assertEqual(tree(self.folder), before, "nothing is written")

    def test_inputs(self):
        """Each output against each input, by other spellings and links too."""
        inputs = [
            ("--train", "data/a_train_000000.bin", {}),
            ("--train", "data/../data/./a_train_000001.bin", {}),
            ("--train", "linked/a_train_000000.bin", {}),
            ("--train", "data/link", {}),
            ("--train", "hard", {}),
            ("--val", "data/a_val_000000.bin", {}),
            ("--train", "data/a_tokenizer.bin", {}),
            (
                "--tokenizer",
                os.path.join(self.data, "other_tokenizer.bin"),
                dict(tokenizer="data/other_tokenizer.bin"),
            ),
            ("--model", "linked/model.bin", {}),
            ("--hellaswag", "data/choices.bin", dict(hellaswag="data/choices.bin", val_every=1)),
        ]
        draw = random.Random(SEED)
        cases = [
            ("log", "--train", dict(ranks=3, log="hard")),
            ("trace", "--train", dict(ranks=2, trace="hard", show_schedule=1)),
            (
                "export",
                "--train",
                dict(ranks=2, export="data/a_train_000000.bin", dp_noise=1, shuffle=None),
            ),
        ]
        for other, path, more in inputs:
            for flag in (
                ("log", "trace", "export") if ALL else (draw.choice(("log", "trace", "export")),)
            ):
                cases.append(
                    (
                        flag,
                        other,
                        {
                            **more,
                            **(dict(profile_steps="1:1") if flag == "trace" else {}),
                            flag: path,
                        },
                    )
                )
        self.refused(*cases)

    def test_temporary_of_an_export(self):
        os.rename(os.path.join(self.data, "choices.bin"), os.path.join(self.folder, "m.tmp"))
        self.refused(
            ("export", "--hellaswag", dict(hellaswag="m.tmp", val_every=1, export="m")),
            ("export", "--log", dict(log="n.tmp", export="./n")),
        )

    def test_each_other(self):
        both = dict(profile_steps="1:1")
        cases = [
            ("export", "--log", dict(log=path, export=os.path.join(self.folder, "linked/..", path)))
            for path in ("new.bin", "data/new.bin")
        ]
        self.refused(
            *cases,
            ("trace", "--log", dict(log="to_new", trace="linked/new.bin", **both)),
            ("export", "--trace", dict(trace="new", export="./new", ranks=2, **both)),
        )

    def test_what_out_holds(self):
        out = os.path.join(self.folder, "out")
        new = (
            "lock", "stop", "dp_key", "dp_steps", "dp_key.tmp", "", ".", "step_00000001",
            "step_00000002/log", "step_00000003.tmp", "earlier-1", "../out",
        )
        self.refused(
            *(("log", "--out", dict(out="out", log=os.path.join("out", name))) for name in new)
        )
        train(out=out, **SAVES)
        os.link(os.path.join(out, "lock"), os.path.join(self.folder, "lock"))
        there = (
            "out/stop", "lock", "out/step_00000001/state_00000", "out/step_00000001/new",
            "out/step_00000007/log",
        )
        self.refused(
            *(("export", "--out", dict(out="out", export=name)) for name in there),
            ("log", "--out", dict(out="out", log=there[-1], ranks=2)),
        )

    def test_checkpoints_elsewhere(self):
        out, what = os.path.join(self.folder, "a"), "a file of a checkpoint"
        train(out=out, **SAVES)
        train(out=out, steps=1)
        os.symlink("a/earlier-1/step_00000001", os.path.join(self.folder, "moved"))
        names = ("manifest", "state_00000", "state_00001", "state_00000.tmp")
        self.refused(
            *(("log", what, dict(log="moved/" + name)) for name in names),
            ("export", what, dict(model="moved", export="a/earlier-1/step_00000001/manifest")),
        )
        os.mkdir(os.path.join(self.folder, "mine"))
        with open(os.path.join(self.folder, "mine", "manifest"), "w") as file:
            file.write("a list of ships\n")
        self.assertEqual(
            self.run_with(log="mine/manifest").returncode, EXIT_DONE, "it is no checkpoint's"
        )

    def test_places(self):
        """What is no file and cannot be written is refused at once; pipes and devices take logs."""
        kinds = (("log", {}), ("trace", dict(profile_steps="1:1")), ("export", {}))
        os.mkdir(os.path.join(self.folder, "folder.bin"))
        os.mkfifo(os.path.join(self.folder, "pipe.bin"))
        paths = ("data", "nowhere/new", "data/model.bin/new", "data/new/")
        self.refused(
            *(
                (flag, "cannot write", dict(out="out", **more, **{flag: path}))
                for flag, more in kinds
                for path in paths
                if flag != "export" or path not in ("data", "data/new/")  # into a folder
            ),
            *(
                ("export", "cannot write", dict(export=path))
                for path in ("pipe", "pipe/", "/dev/null", "pipe.bin", "folder.bin", "nowhere/new/")
            ),
        )

    def test_what_is_taken(self):
        """Outputs that harm nobody."""
        cases = (
            dict(log="/dev/null", trace="/dev/null", profile_steps="1:1"),
            dict(log="new"),
            dict(log="to_new"),
            dict(log="out/log", out="out"),
            dict(log="deep/log", out="deep/er/out"),
            dict(log="linked/../out2/step_log", out="out2"),
            dict(export="d12", model="d12", dry_run=1),
            dict(log="/nowhere/log", dry_run=1),
            dict(log="data/model.bin", show_schedule=1, trace="schedule"),
            dict(export="data/model.2.bin"),
            dict(export="data/folder//"),
        )
        for changes, job in zip(cases, at_once(lambda case: self.run_with(**case), cases)):
            self.assertEqual(job.returncode, EXIT_DONE, (changes, job.stderr))
        self.assertEqual(
            len(get(os.path.join(self.data, "new.bin")).splitlines()),
            3,
            "through a link to nothing yet",
        )
        self.assertEqual(get(os.path.join(self.data, "model.bin")), get(MODEL))
        job = self.run_with(log="/dev/stdout")
        self.assertEqual(
            sum(line.startswith('{"event"') for line in job.stdout.splitlines()), 3, job.stdout
        )

    def test_a_pipe_takes_the_log(self):
        reader = subprocess.Popen(
            ["cat", os.path.join(self.folder, "pipe")], stdout=subprocess.PIPE
        )
        self.assertEqual(self.run_with(ranks=2, log="pipe", steps=2).returncode, EXIT_DONE)
        text, _ = reader.communicate(timeout=TIMEOUT)
        self.assertEqual(
            [json.loads(line)["event"] for line in text.splitlines()],
            ["start", "step", "step", "end"],
        )

    def test_profile(self):
        """--plan writes nothing: what it plans for stays whatever the outputs are."""
        with open(os.path.join(self.folder, "profile.json"), "w") as file:
            json.dump(
                {
                    "models": {
                        "m": {
                            "profile_batch_size": 2,
                            "nodes": [
                                dict(
                                    id=i, name=f"n{i}", fwd_ms=1, bwd_ms=2, act_bytes=8,
                                    param_bytes=8,
                                )
                                for i in (1, 2)
                            ],
                            "edges": [[1, 2]],
                        }
                    }
                },
                file,
            )
        before = tree(self.folder)
        for flag in ("log", "export", "trace"):
            self.run_with(
                plan=1,
                profile="profile.json:m",
                cluster="2x1,inter=1",
                batch_tokens=None,
                **{flag: "profile.json", "show_schedule": int(flag == "trace")},
            )
        self.assertEqual(tree(self.folder), before)


# --------------------------------------------------------------------------------------------------
def endless(path):
    """More bytes than any text may have, beginning as JSON does."""
    with open(path, "wb") as file:
        file.write(b"{")
        file.truncate(1 << 27)


class Inputs(unittest.TestCase):
    KINDS = {
        "a pipe that nobody writes into": os.mkfifo,
        "a device without an end": lambda path: os.symlink("/dev/zero", path),
        "standard input, which stays open": lambda path: os.symlink("/dev/stdin", path),
        "a folder": os.mkdir,
    }
    FLAGS = ("train", "val", "hellaswag", "tokenizer", "config", "profile", "model")
    LLAMA = {
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "vocab_size": 101,
    }

    def refused(self, *cases):
        """Of each case (what the message names, flags): one message, and no waiting."""

        def one(case):
            read, write = os.pipe()
            try:
                return run(command_line(case[1]), stdin=read)
            finally:
                os.close(read)
                os.close(write)

        for (what, flags), job in zip(cases, at_once(one, cases)):
            with self.subTest(what=what, **flags):
                self.assertEqual(job.returncode, EXIT_INPUT, job.stdout[-500:] + job.stderr)
                lines = [line for line in job.stderr.splitlines() if "train_gpt: rank" in line]
                self.assertEqual(len(lines), 1, job.stderr)
                self.assertIn(what, lines[0])

    def test_flags(self):
        cases = []
        for flag in self.FLAGS:
            for make in self.KINDS.values():
                path = os.path.join(scratch(), "input.bin")
                make(path)
                more = {"plan": 1, "cluster": "2x1,inter=1"} if flag == "profile" else {}
                more |= {"steps": 0, "val_every": 1} if flag in ("val", "hellaswag") else {}
                cases.append((path, {**more, flag: path}))
        for flag in ("profile", "tokenizer", "config"):
            path = os.path.join(scratch(), "input.json")
            endless(path)
            more = {"plan": 1, "cluster": "2x1,inter=1"} if flag == "profile" else {}
            cases.append((path, {**more, flag: path}))
        self.refused(*cases)

    def folder(self, name, make, config=LLAMA):
        """Of Hugging Face, with something else in the place of a file."""
        folder = scratch()
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(config, file)
        path = os.path.join(folder, name)
        if os.path.exists(path):
            os.remove(path)
        make(path)
        return folder

    def test_folders_of_huggingface(self):
        names = "config.json", "model.safetensors", "model.safetensors.index.json"
        makes = [(name, make) for name in names for make in self.KINDS.values()]
        makes += [("config.json", endless), ("model.safetensors.index.json", endless)]
        cases = [(name, dict(model=self.folder(name, make))) for name, make in makes]
        for make in (*self.KINDS.values(), endless):
            for name in ("generation_config.json", "tokenizer.json"):
                cases.append((name, dict(model=self.folder(name, make), export="new")))
        self.refused(*cases)

    def test_files_of_an_index(self):
        for kind, make in self.KINDS.items():
            folder = self.folder("part.safetensors", make)
            with open(os.path.join(folder, "model.safetensors.index.json"), "w") as file:
                json.dump({"weight_map": {"lm_head.weight": "part.safetensors"}}, file)
            with self.subTest(kind):
                self.refused(("part.safetensors", dict(model=folder)))

    def test_checkpoints(self):
        cases = []
        for name in ("manifest", "state_00000"):
            for make in self.KINDS.values():
                out = new_out(**SAVES)
                path = os.path.join(checkpoint(out, 1), name)
                os.remove(path)
                make(path)
                cases.append(("no valid checkpoint in " + out, dict(out=out, resume=1)))
        self.refused(*cases)

    def test_prompts_on_standard_input(self):
        """Where a pipe is meant, it is read."""
        flags = dict(model="layers=1,heads=1,channels=8,vocab=256", prompt="-", sample_tokens=2)
        read, write = os.pipe()
        os.write(write, b"one\ntwo\n")
        os.close(write)
        job = run(command_line(flags), stdin=read)
        os.close(read)
        self.assertEqual(job.returncode, EXIT_DONE, job.stderr)


# --------------------------------------------------------------------------------------------------
class Bytes(unittest.TestCase):
    """Python's json and codecs are the reference: UTF-8 without a flaw, JSON, and os.fsencode gives
    each path back."""

    ODD = (
        bytes(range(1, 256)),
        "plain ä € 𝄞 \u2028 \ufffd \U0010ffff \ud7ff \ue000 \x7f".encode(),
        b"\xc0\x80 \xc1\xbf \xe0\x80\x80 \xe0\x9f\xbf \xf0\x80\x80\x80 \xf0\x8f\xbf\xbf",
        b"\xed\xa0\x80 \xed\xbf\xbf \xed\xa0\x80\xed\xb0\x80",
        b"\xf4\x90\x80\x80 \xf5\x80\x80\x80 \xf8\x88\x80\x80\x80 \xff\xfe",
        b"a\xc3",
        b"\xe2\x82",
        b"\xf0\x9f\x98",
        b"\x80\xbf",
        b"\xe2\x28\xa1 \xf0\x28\x8c\xbc \xf0\x90\x28\xbc \xc3\xc3\xa4",
        b'\xff"\\\xfe\n\t\x01\\udcff',
    )

    def strict(self, text):
        """The object that a text is."""

        def bad(word):
            raise ValueError(word)

        return json.loads(text.decode("utf-8", "strict"), parse_constant=bad)

    def check(self, found, path):
        self.assertEqual(
            found,
            path.decode("utf-8", "surrogateescape"),
            "characters stay, other bytes are escaped",
        )
        self.assertEqual(os.fsencode(found), path)

    def test_every_byte(self):
        """In flags of --dry-run --json, which opens no data."""
        draw = random.Random(SEED)
        lead = [0, *range(0xC0, 256)]
        paths = [*self.ODD] + [
            bytes(
                draw.choice(
                    (draw.randrange(1, 256), draw.choice(lead) or 33, draw.randrange(0x80, 0xC0))
                )
                for _ in range(600)
            )
            for _ in range(6)
        ]
        names = ("train", "val", "tokenizer", "log", "export", "out")
        for first in range(0, len(paths), len(names)):
            given = dict(zip(names, paths[first : first + len(names)]))
            words = [
                "--dry-run", "--json", "--model", "layers=1,heads=1,channels=16,vocab=101",
                "--seq-len", "8", "--threads", "1",
            ]
            done = run(
                words + [word for name, path in given.items() for word in (f"--{name}", path)],
                text=False,
            )
            self.assertEqual(done.returncode, EXIT_DONE, done.stderr)
            flags = self.strict(done.stdout)["flags"]
            for name, path in given.items():
                self.check(flags[name], path)

    def test_log(self):
        """Of a run whose folders and files have such names."""
        for name in (
            b"a\xff\xc3\xa4\xed\xa0\x80",
            bytes(set(range(1, 256)) - set(b"/*?[]{}\\~"))[:200],
        ):
            folder = os.path.join(os.fsencode(scratch()), name)
            os.mkdir(folder)
            shard = shutil.copy(os.fsencode(TOKENS), os.path.join(folder, b"\x80.bin"))
            out, log = os.path.join(folder, b"out"), os.path.join(folder, b"log")
            words = command_line(dict(steps=1, save_every=1, trace="trace", profile_steps="1:1"))
            for flag, path in (("train", shard), ("out", out), ("log", log)):
                words += [f"--{flag}", path]
            first = words.index("--train")
            del words[first : first + 2]
            done = run(words)
            self.assertEqual(done.returncode, EXIT_DONE, done.stderr)
            events = [self.strict(line) for line in get(log).split(b"\n") if line]
            self.assertEqual(
                [e["event"] for e in events], ["start", "step", "profile", "checkpoint", "end"]
            )
            for flag, path in (("train", shard), ("out", out), ("log", log)):
                self.check(events[0]["flags"][flag], path)
            self.check(events[3]["path"], os.path.join(out, b"step_00000001"))
            self.strict(get(os.path.join(harness.TEMPORARY, "trace")))

    def test_plan(self):
        name = os.path.join(os.fsencode(scratch()), b'\xff"profile\xc3')
        with open(name, "w") as file:
            json.dump(
                {
                    "models": {
                        'm\udcff\x01"': {
                            "profile_batch_size": 2,
                            "nodes": [
                                dict(
                                    id=i, name=f"n{i}", fwd_ms=1, bwd_ms=2, act_bytes=8,
                                    param_bytes=8,
                                )
                                for i in (1, 2)
                            ],
                            "edges": [[1, 2]],
                        }
                    }
                },
                file,
            )
        done = run(["--plan", "--json", "--profile", name, "--cluster", "2x1,inter=1"], text=False)
        self.assertEqual(done.returncode, EXIT_DONE, done.stderr)
        self.assertIn("stages", self.strict(done.stdout))


if __name__ == "__main__":
    harness.main()
