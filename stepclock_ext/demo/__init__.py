"""The demo: a small GPT trained by the clock, beside the plain PyTorch loop.

`settings` and `recipe` say what is run, `data` and `model` on what; `train` is the run by
ClockedOptimizer, `plain` the same one by hand, `compare` both in turns; `world` is the processes
that torchrun started for it; `display`, `plot`, `files` and `report` are for the eye; `run` is the
order of events.
"""

from .run import run_demo
from .settings import DemoError, DemoSettings
from .world import OtherProcessError, joined_world

__all__ = ["DemoError", "DemoSettings", "OtherProcessError", "joined_world", "run_demo"]
