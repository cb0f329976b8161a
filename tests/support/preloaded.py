"""Imports that the server of forked processes makes once for all of them."""

# ruff: noqa: F401

from __future__ import annotations

import gc

import torch._dynamo  # The first optimizer of a process imports it, which takes a second.
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor

import tests.rank_programs.checkpoints
import tests.rank_programs.faults
import tests.support.training
import tierstore.storage.aiofile
import tierstore.storage.uring
import tierstore.store
import tierstore.tools.cli
import tierstore.tools.inspect.verify

# A garbage collection in a forked process would touch, and so copy, all of these objects.
gc.freeze()
