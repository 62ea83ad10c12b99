# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are saved and loaded as a whole: ``latest`` names one only when all ranks have written it.

To DeepSpeed: the first rank writes ``latest`` when it has written its own files. If another rank is killed while it
still writes, ``latest`` names a checkpoint that cannot be loaded, although an earlier one is whole. Please wait for
all ranks first, and put ``latest`` in place by a rename.
"""

import contextlib
import functools
import inspect
import os
from typing import TYPE_CHECKING, Any, Callable, ContextManager, NoReturn, Optional

import deepspeed.comm as dist
from deepspeed.utils.logging import logger

from ...zero_1_and_2.collectives import every_rank_raises, of_first_rank
from ...zero_1_and_2.hooks import Hook
from . import checkpoint_files
from .timeouts import trains_here

if TYPE_CHECKING:
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo
    from deepspeed.runtime.engine import DeepSpeedEngine


# How far the save of a checkpoint has come on all ranks.
WRITES, REPLACES, IS_WHOLE = range(3)


def tells_which_is_whole(save: Callable[..., bool]) -> Callable[..., bool]:
    """Decorates ``engine.save_checkpoint()``: if it raises, every rank that is left says which checkpoint is whole."""

    @functools.wraps(save)
    def save_checkpoint(engine, save_dir, tag=None, *args, **kwargs):
        _refuse_half_loaded(engine)
        engine._save_has_come_to = WRITES
        try:
            return save(engine, save_dir, tag, *args, **kwargs)
        except BaseException:
            if save_dir and os.path.isdir(save_dir):
                _say_which_is_whole(engine, save_dir, tag)
            raise

    return save_checkpoint


def _say_which_is_whole(engine, folder, tag):
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    latest, writer, reached = checkpoint_files.read_latest(folder), engine.checkpoint_engine, engine._save_has_come_to
    checkpoint_files.drop(writer)
    if reached == IS_WHOLE:
        unnamed = "" if latest == tag else ", but the file latest does not name it; load it by its tag"
        logger.error(f"the save did not end well: the checkpoint {tag} in {folder} is whole{unnamed}")
        return
    if latest is None:
        last = "it has no whole checkpoint yet, or none that the file latest names"
    elif latest != tag:
        last = f"the last whole one is {latest}"
    elif reached == REPLACES or not checkpoint_files.keeps_earlier(writer):
        last = "a part of it may be of the earlier one with this tag"
    else:
        last = "the last whole one is the earlier one with this tag"
    logger.error(f"the checkpoint {tag} in {folder} was not saved; {last}")


def commit(engine: "DeepSpeedEngine", info: "CheckpointCommitInfo") -> None:
    """Called on all ranks when each has written its files: gives these their names, and names the checkpoint.

    An earlier checkpoint of the same tag stays whole until all ranks have written, unless they write in place.

    Raises:
        Exception: on every rank, if a rank could not write a file. Without DeepCompile on that rank alone.
    """
    writer = engine.checkpoint_engine
    with _on_every_rank(engine, f"write its files of the checkpoint {info.tag}"):
        checkpoint_files.raise_error(writer)
    if writer.is_decoupled():
        # Not within a context: an engine that writes in other processes calls a collective, and waits for them.
        writer.commit(info)
    engine._save_has_come_to = REPLACES
    with _on_every_rank(engine, f"put its files of the checkpoint {info.tag} in place"):
        if not writer.is_decoupled():
            checkpoint_files.give_names(writer)
            writer.commit(info)
    engine._save_has_come_to = IS_WHOLE
    with _on_every_rank(engine, f"name the checkpoint {info.tag} in the file latest"):
        # Where each host has a folder of its own, each has the file. Only the ranks that write it need ask for it.
        if info.save_latest and (engine.local_rank if engine.use_node_local_storage() else engine.global_rank) == 0:
            path = os.path.join(info.save_dir, checkpoint_files.LATEST)
            with checkpoint_files.replacing(path) as other, open(other, "w") as file:
                file.write(info.tag)


@contextlib.contextmanager
def _on_every_rank(engine, purpose):
    """Context at whose end all ranks meet."""
    if trains_here(engine):
        with every_rank_raises(purpose):
            yield
    else:
        yield
        dist.barrier()


def loads_one_checkpoint(load: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates ``engine.load_checkpoint()``: if ranks would load states of different checkpoints, every rank raises.

    Without DeepCompile such ranks exchange nothing while they load, and train apart afterwards.
    """

    @functools.wraps(load)
    def load_checkpoint(engine, load_dir, tag=None, *args, **kwargs):
        asked = inspect.signature(load).bind(engine, load_dir, tag, *args, **kwargs)
        asked.apply_defaults()
        if (
            trains_here(engine)
            and asked.arguments["load_optimizer_states"]
            and not asked.arguments["load_module_only"]
        ):
            _refuse_other_checkpoints(engine, load_dir, tag)
        return _load_all(engine, functools.partial(load, engine, load_dir, tag, *args, **kwargs))

    return load_checkpoint


def begin_to_load(engine: "DeepSpeedEngine") -> None:
    """Called when a checkpoint is about to change weights."""
    engine._has_begun_to_load = True


def _load_all(engine, load):
    """Loads a checkpoint. If that raises when weights have changed, the engine refuses to go on until a load succeeds.

    Otherwise the next step would apply gradients of the loaded weights to master weights of before, with the
    scheduler and the counts of the checkpoint. To DeepSpeed: this is so without DeepCompile. Please refuse it.
    """
    said, hook = vars(engine).pop("_half_loaded", (None, None))
    if hook is not None:
        hook.remove()
    engine._has_begun_to_load = False
    try:
        loaded = load()
        # A folder without checkpoints is no error.
        said = said if loaded[0] is None else None
        return loaded
    except BaseException as error:
        said = f"{type(error).__name__}: {error}" if engine._has_begun_to_load else said
        raise
    finally:
        if said is not None and trains_here(engine):
            engine._half_loaded = said, engine.register_forward_pre_hook(Hook(_refuse_half_loaded))


def _refuse_half_loaded(engine, *_):
    if hasattr(engine, "_half_loaded"):
        said, _ = engine._half_loaded
        raise RuntimeError(
            f"the last load of a checkpoint ended half way ({said}), so that the weights are not those of the "
            "optimizer; load a checkpoint before going on, or create a new engine"
        )


def _refuse_other_checkpoints(engine, folder, tag):
    group = engine.seq_data_parallel_group
    with every_rank_raises("find the checkpoint", group):
        name = checkpoint_files.LATEST + ("_universal" if engine.load_universal_checkpoint() else "")
        own = checkpoint_files.read_latest(folder, name) if tag is None else str(tag)
    first = of_first_rank(own, "checkpoints of all ranks", group)
    with every_rank_raises("find its files of the checkpoint", group):
        # A program may give each host a tag of its own.
        if tag is None and own != first:
            found = f"reads the tag {own} in" if own else "can read no tag in"
            raise ValueError(
                f"this rank {found} {os.path.join(folder, name)}, and the first rank loads the checkpoint {first}; "
                "let all ranks see the same files, or give the tag"
            )
        if own is not None and not engine._get_all_ckpt_names(folder, own):
            refuse(engine._get_ckpt_name(folder, own))


def refuse(path: str) -> NoReturn:
    """Called where files of weights were looked for, and none was found. ``path``: the one that this rank would read.

    Raises:
        FileNotFoundError: which names another checkpoint.
    """
    with checkpoint_files.reading(path):
        raise FileNotFoundError(path)


def reading_partitions(engine: "DeepSpeedEngine") -> ContextManager[Optional[object]]:
    """Returns the context in which each rank reads the file of its partition.

    If a rank cannot read its file, all ranks raise. Otherwise the others would wait for this one in the exchange of
    elements. Without DeepCompile there is none, and DeepSpeed loads the others.
    """
    return every_rank_raises("read its file of the checkpoint") if trains_here(engine) else contextlib.nullcontext()
