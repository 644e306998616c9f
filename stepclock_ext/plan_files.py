"""Configurations of Hugging Face Trainer, ms-swift and LLaMA-Factory, as arguments of a plan."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from .schedules import SHAPE_PARAMETERS

__all__ = ["PlanSource", "read_yaml", "translate"]

_WHERE = "TrainPlan"

# The keys that a plan reads, under the names that all three systems share with it.
_RATES = ("learning_rate", "min_lr", "num_train_epochs", "warmup_ratio")
_COUNTS = (
    "dataset_size",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "world_size",
    "max_steps",
    "warmup_steps",
)
_OTHERS = ("lr_scheduler_type", "dataloader_drop_last", "sampler_drop_last", "tail")

_REQUIRED = ("per_device_train_batch_size", "learning_rate")
_RESIZING = ("max_samples", "val_size", "split_dataset_ratio", "packing")
_TUNER_KEYS = ("finetuning_type", "tuner_type", "train_type", "sft_type")


@dataclass(frozen=True)
class _System:
    """What a system's files look like, and what it takes where they are silent."""

    name: str
    marks: tuple[str, ...]
    lr_scheduler_type: str
    tuner: str

    def wrote(self, settings: Mapping[str, Any]) -> bool:
        return not self.marks or any(mark in settings for mark in self.marks)


# The defaults: transformers training_args.py, ms-swift trainers/arguments.py (v3, v4), and
# LLaMA-Factory, which hands the file on to transformers.
_SYSTEMS = (
    _System("ms-swift", ("train_args", "tuner_type", "train_type", "sft_type"), "cosine", "lora"),
    _System("LLaMA-Factory", ("stage", "finetuning_type", "cutoff_len"), "linear", "lora"),
    _System("Hugging Face Trainer", (), "linear", "full"),
)


@dataclass(frozen=True)
class PlanSource:
    """Where a plan was read from.

    Attributes:
        system: whose configuration it is.
        lora: adapters are trained, by the file or by the system's default.
        unknown_keys: keys that a plan does not read, in the file's order.
        notes: what was filled in or changed on the way.
    """

    system: str
    lora: bool
    unknown_keys: tuple[str, ...]
    notes: tuple[str, ...]


def read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not YAML, or no mapping.
    """
    import yaml

    where = f"{_WHERE}.from_yaml: {os.fspath(path)}"
    try:
        settings = yaml.safe_load(Path(path).read_bytes())
    except yaml.YAMLError as error:
        raise ValueError(f"{where} must be YAML, got {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{where} must hold keys and values, got {type(settings).__name__}")
    return {str(key): value for key, value in settings.items()}


def translate(
    settings: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[dict[str, Any], PlanSource]:
    """Arguments of a plan from `settings`, where `given` ones (unless None) win.

    Raises:
        ValueError: a key that a plan needs is missing, or two keys exclude one another.
    """
    translation = _Translation(settings, {k: v for k, v in given.items() if v is not None})
    translation.read_schedule_kwargs()
    translation.read_fractional_warmup()
    translation.fill_in()
    return translation.arguments, translation.source()


class _Translation:
    """One configuration on its way to the arguments of a plan."""

    def __init__(self, settings: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        self.notes: list[str] = []
        self.unknown: list[str] = []
        self.system = next(s for s in _SYSTEMS if s.wrote(settings))
        self.file = self._flatten(settings)
        self.arguments: dict[str, Any] = {}
        for key, value in self.file.items():
            if key in _COUNTS and value is not None:
                self.arguments[key] = _whole(_number(value))
            elif key in _RATES and value is not None:
                self.arguments[key] = _number(value)
            elif key in _OTHERS and value is not None:
                self.arguments[key] = value
            elif key not in (*_COUNTS, *_RATES, *_OTHERS, "lr_scheduler_kwargs"):
                self.unknown.append(key)
        for key, value in given.items():
            if key in self.arguments and self.arguments[key] != value:
                self.notes.append(f"{key}={value!r} was given; the file has {self.file[key]!r}")
        self.arguments |= given

    def _flatten(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """ms-swift's nested keys beside the others; the nested one wins."""
        nested = settings.get("train_args")
        if not isinstance(nested, Mapping):
            return {str(key): value for key, value in settings.items()}
        flat = {str(key): value for key, value in settings.items() if key != "train_args"}
        for key, value in nested.items():
            if key in flat and flat[key] != value:
                self.notes.append(f"train_args.{key}={value!r} wins over {key}={flat[key]!r}")
            flat[str(key)] = value
        return flat

    def read_schedule_kwargs(self) -> None:
        """``lr_scheduler_kwargs``: the landing in one of its four spellings, and the shape."""
        if self.arguments.get("lr_scheduler_type") == "cosine_warmup_with_min_lr":
            self.arguments["lr_scheduler_type"] = "cosine_with_min_lr"
            self.notes.append("cosine_warmup_with_min_lr is planned as cosine_with_min_lr")
        if "lr_scheduler_kwargs" in self.arguments:
            return  # given by the caller, in a plan's own words
        kwargs = {key: _number(value) for key, value in self._parse_kwargs().items()}
        self._read_landing(kwargs)
        if kwargs.get("num_cycles") == 0.5:
            del kwargs["num_cycles"]  # half a wave, the only one that lands
        shape = {key: kwargs.pop(key) for key in SHAPE_PARAMETERS if key in kwargs}
        if "num_decay_steps" in shape:
            shape["num_decay_steps"] = _whole(shape["num_decay_steps"])
        self.arguments |= {"lr_scheduler_kwargs": shape} if shape else {}
        self.unknown += [f"lr_scheduler_kwargs.{key}" for key in kwargs]

    def _parse_kwargs(self) -> Mapping[str, Any]:
        """The mapping, which ms-swift and the command lines write as JSON."""
        kwargs = self.file.get("lr_scheduler_kwargs") or {}
        if isinstance(kwargs, str):
            with suppress(json.JSONDecodeError):  # no mapping then, and refused as it stands
                kwargs = json.loads(kwargs)
        if not isinstance(kwargs, Mapping):
            raise ValueError(
                f"{_WHERE}: lr_scheduler_kwargs must be a mapping, or one in JSON, got {kwargs!r}"
            )
        return kwargs

    def _read_landing(self, kwargs: dict[str, Any]) -> None:
        spellings = ("min_lr", "lr_end", "min_lr_rate", "min_lr_ratio")
        found = {key: kwargs.pop(key) for key in spellings if kwargs.get(key) is not None}
        if len(found) > 1:
            raise ValueError(
                f"{_WHERE}: lr_scheduler_kwargs must hold one of {', '.join(spellings)}, got "
                f"{' and '.join(found)}; keep one"
            )
        if "min_lr" in self.arguments:
            return
        for key, value in found.items():
            is_share = key in ("min_lr_rate", "min_lr_ratio")
            self.arguments["min_lr"] = self._share_of_peak(value) if is_share else value
        if not found and self.arguments.get("lr_scheduler_type") == "polynomial":
            self.arguments["min_lr"] = 1e-7
            self.notes.append("polynomial lands at 1e-07, as in transformers; lr_end= sets it")

    def _share_of_peak(self, share: Any) -> Any:
        peak = self.arguments.get("learning_rate")
        if not isinstance(share, (int, float)) or not isinstance(peak, (int, float)):
            return share
        return float(Fraction(str(share)) * Fraction(str(peak)))

    def read_fractional_warmup(self) -> None:
        """``warmup_steps`` below 1 is a ratio, as in transformers 5."""
        steps = self.arguments.get("warmup_steps")
        if isinstance(steps, float) and 0 < steps < 1:
            del self.arguments["warmup_steps"]
            self.arguments["warmup_ratio"] = steps
            self.notes.append(f"warmup_steps={steps} is a share of the updates: a warmup_ratio")

    def fill_in(self) -> None:
        """What the file leaves open: the system's own value, or an error that names the key."""
        arguments = self.arguments
        for key in _REQUIRED:
            if key not in arguments:
                self._miss(key)
        if "num_train_epochs" not in arguments and arguments.get("max_steps", -1) == -1:
            self._miss("num_train_epochs or max_steps")
        arguments.setdefault("dataset_size", None)
        if "world_size" not in arguments:
            self._take("world_size", 1)
        if "lr_scheduler_type" not in arguments:
            self._take("lr_scheduler_type", self.system.lr_scheduler_type)
        if self.system.name == "ms-swift" and "gradient_accumulation_steps" not in arguments:
            self._take("gradient_accumulation_steps", self._swift_accumulation())
        drops = arguments.get("dataloader_drop_last") is True and arguments["world_size"] != 1
        if drops and "sampler_drop_last" not in arguments:
            self.notes.append(
                "transformers drops, with dataloader_drop_last, what does not divide among the "
                "ranks as well: sampler_drop_last=True counts so"
            )
        present = [key for key in _RESIZING if self.file.get(key)]
        if present:
            self.notes.append(
                f"{', '.join(present)} change how many samples an epoch has: dataset_size must be "
                "what is left"
            )
        if self.unknown:
            self.notes.append(f"not read: {', '.join(self.unknown)}")

    def _miss(self, key: str) -> None:
        raise ValueError(
            f"{_WHERE}: the configuration must have {key}, got a file without it; add it, or pass "
            "it beside the file"
        )

    def _take(self, key: str, value: Any) -> None:
        self.arguments[key] = value
        self.notes.append(f"{key} is not in the file; {self.system.name} takes {value}")

    def _swift_accumulation(self) -> int:
        """ms-swift's rule: an effective batch of 16 or more."""
        batch, ranks = (self.arguments[k] for k in ("per_device_train_batch_size", "world_size"))
        if not (isinstance(batch, int) and isinstance(ranks, int) and batch * ranks > 0):
            return 1  # the plan refuses those sizes
        return -(-16 // (batch * ranks))

    def source(self) -> PlanSource:
        """What there is to say about the file."""
        tuner = next((self.file[key] for key in _TUNER_KEYS if key in self.file), self.system.tuner)
        lora = "lora" in str(tuner).lower() or self.file.get("use_peft") is True
        return PlanSource(self.system.name, lora, tuple(self.unknown), tuple(self.notes))


def _number(value: Any) -> Any:
    """`value`, read as a number where YAML 1.1 leaves text: 1e-4 has no point in it."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+", value):
        return float(value)
    return value


def _whole(value: Any) -> Any:
    """A count that was written as a float: 3.0 is 3."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
