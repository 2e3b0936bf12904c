"""Python runs this at its start when its folder is on PYTHONPATH: a checkpoint then takes a minute to be hashed."""

import time

from qwen3_trn import checkpoint

sha256 = checkpoint._sha256
checkpoint._sha256 = lambda path: time.sleep(60) or sha256(path)
