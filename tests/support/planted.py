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
        what: what the broken code does.
        file: the broken file, from the package's folder on.
        changes: old text, which occurs once in the file -> new text.
        tests: files of tests, of which one should fail; the cheapest comes first.
        hangs: whether a test that does not end has seen the fault.
    """

    what: str
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
        "the bucket that is being filled when a backward ends is not sent",
        CPP + "reducer.cpp",
        {
            "    buckets_.launch();\n    buckets_.drain();\n    if (reduces) {": (
                "    buckets_.drain();\n    if (reduces) {"
            )
        },
        ("features/blocks/test_blocks_training.py", "core/test_ranks_that_differ.py"),
    ),
    "bucket in flight dropped": Fault(
        "a bucket is dropped when the next one is sent, before its gradients are bound",
        CPP + "bucket.cpp",
        {"its memory is free for the next one.\n    drain();\n": "its memory is free for the next one.\n"},
        ("core/test_parity.py",),
    ),
    "missing wait": Fault(
        "a bucket is read before its collectives have ended",
        CPP + "bucket.cpp",
        {"for (auto& work : works_) { work->wait(); }": ""},
        ("core/test_parity.py", "core/test_lifetime.py"),
    ),
    "memory sent that is used again": Fault(
        "a large gradient is held without a copy, although the graph has not donated its memory",
        CPP + "bucket.cpp",
        {"if (large && donated && numel": "if (large && numel"},
        ("core/test_sent_gradients.py", "core/test_lifetime.py"),
    ),
    "wrong elements for an owner": Fault(
        "of gradients that are sent together, each parameter gets the shard of the first one",
        CPP + "bucket.cpp",
        {"shard.narrow(0, offset, entry.shards.own)": "shard.narrow(0, 0, entry.shards.own)"},
        ("core/test_parity.py",),
    ),
    "not divided by the number of ranks": Fault(
        "gradients that gloo adds up are not averaged",
        CPP + "carrier.cpp",
        {"if (!average && divisor != 1) {": "if (average) {"},
        ("core/test_parity.py",),
    ),
    "accumulation overwrites": Fault(
        "the gradient of a later micro-batch replaces the sum of the earlier ones",
        CPP + "bucket.cpp",
        {"bound->second.add_(arrived);": "bound->second.copy_(arrived);"},
        ("core/test_parity.py",),
    ),
    "second use of a weight replaces the first": Fault(
        "of two gradients of one parameter in one bucket, the later replaces the earlier",
        CPP + "bucket.cpp",
        {"joinable->second.add_(gradient);": "joinable->second.copy_(gradient);"},
        ("core/test_messages.py", "core/test_parity.py"),
    ),
    "old memory sent for a skipped branch": Fault(
        "for a parameter without a gradient this rank sends whatever lies in new memory",
        CPP + "order.cpp",
        {"record, at::zeros(parameter": "record, at::empty(parameter"},
        ("core/test_ranks_that_differ.py",),
    ),
    "donated gradient that is read again": Fault(
        "a graph donates a gradient that other nodes read after its reduction",
        CORE + "graph/reductions.py",
        {'if gradient.op == "call_function" and len(gradient.users) == 1:': 'if gradient.op == "call_function":'},
        ("core/test_sent_gradients.py", "core/test_lifetime.py"),
    ),
    "buckets released by the wrong graph": Fault(
        "the graph that reduces first ends the reductions, and not the graph that reduces last",
        CORE + "graph/backend.py",
        {"graph_id == 0 and": "graph_id == len(self._graph_ids) - 1 and"},
        ("core/test_graphs.py",),
    ),
    "two engines with one number": Fault(
        "a process gives each of its engines the same number, so that graphs find the later engine's reducer",
        CORE + "engine/set_up.py",
        {"    _last_identity = int(identity)\n    return _last_identity": "    return int(identity)"},
        ("core/test_engines.py",),
    ),
    "another dtype is sent": Fault(
        "communication_data_type has no effect",
        CORE + "engine/set_up.py",
        {"optimizer.get_param_comm_dtype(parameter)\n": "parameter.dtype\n"},
        ("core/test_sent_gradients.py", "core/test_options_number_formats.py"),
    ),
    "buckets held on one rank": Fault(
        "each rank holds buckets on a CPU by the engines that it has not collected",
        CORE + "engine/set_up.py",
        {"torch.distributed.all_reduce(asks, torch.distributed.ReduceOp.MAX, group)": "pass"},
        ("features/shard_parameters/test_shard_order.py",),
        hangs=True,
    ),
    "reduce_bucket_size ignored": Fault(
        "buckets have a size of their own",
        CORE + "engine/set_up.py",
        {"bucket_numel=int(engine.zero_reduce_bucket_size()),": "bucket_numel=SEND_NUMEL,"},
        ("core/test_buckets.py",),
    ),
    "overlap_comm ignored": Fault(
        "reductions run while the backward goes on, although overlap_comm is false",
        CORE + "engine/set_up.py",
        {"overlap=overlaps_reduction(request),": "overlap=True,"},
        ("core/test_options_honoured.py",),
    ),
    "no warning of an option without effect": Fault(
        "gradient_predivide_factor is ignored without a word",
        FEATURES + "configuration/ignored.py",
        {"!= 1.0 and not config.prescale_gradients:": "!= 1.0 and config.prescale_gradients:"},
        ("features/configuration/test_options_warned.py",),
    ),
    # Graphs ---------------------------------------------------------------------------------------------------------
    "stale guard": Fault(
        "compiled code does not notice that a module got a hook",
        FEATURES + "blocks/guards.py",
        {'    "skip_nnmodule_hook_guards",\n': ""},
        ("features/blocks/test_hooks_later.py",),
    ),
    "hook of a parameter ignored": Fault(
        "a graph reduces a gradient that a hook of the parameter should see",
        CPP + "reducer.cpp",
        {"if (route == Route::graph && record.has_hooks()) {": "if (route == Route::graph && index > index) {"},
        ("core/test_hooks_of_parameters.py",),
    ),
    "hook that sees one micro-batch": Fault(
        "a hook of the sum in `parameter.grad` sees the last micro-batch alone",
        CPP + "reducer.cpp",
        {"if (!record.has_hooks_of_sum()) { record.unreduced": "{ record.unreduced"},
        ("core/test_hooks_of_parameters.py",),
    ),
    "code of another version": Fault(
        "torch's caches return code that was generated from other source of the fork",
        CORE + "graph/keys.py",
        {"file.read_bytes() for file": "file.name.encode() for file"},
        ("core/test_cache_key.py", "core/test_graphs.py"),
    ),
    "random numbers drawn anew": Fault(
        "a backward draws a dropout's mask again where it computes activations again",
        FEATURES + "activation_budget/split.py",
        {"return torch.Tag.nondeterministic_seeded in target.tags": "return False"},
        ("core/test_randomness.py",),
    ),
    "chunk left out of the loss": Fault(
        "the last rows of the vocabulary, if they are no whole chunk, get no gradient",
        FEATURES + "loss/chunked_loss.py",
        {"for first in range(0, vocabulary, rows)": "for first in range(0, vocabulary - rows + 1, rows)"},
        ("features/loss/test_chunked_loss_alone.py",),
    ),
    "ignored labels counted": Fault(
        "tokens with the label ignore_index get a gradient, and count for the mean's",
        FEATURES + "loss/chunked_loss.py",
        {"weights = counts.float()": "weights = torch.ones_like(logsumexp)"},
        ("features/loss/test_chunked_loss_alone.py",),
    ),
    # Backwards make up a step ---------------------------------------------------------------------------------------
    "state left by a backward that raised": Fault(
        "after a backward that raised, DeepSpeed takes the next one for a part of it",
        CORE + "gradient/backward.py",
        {"        self._optimizer()._backward_active_depth = 0\n": ""},
        ("core/test_backwards.py",),
    ),
    "micro-batch counted although it raised": Fault(
        "after a backward that raised, the next micro-batch is not the first of a step",
        CORE + "gradient/backward.py",
        {
            "            self._lost += step.backwards\n        else:\n            self.begin_anew()\n": (
                "            self._lost += step.backwards\n"
            )
        },
        ("core/test_faults.py", "core/test_backwards.py"),
    ),
    "zero_grad() keeps what is not reduced": Fault(
        "zero_grad() between micro-batches leaves sums that have another dtype than the parameters",
        CORE + "gradient/backward.py",
        {"        self._reducer.release(None)\n": ""},
        ("core/test_sent_gradients.py", "core/test_gradients_between.py"),
    ),
    "gradients of the caller ignored": Fault(
        "the step does not read what the caller has assigned to averaged_gradients",
        CORE + "step/step.py",
        {"    deepcompile.backward.read_entries()\n": ""},
        ("core/test_averaged_gradients.py",),
    ),
    "backward that raised on one rank": Fault(
        "a rank on which a backward raised does not tell the others",
        CPP + "reducer.cpp",
        {"    agreement_.add(Marker::backward_abandoned);\n": ""},
        ("core/test_faults_on_one_rank.py",),
        hangs=True,
    ),
    "ranks send without comparing": Fault(
        "ranks do not compare what they are about to send, so they wait for messages that nobody sends",
        CPP + "bucket.cpp",
        {"        agreement_.compare(groups_, in_flight_->purpose());\n": ""},
        ("core/test_faults_on_one_rank.py", "core/test_ranks_that_differ.py"),
        hangs=True,
    ),
    "error without its cause": Fault(
        "the error of a collective does not say that another rank is the cause",
        CORE + "collectives.py",
        {"DistBackendError(reducer_module().could_not(purpose, str(error)))": "DistBackendError(str(error))"},
        ("core/test_faults_on_one_rank.py",),
    ),
    # A step ---------------------------------------------------------------------------------------------------------
    "overflow not checked": Fault(
        "check_grad_overflow has no effect without a norm and in bf16",
        CORE + "step/norm.py",
        {"if not optimizer.check_grad_overflow and (norm": "if (norm"},
        ("core/test_dtypes.py", "core/test_faults.py"),
    ),
    "clipped with the norm of one rank": Fault(
        "each rank clips with the norm of its own partition",
        CORE + "step/norm.py",
        {
            "dist.all_reduce(squares, op=dist.ReduceOp.SUM, group=optimizer.dp_process_group)": "pass",
        },
        ("core/test_averaged_gradients.py", "core/test_dtypes.py"),
    ),
    "range left out of the update": Fault(
        "of the ranges that are stepped after the parameters that the next forward needs first, only one is stepped",
        CORE + "step/ranges.py",
        {"self._run(self._spans)": "self._run(self._spans[:1])"},
        ("features/update/test_one_pass_adam_in_engine.py", "features/overlap_gather/test_parameter_gather.py"),
    ),
    "gradients held while they are read": Fault(
        "a gradient is kept until the whole partition is stepped",
        CORE + "step/partition_gradient.py",
        {"        del self._rest[index : index + behind]\n": ""},
        ("features/update/test_ranges.py",),
    ),
    "count of steps not kept": Fault(
        "Adam corrects the bias of each step in one pass as if it were the first",
        FEATURES + "update/adam.py",
        {"step.fill_(self._count)": "pass"},
        ("features/update/test_one_pass_adam.py",),
    ),
    "settings of the first step": Fault(
        "Adam in one pass goes on with the learning rate that it was compiled with",
        FEATURES + "update/adam_operators.py",
        {
            "    s = Scalars(*settings.scalars.unbind())\n": (
                "    s = Scalars(*settings.scalars.unbind())._replace(rate=0.1)\n"
            )
        },
        ("features/update/test_one_pass_adam.py",),
    ),
    "scale of an 8-bit block without its sign": Fault(
        "the scale of a block is its largest value, and not its largest magnitude",
        FEATURES + "update/dynamic_map.py",
        {"scales = blocks.abs().amax(-1)": "scales = blocks.amax(-1)"},
        ("features/update/test_eight_bit_states.py",),
    ),
    "8-bit blocks that depend on the number of ranks": Fault(
        "blocks of a parameter begin anywhere in it, as its shards have any number of elements",
        CORE + "layout.py",
        {"SHARD_MULTIPLE = 256": "SHARD_MULTIPLE = 16"},
        ("features/update/test_eight_bit_in_engine.py",),
    ),
    "ties of remainders to even": Fault(
        "a master weight half-way between two bf16 numbers has the even one, whose remainder does not fit in 16 bits",
        FEATURES + "update/remainders.py",
        {"(bits + 0x8000) >> 16": "(bits + 0x7FFF + ((bits >> 16) & 1)) >> 16"},
        ("features/update/test_remainders.py",),
    ),
    "momentum of a step that overflows": Fault(
        "Muon's updates are computed before it is known whether gradients overflowed",
        CORE + "step/step.py",
        {
            "    groups = begin() if transform is None else None\n": (
                "    groups = begin() if transform is None else transform.run(optimizer)\n"
            ),
            "                transform.run(optimizer)\n": "                pass\n",
        },
        ("features/muon/test_muon.py",),
    ),
    "half a step forgotten": Fault(
        "an engine goes on after a step that an exception ended while it changed parameters",
        FEATURES + "checkpoints/interrupted.py",
        {'            self._error = f"{type(error).__name__}: {error}"\n': ""},
        ("features/checkpoints/test_interrupted.py",),
    ),
    # A parameter ----------------------------------------------------------------------------------------------------
    "offloaded parameters at the wrong place": Fault(
        "the new parameters of each range are sent to where those of the first range lie",
        FEATURES + "offload_optimizer/host_memory.py",
        {"own_parameters(optimizer, group).write(first, source)": "own_parameters(optimizer, group).write(0, source)"},
        ("features/offload_optimizer/test_offload.py",),
    ),
    "forward does not wait": Fault(
        "a block is called before its parameters have arrived, so that its guards fail",
        FEATURES + "overlap_gather/feature.py",
        {"gather.wait(sorted(units))\n": "pass\n"},
        ("features/overlap_gather/test_parameter_gather.py",),
    ),
    "read does not wait": Fault(
        "a parameter on its way keeps its own class, so that who reads it gets the value from before the step",
        FEATURES + "overlap_gather/arriving.py",
        {"parameter.__class__ = _on_its_way(type(parameter))": "type(parameter)"},
        ("features/overlap_gather/test_readers.py",),
    ),
    "weights swapped by the caller": Fault(
        "a step does not notice that some parameters have other memory than the optimizer has given them",
        CORE + "layout.py",
        {"return all([place.parameter.data_ptr()": "return any([place.parameter.data_ptr()"},
        ("core/test_backwards.py",),
    ),
    "another block called": Fault(
        "ranks that call different blocks gather the same ones, and do not notice",
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
        "a block that is called twice in a forward finds its frozen parameters given back",
        FEATURES + "shard_parameters/gather_order.py",
        {
            "        self._whole.begin(unit, unit in self._kept, self.at)\n": (
                "        if place >= self._begun:\n            self._whole.begin(unit, unit in self._kept, self.at)\n"
            )
        },
        ("features/shard_parameters/test_shard_frozen.py",),
    ),
    "frozen parameters read before they came": Fault(
        "a backward does not gather the frozen parameters that it reads",
        FEATURES + "shard_parameters/saved_tensors.py",
        {"        self.unit.gather_for_backward(self.schedule)\n": ""},
        ("features/shard_parameters/test_shard_frozen.py",),
    ),
    "change by data": Fault(
        "what a forward changes in frozen parameters by .data is lost",
        FEATURES + "shard_parameters/passes.py",
        {"            unit.is_used = True\n            if": "            if"},
        ("features/shard_parameters/test_shard_frozen.py",),
    ),
    # What is compiled -----------------------------------------------------------------------------------------------
    "checkpoint taken for generation": Fault(
        "the first run of a reentrant checkpoint around a model that keeps a cache runs uncompiled",
        FEATURES + "blocks/compilation_limit.py",
        {"self.trains(args, kwargs) if around is None else around or": "self.trains(args, kwargs) or"},
        ("fixes/model_code/test_key_value_cache.py",),
    ),
    "generation compiled": Fault(
        "generation in training mode is compiled for each length of the cache",
        FEATURES + "blocks/compilation_limit.py",
        {"self.in_training() and not _generates(args, kwargs)": "self.in_training()"},
        ("fixes/model_code/test_key_value_cache.py",),
    ),
    "hook that ends a graph": Fault(
        "nobody says that a full backward hook of a head ends the graph around the blocks' caller",
        FEATURES + "blocks/feature.py",
        {"    traced = {id(submodule) for submodule in module.modules()} - uncompiled\n": "    traced = set()\n"},
        ("features/blocks/test_hooks_later.py",),
    ),
    "tiny second moments": Fault(
        "second moments of tiny gradients are lost in 8 bits",
        FEATURES + "update/dynamic_map.py",
        {"LEAST_SCALE = torch.finfo(torch.float32).tiny": "LEAST_SCALE = 1e-12"},
        ("features/update/test_eight_bit_states.py",),
    ),
    # A checkpoint ---------------------------------------------------------------------------------------------------
    "load keeps gradients": Fault(
        "gradients of the micro-batches before a checkpoint was loaded are in the next step",
        FEATURES + "checkpoints/feature.py",
        {
            "        self._deepcompile.backward.begin_anew()\n        self._deepcompile.backward.drop_step()\n": (
                "        self._deepcompile.backward.begin_anew()\n"
            )
        },
        ("core/test_sent_gradients.py", "features/checkpoints/test_checkpoints.py"),
    ),
    "loaded master weights not sent": Fault(
        "with remainders, a rank rounds the master weights that it has loaded, and does not send the parameters",
        FEATURES + "update/masters.py",
        {"self.set(group, 0, master)\n        self.send_parameters()\n": "self.set(group, 0, master)\n"},
        ("features/update/test_remainders_in_engine.py",),
    ),
    "remainders of other parameters": Fault(
        "with remainders, refresh_fp32_params() and a load of parameters alone keep the remainders that there were",
        FEATURES + "update/masters.py",
        {"            remainders.zero_()\n": "            pass\n"},
        ("features/update/test_remainders_in_engine.py",),
    ),
    "load keeps old moments": Fault(
        "after a load, safe_get_full_optimizer_state() finds no states",
        FEATURES + "checkpoints/feature.py",
        {
            "        self._links.forget_places()\n        self._links.link_again(self)\n": (
                "        self._links.forget_places()\n"
            )
        },
        ("features/muon/test_muon_in_engine.py", "features/checkpoints/test_checkpoints.py"),
    ),
}
