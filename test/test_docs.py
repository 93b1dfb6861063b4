#!/usr/bin/env python3
"""test_docs.py: every command that README.md, docs/, the Makefile and the heads of scripts and
tests show can be given.

    python3 test/test_docs.py          TRAIN_GPT=FILE: another binary than ./train_gpt

    Extract     what counts as a command in a text, and which lines belong to it
    Parsed      every command: its program or target is there, and has its flags, classes, arguments
    Shown       the bytes that a page shows below a forecast for a cluster are what it prints
    Started     every command of README.md and docs/ that is not one of ELSEWHERE ends with exit
                code 0: on small data, with flags behind it that shorten it (the last one counts),
                in a folder that looks like the project's
    Help        what --help TOPIC shows is refused by no rule, where it trains nothing
    Links       every link leads to a file and a section that are there; the section of a claim
                has the verdict of docs/results.md
    Export      docs/running.md's way from a run to a model file, a folder for transformers, and
                back

A command that no rule of `started` covers fails the test: add a rule, or put it into ELSEWHERE.
Standard library only, and what the scripts need; what they miss is skipped, by name.
"""

import ast
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import unittest
from pathlib import Path

import harness
from harness import BINARY, EXIT_RESOURCES, PYTHON, TIMEOUT, at_once, sample

ROOT = Path(harness.ROOT)
ENVIRONMENT = harness.ENVIRONMENT
DOCUMENTS = [
    "README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]
HISTORY = "docs/results"  # the pages of results tell what was done: parsed only

# Begins of commands that take a GPU, root, a cluster, the network or hours: parsed only.
ELSEWHERE = (
    "make",
    "scripts/setup.sh",
    "scripts/cluster.sh",
    "scripts/slurm.sbatch",
    "scripts/reproduce_",
    "scripts/bench",
    "scripts/gpu_",
    "scripts/long_run.sh",
    "scripts/zeropp_bars.py",
    "scripts/run_picture.py",
    "test/",
    "build/",
    "nsys",
)
RECIPES = ("scripts/run_", "scripts/recipes/")
BUT_HERE = (["make", "run"], ["make", "help"])

# A small model and little of everything, behind the flags that a command has.
SHORT = {
    "--model": "layers=6,heads=2,channels=16,vocab=50257",
    "--seq-len": "8",
    "--steps": "2",
    "--batch-tokens": "256",
    "--micro-batch": "2",
    "--val-batches": "1",
    "--sample-tokens": "4",
    "--delink-at": "1",
    "--profile-steps": "1:2",
}
ALWAYS = ("--model", "--seq-len", "--steps", "--val-batches")
STANDS_FOR = {
    "FILE_OR_FOLDER": "texts",
    "sample/10BT/*.parquet": "texts",
    "100000000": "2000",
    "GRID": "grid.txt",
    "FILE": "trace.json",
    "FILE.svg": "trace.svg",
    "/scratch": "scratch",
    "log124M/main.log": "out/mine/log.jsonl",
    "out/step_00000500": "out/step_00000002",
    "--flag": None,
    "value": None,
    "...": None,
    "q=Q,epsilon=E,steps=N,delta=D": "q=0.01,epsilon=1,steps=10,delta=1e-5",
}


# --------------------------------------------------------------------------------------------------
# Extracting

FIRST_WORD = re.compile(
    r"(?:\w+=\S+ +)*(?:sudo |sbatch |nsys )?"
    r"(?:make|mpirun|nsys|python3|\./\w+|(?:scripts|build|test|\.venv/bin)/[\w./]+)(?= |$)"
)


def is_command(text):
    """Does the text begin as a command does? The name of a file or folder alone is none."""
    found = FIRST_WORD.match(text)
    return bool(found) and (" " in text or text.startswith("make")) and not text.endswith("/")


def blocks(lines):
    """(line number, command) of the commands that stand on lines of their own.

    A line that ends in a backslash goes on in the next one.
    """
    numbered = iter(enumerate(lines, 1))
    for number, line in numbered:
        while line.endswith("\\"):
            line = line[:-1] + next(numbered)[1].strip()
        if is_command(line.strip()):
            yield number, line.strip()


def of_document(text):
    lines = text.split("\n")
    yield from blocks([line if line.startswith("    ") else "" for line in lines])
    for number, line in enumerate(lines, 1):
        if not line.startswith("    "):
            yield from (
                (number, code) for code in re.findall(r"`([^`]+)`", line) if is_command(code)
            )


def of_source(name, text):
    """The head of a script or test, and the Makefile's comments."""
    if name == "Makefile":
        for number, line in enumerate(text.split("\n"), 1):
            found = re.match(r"#.*?\b(make \w+(?: \w+=(?:'[^']*'|\S+))+)", line)
            if found:
                yield number, found[1]
        return
    head = (
        ast.get_docstring(ast.parse(text), clean=False) or ""
        if name.endswith(".py")
        else "\n".join(re.findall(r"(?m)^#(.*)$", text))
    )
    shown = [line for line in head.split("\n") if line.startswith("    ") or line.startswith("   ")]
    yield from blocks([re.sub(r"   +\S.*$", "", line.strip()) for line in shown])


def words_of(command):
    """A command's words without comments; [OPTIONAL ...] parts of a usage line are left out."""
    command = re.sub(r"\[[^\]]*\]", "", command).split(" | ")[0]
    return shlex.split(re.sub(r"(?<=\s)#.*$", "", command))


def split_environment(words):
    """(variables, the words behind them and behind sudo, sbatch, a Python)."""
    variables = {}
    while words and (
        re.match(r"\w+=", words[0]) or words[0] in ("sudo", "sbatch", "python3", ".venv/bin/python")
    ):
        name, equals, value = words[0].partition("=")
        variables.update({name: value} if equals else {})
        words = words[1:]
    return variables, words


def is_trainer(word):
    return re.fullmatch(r"\./train_gpt(_\w+)?", word) is not None


class Commands:
    """All of them: (where, command)."""

    def __init__(self):
        self.documents = [
            (f"{name}:{number}", command)
            for name in DOCUMENTS
            for number, command in of_document((ROOT / name).read_text())
        ]
        names = [
            "Makefile",
            *(
                str(path.relative_to(ROOT))
                for folder in ("scripts", "test")
                for path in sorted((ROOT / folder).glob("*"))
                if path.suffix in (".py", ".sh", ".sbatch")
            ),
        ]
        self.sources = [
            (f"{name}:{number}", command)
            for name in names
            for number, command in of_source(name, (ROOT / name).read_text())
        ]


# --------------------------------------------------------------------------------------------------
class Extract(unittest.TestCase):
    TEXT = (
        "Try `make run RUN='--steps 5'`, `scripts/` or `./train_gpt --help`; not `--steps 5`, "
        "`scripts/setup.sh`.\n\n"
        "    make all      # builds\n"
        "    mpirun -np 2 ./train_gpt --a 'b c' \\\n        --d ...   # trains\n"
        '    {"event":1}\n    X=1 sudo scripts/run.sh --e\n'
    )

    def test_document(self):
        found = list(of_document(self.TEXT))
        self.assertEqual(
            [words_of(command) for _, command in found],
            [
                ["make", "all"],
                ["mpirun", "-np", "2", "./train_gpt", "--a", "b c", "--d", "..."],
                ["X=1", "sudo", "scripts/run.sh", "--e"],
                ["make", "run", "RUN=--steps 5"],
                ["./train_gpt", "--help"],
            ],
        )
        self.assertEqual([number for number, _ in found], [3, 4, 7, 1, 1])
        self.assertEqual(
            split_environment(words_of(found[2][1])), ({"X": "1"}, ["scripts/run.sh", "--e"])
        )

    def test_source(self):
        self.assertEqual(
            list(
                of_source("Makefile", "# flags, e.g. make run RUN='--steps 100'\nall: # make all\n")
            ),
            [(1, "make run RUN='--steps 100'")],
        )
        self.assertEqual(
            [
                words_of(command)
                for _, command in of_source(
                    "a.sh", "#!/bin/sh\n#   scripts/a.sh [-x] --y 1      does it\necho\n"
                )
            ],
            [["scripts/a.sh", "--y", "1"]],
        )

    def test_what_is_there(self):
        """The commands that this test was made for are found."""
        found = [command for _, command in COMMANDS.documents + COMMANDS.sources]
        for command in (
            "make run RUN='--steps 500'",
            "make run RUN='--steps 100'",
            "make MATMUL=cblas BLAS=openblas",
        ):
            self.assertIn(command, found)
        self.assertGreater(len([command for command in found if "train_gpt" in command]), 40)


# --------------------------------------------------------------------------------------------------
class Parsed(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        text = subprocess.run(
            [BINARY, "--help", "all"], capture_output=True, text=True, env=ENVIRONMENT, check=True
        ).stdout
        cls.flags = {
            "--help",
            "-h",
            "--version",
            *(word for pair in re.findall(r"(?m)^  (--\S+?)(?:, (-\w+))? ", text) for word in pair),
        }
        cls.makefile = (ROOT / "Makefile").read_text()

    def test_every_command(self):
        for where, command in COMMANDS.documents + COMMANDS.sources:
            with self.subTest(where, command=command):
                self.check(*split_environment(words_of(command)))
                given = next((w for w in words_of(command) if "=" not in w and w != "sudo"), "")
                if given.startswith("scripts/"):
                    self.assertTrue(os.access(ROOT / given, os.X_OK), f"{given} is not executable")

    def check(self, variables, words):
        if any(map(is_trainer, words)):
            at = next(i for i, word in enumerate(words) if is_trainer(word))
            self.check_flags(words[at + 1 :])
            words = words[:at]
        if not words or words[0] in ("mpirun", "nsys"):
            return
        if words[0] == "make":
            return self.check_make(words[1:])
        path = ROOT / words[0]
        if words[0].startswith("build/"):
            sources = [*(ROOT / "test").glob(path.name + ".c*"), ROOT / f"scripts/{path.stem}.py"]
            return self.assertTrue(any(map(Path.exists, sources)), f"{words[0]} has no source")
        self.assertTrue(path.exists(), f"there is no {words[0]}")
        if words[0].startswith("test/test_"):
            for name in [word for word in words[1:] if not word.isupper()]:
                self.assertRegex(path.read_text(), rf"(?m)^class {name.split('.')[0]}\b")
        elif words[0] == "scripts/slurm.sbatch":
            self.check_flags(words[1:])
        else:
            self.check_script(path, words[1:])

    def check_flags(self, words):
        for word in words:
            if re.match(r"--?[a-z]", word) and word != "--flag":
                self.assertIn(word.split("=")[0], self.flags)

    def check_make(self, words):
        for word in words:
            name, equals, _ = word.partition("=")
            self.assertRegex(
                self.makefile,
                (
                    rf"\$\({name}\)|^{name} *="
                    if equals
                    else rf"(?m)^(.* )?{re.escape(name)}( .*)?:(?!=)"
                ),
                f"make knows no {word}",
            )

    def check_script(self, path, words):
        """What a script is given stands in its code, or in that of the Python that it starts."""
        paper = path.stem.removeprefix("reproduce_")
        files = [
            path,
            path.with_suffix(".py"),
            *(ROOT / "scripts" / name for name in ("experiment.py", "recipe.sh")),
            ROOT / f"scripts/papers/{paper}.py",
        ]
        code = "\n".join(
            re.sub(r'(?m)^\s*#.*$|^"""(?:.|\n)*?"""', "", file.read_text())
            for file in files
            if file.exists()
        )
        recipe = str(path.relative_to(ROOT)).startswith(RECIPES)
        for word in words[: words.index("--")] if "--" in words else words:
            if word.startswith("--") and not (recipe or word == "--help"):
                self.assertRegex(
                    code, re.escape(word.split("=")[0]) + r"\b", f"{path.name} has no {word}"
                )
            elif path.name == "setup.sh":
                self.assertRegex(code, rf"(?m)^ *[\w| ]*\b{word}\b[\w| ]*\)")
            elif recipe and word.startswith("--"):
                self.check_flags([word])


# --------------------------------------------------------------------------------------------------
class Shown(unittest.TestCase):
    """Forecasts with --cluster depend on nothing here, but for what MPI takes of the host. Lists of
    actions depend on nothing."""

    SHOWN = re.compile(r" +(?!host )\S")

    @staticmethod
    def forecasts():
        """(where, command, the lines that are shown below it, without the host's)."""
        for name in DOCUMENTS:
            if name.startswith(HISTORY):
                continue
            lines = (ROOT / name).read_text().split("\n")
            for number, command in blocks([line * line.startswith("    ") for line in lines]):
                if not {"--dry-run", "--cluster"} <= set(command.split()):
                    continue
                while lines[number - 1].endswith("\\"):
                    number += 1
                below = itertools.takewhile(
                    lambda line: not line or line.startswith("    "), lines[number:]
                )
                yield f"{name}:{number}", command, [x for x in below if Shown.SHOWN.match(x)]

    @staticmethod
    def columns(shown):
        """(words behind the command, lines in MiB) for each value of a flag, where the first line
        is a flag with its values; else all lines."""
        flag, *values = shown[0].split()
        if not flag.startswith("--"):
            yield [], shown
            return
        rows = [line.split() for line in shown[1:]]
        for i, value in enumerate(values, 1):
            yield [flag, value], [f"{row[0]} {row[i]} MiB" for row in rows]

    @staticmethod
    def printed(command, more):
        """The lines, with single spaces."""
        words = [BINARY if is_trainer(word) else word for word in words_of(command)]
        text = subprocess.run(words + more, capture_output=True, text=True, env=ENVIRONMENT).stdout
        return [" ".join(line.split()) for line in text.split("\n")]

    def test_forecasts(self):
        seen = 0
        for where, command, shown in self.forecasts():
            for more, lines in self.columns(shown) if shown else ():
                printed = self.printed(command, more)
                for line in lines:
                    seen += 1
                    self.assertIn(" ".join(line.split()), printed, f"{where}: {command} {more}")
        self.assertGreater(seen, 40)

    def test_actions(self):
        """docs/step.md shows actions of rank 0, and behind some of them their stop."""
        page = (ROOT / "docs/step.md").read_text()
        command = next(command for _, command in of_document(page))
        printed = self.printed(command, [])
        printed = printed[: printed.index("rank 1: 57 actions")]
        shown = [" ".join(line.split()) for line in re.findall(r"(?m)^ +\d+ [A-Z].*", page)]
        self.assertGreater(len(shown), 8)
        for line in shown:
            self.assertTrue({line, re.sub(r"( stop)? \d+$", "", line)} & set(printed), line)


# --------------------------------------------------------------------------------------------------
def make_project(folder):
    """A folder that looks like the project's, with small data."""
    for path in ROOT.iterdir():
        if path.name not in ("scripts", "data", "out", "build", "train_gpt", ".git"):
            (folder / path.name).symlink_to(path)
    for name in ("scripts", "data", "out", "scratch"):
        (folder / name).mkdir()
    for path in (ROOT / "scripts").iterdir():
        if path.is_file() and path.name != "setup.sh":
            (folder / "scripts" / path.name).symlink_to(path)
    (folder / "scripts/recipes").symlink_to(ROOT / "scripts/recipes")
    (folder / "scripts/setup.sh").write_text("#!/bin/sh\nexit 0 # nothing is installed by a test\n")
    (folder / "scripts/setup.sh").chmod(0o755)
    subprocess.run(["make", "-s", "build/flags-c"], cwd=folder, env=ENVIRONMENT, check=True)
    shutil.copy(
        BINARY, folder / "train_gpt"
    )  # newer than what it is made of: make does not build it
    (folder / "texts").mkdir()
    for i in range(60):
        (folder / f"texts/{i}.txt").write_text(
            "".join(
                f"Line {i * j} of play {i}, in which {i * i} words are said.\n" for j in range(25)
            )
        )
    (folder / "grid.txt").write_text(
        "--train 'data/text_bytes_train_*.bin'\n--val 'data/text_bytes_val_*.bin'\n"
        "--model layers=1,heads=1,channels=8,vocab=256\n"
        "--lr 1e-3 2e-3\n--seq-len 8\n--steps 2\n--val-batches 1\n"
    )


class Project:
    """The folder in which commands are started."""

    def __init__(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self.temporary.name)
        make_project(self.folder)
        self.missing = []
        for tokenizer in ("bytes", "gpt2"):
            self.prepare(
                "--input",
                "texts",
                "--tokenizer",
                tokenizer,
                "--out",
                "data",
                "--name",
                f"text_{tokenizer}",
            )

    def prepare(self, *words):
        done = self.run([PYTHON, "scripts/prepare_data.py", *words])
        if done.returncode == EXIT_RESOURCES:
            self.missing.append(" ".join(words))
        elif done.returncode:
            raise AssertionError(done.stderr)

    def run(self, words, **variables):
        """The ended command. After TIMEOUT it is ended with all that it started."""
        process = subprocess.Popen(
            words,
            cwd=self.folder,
            env=dict(ENVIRONMENT, **variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            err += f"\nstill running after {TIMEOUT} s"
        return subprocess.CompletedProcess(words, process.returncode, out, err)


def shortened(words):
    """What is put behind the flags of a run."""
    given = {word.split("=")[0] for word in words}
    if "--fit" in given:  # test_fit.py has more ranks
        return ["--cluster", "1x2,gpu=h100", "--model", "gpt2:124M"]
    if given & {"--dry-run", "--plan", "--dp-account", "--help", "--version", "--compat"}:
        return []
    changes = {name: value for name, value in SHORT.items() if name in given or name in ALWAYS}
    model = words[words.index("--model") + 1] if "--model" in words else ""
    if "layers=" in model or "--delink" in words:
        del changes["--model"]
    if "--images" in words or "data/digits_images_train_*.bin" in words:  # an image fills a window
        changes.update({"--seq-len": "65", "--batch-tokens": "1040"})
    if any("text_bytes" in word for word in words) and "layers=" not in model:
        changes["--model"] = SHORT["--model"].replace("50257", "256")
    if "--dp-epsilon" in words:  # the other accountant takes seconds
        changes["--dp-accountant"] = "rdp"
        if "--dp-windows-per-document" in words:  # more are accounted by the other one
            changes["--dp-windows-per-document"] = "1"
    if (
        "--share" in words or "--delink" in words
    ):  # a checkpoint for the commands that begin with one
        changes.setdefault("--steps", "2")
    return [word for pair in changes.items() for word in pair]


def started(variables, words):
    """The command as it is run here, or None where it is not."""
    if any(words[: len(begin)] == begin for begin in BUT_HERE):
        return started_make(words)
    trains = [i for i, word in enumerate(words) if is_trainer(word)]
    if words[0].startswith(ELSEWHERE) or (
        words[0] == "mpirun" and not trains
    ):  # the latter: options of mpirun
        return None
    words = [STANDS_FOR.get(word, word) for word in words]
    if trains:
        at = trains[0]
        launcher = ["mpirun", *words[1:at]] if words[0] == "mpirun" else words[:at]
        launcher = [word for word in launcher if word]
        if launcher == ["mpirun"]:
            launcher += ["-np", "8"]
        flags = [word for word in words[at + 1 :] if word]
        return launcher + ["./train_gpt"] + flags + shortened(flags)
    words = [word for word in words if word]
    if words[0].startswith(RECIPES):
        for_gpus = ["--dry-run", "--cluster", "1x8,gpu=h100"]  # they need not fit this machine
        return words + ([] if "--dry-run" in words else for_gpus)
    if words[0].endswith(".py"):
        return [PYTHON] + words
    if words[0] == "scripts/same_loss.sh" and "--" in words:
        return [words[0], "--only", "ZeRO 1", *words[1:], *shortened(words)]
    if words[0] in ("scripts/sweep.sh", "scripts/launch.sh", "scripts/same_loss.sh"):
        return words
    raise AssertionError(f"no rule says how to start {' '.join(words)}, and it is not in ELSEWHERE")


def started_make(words):
    if words[:2] == ["make", "run"]:
        run = next((word[4:] for word in words if word.startswith("RUN=")), "")
        run += " --model layers=1,heads=1,channels=8,vocab=256" * bool(run)  # else its own
        run += " --steps 3 --val-batches 1 --sample-tokens 4"
        return ["make", "run", "PYTHON=true", f"RUN={run}"]
    return words


def out_of(words):
    """The folder that a command's run writes into, or the command itself where it names none."""
    if words[:2] == ["make", "run"] or "run_shakespeare" in words[0]:
        return "out/shakespeare"
    named = [after for word, after in zip(words, words[1:]) if word == "--out"]
    return named[-1] if named else " ".join(words)


class Started(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.project = Project()
        cls.folders = {}  # a lock for each --out
        cls.addClassCleanup(cls.project.temporary.cleanup)

    def commands(self):
        """(where, variables, words) of each; what several places show is there once."""
        seen = []
        for where, command in COMMANDS.documents:
            if not where.startswith(HISTORY):
                variables, words = split_environment(words_of(command))
                words = started(variables, words)
                if words and (variables, words) not in seen:
                    seen.append((variables, words))
                    yield where, variables, words

    def start(self, case):
        _, variables, words = case
        if words[0].startswith(RECIPES):
            variables = {"PROGRAM": "./train_gpt", "RANKS": "1"}
        if "*" in " ".join(words) and words[1].endswith("plot.py"):
            words = [
                "bash",
                "-c",
                shlex.join(words).replace("'out/*/log.jsonl'", "out/*/log.jsonl")
                + " --out out/plot.png",
            ]
        with self.folders.setdefault(out_of(words), threading.Lock()):  # a run locks its folder
            return self.project.run(words, **variables)

    def test_every_command(self):
        """Of those that leave nothing, a sample has a third; of those that account for privacy or
        draw, which takes a second, it has one."""
        # One after another: data are prepared, runs are made, what they leave is used.
        begins, private, plots, alone = ([], [], []), [], [], []
        for case in self.commands():
            text = " ".join(case[2])
            if "prepare_data" in text:
                begins[0].append(case)
            elif "plot.py" in text:
                plots.append(case)
            elif re.search(r"(watch|report)\.py|same_loss|--delink ", text):
                begins[2].append(case)
            elif "--dp-epsilon" in text or "--dp-account" in text:
                private.append(case)
            else:
                (alone if out_of(case[2]) == text else begins[1]).append(case)
        begins[1].extend(sample(private, 1) + sample(alone, len(alone) // 3))
        begins[2].extend(sample(plots, 1))
        self.project.run(
            ["./train_gpt", *SHORT_RUN, "--share", "all", "--save-every", "2", "--out", "out"]
        )
        self.project.run(["./train_gpt", *SHORT_RUN, "--show-schedule", "--trace", "trace.json"])
        for cases in begins:
            for case, done in zip(cases, at_once(self.start, cases)):
                self.check(case, done)

    def check(self, case, done):
        where, _, words = case
        if "_huggingface" in " ".join(words):
            return  # Export
        with self.subTest(where, command=shlex.join(words)):
            needs = re.search(r"(prepare_data|report)\.py", shlex.join(words))
            if done.returncode == EXIT_RESOURCES and needs:
                self.skipTest(done.stderr)
            if done.returncode and self.project.missing:
                self.skipTest(f"prepare_data.py {self.project.missing[0]}: not here")
            self.assertEqual(done.returncode, 0, done.stdout[-1500:] + done.stderr[-2500:])


SHORT_RUN = [
    word for name in ("--model", "--seq-len", "--steps") for word in (name, SHORT[name])
] + ["--val-every", "0"]


# --------------------------------------------------------------------------------------------------
class Help(unittest.TestCase):
    def help(self, *topic):
        done = subprocess.run(
            [BINARY, "--help", *topic], capture_output=True, text=True, env=ENVIRONMENT, check=True
        )
        return done.stdout

    def test_examples(self):
        topics = re.search(r"(?s)of a topic: (.*?)\n--help", self.help())[1]
        seen = 0
        for topic in re.split(r",\s+", topics):
            for _, command in blocks(self.help(topic).split("\n")):
                words = words_of(command)
                if {"--dry-run", "--plan", "--dp-account"} & set(words):
                    seen += 1
                    done = subprocess.run(
                        [BINARY, *words[1:]], capture_output=True, text=True, env=ENVIRONMENT
                    )
                    with self.subTest(command):
                        self.assertIn(done.returncode, (0, EXIT_RESOURCES), done.stderr)
        self.assertGreater(seen, 3)


# --------------------------------------------------------------------------------------------------
def slug(heading):
    """The anchor of a heading."""
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w -]", "", words).replace(" ", "-")


def sections(text):
    """Anchor -> text of a section, with those below it."""
    text = "\n" + re.sub(r"(?m)^    .*$", "", text)  # what is shown as code has no headings
    found = {name: "" for name in re.findall(r'<a name="(.*?)">', text)}
    begins = list(re.finditer(r"\n(#+) (.*)", text))
    for at, begin in enumerate(begins):
        ends = (b.start() for b in begins[at + 1 :] if len(b[1]) <= len(begin[1]))
        found[slug(begin[2])] = text[begin.end() : next(ends, len(text))]
    return found


class Links(unittest.TestCase):
    SECTIONS = {name: sections((ROOT / name).read_text()) for name in DOCUMENTS}

    def test_every_link(self):
        """It leads to a file, and where it names a section, to one that is there."""
        seen = 0
        for name in DOCUMENTS:
            for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / name).read_text()):
                if link.startswith(("http:", "https:")):
                    continue
                path, _, anchor = link.partition("#")
                target = os.path.normpath(os.path.join(os.path.dirname(name), path))
                target, seen = target if path else name, seen + 1
                with self.subTest(f"{name}: {link}"):
                    self.assertTrue((ROOT / target).exists())
                    self.assertIn(anchor, {"", *self.SECTIONS.get(target, {})})
        self.assertGreater(seen, 200)

    def test_claims(self):
        """The section to which a verdict of docs/results.md leads says it, too."""
        rows = re.findall(
            r"(?m)^\| ([A-Z]\d+) \|.*\| \[([A-Z ]+)\]\((results/\w+\.md)#([\w-]+)\)[^|]*\|$",
            (ROOT / "docs/results.md").read_text(),
        )
        self.assertEqual(len(rows), 39)
        for number, verdict, page, anchor in rows:
            text = self.SECTIONS[f"docs/{page}"][anchor]
            words = verdict.replace(" ", r"\s+")
            self.assertRegex(text, rf"\*\*{words}\b", f"{number} in {page}")


class Step(unittest.TestCase):
    def test_names(self):
        """Every file and function that docs/step.md names is there."""
        page = Path(harness.ROOT, "docs/step.md").read_text()
        names = set(re.findall(r"`([\w/]+\.[hc]|[a-z]+(?:_[a-z0-9]+)*)`", page))
        self.assertGreater(len(names), 30)
        files = {str(p.relative_to(harness.ROOT)): p for p in Path(harness.ROOT).glob("**/*.[hc]")}
        words = set()
        for path in files.values():
            if ".venv" not in path.parts:
                words.update(re.findall(r"\b(\w+)\(", path.read_text(errors="replace")))
        self.assertEqual(names - set(files) - words, set())


class Export(unittest.TestCase):
    def test_there_and_back(self):
        """A run; its command with what the page says behind it; the same as a folder, with the
        tokenizer of the data; a model file again: the same bytes."""
        project = Project()
        self.addCleanup(project.temporary.cleanup)
        if project.missing:
            self.skipTest(f"prepare_data.py {project.missing[0]}: not here")
        page = (ROOT / "docs/running.md").read_text()
        behind = re.search(r"its command with\s+`([^`]*)`\s+behind it", page)[1]
        command = next(
            command
            for _, command in COMMANDS.documents
            if "--out out/mine " in command and command.startswith("mpirun")
        )
        for tokens in project.folder.glob("data/text_gpt2_*"):
            shutil.copy(tokens, str(tokens).replace("text_gpt2", "mine"))
        words = started({}, words_of(command))
        for more in ([], behind.split()):
            done = project.run(words + more)
            self.assertEqual(done.returncode, 0, done.stdout[-1500:] + done.stderr[-2500:])
        self.check_folder(project, words + behind.split())
        pattern = re.search(r"scripts/plot\.py (\S+\.jsonl)", page)[1]
        self.assertEqual(
            len(list(project.folder.glob(pattern))), 1, "the log is where the page plots logs"
        )

    def check_folder(self, project, words):
        """The same export as a folder, and that folder as a file: the same bytes."""
        back = "./train_gpt --model MADE --seq-len 8 --steps 0 --val-every 0 --export"
        for command in ([*words[:-1], "MADE"], [*back.split(), "BACK.bin"]):
            done = project.run(command)
            self.assertEqual(done.returncode, 0, done.stdout[-1500:] + done.stderr[-2500:])
        self.assertEqual(
            (project.folder / "MODEL.bin").read_bytes(), (project.folder / "BACK.bin").read_bytes()
        )
        tokenizer = json.loads((project.folder / "MADE/tokenizer.json").read_text())
        self.assertEqual(len(tokenizer["model"]["vocab"]), 50257)


COMMANDS = Commands()

if __name__ == "__main__":
    harness.main()
