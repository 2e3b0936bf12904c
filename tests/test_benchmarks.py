"""The benchmarks run and keep the bounds that they state."""

import pytest

from tests.common import run_python, succeeded


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_qwen3_0_6b_loads_in_bounded_memory_and_gives_transformers_loss(tmp_path):
    """Makes, and loads on 2 ranks, 1.2 GB of random weights of exactly Qwen3-0.6B's shape."""
    printed = succeeded(run_python("benchmarks/load_0_6b.py", "--folder", tmp_path / "model", timeout=800))
    assert printed.count("so ") == printed.count("first loss") == 2


def run_2gb(folder, *options: str, timeout: float) -> None:
    """Export, and load what was exported. Memory and bytes are checked by the benchmarks themselves."""
    printed = succeeded(run_python("benchmarks/export_2gb.py", "--folder", folder, *options, timeout=timeout))
    assert printed.count("missing 0, unexpected 0") == printed.count("peak RssAnon") == 2
    printed = succeeded(run_python("benchmarks/load_2gb.py", "--folder", folder / "exported", timeout=timeout))
    assert printed.count("asked for") == 2 and printed.count("plain read") == 1


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_the_benchmarks_of_2_gb_run(tmp_path):
    run_2gb(tmp_path, "--tiny", timeout=120)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_2_gb_are_exported_and_loaded_within_the_stated_bounds(tmp_path):
    """Needs 9 GB of disk."""
    run_2gb(tmp_path, timeout=600)
