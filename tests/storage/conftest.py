import pytest

for module in ("storage_tests", "storage_machine"):
    pytest.register_assert_rewrite(f"tierstore.testing.{module}")
