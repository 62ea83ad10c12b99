# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Saves that end half way: the checkpoint before them is whole, and is found; files that are not whole are named."""

import contextlib
import errno
import functools
import io
import os
import re
import shutil
import signal
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed.compile.fixes.base import checkpoint_files, whole_checkpoints
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from support.checkpoints import Run, differing, start, state, train, whole
from support.ends import in_processes_of_their_own, not_ended_by_nccl
from support.ids import vary
from support.on_ranks import gathered, on_ranks
from support.options import outcome
from support.training import Case, device, make_engine

SAVE, REPLACE, COPY = torch.save, os.replace, shutil.copyfile
# The rank that writes a file, and a part of the file's name.
WEIGHTS, FIRST, SECOND = (0, "model_states"), (0, "zero_pp_rank_0"), (1, "zero_pp_rank_1")


def interrupted_in(part, end):
    """Returns a ``torch.save()`` that writes half of a file with this in its name, and then calls ``end``."""

    def save(value, path, **options):
        if part not in str(path):
            return SAVE(value, path, **options)
        written = io.BytesIO()
        SAVE(value, written, **options)
        with open(path, "wb") as file:
            file.write(written.getvalue()[: written.tell() // 2])
        end()

    return save


@contextlib.contextmanager
def saving_by(function):
    """Context in which ``function`` is torch's own ``torch.save()``."""
    with mock.patch("torch.save", function), mock.patch("torch.serialization.save", function):
        yield


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def fill_disk():
    raise OSError(28, "No space left on device")


def known(folder):
    """Where a rank keeps what it had when it saved a checkpoint."""
    return os.path.join(folder, f"rank{dist.get_rank()}.pt")


def train_and_save(run, folder, tag):
    """Returns an engine that has trained for two steps and saved a checkpoint."""
    engine = start(run)[1]
    train(engine, run, range(2))
    engine.save_checkpoint(folder, tag=tag)
    with whole(engine, run):
        SAVE(state(engine), known(folder))
    return engine


def killed_in_a_save(run, folder, tags, rank, part):
    """Saves twice; while a rank writes a file for the second time, it is killed.

    Returns what the other one raised and logged.
    """
    engine = train_and_save(run, folder, tags[0])
    train(engine, run, [2, 3])
    if dist.get_rank() == rank:
        torch.save = torch.serialization.save = interrupted_in(part, kill)
    with mock.patch.object(whole_checkpoints.logger, "error") as error:
        return outcome(engine.save_checkpoint, folder, tag=tags[1]), error.call_args[0][0]


def resumed(run, folder, tag=None):
    """Returns what loading a checkpoint raises, or the names of what differs from what the rank had at the first."""
    engine = start(run, seed=1)[1]
    said = outcome(engine.load_checkpoint, folder, tag=tag)
    with whole(engine, run):
        found = said or differing(state(engine), torch.load(known(folder)))
    engine.destroy()
    return found


@pytest.mark.parametrize("tags", [("one", "two"), ("one", "one")], ids=["another-tag", "same-tag"])
@vary(
    "form, killed",
    [
        ({"stage": 2}, SECOND),
        ({"stage": 1}, WEIGHTS),
        pytest.param({"stage": 1}, SECOND, marks=pytest.mark.slow),
        pytest.param({"stage": 2}, FIRST, marks=pytest.mark.slow),
        pytest.param({"stage": 2, "model": "OddSizes", "sharded": True}, SECOND, marks=pytest.mark.slow),
        pytest.param({"stage": 2, "deepcompile": False}, SECOND, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_killed_in_a_save(ranks, tmp_path, form, killed, tags, capfd):
    """A training would go on from a checkpoint of which a rank has written half, and have lost the one before it."""
    run, (rank, part) = Run(**{"model": "FillsPartition", **form}), killed
    answers = in_processes_of_their_own(killed_in_a_save, run, str(tmp_path), tags, rank, part)
    assert answers[rank] == "died with exit status -9"
    if 1 - rank in not_ended_by_nccl(answers, capfd):
        raised, logged = answers[1 - rank]
        assert re.match("RuntimeError|DistBackendError", raised)
        last = "one" if tags[1] == "two" else "the earlier one with this tag"
        assert logged == f"the checkpoint {tags[1]} in {tmp_path} was not saved; the last whole one is {last}"
    assert (tmp_path / "latest").read_text() == "one"
    assert ranks(2).run(resumed, run, str(tmp_path)) == [[], []]


@vary("rank, part", [WEIGHTS, SECOND])
@on_ranks(2)
def test_a_rank_that_cannot_write(tmp_path, rank, part):
    """The others would wait for a rank whose disk is full, or take its checkpoint for whole."""
    run, folder = Run("FillsPartition", stage=1), str(tmp_path)
    engine = train_and_save(run, folder, "one")
    with saving_by(interrupted_in(part, fill_disk)):
        said = outcome(engine.save_checkpoint, folder, tag="two")
    ours = "OSError: [Errno 28] No space left on device"
    other = f"rank {rank} could not write its files of the checkpoint two, so no rank goes on. It says: {ours}"
    assert said == (ours if dist.get_rank() == rank else f"RuntimeError: {other}")
    assert gathered(None) and (tmp_path / "latest").read_text() == "one"
    # Nothing is left of it, which would take the place that the disk lacks.
    assert [*(tmp_path / "two").iterdir()] == []
    dist.barrier()
    engine.save_checkpoint(folder, tag="two")
    assert (tmp_path / "latest").read_text() == "two" and len([*(tmp_path / "two").iterdir()]) == 3
    engine.destroy()
    assert resumed(run, folder) == []


def refuse(*_):
    raise OSError(13, "Permission denied")


def replace_all_but(part, other, path):
    """An ``os.replace()`` that is not permitted for files with ``part`` in their names."""
    return refuse() if part in os.path.basename(path) else REPLACE(other, path)


LAST = "the checkpoint {tag} in {folder} was not saved; the last whole one is "
WHOLE = "the save did not end well: the checkpoint {tag} in {folder} is whole"


@pytest.mark.follows("but the file latest does not name it; load it by its tag")
@vary(
    "rank, patch, expects, logged",
    [
        (
            0,
            ("deepspeed.runtime.engine.copyfile", refuse),
            "write its files of the checkpoint {tag}",
            {"two": LAST + "one", "one": LAST + "the earlier one with this tag"},
        ),
        (
            1,
            ("os.replace", functools.partial(replace_all_but, "zero_pp_rank_1")),
            "put its files of the checkpoint {tag} in place",
            {
                "two": LAST + "one",
                "one": LAST.replace("the last whole one is ", "a part of it may be of the earlier one with this tag"),
            },
        ),
        (
            0,
            ("os.replace", functools.partial(replace_all_but, "latest")),
            "name the checkpoint {tag} in the file latest",
            {"two": WHOLE + ", but the file latest does not name it; load it by its tag", "one": WHOLE},
        ),
    ],
    expects="patch, logged",
)
@vary("tag", ["two", "one"])
@on_ranks(2)
def test_a_rank_that_may_not_put_files_in_place(tmp_path, tag, rank, patch, expects, logged):
    """The others would wait in the next meeting of a save for a rank that has raised, until their time is up. Or the
    log would send its reader to an earlier checkpoint that is no longer there, while the new one is whole."""
    run, folder = Run("FillsPartition", stage=1), str(tmp_path)
    engine = train_and_save(run, folder, "one")
    error = mock.patch.object(whole_checkpoints.logger, "error")
    with error as log, mock.patch(*patch) if dist.get_rank() == rank else contextlib.nullcontext():
        said = outcome(engine.save_checkpoint, folder, tag=tag)
    ours = "PermissionError: [Errno 13] Permission denied"
    purpose = expects.format(tag=tag)
    other = f"RuntimeError: rank {rank} could not {purpose}, so no rank goes on. It says: {ours}"
    assert said == (ours if dist.get_rank() == rank else other)
    assert log.call_args[0][0] == logged[tag].format(tag=tag, folder=folder)
    assert gathered(None) and (tmp_path / "latest").read_text() == "one"
    assert not [*tmp_path.rglob("unfinished_*")]
    engine.destroy()
    named = tag if logged[tag].startswith(WHOLE) else None
    assert resumed(run, folder, named) == []


@pytest.mark.quick
@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_of_either_format_that_is_cut_off(tmp_path, zipped):
    """Torch's error would name no file: it has another class for each format, or none of its own."""
    writer, path = TorchCheckpointEngine(), tmp_path / "states.pt"
    writer.zipfile_serialization = zipped
    writer.save({"state": torch.zeros(1000)}, str(path))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(RuntimeError, match=re.escape(f"{path} is not whole: it was cut off, or changed")):
        writer.load(str(path))


@vary("late", [0, 1])
@on_ranks(2)
def test_latest_is_written_last(tmp_path, late):
    """A rank killed between two other moments than those of the tests above would leave a checkpoint in pieces.

    This also holds for checkpoint engines that write in other processes, in which commit() waits for the files.
    """
    run, folder = Run("FillsPartition", stage=1), str(tmp_path)
    engine = train_and_save(run, folder, "one")
    before, seen = engine.checkpoint_engine.commit, []

    def commit(info):
        # No file takes its place before all are written.
        seen.append(((tmp_path / "latest").read_text(), len([*(tmp_path / "two").iterdir()])))
        if dist.get_rank() == late:
            time.sleep(0.3)
            seen.append(((tmp_path / "latest").read_text(), len([*(tmp_path / "two").iterdir()])))
        return before(info)

    with mock.patch.object(engine.checkpoint_engine, "commit", commit):
        engine.save_checkpoint(folder, tag="two")
    assert {*seen} == {("one", 3)} and (tmp_path / "latest").read_text() == "two"
    engine.save_checkpoint(folder, tag="three", save_latest=False)
    assert (tmp_path / "latest").read_text() == "two"
    engine.destroy()


def missing(path):
    path.unlink()


def cut_off(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
    path.write_bytes(b"")


@pytest.mark.follows("; load the last whole checkpoint in ")
@vary("damage", [missing, cut_off, empty])
@vary("rank, part", [WEIGHTS, SECOND])
@on_ranks(2)
def test_a_file_that_is_not_whole(tmp_path, rank, part, damage):
    """A rank would raise what a zip reader says of a file it does not name, while the others wait for that rank."""
    run, folder = Run("FillsPartition", stage=1), str(tmp_path)
    engine = train_and_save(run, folder, "whole")
    engine.save_checkpoint(folder, tag="other", save_latest=False)
    engine.destroy()
    (path,) = (tmp_path / "other").glob(f"*{part}*")
    dist.barrier()
    if dist.get_rank() == 0:
        damage(path)
    dist.barrier()
    said = resumed(run, folder, "other")
    what = " is missing" if damage is missing else " is not whole: it was cut off, or changed"
    assert f"{path}{what}; load the last whole checkpoint in {folder}, whose tag is 'whole'" in said
    assert said.startswith(f"RuntimeError: rank {rank} could not read its file") == (
        part == SECOND[1] and dist.get_rank() != rank
    )
    assert resumed(run, folder, "whole") == []


@pytest.mark.follows("load a checkpoint before going on")
@vary("trained", [False, True])
@on_ranks(2)
def test_a_load_that_ends_half_way(tmp_path, trained):
    """A program that goes on without the checkpoint would train its weights by the optimizer of before."""
    run, folder = Run("FillsPartition", stage=1), str(tmp_path)
    engine = train_and_save(run, folder, "whole")
    engine.save_checkpoint(folder, tag="other", save_latest=False)
    if not trained:
        engine.destroy()
        engine = start(run, seed=1)[1]
    if dist.get_rank() == 0:
        missing(*(tmp_path / "other").glob(f"*{SECOND[1]}*"))
    dist.barrier()
    said = outcome(engine.load_checkpoint, folder, tag="other")
    assert " is missing" in said
    refused = f"RuntimeError: the last load of a checkpoint ended half way ({said}), so that the weights are not"
    assert outcome(train, engine, run, [2]).startswith(refused)
    assert outcome(engine.save_checkpoint, folder, tag="third").startswith(refused)
    # A folder without checkpoints loads nothing.
    assert engine.load_checkpoint(str(tmp_path / "empty")) == (None, None)
    assert outcome(train, engine, run, [2]).startswith(refused)
    # As the message advises.
    if trained:
        engine.load_checkpoint(folder)
        assert differing(state(engine), torch.load(known(folder))) == []
    else:
        module = engine.module
        engine.destroy()
        engine = make_engine(module, run)
    train(engine, run, [2])
    engine.save_checkpoint(folder, tag="third")
    engine.destroy()


@pytest.mark.follows("; load another checkpoint in ")
@vary("gone", [False, True])
@on_ranks(1)
def test_a_file_that_is_not_whole_of_the_latest(tmp_path, gone):
    """Whoever has a checkpoint that DeepSpeed named too early would not be told of the earlier one.

    Or whoever has removed the folder that ``latest`` names would be sent there.
    """
    run, folder = Run("FillsPartition", stage=1), str(tmp_path)
    engine = train_and_save(run, folder, "whole")
    engine.save_checkpoint(folder, tag="other")
    engine.destroy()
    cut_off(tmp_path / "other" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    if gone:
        (tmp_path / "latest").write_text("removed")
    assert resumed(run, folder, "other").endswith(
        f"; load another checkpoint in {folder}, such as the one with the tag 'whole'"
    )
    assert resumed(run, folder, "whole") == []


@on_ranks(2)
def test_a_save_in_place_that_fails(tmp_path):
    """The log would call a checkpoint whole of which a part was overwritten."""
    run, folder = Run("FillsPartition", stage=1), str(tmp_path)
    engine = train_and_save(run, folder, "one")
    error = mock.patch.object(whole_checkpoints.logger, "error")
    with error as log, mock.patch("torch.save", interrupted_in("model_states", fill_disk)):
        outcome(engine.save_checkpoint, folder, tag="one")
    # The second rank writes no weights.
    assert log.call_args[0][0].endswith("was not saved; a part of it may be of the earlier one with this tag")
    engine.destroy()


class Uploads(TorchCheckpointEngine):
    """A checkpoint engine of a program's own. DeepSpeed's ``commit()`` does nothing, so this one does not call it."""

    def commit(self, info):
        self.found = sorted(name for *_, names in os.walk(info.save_dir) for name in names)
        return True


@on_ranks(1)
def test_a_writer_that_overrides_commit(tmp_path):
    """Its files would never get their names, and the next save would remove them."""
    module = torch.nn.Linear(2, 2).to(device())
    engine, folder = make_engine(module, Case(deepcompile=False)), str(tmp_path)
    engine.checkpoint_engine = Uploads()
    engine.save_checkpoint(folder, tag="one")
    assert {*os.listdir(tmp_path / "one")} < {*engine.checkpoint_engine.found}
    assert not any(name.startswith("unfinished_") for name in engine.checkpoint_engine.found)
    engine.save_16bit_model(str(tmp_path / "one"), "model.bin")
    assert (tmp_path / "one" / "model.bin").exists()
    assert engine.load_checkpoint(folder)[0] is not None
    engine.destroy()


@pytest.mark.quick
def test_a_program_that_replaces_save(tmp_path):
    """It would be given another name than the file has, by which it chooses what to keep, and the file would be
    renamed before the program has written it."""
    path, info, kept = str(tmp_path / "mine.pt"), CheckpointCommitInfo("one", str(tmp_path), save_latest=False), {}
    writer = TorchCheckpointEngine()
    writer.create(info)
    with mock.patch("torch.save", lambda state, path, **_: kept.update({path: state})):
        writer.save({"a": 1}, path)
        writer.commit(info)
    assert kept == {path: {"a": 1}} and not [*tmp_path.iterdir()]


@vary("code", [errno.ENOSYS, errno.EOPNOTSUPP])
@pytest.mark.quick
def test_a_folder_that_knows_no_renames(tmp_path, code):
    """Nothing could be saved to an object store that is mounted, or each file would be copied in every save."""
    path, info = str(tmp_path / "mine.pt"), CheckpointCommitInfo("one", str(tmp_path), save_latest=False)
    writer, copies = TorchCheckpointEngine(), []

    def copy(*names):
        copies.append(names)
        return COPY(*names)

    no_rename = mock.patch("os.replace", side_effect=OSError(code, "not supported"))
    with (
        no_rename,
        mock.patch("shutil.copyfile", copy),
        mock.patch.object(checkpoint_files, "_without_renames", set()),
    ):
        for value in range(3):
            writer.create(info)
            writer.save({"a": value}, path)
            writer.commit(info)
            assert writer.load(path) == {"a": value}
            assert [file.name for file in tmp_path.iterdir()] == ["mine.pt"]
    assert len(copies) == 1


@pytest.mark.quick
def test_a_file_of_its_own(tmp_path):
    """A caller of the checkpoint engine who calls no commit() would find no file, or half of one."""
    path = tmp_path / "mine.pt"
    writer = TorchCheckpointEngine()
    writer.save({"a": 1}, str(path))
    with saving_by(interrupted_in("mine", fill_disk)), pytest.raises(OSError):
        writer.save({"a": 2}, str(path))
    assert writer.load(str(path)) == {"a": 1}
    assert [*tmp_path.iterdir()] == [path]


@on_ranks(2)
def test_a_file_that_two_ranks_write(tmp_path):
    """With node-local storage that is no such, a rank would rename or cut off what another one writes."""
    writer, path = TorchCheckpointEngine(), str(tmp_path / "model.pt")
    info = CheckpointCommitInfo("one", str(tmp_path), save_latest=False)
    writer.create(info)
    writer.save({"a": 1}, path)
    dist.barrier()
    writer.commit(info)
    assert writer.load(path) == {"a": 1}
    dist.barrier()
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]


@pytest.mark.quick
def test_errors_that_files_are_not_to_blame_for(tmp_path):
    """A class that cannot be imported, or memory that ran out, would be taken for a file that is not whole."""
    path = tmp_path / "mine.pt"
    writer = TorchCheckpointEngine()
    writer.save({"a": 1}, str(path))
    with mock.patch("torch.load", side_effect=MemoryError("all of it")), pytest.raises(MemoryError, match="all of it"):
        writer.load(str(path))


@pytest.mark.follows("let all ranks see the same files, or give the tag")
@vary("missing", ["latest", "weights"])
@on_ranks(2)
def test_ranks_that_find_other_checkpoints(tmp_path, missing):
    """Where hosts have folders of their own, a rank would go on with new weights, and the other wait for it."""
    run, folder = Run("FillsPartition", stage=1), tmp_path / "all"
    engine = train_and_save(run, str(folder), "one")
    # What the second rank's host has.
    if dist.get_rank():
        own = tmp_path / "own"
        shutil.copytree(folder, own)
        (own / "latest" if missing == "latest" else own / "one" / "mp_rank_00_model_states.pt").unlink()
        folder = own
    # The first rank reads what the second one copies.
    dist.barrier()
    said = outcome(engine.load_checkpoint, str(folder))
    if missing == "latest":
        assert "can read no tag in " in said and "the first rank loads the checkpoint one; let all ranks" in said
        # As the message advises.
        assert outcome(engine.load_checkpoint, str(folder), tag="one") is None
    else:
        assert "FileNotFoundError: " in said
    engine.destroy()


@on_ranks(2)
def test_one_rank_asks_for_latest(tmp_path):
    """The first rank alone writes the file latest, and would wait for the others before."""
    engine = train_and_save(Run("FillsPartition", stage=1), str(tmp_path), "one")
    engine.save_checkpoint(str(tmp_path), tag="two", save_latest=dist.get_rank() == 0)
    assert (tmp_path / "latest").read_text() == "two"
    engine.destroy()
