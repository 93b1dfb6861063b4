"""encode_blocks.py: turns the blocks of prepare_data.py's sources into tokens, on all cores.

    Encoder          a block -> what it adds to each side; the same bytes in any process
    encoded          (block, result) of blocks, in their order; a few of each worker wait until it
                     is their turn, never more
    Progress         a line on a terminal: how far, how fast, how long still

Standard library only.
"""

import collections
import hashlib
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace

from data_files import EXIT_RESOURCES, Failure
from text_sources import BAD_RECORD, NO_UTF8, Item, add_lost, documents_of

WAITING = 4  # blocks or results for each worker
CHANGED = "that the tokenizer has no tokens for, or changes"


@dataclass
class Part:
    """Tokens that are added to a side. side None: the one who writes them chooses."""

    side: str | None
    begins: bool  # with a document
    tokens: list  # packed
    documents: int = 0
    size: int = 0  # bytes of text


@dataclass
class Result:
    parts: list
    left_out: int = 0  # records that cannot be read
    reason: str = ""  # of the first of them
    lost: dict = field(default_factory=dict)  # see add_lost


def clean(text):
    """(text, as UTF-8, bytes that changed): half of a pair of surrogates, which JSON can spell,
    becomes U+FFFD."""
    try:
        return text, text.encode(), 0
    except UnicodeEncodeError:
        good = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return good, good.encode(), 3 * (good.count("\ufffd") - text.count("\ufffd"))


class Encoder:
    def __init__(self, tokenizer, rules):
        self.tokenizer, self.rules = tokenizer, rules
        self.end = tokenizer.pack([tokenizer.end_of_text])

    def __call__(self, block):
        with self.tokenizer.guarded():
            return self.result(block)

    def result(self, block):
        result = Result([])
        items = block.data if block.kind == "items" else self.items(block, result)
        for item in items:
            begins = item.before is None
            part = result.parts[-1] if result.parts else None
            if part is None or part.side != item.side or item.side is None:
                part = Part(item.side, begins, [])
                result.parts.append(part)
            if begins:
                part.tokens.append(self.end)
            tokens, lost = self.tokenizer.encode_after(item.before or "", item.data)
            if lost:
                add_lost(result.lost, {item.path: {CHANGED: lost}})
            part.tokens.append(tokens)
            part.documents += begins
            part.size += item.size
        for part in result.parts:
            part.tokens = b"".join(part.tokens)
        return result

    def items(self, block, result):
        def bad(reason, size):
            if not self.rules.skip:
                raise Failure(f"{reason} (--skip-bad leaves such records out)")
            result.left_out += 1
            result.reason = result.reason or reason
            add_lost(result.lost, {block.path: {BAD_RECORD: size}})

        for text in documents_of(block, self.rules, self.tokenizer.forbidden, bad):
            text, data, lost = clean(text)
            if lost:
                add_lost(result.lost, {block.path: {NO_UTF8: lost}})
            side = self.rules.side(hashlib.sha256(data).hexdigest())
            yield Item(side, text, len(data), block.path)


def texts_of(blocks, encoder, most):
    """The documents' texts in blocks that are not held out, until there are `most` characters: to
    train a tokenizer on."""
    for block in blocks:
        items = block.data if block.kind == "items" else encoder.items(block, Result([]))
        for item in items:
            if item.side != "val":
                yield item.data
                most -= len(item.data)
        if most <= 0:
            return


# --------------------------------------------------------------------------------------------------
# Processes


def begin_worker(encode):
    """A worker has the tokenizer already where it is forked. Ctrl-C ends the one who sends, and
    that ends its workers, however it ends."""
    global encoder
    encoder = encode
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def work(block):
    try:
        return encoder(block)
    except Failure as failure:
        return str(failure), failure.status


def encoded(blocks, encode, count):
    """(block without its data, result) of each block in order, by `count` processes. Few blocks are
    not worth any. What was read before a failure to read is used."""
    blocks, failure, waiting = iter(blocks), None, collections.deque()
    first = list(itertools.islice(blocks, 2))
    upcoming = itertools.chain(first, blocks)
    if count == 1 or len(first) < 2:
        for block in upcoming:
            yield block, encode(block)
        return
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    pool = ProcessPoolExecutor(count, context, begin_worker, (encode,))
    try:
        while True:
            while not failure and len(waiting) < WAITING * count:
                try:
                    block = next(upcoming, None)
                except Failure as error:
                    failure = error
                    break
                if block is None:
                    break
                waiting.append((replace(block, data=None), pool.submit(work, block)))
            if not waiting:
                break
            block, job = waiting.popleft()
            result = job.result()
            if isinstance(result, tuple):
                raise Failure(*result)
            yield block, result
    except BrokenProcessPool as error:
        raise Failure(
            "a worker ended: too little memory? --workers 1 takes least", EXIT_RESOURCES
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)
    if failure:
        raise failure


def cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# --------------------------------------------------------------------------------------------------


class Progress:
    """A line on standard error, if that is a terminal; `total` bytes to read, 0: unknown."""

    EVERY = 0.5  # seconds

    def __init__(self, total, before=0):
        self.total, self.before, self.begin, self.shown = total, before, time.monotonic(), 0
        self.on = sys.stderr.isatty()

    def show(self, read, text):
        """read: bytes of the input; text: bytes of text in this run."""
        now = time.monotonic()
        if not self.on or now < self.shown + self.EVERY:
            return
        self.shown, took = now, max(now - self.begin, 1e-9)
        line = f"{text / 1e6:.1f} MB of text, {text / 1e6 / took:.1f} MB/s"
        if self.before < read <= self.total:
            left = int(took * (self.total - read) / (read - self.before))
            clock = f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02}"
            line = f"{100 * read / self.total:5.1f} % | {line} | {clock} left"
        print(f"\r{line:<78}", end="", file=sys.stderr, flush=True)

    def end(self):
        if self.on and self.shown:
            print(f"\r{'':78}\r", end="", file=sys.stderr, flush=True)
