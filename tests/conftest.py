from __future__ import annotations

import pytest
import torch

pytest.register_assert_rewrite("tests.training")

# The tensors of most tests are small: threads would only wait for each other.
torch.set_num_threads(1)
