"""Weights from files that are not trusted: find or fetch them, read them without running their code, load them.

Every refusal is a UsageError (an unreadable or unsuitable file) or EnvironmentUnusable (a download that failed).
"""

from __future__ import annotations

import hashlib
import http.client
import logging
import math
import os
import struct
import tempfile
import tomllib
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from ridgeline.errors import EnvironmentUnusable, UsageError
from ridgeline.models._unpickle import (
    MAX_PICKLE_BYTES,
    PickleRefused,
    Storage,
    Stub,
    TensorRecord,
    is_module,
    module_tensors,
    read_pickle,
)
from ridgeline.models.yolo26 import BRANCHES, HEADS, SCALES, YOLO26, Head, fuse

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 2 << 30
MAX_TENSORS = 20_000
MAX_ARCHIVE_ENTRIES = 50_000
DOWNLOAD_TIMEOUT_S = 30
CHUNK_BYTES = 1 << 20

# what wrappers and trainers put in front of every name
WRAPPER_PREFIXES = ("module.", "_orig_mod.", "ema.")
# where trainers keep the model, smoothed weights first: they are what a trainer evaluates
MODEL_KEYS = ("ema", "model", "state_dict", "model_state_dict")
LEGACY_MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46"  # a pickled long: how torch.save began before 1.6


@dataclass(frozen=True, slots=True)
class Release:
    """A published file: where it is and what it must be."""

    url: str
    size_bytes: int
    sha256: str


def _releases() -> dict[str, Release]:
    table = tomllib.loads(Path(__file__).with_name("official.toml").read_text(encoding="utf-8"))
    return {name: Release(**row) for name, row in table.items()}


RELEASES = _releases()


def resolve_weights(
    name: str,
    *,
    explicit: Path | None = None,
    cache_dir: Path,
    download: bool = True,
    releases: Mapping[str, Release] = RELEASES,
) -> Path:
    """The weights file for a built-in model: the explicit path, else the cache folder, else the official release.

    The cache is looked up as `<name>.pt` and `<name>.safetensors`, and is where a download goes.
    """
    if explicit is not None:
        _check_is_file(explicit)
        return explicit
    if name not in releases:
        raise UsageError(f"no weights are known for model {name!r}: use one of {', '.join(releases)}, or give a file")
    cached = [cache_dir / f"{name}{suffix}" for suffix in (".pt", ".safetensors")]
    for path in cached:
        if path.is_file():
            return path
    release = releases[name]
    if not download:
        raise UsageError(f"{name} has no weights yet: save {release.url} as {cached[0]}, or give a file of your own")
    _download(release, cached[0])
    return cached[0]


def load_state(path: Path) -> dict[str, Tensor]:
    """Names and tensors of a checkpoint: floats as float32, integers as stored, wrapper prefixes removed.

    Reads .safetensors, and .pt or .pth in torch's zip format holding a pickled module, a state dict, or a dictionary
    with either under one of MODEL_KEYS (the first that is there). Runs nothing of what the file says.
    """
    _check_is_file(path)
    size_bytes = path.stat().st_size
    if size_bytes > MAX_FILE_BYTES:
        raise UsageError(f"weights file {str(path)!r} has {size_bytes} bytes, more than the {MAX_FILE_BYTES} allowed")
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        state = _read_safetensors(path)
    elif suffix in (".pt", ".pth"):
        state = _read_checkpoint(path)
    else:
        raise UsageError(f"weights file {str(path)!r} must be a .pt, .pth or .safetensors file, not {suffix or 'bare'}")
    if not state:
        raise UsageError(f"weights file {str(path)!r} holds no tensors: give a checkpoint with a model or a state dict")
    state = _strip_prefixes(state)
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in state.items()}


def load_into(model: nn.Module, state: Mapping[str, Tensor], *, source: str = "the weights") -> None:
    """Put `state` into `model`, in place; names and shapes must agree exactly. A model on `meta` gets real tensors.

    `source` names the file in the refusal, which states the first name that differs and both shapes.
    """
    expected = model.state_dict()
    refusal = f"{source} does not fit {_describe(model)}"
    # in the model's order, so that the first difference named is the one nearest the input
    for name, tensor in expected.items():
        if name not in state:
            raise UsageError(f"{refusal}: {name} {_shape(tensor)} is missing")
        if state[name].shape != tensor.shape:
            raise UsageError(f"{refusal}: {name} is {_shape(state[name])}, but must be {_shape(tensor)}")
    for name, tensor in state.items():
        if name not in expected:
            raise UsageError(f"{refusal}: {name!r:.120} {_shape(tensor)} is not part of it")
    on_meta = any(tensor.is_meta for tensor in expected.values())
    model.load_state_dict(dict(state), assign=on_meta)


def yolo26_from(path: Path, *, head: Head = "one_to_one") -> YOLO26:
    """The YOLO26 in a file, ready to run: eval mode, float32, batch norms folded, only `head` kept.

    Scale, classes and heads are read from names and shapes; a file of another architecture is refused by saying where
    it differs.
    """
    state = load_state(path)
    source = f"weights file {str(path)!r}"
    scale, classes, heads = _identify(state, source)
    if head not in heads:
        raise UsageError(f"{source} holds the {heads[0]} head only, {head} was asked for: choose {heads[0]}")
    is_fused = not any(name.endswith(".running_var") for name in state)
    with torch.device("meta"):  # no memory and no random numbers for values that are about to be replaced
        model = YOLO26(scale, classes, heads=(head,) if is_fused else heads)
        model = fuse(model, head=head) if is_fused else model
    load_into(model, state, source=source)
    return model if is_fused else fuse(model, head=head)


def _check_is_file(path: Path) -> None:
    if not path.is_file():
        wrong = "is a folder" if path.is_dir() else "does not exist"
        raise UsageError(f"weights file {str(path)!r} {wrong}: give the path of a .pt or .safetensors file")


def _identify(state: Mapping[str, Tensor], source: str) -> tuple[str, int, tuple[Head, ...]]:
    """Scale, classes and heads of a YOLO26 state; the details are left to `load_into`."""
    stem = state.get("model.0.conv.weight")
    widths = {size.channels(64): name for name, size in SCALES.items()}
    heads: tuple[Head, ...] = tuple(head for head in HEADS if f"model.23.{BRANCHES[head][1]}.0.2.weight" in state)
    if stem is None or stem.ndim != 4 or stem.shape[0] not in widths or not heads:
        first = next(iter(state))
        raise UsageError(
            f"{source} is not a YOLO26 detector (its first tensor is {first!r:.80} {_shape(state[first])}): "
            f"give the weights of yolo26{', yolo26'.join(SCALES)}"
        )
    scale = widths[stem.shape[0]]
    # m and l are equally wide, l is twice as deep
    if scale in "ml":
        scale = "l" if any(name.startswith("model.2.m.1.") for name in state) else "m"
    classifier = state[f"model.23.{BRANCHES[heads[0]][1]}.0.2.weight"]
    return scale, max(classifier.shape[0], 1) if classifier.ndim else 1, heads


def _describe(model: nn.Module) -> str:
    return f"YOLO26-{model.scale}" if isinstance(model, YOLO26) else type(model).__name__


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _strip_prefixes(state: dict[str, Tensor]) -> dict[str, Tensor]:
    while True:
        for prefix in (*WRAPPER_PREFIXES, "model.model."):
            if all(name.startswith(prefix) for name in state):
                # a detector wrapped in another `model` keeps its own
                kept = "model." if prefix == "model.model." else ""
                state = {kept + name.removeprefix(prefix): tensor for name, tensor in state.items()}
                break
        else:
            return state


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError, KeyError, ValueError) as error:
        # KeyError: a dtype this version of torch does not have
        raise UsageError(f"weights file {str(path)!r} is no readable safetensors file: {_one_line(error)}") from error


def _read_checkpoint(path: Path) -> dict[str, Tensor]:
    _check_is_zip(path)
    try:
        with zipfile.ZipFile(path) as archive:
            folder = _check_archive(archive, path.stat().st_size)
            root = read_pickle(archive.read(f"{folder}data.pkl"))
            return _materialise(_records(root), archive, folder)
    except PickleRefused as error:
        raise UsageError(f"weights file {str(path)!r} cannot be read: {error}") from error
    # what zipfile raises on damaged archives, by kind of damage
    except (zipfile.BadZipFile, NotImplementedError, EOFError, OSError, KeyError, ValueError, struct.error) as error:
        raise UsageError(f"weights file {str(path)!r} is damaged: {_one_line(error)}") from error


def _check_is_zip(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(len(LEGACY_MAGIC))
    if start == LEGACY_MAGIC:
        raise UsageError(
            f"weights file {str(path)!r} is in torch's format from before 1.6, which cannot be read safely: "
            "load it with the project it came from and save it again"
        )
    if not start.startswith(b"PK\x03\x04"):
        raise UsageError(f"weights file {str(path)!r} is not a zip archive as torch.save writes it: check what it is")
    if not zipfile.is_zipfile(path):
        raise UsageError(f"weights file {str(path)!r} is truncated (its zip directory is missing): fetch it again")


def _check_archive(archive: zipfile.ZipFile, file_bytes: int) -> str:
    """The archive's folder. Refuses what torch.save never writes: compressed, overlapping or too many entries."""
    entries = archive.infolist()
    if len(entries) > MAX_ARCHIVE_ENTRIES:
        raise PickleRefused(f"it has {len(entries)} entries, more than the {MAX_ARCHIVE_ENTRIES} allowed")
    names = {entry.filename: entry for entry in entries}
    pickles = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise PickleRefused("it has no data.pkl, so it is not a checkpoint written by torch.save")
    folder = pickles[0].removesuffix("data.pkl")
    if f"{folder}constants.pkl" in names:
        raise PickleRefused("it is a TorchScript archive, not a checkpoint: give the file it was exported from")
    # stored entries that together fit the file cannot inflate: the whole defence against zip bombs
    if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries):
        raise PickleRefused("its entries are compressed or encrypted, which torch.save never does")
    if sum(entry.file_size for entry in entries) > file_bytes:
        raise PickleRefused("its entries claim more bytes than the file has")
    if names[pickles[0]].file_size > MAX_PICKLE_BYTES:
        raise PickleRefused(f"its pickle has more than the {MAX_PICKLE_BYTES} bytes allowed")
    if f"{folder}byteorder" in names and archive.read(f"{folder}byteorder").strip() != b"little":
        raise PickleRefused("it was written on a big-endian machine, which is not supported")
    return folder


def _records(root: object) -> Iterable[tuple[str, TensorRecord]]:
    """The tensors of the first model found in a checkpoint."""
    candidates = [root]
    if isinstance(root, dict):
        candidates = [root.get(key) for key in MODEL_KEYS] + [root]
    for candidate in candidates:
        if isinstance(candidate, Stub) and is_module(candidate):
            return module_tensors(candidate)
        if isinstance(candidate, dict):
            named = [(key, value) for key, value in candidate.items() if isinstance(key, str)]
            tensors = [(key, value) for key, value in named if isinstance(value, TensorRecord)]
            if tensors:
                return tensors
    raise PickleRefused("it holds neither a model nor a state dict")


def _materialise(
    records: Iterable[tuple[str, TensorRecord]], archive: zipfile.ZipFile, folder: str
) -> dict[str, Tensor]:
    """Tensors of their own memory; a storage shared by several is read once."""
    storages: dict[Storage, Tensor] = {}
    state: dict[str, Tensor] = {}
    state_bytes = 0
    for name, record in records:
        storage = record.storage
        state_bytes += math.prod(record.shape) * max(storage.dtype.itemsize, 4)
        if len(state) >= MAX_TENSORS or state_bytes > MAX_FILE_BYTES:
            raise PickleRefused(f"its model has more than {MAX_TENSORS} tensors or {MAX_FILE_BYTES} bytes")
        if storage not in storages:
            storages[storage] = _read_storage(storage, archive, folder)
        state[name] = storages[storage].as_strided(record.shape, record.stride, record.offset).clone()
    return state


def _read_storage(storage: Storage, archive: zipfile.ZipFile, folder: str) -> Tensor:
    data = archive.read(f"{folder}data/{storage.key}")
    if len(data) != storage.numel * storage.dtype.itemsize:
        raise PickleRefused(
            f"its storage {storage.key!r:.40} has {len(data)} bytes, not {storage.numel} * {storage.dtype.itemsize}"
        )
    return torch.frombuffer(bytearray(data), dtype=storage.dtype) if data else torch.empty(0, dtype=storage.dtype)


def _download(release: Release, target: Path) -> None:
    """Fetch to a temporary name, check size and digest, rename; a failure leaves nothing behind."""
    log.info("downloading %s (%d bytes) to %s", release.url, release.size_bytes, target)
    way_out = f"check the network, or save {release.url} as {target}"
    partial = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        with os.fdopen(handle, "wb") as file, urllib.request.urlopen(release.url, timeout=DOWNLOAD_TIMEOUT_S) as answer:
            digest, received = hashlib.sha256(), 0
            while received <= release.size_bytes and (chunk := answer.read(CHUNK_BYTES)):
                file.write(chunk)
                digest.update(chunk)
                received += len(chunk)
        if received != release.size_bytes:
            count = f"{received} bytes" if received < release.size_bytes else "more bytes"
            raise EnvironmentUnusable(
                f"download of {release.url} gave {count} where {release.size_bytes} were published: {way_out}"
            )
        if (found := digest.hexdigest()) != release.sha256:
            raise EnvironmentUnusable(
                f"download of {release.url} has SHA-256 {found}, not the published {release.sha256}: {way_out}"
            )
        os.replace(partial, target)
        partial = None
    # URLError and timeouts are OSErrors; a broken HTTP answer is not
    except (OSError, http.client.HTTPException) as error:
        raise EnvironmentUnusable(f"download of {release.url} failed ({_one_line(error)}): {way_out}") from error
    finally:
        if partial is not None:
            Path(partial).unlink(missing_ok=True)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "…"
