# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Faults that the tests must see. ``tests/planted_faults.py`` plants them, one at a time, in a copy of the package.

Each fault is what a careless change could make of today's code: nothing fails on import, and most faults raise no
error by themselves. Together the faults go along the life of a gradient, of a step and of a parameter.
"""

from pathlib import Path
from typing import Dict, NamedTuple, Tuple

CPP, CORE, FEATURES = "ops/csrc/compile/", "compile/zero_1_and_2/", "compile/features/"


class Fault(NamedTuple):
    """A fault, and who should see it.

    Attributes:
        file: the broken file, from the package's folder on.
        changes: old text, which occurs once in the file -> new text.
        tests: files of tests, of which one should fail; the cheapest comes first.
        hangs: whether a test that does not end has seen the fault.
    """

    file: str
    changes: Dict[str, str]
    tests: Tuple[str, ...]
    hangs: bool = False

    def broken(self, package: Path) -> str:
        """Returns the text of the broken file.

        Raises:
            ValueError: if an old text is not there, or more than once.
        """
        text = (package / self.file).read_text()
        for old, new in self.changes.items():
            if text.count(old) != 1:
                raise ValueError(f"{self.file} has {text.count(old)} times, and not once, the text {old!r}")
            text = text.replace(old, new)
        return text


FAULTS = {
    # A gradient is reduced ------------------------------------------------------------------------------------------
    "lost bucket": Fault(
        CPP + "reducer.cpp",
        {
            "    buckets_.launch();\n    buckets_.drain();\n    if (reduces) {": (
                "    buckets_.drain();\n    if (reduces) {"
            )
        },
        ("features/blocks/test_blocks_training.py", "core/test_ranks_that_differ.py"),
    ),
    "bucket in flight dropped": Fault(
        CPP + "bucket.cpp",
        {"its memory is free for the next one.\n    drain();\n": "its memory is free for the next one.\n"},
        ("core/test_parity.py",),
    ),
    "bucket read before its collectives have ended": Fault(
        CPP + "bucket.cpp",
        {"for (auto& work : works_) { work->wait(); }": ""},
        ("core/test_parity.py", "core/test_lifetime.py"),
    ),
    "large gradient held without a copy of memory that is used again": Fault(
        CPP + "bucket.cpp",
        {"if (large && donated && numel": "if (large && numel"},
        ("core/test_sent_gradients.py", "core/test_lifetime.py"),
    ),
    "each parameter gets the shard of the first one": Fault(
        CPP + "bucket.cpp",
        {"shard.narrow(0, offset, entry.shards.own)": "shard.narrow(0, 0, entry.shards.own)"},
        ("core/test_parity.py",),
    ),
    "not divided by the number of ranks": Fault(
        CPP + "carrier.cpp",
        {"if (!average && divisor != 1) {": "if (average) {"},
        ("core/test_parity.py",),
    ),
    "later micro-batch replaces the sum": Fault(
        CPP + "bucket.cpp",
        {"bound->second.add_(arrived);": "bound->second.copy_(arrived);"},
        ("core/test_parity.py",),
    ),
    "second use of a weight replaces the first": Fault(
        CPP + "bucket.cpp",
        {"joinable->second.add_(gradient);": "joinable->second.copy_(gradient);"},
        ("core/test_messages.py", "core/test_parity.py"),
    ),
    "old memory sent for a skipped branch": Fault(
        CPP + "order.cpp",
        {"record, at::zeros(parameter": "record, at::empty(parameter"},
        ("core/test_ranks_that_differ.py",),
    ),
    "donated gradient that is read again": Fault(
        CORE + "graph/reductions.py",
        {'if gradient.op == "call_function" and len(gradient.users) == 1:': 'if gradient.op == "call_function":'},
        ("core/test_sent_gradients.py", "core/test_lifetime.py"),
    ),
    "buckets released by the wrong graph": Fault(
        CORE + "graph/backend.py",
        {"graph_id == 0 and": "graph_id == len(self._graph_ids) - 1 and"},
        ("core/test_graphs.py",),
    ),
    "two engines with one number": Fault(
        CORE + "engine/set_up.py",
        {"    _last_identity = int(identity)\n    return _last_identity": "    return int(identity)"},
        ("core/test_engines.py",),
    ),
    "communication_data_type ignored": Fault(
        CORE + "engine/set_up.py",
        {"optimizer.get_param_comm_dtype(parameter)\n": "parameter.dtype\n"},
        ("core/test_sent_gradients.py", "core/test_options_number_formats.py"),
    ),
    "buckets held on one rank": Fault(
        CORE + "engine/set_up.py",
        {"torch.distributed.all_reduce(asks, torch.distributed.ReduceOp.MAX, group)": "pass"},
        ("features/shard_parameters/test_shard_order.py",),
        hangs=True,
    ),
    "reduce_bucket_size ignored": Fault(
        CORE + "engine/set_up.py",
        {"bucket_numel=int(engine.zero_reduce_bucket_size()),": "bucket_numel=SEND_NUMEL,"},
        ("core/test_buckets.py",),
    ),
    "overlap_comm ignored": Fault(
        CORE + "engine/set_up.py",
        {"overlap=overlaps_reduction(request),": "overlap=True,"},
        ("core/test_options_honoured.py",),
    ),
    "no warning of an option without effect": Fault(
        FEATURES + "configuration/feature.py",
        {"!= 1.0 and not config.prescale_gradients:": "!= 1.0 and config.prescale_gradients:"},
        ("features/configuration/test_options_warned.py",),
    ),
    # Graphs ---------------------------------------------------------------------------------------------------------
    "stale guard": Fault(
        FEATURES + "blocks/guards.py",
        {'    "skip_nnmodule_hook_guards",\n': ""},
        ("features/blocks/test_hooks_later.py",),
    ),
    "hook of a parameter ignored": Fault(
        CPP + "reducer.cpp",
        {"if (route == Route::graph && record.has_hooks()) {": "if (route == Route::graph && index > index) {"},
        ("core/test_hooks_of_parameters.py",),
    ),
    "hook of the sum sees the last micro-batch alone": Fault(
        CPP + "reducer.cpp",
        {"if (!record.has_hooks_of_sum()) { record.unreduced": "{ record.unreduced"},
        ("core/test_hooks_of_parameters.py",),
    ),
    "code of another version": Fault(
        CORE + "graph/keys.py",
        {"file.read_bytes() for file": "file.name.encode() for file"},
        ("core/test_cache_key.py", "core/test_graphs.py"),
    ),
    "random numbers drawn anew": Fault(
        FEATURES + "activation_budget/feature.py",
        {"return torch.Tag.nondeterministic_seeded in target.tags": "return False"},
        ("core/test_randomness.py",),
    ),
    "chunk left out of the loss": Fault(
        FEATURES + "loss/chunked_loss.py",
        {"for first in range(0, vocabulary, rows)": "for first in range(0, vocabulary - rows + 1, rows)"},
        ("features/loss/test_chunked_loss_alone.py",),
    ),
    "ignored labels counted": Fault(
        FEATURES + "loss/chunked_loss.py",
        {"weights = counts.float()": "weights = torch.ones_like(logsumexp)"},
        ("features/loss/test_chunked_loss_alone.py",),
    ),
    # Backwards make up a step ---------------------------------------------------------------------------------------
    "state left by a backward that raised": Fault(
        CORE + "gradient/backward.py",
        {"        self._optimizer()._backward_active_depth = 0\n": ""},
        ("core/test_backwards.py",),
    ),
    "micro-batch counted although it raised": Fault(
        CORE + "gradient/backward.py",
        {
            "            self._lost += step.backwards\n        else:\n            self.begin_anew()\n": (
                "            self._lost += step.backwards\n"
            )
        },
        ("core/test_faults.py", "core/test_backwards.py"),
    ),
    "zero_grad() keeps what is not reduced": Fault(
        CORE + "gradient/backward.py",
        {"        self._reducer.release(None)\n": ""},
        ("core/test_sent_gradients.py", "core/test_gradients_between.py"),
    ),
    "gradients of the caller ignored": Fault(
        CORE + "step/step.py",
        {"    deepcompile.backward.read_entries()\n": ""},
        ("core/test_averaged_gradients.py",),
    ),
    "backward that raised on one rank": Fault(
        CPP + "reducer.cpp",
        {"    agreement_.add(Marker::backward_abandoned);\n": ""},
        ("core/test_faults_on_one_rank.py",),
        hangs=True,
    ),
    "ranks send without comparing": Fault(
        CPP + "bucket.cpp",
        {"        agreement_.compare(groups_, in_flight_->purpose());\n": ""},
        ("core/test_faults_on_one_rank.py", "core/test_ranks_that_differ.py"),
        hangs=True,
    ),
    "error without its cause": Fault(
        CORE + "collectives.py",
        {"DistBackendError(reducer_module().could_not(purpose, str(error)))": "DistBackendError(str(error))"},
        ("core/test_faults_on_one_rank.py",),
    ),
    # A step ---------------------------------------------------------------------------------------------------------
    "check_grad_overflow ignored": Fault(
        CORE + "step/norm.py",
        {"if not optimizer.check_grad_overflow and (norm": "if (norm"},
        ("core/test_dtypes.py", "core/test_faults.py"),
    ),
    "clipped with the norm of one rank": Fault(
        CORE + "step/norm.py",
        {
            "dist.all_reduce(squares, op=dist.ReduceOp.SUM, group=optimizer.dp_process_group)": "pass",
        },
        ("core/test_averaged_gradients.py", "core/test_dtypes.py"),
    ),
    "ranges after the first left out of the update": Fault(
        CORE + "step/partitions.py",
        {"self._run(self._spans)": "self._run(self._spans[:1])"},
        ("features/update/test_one_pass_adam_in_engine.py", "features/overlap_gather/test_parameter_gather.py"),
    ),
    "gradients kept until the whole partition is stepped": Fault(
        CORE + "step/partition_gradient.py",
        {"        del self._rest[index : index + behind]\n": ""},
        ("features/update/test_ranges.py",),
    ),
    "count of steps not kept": Fault(
        FEATURES + "update/adam.py",
        {"step.fill_(self._count)": "pass"},
        ("features/update/test_one_pass_adam.py",),
    ),
    "learning rate of the first step": Fault(
        FEATURES + "update/adam_operators.py",
        {
            "    s = Scalars(*settings.scalars.unbind())\n": (
                "    s = Scalars(*settings.scalars.unbind())._replace(rate=0.1)\n"
            )
        },
        ("features/update/test_one_pass_adam.py",),
    ),
    "8-bit scale that is the largest value and not the largest magnitude": Fault(
        FEATURES + "update/dynamic_map.py",
        {"scales = blocks.abs().amax(-1)": "scales = blocks.amax(-1)"},
        ("features/update/test_eight_bit_states.py",),
    ),
    "8-bit blocks that depend on the number of ranks": Fault(
        CORE + "layout.py",
        {"SHARD_MULTIPLE = 256": "SHARD_MULTIPLE = 16"},
        ("features/update/test_eight_bit_in_engine.py",),
    ),
    "ties of remainders to even": Fault(
        FEATURES + "update/remainders.py",
        {"(bits + 0x8000) >> 16": "(bits + 0x7FFF + ((bits >> 16) & 1)) >> 16"},
        ("features/update/test_remainders.py",),
    ),
    "Muon's momentum of a step that overflows": Fault(
        CORE + "step/step.py",
        {
            "    groups = begin() if transform is None else None\n": (
                "    groups = begin() if transform is None else transform.run(optimizer)\n"
            ),
            "                transform.run(optimizer)\n": "                pass\n",
        },
        ("features/update/test_muon.py",),
    ),
    "step that an exception ended is forgotten": Fault(
        CORE + "engine/state.py",
        {'            self._interrupted = f"{type(error).__name__}: {error}"\n': ""},
        ("features/checkpoints/test_interrupted.py",),
    ),
    # A parameter ----------------------------------------------------------------------------------------------------
    "offloaded parameters at the wrong place": Fault(
        FEATURES + "offload_optimizer/feature.py",
        {"own_parameters(optimizer, group).write(first, source)": "own_parameters(optimizer, group).write(0, source)"},
        ("features/offload_optimizer/test_offload.py",),
    ),
    "forward does not wait": Fault(
        FEATURES + "overlap_gather/feature.py",
        {"self.wait(sorted(units))\n": "pass\n"},
        ("features/overlap_gather/test_parameter_gather.py",),
    ),
    "read does not wait": Fault(
        FEATURES + "overlap_gather/arriving.py",
        {"put_in_front(parameter, Arriving, _arrival=arrival)": "del parameter"},
        ("features/overlap_gather/test_readers.py",),
    ),
    "parameters that the caller gave other memory unnoticed": Fault(
        CORE + "layout.py",
        {"return all([place.parameter.data_ptr()": "return any([place.parameter.data_ptr()"},
        ("core/test_backwards.py",),
    ),
    "ranks call different blocks unnoticed": Fault(
        FEATURES + "shard_parameters/gather_order.py",
        {
            "self._whole.begin(following, following in self._kept, self.at)": (
                "self._whole.begin(following, following in self._kept)"
            )
        },
        ("features/shard_parameters/test_ranks_alike.py",),
        hangs=True,
    ),
    "frozen shard not gathered again": Fault(
        FEATURES + "shard_parameters/gather_order.py",
        {
            "        self._whole.begin(unit, unit in self._kept, self.at)\n": (
                "        if place >= self._begun:\n            self._whole.begin(unit, unit in self._kept, self.at)\n"
            )
        },
        ("features/shard_parameters/test_shard_frozen.py",),
    ),
    "frozen parameters read before they came": Fault(
        FEATURES + "shard_parameters/saved_tensors.py",
        {"        self.unit.gather_for_backward(self.schedule)\n": ""},
        ("features/shard_parameters/test_shard_frozen.py",),
    ),
    "change by .data lost": Fault(
        FEATURES + "shard_parameters/passes.py",
        {"            unit.is_used = True\n            if": "            if"},
        ("features/shard_parameters/test_shard_frozen.py",),
    ),
    # What is compiled -----------------------------------------------------------------------------------------------
    "checkpoint taken for generation": Fault(
        FEATURES + "blocks/compilation_limit.py",
        {"self.trains(args, kwargs) if around is None else around or": "self.trains(args, kwargs) or"},
        ("fixes/model_code/test_key_value_cache.py",),
    ),
    "generation compiled for each length of the cache": Fault(
        FEATURES + "blocks/compilation_limit.py",
        {"self.in_training() and not _generates(args, kwargs)": "self.in_training()"},
        ("fixes/model_code/test_key_value_cache.py",),
    ),
    "hook that ends a graph is not told of": Fault(
        FEATURES + "blocks/feature.py",
        {"    traced = {id(submodule) for submodule in module.modules()} - uncompiled\n": "    traced = set()\n"},
        ("features/blocks/test_hooks_later.py",),
    ),
    "tiny second moments lost in 8 bits": Fault(
        FEATURES + "update/dynamic_map.py",
        {"LEAST_SCALE = torch.finfo(torch.float32).tiny": "LEAST_SCALE = 1e-12"},
        ("features/update/test_eight_bit_states.py",),
    ),
    # A checkpoint ---------------------------------------------------------------------------------------------------
    "load keeps gradients": Fault(
        FEATURES + "checkpoints/feature.py",
        {
            "        self._deepcompile.backward.begin_anew()\n        self._deepcompile.backward.drop_step()\n": (
                "        self._deepcompile.backward.begin_anew()\n"
            )
        },
        ("core/test_sent_gradients.py", "features/checkpoints/test_checkpoints.py"),
    ),
    "loaded master weights not sent": Fault(
        FEATURES + "update/masters.py",
        {"self.set(group, 0, master)\n        self.send_parameters()\n": "self.set(group, 0, master)\n"},
        ("features/update/test_remainders_in_engine.py",),
    ),
    "remainders kept when parameters change": Fault(
        FEATURES + "update/masters.py",
        {"            remainders.zero_()\n": "            pass\n"},
        ("features/update/test_remainders_in_engine.py",),
    ),
    "states not found after a load": Fault(
        FEATURES + "checkpoints/feature.py",
        {
            "        self._links.forget_places()\n        self._links.link_again()\n": (
                "        self._links.forget_places()\n"
            )
        },
        ("features/update/test_muon_in_engine.py", "features/checkpoints/test_checkpoints.py"),
    ),
    # Copy engines ---------------------------------------------------------------------------------------------------
    "slot staged again before all peers have pulled it": Fault(
        CPP + "schedule.cpp",
        {"if (number >= shape.slots) {": "if (number > shape.slots) {"},
        ("features/copy_engines/test_schedule.py",),
    ),
    "portion pulled before it is staged": Fault(
        CPP + "schedule.cpp",
        {"            wait.number = numbered;\n": "            wait.number = numbered - 1;\n"},
        ("features/copy_engines/test_schedule.py",),
    ),
    "row overwritten before it is staged": Fault(
        CPP + "schedule.cpp",
        {"            on(Step::pulling + stream, Step::follow).event = is_staged;\n": ""},
        ("features/copy_engines/test_schedule.py",),
    ),
    "words released for signals of before": Fault(
        CPP + "signals.cpp",
        {"    last_[static_cast<size_t>(channel)] = number;\n": ""},
        ("features/copy_engines/test_signals.py",),
    ),
    # What is mended of others, and what is estimated ----------------------------------------------------------------
    "rates of removed groups stay": Fault(
        "compile/fixes/base/schedulers.py",
        {"list(itertools.compress(entries, kept))": "list(entries)"},
        ("fixes/base/test_schedulers.py",),
    ),
    "latest names what other ranks still write": Fault(
        "compile/fixes/base/whole_checkpoints.py",
        {"        with every_rank_raises(purpose):\n            yield\n": "        yield\n"},
        ("fixes/base/test_whole_checkpoints.py",),
    ),
    "earlier checkpoint of the same tag is lost": Fault(
        "compile/fixes/base/checkpoint_files.py",
        {'os.path.join(folder, f"unfinished_{name}.{rank}.tmp")': "path"},
        ("fixes/base/test_whole_checkpoints.py",),
    ),
    "attention's backward without a workspace": Fault(
        "compile/tools/fits/liveness.py",
        {"    return 4 * (numel + numel // width) + queries": "    return 4 * numel + queries"},
        ("tools/fits/test_fits.py",),
    ),
    "memory of inputs on the host grows with each step": Fault(
        "compile/fixes/base/inputs_on_host.py",
        {"            manager._pool_cpu_buffer(tracked[-1], tracked[0])\n": "            pass\n"},
        ("fixes/base/test_inputs_on_host.py",),
    ),
    "backward reads a buffer that has changed": Fault(
        FEATURES + "activation_budget/feature.py",
        {"        copied.meta[_IS_KEPT] = True\n": ""},
        ("features/activation_budget/test_activation_budget.py",),
    ),
    "estimate without unreduced gradients": Fault(
        "compile/tools/fits/gradients.py",
        {'counters["bucket"] + counters["unreduced"] + bound()': 'counters["bucket"] + bound()'},
        ("tools/fits/test_fits.py",),
    ),
}
