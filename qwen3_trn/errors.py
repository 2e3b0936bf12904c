"""The one exception that is meant for the user.

Raise it with what was found, what was expected and what to do. `launch.py` prints its message once, without a
traceback, and ends every rank with exit code 1. Anything else that escapes is a bug and keeps its traceback.
"""


class UserError(Exception):
    """Input that cannot be used: a file, a flag, a config.json, a checkpoint."""
