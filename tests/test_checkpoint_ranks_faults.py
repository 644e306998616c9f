"""Saves and loads of several processes that fail: on every rank, and nothing has changed."""

import io
import os
import pickle
import resource
import shutil
import signal
import warnings

import pytest
import ranks
import torch
from joint_run import JointRun, assert_same
from tolerance import assert_bit_equal

each_way = pytest.mark.parametrize("kind", ["own", "fsdp"])
WORLD = 2


def run(function, kind, *args, world=WORLD, **options):
    return ranks.run(world, function, kind, *args, **options)


def refusal(call, *args, **options):
    """Type and words of what a call raises."""
    with pytest.raises(Exception) as error:
        call(*args, **options)
    return type(error.value).__name__, str(error.value)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# ---- Saving ------------------------------------------------------------------------------------


def save_inside(rank, kind, folder, updates):
    run = JointRun(rank, WORLD, kind).train(updates)
    run.micro_step()
    return refusal(run.save, folder)


@each_way
def test_an_open_window_is_refused_on_every_rank(tmp_path, kind):
    for type_, words in run(save_inside, kind, tmp_path, 1):
        assert type_ == "RuntimeError"
        assert "a window must be over, got 1 micro steps in one that lies in all 2" in words
    assert names(tmp_path) == []


def save_wrongly(rank, kind, folder, options):
    """A save with options of each rank, that all refuse; then one that goes well."""
    run = JointRun(rank, WORLD, kind).train(1)
    refused = refusal(run.save, **{"folder": folder, **options[rank]})
    run.save(folder / "good")
    return refused


@each_way
@pytest.mark.parametrize("wrong", [0, 1])
def test_what_one_rank_cannot_save_no_rank_saves(tmp_path, kind, wrong):
    options = [{}, {}]
    options[wrong] = {"extra": object()}
    found = run(save_wrongly, kind, tmp_path, options)
    assert {type_ for type_, _ in found} == {"TypeError"}
    assert found[1 - wrong][1] == f"{found[wrong][1]} (on rank {wrong})"
    assert "'extra' must be a tensor or a plain value, got object" in found[0][1]
    assert names(tmp_path) == ["good"]


@each_way
def test_ranks_that_mean_different_checkpoints_are_told(tmp_path, kind):
    options = [{"metric": ("f1", 0.5)}, {"metric": ("f1", 0.75)}]
    for type_, words in run(save_wrongly, kind, tmp_path, options):
        assert type_ == "ValueError"
        assert "must mean the same checkpoint, got ckpt_step1_f1-0." in words
    assert names(tmp_path) == ["good"]


def save_to_no_folder(rank, kind, folder):
    return refusal(JointRun(rank, WORLD, kind).save, folder)


@each_way
def test_a_folder_that_cannot_be_made_is_said_on_every_rank(tmp_path, kind):
    (tmp_path / "file").touch()
    for type_, words in run(save_to_no_folder, kind, tmp_path / "file" / "folder"):
        assert type_ in ("OSError", "NotADirectoryError")
        assert "that can be written, got Not a directory; make room" in words


def save_on_a_full_disk(rank, kind, folder, full):
    """The disk of rank `full` is full at the second save."""
    run = JointRun(rank, WORLD, kind)
    run.save(folder)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    run.train(1)
    try:
        if rank == full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
        return refusal(run.save, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize(("kind", "full"), [("own", 0), ("fsdp", 0), ("fsdp", 1)])
def test_a_disk_that_is_full_is_said_on_every_rank(tmp_path, kind, full):
    for type_, words in run(save_on_a_full_disk, kind, tmp_path, full):
        assert type_ == "OSError"
        assert "ckpt_step1" in words
        assert "that can be written, got " in words
    assert [name.removesuffix(".pt") for name in names(tmp_path)] == ["ckpt_step0"]


def save_on_rank_0(rank, kind, folder):
    run = JointRun(rank, WORLD, kind).train(1)
    if rank == 0:
        return refusal(run.save, folder)
    return refusal(run.train, 2)


def test_a_save_on_rank_0_alone_is_found_out(tmp_path):
    saving, training = run(save_on_rank_0, "own", tmp_path)
    assert "every rank must call it at the same place, got rank 1 at the end of a" in saving[1]
    assert "got rank 0 saving or loading a checkpoint" in training[1]
    assert names(tmp_path) == []


def die_before_the_second_save(rank, kind, folder):
    run = JointRun(rank, WORLD, kind)
    run.save(folder)
    run.train(1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return refusal(run.save, folder)


@each_way
def test_a_rank_that_is_gone_is_named_and_the_checkpoint_before_stays(tmp_path, kind):
    with ranks.spawn(WORLD, die_before_the_second_save, kind, tmp_path) as started:
        outcomes = started.wait()
    assert outcomes[1][0] == -signal.SIGKILL
    type_, words = outcomes[0][1]
    assert type_ == "RuntimeError"
    assert "all 2 ranks must reach save_checkpoint after update 1" in words
    assert "rank 1 did not come" in words
    assert [name.removesuffix(".pt") for name in names(tmp_path)] == ["ckpt_step0"]


# ---- Loading -----------------------------------------------------------------------------------


def save(rank, kind, folder):
    JointRun(rank, WORLD, kind).train(2).save(folder)


def load_and_look(rank, world, kind, path, **options):
    """What a load that must fail says; that nothing has changed is seen here."""
    run = JointRun(rank, world, kind, dropout=0.25).train(1)
    before, random = run.values(draws=False), torch.get_rng_state()
    refused = refusal(run.load, path, **options)
    assert_same(run.values(draws=False), before, assert_bit_equal)
    assert torch.equal(torch.get_rng_state(), random)
    run.train(2)
    return refused


def load_wrongly(kind, path, world=WORLD):
    return ranks.run(world, load_and_look, world, kind, path)


@pytest.mark.parametrize(("saver", "kind"), [("own", "zero1"), ("fsdp", "fsdp"), ("own", "fsdp")])
def test_another_world_is_refused_by_the_fence_before_anything_changes(tmp_path, saver, kind):
    run(save, saver, tmp_path)
    for type_, words in load_wrongly(kind, tmp_path, world=4):
        assert type_ == "ScheduleMismatchError"
        assert "world_size" in words


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def tensors(path):
    """What rank 1 has written."""
    return path / "__1_0.distcp"


def flip_in_tensor(path):
    """Changes a bit of a weight that rank 1 has written."""
    pieces = torch.load(path / "skeleton.pt", weights_only=True)["pieces"]["model/body.3.weight"]
    piece = next(piece for piece in pieces if piece["file"] == tensors(path).name)
    content = tensors(path).read_bytes()
    saved = content[piece["start"] : piece["start"] + piece["length"]]
    weight = torch.load(io.BytesIO(saved), weights_only=True)
    flip(tensors(path), content.index(bytes(weight.untyped_storage())))


DAMAGES = {
    "a bit": (flip_in_tensor, "ValueError", "has other bytes than were written"),
    "skeleton": (lambda path: flip(path / "skeleton.pt", 99), "ValueError", "whole checkpoint"),
    "cut": (lambda path: os.truncate(tensors(path), 2000), "ValueError", "whole checkpoint"),
    "a file": (lambda path: tensors(path).unlink(), "FileNotFoundError", "__1_0.distcp"),
    "all": (lambda path: shutil.rmtree(path), "FileNotFoundError", "no ckpt_step"),
}


@pytest.mark.parametrize(("damage", "error", "words"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_folder_is_refused_on_every_rank(tmp_path, damage, error, words):
    run(save, "fsdp", tmp_path)
    damage(tmp_path / "ckpt_step2")
    for found in load_wrongly("fsdp", tmp_path):
        assert found[0] == error
        assert words in found[1]


class Poison:
    """Unpickled, it ends the process."""

    def __reduce__(self):
        return os._exit, (3,)


def load(rank, kind, path):
    run = JointRun(rank, WORLD, kind)
    run.load(path)
    return run.values()


def test_what_dcp_has_pickled_is_not_read(tmp_path):
    run(save, "fsdp", tmp_path)
    expected = run(load, "fsdp", tmp_path)
    (tmp_path / "ckpt_step2" / ".metadata").write_bytes(pickle.dumps(Poison()))
    for values, before in zip(run(load, "fsdp", tmp_path), expected, strict=True):
        assert_same(values, before, assert_bit_equal)


def load_noting(rank, world, kind, path):
    run = JointRun(rank, world, kind)
    before = torch.get_rng_state()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.load(path, remap="as_is")
    return [str(w.message) for w in caught], torch.equal(torch.get_rng_state(), before)


@each_way
def test_a_rank_without_random_numbers_keeps_its_own_and_says_so(tmp_path, kind):
    run(save, kind, tmp_path)
    found = ranks.run(4, load_noting, 4, kind, tmp_path)
    assert [kept for _, kept in found] == [False, False, True, True]
    assert [len(said) for said, _ in found] == [0, 0, 1, 1]
    assert "random numbers of 2 ranks, none for rank 3, which keeps its own" in found[3][0][0]
