# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""When gradient memory exists, and that nothing keeps it longer."""

import pytest
import torch

from support import lifetime
from support.training import Case, device

NOTHING = {"bound": 0, "pending": 0, "bucket": 0, "unreduced": 0}
BOUND = 1e-5


def sanitized(*values):
    """A case that runs under sanitizers, of a test whose other cases call nothing else in the native code."""
    return pytest.param(*values, marks=pytest.mark.sanitized)


@pytest.mark.parametrize("dtype", [sanitized("fp32"), "bf16"])
@pytest.mark.parametrize("stage, accumulation", [(1, 1), (1, 3), (2, 1), (2, 3)])
def test_stages_of_a_target(ranks, stage, accumulation, dtype):
    case = Case(stage=stage, accumulation=accumulation, dtype=dtype)
    for seen in ranks(2).run(lifetime.stages_of_a_target, case):
        assert seen["registered"] == 20
        assert seen["compile"] == NOTHING
        partition_bytes = seen["bytes"]
        if dtype == "fp32":
            # The optimizer takes the flat partition as it is.
            assert seen["flat"] == (1, seen["partition"]) and partition_bytes == 4 * seen["partition"]
        else:
            # It makes an fp32 copy, so gradients stay where they are. No byte of anything else stays with them.
            assert seen["flat"] is None and partition_bytes == 2 * seen["numel"]
        for micro_step in range(accumulation):
            at_boundary = micro_step == accumulation - 1
            after = seen[f"backward {micro_step}"]
            assert after["pending"] == after["bucket"] == 0
            assert after["bound"] == (partition_bytes if stage == 2 or at_boundary else 0)
            assert (after["unreduced"] > 0) == (stage == 1 and not at_boundary)
        assert seen["numel"] <= seen["partition"]
        assert seen["step"] == NOTHING
        assert seen["handed over after step"] == []
        assert seen["optimizer attributes"] == [] and seen["optimizer is itself again"]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dtype", [sanitized("fp32"), "bf16"])
def test_callers_of_the_base_find_its_names(ranks, dtype, stage):
    # Of FewParameters one rank owns padding only.
    case = Case(model="FewParameters", dtype=dtype, stage=stage)
    expected = {(torch.float32 if dtype == "fp32" else torch.bfloat16, device().type)}
    for lacking, kinds, numel, partition, released, after_step in ranks(2).run(lifetime.entries_as_in_the_base, case):
        assert lacking == []
        assert kinds == expected
        # In bf16 each gradient lies where it was reduced; a flat partition would be another copy.
        assert numel == (partition if dtype == "fp32" else None)
        assert released == NOTHING
        assert after_step == [None]


@pytest.mark.sanitized
def test_a_rank_binds_when_its_first_piece_arrives(ranks):
    # Gradients arrive from the last parameters to the first, which rank 0 owns.
    first_owner, last_owner = ranks(2).run(lifetime.binding_moments, Case(bucket=1))
    assert first_owner[0] == 0 and first_owner[-1] > 0
    assert last_owner[0] > 0


@pytest.mark.parametrize("backend", [sanitized("eager"), "inductor"])
def test_activations_are_freed_behind_their_last_use(ranks, backend):
    for live in ranks(2).run(lifetime.activations_behind_their_last_use, Case(backend=backend)):
        assert live == [0, 0, 0]


@pytest.mark.sanitized
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("how", ["zero_grad", "destroy"])
def test_release(ranks, how, stage):
    for before, after, error in ranks(2).run(lifetime.release_by, how, Case(stage=stage)):
        assert before["bound"] > 0
        assert all(count == 0 for count in after.values()), after
        assert error < BOUND


@pytest.mark.sanitized
@pytest.mark.parametrize("direct", [False, True], ids=["engine.backward", "loss.backward"])
@pytest.mark.parametrize("stage, accumulation", [(1, 1), (1, 2), (2, 2)])
def test_a_backward_that_raises_leaves_nothing(ranks, stage, accumulation, direct):
    case = Case(stage=stage, accumulation=accumulation, bucket=50)
    for raised, received, after, error in ranks(2).run(lifetime.backward_that_raises, case, direct):
        assert raised and received > 0
        assert after == NOTHING
        assert error < BOUND


@pytest.mark.parametrize(
    "first, second",
    [
        sanitized(Case(), Case(model="RepeatedLayers", stage=2)),
        sanitized(Case(stage=1, accumulation=2), Case(stage=2, accumulation=3)),
        (Case(backend="inductor"), Case(backend="inductor")),
    ],
)
def test_two_engines_taking_turns(ranks, first, second):
    for errors in ranks(2).run(lifetime.two_engines_taking_turns, first, second):
        assert max(errors) < BOUND


@pytest.mark.sanitized
def test_two_engines_with_overlapping_windows(ranks):
    for errors in ranks(2).run(lifetime.overlapping_windows, Case(accumulation=2), Case(stage=2)):
        assert max(errors) < BOUND


@pytest.mark.sanitized
@pytest.mark.parametrize("bucket", [1, 100, 300, 10**6])
def test_pending_bytes_stay_within_bucket_and_largest_gradient(ranks, bucket):
    for peak, bucket_bytes, largest, bucket_after in ranks(2).run(lifetime.pending_bytes, Case(bucket=bucket)):
        assert 0 < peak <= bucket_bytes + largest
        assert bucket_after == 0


@pytest.mark.sanitized
def test_pending_bytes_of_equal_gradients(ranks):
    # Two are sent together; beside them a third fits into the bucket and a fourth does not.
    for peak, _, largest, _ in ranks(2).run(lifetime.pending_bytes, Case(bucket=160), equal=True):
        assert peak == 3 * largest


@pytest.mark.sanitized
@pytest.mark.parametrize("model", ["OneGraph", "OddSizes", "TiedEmbedding"])
@pytest.mark.parametrize("stage", [1, 2])
def test_full_gradients_between_backward_and_step(ranks, stage, model):
    assert max(ranks(2).run(lifetime.full_gradients, Case(stage=stage, model=model))) < BOUND


@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_returns_every_byte(ranks, stage):
    case = Case(stage=stage, bucket=10**5)
    for net, held_between, partition_bytes in ranks(2).run(lifetime.net_bytes_of_a_step, case):
        assert partition_bytes > 10**6
        # What a C heap and a grad norm come and go by is small against a partition.
        assert held_between > 0.9 * partition_bytes
        assert abs(net) < 0.05 * partition_bytes


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("model", ["OneGraph", "RepeatedLayers", "SeveralGraphs", "EagerBlocks", "Checkpointed"])
def test_a_delayed_collective_reads_what_was_reduced(ranks, model, backend):
    case = Case(model=model, backend=backend, bucket=200, steps=4)
    results = ranks(2).run(lifetime.train_with_a_straggler, case, 0.3)
    assert max(waited for _, waited in results) > 0.25, "no rank waited, so nothing was delayed"
    assert max(error for error, _ in results) < BOUND


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("model", ["Wide", "WideRepeatedLayers"])
@pytest.mark.parametrize("bucket", [10**6, 10**7])
def test_gradients_reduced_where_they_lie_are_not_overwritten(ranks, bucket, model, backend):
    case = Case(model=model, backend=backend, bucket=bucket, steps=3)
    results = ranks(2).run(lifetime.train_with_a_straggler, case, 0.3)
    assert max(waited for _, waited in results) > 0.25, "no rank waited, so nothing was delayed"
    assert max(error for error, _ in results) < BOUND


def test_buckets_are_sent_before_they_are_full(ranks):
    for sent, pending in ranks(2).run(lifetime.large_gradients, Case(dtype="bf16", bucket=10**9)):
        # The large one at once; while it is on its way, two others; the last.
        assert (sent, pending) == (3, 4 + 2)


@pytest.mark.sanitized
@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_that_were_given_other_memory(ranks, stage):
    for error in ranks(2).run(lifetime.swap_parameters, Case(stage=stage)):
        assert error < BOUND


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs: only there the host can run ahead")
@pytest.mark.parametrize("stage, accumulation", [(1, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("regional", [False, True])
@pytest.mark.parametrize("asked", [False, True], ids=["unasked", "check_grad_overflow"])
def test_the_host_does_not_wait_before_the_optimizer(ranks, asked, regional, stage, accumulation):
    config = {"bf16": {"check_grad_overflow": asked}, "compile": {"regional_compilation": regional}}
    case = Case(
        stage=stage, accumulation=accumulation, backend="inductor", dtype="bf16", clipping=0.1, config=config, steps=4
    )
    for waited in ranks(2).run(lifetime.synchronizations, case):
        assert bool(waited) == asked, waited


@pytest.mark.sanitized
@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_kept_by_no_sync_and_coalescing(ranks, stage):
    for errors in ranks(2).run(lifetime.without_synchronization, Case(stage=stage)):
        assert max(errors) < BOUND


@pytest.mark.sanitized
@pytest.mark.parametrize("stage", [1, 2])
def test_several_backwards_before_a_step(ranks, stage):
    for error, after in ranks(2).run(lifetime.several_backwards, Case(stage=stage)):
        assert error < BOUND
        assert after == NOTHING


@pytest.mark.sanitized
def test_a_graph_of_a_destroyed_engine_says_so(ranks):
    for message in ranks(2).run(lifetime.use_after_destroy, Case()):
        assert "the engine was destroyed" in message


@pytest.mark.sanitized
def test_an_engine_made_again(ranks):
    assert max(ranks(2).run(lifetime.again_after_destroy, Case())) < BOUND


@pytest.mark.sanitized
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("model", ["OneGraph", "EagerBlocks"])
def test_a_second_engine_takes_a_module_over(ranks, model, stage):
    assert max(ranks(2).run(lifetime.taken_over, Case(stage=stage, model=model))) < BOUND


@pytest.mark.sanitized
def test_counters_may_be_read_from_another_thread(ranks):
    for reads, error in ranks(2).run(lifetime.polled_counters, Case(bucket=50), timeout=120):
        assert reads > 10
        assert error < BOUND


@pytest.mark.sanitized
def test_a_request_for_some_gradients_reduces_no_others(ranks):
    # As traced: torch does not let Inductor's backward run twice, which donates the buffers that it has saved.
    case = Case(model="SeveralGraphs", backend="eager")
    for error, message in ranks(2).run(lifetime.some_gradients_only, case):
        assert error < BOUND
        assert "use safe_get_full_grad()" in message


@pytest.mark.sanitized
def test_a_hook_on_one_rank(ranks):
    (watched, error), (not_watched, other_error) = ranks(2).run(lifetime.hook_on_one_rank, Case(), timeout=120)
    assert (watched, not_watched) == (2, 0)
    assert max(error, other_error) < BOUND
