"""A program's operations timed on a machine that is described by numbers.

prices: what each operation takes; priced_programs: all ranks' operations with these prices;
engine: the event loop; network: who shares which link, and how; timeline: what a pass gave;
machine_files: machines as TOML.
"""

from tilewise.simulation.simulator import Simulation

__all__ = ["Simulation"]
