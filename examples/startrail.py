"""StarTrail's scheme as a plan: teams share queries, and KV goes round rings of teams.

    tilewise bench strategies --world-size 8 --strategy ring --strategy mesh \
        --strategy examples/startrail.py:startrail

Source: StarTrail (arXiv 2407.00611), from its description; nobody compared it with its code. Ranks
stand in teams of C. A team's members all work on the queries of all; member c begins with the KV of
one team, and gets that of every C-th team round a ring of world_size / C^2 ranks. So each computes
a tile of C x world_size / C shards, and sends what a mesh of C rows sends, or one KV shard more.
"""

import tilewise as tw
from tilewise.plan import RankBuilder, Side, operand, partial


def startrail(world_size: int, team: int = 2) -> tw.Plan:
    """The plan of teams of `team` ranks, whose square must divide world_size."""
    if world_size % team**2:
        raise ValueError(
            f"world_size ({world_size}) must be a multiple of team ({team}) squared, {team**2}"
        )
    teams = world_size // team

    def members(number: int) -> list[int]:
        return [number * team + i for i in range(team)]

    def script(rank: int):
        s, (mine, place) = RankBuilder(rank), divmod(rank, team)
        first = mine // team * team  # of the teams that begin with each other's KV
        for other in members(mine):
            if other != rank:
                s.send(operand(Side.Q, rank), other)
                s.recv(operand(Side.Q, other), other)
        readers = [t * team + mine % team for t in range(teams)]  # of this rank's KV
        for other in readers[first : first + team]:
            if other != rank:
                s.send(operand(Side.KV, rank), other)
        for other in members(first + place):
            if other != rank:
                s.recv(operand(Side.KV, other), other)
        s.next()
        held: list[int] = []
        for t in range(0, teams, team):
            here, after = (members((first + place - x) % teams) for x in (t, t + team))
            s.tile(members(mine), here)
            held += here
            for leaving, arriving in zip(here, after, strict=True) if t + team < teams else ():
                s.send(operand(Side.KV, leaving), (rank + team**2) % world_size)
                s.recv(operand(Side.KV, arriving), (rank - team**2) % world_size)
            s.next()
        for side, others, back in (
            (Side.Q, members(mine), members(mine)),
            (Side.KV, held, readers),
        ):
            for other in others:
                if other != rank:
                    s.send(partial(side, other), other)
            for other in back:
                if other != rank:
                    s.recv(partial(side, rank), other)
        return s.done()

    return tw.Plan(f"startrail({world_size}, team={team})", world_size, script=script)


if __name__ == "__main__":
    plan = startrail(8)
    plan.check()
    print(plan)
    work = tw.Workload(65536, num_heads=32, num_kv_heads=32, head_dim=128)
    for one in (plan, tw.mesh(8, q_tile=2), tw.ring(8)):
        print(max(tw.volume(one, work).forward), "bytes forward,", one.name)
