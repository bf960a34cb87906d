"""Wires: how an operand or a partial is written into bytes on its way, as frozen values.

wire: the values and the set of them that a call has; latent: what stands for keys and values;
float8: eight bits a number.
Encoding and decoding themselves are execution's (encoding.py, expansion.py); nothing here imports
torch.
"""

from tilewise.wires.float8 import Float8
from tilewise.wires.latent import Latent
from tilewise.wires.wire import Plain, Wire, Wires

__all__ = ["Float8", "Latent", "Plain", "Wire", "Wires"]
