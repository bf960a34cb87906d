"""An exchange of a team on the network lab, by how gloo carries it: ms, and segments sent again.

Every rank sends as much to every other: as one collective (an all-to-all), in rounds (pairwise), or
as messages that are all posted at once. In turn; medians, and the slowest rank's time of each.
With --uneven it sends half as much to the ranks after it, as an all-gather under a causal mask.

    sudo python -m benchmarks.team_exchange [--hosts 8] [--mbit 50] [--kib 128 512] [--uneven]
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.transport import process_group
from tilewise.transport.process_group import DistTransport
from tilewise.transport.protocol import Message, TeamMessages
from tilewise_tools.lab.lab import Lab
from tilewise_tools.naming import Parser, run_script, whole_number

Sizes = tuple[tuple[int, ...], tuple[int, ...]]  # bytes to, and from, each rank
Way = Callable[[DistTransport, Tensor, Tensor, Sizes], None]


def in_a_team(most_bytes: int) -> Way:
    def way(transport: DistTransport, leaving: Tensor, arriving: Tensor, sizes: Sizes) -> None:
        team = range(transport.world_size)
        messages = TeamMessages(leaving, arriving, sizes, team, "all", most_bytes)
        transport.exchange_all(messages).wait()

    return way


def in_rounds(transport: DistTransport, leaving: Tensor, arriving: Tensor, sizes: Sizes) -> None:
    kept, process_group.EVEN = process_group.EVEN, 0.0  # whatever their sizes
    in_a_team(2**40)(transport, leaving, arriving, sizes)
    process_group.EVEN = kept


def all_at_once(transport: DistTransport, leaving: Tensor, arriving: Tensor, sizes: Sizes) -> None:
    n, rank = transport.world_size, transport.rank
    sends, recvs = (
        [
            Message(x.split([*of])[(rank + i * way) % n], (rank + i * way) % n, "all")
            for i in range(1, n)
        ]
        for x, of, way in ((leaving, sizes[0], 1), (arriving, sizes[1], -1))
    )
    transport.exchange(sends, recvs).wait()


WAYS: dict[str, Way] = {
    "one collective": in_a_team(0),
    "in rounds": in_rounds,
    "messages at once": all_at_once,
}


def sent_again() -> int:
    """Segments that TCP has sent again on this host."""
    names, values = (
        line.split()
        for line in Path("/proc/self/net/snmp").read_text().splitlines()
        if "Tcp:" in line
    )
    return int(values[names.index("RetransSegs")])


def measure(
    rank: int, kib: list[int], repeats: int, uneven: bool
) -> dict[tuple[int, str], list[list[float]]]:
    """By size and way: of each turn the ms of the slowest rank, and the segments of all."""
    torch.set_num_threads(1)
    transport = DistTransport(dist.distributed_c10d._get_default_group())
    found: dict[tuple[int, str], list[list[float]]] = {}
    for turn in range(-1, repeats):
        for size in kib:
            most, ranks = size * 1024, range(transport.world_size)
            to_each = tuple(most // 2 if uneven and peer > rank else most for peer in ranks)
            from_each = tuple(most // 2 if uneven and peer < rank else most for peer in ranks)
            sizes = to_each, from_each
            leaving, arriving = (torch.empty(sum(x), dtype=torch.uint8) for x in sizes)
            for name, way in WAYS.items():
                time.sleep(0.05)  # the NICs' buckets are full again
                dist.barrier()
                start, before = time.perf_counter(), sent_again()
                way(transport, leaving, arriving, sizes)
                transport.finish()
                seconds = torch.tensor(time.perf_counter() - start)
                dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
                again = torch.tensor(float(sent_again() - before))
                dist.all_reduce(again)
                if turn >= 0:  # the one before opens the windows
                    found.setdefault((size, name), []).append([seconds.item() * 1e3, again.item()])
    return found


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--hosts", type=whole_number, default=8)
    parser.add_argument("--mbit", type=float, default=50)
    parser.add_argument(
        "--kib", type=whole_number, nargs="+", default=[16, 32, 64, 128, 512], help="a peer"
    )
    parser.add_argument("--repeats", type=whole_number, default=5)
    parser.add_argument("--uneven", action="store_true")
    options = parser.parse_args()
    if options.hosts < 2:
        parser.error(f"--hosts ({options.hosts}) must be at least 2: ranks that send to each other")
    with Lab(hosts=options.hosts, mbit=options.mbit) as lab:
        found = lab.run(measure, options.kib, options.repeats, options.uneven, timeout_seconds=600)[
            0
        ]
    print(f"{'KiB a peer':>10}" + "".join(f"{name:>28}" for name in WAYS))
    for size in options.kib:
        cells = []
        for name in WAYS:
            times, again = zip(*found[size, name], strict=True)
            cells.append(
                f"{statistics.median(times):.0f} ({min(times):.0f}-{max(times):.0f}), "
                f"{statistics.median(again):.0f} again"
            )
        print(f"{size:>10}" + "".join(f"{cell:>28}" for cell in cells))


if __name__ == "__main__":
    run_script(main, hosts="--hosts", mbit="--mbit")
