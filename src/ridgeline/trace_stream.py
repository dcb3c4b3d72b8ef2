"""Read the event array of a Chrome trace (.json or .json.gz) in blocks, so that its size is no matter.

A block ends where one event ends and the next begins. Who reads it may take the events from its text and spare the
JSON parser, which is what makes a large trace fast to read.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import IO, Any

from ridgeline.errors import UsageError

BLOCK_BYTES = 1 << 20  # of text taken at once
PARSED_CHARACTERS = 4 << 10  # a block that is declined is offered again in pieces of about as many
PACKED_BYTES = 256 << 10  # of a .gz inflated at once; gzip shrinks traces 15 to 23 times
HEAD_BYTES = 16 << 20  # within which the event array must begin
EVENT_BYTES = 64 << 20  # which no single event reaches

Progress = Callable[[int, int], None]  # bytes of the file read, and its size

_ARRAY = re.compile(rb'"traceEvents"\s*:\s*\[')
_EXECUTION_TRACE = re.compile(rb'"schema"\s*:.*"nodes"\s*:|"nodes"\s*:.*"schema"\s*:', re.DOTALL)
# `},{"key"` cannot stand inside a JSON string: its quote would end the string, and a letter may not follow that
_EDGE = re.compile(rb'\}\s*,\s*\{\s*"\w+"')
_DECODER = json.JSONDecoder(strict=False)  # profilers write control characters into names


Glance = Callable[[int, str], int | None]  # first event's number, text of whole events: how many; None: parse them
Take = Callable[[int, list[Any]], None]  # first event's number, and the events


def read_events(path: Path, take: Take, *, glance: Glance, progress: Progress | None = None) -> dict[str, Any]:
    """Read the event array block by block; returns the file's other top-level entries.

    Each block's text goes to `glance`, which says how many events it found; what it declines is parsed as JSON and
    goes to `take`, as do the last events of a file. Raises UsageError for what is no whole trace.
    """
    with closing(_read_ahead(path, progress)) as blocks:
        head, text = _split_head(path, blocks)
        count = 0
        edge = b""
        for block in chain([b""], blocks):
            text += block
            edge = edge or _common_edge(text)
            end = _last_edge(text, edge)
            if end:
                count += _take_block(path, _decode(text[:end]), _decode(edge), count, take, glance)
                text = text[end:].lstrip(b", \t\r\n")
            elif len(text) > EVENT_BYTES:
                raise UsageError(
                    f"{path} has no end of an event in {len(text)} bytes after event {count}: record it again"
                )
        return head | _take_rest(path, text, count, take)


def _split_head(path: Path, blocks: Iterator[bytes]) -> tuple[dict[str, Any], bytes]:
    """The entries before the event array, and the text after its bracket."""
    text = b""
    for block in blocks:
        text += block
        found = _ARRAY.search(text)
        if found:
            return _parse_head(path, text[: found.start()]), text[found.end() :]
        if len(text) > HEAD_BYTES:
            break
    start = text.lstrip(b"\xef\xbb\xbf \t\r\n")
    if start[:1] == b"[":  # a bare array is a Chrome trace too
        return {}, start[1:]
    if not start:
        raise UsageError(f"{path} is empty: the profiler had written nothing when it was copied or killed")
    if start[:1] != b"{":
        raise UsageError(f"{path} is not JSON: it begins with {start[:12]!r}, where a profiler's trace begins with {{")
    if _EXECUTION_TRACE.search(text):
        raise UsageError(
            f"{path} is an execution trace (nodes without times): export the profiler's own trace instead, "
            "with prof.export_chrome_trace(path) or on_trace_ready=tensorboard_trace_handler(folder)"
        )
    raise UsageError(
        f'{path} has no "traceEvents": give a trace written by torch.profiler\'s export_chrome_trace, or one of '
        "`nsys export --type sqlite`"
    )


def _parse_head(path: Path, text: bytes) -> dict[str, Any]:
    try:
        head = _DECODER.decode(_decode(text).rstrip(", \t\r\n") + "}")
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is damaged before its first event ({error}): record it again") from None
    return head if isinstance(head, dict) else {}


def _common_edge(text: bytes) -> bytes:
    """How most events of this file are parted, e.g. `},\\n  {\\n    "ph"`; empty where there are none yet."""
    edges = Counter(_EDGE.findall(text[:PACKED_BYTES]))
    return edges.most_common(1)[0][0] if edges else b""


def _last_edge(text: bytes, edge: bytes) -> int:
    """Where the last whole event of `text` ends; 0 if it has no edge."""
    at = text.rfind(edge) if edge else -1
    if at < 0:
        for found in _EDGE.finditer(text):
            at = found.start()
    return at + 1


def _take_block(path: Path, text: str, edge: str, count: int, take: Take, glance: Glance) -> int:
    """Take the whole events in `text`, the first of them number `count`; returns how many there are.

    What is declined for one event is offered again in pieces, cut at an `edge`: most of a block is then still spared
    the parser.
    """
    seen = glance(count, text)
    if seen is not None:
        return seen
    taken = 0
    for piece in _pieces(text, edge):
        seen = glance(count + taken, piece)
        if seen is None:
            events = _parse(path, piece, count + taken)
            take(count + taken, events)
            seen = len(events)
        taken += seen
    return taken


def _pieces(text: str, edge: str) -> Iterator[str]:
    """The events of `text`, so many at a time that they take PARSED_CHARACTERS; all at once if there is no edge."""
    begin = 0
    while (end := text.find(edge, begin + PARSED_CHARACTERS) if edge else -1) >= 0:
        yield text[begin : end + 1]
        begin = text.index("{", end)
    yield text[begin:]


def _parse(path: Path, text: str, count: int) -> list[Any]:
    try:
        return _DECODER.decode(f"[{text}]")
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is not valid JSON soon after event {count}: record it again") from None


def _decode(text: bytes) -> str:
    return text.decode("utf-8", "replace")  # a kernel's name may hold anything


def _take_rest(path: Path, text: bytes, count: int, take: Take) -> dict[str, Any]:
    """Parse the last event, the bracket after it and the entries that follow; returns those."""
    characters = _decode(text)
    events: list[Any] = []
    at = _skip_blanks(characters, 0)
    while at < len(characters) and characters[at] != "]":
        try:
            event, at = _DECODER.raw_decode(characters, at)
        except (ValueError, RecursionError):
            at = len(characters)
        else:
            events.append(event)
            at = _skip_blanks(characters, at)
    if at >= len(characters):
        raise UsageError(
            f"{path} is cut off after {count + len(events)} whole events: wait until the profiler has written it, "
            "or copy it again"
        )
    take(count, events)
    try:
        tail = _DECODER.decode("{" + characters[at + 1 :].strip(", \t\r\n"))
    except (ValueError, RecursionError):
        return {}  # the events are whole, and a trace's own name may hold a Windows path with bare backslashes
    return tail if isinstance(tail, dict) else {}


def _skip_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at] in ", \t\r\n":
        at += 1
    return at


def _read_ahead(path: Path, progress: Progress | None) -> Generator[bytes]:
    """The file's text in pieces; the next is read and inflated by a thread while the last is parsed."""
    try:
        size = path.stat().st_size
        file = path.open("rb")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    with file, ThreadPoolExecutor(1) as pool:
        pieces = _inflated(path, file) if path.suffix == ".gz" else _plain(file)
        pending = pool.submit(next, pieces, None)
        while (piece := pending.result()) is not None:
            pending = pool.submit(next, pieces, None)
            text, done = piece
            yield text
            if progress:
                progress(done, size)


def _plain(file: IO[bytes]) -> Iterator[tuple[bytes, int]]:
    while block := file.read(BLOCK_BYTES):
        yield block, file.tell()


def _inflated(path: Path, file: IO[bytes]) -> Iterator[tuple[bytes, int]]:
    """Inflate member after member. A file that breaks off yields what is whole: who parses it sees the end missing."""
    if file.read(2) not in (b"\x1f\x8b", b""):
        raise UsageError(f"{path} ends in .gz and is not gzip: rename it to .json if it is plain text")
    file.seek(0)
    member = zlib.decompressobj(wbits=31)
    try:
        while packed := file.read(PACKED_BYTES):
            while packed:
                yield member.decompress(packed, BLOCK_BYTES), file.tell()
                packed = member.unconsumed_tail or member.unused_data
                if member.eof:
                    packed = packed if packed[:2] == b"\x1f\x8b" else b""  # padding after the last member
                    member = zlib.decompressobj(wbits=31)
        yield member.flush(), file.tell()
    except zlib.error as error:
        raise UsageError(f"{path} is damaged ({error}): copy or record it again") from None
