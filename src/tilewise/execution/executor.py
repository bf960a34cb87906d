"""The executor: runs one rank's program, for any strategy, mask and pass.

It moves bytes and keeps order; what the bytes mean is the work's business.
"""

from collections.abc import Iterable, Iterator

from torch.autograd import profiler

from tilewise.compiler.program import Compute, Free, Instruction, Program, Wait
from tilewise.execution.launching import Arrival, launch_apart, launch_team, launch_together
from tilewise.execution.work import PassWork
from tilewise.transport.protocol import Transport


def execute(program: Program, work: PassWork, transport: Transport) -> None:
    """Run a program to its end; returns when all that was sent has left.

    Merges happen in program order, so every run gives the same bits where the kernels do: see
    docs/numerics.md.
    """
    under_way: dict[int, list[Arrival]] = {}
    together = not transport.receives_ahead
    profiled = profiler._is_profiler_enabled
    instructions: Iterable[Instruction] = _recorded(program) if profiled else program.instructions
    # Not by match: binding its patterns costs as much as the rest of the loop.
    for instruction in instructions:
        if isinstance(instruction, Compute):
            work.run(instruction.tile)
        elif isinstance(instruction, Wait):
            handle, indices = instruction
            launched = under_way[handle]
            for index in indices:
                started, hop, room = launched[index]
                started.wait()
                if hop is not None:
                    work.on_receive(hop, room)
            if together:
                work.left(handle)
            if len(indices) == len(launched):
                del under_way[handle]
        elif isinstance(instruction, Free):
            work.free(instruction.item)
        elif instruction.team is not None:
            under_way[instruction.handle] = launch_team(instruction, work, transport)
        elif not together:
            arrivals = launch_apart(instruction, work, transport)
            if arrivals:
                under_way[instruction.handle] = arrivals
        else:
            under_way[instruction.handle] = launch_together(instruction, work, transport)
    transport.finish()


def _recorded(program: Program) -> Iterator[Instruction]:
    """The instructions; while one runs, a profiler sees a range of its label."""
    for instruction, label in zip(program.instructions, program.labels(), strict=True):
        with profiler.record_function(label):
            yield instruction
