"""train.py, which also writes a hash of each row that this rank trains on, by its place in the order. Run by
test_train_data.py:

torchrun --nproc_per_node=2 tests/run_rows.py FOLDER --flags of train.py
"""

import hashlib
import json
import sys
from pathlib import Path

import train
from qwen3_trn import launch

cut = train.micro_batches
rows: dict[int, str] = {}


def record(data, position, num_rows, micro_batch_size, num_ranks, rank):
    batches = cut(data, position, num_rows, micro_batch_size, num_ranks, rank)
    for step, batch in enumerate(batches):
        first = position + (step * num_ranks + rank) * micro_batch_size
        for place in range(micro_batch_size):
            row = b"".join(batch[name][place].tobytes() for name in sorted(batch))
            rows[first + place] = hashlib.sha256(row).hexdigest()
    return batches


def main() -> None:
    folder = Path(sys.argv.pop(1))
    train.micro_batches = record
    train.main()
    (folder / f"rows_{launch.RANK}.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    launch.run(main)
