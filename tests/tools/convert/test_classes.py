"""Classes go on bit for bit after a conversion of their states and numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from pytorch_optimizer import Lion
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

import muon
import tierstore
from tests.support.class_training import (
    CASES,
    PAGES,
    WHOLE,
    case_of,
    gradient,
    parameters,
    shapes_of,
)
from tests.support.commands import call
from tests.support.conversions import no_trace
from tests.support.small_net import one_group, save, small_net, states_of, train
from tests.support.torch_version import torch_before
from tierstore.layout import subgroups
from tierstore.tools.convert import dcp as dcp_format
from tierstore.tools.convert.convert import convert
from tierstore.tools.inspect.summary import summarize
from tierstore.tools.inspect.verify import verify

ALL = [*CASES, *WHOLE]
FIRST, LAST = 6, 12  # One parameter has its first gradient in between, after step 8.
COUNTED = WHOLE.keys() - {"Adafactor"}  # These count steps in the group.
Parameters = dict[str, torch.nn.Parameter]


def go_on(optimizer: torch.optim.Optimizer, own: Parameters, first: int, last: int) -> None:
    """Do the steps after ``first``, each with a smaller learning rate."""
    for step in range(first + 1, last + 1):
        for index, parameter in enumerate(own.values()):
            parameter.grad = gradient(step, index, parameter)
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.9


def trained(
    case: str, last: int, *, named: bool = True
) -> tuple[Parameters, torch.optim.Optimizer]:
    """The class as it is."""
    cls, options = case_of(case)
    own = parameters(torch.float32, shapes_of(case))
    optimizer = cls(own.items() if named else own.values(), **options)
    go_on(optimizer, own, 0, last)
    return own, optimizer


def write(case: str, path: Path, last: int = FIRST, *, named: bool = True) -> None:
    own, optimizer = trained(case, last, named=named)
    model = {name: parameter.detach() for name, parameter in own.items()}
    torch.save({"model": model, "optimizer": optimizer.state_dict()}, path)


def write_run(
    case: str,
    path: Path,
    *,
    dtype: torch.dtype = torch.float32,
    last: int = FIRST,
    published: Path | None = None,
) -> None:
    """A run of Paged, and its checkpoint."""
    cls, options = case_of(case)
    own = parameters(dtype, shapes_of(case))
    with tierstore.TierStore(path, **PAGES) as store:
        optimizer = tierstore.Paged(own.items(), cls, store=store, **options)
        for step in range(last):
            go_on(optimizer, own, step, step + 1)
            store.commit()
        if published is not None:
            store.checkpoint(published)


def paged(case: str, path: Path, checkpoint: Path | None = None, first: int = FIRST) -> Any:
    """The parameters, and the state dict, of Paged in a run that goes on."""
    cls, options = case_of(case)
    own = parameters(torch.float32, shapes_of(case))
    with tierstore.TierStore(path, resume=checkpoint is None, **PAGES) as store:
        optimizer = tierstore.Paged(own.items(), cls, store=store, **options)
        step = optimizer.restore(checkpoint=checkpoint)
        assert step == first or case not in COUNTED
        go_on(optimizer, own, first, LAST)
        return own, optimizer.state_dict()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in dicts and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def loaded(case: str, path: Path) -> Any:
    """The parameters and the optimizer of the class, from a file.

    Tensors get the order of memory that the class has, by which products of matrices round.
    """
    cls, options = case_of(case)
    own, found = parameters(torch.float32, shapes_of(case)), torch.load(path, weights_only=True)
    optimizer = cls(own.items(), **options)
    states = trained(case, FIRST)[1].state_dict()["state"]
    for number, state in found["optimizer"]["state"].items():
        like = {key: states[number][key] for key in state}
        for tensor, other in zip(tensors_in(state), tensors_in(like), strict=True):
            if tensor.stride() != other.stride():
                tensor.data = torch.empty_like(other).copy_(tensor)
    optimizer.load_state_dict(found["optimizer"])
    for name, parameter in own.items():
        parameter.data.copy_(found["model"][name])
    return own, optimizer


def contents(state_dict: dict[str, Any]) -> dict[Any, Any]:
    """The states of parameters that have any, with dtypes, as values that can be compared."""

    def comparable(value: Any) -> Any:
        if isinstance(value, list):
            return [*map(comparable, value)]
        is_tensor = isinstance(value, torch.Tensor)
        return (value.dtype, value.tolist()) if is_tensor else value

    return {
        number: {name: comparable(value) for name, value in state.items() if value is not None}
        for number, state in state_dict["state"].items()
        if any(value is not None for value in state.values())
    }


def require_equal(own: Parameters, state_dict: dict[str, Any], case: str) -> None:
    expected, optimizer = trained(case, LAST)
    for name, parameter in expected.items():
        assert torch.equal(own[name], parameter), name
    assert contents(state_dict) == contents(optimizer.state_dict())


@pytest.mark.quick(6)
@pytest.mark.parametrize("case", ALL)
def test_a_file_of_the_class(case: str, tmp_path: Path) -> None:
    first = 9 if case in WHOLE else FIRST
    write(case, tmp_path / "in.pt", first)
    for to in ("tierstore", "dcp", "torch"):
        assert convert(tmp_path / "in.pt", tmp_path / to, to=to).lost == []
    require_equal(*paged(case, tmp_path / "tierstore", first=first), case)
    require_equal(*paged(case, tmp_path / "run", tmp_path / "dcp", first), case)
    found = torch.load(tmp_path / "torch", weights_only=True)["optimizer"]
    assert contents(found) == contents(trained(case, first)[1].state_dict())


@pytest.mark.quick(6)
@pytest.mark.parametrize("case", ALL)
def test_a_run_of_the_class(case: str, tmp_path: Path) -> None:
    """Directly, over DCP, and over another run."""
    write_run(case, tmp_path / "in")
    for to, source in (("dcp", "in"), ("tierstore", "in"), ("dcp.pt", "dcp"), ("in.pt", "in")):
        convert(tmp_path / source, tmp_path / to, to="torch" if to.endswith(".pt") else to)
    for file in ("in.pt", "dcp.pt"):
        if case == "Adagrad" and torch_before(2, 13):
            break  # Adagrad of torch 2.9 takes no parameter without a state.
        own, optimizer = loaded(case, tmp_path / file)
        go_on(optimizer, own, FIRST, LAST)
        require_equal(own, optimizer.state_dict(), case)
    require_equal(*paged(case, tmp_path / "tierstore"), case)
    require_equal(*paged(case, tmp_path / "run", tmp_path / "dcp"), case)


@pytest.mark.quick(2)
@pytest.mark.parametrize("case", WHOLE)
def test_checkpoints_of_dcp(case: str, tmp_path: Path) -> None:
    """Of stock DCP, and published."""
    own, optimizer = trained(case, 9)
    model = torch.nn.Module()
    for name, parameter in own.items():
        model.register_parameter(name, parameter)
    state, states = states_of(model, optimizer)
    save({"model": state, "optimizer": states}, tmp_path / "stock")
    write_run(case, tmp_path / "run", last=9, published=tmp_path / "published")
    expected = contents(optimizer.state_dict())
    for source in ("stock", "published"):
        for to in ("tierstore", "dcp", "torch"):
            assert convert(tmp_path / source, tmp_path / f"{source} {to}", to=to).lost == []
            assert to == "torch" or verify(tmp_path / f"{source} {to}").good
        summary = summarize(tmp_path / f"{source} tierstore")
        nbytes = sum(t.nbytes for t in tensors_in([state, states["state"]]) if t.ndim)
        assert sum(parameter.nbytes for parameter in summary.parameters) == nbytes
        require_equal(*paged(case, tmp_path / f"{source} tierstore", first=9), case)
        found = torch.load(tmp_path / f"{source} torch", weights_only=True)["optimizer"]
        assert contents(found) == expected
    for checkpoint in ("published", "stock dcp", "published dcp"):
        for tensor in tensors_in([state, states["state"]]):
            tensor.detach().zero_()
        dcp.load({"model": state, "optimizer": states}, checkpoint_id=tmp_path / checkpoint)
        set_optimizer_state_dict(model, optimizer, states)
        assert contents(optimizer.state_dict()) == expected


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_numbers_keep_their_types(to: str, tmp_path: Path) -> None:
    write("SOAP", tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "out", to=to)
    convert(tmp_path / "out", tmp_path / "again.pt", to="torch", from_=to)
    found = torch.load(tmp_path / "again.pt", weights_only=True)["optimizer"]["state"][0]
    assert [type(found[key]) for key in ("precondition_frequency", "shampoo_beta")] == [int, float]


def test_free_states_in_several_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those above 2 GiB are."""
    for module in (subgroups, dcp_format):
        monkeypatch.setattr(module, "RECORD_DATA_BYTES_MAX", 10_000)
    write("SOAP", tmp_path / "in.pt", 9)
    for source, to in (("in.pt", "tierstore"), ("tierstore", "dcp"), ("dcp", "torch")):
        convert(tmp_path / source, tmp_path / to, to=to)
        assert to == "torch" or verify(tmp_path / to).good
    found = torch.load(tmp_path / "torch", weights_only=True)["optimizer"]
    assert contents(found) == contents(trained("SOAP", 9)[1].state_dict())


@pytest.mark.quick(2)
@pytest.mark.parametrize("case", WHOLE)
def test_states_of_a_parameter_without_steps(case: str, tmp_path: Path) -> None:
    """States of other parameters do not tell their shapes; the class does."""
    write(case, tmp_path / "in.pt")
    with no_trace(tmp_path), pytest.raises(tierstore.CheckpointError, match="'p2' was never"):
        convert(tmp_path / "in.pt", tmp_path / "out", to="tierstore")
    convert(tmp_path / "in.pt", tmp_path / "out", to="dcp")
    require_equal(*paged(case, tmp_path / "run", tmp_path / "out"), case)


@pytest.mark.parametrize("elementwise", [False, True])
def test_a_class_of_another_package(elementwise: bool, tmp_path: Path) -> None:
    """A run tells whether pages cut parameters; a file does not."""

    def make(store: tierstore.TierStore | None = None) -> tuple[Parameters, tierstore.Paged]:
        own = parameters(torch.float32)
        options = {"elementwise": elementwise, "weight_decay": 0.1}
        return own, tierstore.Paged(own.items(), Lion, store=store, **options)

    expected, optimizer = make()
    go_on(optimizer, expected, 0, LAST)
    with tierstore.TierStore(tmp_path / "in", **PAGES) as store:
        own, optimizer = make(store)
        go_on(optimizer, own, 0, FIRST)
        store.commit()
    convert(tmp_path / "in", tmp_path / "again", to="tierstore")
    with tierstore.TierStore(tmp_path / "again", resume=True) as store:
        own, optimizer = make(store)
        optimizer.restore()
        go_on(optimizer, own, FIRST, LAST)
        assert all(torch.equal(own[name], parameter) for name, parameter in expected.items())
    convert(tmp_path / "in", tmp_path / "in.pt", to="torch")
    with (
        no_trace(tmp_path),
        pytest.raises(
            tierstore.CheckpointError, match=r"\['exp_avg'\] of 'p0' do not tell .* --to dcp"
        ),
    ):
        convert(tmp_path / "in.pt", tmp_path / "out", to="tierstore")


@pytest.mark.parametrize("case", ["RMSprop-centered", "SGD-momentum"])
def test_a_run_in_bfloat16(case: str, tmp_path: Path) -> None:
    """Its pages are pages of Paged, and no page is of Muon."""
    write_run(case, tmp_path / "in", dtype=torch.bfloat16)
    convert(tmp_path / "in", tmp_path / "in.pt", to="torch")
    convert(tmp_path / "in.pt", tmp_path / "again", to="tierstore")
    cls, options = case_of(case)
    found = []
    for run in ("in", "again"):
        own = parameters(torch.bfloat16)
        with tierstore.TierStore(tmp_path / run, resume=True, **PAGES) as store:
            optimizer = tierstore.Paged(own.items(), cls, store=store, **options)
            optimizer.restore()
            go_on(optimizer, own, FIRST, LAST)
            found.append((contents(optimizer.state_dict()), [p.tolist() for p in own.values()]))
    assert found[0] == found[1]


def test_a_file_of_muon_of_torch(tmp_path: Path) -> None:
    """Muon of torch has no step count, as SGD has none."""
    stock, own = (list(small_net(bias=False).named_parameters()) for _ in range(2))
    optimizer = torch.optim.Muon(stock, lr=0.02)

    def step(optimizer: torch.optim.Optimizer, named: Any) -> None:
        for index, (_, parameter) in enumerate(named):
            parameter.grad = gradient(1, index + 5, parameter)
        optimizer.step()

    step(optimizer, stock)
    held = {"model": {n: p.detach() for n, p in stock}, "optimizer": optimizer.state_dict()}
    torch.save(held, tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "out", to="tierstore")
    step(optimizer, stock)
    with tierstore.TierStore(tmp_path / "out", resume=True) as store:
        paged = tierstore.Paged(own, torch.optim.Muon, store=store, lr=0.02)
        paged.restore()
        step(paged, own)
    assert all(torch.equal(ours, theirs) for (_, ours), (_, theirs) in zip(own, stock, strict=True))


@pytest.mark.parametrize("case", ["ASGD", "Rprop"])
def test_parameters_without_names(case: str, tmp_path: Path) -> None:
    """The shapes of states tell them."""
    write(case, tmp_path / "in.pt", 9, named=False)
    convert(tmp_path / "in.pt", tmp_path / "out", to="dcp")
    require_equal(*paged(case, tmp_path / "run", tmp_path / "out", first=9), case)


def test_a_convention_of_muon_is_of_no_use(tmp_path: Path) -> None:
    """A convention of Muon's momentum does not apply to RMSprop and SGD."""
    for case in ("RMSprop-centered", "SGD-momentum"):
        write(case, tmp_path / f"{case}.pt")
        arguments = ("convert", tmp_path / f"{case}.pt", tmp_path / "out", "--to", "dcp")
        with no_trace(tmp_path):
            code, _, error = call(*arguments, "--momentum-convention", "heavy-ball")
        assert (code, "does not apply" in error) == (2, True)


@pytest.mark.parametrize("case", ["NAdam", "RAdam"])
def test_deepspeed_has_no_such_rule(case: str, tmp_path: Path) -> None:
    write(case, tmp_path / "in.pt", 9)
    with no_trace(tmp_path):
        code, _, error = call(
            *("convert", tmp_path / "in.pt", tmp_path / "out", "--to", "universal"),
            *("--include", "p0"),
        )
    assert (code, "is of RAdam or NAdam" in error) == (2, True)


def test_a_run_of_adam_is_refused_by_muon(tmp_path: Path) -> None:
    """AdamW of Muon has the same pages."""
    model = small_net()
    stock = torch.optim.Adam(list(model.named_parameters()), weight_decay=0.1)
    train(model, stock, range(2))
    held = {"model": model.state_dict(), "optimizer": stock.state_dict()}
    torch.save(held, tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "out", to="tierstore")
    with tierstore.TierStore(tmp_path / "out", resume=True) as store:
        optimizer = muon.Muon(one_group(small_net()), store=store)
        with pytest.raises(ValueError, match="decoupled_weight_decay=False is not AdamW's"):
            optimizer.restore()
