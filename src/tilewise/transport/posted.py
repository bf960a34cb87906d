"""Operations of torch.distributed under way, by what waits for them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.transport.lost_rank import failure_of
from tilewise.transport.nccl_groups import team_groups
from tilewise.transport.protocol import Message
from tilewise.transport.record_tree import RECORD_TREES

NOTHING_TAG = 7_416_000
"""Of messages that nobody sends. This tag and the next ones are our own, so that a caller's
point-to-point messages in the group never match ours."""


class Posted:
    """One torch.distributed Work, waited for at most once (on gloo a second wait blocks).

    Args:
        messages: what travels by it; kept alive till then.
        joined: holds the bytes of several, one after the other.
        splits: they have arrived there.
    """

    def __init__(
        self,
        work: dist.Work,
        messages: Sequence[Message],
        verb: str,
        group: dist.ProcessGroup,
        joined: Tensor | None = None,
        splits: bool = False,
    ) -> None:
        self._work: dist.Work | None = work
        self._messages, self._verb, self._group = messages, verb, group
        self._joined, self._splits = joined, splits

    @property
    def waited(self) -> bool:
        return self._work is None

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is None:
            return
        try:
            work.wait()
        except RuntimeError as error:
            failure = failure_of(self._messages, self._verb, error, self._group)
            end_waits(self._group)
            raise failure from error
        if self._splits and self._joined is not None:
            pieces = self._joined.split([message.tensor.nbytes for message in self._messages])
            for message, piece in zip(self._messages, pieces, strict=True):
                message.tensor.view(-1).copy_(piece)
        self._messages, self._joined = (), None


class AllPosted:
    def __init__(self, receives: Sequence[Posted]) -> None:
        self._receives = receives

    def wait(self) -> None:
        for receive in self._receives:
            receive.wait()


Round = tuple[Message | None, Message | None]
"""What a rank sends and receives in a round."""


class PairwiseExchange:
    """An all-to-all in rounds: in each a rank sends to one peer and receives from one other.

    MPI's pairwise exchange. All at once, messages of several ranks meet at one NIC while others
    idle: docs/execution.md has the times. A rank begins a round when it has received the last one's
    message, at once if there was none; what lies between two rounds happens in `wait` and
    `release`.

    Args:
        rounds: rank r sends to r + i and receives from r - i in round i; None: nothing.
        post: starts a send (True) or a receive.
    """

    def __init__(self, rounds: Sequence[Round], post: Callable[[Message, bool], Posted]):
        self._post = post
        self._receives = [received and post(received, False) for _, received in rounds]
        self._to_send: Iterator[Round] = iter(rounds)
        self.waited = False
        self._send_next()

    def wait(self) -> None:
        for receive in self._receives:
            if receive:
                receive.wait()
                self._send_next()
        self.waited = True

    def release(self) -> None:
        """Send all that is left at once: whatever is launched later must not wait for a round."""
        for message, _ in self._to_send:
            if message:
                self._post(message, True)

    def _send_next(self) -> None:
        for message, received in self._to_send:
            if message:
                self._post(message, True)
            if received:
                return


def end_waits(group: dist.ProcessGroup) -> None:
    """Let all ranks that wait for this one fail as well: it sends no more.

    gloo closes all connections of a group at a timeout of one.
    """
    RECORD_TREES.close(group)
    nothing = torch.empty(1, dtype=torch.uint8)
    for closing in (group, *team_groups(group)):
        for peer in range(closing.size()):
            if peer != closing.rank():
                with suppress(RuntimeError):  # closed, or not gloo
                    closing.recv([nothing], peer, NOTHING_TAG).wait(timedelta(milliseconds=1))
