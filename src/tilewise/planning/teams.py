"""Simulation of a sample of a pass under a split by heads: one rank of each team.

A team is the ranks that trade their shards for heads. Its ranks compute the same tiles for
different heads, so one of them stands for all, on its share of the machine. The exchange before and
after is added as the seconds that its bytes take at the links' full speed.
"""

from dataclasses import replace

from tilewise.masks.tables import PerHead
from tilewise.plan.ir import Item, Plan, Role, Side
from tilewise.plan.payload import head_groups
from tilewise.plan.shifts import Shift, Symmetry
from tilewise.planning.pass_model import PassModel
from tilewise.simulation.machine import Machine
from tilewise.simulation.network import BETWEEN, INSIDE
from tilewise.simulation.simulator import simulate_pass
from tilewise.simulation.timeline import RankUse, Timeline


def splits_into_teams(model: PassModel, plan: Plan) -> bool:
    """Return whether a plan splits heads in such a way that teams and nodes nest."""
    degree, size = plan.num_head_groups, model.machine.node_size
    nest = size % degree == 0 or degree % size == 0
    heads_alike = not isinstance(model.work.mask, PerHead) and model.work.wires.latent is None
    one_part = model.work.strategies is None
    return plan.traits.head_split is not None and nest and heads_alike and one_part


def simulate_teams(model: PassModel, plan: Plan) -> tuple[Timeline, Symmetry]:
    """Simulate the pass; return also which rank stands for which."""
    assert plan.traits.head_split
    degree, inner = plan.traits.head_split
    inner = inner.with_waiting_results(plan.waiting_results)
    work = model.work
    num_heads, num_kv_heads = head_groups(work.num_heads, work.num_kv_heads, degree).size
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    team_work = replace(work, **heads, layout=model.team_layout(degree))
    machine = _of_one_head_rank(model.machine, degree, model.world_size)
    timeline, _ = simulate_pass(inner, team_work, machine, model.backward, exact=True)
    ranks_in_node = min(degree, model.machine.node_size)
    payload, rows = model.payload(degree), max(model.layout.sizes)
    parts = (Item(side, role, 0) for side in Side for role in (Role.OPERAND, Role.PARTIAL))
    traded_bytes = rows * sum(map(payload.row_bytes, parts))
    sent_bytes = {
        INSIDE: (ranks_in_node - 1) * traded_bytes,
        BETWEEN: (degree - ranks_in_node) * traded_bytes,
    }
    widths = {INSIDE: machine.inside.bandwidth, BETWEEN: machine.nic_bandwidth}
    seconds = max(sent_bytes[link] / widths[link] for link in sent_bytes)
    seconds += 2 * (machine.inside if ranks_in_node == degree else machine.between).latency

    def with_exchange(use: RankUse) -> RankUse:
        links = {
            x: use.bytes_by_link.get(x, 0) + sent_bytes.get(x, 0)
            for x in {**sent_bytes, **use.bytes_by_link}
        }
        return use._replace(
            rank=use.rank * degree,
            members=degree,
            exposed_seconds=use.exposed_seconds + seconds,
            bytes_by_link={link: num_bytes for link, num_bytes in links.items() if num_bytes},
        )

    uses = tuple(map(with_exchange, timeline.ranks))
    heads = (Shift(1, degree, free=True),)
    symmetry = Symmetry(model.world_size, heads, heads)
    return Timeline(timeline.seconds + seconds, uses, timeline.recording), symmetry


def _of_one_head_rank(machine: Machine, degree: int, world_size: int) -> Machine:
    """Return a machine with one rank of each team, which gets its share of links and cores."""
    sharers = min(degree, machine.node_size)
    nics = max(1, machine.nics // sharers)
    between, across = (
        link and replace(link, bandwidth=link.bandwidth * share)
        for link, share in (
            (machine.between, machine.nics / nics / sharers),
            (machine.across, 1 / degree),
        )
    )
    assert between
    return replace(
        machine,
        node_size=machine.node_size // sharers,
        nics=nics,
        between=between,
        across=across,
        rack_nodes=machine.rack_nodes and max(1, machine.rack_nodes * sharers // degree),
        cores=machine.cores and machine.cores / sharers,
        core_sharers=machine.core_sharers and max(1, machine.core_sharers // sharers),
        agree_seconds=machine.agree_seconds * (world_size - 1) / max(1, world_size // degree - 1),
    )
