"""substitute_hf_flash_attn: a transformers model on two ranks is the unsplit one."""

from itertools import pairwise

import torch
from processes.launcher import run_processes

CU = (0, 5, 17, 24)


def model_of(implementation: str):
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=4, use_cache=False,
    )  # fmt: skip
    model = MistralForCausalLM(config).double()
    # As attn_implementation, which looks for the flash-attn package.
    model.config._attn_implementation = implementation
    return model


def kernel(q, causal=True, softcap=None) -> None:
    """Arguments as those of flash_attn's private functions."""


def split(rank: int, stride: int) -> tuple[torch.Tensor, dict[str, torch.Tensor], str]:
    import torch.distributed as dist

    from tilewise.compat import ring_flash_attn as rfa

    rfa.install()
    from ring_flash_attn import substitute_hf_flash_attn, update_ring_flash_attn_params
    from ring_flash_attn.adapters.hf_adapter import DATA_PARAMS
    from ring_flash_attn.utils import AllGatherComm, get_default_args

    comm, rows = AllGatherComm(dist.group.WORLD), torch.empty(6)
    comm.all_gather(rows, torch.full((3,), float(rank)))
    comm.wait()
    assert rows.tolist() == [0.0] * 3 + [1.0] * 3 and not comm.handles
    assert get_default_args(kernel) == {"q": None, "causal": True, "softcap": 0.0}
    substitute_hf_flash_attn(dist.group.WORLD, stride)
    model = model_of("flash_attention_2")
    tokens = torch.arange(24).mul(7).remainder(31)
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(CU)])
    ids, places = tokens.chunk(2)[rank][None], positions.chunk(2)[rank][None]
    try:
        model(input_ids=ids, position_ids=places)
        error = ""
    except ValueError as raised:
        error = str(raised)
    update_ring_flash_attn_params(torch.tensor(CU, dtype=torch.int32), dist.group.WORLD)
    assert DATA_PARAMS["local_k_slice"] == (slice(0, 12), slice(5, 24))[rank]
    logits = model(input_ids=ids, position_ids=places).logits[0]
    logits.square().sum().backward()
    grads = {name: x.grad for name, x in model.named_parameters()}
    for grad in grads.values():
        dist.all_reduce(grad)
    return logits.detach(), grads, error


def test_a_model_with_windows_and_packed_rows_is_the_unsplit_one():
    model = model_of("sdpa")
    tokens = torch.arange(24).mul(7).remainder(31)
    logits = torch.cat([model(tokens[None, a:b]).logits[0] for a, b in pairwise(CU)])
    logits.square().sum().backward()
    results = run_processes(2, split, 1)
    got = torch.cat([mine for mine, _, _ in results])
    assert (got - logits.detach()).abs().max() < 1e-10
    for _, grads, error in results:
        assert "call update_ring_flash_attn_params" in error
        errors = [float((grads[n] - x.grad).abs().max()) for n, x in model.named_parameters()]
        assert max(errors) < 1e-9
