"""The benchmarks run and keep the bounds that they state."""

import pytest

from tests.common import run_python, succeeded


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_qwen3_0_6b_loads_in_bounded_memory_and_gives_transformers_loss(tmp_path):
    """Makes, and loads on 2 ranks, 1.2 GB of random weights of exactly Qwen3-0.6B's shape."""
    printed = succeeded(run_python("benchmarks/load_0_6b.py", "--folder", tmp_path / "model", timeout=800))
    assert printed.count("so ") == printed.count("first loss") == 2
