"""For tests of what only our broker can do."""

import os

import pytest

only_ours = pytest.mark.skipif(
    os.environ.get("QCLI_TEST_BROKER") == "nsqd", reason="nsqd has no log that could be read"
)
