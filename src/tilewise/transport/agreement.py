"""Ranks compare one fixed-size record before anything is posted, so that all fail alike or none."""

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tilewise.transport.protocol import Transport

RECORD_BYTES = 2048
_ABSENT = "nothing"
PASS = "pass"
"""The field that says which pass a rank is about to run."""


class _Value(NamedTuple):
    text: str  # cut to fit the record
    digest: str  # of the whole text


class _Record(NamedTuple):
    error: str | None
    fields: dict[str, _Value]


def agree(
    transport: Transport, fields: Mapping[str, str] | Tensor | None, error: str | None = None
) -> None:
    """Return if all ranks pass the same fields and no error; else raise the same on every rank.

    Every rank calls it, also one whose own checks failed: that one passes what is wrong.

    Args:
        fields: what must be equal, in order of importance: name -> value as text. Long values
            are compared by digest, so their text may be long, but it must differ if they do. Or
            what `encoded` made of them.
        error: what this rank found wrong with its own input; fields may then be None.
    Raises:
        ValueError: "rank 2: ..." for the lowest rank with an error, else "ranks disagree on ..."
            for the first field that differs, with both values. A world of one raises error as is.
    """
    if transport.world_size == 1:
        if error is not None:
            raise ValueError(error)
        return
    own = fields if isinstance(fields, Tensor) else encoded(fields or {}, error)
    records = transport.gather_records(own)
    if error is None and all(record is own for record in records):
        return
    contents = [record.numpy().tobytes() for record in records]
    if error is not None or any(content != contents[0] for content in contents):
        raise ValueError(_verdict([_decode(content) for content in contents]))


class FirstAgreements:
    """What the ranks of each group have agreed on once, for validate="first".

    Every rank remembers by itself, in the order in which all agreed: the same everywhere.

    Attributes:
        wires: by group, those that its ranks have compared under validate="never".
    """

    def __init__(self, keep: int = 4096) -> None:
        self._keep = keep
        self._agreed: WeakKeyDictionary[Any, dict[bytes, None]] = WeakKeyDictionary()
        self.wires: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()

    def agree(
        self,
        group: object,
        transport: Transport,
        fields: Mapping[str, str] | Tensor | None,
        error: str | None,
    ) -> None:
        """As `agree`, where this rank has not passed the same fields in this group before."""
        known = self._agreed.setdefault(group, {})
        record = fields if isinstance(fields, Tensor) else encoded(fields or {})
        key = blake2b(record.numpy().tobytes()).digest()
        if fields is not None and key in known:
            if error is not None:  # of this call's values; the others wait for nothing here
                raise ValueError(error)
            return
        agree(transport, record if error is None else None, error)
        known[key] = None
        if len(known) > self._keep:
            del known[next(iter(known))]


FIRST_AGREEMENTS = FirstAgreements()


def agree_on_largest(transport: Transport, name: str, value: int) -> int:
    """The largest value that any rank passes; raises as agree where a rank is in another call."""
    if transport.world_size == 1:
        return value
    gathered = transport.gather_records(encoded({name: str(value)}))
    records = [_decode(record.numpy().tobytes()) for record in gathered]
    found = [record.fields.get(name) for record in records]
    if not all(found):
        raise ValueError(_verdict(records))
    return max(int(one.text) for one in found if one)


def _verdict(records: Sequence[_Record]) -> str:
    for rank, record in enumerate(records):
        if record.error is not None:
            return f"rank {rank}: {record.error}"
    names = dict.fromkeys(name for record in records for name in record.fields)
    for name in names:
        first, *others = [record.fields.get(name) for record in records]
        for rank, other in enumerate(others, start=1):
            # By digest alone: how much of a text fits depends on the other fields.
            if (other and other.digest) != (first and first.digest):
                return _difference(name, first, rank, other)
    return "ranks pass the same fields in another order; run the same program on every rank"


def _difference(name: str, first: _Value | None, rank: int, other: _Value | None) -> str:
    left, right = (value.text if value else _ABSENT for value in (first, other))
    if left == right:  # they differ in what was cut
        left, right = (
            f"{value.text} (digest {value.digest[:8]})" if value else _ABSENT
            for value in (first, other)
        )
    fix = "pass the same value" if name != PASS else "run passes in the same order"
    return (
        f"ranks disagree on {name}: rank 0 has {left}, rank {rank} has {right}; {fix} on every rank"
    )


def encoded(fields: Mapping[str, str], error: str | None = None) -> Tensor:
    """A rank's record: JSON, whose longest texts are cut to what fits."""
    texts = {name: _printable(text) for name, text in fields.items() if error is None}
    digests = [blake2b(text.encode(), digest_size=8).hexdigest() for text in texts.values()]
    error = None if error is None else _printable(error)

    def record(limit: int) -> bytes:
        cut = [_cut(text, limit) for text in texts.values()]
        values = dict(zip(texts, zip(cut, digests, strict=True), strict=True))
        record = _Record(None if error is None else _cut(error, limit), values)  # pyright: ignore
        return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()

    content = record(RECORD_BYTES)
    if len(content) > RECORD_BYTES:
        limits = range(RECORD_BYTES)
        most = bisect_right(limits, RECORD_BYTES, key=lambda limit: len(record(limit)))
        content = record(max(0, most - 1))
    assert len(content) <= RECORD_BYTES, f"{len(texts)} fields do not fit a record"
    return torch.frombuffer(bytearray(content.ljust(RECORD_BYTES)), dtype=torch.uint8)


def _printable(text: str) -> str:
    """What can be encoded, of any text."""
    return text.encode(errors="backslashreplace").decode()


def _cut(text: str, limit: int) -> str:
    """Shorten a text in its middle."""
    if len(text) <= limit:
        return text
    half = max(limit - 3, 0) // 2
    return f"{text[:half]}...{text[len(text) - half :]}"[:limit]


def _decode(content: bytes) -> _Record:
    error, fields = json.loads(content)
    return _Record(error, {name: _Value(*value) for name, value in fields.items()})
