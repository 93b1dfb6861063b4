#!/usr/bin/env python3
"""same_bits.py: do two builds of train_gpt compute the same, bit for bit?

    python3 test/same_bits.py OLD NEW        OLD, NEW: programs, as train_gpt of two commits
    python3 test/same_bits.py OLD NEW --only delink --only zero      names with both words
    python3 test/same_bits.py OLD NEW --sample 20                    20 cases by chance
    python3 test/same_bits.py --list                                 the command lines

Both programs run each command line of same_bits_cases.py; OLD_emu and NEW_emu, the same paths with
_emu, run those of the emulated GPU. A difference is printed as one line: case, what differs, old
value, new value. The last line is `N equal, N different`; the exit code is 1 if any differs, or if
OLD accepts or refuses a command line that the list expects to end the other way.

Compared: exit codes, messages and warnings; of the log all values as text (losses, gradient norms,
learning rates, validation, predicted and measured memory and traffic); generated text; the exported
model, checkpoints and traces; actions of --show-schedule; what --plan, --dry-run and others print.
Not compared: measured times and rates, what is predicted from them, the host memory of the process
itself. A run that resumes begins with OLD's checkpoints in both programs.

OLD's results are kept in build/same_bits/, by the sha256 of the program and of these two scripts.
The list takes about ten minutes for each program on two cores.
A flag of --help that no command line uses is an error, and after a run of the whole list a pair of
--compat that none is refused for. Standard library only; needs no data/.
"""

import argparse
import collections
import hashlib
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.dont_write_bytecode = True
import same_bits_cases

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "build/same_bits"
KEPT_PROGRAMS = 6  # results of so many programs are kept
ENVIRONMENT = dict(os.environ, OMP_WAIT_POLICY="passive")
ENVIRONMENT.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
LIMIT = 240  # seconds for a run
SHOWN = 160  # characters of a value
PRINTS = {"--help", "--compat", "--dp-account", "--plan", "--dry-run", "--prompt"}
# Keys of the log that hold measured times and rates, or follow from them.
TIMED = {"step_ms", "idle", "peak_flops", "rates"}  # but not of a --cluster, which tells its rates
MEASURED = {"ms", "of_step", "waiting_ms", "tokens_per_s", "mfu", "tflops", "joules", "energy_j"}
MEASURED |= {"overhead"}
# Of a manifest: the folder's name is in flags, and products of matrices are chosen by their times.
# Older programs do not write lr, which the log has for each step.
UNSTABLE_LINES = ("flags ", "checksum ", "matmul", "lr ")


def sha256(data):
    return hashlib.sha256(data).hexdigest()


# --- Data: the formats are those of docs/formats.md ----------------------------------------------


def header(*words):
    """256 int32 words."""
    return struct.pack(f"<{len(words)}i", *words).ljust(1024, b"\0")


def uint16(numbers):
    return struct.pack(f"<{len(numbers)}H", *numbers)


def shard(tokens, *labels):
    return header(20240520, 1, len(tokens), *labels) + uint16(tokens)


def make_text(draw, documents):
    """Documents, each after end of text (0), in which a letter depends on the one before."""
    tokens = []
    for _ in range(documents):
        tokens.append(0)
        letter = 97
        for _ in range(draw.randrange(5, 120)):
            letter = 32 if draw.random() < 0.2 else 97 + (3 * letter + draw.randrange(3)) % 26
            tokens.append(letter)
    return tokens


def make_images(draw, count):
    """Labelled documents: end of text, 12 pixels, one of the 5 labels from 200 on."""
    tokens = []
    for _ in range(count):
        label = draw.randrange(5)
        pixels = [1 + (20 * label + draw.randrange(40)) % 180 for _ in range(12)]
        tokens += [0, *pixels, 200 + label]
    return tokens


def make_choices(draw, count):
    """A file for --hellaswag."""
    examples = []
    for number in range(count):
        words = [65535, 0, number, draw.randrange(4), 4]
        for length in (draw.randrange(1, 8), *(draw.randrange(1, 9) for _ in range(4))):
            words += [length, *(draw.randrange(97, 123) for _ in range(length))]
        words[1] = 2 * len(words)
        examples.append(uint16(words))
    return header(20240522, 1, count, max(map(len, examples))) + b"".join(examples)


def make_data(folder):
    draw = random.Random(20240520)
    folder.mkdir(parents=True)
    for name, documents in (("train_000000", 60), ("train_000001", 25), ("val_000000", 12)):
        (folder / f"text_{name}.bin").write_bytes(shard(make_text(draw, documents)))
    for name, count in (("train", 90), ("val", 25)):
        tokens = make_images(draw, count)
        (folder / f"images_{name}_000000.bin").write_bytes(shard(tokens, 5, 200))
    tokenizer = header(20240328, 2, 256, 0) + b"".join(bytes([1, byte]) for byte in range(256))
    (folder / "text_tokenizer.bin").write_bytes(tokenizer)
    (folder / "choices.bin").write_bytes(make_choices(draw, 9))


# --- What a run did, as a flat table: what -> value ----------------------------------------------


def flatten(found, what, value, ignored):
    """Adds the numbers and texts of a JSON value."""
    if isinstance(value, dict):
        for key, inner in value.items():
            own_memory = key == "host" and "memory" in what  # the process's
            if key not in ignored and not own_memory:
                flatten(found, f"{what} {key}", inner, ignored)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            flatten(found, f"{what} {index}", inner, ignored)
    else:
        found[what] = str(value)


def read_log(found, path, ignored):
    seen = collections.Counter()
    for line in path.read_text().splitlines():
        event = json.loads(line, parse_float=str)
        event.pop("command", None)  # it names the program
        if event["event"] == "sample":
            continue  # what is printed has it, too
        what = f"{event.pop('event')} {event.get('step', '')}".strip()
        seen[what] += 1
        if seen[what] > 1:
            what += f" #{seen[what]}"
        flatten(found, what, event, ignored)


def read_messages(found, text, folder):
    """Warnings of all ranks, and the first message that ended one."""
    text = text.replace(folder, "FOLDER")
    for number, line in enumerate(sorted(set(re.findall(r"(?m)^(?:warning|note): .*", text)))):
        found[f"warning {number}"] = line
    said = re.search(r"train_gpt: rank \d+ on \S+, [^:]+:\d+: (.*(?:\n  hint: .*)?)", text)
    if said:
        own_memory = r"(needs|--host-memory) \d+(?= bytes of the host|M)"  # of the process
        found["message"] = re.sub(own_memory, r"\1 N", said[1].replace("\n  ", "; "))


def read_checkpoints(found, out):
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out)
        if path.is_dir():
            continue
        found[f"file {name}"] = "is there"
        if path.name.startswith("state_"):
            found[f"sha256 of {name}"] = sha256(path.read_bytes())
        if path.name == "dp_steps":
            found[f"{name}"] = " ".join(path.read_text().split()[:2])  # without the fingerprint
        if path.name == "manifest":
            for line in path.read_text(errors="replace").splitlines():
                if not line.startswith(UNSTABLE_LINES):
                    key, _, value = line.partition(" ")
                    found[f"{name} {key}"] = value


def read_trace(found, path):
    """What is drawn, without its times; the order on a rank is that of the times."""
    events = json.loads(path.read_text())["traceEvents"]
    drawn = sorted(json.dumps({k: e[k] for k in e if k not in ("ts", "dur")}) for e in events)
    found["trace, events"] = str(len(drawn))
    found["trace, sha256"] = sha256("\n".join(drawn).encode())


def read_printed(found, text, ignored):
    try:
        flatten(found, "printed", json.loads(text, parse_float=str), ignored)
    except ValueError:
        for number, line in enumerate(text.splitlines()):
            found[f"printed line {number + 1}"] = line


def read_actions(found, text):
    rank = ""
    for line in text.splitlines():
        if re.match(r"rank \d+: \d+ actions", line):
            rank = line.split(":")[0]
            found[f"{rank} actions"] = line
        elif re.match(r" +\d+ [A-Z_]+", line):
            number, action = line.split(None, 1)
            found[f"{rank} action {number}"] = action


def observe(case, done, folder):
    """What a run did. done: the process; folder: where it ran."""
    words = set(case.words())
    ignored = MEASURED if "--cluster" in words else MEASURED | TIMED
    found = {"exit code": str(done.returncode)}
    read_messages(found, done.stderr.decode(errors="replace"), str(folder))
    text = done.stdout.decode(errors="backslashreplace")
    if (folder / "log").exists():
        read_log(found, folder / "log", ignored)
    if done.returncode == 0 and PRINTS & words:
        read_printed(found, text, ignored)
    if "--show-schedule" in words:
        read_actions(found, text)
    for number, sample in enumerate(re.findall(r"(?s)--- sample .*?---\n(.*?)\n---", text)):
        found[f"generated text {number}"] = sample
    if (folder / "export.bin").exists():
        found["sha256 of --export"] = sha256((folder / "export.bin").read_bytes())
    if (folder / "trace").exists():
        read_trace(found, folder / "trace")
    if (folder / "out").exists():
        read_checkpoints(found, folder / "out")
    return found


# --- Running -------------------------------------------------------------------------------------


def command_of(case, program):
    words = ["mpirun", "--oversubscribe", "--bind-to", "none", "--timeout", str(LIMIT)]
    return [*words, "-np", str(case.ranks), str(program), *case.words()]


def prepare(folder, case, begin):
    """Makes what a run finds in its folder. begin: checkpoints of the case before, or None."""
    (folder / "data").symlink_to(KEPT / "data")
    (folder / "golden").symlink_to(ROOT / "test/golden")
    (folder / "disk").mkdir()
    if begin:
        shutil.copytree(begin, folder / "out")
        for path in (folder / "out").glob("step_*"):
            if case.until and int(path.name[5:]) > case.until:
                shutil.rmtree(path)


def run(program, case, begin, keep=None):
    """Runs a case; returns what it did. keep: where its checkpoints go afterwards."""
    with tempfile.TemporaryDirectory(prefix="same_bits_") as name:
        folder = Path(name)
        prepare(folder, case, begin)
        command = command_of(case, program)
        nothing = subprocess.DEVNULL
        done = subprocess.run(
            command, cwd=folder, env=ENVIRONMENT, stdin=nothing, capture_output=True, check=False
        )
        found = observe(case, done, folder)
        if keep and (folder / "out").exists():
            shutil.move(folder / "out", keep)
    return found


class Kept:
    """Results of OLD, in a folder for each program and state of these scripts."""

    def __init__(self, program):
        scripts = [Path(__file__), Path(same_bits_cases.__file__)]
        content = b"".join(path.read_bytes() for path in (program, *scripts))
        self.program = program
        self.folder = KEPT / "results" / sha256(content)[:16]
        self.folder.mkdir(parents=True, exist_ok=True)
        os.utime(self.folder)

    def entry(self, case):
        return self.folder / sha256(repr(case).encode())[:16]

    def checkpoints(self, case):
        return self.entry(case) / "out"

    def result(self, case, begin):
        """Runs the case where that was not done before. Entries are complete or absent."""
        entry = self.entry(case)
        if not entry.exists():
            with tempfile.TemporaryDirectory(dir=self.folder) as name:
                part = Path(name) / "entry"
                part.mkdir()
                found = run(self.program, case, begin, part / "out")
                (part / "found.json").write_text(json.dumps(found, indent=1))
                try:
                    part.rename(entry)
                except OSError:
                    pass  # another same_bits.py has made it meanwhile
        return json.loads((entry / "found.json").read_text())


def forget_old_programs():
    folders = sorted((KEPT / "results").glob("*"), key=lambda path: path.stat().st_mtime)
    for folder in folders[:-KEPT_PROGRAMS]:
        shutil.rmtree(folder, ignore_errors=True)


# --- Comparing -----------------------------------------------------------------------------------


def differences(old, new):
    """(what, old value, new value) of all that differs. A flag that one program lacks is none."""
    found = []
    for what in [*old, *(what for what in new if what not in old)]:
        before = old.get(what, "nothing")
        after = new.get(what, "nothing")
        only_one = what.startswith("start flags ") and "nothing" in (before, after)
        if before != after and not only_one:
            found.append((what, before, after))
    return found


def cut(value):
    value = value.replace("\n", " ")
    return value if len(value) <= SHOWN else value[:SHOWN] + "..."


def report(line):
    """At once, so that lines of runs at the same time stay apart."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Comparison:
    def __init__(self, old, new, verbose):
        self.programs = {False: old, True: old.with_name(old.name + "_emu")}
        self.others = {False: new, True: new.with_name(new.name + "_emu")}
        self.kept = {e: Kept(path) for e, path in self.programs.items() if path.exists()}
        self.verbose = verbose
        self.counts = collections.Counter()
        self.messages = set()  # of OLD

    def has_programs(self, case):
        return case.emulated in self.kept and self.others[case.emulated].exists()

    def compare(self, case, before):
        """before: the case that has saved what this one begins with, or None."""
        start = time.time()
        kept = self.kept[case.emulated]
        begin = kept.checkpoints(before) if before else None
        old = kept.result(case, begin)
        new = run(self.others[case.emulated], case, begin)
        found = differences(old, new)
        shown = found if self.verbose else found[:1]
        more = f" (and {len(found) - 1} more)" if len(found) > len(shown) else ""
        for what, was, is_now in shown:
            report(f"{case.name}: {what}: {cut(was)} -> {cut(is_now)}{more}")
        self.counts["different" if found else "equal"] += 1
        self.messages.add(old.get("message", ""))
        if not case.from_help and case.refused != (old["exit code"] != "0"):
            self.counts["unexpected"] += 1
            said = old.get("message", "")
            report(f"{case.name}: OLD ends with exit code {old['exit code']}: {said}")
        if self.verbose:
            report(f"{case.name}: {time.time() - start:.1f} s")

    def run(self, cases, chosen, jobs):
        """Cases that begin with the checkpoints of another one come after all others."""
        by_name = {case.name: case for case in cases}
        first = [case for case in chosen if not case.after]
        needed = {case.after for case in chosen if case.after} - {case.name for case in first}
        with ThreadPoolExecutor(jobs) as pool:
            saved = [by_name[name] for name in sorted(needed)]
            work = [pool.submit(self.kept[c.emulated].result, c, None) for c in saved]
            work += [pool.submit(self.compare, case, None) for case in first]
            for job in work:
                job.result()
            later = [case for case in chosen if case.after]
            work = [pool.submit(self.compare, case, by_name[case.after]) for case in later]
            for job in work:
                job.result()


# --- The command line ----------------------------------------------------------------------------


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("programs", nargs="*", type=Path, metavar="OLD NEW")
    parser.add_argument("--list", action="store_true", help="print the command lines, run none")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT")
    parser.add_argument("--sample", type=int, metavar="N", help="N cases by chance")
    parser.add_argument("--seed", type=int, help="of --sample; default: another one each time")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default 1)")
    parser.add_argument("--verbose", action="store_true", help="all differences, and times")
    arguments = parser.parse_args()
    if len(arguments.programs) != 2 and not (arguments.list and not arguments.programs):
        parser.error("give two programs, OLD and NEW")
    arguments.programs = [path.resolve() for path in arguments.programs or [ROOT / "train_gpt"]]
    for path in arguments.programs:
        if not path.is_file():
            parser.error(f"there is no program {path}")
    return arguments


def flags_of(program):
    """Flags of --help, with their choices."""
    done = subprocess.run(
        [program, "--help", "all"], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    return same_bits_cases.flags_of_help(done.stdout)


def find_pairs_without_case(program, messages):
    """Rows of --compat that no message has quoted."""
    done = subprocess.run(
        [program, "--compat"], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    for one, other, why in re.findall(r"(?m)^  (--\S+) +with (--\S+) +(.*)$", done.stdout):
        if not any(said.startswith(f"{one} with {other}: {why}") for said in messages):
            yield f"no command line is refused for {one} with {other}: {why}"


def choose(cases, arguments):
    chosen = [c for c in cases if all(text in c.name for text in arguments.only)]
    if arguments.sample is not None:
        seed = random.randrange(1 << 30) if arguments.seed is None else arguments.seed
        print(f"seed {seed}")
        chosen = random.Random(seed).sample(chosen, min(arguments.sample, len(chosen)))
    return chosen


def print_list(cases):
    for case in cases:
        program = "train_gpt_emu" if case.emulated else "train_gpt"
        after = f"   (begins with the checkpoints of: {case.after})" if case.after else ""
        print(f"{case.name} | -np {case.ranks} {program} {' '.join(case.words())}{after}")
    print(f"{len(cases)} command lines, {sum(c.emulated for c in cases)} of the emulated program")


def main():
    arguments = parse_arguments()
    start = time.time()
    flags = flags_of(arguments.programs[-1])
    cases = same_bits_cases.all_cases(flags)
    missing = same_bits_cases.uncovered(cases, flags)
    chosen = choose(cases, arguments)
    if arguments.list:
        print_list(chosen)
        print("".join(f"error: {line}\n" for line in missing), end="")
        return bool(missing)
    if not (KEPT / "data").exists():
        with tempfile.TemporaryDirectory() as name:
            make_data(Path(name) / "data")
            shutil.copytree(Path(name) / "data", KEPT / "data", dirs_exist_ok=True)
    comparison = Comparison(*arguments.programs, arguments.verbose)
    runnable = [case for case in chosen if comparison.has_programs(case)]
    if len(runnable) < len(chosen):
        print(f"{len(chosen) - len(runnable)} command lines left out: no emulated programs")
    comparison.run(cases, runnable, arguments.jobs)
    forget_old_programs()
    if len(runnable) == len(cases):
        missing += find_pairs_without_case(arguments.programs[0], comparison.messages)
    for line in missing:
        print(f"error: {line}")
    counts = comparison.counts
    print(f"{time.time() - start:.0f} s; {counts['unexpected']} ended otherwise than expected")
    print(f"{counts['equal']} equal, {counts['different']} different")
    return bool(counts["different"] or counts["unexpected"] or missing)


if __name__ == "__main__":
    sys.exit(main())
