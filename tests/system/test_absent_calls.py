"""Filesystems that lack a call: what works without it does, what cannot is refused with a way out.

As WSL2, CIFS and blobfuse without modes, Lustre and NFS without locks, gcsfuse and rclone without
links and flags of renameat2.
"""

from __future__ import annotations

import errno
import fcntl
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import muon
import tierstore
from tests.support.small_net import begun, one_group, small_net, states_of, stock_adamw, train
from tests.support.small_net import save as save_dcp
from tierstore.tools.convert import destination
from tierstore.tools.convert.convert import convert
from tierstore.tools.inspect.verify import verify
from tierstore.tools.probe import calls
from tierstore.tools.probe.doctor import Health, examine

TABLE = [
    *(("flock", number) for number in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)),
    *(("chmod", number) for number in (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)),
    *(("link", number) for number in (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)),
    *(("renameat2", number) for number in (errno.EINVAL, errno.ENOSYS)),
    *(("fsync", number) for number in (errno.EINVAL, errno.ENOSYS)),
]


def forbid(call: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a call fail, and with the flags of renameat2 links as well, as on such filesystems."""

    def fail(*arguments: Any, error: int = number, **options: Any) -> Any:
        raise OSError(error, os.strerror(error))

    if call == "flock":
        monkeypatch.setattr(fcntl, "flock", fail)
    elif call == "fsync":
        real = os.fsync

        def fsync(fd: int) -> None:
            if os.path.isdir(f"/proc/self/fd/{fd}"):
                fail()
            real(fd)

        monkeypatch.setattr(os, "fsync", fsync)
    else:
        for name in ("chmod", "fchmod") if call == "chmod" else ("link",):
            error = errno.EPERM if call == "renameat2" else number
            monkeypatch.setattr(os, name, partial(fail, error=error))
        if call == "renameat2":
            monkeypatch.setattr(destination, "_renameat2", fail)
            monkeypatch.setattr(calls, "_exchange", fail)


@pytest.mark.quick(4)
@pytest.mark.parametrize(("call", "number"), TABLE)
def test_what_works_without_a_call_works(
    call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_net()
    with tierstore.TierStore(tmp_path / "run", page_bytes=4096) as store:
        train(model, muon.Muon(one_group(model), store=store), range(2))
        store.checkpoint(tmp_path / "checkpoint", model=model)
    stock = stock_adamw(model)
    train(model, stock, range(1))
    state, states = states_of(model, stock)
    save_dcp({"model": state, "optimizer": states}, tmp_path / "dcp")
    forbid(call, number, monkeypatch)

    directory = [f for f in examine([tmp_path]) if f.subject == str(tmp_path)]
    named = [f for f in directory if f"{call}" in f.text and f"errno {number}" in f.text]
    assert [f.health for f in named] == [Health.BAD if call in ("flock", "fsync") else Health.SLOW]
    if call == "fsync":
        with pytest.raises(tierstore.RunDirectoryError, match="another filesystem"):
            tierstore.TierStore(tmp_path / "another")
        return
    assert verify(tmp_path / "run").good
    assert verify(tmp_path / "checkpoint").good
    for source in ("run", "checkpoint", "dcp"):
        for to in ("torch", "dcp", "tierstore", "safetensors"):
            convert(tmp_path / source, tmp_path / f"{source}-{to}", to=to)
    assert torch.load(tmp_path / "run-torch", weights_only=True)["model"].keys() == state.keys()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    if call == "flock":
        with pytest.raises(tierstore.RunDirectoryError, match=r"no locks .*mount it with locks"):
            tierstore.TierStore(tmp_path / "run", resume=True)
        return
    other, optimizer = begun(tmp_path / "checkpoint", tmp_path / "new")
    train(other, optimizer, range(2, 3))
    optimizer.store.checkpoint(tmp_path / "published", model=other).wait()
    optimizer.store.close()
    assert verify(tmp_path / "published").good
