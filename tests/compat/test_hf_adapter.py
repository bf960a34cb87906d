"""substitute_hf_flash_attn: transformers models on two ranks are the unsplit ones."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from processes.launcher import run_processes

CU = (0, 5, 17, 24)
TOKENS = torch.arange(24).mul(7).remainder(31)
MODELS = ("mistral", "gptj", "falcon")
BOUNDS = {"mistral": 1e-10}  # others take their softmax in fp32 where they are not split
FORWARD = "_flash_attention_forward"


def model_of(name: str, implementation: str) -> Any:
    import transformers

    sizes = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    if name == "mistral":
        more = {"intermediate_size": 48, "num_key_value_heads": 2, "sliding_window": 4}
        model: Any = transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, **more))
    elif name == "gptj":
        more = {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}
        dropout = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
        config = transformers.GPTJConfig(vocab_size=32, **more, **dropout, bos_token_id=1)
        model = transformers.GPTJForCausalLM(config)
    else:
        model = transformers.FalconForCausalLM(transformers.FalconConfig(**sizes, alibi=False))
    model.double().config.use_cache = False
    if implementation == "flash_attention_2" and name != "mistral":
        use_flash_classes(model)
    # As attn_implementation, which looks for the flash-attn package.
    model.config._attn_implementation = implementation
    return model


def use_flash_classes(model: Any) -> None:
    """Layers as of a model made for flash attention, which transformers makes where it is there."""
    import sys

    for layer in model.transformer.h:
        name = "attn" if hasattr(layer, "attn") else "self_attention"
        plain = getattr(layer, name)
        names = {"GPTJAttention": "GPTJFlashAttention2", "FalconAttention": "FalconFlashAttention2"}
        module = sys.modules[type(plain).__module__]
        flash_class = getattr(module, names[type(plain).__name__], None)
        if flash_class is None:  # GPT-J of transformers 5.24 asks AttentionInterface
            return
        flash = flash_class(model.config, plain.layer_idx)
        flash.double().load_state_dict(plain.state_dict())
        setattr(layer, name, flash)


def kernel(q, causal=True, softcap=None) -> None:
    """Arguments as those of flash_attn's private functions."""


def split(rank: int, stride: int) -> list[Any]:
    import torch.distributed as dist
    from transformers import modeling_flash_attention_utils as utils
    from transformers.models.falcon import modeling_falcon as falcon
    from transformers.models.gptj import modeling_gptj as gptj

    from tilewise.compat import ring_flash_attn as rfa

    rfa.install()
    from ring_flash_attn import substitute_hf_flash_attn, update_ring_flash_attn_params
    from ring_flash_attn.adapters.hf_adapter import DATA_PARAMS, use_ring_attn
    from ring_flash_attn.utils import AllGatherComm, get_default_args

    comm, rows = AllGatherComm(dist.group.WORLD), torch.empty(6)
    comm.all_gather(rows, torch.full((3,), float(rank)))
    comm.wait()
    assert rows.tolist() == [0.0] * 3 + [1.0] * 3 and not comm.handles
    assert get_default_args(kernel) == {"q": None, "causal": True, "softcap": 0.0}
    # As these modules import it where flash-attn is installed: before, and behind.
    setattr(gptj, FORWARD, getattr(utils, FORWARD))
    substitute_hf_flash_attn(dist.group.WORLD, stride)
    setattr(falcon, FORWARD, getattr(utils, FORWARD))
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(CU)])
    ids, places = TOKENS.chunk(2)[rank][None], positions.chunk(2)[rank][None]
    results = []
    for name in MODELS:
        model = model_of(name, "flash_attention_2")
        if name == MODELS[0]:
            with pytest.raises(ValueError, match="call update_ring_flash_attn_params"):
                model(input_ids=ids, position_ids=places)
            update_ring_flash_attn_params(torch.tensor(CU, dtype=torch.int32), dist.group.WORLD)
            assert DATA_PARAMS["local_k_slice"] == (slice(0, 12), slice(5, 24))[rank]
        logits = model(input_ids=ids, position_ids=places).logits[0]
        logits.square().sum().backward()
        grads = {name: x.grad for name, x in model.named_parameters()}
        for grad in grads.values():
            dist.all_reduce(grad)
        results.append((logits.detach(), grads))
    use_ring_attn(False)  # and transformers' own functions run, which need flash-attn
    with pytest.raises(Exception, match=r"lash|callable"):
        model(input_ids=ids, position_ids=places)
    return results


def test_models_with_packed_rows_are_the_unsplit_ones():
    """A window, and models that call transformers' _flash_attention_forward themselves."""
    results = run_processes(2, split, 1)
    for number, name in enumerate(MODELS):
        model, bound = (
            model_of(name, "eager" if name != "mistral" else "sdpa"),
            BOUNDS.get(name, 1e-6),
        )
        logits = torch.cat([model(TOKENS[None, a:b]).logits[0] for a, b in pairwise(CU)])
        logits.square().sum().backward()
        got = torch.cat([rank[number][0] for rank in results])
        assert (got - logits.detach()).abs().max() < bound
        for rank in results:
            errors = [
                float((rank[number][1][n] - x.grad).abs().max())
                for n, x in model.named_parameters()
            ]
            assert max(errors) < 10 * bound
