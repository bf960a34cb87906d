"""Operations of torch.distributed under way, by what waits for them."""

from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from tilewise.transport.protocol import Message, TeamMessages
from tilewise.transport.watch import Watch

SENDING = "sending to"
"""The verb of errors of sends, and of waits for them."""


class WatchedGroup(NamedTuple):
    """The group that an operation was posted on, and what watches waits for it."""

    group: dist.ProcessGroup
    watch: Watch


class Posted:
    """One torch.distributed Work, waited for at most once (on gloo a second wait blocks).

    Args:
        messages: the messages of this operation; kept alive until it is over.
        joined: one buffer with the bytes of several messages, one after the other.
        splits: received messages are copied out of `joined` when they have arrived.
    """

    def __init__(
        self,
        work: dist.Work,
        messages: Sequence[Message],
        verb: str,
        link: WatchedGroup,
        joined: Tensor | None = None,
        splits: bool = False,
    ) -> None:
        self._work, self.waited = work, False
        self._messages, self._verb, self._link = messages, verb, link
        self._joined, self._splits = joined, splits

    def wait(self) -> None:
        if self.waited:
            return
        self.waited = True
        wait_for(self._work, self._messages, self._verb, self._link)
        del self._work
        if self._splits and self._joined is not None:
            pieces = self._joined.split([message.tensor.nbytes for message in self._messages])
            for message, piece in zip(self._messages, pieces, strict=True):
                message.tensor.view(-1).copy_(piece)
        self._messages, self._joined = (), None


def wait_for(
    work: dist.Work, messages: Sequence[Message] | TeamMessages, verb: str, link: WatchedGroup
) -> None:
    """Wait for an operation of a group under a watch.

    Raises:
        LostRankError: if it fails because another rank ended.
        ValueError: if it is in vain, as ranks are in different calls or one refuses its input.
    """
    group, watch = link
    since = monotonic()
    watch.messages, watch.since = messages, since
    try:
        work.wait()
    except RuntimeError as error:
        raise watch.failure(group, messages, verb, error) from error
    finally:
        watch.messages, watch.since = (), 0.0
    recorder = watch.agreement.recorder
    if recorder is not None:
        recorder.waited(messages, verb, monotonic() - since)


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
