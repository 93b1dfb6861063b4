#!/usr/bin/env python3
"""lint.py: what no other tool of lint.sh looks for in the sources.

    python3 scripts/lint.py [FOLDER]      of the project; default: the one that this script is in

    spaces     trailing white space, tabs
    columns    lines of more than 100 columns: of product code, scripts, the Makefile
               (clang-format keeps C's)
    syntax     Python that does not compile
    comma      a statement of C that ends in a comma, so that the next line belongs to it
    comments   a name of a file that does not exist; (FILE: WORD) where the file has no such word
    layers     docs/source.md lists the folders from the top layer to the bottom, and every file; a
               file includes only files of its own folder and of folders below it, never in a circle
    uses       a file includes each file whose functions, types or constants it uses, or one that
               passes them on ("IWYU pragma: export" behind its include)

Prints a line for each finding; the exit status is 1 if there is one.
"""

import ast
import io
import re
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path

FOLDERS = (
    ".", "cli", "run", "report", "planner", "plan", "executor", "schedule", "checkpoint", "privacy",
    "text", "state", "model", "comm", "ops", "ops/cpu", "ops/cuda", "base", "test", "scripts",
    "scripts/papers", "scripts/recipes", "docs", "docs/results",
)
C_LIKE = (".c", ".h", ".cu", ".cuh")
SCRIPTS = (".py", ".js", ".sh", ".sbatch")
COLUMNS = 100
# Names of files of others. What follows dev/data/ is llm.c's, too.
FOREIGN = {"llm.c", "cmocka.h", "sodium.h", "pcre2.h", "utf8proc.h", "modeling_gpt2.py", "Python.h"}
FILE_NAME = re.compile(
    r"(?<![\w/.*<{$-])((?:[\w.-]+/)*[\w-]+\.(?:h|c|cu|cuh|py|sh|sbatch))(?![\w(*/])"
)


def c_comments(text):
    """(line number, text) of each comment of C."""
    for found in re.finditer(r'"(?:\\.|[^"\\\n])*"|//([^\n]*)|/\*(.*?)\*/', text, flags=re.S):
        said = found[1] if found[1] is not None else found[2]
        if said is not None:
            yield text.count("\n", 0, found.start()) + 1, said


def python_comments(text):
    """The same of Python, with what describes a module, class or function."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(
            node, clean=False
        ):
            first = node.body[0].lineno
            yield from enumerate(ast.get_docstring(node, clean=False).split("\n"), first)


def shell_comments(text):
    for number, line in enumerate(text.split("\n"), 1):
        if re.match(r"\s*#", line):
            yield number, line


def prose(text):
    return enumerate(text.split("\n"), 1)


def blank(text):
    """C with spaces for comments, texts, characters and lines of the preprocessor."""
    hide = lambda found: re.sub(r"[^\n]", " ", found[0])
    text = re.sub(
        r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'", hide, text, flags=re.S
    )
    return re.sub(r"(?m)^#(?:.*\\\n)*.*$", hide, text)


def begins_list(before, stack):
    """Does the brace after this text begin a list (initial values, an enum), and no block?"""
    in_list = bool(stack) and stack[-1] in ("(", "[", "list")
    return in_list or bool(re.search(r"(=|,|\breturn|\benum(\s+\w+)?)\s*$", before[-80:]))


def swallowing_commas(text):
    """Numbers of the lines that end in a comma between statements: the next line begins where the
    statement does."""
    text = blank(text)
    lines = text.split("\n")
    indent = lambda number: len(lines[number - 1]) - len(lines[number - 1].lstrip())
    stack, begins, number, found = [], 0, 1, []
    for at, sign in enumerate(text):
        number += sign == "\n"
        if sign in "([":
            stack.append(sign)
        elif sign == "{":
            stack.append("list" if begins_list(text[:at], stack) else "block")
        elif sign in ")]}" and stack:
            stack.pop()
        if sign in ";{}":
            begins = 0
        elif not sign.isspace() and not begins:
            begins = number
        in_block = bool(stack) and stack[-1] == "block"
        if (
            sign == ","
            and in_block
            and number < len(lines)
            and not text[at + 1 :].split("\n", 1)[0].strip()
            and indent(number + 1) == indent(begins or number)
        ):
            found.append(number)
    return found


class Project:
    def __init__(self, root):
        self.root, self.findings, self.reach = Path(root), [], {}
        paths = (
            path
            for folder in FOLDERS
            for path in sorted((self.root / folder).glob("*"))
            if path.is_file()
        )
        self.files = {
            str(path.relative_to(self.root)): path
            for path in paths
            if path.suffix in (*C_LIKE, *SCRIPTS, ".md") or path.name == "Makefile"
        }
        for path in sorted((self.root / "test").glob("*/*.py")):
            self.files[str(path.relative_to(self.root))] = path
        self.text = {name: path.read_text(errors="replace") for name, path in self.files.items()}

    def say(self, name, number, what):
        self.findings.append(f"{name}:{number}: {what}")

    def named(self, name):
        """The files that a name in a comment may mean."""
        return [file for file in self.files if file == name or file.endswith("/" + name)]

    def spaces(self):
        for name, text in self.text.items():
            for number, line in enumerate(text.split("\n"), 1):
                if line != line.rstrip() or ("\t" in line and name != "Makefile"):
                    self.say(name, number, "trailing white space or tab")

    def columns(self):
        for name, text in self.text.items():
            product = name.endswith(C_LIKE) and not name.startswith("test/")
            if product or name.endswith((".py", ".js", ".sh")) or name == "Makefile":
                for number, line in enumerate(text.expandtabs(4).split("\n"), 1):
                    if len(line) > COLUMNS:
                        self.say(name, number, f"a line of {len(line)} columns")

    def syntax(self):
        for name in self.files:
            if name.endswith(".py"):
                try:
                    ast.parse(self.text[name])
                except SyntaxError as error:
                    self.say(name, error.lineno, error.msg)

    def comma(self):
        for name in self.files:
            if name.endswith(C_LIKE):
                for number in swallowing_commas(self.text[name]):
                    self.say(
                        name, number,
                        "a statement ends in a comma and takes in the next: end it with a"
                        " semicolon",
                    )

    def comments(self):
        readers = {
            **dict.fromkeys((*C_LIKE, ".js"), c_comments),
            ".py": python_comments,
            ".sh": shell_comments,
            ".sbatch": shell_comments,
            "": shell_comments,
            ".md": prose,
        }
        for name, text in self.text.items():
            if name.endswith(".py") and any(
                finding.startswith(name + ":") for finding in self.findings
            ):
                continue  # it does not compile
            for number, said in readers[Path(name).suffix](text):
                self.check_names(name, number, said)

    def check_names(self, name, number, said):
        said = re.sub(r"https?://\S+", " ", said)
        for found in FILE_NAME.findall(said):
            if found not in FOREIGN and not found.startswith("dev/data/") and not self.named(found):
                self.say(name, number, f"there is no file {found}")
        for file, word in re.findall(r"\(([\w/]+\.(?:h|c|cu|cuh|py)): (\w+)", said):
            if self.named(file) and not any(
                re.search(rf"\b{word}\b", self.text[one], re.I) for one in self.named(file)
            ):
                self.say(name, number, f"{file} has no {word}")

    def sources(self):
        """The files of the program."""
        return [f for f in self.files if f.endswith(C_LIKE) and not f.startswith("test/")]

    def includes(self, name):
        """{included file of the program: line}"""
        return {
            found[1]: self.text[name].count("\n", 0, found.start()) + 1
            for found in re.finditer(r'(?m)^#include "(.*)"', self.text[name])
            if found[1] in self.files and not found[1].startswith("test/")
        }

    def layers(self):
        page = self.text.get("docs/source.md", "")
        rows = re.findall(r"(?m)^\| (?:`(\w+)/`|the program) \| [^|]* \|([^|\n]*)\|$", page)
        layer = {}  # of a folder, or of a file of the top level
        for number, (folder, files) in enumerate(rows):
            layer.update({folder: number} if folder else {})
            layer.update(dict.fromkeys(re.findall(r"`([^`]+)`", files), number))
        of = lambda name: layer.get(name.split("/")[0])
        listed = re.findall(r"(?m)^\| (`[^|]*) \| (?!\|)", page[page.find("## The files") :])
        listed = {name for cell in listed for name in re.findall(r"`([^`]+)`", cell)}
        for name in self.sources():
            if of(name) is None or name.partition("/")[2] not in listed and name not in listed:
                self.say(name, 1, "is not in the tables of docs/source.md")
                continue
            for other, line in self.includes(name).items():
                if of(other) is not None and of(other) < of(name):
                    self.say(name, line, f"includes {other}, of a higher layer (docs/source.md)")
        self.circles()

    def circles(self):
        done = set()

        def visit(name, path):
            if name in path:
                circle = [*path[path.index(name) :], name]
                self.say(name, 1, "files include each other: " + " -> ".join(circle))
            elif name not in done:
                for other in self.includes(name):
                    visit(other, [*path, name])
                done.add(name)

        for name in self.sources():
            visit(name, [])

    def uses(self):
        """ops/cpu, ops/cuda and the GPU's files of comm/ are parts of one file each."""
        whole = [
            f
            for f in self.sources()
            if not f.startswith(("ops/cpu/", "ops/cuda/")) and f.endswith((".h", ".c"))
        ]
        if not shutil.which("ctags"):
            print("lint: no ctags, direct includes not checked")
            return
        said = subprocess.run(
            ["ctags", "-f", "-", "--langmap=C:+.h", "--fields=+K", "--kinds-C=degfpstu", *whole],
            cwd=self.root, capture_output=True, text=True, check=True,
        ).stdout
        homes = {}
        for name, file, _, kind in (line.split("\t")[:4] for line in said.splitlines()):
            if file.endswith(".h"):
                homes.setdefault(name, {})[file] = kind
        passed_on = {
            part: name
            for name in whole
            for part in re.findall(r'#include "(.*)" // IWYU pragma: export', self.text[name])
        }
        for name in whole:
            included = set(self.includes(name))
            text = blank(self.text[name])
            for found in re.finditer(r"(?<![.\w])(?<!->)([A-Za-z_]\w+)(\s*\()?", text):
                word, called = found.groups()
                home = homes.get(word, {})
                if len(home) != 1 or name in home:
                    continue
                (file, kind), *_ = home.items()
                file = passed_on.get(file, file)
                if kind in ("function", "prototype") and not called and "_" not in word:
                    continue  # a variable of the same name
                if file in self.reached(name) - included:
                    included.add(file)
                    line = text.count("\n", 0, found.start()) + 1
                    self.say(name, line, f"uses {word} of {file}: include it")

    def reached(self, name):
        if name not in self.reach:
            self.reach[name] = set()
            for other in self.includes(name):
                self.reach[name] |= {other} | self.reached(other)
        return self.reach[name]


def main():
    project = Project(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)
    checks = (project.spaces, project.columns, project.syntax, project.comma)
    for check in (*checks, project.comments, project.layers, project.uses):
        check()
    print("\n".join(project.findings), end="\n" if project.findings else "")
    return bool(project.findings)


if __name__ == "__main__":
    sys.exit(main())
