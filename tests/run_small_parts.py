"""train.py with streams in parts of 2,000 bytes, and with short samples. Run by test_train_data.py:

torchrun --nproc_per_node=2 tests/run_small_parts.py --flags of train.py
"""

import train
from qwen3_trn import encode, evaluate, launch

encode.PART_BYTES = 2000
evaluate.NEW_TOKENS, evaluate.SAMPLE_LENGTHS = 8, 16

if __name__ == "__main__":
    launch.run(train.main)
