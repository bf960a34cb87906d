"""A sample of a pass under a split by heads: the inner plan between teams, one rank of each.

A team is the ranks that trade their shards for heads. Its ranks compute the same tiles for other
heads, so that one of them stands for all, on a machine of which it has its share. The exchange
before and after is added as so many bytes at the links' full speed.
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
    """Return whether a plan's heads are split, and so that teams and nodes nest."""
    degree, size = plan.num_head_groups, model.machine.node_size
    nest = size % degree == 0 or degree % size == 0
    heads_alike = not isinstance(model.work.mask, PerHead) and model.work.wires.latent is None
    return plan.traits.head_split is not None and nest and heads_alike


def simulate_teams(model: PassModel, plan: Plan) -> tuple[Timeline, Symmetry]:
    """Simulate the pass; return also which rank stands for which."""
    assert plan.traits.head_split
    degree, inner = plan.traits.head_split
    work = model.work
    num_heads, num_kv_heads = head_groups(work.num_heads, work.num_kv_heads, degree).size
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    team_work = replace(work, **heads, layout=model.team_layout(degree))
    machine = _of_one_head_rank(model.machine, degree, model.world_size)
    timeline, _ = simulate_pass(inner, team_work, machine, model.backward, exact=True)
    near = min(degree, model.machine.node_size)
    payload, rows = model.payload(degree), max(model.layout.sizes)
    parts = (Item(side, role, 0) for side in Side for role in (Role.OPERAND, Role.PARTIAL))
    traded = rows * sum(map(payload.row_bytes, parts))
    sent = {INSIDE: (near - 1) * traded, BETWEEN: (degree - near) * traded}
    widths = {INSIDE: machine.inside.bandwidth, BETWEEN: machine.nic_bandwidth}
    seconds = max(sent[link] / widths[link] for link in sent)
    seconds += 2 * (machine.inside if near == degree else machine.between).latency

    def with_exchange(of: RankUse) -> RankUse:
        links = {
            x: of.bytes_by_link.get(x, 0) + sent.get(x, 0) for x in {**sent, **of.bytes_by_link}
        }
        return of._replace(
            rank=of.rank * degree,
            members=degree,
            exposed_seconds=of.exposed_seconds + seconds,
            bytes_by_link={link: moved for link, moved in links.items() if moved},
        )

    uses = tuple(map(with_exchange, timeline.ranks))
    heads = (Shift(1, degree, free=True),)
    symmetry = Symmetry(model.world_size, heads, heads)
    return Timeline(timeline.seconds + seconds, uses, timeline.recording), symmetry


def _of_one_head_rank(machine: Machine, degree: int, world_size: int) -> Machine:
    """Return the share of a machine that one rank of each team has beside the others."""
    sharers = min(degree, machine.node_size)
    nics = max(1, machine.nics // sharers)
    between, across = (
        link and replace(link, bandwidth=link.bandwidth * part)
        for link, part in (
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
