"""The thread that watches groups ends before the interpreter does."""

from typing import Any, cast

from tilewise.transport.watch import _Watches


class Group:
    """What a watch is kept by."""


def test_the_thread_ends_when_the_process_does() -> None:
    watches, group = _Watches(), Group()
    watch = watches.of(cast(Any, group), cast(Any, None))
    thread = watches._thread
    assert (
        thread is not None
        and thread.is_alive()
        and watches.of(cast(Any, group), cast(Any, None)) is watch
    )
    watches.end()
    assert not thread.is_alive()
