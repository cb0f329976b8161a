from __future__ import annotations

import signal

import pytest
import torch

pytest.register_assert_rewrite("tests.training")

# The tensors of most tests are small: threads would only wait for each other.
torch.set_num_threads(1)

# A shell that runs a job in the background has it ignore Ctrl-C, which some tests are about.
signal.signal(signal.SIGINT, signal.default_int_handler)
