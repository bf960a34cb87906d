"""The memory of our own passes, to the byte: from the codes that the ranks would run."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from tilewise.arguments import DtypeName
from tilewise.compiler.code import Code
from tilewise.compiler.ops import Post
from tilewise.masks.base import Causal, Mask
from tilewise.plan.ir import Plan
from tilewise.planning.search import promising
from tilewise.simulation.peak_memory import PassMemory
from tilewise.transport.marked_exchange import MARKED_BYTES, MARKED_BYTES_ON_A_HOST, marked_sizes
from tilewise.transport.process_group import GLOO_TRAITS
from tilewise.workload import Workload
from tilewise_tools.fits.setting import Setting


class Call(NamedTuple):
    """A call of attention: its shapes and the mask of its layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: DtypeName
    mask: Mask


class OurPasses:
    """The codes of attention's passes on one length, of the rank that needs most.

    One plan serves all layers, as in ContextParallel; it is chosen for the first call.
    """

    def __init__(self, setting: Setting, num_tokens: int):
        self.setting, self._num_tokens = setting, num_tokens
        self._plans: dict[Call, tuple[Plan, Plan]] = {}
        self._codes: dict[tuple[Call, bool], Code] = {}
        self.calls: dict[Call, None] = {}

    def code(self, call: Call, backward: bool) -> Code:
        """Return the code of a pass."""
        key = call, backward
        if key not in self._codes:
            self.calls[call] = None
            work = self._work(call)
            passes = work.resolve(*self._pair(call, work))
            device = self.setting.machine.device
            traits = GLOO_TRAITS if device == "cpu" and self.setting.cp > 1 else None
            memory = PassMemory(passes, backward=backward, device=device, traits=traits)
            self._codes[key] = memory.largest_code
        return self._codes[key]

    @cached_property
    def plan_names(self) -> tuple[str, ...]:
        """Names of the plans of forward and backward, one if they are equal."""
        call = next(iter(self.calls))
        pair = self._pair(call, self._work(call))
        return tuple(dict.fromkeys(plan.name for plan in pair))

    def workspace_bytes(self) -> int:
        """Bytes of the workspace, which lives from the first pass on and serves all that follow."""
        return max((code.num_bytes for code in self._codes.values()), default=0)

    def kept_bytes(self) -> int:
        """Bytes that stay from the first pass on: the workspace, and those of small exchanges."""
        return self.workspace_bytes() + self.exchange_bytes()

    def exchange_bytes(self) -> int:
        """Bytes that gloo's small exchanges within teams keep, on a CPU; 0 on a GPU."""
        if self.setting.machine.device != "cpu":
            return 0
        exchanges = (
            (op.team, op.team.team.ranks.index(code.rank))
            for code in self._codes.values()
            for op in code.ops
            if isinstance(op, Post) and op.team is not None
        )
        kinds: dict[tuple[Any, int], None] = {}
        for exchange, place in exchanges:  # as DistTransport.exchange_all chooses, on one host
            others = len(exchange.team.ranks) - 1
            if exchange.most_bytes * others <= MARKED_BYTES_ON_A_HOST:
                kinds[exchange.sizes, place] = None
            if exchange.most_bytes * others > MARKED_BYTES:  # ranks tell each other their hosts
                kinds[((0,) * (others + 1),) * 2, place] = None
        return sum(sum(map(sum, marked_sizes(*kind))) for kind in kinds)

    def prepare(self, calls: Iterable[Call]) -> None:
        """Make the codes of both passes of calls."""
        for call in calls:
            for backward in (False, True):
                self.code(call, backward)

    def _work(self, call: Call) -> Workload:
        return Workload(
            self._num_tokens,
            call.num_heads,
            call.num_kv_heads,
            call.head_dim,
            call.dtype,
            mask=call.mask,
            v_head_dim=call.v_head_dim,
            layout=self.setting.layout(self._num_tokens),
        )

    def _pair(self, call: Call, work: Workload) -> tuple[Plan, Plan]:
        setting = self.setting
        if setting.plan is not None:
            return setting.plan, setting.plan
        first = next(iter(self._plans.values()), None)
        if first is None:  # ContextParallel's own mask is causal, whatever the layer's
            chosen = promising(replace(work, mask=Causal()), setting.machine, setting.cp)
            first = self._plans[call] = chosen.plan, chosen.backward_plan
        if first[0].made_for is not None and call.mask != Causal():
            chosen = promising(work, setting.machine, setting.cp)
            return chosen.plan, chosen.backward_plan
        return first
