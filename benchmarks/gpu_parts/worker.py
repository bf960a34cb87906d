"""A process that answers questions one after another, so that what kills it kills nothing else.

It is started ahead of its first question: imports take seconds, and can pass while another works.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing as mp
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

START_SECONDS = 120.0  # for imports, on a busy machine


class LostError(Exception):
    """The process is gone; the text says how.

    Attributes:
        hung: it was ended because it did not answer.
    """

    def __init__(self, text: str, hung: bool):
        super().__init__(text)
        self.hung = hung


class Worker:
    """One process.

    Args:
        answer: "module:function", called in the process with each question.
        log: what the process prints goes there.
    """

    def __init__(self, answer: str, log: Path):
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, answer, log))
        self._process.start()
        theirs.close()  # its end of the pipe is its own: closed when it dies
        self._ready = False

    def ask(self, question: Any, seconds: float) -> Any:
        """The answer to a question; importing does not count.

        Raises:
            LostError: if there is none within so many seconds, or ever.
        """
        if not self._ready:
            self._receive(START_SECONDS)
            self._ready = True
        with contextlib.suppress(BrokenPipeError):  # that it is dead, receiving tells
            self._pipe.send(question)
        return self._receive(seconds)

    def _receive(self, seconds: float) -> Any:
        try:
            if not self._pipe.poll(seconds):
                self.end()
                raise LostError(
                    f"no answer within {seconds:.0f} s; its process was ended", hung=True
                )
            return self._pipe.recv()
        except (EOFError, ConnectionResetError) as gone:
            self._process.join(10)
            how = _how(self._process.exitcode)
            raise LostError(f"its process died: {how}", hung=False) from gone

    def end(self) -> None:
        """End the process and all that it started, whatever they are doing."""
        if self._process.is_alive() and self._process.pid is not None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:  # not yet the head of a group
                self._process.kill()
        self._process.join(10)
        self._pipe.close()


def _serve(pipe: Connection, answer: str, log: Path) -> None:
    os.setsid()
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    module, _, name = answer.partition(":")
    function = getattr(importlib.import_module(module), name)
    pipe.send("ready")
    while True:
        try:
            question = pipe.recv()
        except EOFError:
            return
        pipe.send(function(question))


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
