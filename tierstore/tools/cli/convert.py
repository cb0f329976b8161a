"""``tierstore convert``: convert checkpoints from one format to another."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierstore.tools.cli.arguments import JsonOption, require_there, size_of
from tierstore.tools.cli.exit_codes import exit_codes
from tierstore.tools.cli.output import (
    complain,
    count,
    plain,
    progress,
    shape_text,
    table,
    write_json,
    write_lines,
)
from tierstore.units import format_bytes

if TYPE_CHECKING:
    import torch

    from tierstore.tools.convert.convert import Conversion


def convert(
    sources: Annotated[
        list[Path],
        typer.Argument(metavar="SOURCE...", help="A checkpoint, or several that are parts of one."),
    ],
    destination: Annotated[
        Path, typer.Argument(metavar="DESTINATION", help="A path that does not exist.")
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to", help="Format to write: tierstore, dcp, torch, safetensors or universal."
        ),
    ],
    from_: Annotated[
        str | None, typer.Option("--from", help="Format of the sources, if not recognized.")
    ] = None,
    memory: Annotated[str, typer.Option(help="Most memory for tensors.")] = "2GiB",
    only: Annotated[str | None, typer.Option(help="model: without the optimizer.")] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(
            help="Pattern of names to take, as --dry-run prints them; several are allowed."
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Pattern of names to leave out, likewise.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Dtype of the weights.")] = None,
    shard_size: Annotated[
        str | None, typer.Option(help="About how large files of weights are.")
    ] = None,
    bare_keys: Annotated[
        bool,
        typer.Option(
            "--bare-keys", help='Keys of a DCP model without "model.", as torchtitan has them.'
        ),
    ] = False,
    momentum_convention: Annotated[
        str | None, typer.Option(help="average or heavy-ball, if the sources do not tell.")
    ] = None,
    assume_model_order: Annotated[
        bool,
        typer.Option(
            "--assume-model-order",
            help="Param groups without names were filled in the order of the model.",
        ),
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse to leave anything out; exit with 1.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a checkpoint at the destination.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write nothing; print what would be written.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Convert a checkpoint to another format.

    Memory is bounded, every byte is compared with the source afterwards, and a conversion that
    fails leaves nothing behind.
    """
    with exit_codes(as_json):
        for source in sources:
            require_there(source)
        memory_bytes = size_of("--memory", memory)
        shard_bytes = size_of("--shard-size", shard_size)
        from tierstore.tools.convert.convert import convert as convert_checkpoint

        with progress("check", "convert", "verify") as on_progress:
            conversion = convert_checkpoint(
                sources,
                destination,
                to=to,
                from_=from_,
                only=only,
                include=include or (),
                exclude=exclude or (),
                dtype=_dtype(dtype),
                memory=memory_bytes,
                shard_size=shard_bytes,
                bare_keys=bare_keys,
                momentum_convention=momentum_convention,
                assume_model_order=assume_model_order,
                strict=strict,
                force=force,
                dry_run=dry_run,
                on_progress=on_progress,
            )
        for sentence in conversion.lost:
            complain(f"not carried: {sentence}")
        for note in conversion.notes:
            complain(f"note: {note}")
        if as_json:
            write_json(_body(conversion))
        else:
            write_lines(_lines(conversion, dry_run=dry_run))


def _dtype(name: str | None) -> torch.dtype | None:
    import torch

    if name is None:
        return None
    names = ("float64", "float32", "bfloat16", "float16")
    if name not in names:
        raise typer.BadParameter(f"--dtype must be one of {', '.join(names)}, got {name!r}")
    found: torch.dtype = getattr(torch, name)
    return found


_NEXT = {
    "tierstore": "TierStore({}, resume=True), and optimizer.restore() before the first step",
    "dcp": "optimizer.restore(checkpoint={0}) in a new run, or with stock PyTorch "
    "torch.distributed.checkpoint.load(state_dict, checkpoint_id={0})",
    "torch": "torch.load({}, weights_only=True)",
    "safetensors": "from_pretrained({}), with the config.json of the model in that directory",
    "universal": "engine.load_checkpoint({}), with checkpoint.load_universal in DeepSpeed's config",
}


def _body(conversion: Conversion) -> dict[str, object]:
    entries = [
        {
            "parameter": entry.parameter,
            "state": entry.state,
            "dtype": str(entry.dtype).removeprefix("torch."),
            "shape": entry.shape,
            "nbytes": entry.nbytes,
            "xxh3_128": conversion.digests.get(entry.key),
        }
        for entry in conversion.entries
    ]
    fields = ("source", "to", "path", "step", "nbytes", "needed_bytes", "notes", "lost")
    return {**{name: getattr(conversion, name) for name in fields}, "entries": entries}


def _lines(conversion: Conversion, *, dry_run: bool) -> Iterator[str]:
    step = f"step {conversion.step}, " if conversion.step is not None else ""
    tensors = f"{count(len(conversion.entries), 'tensor')}, {format_bytes(conversion.nbytes)}"
    if not dry_run:
        yield plain(
            f"{conversion.path}: {step}{tensors} from {conversion.source} to {conversion.to}, "
            "verified"
        )
        yield "What to type next:"
        yield f"    {_NEXT[conversion.to].format(repr(conversion.path))}"
        return
    yield from table(
        {
            "parameter": lambda entry: plain(entry.parameter),
            "state": lambda entry: plain(entry.state),
            "shape": lambda entry: shape_text(entry.shape),
            "dtype": lambda entry: str(entry.dtype).removeprefix("torch."),
            "bytes": lambda entry: format_bytes(entry.nbytes),
        },
        conversion.entries,
        right=("bytes",),
    )
    yield plain(f"from {conversion.source} to {conversion.to}: {step}{tensors}")
    yield plain(
        f"{shlex.quote(conversion.path)} would take about {format_bytes(conversion.needed_bytes)}"
    )
