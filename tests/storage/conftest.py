import pytest

pytest.register_assert_rewrite("tierstore.testing.storage_tests")
