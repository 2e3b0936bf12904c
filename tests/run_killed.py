"""train.py that kills itself, as kill -9 does, in the middle of saving a checkpoint. Run by test_checkpoint.py:

python tests/run_killed.py WHERE STEP_FOLDER --flags of train.py

WHERE: write_data, after the rank's file is written; or a function that checkpoint.py calls, before it does anything.
"""

import os
import shutil
import signal
import sys

import train
from qwen3_trn import checkpoint, launch


def kill_at(owner, name: str, folder: str, after: bool) -> None:
    original = getattr(owner, name)

    def killed(*arguments, **options):
        result = original(*arguments, **options) if after else None
        if any(folder in str(getattr(argument, "path", argument)) for argument in arguments):
            os.kill(os.getpid(), signal.SIGKILL)
        return result if after else original(*arguments, **options)

    setattr(owner, name, killed)


where, step_folder = sys.argv[1:3]
del sys.argv[1:3]
if where == "write_data":
    kill_at(checkpoint._Writer, where, step_folder, after=True)
elif where == "rmtree":
    # The first folder that goes when step_4 is there is step_2: remove one file of it, then die.
    def remove_one_and_die(folder, *arguments, **options):
        next(path for path in folder.rglob("*") if path.is_file()).unlink()
        os.kill(os.getpid(), signal.SIGKILL)

    shutil.rmtree = remove_one_and_die
else:
    kill_at(checkpoint, where, step_folder, after=False)
launch.run(train.main)
