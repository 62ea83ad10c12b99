# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Accelerate, Trainer, Lightning and TRL train under DeepCompile with nothing but its line in the configuration.

Each door is a function ``door(case, resumes) -> Outcome``, which runs on every rank. The program behind a door has
nothing about DeepCompile but its line in the configuration. It trains, evaluates and saves a checkpoint half-way. With
``resumes`` the program begins in a new engine, from that checkpoint.
"""

import contextlib
import dataclasses
import itertools
import os
import pathlib
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed.compile.features.shard_parameters import from_host, unsharded_parameters
from deepspeed.compile.zero_1_and_2 import gradient_counters

from support.front_doors import (
    EOS,
    FIRST_TOKEN,
    HALF,
    LAST_TOKEN,
    LEARNING_RATE,
    LENGTH,
    PAD,
    ROWS,
    SEED,
    STEPS,
    VOCABULARY,
    Case,
    Outcome,
    Record,
    ds_config,
    evaluation_rows,
    make_model,
    make_quantized_model,
    make_tokenizer,
    on_cpu,
    process_as_it_was,
    training_rows,
    warnings_told,
)
from support.graph_cache import shapes_no_graph
from support.ids import vary
from support.on_ranks import on_ranks
from support.parameter_gather import one_rank_late
from support.training import BOUND, compile_backend, device, relative_error

# Of a program that generates.
TOGETHER = "the texts of all ranks end together, so no rank need wait"

# Accelerate


def accelerate_loop(case, resumes, **dynamo):
    """A loop with an ``Accelerator``. Further arguments are those of the ``Accelerator`` about torch.compile."""
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
    from torch.utils.data import DataLoader

    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ds_config(case)),
        # Without a backend Accelerate counts one process on CPU, however many there are.
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if on_cpu() else [],
        **dynamo,
    )
    model = make_model()
    engine, optimizer, training, evaluation = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE),
        DataLoader(training_rows(), batch_size=ROWS),
        DataLoader(evaluation_rows(), batch_size=ROWS),
    )

    def evaluate():
        engine.eval()
        with torch.no_grad():
            losses = [accelerator.reduce(engine(**batch).loss, "mean").item() for batch in evaluation]
        engine.train()
        return sum(losses) / len(losses)

    first, losses, evaluations = 0, [], []
    if resumes:
        accelerator.load_state(case.folder)
        training, first = accelerator.skip_first_batches(training, HALF), HALF
    engine.train()
    for step, batch in enumerate(training, start=first + 1):
        loss = engine(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if step % HALF == 0:
            evaluations.append(evaluate())
        if step == HALF:
            accelerator.save_state(case.folder)
    if case.exports:
        accelerator.unwrap_model(engine).save_pretrained(
            os.path.join(case.folder, "pretrained"),
            is_main_process=accelerator.is_main_process,
            save_function=accelerator.save,
            state_dict=accelerator.get_state_dict(engine),
        )
        accelerator.save_model(engine, os.path.join(case.folder, "saved"))
    return Outcome(losses, evaluations, engine)


def accelerate_with_dynamo(case, resumes):
    return accelerate_loop(case, resumes, dynamo_backend=case.backend)


def accelerate_with_blocks(case, resumes):
    from accelerate.utils import TorchDynamoPlugin

    plugin = TorchDynamoPlugin(backend=case.backend, use_regional_compilation=True)
    return accelerate_loop(case, resumes, dynamo_plugin=plugin)


# Trainer of transformers, and those of TRL, which are made of it


def trainer_arguments(case, **others):
    """Returns what every trainer is told, as arguments of its configuration."""
    if on_cpu():
        from accelerate import PartialState

        # Without a backend Accelerate counts one process on CPU, and all ranks would write the same checkpoint.
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
        others["accelerator_config"] = {"use_configured_state": True}
    return {
        "output_dir": case.folder,
        "deepspeed": ds_config(case),
        "per_device_train_batch_size": ROWS,
        "per_device_eval_batch_size": ROWS,
        "learning_rate": LEARNING_RATE,
        "max_steps": STEPS,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": HALF,
        "save_steps": HALF,
        "report_to": "none",
        "disable_tqdm": True,
        "load_best_model_at_end": case.exports,
        **others,
    }


def train(trainer, case, resumes, others=(), evaluated="eval_loss"):
    """Trains. ``evaluated``: what is taken of each evaluation."""
    checkpoint = os.path.join(case.folder, f"checkpoint-{HALF}")
    trainer.train(resume_from_checkpoint=checkpoint if resumes else None)
    # The history of a trainer that resumes begins with that of the checkpoint.
    history = [entry for entry in trainer.state.log_history if entry["step"] > (HALF if resumes else 0)]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    evaluations = [entry[evaluated] for entry in history if evaluated in entry]
    if case.exports:
        evaluations.append(trainer.evaluate()[evaluated])
        trainer.save_model(os.path.join(case.folder, "exported"))
    return Outcome(losses, evaluations, trainer.model_wrapped, list(others))


def transformers_trainer(case, resumes, model=None, **others):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(**trainer_arguments(case, **others))
    trainer = Trainer(model or make_model(), arguments, train_dataset=training_rows(), eval_dataset=evaluation_rows())
    return train(trainer, case, resumes)


def transformers_trainer_with_torch_compile(case, resumes):
    return transformers_trainer(case, resumes, torch_compile=True, torch_compile_backend=case.backend)


def transformers_trainer_with_liger(case, resumes):
    return transformers_trainer(case, resumes, use_liger_kernel=True)


def transformers_trainer_from_meta(case, resumes):
    """The same where, with sharded parameters, only the first rank makes the model's values."""
    is_on_meta = case.shards and dist.get_rank() > 0
    with torch.device("meta") if is_on_meta else contextlib.nullcontext():
        model = make_model()
    assert {parameter.is_meta for parameter in model.parameters()} == {bool(is_on_meta)}
    # A CPU counts as a device where no parameter is yet, so that the first rank's are cut on the host.
    is_elsewhere = mock.patch.object(from_host, "is_elsewhere", shapes_no_graph(lambda *_: True))
    with is_elsewhere if case.shards and on_cpu() else contextlib.nullcontext():
        return transformers_trainer(case, resumes, model)


def adapters():
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=64, target_modules="all-linear")


def transformers_trainer_with_lora(case, resumes):
    from peft import get_peft_model

    return transformers_trainer(case, resumes, get_peft_model(make_model(), adapters()))


def seq2seq(case, resumes):
    """``Seq2SeqTrainer``, which generates where it evaluates. Texts of several ranks have different lengths."""
    from transformers import GenerationConfig, Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config
    from transformers import T5ForConditionalGeneration as T5

    torch.manual_seed(SEED)
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "initializer_factor": 4.0}
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "eos_token_id": EOS, "decoder_start_token_id": PAD}
    model = T5(T5Config(**sizes, **tokens, dropout_rate=0.0))
    ends = [EOS, *range(FIRST_TOKEN, LAST_TOKEN, 2)]
    generation = GenerationConfig(
        max_new_tokens=8, eos_token_id=ends, pad_token_id=PAD, decoder_start_token_id=PAD, do_sample=False
    )

    def measure(evaluated):
        texts = torch.from_numpy(evaluated.predictions)
        lengths = (texts != PAD).sum(1).view(-1, dist.get_world_size(), ROWS).amax(2)
        assert (lengths != lengths[:, :1]).any(), TOGETHER
        return {"text": (texts * torch.arange(texts.shape[1])).sum().item()}

    trainer = Seq2SeqTrainer(
        model,
        Seq2SeqTrainingArguments(**trainer_arguments(case, predict_with_generate=True, generation_config=generation)),
        train_dataset=training_rows(),
        eval_dataset=evaluation_rows(),
        compute_metrics=measure,
    )
    return train(trainer, case, resumes, evaluated="eval_text")


def text(ids):
    return "".join(f" w{token}" for token in ids.tolist())


def make_datasets(convert):
    """Returns the data sets of training and of evaluation. ``convert`` makes an entry of the tokens of a row."""
    import datasets

    datasets.disable_progress_bars()
    return [
        datasets.Dataset.from_list([convert(row["input_ids"]) for row in rows])
        for rows in (training_rows(), evaluation_rows())
    ]


def sft(case, resumes, model=None, liger=False, **others):
    """``SFTTrainer`` with further arguments. TRL's defaults stay, gradient checkpointing among them."""
    from trl import SFTConfig, SFTTrainer

    training, evaluation = make_datasets(lambda ids: {"text": text(ids)})
    trainer = SFTTrainer(
        model or make_model(),
        # But bf16, which is the default, transformers refuses on CPU.
        SFTConfig(**trainer_arguments(case, bf16=False, use_liger_kernel=liger)),
        train_dataset=training,
        eval_dataset=evaluation,
        processing_class=make_tokenizer(),
        **others,
    )
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return train(trainer, case, resumes)


def sft_with_lora(case, resumes):
    return sft(case, resumes, peft_config=adapters())


def sft_with_liger(case, resumes):
    return sft(case, resumes, liger=True)


def sft_with_nf4(case, resumes):
    """The same with weights that bitsandbytes has quantized. TRL makes the adapters bf16 then, and they are trained in
    fp32 here: one rounding of bf16 changes losses by more than the bound."""
    return sft(case, resumes, make_quantized_model(case.folder), peft_config=adapters())


def dpo(case, resumes, callbacks=(), **others):
    """``DPOTrainer`` with a reference model, which is an engine without an optimizer.

    ``callbacks``: functions that make a callback for the trainer.
    """
    from trl import DPOConfig, DPOTrainer

    def preference(ids):
        prompt, chosen = ids.split(LENGTH // 2)
        rejected = chosen + (LAST_TOKEN - FIRST_TOKEN + 1)
        return {"prompt": text(prompt), "chosen": text(chosen), "rejected": text(rejected)}

    training, evaluation = make_datasets(preference)
    trainer = DPOTrainer(
        make_model(),
        ref_model=make_model(),
        # But bf16, which is the default, transformers refuses on CPU.
        args=DPOConfig(**trainer_arguments(case, bf16=False, **others)),
        train_dataset=training,
        eval_dataset=evaluation,
        processing_class=make_tokenizer(),
    )
    for make in callbacks:
        trainer.add_callback(make(trainer))
    return train(trainer, case, resumes, others=[trainer.ref_model])


def grpo(case, resumes, settings=None, **others):
    """``GRPOTrainer``, which generates in each step. Texts of several ranks have different lengths.

    ``settings``: more fields of its configuration.
    """
    from trl import GRPOConfig, GRPOTrainer

    lengths = []

    def reward(prompts, completions, completion_ids, **_):
        lengths.append(max(map(len, completion_ids)))
        return [float(len(set(ids))) for ids in completion_ids]

    training, evaluation = make_datasets(lambda ids: {"prompt": text(ids[:3])})
    # Half of the tokens end a text.
    ends = {"eos_token_id": [EOS, *range(VOCABULARY // 2, VOCABULARY)]}
    generation = {"num_generations": 2, "max_completion_length": 8, "generation_kwargs": ends}
    model = make_model()
    if settings:
        # The trainer loads the reference model from where the model came from. The first rank alone writes it.
        model.config._name_or_path = os.path.join(case.folder, "model")
        model.save_pretrained(model.config._name_or_path)
        dist.barrier()
    trainer = GRPOTrainer(
        model,
        reward_funcs=reward,
        # But bf16, which is the default, transformers refuses on CPU.
        args=GRPOConfig(**trainer_arguments(case, bf16=False, **generation, **(settings or {}))),
        train_dataset=training,
        eval_dataset=evaluation,
        processing_class=make_tokenizer(),
        **others,
    )
    references = [trainer.ref_model] if settings else []
    outcome = train(trainer, case, resumes, others=references)
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, lengths)
    assert any(len(set(values)) > 1 for values in zip(*of_ranks, strict=True)), TOGETHER
    return outcome


def grpo_with_lora(case, resumes):
    return grpo(case, resumes, peft_config=adapters())


# Lightning


def lightning_trainer(case, resumes, callbacks=()):
    """Lightning's ``Trainer`` with its ``DeepSpeedStrategy``."""
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DeepSpeedStrategy
    from torch.utils.data import DataLoader

    class OnCPU(DeepSpeedStrategy):
        """Leaves out the one check that the accelerator is a GPU. On GPUs the test takes the strategy as it is."""

        def setup_environment(self):
            super(DeepSpeedStrategy, self).setup_environment()

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = make_model()
            self.losses, self.evaluations = [], []

        def training_step(self, batch, number):
            loss = self.model(**batch).loss
            self.log("loss", loss, sync_dist=True)
            return loss

        def validation_step(self, batch, number):
            self.log("evaluation", self.model(**batch).loss, sync_dist=True)

        def on_train_batch_end(self, outputs, batch, number):
            self.losses.append(self.trainer.callback_metrics["loss"].item())

        def on_validation_end(self):
            self.evaluations.append(self.trainer.callback_metrics["evaluation"].item())

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)

    world, gpus = dist.get_world_size(), torch.cuda.device_count()
    hosts = 1 if gpus >= world else world
    if hosts > 1:
        # Lightning gives each rank of a host a device of its own. Ranks that share a device are hosts of their own
        # here, as they are to NCCL.
        os.environ.update(NODE_RANK=str(dist.get_rank()), LOCAL_RANK="0")
    if on_cpu():
        # The strategy and DeepSpeed ask the device for its number.
        strategy = OnCPU(config=ds_config(case), parallel_devices=[torch.device("cpu", 0)])
    else:
        strategy = DeepSpeedStrategy(config=ds_config(case))
    module = Module()
    trainer = pl.Trainer(
        strategy=strategy,
        devices="auto" if on_cpu() else world // hosts,
        num_nodes=hosts,
        max_epochs=2,
        callbacks=[pl.callbacks.ModelCheckpoint(case.folder, filename="{step}", save_top_k=-1), *callbacks],
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        module,
        # Two epochs of half as many steps, since a checkpoint is saved at the end of each.
        DataLoader(training_rows(HALF), batch_size=ROWS),
        DataLoader(evaluation_rows(), batch_size=ROWS),
        ckpt_path=os.path.join(case.folder, f"step={HALF}.ckpt") if resumes else None,
    )
    engine = trainer.strategy.deepspeed_engine
    if case.exports:
        # In a new engine, of the same module.
        trainer.validate(module, DataLoader(evaluation_rows(), batch_size=ROWS), verbose=False)
    return Outcome(module.losses, module.evaluations, engine)


DOORS = {
    "Accelerate": accelerate_loop,
    "Accelerate with dynamo": accelerate_with_dynamo,
    "Accelerate with blocks": accelerate_with_blocks,
    "Trainer": transformers_trainer,
    "Trainer with torch_compile": transformers_trainer_with_torch_compile,
    "Trainer with LoRA": transformers_trainer_with_lora,
    "Trainer from meta": transformers_trainer_from_meta,
    "Seq2SeqTrainer": seq2seq,
    "Lightning": lightning_trainer,
    "SFTTrainer": sft,
    "SFTTrainer with LoRA": sft_with_lora,
    "SFTTrainer with LoRA on NF4": sft_with_nf4,
    "DPOTrainer": dpo,
    "GRPOTrainer": grpo,
    "GRPOTrainer with LoRA": grpo_with_lora,
    "Trainer with Liger": transformers_trainer_with_liger,
    "SFTTrainer with Liger": sft_with_liger,
}


class Records(NamedTuple):
    """What came of a program's runs."""

    off: Record  # without DeepCompile
    on: Record
    resumed: Record  # from the checkpoint of the run before, with DeepCompile too


def off_on_resumed(case):
    """Runs the program of a case without DeepCompile, with DeepCompile, and from the second run's checkpoint."""
    off = dataclasses.replace(case, deepcompile=False, folder=os.path.join(case.folder, "off"))
    return Records(run(off, resumes=False), run(case, resumes=False), run(case, resumes=True))


def run(case, resumes):
    """Runs the program of a case as if the process did nothing before or after."""
    # Those doors that have no argument for the backend get this one.
    with process_as_it_was(), warnings_told() as messages, compile_backend(case.backend):
        outcome = DOORS[case.door](case, resumes)
        engine = outcome.engine
        trained = [name for name, parameter in engine.module.named_parameters() if parameter.requires_grad]
        record = Record(
            losses=outcome.losses,
            evaluations=outcome.evaluations,
            counters=gradient_counters(engine) if case.deepcompile else {},
            trained=len(trained),
            trained_in_blocks=sum(".layers." in name for name in trained),
            others_compiled=[other.is_compiled for other in outcome.others],
            warnings=messages,
        )
        for stepped in (engine, *outcome.others):
            stepped.destroy()
    return record


def packages(door):
    """The packages that a door needs, as names of modules."""
    if door == "Lightning":
        return "transformers", "lightning"
    trainer = ("transformers", "accelerate")
    quantizer = ("bitsandbytes",) if "NF4" in door else ()
    if door.startswith(("SFT", "DPO", "GRPO")):
        return (*trainer, "trl", "peft", "datasets", *quantizer)
    return (*trainer, "peft") if "LoRA" in door else trainer


def test_the_line_in_the_configuration_is_enough(ranks, tmp_path):
    """A program that never calls ``engine.compile()`` would train without DeepCompile."""
    for package in packages("Accelerate"):
        pytest.importorskip(package, reason="pip install -r requirements/front_doors.txt")
    (record,) = ranks(1).run(run, Case("Accelerate", str(tmp_path)), resumes=False)
    assert record.losses[-1] < record.losses[0] - 0.05
    assert record.counters["from_graphs"] >= STEPS * record.trained_in_blocks > 0
    assert record.warnings == []


@pytest.mark.slow
@pytest.mark.table
@vary(
    "door, stage, backend",
    [
        ("Accelerate", 1, "eager"),
        ("Accelerate", 2, "eager"),
        ("Accelerate with dynamo", 1, "eager"),
        ("Accelerate with blocks", 1, "eager"),
        # As a person has it who sets nothing else.
        ("Trainer", 1, "inductor"),
        ("Trainer with torch_compile", 1, "eager"),
        ("Lightning", 2, "eager"),
        ("SFTTrainer", 1, "eager"),
        ("SFTTrainer with LoRA", 2, "eager"),
        ("SFTTrainer with LoRA on NF4", 1, "eager"),
        ("DPOTrainer", 1, "eager"),
    ],
)
def test_trains_with_the_line_in_the_configuration(ranks, tmp_path, door, stage, backend):
    for package in packages(door):
        pytest.importorskip(package, reason="pip install -r requirements/front_doors.txt")
    case = Case(door, str(tmp_path), stage, backend)
    results = ranks(2).run(off_on_resumed, case)
    for off, on, resumed in results:
        assert len(on.losses) == STEPS and len(on.evaluations) == 2
        assert on.losses == pytest.approx(off.losses, rel=BOUND)
        assert on.evaluations == pytest.approx(off.evaluations, rel=BOUND)
        assert on.losses[-1] < on.losses[0] - 0.05, "the model hardly learned, so agreement shows nothing"

        assert resumed.losses == pytest.approx(on.losses[HALF:], rel=BOUND)
        assert resumed.evaluations == pytest.approx(on.evaluations[1:], rel=BOUND)

        for record, steps in ((on, STEPS), (resumed, STEPS - HALF)):
            assert record.counters["from_graphs"] >= steps * record.trained_in_blocks > 0
            # The embedding and the last norm: what calls the layers is not compiled.
            assert record.counters["from_autograd"] == steps * (record.trained - record.trained_in_blocks)
        # The reference model of DPO is an engine that DeepCompile leaves alone.
        assert on.others_compiled == ([False] if door == "DPOTrainer" else [])

    told = [message for record in results[0] for message in record.warnings]
    if door == "Accelerate with blocks":
        assert len(told) == 2 and all("compiled before" in message for message in told), told
    else:
        assert not told


def weights_below(folder):
    """Returns the tensors of all files of weights below a folder, by file and name."""
    from safetensors.torch import load_file

    found = {}
    for path in sorted(pathlib.Path(folder).rglob("*")):
        if path.suffix == ".safetensors":
            tensors = load_file(path)
        elif path.name == "mp_rank_00_model_states.pt":
            tensors = torch.load(path, weights_only=False)["module"]
        else:
            continue
        found.update({f"{path.relative_to(folder)}: {name}": value for name, value in tensors.items()})
    return found


@pytest.mark.options("compile.shard_parameters")
@pytest.mark.slow
@pytest.mark.table
@vary(
    "door, stage, shards",
    [
        ("Accelerate", 2, "all"),
        ("Trainer", 1, "all"),
        ("Trainer from meta", 1, "all"),
        ("Trainer with LoRA", 2, "frozen"),
        ("Seq2SeqTrainer", 1, "all"),
        ("Lightning", 1, "all"),
        ("SFTTrainer", 2, "all"),
        ("SFTTrainer with LoRA", 1, "all"),
        ("SFTTrainer with LoRA on NF4", 1, "all"),
        ("DPOTrainer", 2, "all"),
        ("GRPOTrainer", 1, "all"),
        ("GRPOTrainer with LoRA", 2, "frozen"),
    ],
)
@on_ranks(2)
def test_sharded_parameters_train_and_save_alike(tmp_path, door, stage, shards):
    """A trainer that reads parameters between two steps, as where it saves weights, would find nothing there."""
    for package in packages(door):
        pytest.importorskip(package, reason="pip install -r requirements/front_doors.txt")
    cases = [
        # Sharding makes blocks graphs, which add gradients up in another order than one graph does.
        Case(door, str(tmp_path / name), stage, blocks=True, exports=True, shards=given)
        for name, given in (("whole", ""), ("sharded", shards))
    ]
    whole, sharded = (run(case, resumes=False) for case in cases)
    dist.barrier()
    # Before the next run writes them.
    found = [weights_below(case.folder) for case in cases] if dist.get_rank() == 0 else []
    dist.barrier()
    resumed = run(cases[1], resumes=True)
    dist.barrier()
    if dist.get_rank() == 0:
        found.append(weights_below(cases[1].folder))
        assert found[0], "nothing was saved"
        # Trainers save from the GPU or from the host.
        expected, *others = ({name: value.cpu() for name, value in weights.items()} for weights in found)
        # Lightning saves the last checkpoint of a run that resumes in another file.
        wrong = [[name for name in expected if not torch.equal(expected[name], weights[name])] for weights in others]
        assert wrong == [[], []]
    assert whole.losses == sharded.losses and whole.evaluations == sharded.evaluations
    assert len(sharded.losses) == STEPS
    assert resumed.losses == sharded.losses[HALF:]
    assert resumed.evaluations == sharded.evaluations[1:]


def read_by_callbacks(case):
    """Trains a model that a reference model follows, of which TRL keeps an average, and which a callback saves.

    Each of these is the first to read parameters after a step in which the rank that reads waits for the other one.
    Returns what they have read, by name, and how often somebody waited for parameters.
    """
    from transformers import TrainerCallback
    from trl import BEMACallback

    class Saves(TrainerCallback):
        def __init__(self, trainer):
            self.trainer = trainer

        def on_step_end(self, args, state, control, model, **_):
            if state.global_step == 2:
                # It asks sharded parameters for their addresses. Of all ranks the first one writes.
                whole = unsharded_parameters(self.trainer.model_wrapped) if case.shards else contextlib.nullcontext()
                with whole:
                    model.save_pretrained(os.path.join(case.folder, "saved"))

    # The average begins after the first step, and takes what the fifth has made.
    average = BEMACallback(update_after=1, update_freq=4, device=str(device()))
    with process_as_it_was(), compile_backend(case.backend), one_rank_late(0.1) as waited:
        outcome = dpo(case, False, [lambda _: average, Saves], sync_ref_model=True, ref_model_sync_steps=3)
        (reference,) = outcome.others
        of_models = (("reference", reference.module), ("average", average.running_model))
        found = {f"{of}: {name}": parameter for of, model in of_models for name, parameter in model.named_parameters()}
        found = {name: parameter.detach().clone() for name, parameter in found.items()}
        for engine in (outcome.engine, reference):
            engine.destroy()
    dist.barrier()
    return {**found, **weights_below(os.path.join(case.folder, "saved"))}, len(waited)


def read_by_grpo(case):
    """Trains a model by GRPO that a reference model follows. Returns the reference's parameters by name."""
    following = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 1.0, "beta": 0.1}
    with process_as_it_was(), compile_backend(case.backend), one_rank_late(0.1) as waited:
        outcome = grpo(case, False, settings=following)
        (reference,) = outcome.others
        found = {
            f"reference: {name}": parameter.detach().clone() for name, parameter in reference.module.named_parameters()
        }
        for engine in (outcome.engine, reference):
            engine.destroy()
    return found, len(waited)


def read_by_lightning(case):
    """Trains with Lightning's average of weights, which takes their place in evaluations, and is saved beside them.

    Returns the averages by name, and what the evaluations found. Lightning resumes no such training with DeepSpeed.
    """
    from lightning.pytorch.callbacks import EMAWeightAveraging

    average = EMAWeightAveraging(decay=0.5)
    with process_as_it_was(), compile_backend(case.backend), one_rank_late(0.1) as waited:
        outcome = lightning_trainer(case, False, [average])
        means = average._average_model.module.named_parameters()
        found = {f"average: {name}": parameter.detach().clone() for name, parameter in means}
        outcome.engine.destroy()
    dist.barrier()
    return {**found, "evaluations": torch.tensor(outcome.evaluations)}, len(waited)


# Who reads, and the names of what is read.
READERS = {
    "DPOTrainer": (read_by_callbacks, {"reference", "average", "model.safetensors"}),
    "GRPOTrainer": (read_by_grpo, {"reference"}),
    "Lightning": (read_by_lightning, {"average", "evaluations"}),
}


@pytest.mark.slow
@vary("door, shards", itertools.product(READERS, ["", "all"]))
@on_ranks(2)
def test_callbacks_read_what_was_stepped(tmp_path, door, shards):
    """A callback would read what was there before the step on a rank that waits for another one, or nothing."""
    for package in packages(door):
        pytest.importorskip(package, reason="pip install -r requirements/front_doors.txt")
    read, names = READERS[door]
    case = Case(door, str(tmp_path), shards=shards)
    found, waited = read(case)
    expected, _ = read(dataclasses.replace(case, deepcompile=False, folder=os.path.join(case.folder, "off")))
    errors = {name: relative_error([values], [expected[name]]) for name, values in found.items()}
    assert found.keys() == expected.keys() and {name.split(":")[0] for name in found} == names
    assert max(errors.values()) < BOUND, errors
    assert shards or waited


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="Liger's kernels need a GPU")
@pytest.mark.parametrize("door", ["Trainer with Liger", "SFTTrainer with Liger"])
def test_trains_with_ligers_kernels(ranks, tmp_path, door):
    for package in (*packages(door), "liger_kernel"):
        pytest.importorskip(package, reason="pip install -r requirements/front_doors.txt liger-kernel")
    for off, on, resumed in ranks(2).run(off_on_resumed, Case(door, str(tmp_path), backend="inductor")):
        assert on.losses == pytest.approx(off.losses, rel=1e-4)
        assert on.evaluations == pytest.approx(off.evaluations, rel=1e-4)
        assert resumed.losses == pytest.approx(on.losses[HALF:], rel=1e-4)
        assert on.losses[-1] < on.losses[0] - 0.05, "the model hardly learned, so agreement shows nothing"
        assert on.counters["from_graphs"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("door", ["Trainer", "Lightning"])
def test_the_memory_of_a_step_is_drawn_under_a_trainer(ranks, tmp_path, door):
    for package in (*packages(door), "matplotlib"):
        pytest.importorskip(package, reason="pip install -r requirements/front_doors.txt -r requirements/dev.txt")
    ranks(2).run(run, Case(door, str(tmp_path), pictured=True), resumes=False)
    assert {path.name for path in tmp_path.glob("*-rank*")} == {
        f"step3-rank{rank}.{suffix}" for rank in range(2) for suffix in ("json", "png")
    }
