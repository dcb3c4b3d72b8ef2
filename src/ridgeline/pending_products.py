"""Machine code of sm_90 that overwrites the operands of a product before the matrix unit has read them.

wgmma runs beside the instructions behind it, and reads a left operand that is in registers when its turn comes. Until a
wait covers it those registers must stay as they are. Triton up to 3.6 waits too little in pipelined loops: the loads of
the next step may come first (Triton issue 9433). Whether they do is decided by ptxas, so it shows in nothing else: most
results are right, and which are not depends on how long the unit was busy with other programs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", re.M)
_PRODUCT = re.compile(r"^[HQI]GMMA\.\S+ R\d+, (?:R(\d+)\S*, )?\S*gdesc")
_WAIT = re.compile(r"^WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)")
_JUMP = re.compile(r"^BRA\S*\s+(?:\S+, )?(0x[0-9a-f]+)")
_GUARD = re.compile(r"^@!?U?P\w+\s+")
# behind two predicates, as of ISETP, stands no register that is written
_TARGET = re.compile(r"^(\S+)\s+(?:U?P\w+, )?R(\d+)\b")
_LEFT_REGISTERS = 4  # of a thread: 64 rows of 16 halves, over four warps

# what names a register first and writes none
_READERS = frozenset(
    ("ST", "STG", "STS", "STL", "STSM", "RED", "SYNCS", "BAR", "BRA", "EXIT", "MEMBAR", "LDGSTS", "UTMALDG", "UTMASTG")
)


@dataclass(frozen=True)
class _Instruction:
    address: int
    text: str  # without its predicate


@dataclass(frozen=True)
class _Pending:
    registers: frozenset[int]
    ends_group: bool


def overwrites(listing: str) -> tuple[str, ...]:
    """The instructions of a disassembly that write a register which a product may not have read yet, in their order.

    Followed are the code as it stands and each loop around its end once.
    """
    code = [_Instruction(int(at, 16), _GUARD.sub("", text)) for at, text in _LINE.findall(listing)]
    if not any(_left_registers(each.text) for each in code):
        return ()
    found = dict.fromkeys(_written_too_early(code))
    for loop in _loops(code):
        found |= dict.fromkeys(_written_too_early((*loop, *loop)))
    return tuple(f"{each.address:04x} {each.text}" for each in sorted(found, key=lambda each: each.address))


def _written_too_early(code: Iterable[_Instruction]) -> Iterator[_Instruction]:
    pending: list[_Pending] = []
    for each in code:
        wait = _WAIT.match(each.text)
        if wait is not None:
            pending = _last_groups(pending, int(wait[1], 16))
        elif _PRODUCT.match(each.text):
            pending.append(_Pending(_left_registers(each.text), "gsb0" in each.text))
        elif any(product.registers & _written(each.text) for product in pending):
            yield each


def _last_groups(pending: Sequence[_Pending], count: int) -> list[_Pending]:
    """What a wait leaves: the last `count` groups, and products behind them that belong to no group yet."""
    kept, groups = [], 0
    for product in reversed(pending):
        groups += product.ends_group
        if groups > count:
            break
        kept.append(product)
    return kept[::-1]


def _loops(code: Sequence[_Instruction]) -> Iterator[Sequence[_Instruction]]:
    place = {each.address: i for i, each in enumerate(code)}
    for i, each in enumerate(code):
        jump = _JUMP.match(each.text)
        # a jump to itself ends a kernel
        if jump is not None and int(jump[1], 16) < each.address and int(jump[1], 16) in place:
            yield code[place[int(jump[1], 16)] : i + 1]


def _left_registers(text: str) -> frozenset[int]:
    product = _PRODUCT.match(text)
    if product is None or product[1] is None:
        return frozenset()
    return frozenset(range(int(product[1]), int(product[1]) + _LEFT_REGISTERS))


def _written(text: str) -> frozenset[int]:
    target = _TARGET.match(text)
    if target is None or target[1].split(".")[0] in _READERS:
        return frozenset()
    mnemonic, first = target[1], int(target[2])
    count = 1
    if mnemonic.startswith("LDSM"):
        matrices = mnemonic.rpartition(".")[2]
        count = int(matrices) if matrices.isdigit() else 1
    elif ".128" in mnemonic:
        count = 4
    elif ".64" in mnemonic or ".WIDE" in mnemonic or mnemonic.startswith("CS2R"):
        count = 2
    return frozenset(range(first, first + count))
