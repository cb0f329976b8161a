"""QK-clip, against logits that are computed again from the weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import muon
import tierstore
from tests.support.attention import WIDTH, Grouped, Model, largest_logits

LAYERS = ["own", "groups", "one", "latent", "fused"]


def made(dtype: torch.dtype = torch.float32) -> tuple[Model, torch.Tensor]:
    """Return a model, and inputs that make its logits large."""
    torch.manual_seed(0)
    return Model().to(dtype), torch.randn(7, WIDTH).to(dtype) * 5


def optimizer_of(model: nn.Module, threshold: float, **options: Any) -> muon.Muon:
    clip = muon.QKClip.of(model, threshold=threshold)
    groups = muon.param_groups(model, lr=0.0, adamw_lr=0.0)
    return muon.Muon(groups, qk_clip=clip, **options)


def set_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
def test_no_head_exceeds_the_threshold(layer: str, on_disk: bool, tmp_path: Path) -> None:
    model, inputs = made()
    before = largest_logits(model, inputs)
    threshold = float(before[layer].sort().values[1])  # All heads but two exceed it.
    with tierstore.TierStore(tmp_path if on_disk else None, page_bytes=4096) as store:
        optimizer = optimizer_of(model, threshold, store=store)
        set_gradients(model)
        optimizer.step(qk_logits={layer: before[layer]})
    after = largest_logits(model, inputs)
    # Weights and logits are rounded to float32.
    assert (after[layer] <= threshold * (1 + 1e-5)).all()
    torch.testing.assert_close(after[layer], before[layer].clamp(max=threshold), rtol=1e-5, atol=0)
    for other in before.keys() - {layer}:
        assert torch.equal(after[other], before[other])


def changed_rows(before: dict[str, torch.Tensor], model: nn.Module) -> dict[str, list[int]]:
    found = {}
    for name, parameter in model.named_parameters():
        differs = (parameter != before[name]).view(len(parameter), -1).any(1)
        if differs.any():
            found[name] = differs.nonzero().flatten().tolist()
    return found


def clipped(layer: str, maxima: list[float]) -> tuple[dict[str, list[int]], Model]:
    model, _ = made()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = optimizer_of(model, 2.0)
    set_gradients(model)
    optimizer.step(qk_logits={layer: maxima})
    return changed_rows(before, model), model


def test_only_what_belongs_to_the_head_changes() -> None:
    rows = list(range(6, 12))  # Of the second head.
    assert clipped("own", [1.0, 4.0, 2.0, -9.0])[0] == {
        f"own.{name}.{kind}": rows for name in ("q_proj", "k_proj") for kind in ("weight", "bias")
    }
    assert clipped("groups", [1.0, 4.0, 2.0, -9.0])[0] == {"groups.q_proj.weight": rows}
    assert clipped("latent", [1.0, 4.0, 2.0])[0] == {
        "latent.q_b_proj.weight": list(range(8, 16)),
        "latent.kv_b_proj.weight": list(range(9, 14)),
    }
    changed, _ = clipped("fused", [1.0, 4.0, 2.0, 1.0])
    assert changed == {
        "fused.c_attn.weight": list(range(WIDTH)),
        "fused.c_attn.bias": [*rows, *range(24 + 6, 24 + 12)],
    }


def test_powers_equal_kimi_k2() -> None:
    g = 2.0 / 5.0
    before, _ = made()
    _, model = clipped("latent", [1.0, 5.0, 2.0])
    queries, old = model.latent.q_b_proj.weight[8:16], before.latent.q_b_proj.weight[8:16]
    torch.testing.assert_close(queries[:5], old[:5] * g**0.5, rtol=1e-6, atol=0)
    torch.testing.assert_close(queries[5:], old[5:] * g, rtol=1e-6, atol=0)
    keys, old = model.latent.kv_b_proj.weight[9:14], before.latent.kv_b_proj.weight[9:14]
    torch.testing.assert_close(keys, old * g**0.5, rtol=1e-6, atol=0)
    _, model = clipped("one", [1.0, 5.0, 2.0, 1.0])
    queries, old = model.one.q_proj.weight[6:12], before.one.q_proj.weight[6:12]
    torch.testing.assert_close(queries, old * g, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("matrices", [None, {"*_proj.weight": (("blocks", 0, 3),)}])
def test_masters_are_scaled_after_the_update(matrices: Any, dtype: torch.dtype) -> None:
    """Also where matrices are not heads: as if weights were scaled between two steps."""
    results = []
    for inside in (True, False):
        torch.manual_seed(0)
        model = Grouped(4, 4, bias=True).to(dtype)
        groups = muon.param_groups(model, lr=0.1, adamw_lr=0.1, matrices=matrices)
        optimizer = muon.Muon(groups, qk_clip=muon.QKClip.of(model, threshold=1.0))
        for step in range(1, 4 if dtype == torch.float32 else 2):
            for index, parameter in enumerate(model.parameters()):
                parameter.grad = torch.ones_like(parameter) * (step + index)
            logits = {"": [0.5, 1.5, 16.0, 0.0]}
            optimizer.step(qk_logits=logits if inside else None)
            masters = {
                name: optimizer.store.pages.read_states([name])[name].get(
                    "master", parameter.detach()
                )
                for name, parameter in model.named_parameters()
            }
            factors = torch.tensor([1.0, (1 / 1.5) ** 0.5, 0.25, 1.0]).repeat_interleave(6)
            for name, parameter in model.named_parameters() if not inside else ():
                masters[name] = masters[name] * factors.view(-1, *[1] * (parameter.ndim - 1))
                if dtype == torch.float32:
                    parameter.data.copy_(masters[name])
            results.append({name: master.clone() for name, master in masters.items()})
    half = len(results) // 2
    for found, expected in zip(results[:half], results[half:], strict=True):
        for name, master in expected.items():
            assert torch.equal(found[name], master), name


@pytest.mark.parametrize("logit", [0.0, -3.0, -math.inf, 2.0])
def test_logits_up_to_the_threshold_change_nothing(logit: float) -> None:
    for layer, heads in (("own", 4), ("latent", 3)):
        assert clipped(layer, [logit] * heads)[0] == {}


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        ({"own": [1.0, math.nan, 1.0, 1.0]}, "logit of head 1 of layer 'own' is nan: its att"),
        ({"own": [1.0, 1.0, math.inf, 1.0]}, "logit of head 2 of layer 'own' is inf"),
        ({"own": [1.0, 1.0]}, "'own' must be 4 numbers, one for each head, got 2"),
        ({"mixer": [1.0]}, "qk_logits has the layer 'mixer', expected one of 'own', 'groups'"),
    ],
)
def test_nonsense_is_refused_and_changes_nothing(logits: dict[str, Any], message: str) -> None:
    model, _ = made()
    optimizer = muon.Muon(muon.param_groups(model), qk_clip=muon.QKClip.of(model))
    set_gradients(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=message):
        optimizer.step(qk_logits=logits)
    assert changed_rows(before, model) == {}
    optimizer.step()
    assert len(changed_rows(before, model)) == len(before)


def test_layers_are_found_by_their_parts() -> None:
    model, _ = made()
    clip = muon.QKClip.of(model)
    assert list(clip.layers) == LAYERS
    assert clip.threshold == 100.0
    layers = {
        "mine": [muon.HeadRows(parameter=model.mixer.weight, head=0, start=0, stop=4, power=0.5)]
    }
    assert list(muon.QKClip(layers).layers) == ["mine"]
    with pytest.raises(ValueError, match="no attention layer was found: give QKClip"):
        muon.QKClip.of(model.mixer)
    with pytest.raises(ValueError, match="needs the heads of one attention layer"):
        muon.QKClip({})
    with pytest.raises(ValueError, match="threshold must be a positive number, got 0"):
        muon.QKClip.of(model, threshold=0)
    model.groups.k_norm = nn.RMSNorm(6)
    with pytest.raises(ValueError, match="layer 'groups' has the QK-norm 'k_norm', which bounds"):
        muon.QKClip.of(model)


def test_logits_need_a_clip_of_the_same_model() -> None:
    model, _ = made()
    other, _ = made()
    set_gradients(model)
    optimizer = muon.Muon(muon.param_groups(model))
    with pytest.raises(ValueError, match=r"needs Muon\(qk_clip=muon.QKClip.of\(model\)\)"):
        optimizer.step(qk_logits={})
    optimizer = muon.Muon(muon.param_groups(model), qk_clip=muon.QKClip.of(other, threshold=1))
    with pytest.raises(ValueError, match=r"shape \[24, 24\], that is in no param group"):
        optimizer.step(qk_logits={"own": [2.0] * 4})


def test_a_closure_may_fill_the_logits() -> None:
    model, inputs = made()
    logits: dict[str, torch.Tensor] = {}

    def closure() -> float:
        set_gradients(model)
        logits.update(largest_logits(model, inputs))
        return 1.0

    optimizer = optimizer_of(model, 1.0)
    assert optimizer.step(closure, qk_logits=logits) == 1.0
    for maxima in largest_logits(model, inputs).values():
        assert (maxima <= 1 + 1e-5).all()


def test_of_layers_that_share_a_projection_the_smaller_factor_holds() -> None:
    shared = nn.Parameter(torch.ones(4, 3))
    rows = [muon.HeadRows(parameter=shared, head=0, start=0, stop=2, power=1.0)]
    for logits in ({"a": [8.0], "b": [4.0]}, {"b": [4.0], "a": [8.0]}):
        shared.data.fill_(1)
        clip = muon.QKClip({"a": rows, "b": rows}, threshold=2.0)
        optimizer = muon.Muon([shared], lr=0.0, qk_clip=clip)
        shared.grad = torch.ones(4, 3)
        optimizer.step(qk_logits=logits)
        assert shared[:, 0].tolist() == [0.25, 0.25, 1.0, 1.0]


class BigCode(nn.Module):
    """As GPT-BigCode with one key for all heads: a Linear of the name of GPT-2's Conv1D."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 2, 4
        self.c_attn = nn.Linear(8, 8 + 2 * 4)


def test_other_layers_of_known_names_are_not_taken_for_them() -> None:
    with pytest.raises(ValueError, match="no attention layer was found"):
        muon.QKClip.of(BigCode())


def test_a_norm_that_is_none_is_not_qk_norm() -> None:
    model = Model()
    model.own.q_norm = nn.Identity()
    assert "own" in muon.QKClip.of(model).layers


def test_a_frozen_projection_is_found_at_the_first_step() -> None:
    model, _ = made()
    model.own.k_proj.weight.requires_grad_(False)
    optimizer = optimizer_of(model, 100.0)
    set_gradients(model)
    with pytest.raises(ValueError, match=r"a parameter of layer 'own', of shape .* in no param gr"):
        optimizer.step(qk_logits={"own": [1.0] * 4})
    optimizer.step(qk_logits={"groups": [1.0] * 4})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dimension": 2}, r"dimension must be one of a tensor of shape \(4, 3\)"),
        ({"stop": 5}, "rows must lie within the 4 of dimension 0, got 0 to 5"),
        ({"start": -1}, "rows must lie within the 4 of dimension 0, got -1 to 2"),
        ({"power": -1.0}, "head and power must not be negative"),
    ],
)
def test_rows_outside_of_a_parameter_are_refused(fields: dict[str, Any], message: str) -> None:
    given = {"head": 0, "start": 0, "stop": 2, "power": 1.0, **fields}
    with pytest.raises(ValueError, match=message):
        muon.HeadRows(parameter=torch.ones(4, 3), **given)
