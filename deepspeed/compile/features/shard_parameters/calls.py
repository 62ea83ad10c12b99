# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed calls to keep parameters on the host until they are sharded, and to save them."""

import copy
import functools
import gc
import itertools
import operator
import os
import pickle
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional

import numpy
import torch

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator

from ...fixes.base.subclasses import BROADCAST_LATER
from ...zero_1_and_2.collectives import every_rank_raises
from ...zero_1_and_2.engine.state import state_of
from ...zero_1_and_2.feature import Request
from ...zero_1_and_2.messages import log_info
from .at_rest import Resharded, refusal_of, stands_for
from .from_host import give_values, is_cut, make_optimizer
from .on_first_rank import OnFirstRank, on_first_rank

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    from .feature import ShardParameters


def take_from_other_engines(engine: "DeepSpeedEngine") -> None:
    """Called on all ranks when an engine begins. Makes parameters whole that another engine has sharded.

    That engine trains on with whole parameters, unless it was destroyed.

    Raises:
        ValueError: if both engines are to train the parameters.
    """
    found = (owner_of(parameter) for parameter in engine.module.parameters())
    owners = list(dict.fromkeys(owner for owner in found if owner is not None))
    if not owners:
        return
    # An engine that nobody destroyed is closed when Python collects it, on each rank at another time.
    with every_rank_raises("make an engine", owners[0].process_group):
        if _trains(engine) and not all(owner.is_closed for owner in owners):
            raise ValueError(
                "another engine trains this model, and has sharded its parameters by compile.shard_parameters; "
                "call destroy() of that engine first, on all ranks"
            )
    while owners:
        owners.pop().give_up()
    # Units and what has them refer to each other. Until Python collects them, they hold memory that DeepSpeed is about
    # to copy the parameters out of.
    gc.collect()


def _trains(engine):
    return engine.client_optimizer is not None or engine.optimizer_name() is not None


def _shards(engine):
    shards = engine.is_deepcompile_enabled() and engine._config.compile_config.shard_parameters is not None
    return shards and _trains(engine) and engine.zero_optimization_stage() in (1, 2)


def owner_of(item: Any) -> "Optional[ShardParameters]":
    """Returns what gathers a tensor at rest. None for anything else."""
    unit, _ = stands_for(item)
    return None if unit is None else unit.owner


def move_to_device(engine: "DeepSpeedEngine") -> None:
    """Called when an engine begins. Moves the module to the engine's device.

    With ``compile.shard_parameters``, parameters that will be sharded and are on the host stay there, so the model
    need not fit on one device: frozen ones until their block is sharded, trained ones until the optimizer is made. On
    ranks other than the first the model may be on the meta device.

    Raises:
        ValueError: if no rank has the values of a parameter.
    """
    module, stays = engine.module, []
    if _shards(engine):
        stays = _to_be_sharded(engine, give_values(module, torch.device(engine.device)))
    stay = {id(parameter) for parameter in stays}
    if not stays:
        module.to(engine.device)
    else:
        # Modules such as RNNs override this. Module.to(), which calls it, leaves out no tensor.
        module._apply(lambda tensor: tensor if id(tensor) in stay else tensor.to(engine.device))
    for parameter in stays:
        setattr(parameter, BROADCAST_LATER, True)


def _to_be_sharded(engine, elsewhere):
    """Lists the parameters that will be sharded. ``elsewhere``: ids of those that some rank has not on its device."""
    from ..blocks.feature import chosen_blocks
    from .feature import frozen_of_blocks

    request = Request(engine, get_accelerator().get_compile_backend(), compile_kwargs={})
    frozen = itertools.chain.from_iterable(frozen_of_blocks(engine.module, chosen_blocks(request)[0], []))
    # A single rank keeps all. With a caller's own groups, these do not say yet how many ranks share parameters.
    shards_all = request.options.shard_parameters == "all" and engine.mpu is None and dist.get_world_size() > 1
    trained = (parameter for parameter in engine.module.parameters() if shards_all and parameter.requires_grad)
    return [parameter for parameter in itertools.chain(frozen, trained) if id(parameter) in elsewhere]


def optimizer_of(
    engine: "DeepSpeedEngine", usual: "Callable[..., DeepSpeedZeroOptimizer]"
) -> "Callable[..., DeepSpeedZeroOptimizer]":
    """Called when an engine makes its ZeRO-1/2 optimizer. Returns what makes it.

    Args:
        usual: what makes it in DeepSpeed, which a program may have replaced.
    """
    cuts = any(map(is_cut, engine.module.parameters()))
    return functools.partial(make_optimizer, engine.module) if cuts else usual


def prepare(engine: "DeepSpeedEngine") -> None:
    """Called on all ranks at the end of ``deepspeed.initialize()``: makes the process group for sharded parameters.

    Compiles an engine whose optimizer has cut parameters. The module has no values of these, so nothing may come
    before they are sharded: no forward, and no loading.
    """
    if not _shards(engine):
        return
    # Imported here, as in with_values().
    from .feature import make_group_of_shards

    optimizer = engine.optimizer
    make_group_of_shards(optimizer.dp_process_group, optimizer.bit16_groups_flat[0].device)
    if not any(map(is_cut, engine.module.parameters())):
        return
    backend = get_accelerator().get_compile_backend()
    log_info(
        f"DeepCompile compiles the engine with backend '{backend}' in deepspeed.initialize(), because "
        "compile.shard_parameters has cut a model on the host"
    )
    engine.compile(backend=backend)


def with_values(engine: "DeepSpeedEngine", state_dict: Dict[str, Any]) -> Dict[str, Any]:
    """Called on all ranks with a state dict of the module. Gives parameters at rest their values.

    The first rank gets them, and every rank that writes a file of its own, such as the first one of each node with
    ``checkpoint.use_node_local_storage``. The values are on the host. Other ranks get tensors on the meta device.
    """
    sharded = _sharded_of(engine)
    return state_dict if sharded is None else _with_values(sharded, state_dict, _writes(engine))


def client_with_values(engine: "DeepSpeedEngine", client_state: Dict[str, Any]) -> Dict[str, Any]:
    """Called on all ranks with what a caller saves in a checkpoint beside the module. Returns it with values.

    This engine's parameters at rest get their values where :func:`with_values` gives them, in dicts, lists and tuples.
    A rank may pass another state than others, because the first rank's alone may be saved.

    Raises:
        RuntimeError: on every rank, if a state that is saved holds others, in objects or of another engine, or cannot
            be pickled.
    """
    sharded = _sharded_of(engine)
    if sharded is None:
        return client_state
    # Import here, as in _sharded_of().
    from ...zero_1_and_2.collectives import collective, every_rank_raises

    found = _at_rest_in(client_state)
    places = {unit: number for number, unit in enumerate(sharded.units)}
    own = {places[unit] for unit, _ in map(stands_for, found.values()) if unit in places}
    of_ranks: List[Any] = [None] * dist.get_world_size()
    with collective("learn which ranks save parameters beside their module"):
        torch.distributed.all_gather_object(of_ranks, own)
    wanted = sorted(set().union(*of_ranks))
    if wanted:
        values = _with_values(sharded, found, _writes(engine), [sharded.units[number] for number in wanted])
        client_state = _replaced(client_state, values, {})
    with every_rank_raises("pickle the client state of a checkpoint"):
        if _writes(engine):
            _refuse_at_rest(client_state)
    return client_state


def _at_rest_in(state):
    """Returns id -> parameter at rest, for those in nested dicts, lists and tuples."""
    found, seen, items = {}, set(), [state]
    while items:
        item = items.pop()
        if isinstance(item, Resharded):
            found[id(item)] = item
        elif isinstance(item, (dict, list, tuple)) and id(item) not in seen:
            seen.add(id(item))
            items.extend(item.values() if isinstance(item, dict) else item)
    return found


def _refuse_at_rest(state):
    """Raises RuntimeError if pickle finds a parameter at rest in a state, wherever it is, or what pickle raises.

    Torch would raise too, but on this rank alone, and the other ranks would wait for this one.
    """

    class Looks(pickle.Pickler):
        def persistent_id(self, item):
            if isinstance(item, Resharded):
                raise refusal_of(item, "saved as a part of client_state")
            # Do not look into what has many values. What stands for values of another rank raises by itself.
            has_values = isinstance(item, (torch.Tensor, str, bytes)) and not isinstance(item, OnFirstRank)
            has_numbers = isinstance(item, numpy.ndarray) and not item.dtype.hasobject
            return True if has_values or has_numbers else None

    with open(os.devnull, "wb") as nowhere:
        # The protocol of torch.save().
        Looks(nowhere, protocol=2).dump(state)


def _replaced(item, values, done):
    """Returns nested dicts, lists and tuples with ``values[id]`` in place of each tensor that has values.

    Only what holds such a tensor is copied, and once, so that what was shared stays shared. ``done``: id of what was
    met -> its copy, or itself.
    """
    if id(item) in values:
        return values[id(item)]
    if id(item) in done or not isinstance(item, (dict, list, tuple)):
        return done.get(id(item), item)
    # An object may hold itself.
    done[id(item)] = item
    entries = item.values() if isinstance(item, dict) else item
    replaced = [_replaced(entry, values, done) for entry in entries]
    if all(map(operator.is_, replaced, entries)):
        return item
    if isinstance(item, tuple):
        done[id(item)] = item._make(replaced) if hasattr(item, "_make") else tuple(replaced)
    else:
        # A copy keeps a state dict's versions, which are an attribute.
        done[id(item)] = copy.copy(item)
        for key, entry in zip(item if isinstance(item, dict) else range(len(item)), replaced, strict=True):
            done[id(item)][key] = entry
    return done[id(item)]


def _sharded_of(engine):
    """Returns what has an engine's sharded parameters, or None."""
    if state_of(engine) is None:
        return None
    # Import here: the compiler takes a second, and DeepSpeed's own import need not wait for it.
    from .feature import sharded_blocks

    return sharded_blocks(engine)


def _writes(engine):
    return dist.get_rank() == 0 or engine.save_non_zero_checkpoint


def _with_values(sharded, state_dict, takes, units=None):
    """Gives the entries of a dict that are at rest their values. No more than one unit is whole for it at a time.

    All ranks call this. ``takes``: whether this rank gets values; others get what :func:`on_first_rank` returns.
    ``units``: those to gather, if not all ranks have entries of the same units. Entries of other units stay at rest.
    """
    entry_of = _copy_on_host if takes else on_first_rank
    sharded.passes.end_backward()
    keys_of: Dict[Any, Dict[str, List[str]]] = {}  # unit -> name of a parameter -> keys
    for key, entry in state_dict.items():
        unit, name = stands_for(entry)
        if unit is not None:
            keys_of.setdefault(unit, {}).setdefault(name, []).append(key)
    # In the same order on all ranks.
    if units is None:
        units = [unit for unit in sharded.units if unit in keys_of]
    for unit in sharded.whole.one_by_one(units):
        for name, keys in keys_of.get(unit, {}).items():
            state_dict.update(dict.fromkeys(keys, entry_of(unit.memory.parameter(name))))
    if sharded.is_closed:
        # What was whole for a moment keeps nothing alive any more.
        for unit in keys_of:
            unit.keep()
    return state_dict


def _copy_on_host(tensor):
    # In a function, whose variables are gone when the unit is resharded: a view would keep its memory.
    values = tensor.detach()
    return values.clone() if values.is_cpu else values.cpu()


def cloned(items: Dict[str, Any], device: torch.device, clone: Callable[[Any, torch.device], Any]) -> Dict[str, Any]:
    """Called with a dict by ``clone_tensors_for_torch_save()``, with which trainers copy a model's weights. Clones it.

    If the dict has parameters at rest, all ranks must call this. The first rank gets their values, and others tensors
    on the meta device, which have none.
    """
    at_rest: Dict[Any, Dict[str, Any]] = {}
    for key, item in items.items():
        owner = owner_of(item)
        if owner is not None:
            at_rest.setdefault(owner, {})[key] = item
    found: Dict[str, Any] = {}
    for owner, its_items in at_rest.items():
        taken = set()
        for key, value in _with_values(owner, its_items, dist.get_rank() == 0).items():
            # A tied parameter is saved under each of its names, as it is where parameters are whole.
            is_tied = id(value) in taken
            taken.add(id(value))
            found[key] = value if isinstance(value, OnFirstRank) else value.to(device, copy=is_tied)
    # What an earlier call has returned has no values to clone.
    found.update({key: item for key, item in items.items() if isinstance(item, OnFirstRank)})
    return {key: found[key] if key in found else clone(item, device) for key, item in items.items()}


def place_of(parameter: torch.Tensor) -> int:
    """Called when a checkpoint is saved. Returns a number that two parameters share if they are one in memory."""
    return id(parameter) if isinstance(parameter, Resharded) else parameter.data_ptr()
