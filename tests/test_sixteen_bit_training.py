"""bench/sixteen_bit_training.py in small: masters follow fp32, plain bf16 loses updates."""

import json
import sys
from pathlib import Path

import pytest
import torch

from stepclock_ext.demo.model import ModelShape
from stepclock_ext.demo.recipe import Recipe

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))
from sixteen_bit_training import WAYS, Setting, compare, make_table, train, write_results

# At this rate an update is less than half an ulp of most bf16 weights: of all above 2**-6.
SETTING = Setting(
    shape=ModelShape(width=16, num_layers=1, num_heads=2, context=8),
    recipe=Recipe(updates=20, accumulation_steps=8, sequences=1, learning_rate=1e-4),
    num_sequences=64,
    eval_every=5,
    compared=10,
)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As the script does, so that a run has the same bits each time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def curves(one_thread):
    """One run in each way."""
    return {name: train(way, SETTING) for name, way in WAYS.items()}


def test_with_masters_the_loss_follows_fp32_ten_times_closer_than_plain_bf16_does(curves):
    distances = compare(curves, SETTING)
    assert distances["masters"].mean < distances["plain"].mean / 10
    assert distances["masters"].is_within


def test_an_update_moves_the_masters_and_leaves_most_bf16_weights_where_they_are(curves):
    distances = compare(curves, SETTING)
    assert distances["masters"].moved > 0.99
    assert distances["plain"].moved < 0.5
    assert distances["nearest"].moved < distances["stochastic"].moved < 0.5


def test_a_run_gives_the_same_losses_again(curves):
    assert train(WAYS["plain"], SETTING).losses == curves["plain"].losses


def test_the_table_has_a_line_for_each_way_and_judges_all_but_fp32(curves):
    lines = make_table(compare(curves, SETTING)).splitlines()
    assert len(lines) == 2 + len(WAYS)
    for line, (name, way) in zip(lines[2:], WAYS.items(), strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[:2] == [way.title, f"{curves[name].losses[-1]:.4f}"]
        assert cells[4] in ([""] if way.dtype == torch.float32 else ["yes", "no"])


def test_curves_and_plot_are_written(curves, tmp_path):
    write_results(tmp_path / "results", curves, SETTING)
    path = tmp_path / "results" / "sixteen_bit_training.json"
    content = json.loads(path.read_text(encoding="ascii"))
    assert list(content["curves"]) == list(WAYS)
    assert content["curves"]["plain"]["updates"] == [0, 5, 10, 15, 20]
    assert content["curves"]["plain"]["losses"] == curves["plain"].losses
    plot = path.with_suffix(".svg").read_text(encoding="utf-8")
    assert plot.startswith("<?xml")
    assert all(way.title in plot for way in WAYS.values())
