"""Settings of other libraries: which of them run a model legally, what they cost, what is lost.

    advise("megatron", read_model("config.json"), 1 << 18, tw.Machine.preset("h100x8"), 128)

LIBRARIES is the table of facts: for each library the schemes that it has, the flags that choose
them, and the rules by which its own code refuses a case. A scheme is simulated as the plan of ours
that moves the same, in both passes and with the same kernels, every transfer in full: no library
here leaves out rows that a mask makes needless. What its own code costs besides is not known.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from tilewise.arguments import checks_arguments, require_known, whole_number
from tilewise.layouts.balanced import default_layout
from tilewise.masks.base import Causal, Full
from tilewise.plan.ir import Plan
from tilewise.planning.candidate import Candidate
from tilewise.planning.model_attention import ModelAttention
from tilewise.planning.reasons import TIE, reason
from tilewise.planning.search import search
from tilewise.planning.staged import staged_all_gather
from tilewise.simulation.machine import Machine
from tilewise.simulation.network import LINKS
from tilewise.simulation.simulator import Simulation, simulate
from tilewise.strategies.catalog import divisors
from tilewise.strategies.ring import ring
from tilewise.strategies.ulysses import ulysses
from tilewise.workload import LAYOUTS, Workload

LAYOUT_NAMES = tuple(name for name, _ in LAYOUTS)

AS_GOOD = 1.01
"""A setting whose time is at most this multiple of the best plan's is called as good."""


class DeviceSplit(NamedTuple):
    """Devices that share one sequence.

    Attributes:
        ranks: their number, `degree` of which share the heads, where a scheme has both.
        groups: of so many devices, each with another sequence.
        num_tokens: of a sequence, padding included.
    """

    ranks: int
    degree: int
    groups: int
    num_tokens: int


class Rule(NamedTuple):
    """A case that a library refuses.

    Attributes:
        refuses: whether it does, of a model and a degree of heads.
        because: what it says then, with {heads}, {degree}.
        source: where its code says so.
    """

    refuses: Callable[[ModelAttention, int], bool]
    because: str
    source: str


class Scheme(NamedTuple):
    """One way of a library to split a sequence.

    Attributes:
        degrees: of heads, that a number of ranks allows; 1: heads stay together.
        plan: of ranks, a degree, and the devices of a node.
        flags: to paste.
        multiple: tokens of a sequence are padded to a multiple of this, of the ranks.
    """

    name: str
    degrees: Callable[[int], Sequence[int]]
    plan: Callable[[int, int, int], Plan]
    flags: Callable[[DeviceSplit], str]
    multiple: Callable[[int], int]
    rules: tuple[Rule, ...] = ()


class Library(NamedTuple):
    """A library's schemes.

    Attributes:
        title: its name and the versions whose code was read.
    """

    title: str
    schemes: tuple[Scheme, ...]


def _together(ranks: int) -> list[int]:
    return [1]


def _all_heads(ranks: int) -> list[int]:
    return [ranks]


def _in_between(ranks: int) -> list[int]:
    return divisors(ranks)[1:-1]


def _ring(ranks: int, degree: int, node_size: int) -> Plan:
    return ring(ranks)


def _all_gather(ranks: int, degree: int, node_size: int) -> Plan:
    return staged_all_gather(ranks, node_size)


def _ulysses(ranks: int, degree: int, node_size: int) -> Plan:
    return ulysses(degree, inner=ring(ranks // degree)) if degree < ranks else ulysses(ranks)


def _twice(ranks: int) -> int:
    return 2 * ranks


def _each(ranks: int) -> int:
    return ranks


def _megatron(scheme: str) -> Callable[[DeviceSplit], str]:
    def flags(split: DeviceSplit) -> str:
        levels = f" --hierarchical-context-parallel-sizes {split.degree} "
        levels += str(split.ranks // split.degree)
        return (
            f"--context-parallel-size {split.ranks} --cp-comm-type {scheme}"
            f"{levels * (scheme == 'a2a+p2p')} --seq-length {split.num_tokens}"
        )

    return flags


def _torchtitan(split: DeviceSplit) -> str:
    return (
        f"--parallelism.context_parallel_degree {split.ranks} "
        "--parallelism.context_parallel_load_balancer ptrr "
        f"--training.seq_len {split.num_tokens}"
    )


def _accelerate(words: str) -> Callable[[DeviceSplit], str]:
    def flags(split: DeviceSplit) -> str:
        return f"ParallelismConfig({words.format(split.ranks)}, dp_shard_size={split.groups})"

    return flags


TE = "TransformerEngine, attn_forward_func_with_cp"
_OTHER_HEADS = "{degree} does not divide {heads} heads"
_TE_HEADS = Rule(
    lambda model, degree: bool(model.num_heads % degree or model.num_kv_heads % degree),
    _OTHER_HEADS,
    "TransformerEngine, AttnFuncWithCPAndQKVOA2A.forward",
)
_TE_WINDOWS = Rule(lambda model, _: model.has_windows, "no sliding windows", TE)
_TE_SINKS = Rule(lambda model, _: model.has_sinks, "no attention sinks", TE)
_TE_SOFTCAP = Rule(
    lambda model, _: model.has_softcap, "no cap of scores", "TransformerEngine has none"
)
_TITAN = "torchtitan, context_parallel/api.py"
_TITAN_SOFTCAP = Rule(
    lambda model, _: model.has_softcap, "no score_mod, hence no cap of scores", _TITAN
)
_HF_WINDOWS = Rule(
    lambda model, _: model.has_windows,
    "no sliding windows",
    "accelerate, _attach_context_parallel_hooks; transformers, supports_context_parallel",
)
_HF_SDPA = Rule(
    lambda model, _: model.has_sinks or model.has_softcap,
    "only SDPA, which has no sinks and no cap of scores",
    "transformers, Trainer._prepare_context_parallel_inputs",
)
_DEEPSPEED_HEADS = Rule(
    lambda model, degree: bool(
        model.num_heads % degree or (model.num_kv_heads % degree and degree % model.num_kv_heads)
    ),
    _OTHER_HEADS,
    "DeepSpeed, UlyssesSPAttentionHF.__init__",
)
_DEEPSPEED_SINKS = Rule(
    lambda model, _: model.has_sinks,
    "sinks are not split with the heads",
    "DeepSpeed, UlyssesSPAttentionHF.forward passes the model's arguments on",
)

MEGATRON = Library(
    "Megatron-Core 0.16, TransformerEngine 2",
    (
        Scheme(
            "p2p",
            _together,
            _ring,
            _megatron("p2p"),
            _twice,
            (_TE_WINDOWS, _TE_SINKS, _TE_SOFTCAP),
        ),
        Scheme(
            "all_gather",
            _together,
            _all_gather,
            _megatron("all_gather"),
            _twice,
            (_TE_SINKS, _TE_SOFTCAP),
        ),
        Scheme("a2a", _all_heads, _ulysses, _megatron("a2a"), _twice, (_TE_HEADS, _TE_SOFTCAP)),
        Scheme(
            "a2a+p2p",
            _in_between,
            _ulysses,
            _megatron("a2a+p2p"),
            _twice,
            (_TE_HEADS, _TE_WINDOWS, _TE_SINKS, _TE_SOFTCAP),
        ),
    ),
)
TORCHTITAN = Library(
    "torchtitan 0.3.0",
    (
        Scheme(
            'attn_backend="flex"',
            _together,
            _all_gather,
            _torchtitan,
            lambda ranks: 128 * ranks,  # whole blocks of flex attention's mask on every rank
            (_TITAN_SOFTCAP,),
        ),
    ),
)
_CP = "cp_size={}, cp_handler=TorchContextParallelConfig(cp_comm_strategy="
ACCELERATE = Library(
    "accelerate 1.15, DeepSpeed 0.18.2",
    (
        Scheme(
            "cp allgather",
            _together,
            _all_gather,
            _accelerate(f'{_CP}"allgather")'),
            _twice,
            (_HF_WINDOWS, _HF_SDPA),
        ),
        Scheme(
            "cp alltoall",
            _together,
            _ring,
            _accelerate(f'{_CP}"alltoall")'),
            _twice,
            (_HF_WINDOWS, _HF_SDPA),
        ),
        Scheme(
            "sp (Ulysses)",
            _all_heads,
            _ulysses,
            _accelerate(
                'sp_size={}, sp_backend="deepspeed", sp_handler=DeepSpeedSequenceParallelConfig('
                'sp_attn_implementation="flash_attention_2")'
            ),
            _each,
            (_DEEPSPEED_HEADS, _DEEPSPEED_SINKS),
        ),
    ),
)
LIBRARIES = MappingProxyType(
    {"megatron": MEGATRON, "torchtitan": TORCHTITAN, "accelerate": ACCELERATE}
)


class Cost(NamedTuple):
    """Simulated figures of all attention layers of a model, both passes, of one sequence.

    Attributes:
        strategy: what has them.
        exposed_seconds: of the rank that waits longest for messages.
        overhead_seconds: of the rank that copies, merges and posts longest.
        bytes_by_link: that a rank sends at most over each class of link.
    """

    strategy: str
    seconds: float
    exposed_seconds: float
    overhead_seconds: float
    bytes_by_link: dict[str, int]


class Setting(NamedTuple):
    """A legal setting of a library, and the plan that it stands for.

    Attributes:
        library: its title.
        options: flags to paste.
        plan: the name of the plan of ours that moves the same.
        save: what backward keeps of forward.
    """

    library: str
    scheme: str
    options: str
    plan: str
    save: str
    split: DeviceSplit
    cost: Cost

    @property
    def seconds(self) -> float:
        """Seconds of both passes of a sequence, on the ranks that share it."""
        return self.cost.seconds

    @property
    def seconds_a_sequence(self) -> float:
        """Seconds per sequence of the whole machine, whose groups work on different sequences at
        once.
        """
        return self.cost.seconds / self.split.groups


class Advice(NamedTuple):
    """The best legal setting of a library beside the best plan of ours.

    Attributes:
        library: its title.
        setting: on the most ranks, at most those asked for, that the library can run the model on;
            None if there are none.
        best: of the best plans on as many ranks.
        candidates: the best plan for each kind of layer.
        refused: schemes that its code refuses on the ranks asked for, each with the reason.
        lost: what the setting loses, and why.
        verdict: in a sentence.
        by_ranks: the best setting for each number of ranks that share a sequence, the fewest first.
    """

    library: str
    setting: Setting | None
    best: Cost
    candidates: tuple[Candidate, ...]
    refused: tuple[str, ...]
    lost: tuple[str, ...]
    verdict: str
    by_ranks: tuple[Setting, ...]


@checks_arguments
def advise(
    library: str,
    model: ModelAttention,
    num_tokens: int,
    machine: Machine,
    world_size: int,
    *,
    ranks: int | None = None,
) -> Advice:
    """Find the best setting that a library can legally run, and what it loses to the best plan.

    Args:
        library: "megatron", "torchtitan" or "accelerate".
        num_tokens: of one sequence.
        world_size: devices in all.
        ranks: devices that share one sequence; the others take other sequences. None: all.
    Raises:
        ValueError: if the library is not known, ranks does not divide world_size, or no plan fits
            the machine's memory.
    """
    require_known("library", library, LIBRARIES)
    facts = LIBRARIES[library]
    whole_number("num_tokens", num_tokens)
    whole_number("world_size", world_size, 2)
    ranks = world_size if ranks is None else whole_number("ranks", ranks, 2)
    if world_size % ranks:
        raise ValueError(
            f"ranks ({ranks}) must divide the {world_size} devices: groups of equal size share a "
            "sequence each"
        )
    layers = model.workloads(num_tokens)
    splits = (DeviceSplit(n, 1, world_size // n, num_tokens) for n in divisors(ranks)[1:])
    fastest = (_fastest(facts, model, layers, machine, split) for split in splits)
    by_ranks = tuple(setting for setting in fastest if setting)
    setting = by_ranks[-1] if by_ranks else None
    candidates = _best_plans(layers, machine, setting.split.ranks if setting else ranks)
    counts = [count for _, count in layers]
    best = _summed("the best plan", list(zip(candidates, counts, strict=True)))
    return Advice(
        facts.title,
        setting,
        best,
        candidates,
        tuple(_refused(facts, model, ranks)),
        tuple(_lost(setting, best, num_tokens, ranks)) if setting else (),
        _verdict(setting, best, ranks),
        by_ranks,
    )


def nearest_settings(candidate: Candidate) -> tuple[Setting, ...]:
    """Return the fastest setting of Megatron and torchtitan for a candidate's workload and ranks.

    None for masks neither full nor causal, and where not every strategy serves the workload.
    """
    work, n = candidate.work, candidate.world_size
    if n == 1 or work.strategies is not None or not isinstance(work.mask, Full | Causal):
        return ()
    model = ModelAttention(work.num_heads, work.num_kv_heads, work.head_dim, work.v_head_dim)
    split = DeviceSplit(n, 1, 1, work.num_tokens)
    machine, layers = candidate.machine, [(work, 1)]
    settings = (_fastest(facts, model, layers, machine, split) for facts in (MEGATRON, TORCHTITAN))
    return tuple(setting for setting in settings if setting)


def legal(library: Library, model: ModelAttention, ranks: int) -> Iterator[tuple[Scheme, int]]:
    """The schemes that run a model on a number of ranks, with each degree of heads."""
    for scheme in library.schemes:
        for degree in scheme.degrees(ranks):
            if not any(rule.refuses(model, degree) for rule in scheme.rules):
                yield scheme, degree


def _fastest(
    library: Library,
    model: ModelAttention,
    layers: Sequence[tuple[Workload, int]],
    machine: Machine,
    split: DeviceSplit,
) -> Setting | None:
    """The fastest legal setting on a split's ranks; of those that tie the first."""
    best: Setting | None = None
    for scheme, degree in legal(library, model, split.ranks):
        plan, multiple = (
            scheme.plan(split.ranks, degree, machine.node_size),
            scheme.multiple(split.ranks),
        )
        padded = -(-split.num_tokens // multiple) * multiple
        passes = [(_simulated(plan, _of_length(x, padded), machine), n) for x, n in layers]
        cost = _summed(scheme.name, passes)
        if best is None or cost.seconds * TIE < best.seconds:
            padded_split = split._replace(degree=degree, num_tokens=padded)
            save = layers[0][0].save or plan.default_save
            options = scheme.flags(padded_split)
            best = Setting(library.title, scheme.name, options, plan.name, save, padded_split, cost)
    return best


def _of_length(work: Workload, num_tokens: int) -> Workload:
    """The workload with padding: its layout is the same one of more tokens, or zigzag."""
    if work.num_tokens == num_tokens:
        return work
    name = work.layout if isinstance(work.layout, str) else work.layout.name
    return replace(work, num_tokens=num_tokens, layout=name if name in LAYOUT_NAMES else "zigzag")


def _simulated(plan: Plan, work: Workload, machine: Machine) -> Simulation:
    """A plan as a library runs it: every transfer in full."""
    return simulate(plan, work, machine, prune=False)


def _summed(strategy: str, layers: Sequence[tuple[Simulation | Candidate, int]]) -> Cost:
    """Return the cost of layers of several kinds.

    Args:
        layers: (one layer, how many there are) of each kind.
    """
    bytes_by_link: Counter[str] = Counter()
    for layer, count in layers:
        bytes_by_link.update(
            {link: count * bytes_by_link for link, bytes_by_link in layer.bytes_by_link.items()}
        )
    return Cost(
        strategy,
        sum(count * layer.seconds for layer, count in layers),
        sum(count * layer.exposed_seconds for layer, count in layers),
        sum(count * layer.overhead_seconds for layer, count in layers),
        {link: bytes_by_link[link] for link in LINKS if link in bytes_by_link},
    )


def _best_plans(
    layers: Sequence[tuple[Workload, int]], machine: Machine, ranks: int
) -> tuple[Candidate, ...]:
    """The best plan for each kind of layer; all have one layout, which levels the first kind."""
    first_work = layers[0][0]
    layout = default_layout(first_work.mask, first_work.num_tokens, ranks)
    laid_out = (replace(work, layout=layout) for work, _ in layers)
    return tuple(search(work, machine, world_size=ranks)[0] for work in laid_out)


def _refused(library: Library, model: ModelAttention, ranks: int) -> Iterator[str]:
    """Each scheme that no degree of heads makes legal on these ranks, with every reason."""
    heads = f"{model.num_heads}:{model.num_kv_heads}"
    for scheme in library.schemes:
        degrees = scheme.degrees(ranks)
        for rule in scheme.rules:
            if degrees and all(rule.refuses(model, degree) for degree in degrees):
                because = rule.because.format(heads=heads, degree=" or ".join(map(str, degrees)))
                yield f"{scheme.name}: {because} ({rule.source})"


def _lost(setting: Setting, best: Cost, num_tokens: int, ranks: int) -> Iterator[str]:
    split = setting.split
    if split.ranks < ranks:
        yield (
            f"{split.ranks} of the {ranks} devices at most can share a sequence; the others take "
            "other sequences"
        )
    padding = split.num_tokens - num_tokens
    if padding:
        yield (
            f"{padding} tokens of padding ({100 * padding / num_tokens:.2f} %), up to a multiple "
            f"that {split.ranks} ranks can share"
        )
    if setting.seconds > TIE * best.seconds:
        why = reason(setting.cost, (best, setting.cost), None)
        yield f"{why[0].lower()}{why[1:].rstrip('.')}"


def _verdict(setting: Setting | None, best: Cost, ranks: int) -> str:
    if setting is None:
        return f"None of its settings runs this model on {ranks} devices, or on part of them."
    ratio = setting.seconds / best.seconds
    if ratio > AS_GOOD:
        return f"The best plan of ours takes {100 * (1 - 1 / ratio):.1f} % less time."
    subject = "Your own Ulysses" if setting.split.degree > 1 else "Your own setting"
    return f"{subject} ({setting.scheme}) is as good as anything of ours here: stay with it."
