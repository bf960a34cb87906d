"""Other libraries' context parallelism as contenders: same cases, kernel, counting and clock.

    pip install 'tilewise[peers]'
    tilewise bench strategies --also benchmarks.peers

They stand outside the library, which never imports them; each comes from the package index.
"""

from benchmarks.peers.ringmaster import ALL_GATHER, P2P, ULYSSES, Ringmaster
from benchmarks.peers.rings import Llama3, RingFlashAttn
from benchmarks.peers.torch_cp import TorchContextParallel
from benchmarks.peers.usp import Yunchang, YunchangUlysses
from tilewise_tools.bench.contender import Contender


def contenders() -> tuple[Contender, ...]:
    """All of them, for `--also`."""
    return (
        RingFlashAttn(),
        Llama3(),
        Yunchang(),
        YunchangUlysses(),
        Ringmaster(ULYSSES),
        Ringmaster(ALL_GATHER),
        Ringmaster(P2P),
        Llama3(all_heads=True),
        TorchContextParallel("allgather"),
        TorchContextParallel("alltoall"),
    )
