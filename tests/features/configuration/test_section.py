# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The section ``compile`` as a whole, before an engine is made of it."""

import dataclasses
import logging
import re
import traceback
from typing import NamedTuple

import pytest
import torch.distributed as dist

from deepspeed.compile.config import CompileConfig

from support.beside import logged, warnings_logged
from support.ids import vary
from support.on_ranks import gathered, on_ranks
from support.options import SMALL, compiled_outcome, outcome, train_prepared
from support.training import BOUND, Case, build, make_engine, make_optimizer

# Options of the fork. Beside ``deepcompile: true`` the last ones would be refused.
OF_THE_FORK = {
    "store_param_remainders": True,
    "shard_parameters": "frozen",
    "keep_gathered": 1,
    "chunked_loss": True,
    "activation_memory_budget": 0,
    "monitor_memory": True,
    "regional_compilation": [],
    "overlap_param_gather": True,
    "optimizer_states": "9bit",
}


@pytest.mark.options("compile.deepcompile")
@on_ranks(2)
def test_without_deepcompile_it_trains_as_deepspeed():
    """``deepcompile: false`` would not be the one switch: other options would be refused, act, or be lost unsaid."""
    case = Case(model=SMALL, config={"compile": {"deepcompile": False, **OF_THE_FORK}}, deepcompile=False)
    module = build(case)
    with warnings_logged() as texts:
        engine = make_engine(module, case)
        error = train_prepared(case, module, engine)
    assert error < BOUND
    told = [text for text in texts if "compile." in text]
    assert len(told) == (dist.get_rank() == 0)
    for sentence in told:
        assert sorted(re.findall(r"compile\.(\w+)", sentence.partition(" have no effect")[0])) == sorted(OF_THE_FORK)


@pytest.mark.quick
def test_what_is_told_without_deepcompile(tmp_path):
    """An option that is off, or that works without DeepCompile, would be called one without effect."""
    picture = {"folder": str(tmp_path)}
    off = {"optimizer_states": None, "shard_parameters": None, "keep_gathered": None, "chunked_loss": "auto"}
    with logged(logging.WARNING) as texts:
        assert CompileConfig(memory_picture=picture, **off).memory_picture is not None
        CompileConfig(deepcompile="true", shard_parameters="frozen")
        assert not texts
        assert CompileConfig(deepcompile="false", shard_parameters="frozen").set_for_zero_1_and_2() == []
    (sentence,) = texts
    assert "compile.shard_parameters has no effect, because compile.deepcompile is not true" in sentence


@pytest.mark.quick
def test_belongs_to_zero_1_and_2():
    """An option of DeepCompile for ZeRO-1 and ZeRO-2 would be accepted, and do nothing, elsewhere."""
    options = dict.fromkeys(["regional_compilation", "overlap_param_gather", "chunked_loss", "monitor_memory"], True)
    for option, value in {**options, "activation_memory_budget": 0}.items():
        with pytest.raises(ValueError, match=f"compile.{option} goes with ZeRO-1 and ZeRO-2 only"):
            CompileConfig(deepcompile=True, passes=["autosp"], **{option: value})
        # What deepspeed.initialize() refuses in stage 3.
        assert CompileConfig(deepcompile=True, **{option: value}).set_for_zero_1_and_2() == [option]


class Refusal(NamedTuple):
    """What is said of a section, and the sections to which that leads."""

    section: dict
    says: str
    advised: list


BLOCKS, PICTURE_IN = {"regional_compilation": True}, {"memory_picture": {"folder": "x"}}
REFUSED = {
    "unknown": Refusal(
        {"shard_paramters": "all"},
        "compile.shard_paramters is not an option; the nearest name is shard_parameters, and all names are: ",
        [{"shard_parameters": "all"}],
    ),
    "unknown of another case": Refusal(
        {"Deepcompile": False},
        "compile.Deepcompile is not an option; the nearest name is deepcompile, and all names are: ",
        [{"deepcompile": False}],
    ),
    "unknown beginning": Refusal(
        {"shard": "all"},
        "compile.shard is not an option; the nearest name is shard_parameters, and all names are: ",
        [{"shard_parameters": "all"}],
    ),
    "nothing near": Refusal(
        {"enabled": True}, "compile.enabled is not an option; use one of these names: activation_memory_budget, ", [{}]
    ),
    "no blocks": Refusal(
        {"regional_compilation": []},
        "compile.regional_compilation names no classes; name some, or set it to ",
        [{"regional_compilation": value} for value in (["Block"], True, False)],
    ),
    "sharded without blocks": Refusal(
        {"shard_parameters": "all", "regional_compilation": False},
        "compile.shard_parameters works on blocks; set compile.regional_compilation to ",
        [{"shard_parameters": "all", **BLOCKS}, {"shard_parameters": "all"}, {"regional_compilation": False}],
    ),
    "overlapped without blocks": Refusal(
        {"overlap_param_gather": True, "regional_compilation": False},
        "compile.overlap_param_gather works on blocks; set compile.regional_compilation ",
        [{"overlap_param_gather": True, **BLOCKS}, {"overlap_param_gather": True}, {"regional_compilation": False}],
    ),
    "kept and not sharded": Refusal(
        {"keep_gathered": 2},
        "compile.keep_gathered says how many of the blocks that compile.shard_parameters ",
        [{"keep_gathered": 2, "shard_parameters": "all"}, {"keep_gathered": 2, "shard_parameters": "frozen"}, {}],
    ),
    "kept less than none": Refusal(
        {"shard_parameters": "all", "keep_gathered": -1},
        "compile.keep_gathered=-1 is no number of blocks; set it to one, which may be 0, or to ",
        [{"shard_parameters": "all", "keep_gathered": value} for value in (0, 2, "fit", None)],
    ),
    **{
        f"no part: {value}": Refusal(
            {"activation_memory_budget": value},
            f"compile.activation_memory_budget={value!r} is not a part of the activations; set it to a number from 0 ",
            [{"activation_memory_budget": value} for value in (0, 0.5, 1, None)],
        )
        # A flag and a text are no numbers.
        for value in (True, "0.5", -0.1, 50, float("nan"))
    },
    "of another pass": Refusal(
        {"chunked_loss": True, "passes": ["autosp"]},
        "compile.chunked_loss goes with ZeRO-1 and ZeRO-2 only, not with compile.passes=['autosp']; leave one of ",
        [{"chunked_loss": True}, {"passes": ["autosp"]}],
    ),
    "unknown pass": Refusal(
        {"passes": ["z2"]},
        "compile.passes holds 'z2', which does not fit; set it to a list of 'z1', 'z3', 'autosp' ",
        [{"passes": [name]} for name in ("z1", "z3", "autosp")],
    ),
    "picture of another name": Refusal(
        {"memory_picture": {"foldr": "x"}},
        "compile.memory_picture.foldr is not an option; the nearest name is folder, and all names are: folder, step",
        [PICTURE_IN],
    ),
    "picture of another step": Refusal(
        {"memory_picture": {"folder": "x", "stp": 2}},
        "compile.memory_picture.stp is not an option; the nearest name is step, and all names are: folder, step",
        [{"memory_picture": {"folder": "x", "step": 2}}],
    ),
    "picture without folder": Refusal(
        {"memory_picture": {}}, "compile.memory_picture.folder is missing; set it", [PICTURE_IN]
    ),
    "picture of another type": Refusal(
        {"memory_picture": True},
        "compile.memory_picture=True does not fit; set it to an object with folder and ste",
        [PICTURE_IN, {}],
    ),
    "folder of another type": Refusal(
        {"memory_picture": {"folder": 5}},
        "compile.memory_picture.folder=5 does not fit; set it to a text",
        [PICTURE_IN],
    ),
    "step of 0": Refusal(
        {"memory_picture": {"folder": "x", "step": 0}},
        "compile.memory_picture.step=0 does not fit; set it to 1 or more, or leave it out",
        [{"memory_picture": {"folder": "x", "step": 1}}, PICTURE_IN],
    ),
    "part of a number": Refusal(
        {"free_activation_threshold": 0.5},
        "compile.free_activation_threshold=0.5 does not fit; set it to a whole number, or leave it out",
        [{"free_activation_threshold": 1}, {}],
    ),
    "sharded in another case": Refusal(
        {"shard_parameters": "All"},
        "compile.shard_parameters='All' does not fit; set it to 'frozen' or 'all', or ",
        [{"shard_parameters": "frozen"}, {"shard_parameters": "all"}, {}],
    ),
    "number of chunks": Refusal(
        {"chunked_loss": 8},
        "compile.chunked_loss=8 does not fit; set it to true or false, or leave it out",
        [{"chunked_loss": True}, {"chunked_loss": False}, {}],
    ),
    "number of blocks": Refusal(
        {"regional_compilation": 5},
        "compile.regional_compilation=5 does not fit; set it to true or false or a list, or leave it out",
        [{"regional_compilation": value} for value in (True, False, ["Block"])],
    ),
    "blocks by number": Refusal(
        {"regional_compilation": [5]},
        "compile.regional_compilation=[5] does not fit; set it to true or false or a list of texts, or leave it",
        [{"regional_compilation": value} for value in (True, False, ["Block"])],
    ),
}


@pytest.mark.options("compile.keep_gathered")
@pytest.mark.follows(
    "is no number of blocks; set it to one, which may be 0",
    "works on blocks; set compile.regional_compilation to true",
    "that compile.shard_parameters shards stay whole; set that too",
    "{} is not an option; {}: {}",
    "use one of these names",
    "{} is missing; set it",
    "is not a part of the activations; set it to a number from 0 to 1",
    "names no classes; name some, or set it to true or false",
    "not with compile.passes={}; leave one of them out",
    "{}{} does not fit; set it to {}{}",
)
@pytest.mark.quick
@vary("name", REFUSED)
def test_a_section_that_is_refused_in_one_sentence(name):
    """Pydantic's list of errors would not say which names there are, and come as a chain of tracebacks.

    Or its advice would be refused in turn.
    """
    section, says, advised = REFUSED[name]
    with pytest.raises(ValueError) as raised:
        CompileConfig(**{"deepcompile": True, **section})
    sentence = str(raised.value)
    assert sentence.startswith(says) and "\n" not in sentence
    assert type(raised.value) is ValueError and raised.value.__cause__ is None and raised.value.__context__ is None
    # What the sentence advises is not refused in turn.
    for other in advised:
        assert CompileConfig(**{"deepcompile": True, **other}).model_dump(include=set(other)).keys() == other.keys()


@pytest.mark.follows('is not a section; set it to one such as {"deepcompile": true}')
@pytest.mark.quick
@vary("section", [True, None, "on", []])
def test_what_is_no_section(section):
    """The error would be one of Python's about mappings, and name no configuration."""
    with pytest.raises(ValueError) as raised:
        CompileConfig.of(section)
    assert str(raised.value) == f'compile={section!r} is not a section; set it to one such as {{"deepcompile": true}}'
    assert CompileConfig.of({"deepcompile": True}).deepcompile


@pytest.mark.follows("where it has no effect; move it to compile")
@pytest.mark.quick
@vary("section", ["", "zero_optimization"])
@vary("option", ["deepcompile", "shard_parameters"])
def test_an_option_outside_of_its_section(section, option):
    """DeepSpeed would ignore it, or say that extra inputs are not permitted."""
    config = {section: {option: True}} if section else {option: True}
    where = f"in {section}" if section else "at the top level"
    says = f"{option} stands {where} of the configuration, where it has no effect; move it to compile"
    with pytest.raises(ValueError, match=says):
        CompileConfig.refuse_elsewhere(config)
    CompileConfig.refuse_elsewhere({"compile": {option: True}, "zero_optimization": True})


@on_ranks(2)
def test_a_refusal_is_one_error_on_every_rank():
    """The sentence would come in the first step, stand below frames that say nothing, or differ between ranks."""
    configs = [
        {"compile": {"shard_paramters": True}},
        {"compile": "on"},
        {"compile": {"activation_memory_budget": 50}},
        {"compile": {"regional_compilation": ["Blok"]}},
        {"compile": {"regional_compilation": True}},
        {"compile": {"overlap_param_gather": True}},
        {"compile": {"shard_parameters": "frozen"}},
        {"compile": {"optimizer_states": "8bit"}},
        {"compile": {"store_param_remainders": True}},
        {"compile": {"monitor_memory": True}, "zero_optimization": {"stage": 3}},
        {"shard_parameters": "all"},
        {"zero_optimization": {"deepcompile": True}},
        {"hybrid_engine": {"enabled": True}},
    ]
    seen = []
    for config in configs:
        section = config.get("compile", {})
        config = {**config, "compile": {"deepcompile": True, **section} if isinstance(section, dict) else section}
        with pytest.raises(Exception) as raised:
            make_engine(build(Case(model=SMALL)), Case(deepcompile=False, config=config)).destroy()
        seen.append((type(raised.value), str(raised.value), "".join(traceback.format_exception(raised.value))))
        del raised
    assert gathered([text for _, text, _ in seen]) == [[text for _, text, _ in seen]] * 2
    for kind, text, printed in seen:
        ours = re.findall(r"deepspeed/compile/[^\n]+, line", printed)
        assert kind is ValueError and "\n" not in text and len(ours) <= 2, printed
        assert printed.count("Traceback (most recent") == 1, printed


BF16 = {"bf16": {"enabled": True}}
OFFLOADED = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "zero_force_ds_cpu_optimizer": False}
ELASTIC = {"zero_optimization": {"elastic_checkpoint": True}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
STATES, REMAINDERS = {"optimizer_states": "8bit"}, {"store_param_remainders": True}
PICTURE = {"memory_picture": {"folder": "nowhere"}}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.1}}}
# (section `compile`, other sections, what is said). With an optimizer in the configuration, nobody gives another.
KNOWN_AT_THE_BEGINNING = [
    (
        {**STATES},
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
        "is for Adam and AdamW of torch and DeepSpeed",
    ),
    (
        {**STATES},
        {"optimizer": {"type": "Adam", "params": {"amsgrad": True}}},
        "no form for the third state of amsgrad",
    ),
    ({**STATES}, {**BF16, **OFFLOADED}, "saves memory of the device"),
    ({**STATES}, ELASTIC, "has no form in elastic checkpoints"),
    ({**STATES}, AUTOCAST, "leaves out the optimizer's own step()"),
    ({**STATES}, {"bf16": {**BF16["bf16"], "bf16_master_weights_and_grads": True}}, "needs master weights in fp32"),
    ({**REMAINDERS}, {"fp16": {"enabled": True}}, "needs parameters in bf16, and there are some in torch.float16"),
    ({**REMAINDERS}, {}, "needs parameters in bf16, and there are some in torch.float32"),
    ({**REMAINDERS}, {**BF16, **AUTOCAST}, "leaves out the optimizer's own step()"),
    ({**REMAINDERS}, {**BF16, **OFFLOADED}, "saves memory of the device"),
    ({}, {**MUON, **OFFLOADED}, "zero_optimization.offload_optimizer is not supported with Muon"),
    ({}, {**MUON, **ELASTIC}, "zero_optimization.elastic_checkpoint cuts Muon's momentum"),
    ({}, {**MUON, **AUTOCAST}, "torch_autocast in fp16 divides Muon's updates"),
    (
        {"shard_parameters": "all", "overlap_param_gather": True, "regional_compilation": ["Linear"]},
        BF16,
        "compile.overlap_param_gather keeps all parameters on each rank",
    ),
    ({**STATES}, {**BF16, "zero_optimization": {"stage": 3}}, "compile.optimizer_states goes with ZeRO-1 and ZeRO-2"),
    ({**STATES}, {**BF16, "zero_optimization": {"stage": 0}}, "compile.optimizer_states goes with ZeRO-1 and ZeRO-2"),
    ({**PICTURE}, {**BF16, "zero_optimization": {"stage": 0}}, "compile.memory_picture records engines of ZeRO stage"),
    (
        {**PICTURE, "deepcompile": False},
        {**BF16, "data_types": {"grad_accum_dtype": "fp32"}},
        "compile.memory_picture records DeepSpeedZeroOptimizer only",
    ),
    ({}, {**BF16, "tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size=2 is only supported with the"),
]


def state_of(module, optimizer):
    tensors = [*module.parameters(), *(parameter for group in optimizer.param_groups for parameter in group["params"])]
    return [(id(tensor), tensor.data_ptr(), tensor.dtype, tensor.shape) for tensor in tensors], len(optimizer.state)


@on_ranks(2)
def test_what_the_configuration_shows_is_refused_before_anything_is_changed():
    """A refused model would have been cast and moved, and its optimizer be given the partitions of no engine."""
    seen, case = [], Case(model=SMALL, adam=True, deepcompile=False)
    for section, config, _ in KNOWN_AT_THE_BEGINNING:
        module = build(case)
        own = {"compile": {"deepcompile": True, **section}}
        optimizer = make_optimizer(module, case)
        arguments = {"model_parameters": module.parameters()} if "optimizer" in config else {"optimizer": optimizer}
        before, devices = state_of(module, optimizer), []
        # All that has a device: a module that is where it belongs would not show that it is moved.
        module._apply = devices.append
        refused = dataclasses.replace(case, dtype="fp16" if "fp16" in config else "fp32", config={**config, **own})
        said = outcome(make_engine, module, refused, **arguments)
        seen.append((said or "nothing", not devices and state_of(module, optimizer) == before))
    assert gathered(seen) == [seen] * 2
    for (_, _, says), (said, is_unchanged) in zip(KNOWN_AT_THE_BEGINNING, seen, strict=True):
        assert said.startswith("ValueError: ") and says in said
        assert is_unchanged, said


# What the sentences advise, each with a part of the sentence.
ADVISED_AT_THE_BEGINNING = [
    ("keeps no ", {**STATES}, BF16),
    ("keeps no ", {}, {**BF16, **OFFLOADED}),
    ("needs master weights in fp32; leave it out", {}, BF16),
    ("needs master weights in fp32; leave it out", {**STATES}, BF16),
    ("set bf16.enabled", {**REMAINDERS}, BF16),
    ("set bf16.enabled", {}, {"fp16": {"enabled": True}}),
    ("leave grad_accum_dtype out", {**PICTURE, "deepcompile": False}, BF16),
    ("or set zero_optimization.stage to 1 or 2", {"monitor_memory": True}, {"zero_optimization": {"stage": 2}}),
]


@pytest.mark.follows(
    "goes with ZeRO-1 and ZeRO-2 only; leave it out, or set zero_optimization.stage to 1 or 2",
    "keeps no {}; leave one of them out",
    "needs master weights in fp32; leave it out",
    "there are some in {}; set bf16.enabled",
    "this engine will have BF16_Optimizer; leave {} out",
)
@on_ranks(1)
def test_what_is_advised_at_the_beginning(tmp_path):
    """Who changes the configuration as a sentence says would be refused again, by what the optimizer shows."""
    raised = []
    for _, section, config in ADVISED_AT_THE_BEGINNING:
        if "memory_picture" in section:
            section = {**section, "memory_picture": {"folder": str(tmp_path)}}
        dtype = "fp16" if "fp16" in config else "fp32"
        config = {**config, "compile": {"deepcompile": True, **section}}
        case = Case(model=SMALL, adam=True, deepcompile=False, dtype=dtype, config=config)
        raised.append(outcome(lambda case=case: make_engine(build(case), case).destroy()))
    assert raised == [None] * len(ADVISED_AT_THE_BEGINNING)


@pytest.mark.follows("leave it out, or set torch_autocast.dtype to bfloat16")
@on_ranks(2)
def test_steps_that_each_rank_would_skip_by_itself():
    """A rank whose part of the gradients overflows would skip its step alone, and scale other losses from then on."""
    bfloat16 = {"torch_autocast": {**AUTOCAST["torch_autocast"], "dtype": "bfloat16"}}
    without_norm = {"zero_optimization": {"compute_grad_norm": False}}
    for config, refused in (
        ({**AUTOCAST, **without_norm}, True),
        (AUTOCAST, False),
        ({**bfloat16, **without_norm}, False),
    ):
        said = compiled_outcome(make_engine, build(Case()), Case(config=config))
        assert ("lets each rank decide by itself whether" in (said or "")) == refused, said
