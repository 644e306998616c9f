"""stepclock_ext: the update step of PyTorch training, on a clock that ticks on updates alone."""

from .backends import backends
from .backends.contract import BackendStatus
from .clock import StepClock
from .ema import EMA
from .errors import NonFiniteGradientError, ScheduleMismatchError
from .fence import FenceReport, LRFence
from .loss_scale import LossScale
from .optimizer import ClockedOptimizer
from .plan import TrainPlan
from .reducer_options import ReducerOptions
from .schedules import Schedule
from .step_info import StepInfo

__all__ = [
    "EMA",
    "BackendStatus",
    "ClockedOptimizer",
    "FenceReport",
    "LRFence",
    "LossScale",
    "NonFiniteGradientError",
    "ReducerOptions",
    "Schedule",
    "ScheduleMismatchError",
    "StepClock",
    "StepInfo",
    "TrainPlan",
    "backends",
]

__version__ = "0.1.0"
