#!/usr/bin/env python3
"""english_corpus.py: a corpus of English prose from Debian's packages, the same each time.

    .venv/bin/python scripts/recipes/english_corpus.py            packages, text, shards, table
    .venv/bin/python scripts/recipes/english_corpus.py --list FILE --no-download --out FOLDER

english_packages.txt beside this file names the packages: version, checksum, kind, reader, files.
`apt-get download` fetches what is not in OUT/packages; nothing is installed. A version that the
archive no longer has is at snapshot.debian.org: put the file into OUT/packages.

Into OUT (data/english): packages/, documents.jsonl (one document on a line, in the order of their
checksums, so that neighbours are of different packages) and packages.md, the table of packages with
their licences. Then prepare_data.py makes english_train_*.bin, english_val_*.bin and
english_tokenizer.bin beside OUT: an own byte-pair encoding of 16,384 tokens, one percent of the
text held out, by document.

The rules, all of them:
  - A document is a page, a manual page or a source file; of books a chapter, or a part of about
    16 kB where a file has no chapters.
  - Of a page only running text is taken. What is marked as program text, table, form, script or
    navigation is left out, and so is a paragraph most of which is links.
  - A paragraph is prose if it has 8 words or more, letters and spaces are 85 % of it, a quarter of
    its words are among the most common ones of English, and at most a fifth of its words look like
    names of a program. Other paragraphs are left out. Novels, scripture and
    sayings (readers sword, austen, fortunes) keep theirs, if the document as a whole is prose.
  - A heading is kept before a paragraph that is kept.
  - A paragraph of 60 characters or more that was seen before is left out (case, digits and white
    space do not count), in all packages: repeated licences, notes, inherited descriptions.
  - A page of which less than 30 % is prose, or less than 400 bytes, is left out.

Exit status: 0 done, 2 bad input, 3 resources (a missing package or tool).
"""

import argparse
import gzip
import hashlib
import html
import json
import re
import shutil
import struct
import subprocess
import sys
import unicodedata
import zlib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from data_files import EXIT_RESOURCES, Failure  # noqa: E402

LIST = Path(__file__).resolve().parent / "english_packages.txt"

WORDS_LEAST, LETTERS_LEAST, COMMON_LEAST, NAMES_MOST = 8, 0.85, 0.25, 0.2
PROSE_LEAST, BYTES_LEAST = 0.3, 400  # of a page
REPEATED_LEAST = 60  # characters of a paragraph that is kept once
NAVIGATION_MOST = 4096  # characters; what is longer is a page in an element that is not closed
PART = 16384  # bytes of a part of a file without chapters
TOKENS = 16384

COMMON = frozenset("""
the of and to a in is that it for as with be on by are this or not you from which an at if can was
will have has all one may other when no any more but its use used they their there than then his he
her she him i we my your our me so do does only must should would could into been were had also each
these those such some what who how where out up about between after before first two same most over
own because without within while both until upon shall thou thy unto
""".split())
# Elements whose text is no running text, of HTML, Mallard and DocBook.
LEFT_OUT = frozenset("""
script style head nav header footer pre form select button svg math code-block screen
programlisting synopsis literallayout info informaltable textarea noscript iframe mediaobject
funcsynopsis cmdsynopsis refnamediv indexterm bibliography index toc
""".split())
INLINE = frozenset("""
a b i u s em strong tt code span font small big sub sup cite q var kbd samp abbr acronym dfn mark
ins del wbr label bdi bdo ruby img nobr app gui guiseq key keyseq cmd file input output sys link
emphasis literal filename command option replaceable guilabel guimenu guimenuitem guibutton
menuchoice application xref ulink quote keycap userinput varname function parameter firstterm
envar type email citetitle trademark productname prompt constant classname interface guisubmenu
shortcut keycombo systemitem computeroutput acronym phrase anchor remark
""".split())
PAGES = frozenset("html body main article".split())
HEADINGS = frozenset("h1 h2 h3 h4 h5 h6 title".split())
NAVIGATION = re.compile(
    r"(?<![a-z])(nav\w*|sidebar\w*|sphinxsidebar|footer|header|toc|contents|menu|related"
    r"|breadcrumbs?|genindextable|indextable|highlight\S*|codeblock|sourcecode|memproto"
    r"|memdoc-proto|docblock-short|synopsis|programlisting|screen|headerlink|permalink|toplang"
    r"|bottomlang|viewcode\S*|sig|fragment|qindex|line-block-nav|refsynopsisdiv|noprint|buttons?"
    r"|literallayout)(?![a-z])"
)
PROGRAM = re.compile(r"[_(){}\[\]<>=|\\/]\S|::|--\w|[a-z][A-Z]|^[-@$%#&]|\w\.\w\w+")
WORD = re.compile(r"[^\W\d_]+")
UNWANTED = dict.fromkeys([*range(9), *range(14, 28), 127, 0xAD, 0xB6, 0x200B, 0xF0C1, 0xFEFF])
MARKUP = re.compile(  # in texts of games
    r"</?(?:[ib]|big|small|span|color\w*|info|good|bad|neutral|bold|italic|ref|header|img)\b[^<>]*>"
)
STRINGS = re.compile(r'"([^"\\]*(?:\\.[^"\\]*)*)"|`([^`]*)`', re.S)


# --------------------------------------------------------------------------------------------------
# Cleaning: a page is a list of (kind, text): "heading", "text", or "other" for what is left out


def tidy(text):
    """One line of a text: Unicode's NFC, without control characters and marks of links."""
    return " ".join(unicodedata.normalize("NFC", text).translate(UNWANTED).split())


def is_prose(text, least=WORDS_LEAST):
    words = text.split()
    if len(words) < least or "\ufffd" in text:
        return False
    return (
        sum(map(str.isalpha, text)) + len(words) - 1 >= LETTERS_LEAST * len(text)
        and sum(map(COMMON.__contains__, WORD.findall(text.lower()))) >= COMMON_LEAST * len(words)
        and sum(map(bool, map(PROGRAM.search, words))) <= NAMES_MOST * len(words)
        and max(map(len, words)) < 60
    )


class Cleaner:
    """Keeps what is prose, and each long paragraph once."""

    def __init__(self):
        self.seen, self.counts = set(), Counter()

    def is_new(self, text):
        if len(text) < REPEATED_LEAST:
            return True
        key = re.sub(r"[\d\s]+", "", text.lower())
        key = hashlib.blake2b(key.encode(), digest_size=8).digest()
        if key in self.seen:
            return False
        self.seen.add(key)
        return True

    def document(self, blocks, is_book=False):
        """The text of a page, or None if it is left out."""
        kept, heading, all_bytes, prose_bytes = [], None, 0, 0
        for kind, text in blocks:
            all_bytes += len(text.encode())
            self.counts["read"] += len(text.encode()) + 2  # with what parts paragraphs
            if kind == "heading":
                heading = text
            elif kind == "text" and (is_book or is_prose(text)):
                prose_bytes += len(text.encode())
                if not self.is_new(text):
                    self.counts["repeated"] += len(text.encode())
                    continue
                if heading:
                    kept.append(heading)
                kept.append(text)
                heading = None
        text = "\n\n".join(kept)
        if len(text.encode()) < BYTES_LEAST or prose_bytes < PROSE_LEAST * all_bytes:
            return None
        if is_book and not is_prose(" ".join(kept), 0):
            return None  # another language, or a list
        self.counts["kept"] += len(text.encode())
        self.counts["documents"] += 1
        return text


# --------------------------------------------------------------------------------------------------
# Readers: the pages of a file


def text_of(path):
    data = path.read_bytes()
    if path.suffix in (".gz", ".dz"):
        data = gzip.decompress(data)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")


def paragraphs(text):
    """Of plain text, by blank lines and lines of %; one that is indented by 4 more than its file is
    program text."""
    text = re.sub(r"(?m)^%+$", "", text)
    pieces = [piece for piece in re.split(r"\n[ \t\r]*\n", text.expandtabs()) if piece.strip()]
    indent = [min(len(x) - len(x.lstrip()) for x in p.split("\n") if x.strip()) for p in pieces]
    usual = Counter(indent).most_common(1)[0][0] if indent else 0
    for piece, depth in zip(pieces, indent):
        lines = [line.strip() for line in piece.split("\n")]
        lines = [line for line in lines if line.strip("-=~^*#+_.% ")]
        kind = "text" if depth <= usual + 3 else "other"
        yield kind, tidy(" ".join(lines))


class Page:
    """Walks a tree of elements."""

    def __init__(self):
        self.blocks, self.parts, self.linked = [], [], 0

    def end(self, kind="text"):
        text = tidy("".join(self.parts))
        if text:
            is_links = kind == "text" and self.linked > 0.6 * len(text)
            self.blocks.append(("other" if is_links else kind, text))
        self.parts, self.linked = [], 0

    def add(self, text, in_link):
        if text:
            self.parts.append(text)
            self.linked += len(text) if in_link else 0

    def walk(self, element, in_link=False):
        if not isinstance(element.tag, str):  # a comment
            return
        tag = element.tag.rpartition("}")[2].lower()
        named = f"{element.get('class') or ''} {element.get('id') or ''}".lower()
        if tag in LEFT_OUT or (tag not in PAGES and NAVIGATION.search(named)):
            text = tidy("".join(element.itertext()))
            if tag in LEFT_OUT or len(text) < NAVIGATION_MOST:
                self.end()
                self.blocks += [("other", text)] if tag == "pre" else []
                return
        is_block = tag not in INLINE
        if is_block:
            self.end()
        in_link |= tag in ("a", "link", "ulink", "xref")
        self.add(element.text, in_link)
        for child in element:
            self.walk(child, in_link)
            self.add(child.tail, in_link)
        if is_block:
            self.end("heading" if tag in HEADINGS else "text")


def read_html(path):
    from lxml import etree, html as parser

    data = path.read_bytes()
    data = gzip.decompress(data) if path.suffix == ".gz" else data
    try:
        data.decode()
        encoding = "utf-8"
    except UnicodeDecodeError:
        encoding = "iso-8859-1"
    try:
        if ".htm" in path.name:
            tree = parser.document_fromstring(data, parser.HTMLParser(encoding=encoding))
        else:
            tree = etree.fromstring(data, etree.XMLParser(recover=True, huge_tree=True))
    except (etree.ParserError, etree.XMLSyntaxError):
        return
    page = Page()
    if tree is not None:
        page.walk(tree)
        page.end()
    yield page.blocks


def read_preformatted(path):
    text = html.unescape(re.sub(r"<[^<>]*>", "", text_of(path)))
    yield list(paragraphs(re.sub(r"\*\S+\*|\|(\S+)\|", r"\1", text)))


def read_pod(path):
    blocks = []
    for piece in re.split(r"\n\s*\n", text_of(path)):
        kind = "other" if piece[:1].isspace() else "text"
        if piece.startswith("="):
            command, _, piece = piece.partition(" ")
            kind = "heading" if command.startswith("=head") else "other"
        for _ in range(3):
            piece = re.sub(r"\b[BCFILSXZ]<([^<>]*)>", r"\1", piece)
            piece = re.sub(r"\b[BCFILS]<<+ (.*?) >>+", r"\1", piece, flags=re.S)
        names = {"lt": "<", "gt": ">", "verbar": "|", "sol": "/"}
        piece = re.sub(r"E<(\w+)>", lambda m: names.get(m[1], ""), piece)
        piece = re.sub(r"(\w[^|\s]*)\|(?=[\w/:]+)\S+", r"\1", piece)
        blocks.append((kind, tidy(piece)))
    yield blocks


def read_man(path):
    """By groff, in lines so long that each is a paragraph."""
    command = ["groff", "-mandoc", "-Tutf8", "-P-cbou", "-Kutf8", "-rLL=20000n", "-rHY=0"]
    done = subprocess.run(
        command, input=text_of(path).encode(), capture_output=True, check=False, cwd=path.parent
    )
    blocks = []
    for line in done.stdout.decode(errors="replace").replace("\u2010", "-").split("\n")[1:-2]:
        is_heading = line[:1].isupper() and len(line) < 60
        if line.strip():
            blocks.append(("heading" if is_heading else "text", tidy(line)))
    yield [(kind, t.capitalize() if kind == "heading" else t) for kind, t in blocks]


def parts_of(blocks):
    """Cuts a long file into documents of about PART bytes."""
    part, size = [], 0
    for block in blocks:
        part.append(block)
        size += len(block[1].encode())
        if size >= PART:
            yield part
            part, size = [], 0
    if part:
        yield part


def read_dictionary(path):
    """Of dictd: entries begin at the left, their text is indented."""
    blocks, entry = [], ""
    for line in text_of(path).split("\n"):
        if line[:1].strip() and entry:
            blocks += dictionary_entry(entry)
            entry = ""
        entry += line + "\n"
    yield from parts_of(blocks + dictionary_entry(entry))


def dictionary_entry(entry):
    if "│" in entry or "00-database" in entry:
        return []
    head, _, body = entry.partition("\n")
    name = re.sub(r"\s*\\.*?\\.*|\s{2,}.*", "", head).strip()
    body = re.sub(r"\[(1913 Webster|Webster 1913 Suppl\.|PJC|WordNet[^\]]*|RP|AS)\]", "", body)
    body = re.sub(r"\[[a-z]*\^?([a-z]|[a-z]{2})\]?", r"\1", body)
    body = re.sub(r"\(?\d{4}-\d\d-\d\d\)|[{}]", "", body)
    kept = [text for _, text in paragraphs(body)]
    return [("heading", name)] + [("text", text) for text in kept] if kept else []


def read_fortunes(path):
    found = text_of(path).split("\n%\n")
    yield from parts_of([("text", tidy(x)) for x in found if x.strip()])


def read_strings(path):
    """What stands in quotes in the data of a game."""
    blocks = []
    for found in STRINGS.finditer(text_of(path)):
        text = found[1] if found[1] is not None else found[2]
        text = text.replace("\\\n", "").replace('\\"', '"').replace("\\t", " ")
        text = MARKUP.sub("", text)
        blocks += [("text", tidy(x)) for x in re.split(r"\\n|\n\s*\n", text) if len(x.split()) > 3]
    yield from parts_of(blocks)


SWORD_PARAGRAPH = re.compile(
    r"<(?:title|/title|p|/p|lg|/lg|lb|list|item|/item|div [^>]*(?:x-p|section|paragraph))\b[^>]*>"
)


def read_sword(path):
    """A module of SWORD: blocks of zlib, one a book or a chapter, in OSIS; path is their index."""
    index, data = path.read_bytes(), path.with_name(path.name[:-1] + "z").read_bytes()
    for place in range(0, len(index), 12):
        begin, size, _ = struct.unpack("<III", index[place : place + 12])
        text = zlib.decompress(data[begin : begin + size]).decode(errors="replace")
        text = re.sub(r"<note\b[^>]*>.*?</note>", "", text, flags=re.S)
        for chapter in re.split(r"<chapter\b[^>]*>", text):
            chapter = SWORD_PARAGRAPH.sub("\n\n", chapter)
            chapter = html.unescape(re.sub(r"<[^<>]*>", "", chapter)).replace("\0", " ")
            pieces = [tidy(piece) for piece in re.split(r"\n\s*\n", chapter)]
            yield from parts_of([("text", piece) for piece in pieces if piece])


def read_austen(path):
    """Vectors of strings in an R package's data: the lines of novels."""
    data, place = path.read_bytes(), 0
    while place < len(data):
        stream = zlib.decompressobj()
        lines = longest_strings(stream.decompress(data[place + 4 :]))
        place = len(data) - len(stream.unused_data)
        novel = "\n".join(lines)
        for chapter in re.split(r"(?im)^\s*(?=(?:chapter|letter) [\divxlc]+\b)", novel):
            yield [("text", text) for _, text in paragraphs(chapter)]


def longest_strings(data):
    """The strings of the first long vector in a serialized R object."""
    for found in re.finditer(rb"\0\0\0\x10(.{4})", data, re.S):
        count, place, lines = struct.unpack(">I", found[1])[0], found.end(), []
        if not 1000 < count < 1 << 20:
            continue
        for _ in range(count):
            size = struct.unpack(">i", data[place + 4 : place + 8])[0]
            lines.append(data[place + 8 : place + 8 + max(size, 0)].decode(errors="replace"))
            place += 8 + max(size, 0)
        return lines
    return []


READERS = {
    "html": read_html,
    "text": lambda path: [list(paragraphs(text_of(path)))],
    "parts": lambda path: parts_of(paragraphs(text_of(path))),
    "preformatted": read_preformatted,
    "pod": read_pod,
    "man": read_man,
    "dictionary": read_dictionary,
    "fortunes": read_fortunes,
    "strings": read_strings,
    "sword": read_sword,
    "austen": read_austen,
}
WHOLE = ("sword", "austen", "fortunes")  # readers of books: short paragraphs are kept
KINDS = ("book", "encyclopedia", "guide", "reference", "game")


# --------------------------------------------------------------------------------------------------
# Packages


class Package:
    """A line of the list: name, version, checksum, kind, reader, patterns of files (those behind !
    are left out), and licence=NAME where the copyright file does not say it for machines."""

    def __init__(self, line):
        fields = line.split()
        if len(fields) < 6 or fields[3] not in KINDS or fields[4] not in READERS:
            raise Failure(f"no package: {line!r}")
        self.name, self.version, self.checksum, self.kind, self.reader = fields[:5]
        self.said = "".join(p[8:] for p in fields[5:] if p.startswith("licence=")).replace("_", " ")
        self.patterns = [p for p in fields[5:] if p[0] != "!" and p[:8] != "licence="]
        self.without = [p[1:] for p in fields[5:] if p[0] == "!"]

    def file(self, folder):
        version = self.version.replace(":", "%3a")
        found = sorted(folder.glob(f"{self.name}_{version}_*.deb"))
        return found[0] if found else None

    def paths(self, folder):
        found = {path for pattern in self.patterns for path in folder.glob(pattern)}
        found = {path for path in found if path.is_file() and not path.is_symlink()}
        return sorted(p for p in found if not any(p.match(pattern) for pattern in self.without))

    def licence(self, folder):
        """That of most files, where the package's copyright file says it for machines."""
        path = folder / "usr/share/doc" / self.name / "copyright"
        if path.parent.is_symlink():  # to the folder of a package that this one needs
            other = path.parent.readlink().name
            others = folder.parent.glob(f"{other}_*/usr/share/doc/{other}/copyright")
            path = max(others, default=path)
        text = path.read_text(errors="replace") if path.is_file() else ""
        found = re.search(r"(?ms)^Files: *\*.*?^License:[ \t]*(\S[^\n]*)", text)
        return self.said or (found[1].strip() if found else "see its copyright file")


def download(packages, folder):
    folder.mkdir(parents=True, exist_ok=True)
    missing = [f"{p.name}={p.version}" for p in packages if not p.file(folder)]
    if missing:
        done = subprocess.run(["apt-get", "download", *missing], cwd=folder, check=False)
        if done.returncode:
            raise Failure(
                "apt-get download failed: apt-get update, or get old versions from"
                f" snapshot.debian.org into {folder}", EXIT_RESOURCES
            )


def unpacked(package, packages, folder):
    """The folder with a package's files."""
    path = package.file(packages)
    if path is None:
        raise Failure(f"{package.name} {package.version} is not in {packages}", EXIT_RESOURCES)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != package.checksum:
        raise Failure(f"{path}: its checksum is {found}, not {package.checksum}")
    target, part = folder / path.stem, folder / "part"
    if not target.is_dir():
        shutil.rmtree(part, ignore_errors=True)  # of a run that was stopped
        part.mkdir(parents=True)
        if subprocess.run(["dpkg-deb", "-x", path, part], check=False).returncode:
            raise Failure(f"{path} cannot be unpacked", EXIT_RESOURCES)
        part.rename(target)
    return target


def documents_of(package, folder, cleaner):
    for path in package.paths(folder):
        for blocks in READERS[package.reader](path):
            text = cleaner.document(blocks, package.reader in WHOLE)
            if text:
                yield str(path.relative_to(folder)), text


def write_table(path, rows):
    """rows: (package, licence, counts)."""
    total = sum(counts["kept"] for _, _, counts in rows)
    lines = [
        "| package | version | kind | licence | documents | bytes | of the text read |",
        "|---|---|---|---|---|---|---|",
    ]
    for package, licence, counts in rows:
        share = counts["kept"] / max(counts["read"], 1)
        lines.append(
            f"| {package.name} | {package.version} | {package.kind} | {licence} |"
            f" {counts['documents']} | {counts['kept']} | {share:.0%} |"
        )
    lines += ["", "| kind | bytes | share |", "|---|---|---|"]
    for kind in KINDS:
        size = sum(counts["kept"] for package, _, counts in rows if package.kind == kind)
        lines.append(f"| {kind} | {size} | {size / max(total, 1):.1%} |")
    lines.append(f"| all | {total} | of {len(rows)} packages |")
    path.write_text("\n".join(lines) + "\n")


def make_documents(packages, out):
    """documents.jsonl and packages.md."""
    seen, rows, documents = set(), [], []
    for package in packages:
        folder = unpacked(package, out / "packages", out / "unpacked")
        cleaner = Cleaner()
        cleaner.seen = seen
        for path, text in documents_of(package, folder, cleaner):
            digest = hashlib.sha256(text.encode()).hexdigest()
            documents.append((digest, package.name, path, text))
        rows.append((package, package.licence(folder), cleaner.counts))
        print(f"{package.name}: {dict(cleaner.counts)}", flush=True)
    if not documents:
        raise Failure("no prose in the packages")
    documents.sort()
    with open(out / "documents.jsonl", "w", encoding="utf-8") as file:
        for _, name, path, text in documents:
            record = {"text": text, "package": name, "path": path}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    write_table(out / "packages.md", rows)


def run(options):
    lines = options.list.read_text().split("\n")
    packages = [Package(line) for line in lines if line.strip() and line[0] != "#"]
    if not options.no_download:
        download(packages, options.out / "packages")
    make_documents(packages, options.out)
    if options.tokens:
        prepare = [sys.executable, ROOT / "scripts/prepare_data.py"]
        prepare += [options.out / "documents.jsonl", "--train-tokenizer", str(options.tokens)]
        prepare += ["--val-fraction", "0.01"]
        prepare += ["--out", options.out.parent, "--name", options.out.name]
        return subprocess.run([*prepare, "--workers", "1"], check=False).returncode
    return 0


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "data/english", metavar="FOLDER")
    parser.add_argument("--list", type=Path, default=LIST, metavar="FILE", help="of packages")
    parser.add_argument("--no-download", action="store_true", help="take what is in OUT/packages")
    parser.add_argument("--tokens", type=int, default=TOKENS, metavar="N",
                        help="of the vocabulary; 0: no shards")
    try:
        return run(parser.parse_args())
    except Failure as failure:
        print(f"english_corpus.py: {failure}", file=sys.stderr)
        return failure.status
    except ImportError as error:
        print(f"english_corpus.py: pip install lxml ({error})", file=sys.stderr)
        return EXIT_RESOURCES


if __name__ == "__main__":
    sys.exit(main())
