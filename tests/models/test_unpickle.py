"""Files written to do harm: pickles that run code, never end or inflate; tensors that reach outside their storage."""

import functools
import io
import os
import pickle
import struct
import zipfile

import pytest
import torch
from checkpoint_files import archive, refusal, saved

from ridgeline.errors import UsageError
from ridgeline.models import _unpickle, weights
from ridgeline.models._unpickle import PickleRefused, read_pickle
from ridgeline.models.weights import load_state
from ridgeline.models.yolo26 import YOLO26


class Reduces:
    """Pickles as the call its constructor names."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


def payloads(marker: str) -> dict[str, bytes]:
    """Pickles that create the file `marker` when Python's own unpickler reads them."""
    command = f"touch {marker}"
    code = f"open({marker!r}, 'w').close()"
    unicode = lambda text: b"X" + struct.pack("<I", len(text)) + text.encode()  # noqa: E731
    return {
        "reduce": pickle.dumps(Reduces(os.system, (command,)), protocol=2),
        "text GLOBAL eval": b"c__builtin__\neval\n(S" + repr(code).encode() + b"\ntR.",
        "STACK_GLOBAL": b"\x80\x04" + unicode("posix") + unicode("system") + b"\x93" + unicode(command) + b"\x85R.",
        "dotted path": b"\x80\x04" + unicode("shutil") + unicode("os.system") + b"\x93" + unicode(command) + b"\x85R.",
        "INST": b"(S'" + command.encode() + b"'\nios\nsystem\n.",
        "OBJ": b"(cos\nsystem\nS'" + command.encode() + b"'\no.",
        "NEWOBJ partial": b"\x80\x02cfunctools\npartial\n(cos\nsystem\nt\x81" + unicode(command) + b"\x85R.",
        "call of a partial": pickle.dumps(
            Reduces(functools.partial, (os.system, command), None, None, None), protocol=2
        )[:-1]
        + b")R.",
        "BUILD": pickle.dumps(Reduces(Holder, (), command, None, None, run), protocol=4),
        "list items": pickle.dumps(Reduces(Appender, (), None, iter([command])), protocol=4),
        "dict items": pickle.dumps(Reduces(Appender, (), None, None, iter([("k", command)])), protocol=4),
        "torch gadget": pickle.dumps(Reduces(torch.storage._load_from_bytes, (inner(command),)), protocol=2),
        "map": b"\x80\x02c__builtin__\nlist\nc__builtin__\nmap\ncos\nsystem\n]" + unicode(command) + b"a\x86R\x85R.",
    }


def inner(command: str) -> bytes:
    buffer = io.BytesIO()
    torch.save(Reduces(os.system, (command,)), buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


class Holder:
    pass


class Appender:
    def append(self, command):
        os.system(command)

    def extend(self, commands):
        os.system(commands[0])

    def __setitem__(self, key, command):
        os.system(command)


def run(_target, command):
    os.system(command)


@pytest.mark.parametrize("kind", payloads("x"))
def test_nothing_in_a_pickle_runs(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # else torch itself stops its own gadget
    marker = tmp_path / "ran"
    hostile = payloads(str(marker))[kind]
    pickle.loads(hostile)
    assert marker.exists(), "the payload must work, or this test proves nothing"
    marker.unlink()

    refusal(archive(tmp_path / "a.pt", hostile))
    # the same beside a good state dict: inert, and the tensors can still be read
    tensors = saved(tmp_path / "good.pt", {"a": torch.ones(2)})
    with zipfile.ZipFile(tensors) as file:
        good = file.read("good/data.pkl")
        entries = {"data/0": file.read("good/data/0")}
    # {"evil": …, "state_dict": …}; protocol headers dropped, memo slots of the two parts do not meet
    body = b"}(X\x04\x00\x00\x00evil" + strip(hostile) + b"X\x0a\x00\x00\x00state_dict" + strip(good) + b"u."
    beside = archive(tmp_path / "b.pt", b"\x80\x04" + body, entries)
    if "partial" in kind:  # the call of what was itself constructed, which no checkpoint contains
        assert "calls a value of type Stub" in refusal(beside)
    else:
        assert torch.equal(load_state(beside)["a"], torch.ones(2))
    assert not marker.exists()


def strip(pickled: bytes) -> bytes:
    start = 2 if pickled[:1] == b"\x80" else 0
    start += 9 if pickled[start : start + 1] == b"\x95" else 0  # FRAME
    return pickled[start:-1]


@pytest.mark.parametrize(
    ("pickled", "text"),
    [
        (b"\x80\x02" + b"N0" * 600_000 + b"N.", "more than the 1000000 instructions allowed"),
        (b"\x80\x02\x8b\xff\xff\xff\x7f\x01.", "malformed"),  # LONG4 that announces 2 GB
        (b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.", "malformed"),  # BINBYTES8 that announces 8 EB
        (b"\x80\x02)" + b"\x85" * 300_000 + b"}\x8c\x01ks0.", "sets items"),  # deep nesting, then nonsense
        (b"\x80\x02}(" + b")" + b"\x85" * 100_000 + b"Nu.", "a tuple as dictionary key"),
        (b"\x80\x02}" + b")" + b"q\x000h\x00h\x00\x86" * 60 + b"Ns.", "a tuple as dictionary key"),
        (b"\x80\x02" + b"(" * 300_000 + b".", "malformed"),
        (b"\x80\x02N", "malformed"),  # no STOP
        (b".", "malformed"),
        (b"\x80\x02h\x07.", "malformed"),  # an unset memo slot
        (b"\x80\x02(N0000.", "malformed"),  # pops below the bottom
        (b"\x82\x01.", "uses EXT1"),
        (b"Pid\n.", "uses PERSID"),
        (b"\x80\x02K\x01)R.", "calls a value of type int"),
        (b"\x80\x02cos\nsystem\n}b.", "sets the state of a value of type Global"),
        (b"\x80\x02cos\nsystem\nNa.", "appends to a value of type Global"),
        (b"\x80\x02K\x01Q.", "not a tensor storage"),
        (b"I" + b"9" * 5000 + b"\n.", "malformed"),  # quadratic decimal conversion
        (b"not a pickle", "malformed"),
    ],
)
def test_malformed_and_oversized_pickles_are_refused(pickled, text):
    with pytest.raises(PickleRefused, match=text):
        read_pickle(pickled)


def test_deep_and_odd_but_harmless_pickles_are_read():
    value = read_pickle(b"\x80\x02)" + b"\x85" * 300_000 + b".")
    for _ in range(300_000):
        (value,) = value
    assert value == ()
    assert read_pickle(b"\x80\x02Nr\xff\xff\xff\xff.") is None  # memo slot 4294967295 costs nothing
    with pytest.raises(PickleRefused, match=r"holds 16777217 bytes, more than the 16777216 allowed"):
        read_pickle(bytes((16 << 20) + 1))


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, -2, 2**70, 0.5, "text", b"bytes", None, True, (1, (2, 3))], 5: {"b": {}}},
        [[], (), {}, "é\n", float("inf")],
    ],
)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_data_is_read_as_python_reads_it(value, protocol):
    if protocol < 3:
        value = [item for item in value if item != "a"] if isinstance(value, list) else {5: value[5]}
    assert read_pickle(pickle.dumps(value, protocol)) == pickle.loads(pickle.dumps(value, protocol))


def tensor_pickle(shape, stride, offset=0, numel=4, key="0") -> bytes:
    """`{"t": tensor}` as torch.save writes it, with any numbers."""

    class Id(pickle.Pickler):
        def persistent_id(self, value):
            return ("storage", torch.FloatStorage, key, "cpu", numel) if value == "STORAGE" else None

    buffer = io.BytesIO()
    rebuild = (torch._utils._rebuild_tensor_v2, ("STORAGE", offset, shape, stride, False, {}))
    Id(buffer, protocol=2).dump({"t": Reduces(*rebuild)})
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ({"shape": (5,), "stride": (1,)}, "outside its 4 elements"),
        ({"shape": (4,), "stride": (1,), "offset": 1}, "outside its 4 elements"),
        ({"shape": (2, 2), "stride": (3, 2)}, "outside its 4 elements"),
        ({"shape": (1 << 30, 1 << 30), "stride": (0, 0)}, "outside its 4 elements"),  # one element shown 2**60 times
        ({"shape": (1 << 50,), "stride": (1,)}, "do not fit together"),
        ({"shape": (2,), "stride": (-1,), "offset": 1}, "do not fit together"),
        ({"shape": (2,), "stride": (1,), "offset": -1}, "do not fit together"),
        ({"shape": (2, 2), "stride": (1,)}, "do not fit together"),
        ({"shape": (1,) * 9, "stride": (1,) * 9}, "do not fit together"),
        ({"shape": (True,), "stride": (1,)}, "do not fit together"),
        ({"shape": [4], "stride": (1,)}, "without storage, shape or stride"),
        ({"shape": (4,), "stride": (1,), "numel": 3 << 40}, "without a name or size"),
        ({"shape": (4,), "stride": (1,), "numel": 5}, r"has 16 bytes, not 5 \* 4"),
        ({"shape": (4,), "stride": (1,), "key": "../../etc/passwd"}, "damaged"),
        ({"shape": (4,), "stride": (1,), "key": 7}, "without a name or size"),
    ],
)
def test_tensors_that_reach_outside_their_storage_are_refused(numbers, text, tmp_path):
    entries = {"data/0": struct.pack("<4f", 1, 2, 3, 4)}
    good = archive(tmp_path / "good.pt", tensor_pickle((2, 2), (1, 2)), entries)
    assert load_state(good)["t"].tolist() == [[1, 3], [2, 4]]
    with pytest.raises(UsageError, match=text):
        load_state(archive(tmp_path / "bad.pt", tensor_pickle(**numbers), entries))


def module_pickle(body: bytes) -> bytes:
    return b"\x80\x02crandom\nModule\n)\x81q\x00}X\x08\x00\x00\x00_modules" + body + b"sb."


def test_module_trees_without_end_are_refused(tmp_path):
    loop = module_pickle(b"}X\x01\x00\x00\x00ah\x00s")  # its own child
    assert "nest deeper than 64 levels" in refusal(archive(tmp_path / "loop.pt", loop))
    # thirty levels of two references each: a thousand million modules in 2 kB
    level = lambda n: b"crandom\nModule\n)\x81}X\x08\x00\x00\x00_modules}(X\x01\x00\x00\x00a" + n  # noqa: E731
    body = b"crandom\nModule\n)\x81}X\x08\x00\x00\x00_modules}sb"
    for slot in range(1, 31):
        body = level(body + b"q" + bytes([slot]) + b"X\x01\x00\x00\x00bh" + bytes([slot]) + b"usb")
    assert "more than 100000 entries" in refusal(archive(tmp_path / "wide.pt", b"\x80\x02" + body + b"."))


def test_many_views_of_one_storage_are_bounded(tmp_path, monkeypatch):
    path = saved(tmp_path / "v.pt", dict.fromkeys("abcdefgh", torch.ones(100)))
    assert len(load_state(path)) == 8
    monkeypatch.setattr(weights, "MAX_TENSORS", 5)
    assert "more than 5 tensors" in refusal(path)


def test_bounds_are_far_above_real_checkpoints(test_data):
    with zipfile.ZipFile(test_data / "yolo26n-w8.pt") as file:
        pickled = file.read("yolo26n-w8/data.pkl")
    assert len(pickled) * 20 < _unpickle.MAX_PICKLE_BYTES
    state = load_state(test_data / "yolo26n-w8.pt")
    with torch.device("meta"):
        expected = YOLO26("n").state_dict()
    assert {name: tensor.shape for name, tensor in state.items()} == {n: t.shape for n, t in expected.items()}


def test_archives_that_inflate_are_refused(tmp_path, monkeypatch):
    bomb = archive(tmp_path / "bomb.pt", pickle.dumps({}), {"data/0": bytes(50 << 20)}, zipfile.ZIP_DEFLATED)
    assert bomb.stat().st_size < 1 << 20
    assert "compressed" in refusal(bomb)
    # two directory entries that share one body claim more than the file holds
    plain = archive(tmp_path / "p.pt", pickle.dumps({}), {"data/0": bytes(4000), "data/1": b""}).read_bytes()
    directory = plain.rindex(b"PK\x01\x02")
    shared = bytearray(plain)
    shared[directory + 20 : directory + 28] = struct.pack("<II", 4000, 4000)
    (tmp_path / "shared.pt").write_bytes(shared)
    assert "claim more bytes than the file has" in refusal(tmp_path / "shared.pt")
    monkeypatch.setattr(weights, "MAX_ARCHIVE_ENTRIES", 2)
    assert "has 3 entries, more than the 2 allowed" in refusal(tmp_path / "shared.pt")
    monkeypatch.setattr(weights, "MAX_FILE_BYTES", 100)
    assert "more than the 100 allowed" in refusal(bomb)
