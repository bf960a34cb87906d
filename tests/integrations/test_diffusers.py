"""Models of diffusers with their sequence split: output and every gradient of one process."""

from __future__ import annotations

import copy
from functools import partial
from itertools import product
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers", reason="needs diffusers, of the extra diffusers")

from processes.launcher import run_processes
from support import diffusers_models as models
from support.diffusers_models import (
    WAN,
    Inputs,
    flux,
    flux2,
    flux2_inputs,
    flux_inputs,
    helios,
    helios_inputs,
    hunyuan_video,
    hunyuan_video_inputs,
    ltx,
    ltx2,
    ltx2_inputs,
    ltx_inputs,
    qwen_image,
    qwen_image_inputs,
    skyreels,
    wan,
    wan_inputs,
)

import tilewise as tw
from tilewise.integrations.diffusers import enable_parallelism

KINDS = {
    "flux": (flux, flux_inputs),
    "wan": (wan, wan_inputs),
    "wan from an image": (partial(wan, image=True), partial(wan_inputs, image=True)),
    "wan with a time a token": (wan, partial(wan_inputs, token_times=True)),
    "flux2": (flux2, flux2_inputs),
    "chronoedit": (models.chrono_edit, partial(wan_inputs, image=True)),
    "qwen-image": (qwen_image, qwen_image_inputs),
    "qwen-image with padding": (qwen_image, partial(qwen_image_inputs, padded=True)),
    "ltx": (ltx, ltx_inputs),
    "ltx2": (ltx2, ltx2_inputs),
    "ltx2 with a time a token": (
        partial(ltx2, rope_type="split", gated_attn=True),
        partial(ltx2_inputs, token_times=True),
    ),
    "minimax-h3": (models.minimax_h3, models.minimax_h3_inputs),
    "hunyuan-video": (hunyuan_video, hunyuan_video_inputs),
    "hunyuan-video from an image": (
        partial(hunyuan_video, image_condition_type="token_replace"),
        hunyuan_video_inputs,
    ),
    "hunyuan-video 1.5": (models.hunyuan_video15, models.hunyuan_video15_inputs),
    "hunyuan-video 1.5 without an image": (
        models.hunyuan_video15,
        partial(models.hunyuan_video15_inputs, image=False),
    ),
    "hunyuan-image": (models.hunyuan_image, models.hunyuan_image_inputs),
    "hunyuan-image with glyphs": (
        partial(models.hunyuan_image, text_embed_2_dim=8),
        partial(models.hunyuan_image_inputs, glyphs=True),
    ),
    "framepack": (models.framepack, models.framepack_inputs),
    "framepack of one entry": (models.framepack, partial(models.framepack_inputs, num_entries=1)),
    "ovis-image": (models.ovis_image, models.unpooled_inputs),
    "longcat-image": (models.longcat_image, models.unpooled_inputs),
    "longcat-audio": (models.longcat_audio, models.longcat_audio_inputs),
    "longcat-audio with padding": (
        partial(models.longcat_audio, adaln_type="local"),
        partial(models.longcat_audio_inputs, padded=True),
    ),
    "skyreels": (skyreels, wan_inputs),
    "skyreels from an image": (
        partial(skyreels, **models.IMAGE),
        partial(wan_inputs, image=True),
    ),
    "skyreels with a time a frame": (skyreels, models.forcing_inputs),
    "skyreels with blocks of frames": (
        partial(skyreels, num_frame_per_block=2),
        models.forcing_inputs,
    ),
    "helios": (helios, helios_inputs),
    "helios without history in cross attention": (
        partial(helios, guidance_cross_attn=False),
        helios_inputs,
    ),
}
UNCHECKPOINTED = (
    *("longcat-audio", "longcat-audio with padding"),  # does not support it
    *("hunyuan-image", "hunyuan-image with glyphs"),  # diffusers 0.42.1 raises TypeError
)
LEAVES = "hidden_states", "encoder_hidden_states", "audio_hidden_states"


class Trained(NamedTuple):
    """The output of a model, and the gradients of its parameters and inputs."""

    out: Tensor
    gradients: dict[str, Tensor]


def made(make: Any) -> Any:
    torch.manual_seed(0)
    return make().train()


def trained(model: nn.Module, inputs: Inputs) -> Trained:
    """One step, with a loss that weighs every number of the output differently."""
    model.zero_grad()
    leaves = {name: inputs[name].clone().requires_grad_() for name in LEAVES if name in inputs}
    outs = model(**{**inputs, **leaves}, return_dict=False)
    out = torch.cat([x.flatten() for x in outs])
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    (out * weights).sum().backward()
    named = {**dict(model.named_parameters()), **leaves}
    nothing = {name: torch.zeros_like(x) for name, x in named.items()}
    found = {name: nothing[name] if x.grad is None else x.grad.clone() for name, x in named.items()}
    return Trained(out.detach(), found)


def assert_one_process(ranks: list[Trained], whole: Trained) -> None:
    def error(x: Tensor, y: Tensor) -> float:
        return float((x - y).abs().max() / y.abs().max().clamp_min(1))

    assert max(error(rank.out, whole.out) for rank in ranks) < 1e-5
    errors = {
        name: error(torch.stack([rank.gradients[name] for rank in ranks]).sum(0), grad)
        for name, grad in whole.gradients.items()
    }
    assert max(errors.values()) < 1e-5, errors


def plan_for(draw: Random, n: int) -> Any:
    plans: list[Any] = ["auto", tw.ring(n), tw.all_gather(n)]
    if n % 2 == 0:
        plans.append(tw.ulysses(2, inner=tw.ring(n // 2)))
    return draw.choice(plans)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_a_split_model_is_one_process(kind: str, seed: int) -> None:
    make, inputs_of = KINDS[kind]
    draw = Random(seed)
    n, model = draw.randint(2, 6), made(make)
    if seed % 2 and kind not in UNCHECKPOINTED:
        model.enable_gradient_checkpointing()  # pyright: ignore[reportCallIssue]
    calls = [inputs_of(draw) for _ in range(2)]
    want = [trained(model, inputs) for inputs in calls]
    plan = plan_for(draw, n)

    def on_rank(rank: int, group: Any) -> list[Trained]:
        own = enable_parallelism(copy.deepcopy(model), group, strategy=plan)
        return [trained(own, inputs) for inputs in calls]

    for ranks, whole in zip(zip(*tw.loopback(n, on_rank), strict=True), want, strict=True):
        assert_one_process([*ranks], whole)
    again = trained(model, calls[0])  # its attention takes the same way, and is not split
    assert torch.equal(again.out, want[0].out)


def test_lora_is_one_process() -> None:
    from peft import LoraConfig

    model = made(wan)
    config = LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
    model.add_adapter(config)  # pyright: ignore[reportCallIssue]
    inputs = wan_inputs(Random(0))
    want = trained(model, inputs)

    def on_rank(rank: int, group: Any) -> Trained:
        return trained(enable_parallelism(copy.deepcopy(model), group), inputs)

    assert any("lora" in name for name in want.gradients)
    assert_one_process(tw.loopback(3, on_rank), want)


def _on_process(rank: int) -> list[Trained]:
    from diffusers.models._modeling_parallel import ContextParallelConfig
    from torch.distributed.device_mesh import init_device_mesh

    model, inputs = made(flux), flux_inputs(Random(1))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ring", "ulysses"))
    groups = mesh, mesh["ulysses"], ContextParallelConfig(ulysses_degree=2), None
    return [trained(enable_parallelism(copy.deepcopy(model), group), inputs) for group in groups]


def test_meshes_and_their_configuration_on_processes() -> None:
    want = trained(made(flux), flux_inputs(Random(1)))
    for ranks in zip(*run_processes(2, _on_process), strict=True):
        assert_one_process([*ranks], want)


def _kinds_on_process(rank: int, kinds: tuple[str, ...], seeds: tuple[int, ...]) -> list[Trained]:
    found: list[Trained] = []
    for kind, seed in product(kinds, seeds):
        make, inputs_of = KINDS[kind]
        model = enable_parallelism(made(make))
        found.append(trained(model, inputs_of(Random(seed))))
    return found


@pytest.mark.parametrize(
    "n, kinds, seeds",
    [
        (3, ("qwen-image with padding", "hunyuan-video"), (7,)),
        pytest.param(8, tuple(KINDS), (7, 8), marks=pytest.mark.slow),
    ],
)
def test_models_on_processes(n: int, kinds: tuple[str, ...], seeds: tuple[int, ...]) -> None:
    ranks = run_processes(n, _kinds_on_process, kinds, seeds)
    for (kind, seed), *own in zip(product(kinds, seeds), *ranks, strict=True):
        make, inputs_of = KINDS[kind]
        assert_one_process(own, trained(made(make), inputs_of(Random(seed))))


def test_a_plan_of_one_s_own_is_taken() -> None:
    class Unknown(type(made(wan))):
        _cp_plan = None

    inputs = wan_inputs(Random(2))
    torch.manual_seed(0)
    model = Unknown(**{name: x for name, x in made(wan).config.items() if name[0] != "_"})
    plan = type(made(wan))._cp_plan
    with pytest.raises(
        ValueError, match="Unknown needs a cp_plan: its class declares none"
    ) as error:
        enable_parallelism(model)
    assert "attention layers (blocks.*.attn1, blocks.*.attn2)" in str(error.value)
    want = trained(model, inputs)

    def on_rank(rank: int, group: Any) -> Trained:
        return trained(enable_parallelism(copy.deepcopy(model), group, cp_plan=plan), inputs)

    assert_one_process(tw.loopback(2, on_rank), want)


def test_a_text_that_is_whole_on_every_rank_is_named_and_split_by_a_plan_with_it() -> None:
    """SkyReels with Wan's plan: its processors tell no layer from another."""
    from diffusers.models._modeling_parallel import ContextParallelInput
    from diffusers.models.transformers.transformer_skyreels_v2 import SkyReelsV2Transformer3DModel

    torch.manual_seed(0)
    model, inputs = SkyReelsV2Transformer3DModel(**WAN), wan_inputs(Random(2))
    inputs["encoder_hidden_states"] = torch.randn(2, 7, 16)
    plan: Any = type(made(wan))._cp_plan
    text = ContextParallelInput(split_dim=1, expected_dims=3)
    whole = {**plan, "": {**plan.get("", {}), "encoder_hidden_states": text}}
    want = trained(model, inputs)

    def on_rank(rank: int, group: Any, plan: Any) -> Trained:
        return trained(enable_parallelism(copy.deepcopy(model), group, cp_plan=plan), inputs)

    with pytest.raises(ValueError, match=r"keys of blocks\.0\.attn2 has .* whole on each, a text"):
        tw.loopback(2, lambda rank, group: on_rank(rank, group, plan))
    assert_one_process(tw.loopback(2, lambda rank, group: on_rank(rank, group, whole)), want)


def on_ranks(change: Any, n: int = 2) -> None:
    """Call a split Flux on every rank with inputs of change(rank, inputs)."""
    model, inputs = made(flux), flux_inputs(Random(0))

    def on_rank(rank: int, group: Any) -> None:
        own = enable_parallelism(copy.deepcopy(model), group)
        own(**change(rank, dict(inputs)))

    tw.loopback(n, on_rank)


def test_noise_that_each_rank_draws_is_found() -> None:
    def noise(rank: int, inputs: Inputs) -> Inputs:
        x = inputs["hidden_states"]
        return {**inputs, "hidden_states": x + 0.1 * rank * torch.ones_like(x)}

    with pytest.raises(
        ValueError, match=r"hidden_states of Flux.* another tensor on rank 1 .*seed"
    ):
        on_ranks(noise)

    def longer(rank: int, inputs: Inputs) -> Inputs:
        x = inputs["encoder_hidden_states"]
        return {**inputs, "encoder_hidden_states": x[:, rank:]}

    with pytest.raises(ValueError, match="ranks disagree on encoder_hidden_states"):
        on_ranks(longer)


def test_what_cannot_be_split_is_named() -> None:
    model = made(flux)
    with pytest.raises(ValueError, match=r"ring.* is for 4 ranks, but the group has 1"):
        enable_parallelism(model, strategy=tw.ring(4))
    enable_parallelism(model)
    with pytest.raises(ValueError, match=r"split already: transformer_blocks\.0\.attn has"):
        enable_parallelism(model)
    with pytest.raises(ValueError, match="Linear needs a cp_plan: its class declares none"):
        enable_parallelism(nn.Linear(2, 2))
    plan: Any = type(model)._cp_plan
    with pytest.raises(ValueError, match="has no module 'none'"):
        enable_parallelism(made(flux), cp_plan={**plan, "none": plan["proj_out"]})
    block = {"hidden_states": plan[""]["hidden_states"]}
    several = {**plan, "transformer_blocks.*": block, "transformer_blocks.0": plan["proj_out"]}
    with pytest.raises(ValueError, match=r"splits and gathers 'transformer_blocks\.0'"):
        enable_parallelism(made(flux), cp_plan=several)


def refused(make: Any, inputs: Inputs) -> str:
    model = made(make)

    def on_rank(rank: int, group: Any) -> None:
        enable_parallelism(copy.deepcopy(model), group)(**inputs)

    with pytest.raises(ValueError) as error:
        tw.loopback(2, on_rank)
    return str(error.value)


def test_masks_that_cannot_be_split_are_named() -> None:
    inputs = ltx2_inputs(Random(0))
    length = inputs["hidden_states"].shape[1]
    inputs["video_self_attention_mask"] = torch.ones(2, length, length).tril()
    assert "attn1 of LTX2VideoTransformer3DModel attends with attn_mask" in refused(ltx2, inputs)
    inputs = ltx_inputs(Random(0))
    inputs["encoder_attention_mask"][1] = 0
    length = inputs["encoder_attention_mask"].shape[1]
    assert f"hides all {length} keys of batch entry 1" in refused(ltx, inputs)


def test_settings_that_cannot_be_split_are_named() -> None:
    model = made(partial(helios, is_amplify_history=True))
    with pytest.raises(ValueError, match="is_amplify_history=True, which scales keys"):
        enable_parallelism(model)


def test_attention_past_the_dispatch_of_diffusers_is_named() -> None:
    from diffusers.models.transformers.hunyuan_transformer_2d import HunyuanDiT2DModel

    sizes: dict[str, Any] = {
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "hidden_size": 16,
        "num_layers": 2,
    }
    model = HunyuanDiT2DModel(**sizes, in_channels=4, patch_size=2, pooled_projection_dim=8)
    with pytest.raises(
        ValueError,
        match=r"HunyuanDiT2DModel cannot be split: its attention layers \(HunyuanAttnProcessor2_0",
    ):
        enable_parallelism(model)


@pytest.mark.parametrize("validate", ["first", "never"])
def test_inputs_are_compared_unless_validate_is_never(validate: Any) -> None:
    model, inputs = made(hunyuan_video), hunyuan_video_inputs(Random(0))

    def on_rank(rank: int, group: Any) -> None:
        own = enable_parallelism(copy.deepcopy(model), group, validate=validate)
        text = inputs["encoder_hidden_states"] * (1 + rank)  # on every rank, in all attention
        own(**{**inputs, "encoder_hidden_states": text})

    if validate == "never":
        tw.loopback(2, on_rank)
        return
    with pytest.raises(ValueError, match=r"encoder_hidden_states .* another tensor on rank 1"):
        tw.loopback(2, on_rank)


@pytest.mark.parametrize("num_tokens", [2, 3])
def test_images_of_fewer_tokens_than_ranks_are_whole_on_each(num_tokens: int) -> None:
    model, inputs = made(flux), flux_inputs(Random(0))
    inputs |= {name: inputs[name][:, :num_tokens] for name in ("hidden_states",)}
    inputs["img_ids"] = inputs["img_ids"][:num_tokens]
    want = trained(model, inputs)

    def on_rank(rank: int, group: Any) -> Trained:
        return trained(enable_parallelism(copy.deepcopy(model), group), inputs)

    assert_one_process(tw.loopback(4, on_rank), want)
