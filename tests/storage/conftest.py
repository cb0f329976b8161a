import pytest

for module in (
    *("storage_tests", "storage_transfers", "storage_sharing", "storage_machine"),
    *("folder_tests", "transfers", "engine_suite"),
):
    pytest.register_assert_rewrite(f"tests.support.{module}")
