"""Ranks compare what they are about to do, so that all fail alike or none.

Each kind of call is compared once in a group, before anything is posted. In between every rank
keeps a digest of the calls that it made, by which messages and waits of different calls are told
apart: see `Agreement`.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from threading import get_ident
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from tilewise.arguments import Validate
from tilewise.plan.kept import KeptWith
from tilewise.transport.protocol import Transport

Value = TypeVar("Value")

RECORD_BYTES = 2048
COMPARED_EVERY = 64
"""Calls after which ranks compare again, whatever they call."""
PASS = "pass"
"""The field that says which pass a rank is about to run."""
TAG_BITS = 28
_ABSENT = "nothing"
_CALLS = "calls before this one"
_VALIDATE = "validate"
_KINDS_KEPT = 4096
_DIGESTS_KEPT = 2 * COMPARED_EVERY
_DIGEST_BYTES = 16
_SHOWN_CHARACTERS = 120  # of a field of a call that a rank waits in
_SHOWN_FIELDS = 4
_TWO_THREADS = (
    "two threads of this rank call in one group at once; make a group for each thread "
    "(torch.distributed.new_group on all ranks), or call from one thread alone"
)
_NONE: Mapping[str, str] = MappingProxyType({})


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=_DIGEST_BYTES).digest()


class CallKind:
    """Facts that calls of one kind have in common.

    Args:
        fields: name -> value as text, in order of importance. Long values are compared by digest,
            so their text may be long, but it must differ if they do.
    """

    __slots__ = ("fields", "key")

    def __init__(self, fields: Mapping[str, str]) -> None:
        self.fields = fields
        self.key = _digest(json.dumps([*fields.items()]).encode())


_REFUSED = CallKind({"call": "a call that it refuses"})
_UNCOMPARED = CallKind(
    {"call": "one that compares nothing (validate='never', no wire that rounds)"}
)


class _Value(NamedTuple):
    text: str  # cut to fit the record
    digest: str  # of the whole text


class _Record(NamedTuple):
    error: str | None
    fields: dict[str, _Value]
    number: int


class CallState(NamedTuple):
    """The call that a rank is in.

    Args:
        number: of the call: how many the rank made in the group, with this one.
        digest: of all of them, in their order.
        comparing: it compares records, and has posted no message of the call.
        fields: of the call, cut.
        error: what the rank found wrong with its own input.
    """

    number: int
    digest: str
    comparing: bool
    fields: dict[str, str]
    error: str | None


class _Current(NamedTuple):
    number: int
    digest: bytes
    comparing: bool
    kind: CallKind
    values: Mapping[str, str]
    error: str | None


class _Made(NamedTuple):
    """A call that a rank made: the digest of all up to it, and whether it compared records."""

    digest: bytes
    compared: bool


class Agreement:
    """Knowledge of one rank about the calls of one group: which kinds all ranks have compared, and
    a digest of all calls so far.

    It changes in the same way on every rank that makes the same calls, hence ranks compare at the
    same ones: at a new kind, and COMPARED_EVERY calls after the last comparison.

    Attributes:
        mark: of the current call, where a message has no tag: the digest.
        refusal: makes the error of a second thread, and lets other ranks know.
        caller: the thread that made the current call.
        recorder: times the passes of this rank, see tilewise.recording; None: nobody does.
    """

    def __init__(self) -> None:
        self.refusal: Callable[[str], Exception] = ValueError
        self.caller: int | None = None
        self.recorder: Any = None
        self._holder: dict[str, int] = {}  # the thread that waits, or has messages under way
        self._known: dict[bytes, None] = {}
        self._compared = 0  # the last call that was
        self._recent: dict[int, _Made] = {}  # by number of calls
        self._set(_Current(0, bytes(_DIGEST_BYTES), False, _REFUSED, _NONE, None))

    @property
    def tag(self) -> int:
        """The tag of messages of the current call: some bits of the digest."""
        return int.from_bytes(self.mark[:4]) >> (32 - TAG_BITS)

    def call(
        self,
        transport: Transport,
        kind: CallKind | None,
        error: str | None = None,
        mode: Validate = "first",
        values: Mapping[str, str] = _NONE,
        compared_values: Callable[[], Mapping[str, str]] | None = None,
    ) -> int:
        """Return the call's number if all ranks make the same call without error; else raise.

        Every rank calls it, also one whose own checks failed: that one passes what is wrong. Where
        the others know their kind, they are in their messages and hear of it there, or in the
        group's store.

        Args:
            kind: None: not known, as there is an error.
            error: what this rank found wrong with its own input.
            mode: "first": compare new kinds; "always": compare; "never": go on.
            values: what is equal on all ranks, too, but changes from call to call of a kind. They
                are compared where the kind is, and always part of the digest.
            compared_values: makes values that cost time to read, such as those of a tensor. It is
                called, and they are compared, only where the kind is.
        Raises:
            ValueError: "rank 2: ..." for the lowest rank with an error, else "ranks disagree on
                ..." for the first field that differs, with both values. A world of one, or
                "never", raises error as is.
        """
        if error is not None and (transport.world_size == 1 or mode == "never"):
            raise ValueError(error)
        if transport.world_size == 1:
            return 0
        if mode == "never":
            self._step(_UNCOMPARED, _NONE)
        elif (
            mode == "first"
            and error is None
            and kind is not None
            and kind.key in self._known
            and self._now.number + 1 - self._compared < COMPARED_EVERY
        ):
            self._step(kind, values)
        else:
            if compared_values is not None and error is None:
                values = {**values, **compared_values()}
            self._compare(transport, kind or _REFUSED, error, values, mode)
        return self._now.number

    def largest(self, transport: Transport, name: str, value: int) -> int:
        """The largest value that any rank passes; raises where a rank is in another call."""
        before = self._now
        self._step(CallKind({"call": name}), _NONE, comparing=True)
        own = encoded({name: str(value)}, None, before.number)
        records = [_decode(record) for record in transport.gather_records(own)]
        found = [record.fields.get(name) for record in records]
        if not all(found):
            self._disagreed(records)
        self._now = self._now._replace(comparing=False)
        return max(int(one.text) for one in found if one)

    def state(self) -> CallState:
        """The current call; another thread may ask."""
        number, digest, comparing, kind, values, error = self._now
        fields = {
            name: _cut(_printable(text), _SHOWN_CHARACTERS)
            for name, text in {**kind.fields, **values}.items()
        }
        return CallState(number, digest.hex(), comparing, fields, error)

    def conflict(self, rank: int, peer: int, theirs: CallState) -> str | None:
        """Why this rank and one that waits can never go on; None: one of them may be late.

        Of two ranks in different calls the one that has made more calls finds it, or both.
        """
        own = self.state()
        for refusing, at, other in ((rank, own, theirs), (peer, theirs, own)):
            passed = other.number > at.number or (other.number == at.number and not other.comparing)
            if at.error is not None and passed and other.error is None:
                return f"rank {refusing}: {at.error}"
        if own.error is not None or theirs.error is not None:
            return None
        made = self._recent.get(theirs.number)
        if made is None:
            return None
        if made.digest.hex() == theirs.digest:
            if not theirs.comparing or made.compared:
                return None
            return (
                f"rank {peer} compares {described(theirs)} with the others, rank {rank} does not; "
                "pass the same validate on every rank"
            )
        (low, first), (high, second) = sorted([(rank, own), (peer, theirs)], key=_rank_first)
        return (
            f"ranks are in different calls: rank {low} is in {_shown(first, second)}, rank {high} "
            f"in {_shown(second, first)}; run the same calls in the same order on every rank"
        )

    def hold(self, *, launches: bool = False) -> None:
        """Keep other threads out of the group until `release`: this one waits in it, or has
        messages under way.

        Args:
            launches: messages are about to leave, with the tag of the current call.
        Raises:
            ValueError: on every rank, if another thread has the group, or has made another call.
        """
        own = get_ident()
        if self._holder.setdefault("", own) != own or (launches and self.caller not in (None, own)):
            raise self.refusal(_TWO_THREADS)

    def release(self) -> None:
        """Let any thread make the next call."""
        if self._holder.get("") == get_ident():
            del self._holder[""]

    def go_on(self) -> None:
        """Let this thread send messages of the current call, as a backward pass may."""
        self.caller = get_ident()

    def _step(
        self,
        kind: CallKind,
        values: Mapping[str, str],
        comparing: bool = False,
        error: str | None = None,
    ) -> None:
        own = self.caller = get_ident()
        if self._holder.get("", own) != own:
            raise self.refusal(_TWO_THREADS)
        before = self._now
        content = before.digest + kind.key
        if values:
            content += repr([*values.items()]).encode()
        self._set(_Current(before.number + 1, _digest(content), comparing, kind, values, error))

    def _set(self, current: _Current) -> None:
        self._now, self.mark = current, current.digest
        self._recent[current.number] = _Made(current.digest, current.comparing)
        self._recent.pop(current.number - _DIGESTS_KEPT, None)

    def begin_again(self, number: int, why: str) -> None:
        """Take up a state that is the same on all ranks, after an error that all have heard of.

        Args:
            number: larger than that of any rank's call.
        """
        self._recent.clear()
        self._compared = number
        digest = _digest(why.encode())
        self._set(_Current(number, digest, False, _REFUSED, _NONE, None))

    def _disagreed(self, records: Sequence[_Record]) -> NoReturn:
        """Raise what all ranks make of the same records."""
        verdict = _verdict(records)
        # A failed call is counted, too: number is that before it.
        self.begin_again(2 + max(record.number for record in records), verdict)
        raise ValueError(verdict)

    def _compare(
        self,
        transport: Transport,
        kind: CallKind,
        error: str | None,
        values: Mapping[str, str],
        mode: Validate,
    ) -> None:
        before = self._now
        self._step(kind, values, True, error)
        calls = {_CALLS: f"{before.number} ({before.digest.hex()[:8]})"}
        fields = {**kind.fields, **values, **calls, _VALIDATE: mode}
        own = encoded(fields, error, before.number)
        records = transport.gather_records(own)
        content = own.numpy().tobytes()
        same = all(x is own or x.numpy().tobytes() == content for x in records)
        if error is not None or not same:
            decoded = [_decode(record) for record in records]
            self._disagreed(decoded)
        self._now = self._now._replace(comparing=False)
        self._compared = self._now.number
        self._known[kind.key] = None
        if len(self._known) > _KINDS_KEPT:
            del self._known[next(iter(self._known))]


AGREEMENTS = KeptWith(lambda _: Agreement())


def agreement_of(transport: Transport) -> Agreement:
    """Return the Agreement of a transport's process group, or its own if it has no group."""
    own = getattr(transport, "agreement", None)
    if isinstance(own, Agreement):
        return own
    return AGREEMENTS.of(getattr(transport, "process_group", transport))


def agree(
    transport: Transport,
    fields: Mapping[str, str] | None,
    error: str | None = None,
    mode: Validate = "always",
    values: Mapping[str, str] = _NONE,
    compared_values: Callable[[], Mapping[str, str]] | None = None,
) -> None:
    """Return if all ranks pass the same fields and no error; else raise the same on every rank.

    As `Agreement.call`, of the transport's group.

    Args:
        fields: of the call's kind; None where there is an error.
    """
    kind = None if fields is None else CallKind(fields)
    agreement_of(transport).call(transport, kind, error, mode, values, compared_values)


def settled(transport: Transport, check: Callable[[], Value]) -> Value:
    """Return what check returns; what it refuses on this rank is raised on every rank."""
    try:
        return check()
    except Exception as raised:  # whatever it is, the other ranks must learn of it
        agree(transport, None, str(raised), "first")
        raise


def agree_on_largest(transport: Transport, name: str, value: int) -> int:
    """The largest value that any rank passes; raises as agree where a rank is in another call."""
    if transport.world_size == 1:
        return value
    return agreement_of(transport).largest(transport, name, value)


def _rank_first(one: tuple[int, CallState]) -> int:
    return one[0]


def _shown(state: CallState, other: CallState) -> str:
    """Return a text for an error: a call's number and name, and the first fields in which two
    differ.
    """
    shown = _named(state)
    for name, text in state.fields.items():
        if len(shown) < _SHOWN_FIELDS and other.fields.get(name, text) != text:
            shown[name] = text
    return f"call {state.number} ({_listed(shown)})"


def described(state: CallState) -> str:
    """A call's number, and what it is."""
    return f"call {state.number} ({_listed(_named(state))})"


def _named(state: CallState) -> dict[str, str]:
    return {name: text for name, text in state.fields.items() if name in (PASS, "call", "plan")}


def _listed(fields: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {text}" for name, text in fields.items())


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
    fixes = {PASS: "run passes in the same order", _CALLS: "run the same calls in the same order"}
    fix = fixes.get(name, "pass the same value")
    return (
        f"ranks disagree on {name}: rank 0 has {left}, rank {rank} has {right}; {fix} on every rank"
    )


def encoded(fields: Mapping[str, str], error: str | None = None, before: int = 0) -> Tensor:
    """A rank's record: JSON, whose longest texts are cut to what fits.

    Args:
        before: how many calls the rank has made.
    """
    texts = {name: _printable(text) for name, text in fields.items() if error is None}
    digests = [blake2b(text.encode(), digest_size=8).hexdigest() for text in texts.values()]
    error = None if error is None else _printable(error)

    def record(limit: int) -> bytes:
        cut = [_cut(text, limit) for text in texts.values()]
        values = dict(zip(texts, zip(cut, digests, strict=True), strict=True))
        record = _Record(None if error is None else _cut(error, limit), values, before)  # pyright: ignore
        return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()

    content = record(RECORD_BYTES)
    if len(content) > RECORD_BYTES:
        limits = range(RECORD_BYTES)
        most = bisect_right(limits, RECORD_BYTES, key=lambda limit: len(record(limit)))
        content = record(max(0, most - 1))
    assert len(content) <= RECORD_BYTES, f"{len(texts)} fields do not fit a record"
    return torch.frombuffer(bytearray(content.ljust(RECORD_BYTES)), dtype=torch.uint8)


def _printable(text: str) -> str:
    """Return the part of any text that can be encoded."""
    return text.encode(errors="backslashreplace").decode()


def _cut(text: str, limit: int) -> str:
    """Shorten a text in its middle."""
    if len(text) <= limit:
        return text
    half = max(limit - 3, 0) // 2
    return f"{text[:half]}...{text[len(text) - half :]}"[:limit]


def _decode(record: Tensor) -> _Record:
    error, fields, number = json.loads(record.numpy().tobytes())
    return _Record(error, {name: _Value(*value) for name, value in fields.items()}, number)
