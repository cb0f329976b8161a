import pytest

for module in (
    *("storage_tests", "storage_transfers", "storage_sharing", "storage_machine"),
    *("folder_tests", "transfers"),
):
    pytest.register_assert_rewrite(f"tierstore.testing.{module}")
pytest.register_assert_rewrite("tests.support.engine_suite")
