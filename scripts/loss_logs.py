"""loss_logs.py: the losses that training programs leave behind, whoever wrote them.

    train_gpt      JSON lines (--log), read by run_log.py
    llm.c          main.log: "s:0 tel:11.0", "s:0 trl:10.9 lr:0.000600 norm:15.00"
    nanoGPT        what it prints: "iter 0: loss 4.2664, ...", "step 0: train loss ..."
    Hugging Face   trainer_state.json of the Trainer
    TensorBoard    event files: of train_gpt, torchtitan, Megatron-LM, DeepSpeed, Lightning
    CSV            columns step and loss; where there are, also val_loss and tokens

A form is known by its content, not by its name. Step 1 is the first one, and its loss is that of
the model before its update: llm.c and nanoGPT count training steps from 0, and are shifted. A
validation at step N is of the model after N updates, in all forms.

Files are untrusted. read_curve raises OSError or BadLog, each with one line to show.
"""

import csv
import io
import json
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path

from regular_files import TEXT_MOST, open_regular, read_regular
from run_log import LARGEST, BadLog, load

STEP_MOST = 1 << 53
LARGEST_FP32 = 3.4e38
RECORD_MOST = 1 << 24  # bytes; in an event file whatever is longer is damage
# Of TensorBoard: the first tag that a file has counts.
TRAIN_TAGS = (
    "train/loss",  # train_gpt, Hugging Face
    "loss_metrics/global_avg_loss",  # torchtitan
    "lm loss",  # Megatron-LM
    "Train/Samples/train_loss",  # DeepSpeed
    "train_loss",  # Lightning
    "loss",
)
VAL_TAGS = ("val/loss", "validation_metrics/loss", "lm loss validation", "eval/loss", "val_loss")
TOKEN_TAGS = ("n_tokens_seen", "train/num_input_tokens_seen")
OF_SAMPLES = "Train/Samples/train_loss"  # its steps count samples
MEANS = ("lm loss",)
COLUMNS = {  # of CSV, in lower case
    "step": ("step", "steps", "iter", "iteration", "global_step", "_step"),
    "train": ("loss", "train_loss", "train/loss", "training_loss", *TRAIN_TAGS[1:3]),
    "val": ("val_loss", "val/loss", "eval_loss", "eval/loss", "validation_loss"),
    "tokens": ("tokens", *TOKEN_TAGS),
}


@dataclass
class Curve:
    path: Path
    form: str = ""
    train: dict = field(default_factory=dict)  # step -> loss
    val: dict = field(default_factory=dict)
    tokens: dict = field(default_factory=dict)  # step -> tokens that were trained on at its end
    lost: set = field(default_factory=set)  # steps whose training loss is infinite or not a number
    means: bool = False  # a training loss is the mean of the steps since the one before it
    decimals: int = 0  # the most that a loss is written with

    def add(self, kind, step, value):
        """Of a number or a text. The later value of a step counts: that of a resumed run."""
        if kind != "tokens":
            self.decimals = max(self.decimals, decimals(value))
        value = number_of(value) if isinstance(value, str) else value
        if not is_step(step) or not isinstance(value, (int, float)):
            return
        place = getattr(self, kind)
        place.pop(step, None)
        if kind == "train":
            self.lost.discard(step)
        if abs(value) <= LARGEST:  # neither infinite nor not a number
            place[step] = round(value) if kind == "tokens" else float(value)
        elif kind == "train":
            self.lost.add(step)

    def rounding(self):
        """Half of the last decimal that the losses were written with."""
        return 0.5 * 10.0**-self.decimals


def decimals(value):
    """How many a number is written with, or as Python writes it."""
    text = value if isinstance(value, str) else repr(value) if isinstance(value, float) else ""
    return 17 if "e" in text else len(text.partition(".")[2])


def is_step(value):
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= STEP_MOST


def number_of(text):
    """The number that a text is; None where it is none."""
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def step_of(text):
    value = number_of(text)
    whole = value is not None and 0 <= value <= STEP_MOST and value == int(value)
    return int(value) if whole else None


# --------------------------------------------------------------------------------------------------
# Texts


def read_train_gpt(curve):
    run = load(curve.path, curve.path.name)
    for kind, losses in (("train", run.train), ("val", run.val)):
        for step, loss in losses.items():
            curve.add(kind, step, loss)
    curve.lost = set() if run.hides else set(run.lost) & run.costs.keys() - run.train.keys()
    try:
        for step, tokens in run.positions("tokens").items():
            curve.add("tokens", step, tokens)
    except BadLog:
        pass  # it does not tell them


def read_lines(curve, text, rows):
    """rows: (kind, what to add to the step, pattern of a line with a step and a loss in it)."""
    for kind, shift, pattern in rows:
        for step, loss in re.findall(pattern, text, re.M):
            curve.add(kind, int(step) + shift, loss)


STEP, LOSS = r"(\d{1,15})", r"([0-9.]{1,30}|-?nan|-?inf)"
LLM_C = (("train", 1, f"^s:{STEP} trl:{LOSS}(?= |$)"), ("val", 0, f"^s:{STEP} tel:{LOSS}$"))
NANOGPT = (
    ("train", 1, f"^iter {STEP}: loss {LOSS},"),
    ("val", 0, f"^step {STEP}: train loss [0-9.na]+, val loss {LOSS}$"),
)


def read_trainer_state(curve, history):
    """The Trainer logs every logging_steps, and then the mean since the last time."""
    curve.means = True
    for entry in history if isinstance(history, list) else ():
        if isinstance(entry, dict):
            curve.add("train", entry.get("step"), entry.get("loss"))
            curve.add("val", entry.get("step"), entry.get("eval_loss"))
            curve.add("tokens", entry.get("step"), entry.get("num_input_tokens_seen"))


def columns_of(line):
    """kind -> the column of it, of the first line of a CSV file; {} where it is none."""
    for separator in ",;\t":
        names = [name.strip().strip('"').lower() for name in line.split(separator)]
        found = {
            kind: next((names.index(name) for name in known if name in names), None)
            for kind, known in COLUMNS.items()
        }
        if found["step"] is not None and (found["train"], found["val"]) != (None, None):
            return {"separator": separator, **found}
    return {}


def read_csv(curve, text, columns):
    rows = csv.reader(io.StringIO(text), delimiter=columns.pop("separator"))
    next(rows)
    at = columns.pop("step")
    try:
        for row in rows:
            step = step_of(row[at]) if at < len(row) else None
            for kind, column in columns.items():
                if column is not None and column < len(row):
                    curve.add(kind, step, row[column])
    except csv.Error as error:
        raise BadLog(f"{curve.path}: no CSV: {error}") from None


def read_text(curve, data):
    text = data.decode(errors="replace").lstrip("\ufeff")
    first = text.lstrip()[:1]
    columns = columns_of(text.split("\n", 1)[0])
    if first == "{":
        try:
            state = json.loads(text)
        except (ValueError, RecursionError):
            state = None  # lines, or it was cut off
        if isinstance(state, dict) and "log_history" in state:
            curve.form = "Hugging Face"
            read_trainer_state(curve, state["log_history"])
        elif '"log_history"' in text and '"event":' not in text:
            raise BadLog(f"{curve.path}: cut off, or no JSON")
        else:
            curve.form = "train_gpt"
            read_train_gpt(curve)
    elif columns:
        curve.form = "CSV"
        read_csv(curve, text, columns)
    elif re.search(r"^s:\d+ (trl|tel|eval):", text, re.M):
        curve.form = "llm.c"
        read_lines(curve, text, LLM_C)
    elif re.search(r"^(iter|step) \d+: ", text, re.M):
        curve.form = "nanoGPT"
        read_lines(curve, text, NANOGPT)
    else:
        raise BadLog(
            f"{curve.path}: no log that is known: train_gpt, llm.c, nanoGPT, Hugging Face,"
            " TensorBoard, or CSV whose first line has the columns step and loss"
        )


# --------------------------------------------------------------------------------------------------
# Event files of TensorBoard (docs/formats.md)


class Damage(Exception):
    pass


def crc_entry(byte):
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


CRC = [crc_entry(byte) for byte in range(256)]


def check(data, told):
    """A record's checksum: CRC-32C, rotated, plus a constant."""
    rest = 0xFFFFFFFF
    for byte in data:
        rest = CRC[(rest ^ byte) & 255] ^ rest >> 8
    rest ^= 0xFFFFFFFF
    masked = ((rest >> 15 | rest << 17) + 0xA282EAD8) & 0xFFFFFFFF
    if masked.to_bytes(4, "little") != told:
        raise Damage


def varint(data, at):
    value = shift = 0
    while at < len(data) and shift < 64:
        value |= (data[at] & 127) << shift
        if data[at] < 128:
            return value, at + 1
        at, shift = at + 1, shift + 7
    raise Damage


def proto_fields(data):
    """(number, kind, value) of each field of a message: numbers, or bytes."""
    at = 0
    while at < len(data):
        tag, at = varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = varint(data, at)
        else:
            size = {1: 8, 5: 4}.get(kind)
            if kind == 2:
                size, at = varint(data, at)
            if size is None or size > len(data) - at:
                raise Damage
            value, at = data[at : at + size], at + size
        yield tag >> 3, kind, value


def tensor_value(data):
    """The first number of a TensorProto of float or double; newer writers put scalars so."""
    type_, found = 0, None
    for number, kind, value in proto_fields(data):
        if number == 1 and kind == 0:
            type_ = value
        elif kind == 2 and number in (4, 5, 6):
            found = value
        elif (number, kind) in ((5, 5), (6, 1)):
            found = value
    form = {1: "<f", 2: "<d"}.get(type_)
    if form and found and len(found) >= struct.calcsize(form):
        return struct.unpack_from(form, found)[0]
    return None


def scalar(data):
    """(tag, value) of a Summary.Value; value None: it is no scalar."""
    tag, found = "", None
    for number, kind, value in proto_fields(data):
        if (number, kind) == (1, 2):
            tag = value.decode(errors="replace")
        elif (number, kind) == (2, 5):
            found = struct.unpack("<f", value)[0]
        elif (number, kind) == (8, 2):
            found = tensor_value(value)
    return tag, found


def records(file):
    """The records of an event file; the last one may be cut off, while it is being written."""
    while len(head := file.read(12)) == 12:
        (size,) = struct.unpack_from("<Q", head)
        check(head[:8], head[8:])
        if size > RECORD_MOST:
            raise Damage
        data, told = file.read(size), file.read(4)
        if len(data) < size or len(told) < 4:
            return
        check(data, told)
        yield data


def event_values(data):
    """(step, values, whether a session begins) of an Event."""
    step, values, begins = 0, [], False
    for number, kind, value in proto_fields(data):
        if (number, kind) == (2, 0):
            step = value
        elif (number, kind) == (5, 2):
            values = [scalar(part) for n, k, part in proto_fields(value) if (n, k) == (1, 2)]
        elif (number, kind) == (7, 2):
            begins = any((n, k, v) == (1, 0, 1) for n, k, v in proto_fields(value))
    return step, values, begins


def read_tags(paths):
    """tag -> step -> value, of all event files of a folder in the order of their names, which begin
    with the time: a session forgets what older ones have of its steps."""
    found = {}
    for path in paths:
        with open_regular(path) as file:
            try:
                for step, values, begins in map(event_values, records(file)):
                    for place in found.values() if begins else ():
                        for later in [s for s in place if s >= step]:
                            del place[later]
                    for tag, value in values:
                        if value is not None:
                            found.setdefault(tag, {})[step] = value
            except Damage:
                raise BadLog(f"{path}: a damaged event file") from None
    return found


def in_steps(path, by_samples):
    """DeepSpeed counts samples: of a batch that never changes, so the first one tells its size."""
    batch = min((at for at in by_samples if at), default=0)
    if not batch or any(at % batch for at in by_samples):
        raise BadLog(f"{path}: its steps are samples, and no multiples of the first batch")
    return {at // batch: loss for at, loss in by_samples.items()}


def shortest(value):
    """The number with the fewest digits that fp32 holds as this one: what was meant."""
    for digits in range(6, 9):
        found = float(f"{value:.{digits}g}")
        if abs(found) <= LARGEST_FP32 and struct.pack("<f", found) == struct.pack("<f", value):
            return found
    return value


def read_events(curve, paths, tag):
    found = read_tags(paths)
    train, val, tokens = (
        next((name for name in names if name in found), None)
        for names in ([tag] if tag else TRAIN_TAGS, VAL_TAGS, TOKEN_TAGS)
    )
    if train is None and (tag or val is None):
        names = ", ".join(sorted(found)[:20]) or "none"
        raise BadLog(f"{curve.path}: no tag {tag or 'of a loss that is known'}: it has {names}")
    curve.means = train in MEANS
    losses = found.get(train, {})
    losses = in_steps(curve.path, losses) if train == OF_SAMPLES else losses
    for kind, values in (
        ("train", losses), ("val", found.get(val, {})), ("tokens", found.get(tokens, {})),
    ):
        for step, value in values.items():
            curve.add(kind, step, shortest(value))


# --------------------------------------------------------------------------------------------------

IN_FOLDERS = ("log.jsonl", "main.log", "trainer_state.json")


def find_in_folder(path):
    """The event files of a folder and of those below it, or another log that lies in it."""
    events = sorted(path.rglob("*tfevents*"), key=lambda file: file.name)
    if events:
        return events
    for name in IN_FOLDERS:
        if (path / name).is_file():
            return [path / name]
    raise BadLog(f"{path}: neither event files of TensorBoard in it, nor {' or '.join(IN_FOLDERS)}")


def is_event_file(data):
    """The first record of an event file tells the version: field 3, after the time and the step."""
    return len(data) > 24 and b"brain.Event:" in data[:64]


def read_curve(name, tag=None):
    """The curve of a log. name: its path; PATH@N: each of its steps has N tokens. tag: that of the
    training loss, in event files."""
    given = re.fullmatch(r"(.+)@(\d{1,15})", str(name), re.S)
    each = int(given[2]) if given and not Path(name).exists() else 0
    curve = Curve(Path(given[1] if each else name))
    paths = find_in_folder(curve.path) if curve.path.is_dir() else [curve.path]
    with open_regular(paths[0]) as file:
        events = is_event_file(file.read(64))
    if events:
        curve.form = "TensorBoard"
        read_events(curve, paths, tag)
    else:
        curve.path = paths[0]
        read_text(curve, read_regular(curve.path, TEXT_MOST))
    if not curve.train and not curve.val and not curve.lost:
        raise BadLog(f"{curve.path}: no losses in it")
    if each:
        curve.tokens = {step: each * step for step in {*curve.train, *curve.val}}
    return curve
