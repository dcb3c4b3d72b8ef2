"""Reading, loading and fetching weights: formats, refusals, downloads; hostile files are in test_unpickle.py."""

import hashlib
import http.server
import os
import pickle
import random
import threading
import zipfile

import pytest
import torch
from checkpoint_files import archive, refusal, saved
from safetensors.torch import save_file

from ridgeline.errors import EnvironmentUnusable, UsageError
from ridgeline.models import weights
from ridgeline.models.weights import RELEASES, Release, load_into, load_state, resolve_weights, yolo26_from
from ridgeline.models.yolo26 import SCALES, YOLO26, fuse


@pytest.fixture(scope="module")
def nano() -> YOLO26:
    torch.manual_seed(0)
    return YOLO26("n").eval()


# --- formats -------------------------------------------------------------------------------------------------------


def test_a_pickled_module_gives_its_state_in_float32(nano, tmp_path):
    state = load_state(saved(tmp_path / "m.pt", {"ema": None, "model": nano.half(), "date": "today"}))
    expected = nano.state_dict()
    nano.float()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], tensor) for name, tensor in nano.state_dict().items())
    assert state["model.0.conv.weight"].dtype == torch.float32
    assert state["model.0.bn.num_batches_tracked"].dtype == torch.int64


def test_smoothed_weights_come_first(tmp_path):
    def model(value: float) -> torch.nn.Module:
        return (
            torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False))
            .requires_grad_(False)
            .apply(lambda m: m.weight.fill_(value) if isinstance(m, torch.nn.Linear) else None)
        )

    both = saved(tmp_path / "both.pt", {"model": model(1), "ema": model(2)})
    assert load_state(both)["0.weight"].item() == 2
    assert load_state(saved(tmp_path / "one.pt", {"model": model(1), "ema": None}))["0.weight"].item() == 1
    state = {"a": torch.ones(2)}
    for key in ("state_dict", "model_state_dict", "model", "ema"):
        assert list(load_state(saved(tmp_path / "d.pth", {"epoch": 3, key: state}))) == ["a"]


@pytest.mark.parametrize(
    ("prefix", "left"),
    [("module.", ""), ("_orig_mod.", ""), ("module._orig_mod.", ""), ("model.model.", "model."), ("model.", "model.")],
)
def test_wrapper_prefixes_are_removed(prefix, left, tmp_path):
    state = {f"{prefix}0.weight": torch.ones(1), f"{prefix}1.bias": torch.ones(1)}
    assert list(load_state(saved(tmp_path / "p.pt", state))) == [f"{left}0.weight", f"{left}1.bias"]


def test_a_prefix_not_shared_by_all_stays(tmp_path):
    state = {"module.a": torch.ones(1), "b": torch.ones(1)}
    assert list(load_state(saved(tmp_path / "p.pt", state))) == ["module.a", "b"]


def test_any_layout_and_type_is_read(tmp_path):
    base = torch.arange(48.0).reshape(2, 4, 6)
    state = {
        "transposed": base.transpose(0, 2),
        "slice": base[:, 1:3, ::2],
        "channels_last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "bf16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "f64": torch.tensor([0.1], dtype=torch.float64),
        "bool": torch.tensor([True, False]),
        "i8": torch.tensor([-3], dtype=torch.int8),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7.0),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    read = load_state(saved(tmp_path / "s.pt", state))
    assert list(read) == list(state)
    for name, tensor in state.items():
        assert torch.equal(read[name], tensor.detach().float() if tensor.is_floating_point() else tensor), name


def test_buffers_that_are_not_persistent_are_left_out(tmp_path):
    module = torch.nn.Linear(1, 1)
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("scratch", torch.ones(1), persistent=False)
    assert list(load_state(saved(tmp_path / "b.pt", {"model": module}))) == ["weight", "bias", "kept"]


def test_safetensors(nano, tmp_path):
    save_file({name: tensor.half() for name, tensor in fuse(nano).state_dict().items()}, tmp_path / "f.safetensors")
    state = load_state(tmp_path / "f.safetensors")
    assert len(state) == 204 and all(tensor.dtype == torch.float32 for tensor in state.values())


# --- loading into a model ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", SCALES)
def test_the_scale_is_read_from_the_shapes(scale):
    with torch.device("meta"):
        state = YOLO26(scale, classes=7).state_dict()
    assert weights._identify(state, "x") == (scale, 7, ("one_to_many", "one_to_one"))


def test_every_form_of_a_detector_gives_the_same_network(nano, tmp_path):
    x = torch.rand(1, 3, 64, 64)
    heads = {"one_to_one": ("one2one_cv2", "one2one_cv3"), "one_to_many": ("cv2", "cv3")}
    for head, branches in heads.items():
        fused = fuse(nano, head=head)
        others = tuple(f"model.23.{b}." for h in heads if h != head for b in heads[h])
        single = {name: tensor for name, tensor in nano.state_dict().items() if not name.startswith(others)}
        for value in (nano.state_dict(), single, fused.state_dict()) if head == "one_to_one" else (single,):
            model = yolo26_from(saved(tmp_path / "m.pt", value), head=head)
            assert model.fused and model.heads == (head,) and not model.training
            assert not any(parameter.requires_grad for parameter in model.parameters())
            assert all(torch.equal(tensor, fused.state_dict()[name]) for name, tensor in model.state_dict().items())
            assert any(branches[0] in name for name in model.state_dict())
    with torch.no_grad():
        assert torch.equal(model(x), fused(x))


def test_loading_replaces_values_in_place(nano):
    torch.manual_seed(5)
    other = YOLO26("n")
    weight = other.model[0].conv.weight
    load_into(other, nano.state_dict())
    assert other.model[0].conv.weight is weight and torch.equal(weight, nano.model[0].conv.weight)


def test_the_first_difference_is_named_with_both_shapes(nano):
    state = nano.state_dict()
    wrong = {**state, "model.3.conv.weight": torch.zeros(1), "model.5.conv.weight": torch.zeros(2)}
    with pytest.raises(
        UsageError,
        match=r"^f\.pt does not fit YOLO26-n: model\.3\.conv\.weight is \[1\], but must be "
        r"\[64, 64, 3, 3\]$",
    ):
        load_into(nano, wrong, source="f.pt")
    short = {name: tensor for name, tensor in state.items() if "one2one" not in name}
    with pytest.raises(UsageError, match=r"model\.23\.one2one_cv2\.0\.0\.conv\.weight \[16, 64, 3, 3\] is missing"):
        load_into(nano, short)
    with pytest.raises(UsageError, match=r"'model\.24\.dfl' \[16\] is not part of it"):
        load_into(nano, {**state, "model.24.dfl": torch.zeros(16)})
    with pytest.raises(UsageError, match=r"model\.0\.conv\.bias \[16\] is missing"):
        load_into(fuse(nano), state)


def test_other_architectures_are_refused_by_name(nano, tmp_path):
    other = saved(tmp_path / "resnet.pt", {"conv1.weight": torch.zeros(64, 3, 7, 7)})
    with pytest.raises(UsageError, match=r"resnet\.pt' is not a YOLO26 detector .*'conv1\.weight'"):
        yolo26_from(other)
    state = {name: tensor for name, tensor in nano.state_dict().items() if not name.startswith("model.22.m.0.1.")}
    with pytest.raises(UsageError, match=r"cut\.pt' does not fit YOLO26-n: model\.22\.m\.0\.1\.attn\.qkv\.conv"):
        yolo26_from(saved(tmp_path / "cut.pt", state))
    with pytest.raises(UsageError, match="holds the one_to_one head only, one_to_many was asked for"):
        yolo26_from(saved(tmp_path / "f.pt", fuse(nano).state_dict()), head="one_to_many")


# --- files that are no weights -------------------------------------------------------------------------------------


def test_unsuitable_files_are_refused_in_one_sentence(tmp_path):
    def file(name: str, data: bytes):
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    assert f"'{tmp_path}/none.pt' does not exist" in refusal(tmp_path / "none.pt")
    assert f"'{tmp_path}' is a folder: give the path of a .pt" in refusal(tmp_path)
    assert f"weights file '{tmp_path}/cut.pt' is truncated" in refusal(file("cut.pt", b"PK\x03\x04" + bytes(99)))
    assert "must be a .pt, .pth or .safetensors file, not .onnx" in refusal(file("m.onnx", b"x"))
    assert "not a zip archive" in refusal(file("empty.pt", b""))
    assert "not a zip archive" in refusal(file("page.pt", b"<!DOCTYPE html><html>"))
    assert "no readable safetensors file" in refusal(file("bad.safetensors", b"\xff" * 64))
    assert "no readable safetensors file" in refusal(file("empty.safetensors", b""))
    torch.save({"a": torch.ones(1)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert "from before 1.6" in refusal(tmp_path / "old.pt")
    assert "TorchScript" in refusal(archive(tmp_path / "script.pt", pickle.dumps({}), {"constants.pkl": b""}))
    assert "neither a model nor a state dict" in refusal(saved(tmp_path / "list.pt", [1, 2]))
    assert "holds no tensors" in refusal(saved(tmp_path / "bare.pt", torch.nn.ReLU()))
    assert "no data.pkl" in refusal(archive_without_pickle(tmp_path / "z.pt"))
    assert "big-endian" in refusal(archive(tmp_path / "be.pt", pickle.dumps({}), {"byteorder": b"big"}))


def archive_without_pickle(path):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("notes.txt", "hello")
    return path


def test_a_file_cut_anywhere_is_refused(tmp_path):
    whole = saved(tmp_path / "w.pt", {f"layer.{i}": torch.rand(40) for i in range(30)}).read_bytes()
    rng = random.Random(0)
    for length in [rng.randrange(len(whole)) for _ in range(20)] + [4, len(whole) - 1]:
        (tmp_path / "cut.pt").write_bytes(whole[:length])
        refusal(tmp_path / "cut.pt")


def test_flipped_bytes_are_refused_or_harmless(tmp_path):
    whole = saved(tmp_path / "w.pt", {f"layer.{i}": torch.rand(4) for i in range(8)}).read_bytes()
    rng = random.Random(1)
    refused = 0
    for _ in range(150):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        (tmp_path / "flip.pt").write_bytes(damaged)
        try:
            load_state(tmp_path / "flip.pt")
        except UsageError:
            refused += 1
    assert refused > 50


# --- finding and fetching ------------------------------------------------------------------------------------------


class Server(http.server.BaseHTTPRequestHandler):
    """Serves /good, /long, /short, and /broken, which announces more than it sends."""

    body = bytes(range(256)) * 40

    def do_GET(self):
        body = {"/good": self.body, "/long": self.body * 300, "/short": self.body[:-1], "/broken": self.body[:99]}
        if self.path not in body:
            self.send_error(404)
            return
        self.send_response(200)
        sent = body[self.path]
        self.send_header("Content-Length", str(len(self.body) if self.path == "/broken" else len(sent)))
        self.end_headers()
        try:
            self.wfile.write(sent)
        except ConnectionError:
            self.close_connection = True  # the client hung up on /long, as it should

    def log_message(self, *arguments):
        pass


@pytest.fixture
def url(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def release(url: str, **changes) -> dict[str, Release]:
    published = {"size_bytes": len(Server.body), "sha256": hashlib.sha256(Server.body).hexdigest(), **changes}
    return {"yolo26n": Release(url=url, **published)}


def test_a_release_is_fetched_once(url, tmp_path):
    cache = tmp_path / "new" / "folder"
    path = resolve_weights("yolo26n", cache_dir=cache, releases=release(f"{url}/good"))
    assert path == cache / "yolo26n.pt" and path.read_bytes() == Server.body
    again = resolve_weights("yolo26n", cache_dir=cache, releases=release(f"{url}/gone"))
    assert again == path and os.listdir(cache) == ["yolo26n.pt"]


@pytest.mark.parametrize(
    ("page", "changes", "text"),
    [
        ("good", {"sha256": "0" * 64}, f"has SHA-256 {hashlib.sha256(Server.body).hexdigest()}, not the published 000"),
        ("good", {"size_bytes": 10}, "gave more bytes where 10 were published"),
        ("long", {}, "gave more bytes where 10240 were published"),
        ("short", {}, "gave 10239 bytes where 10240 were published"),
        ("broken", {}, "gave 99 bytes where 10240 were published|failed"),
        ("missing", {}, "failed .HTTP Error 404"),
    ],
)
def test_a_wrong_download_leaves_nothing_behind(page, changes, text, url, tmp_path):
    with pytest.raises(EnvironmentUnusable, match=text) as caught:
        resolve_weights("yolo26n", cache_dir=tmp_path, releases=release(f"{url}/{page}", **changes))
    assert f"save {url}/{page} as {tmp_path / 'yolo26n.pt'}" in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_no_connection_and_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with http.server.HTTPServer(("127.0.0.1", 0), Server) as server:
        port = server.server_port
    with pytest.raises(EnvironmentUnusable, match=r"failed .*refused"):
        resolve_weights("yolo26n", cache_dir=tmp_path, releases=release(f"http://127.0.0.1:{port}/good"))
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentUnusable, match="failed"):
        resolve_weights("yolo26n", cache_dir=tmp_path / "file", releases=release("http://127.0.0.1:1/good"))


def test_the_order_is_explicit_then_cache_then_download(tmp_path):
    own = tmp_path / "own.pt"
    own.write_bytes(b"x")
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "yolo26n.safetensors").write_bytes(b"y")
    assert resolve_weights("yolo26n", explicit=own, cache_dir=cache) == own
    assert resolve_weights("yolo26n", cache_dir=cache, download=False) == cache / "yolo26n.safetensors"
    (cache / "yolo26n.pt").write_bytes(b"z")
    assert resolve_weights("yolo26n", cache_dir=cache, download=False) == cache / "yolo26n.pt"
    with pytest.raises(UsageError, match=r"'nowhere\.pt' does not exist"):
        resolve_weights("yolo26n", explicit=weights.Path("nowhere.pt"), cache_dir=cache)
    with pytest.raises(UsageError, match=r"cache' is a folder: give the path of a \.pt or \.safetensors file"):
        resolve_weights("yolo26n", explicit=cache, cache_dir=cache)
    with pytest.raises(UsageError, match=r"^yolo26s has no weights yet: save https://github\.com/\S+/yolo26s\.pt as "):
        resolve_weights("yolo26s", cache_dir=cache, download=False)
    with pytest.raises(UsageError, match="no weights are known for model 'yolo99': use one of yolo26n, yolo26s"):
        resolve_weights("yolo99", cache_dir=cache)


def test_the_release_table_is_complete_and_well_formed():
    assert list(RELEASES) == [f"yolo26{scale}" for scale in SCALES]
    for name, row in RELEASES.items():
        assert row.url == f"https://github.com/ultralytics/assets/releases/download/v8.4.0/{name}.pt"
        assert len(row.sha256) == 64 and int(row.sha256, 16)
    # half-precision weights of both heads, plus the pickle: a size far from that would be another file
    totals = (2_572_280, 10_009_784, 21_896_248, 26_299_704, 58_993_368)
    for total, row in zip(totals, RELEASES.values(), strict=True):
        assert 2 * total < row.size_bytes < 2 * total + 800_000


def test_the_test_file_is_a_stand_in(test_data):
    # of the same form as the release file, but not it: its digest must never enter the table
    local = hashlib.sha256((test_data / "yolo26n-w8.pt").read_bytes()).hexdigest()
    assert local not in {row.sha256 for row in RELEASES.values()}
