# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What copy engines carry in which order: the native schedule, played on simulated streams in any order they allow."""

import collections
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.compile.features.copy_engines.carrier import device_bytes, row_bytes
from deepspeed.compile.features.copy_engines.mapped import native

pytestmark = pytest.mark.options("compile.copy_engines")


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 90).map(lambda count: 512 * count), max_size=8), st.integers(1, 40))
def test_portions_hold_each_byte_once(shard_bytes, row):
    """Without this, a byte of a shard could be carried twice or never, or a row could overflow into the next."""
    row *= 256
    reached = [0] * len(shard_bytes)
    for portion in native().cut(shard_bytes, row):
        end = 0
        for message, first, count, offset in portion:
            assert first == reached[message] and first % 256 == 0 and count > 0
            assert offset % 256 == 0 and offset >= end
            reached[message] = first + count
            end = offset + count
        assert 0 < end <= row
    assert reached == shard_bytes


def test_small_messages_share_a_portion():
    """Without this, each norm's gradient could take a slot, a signal and a copy from each peer of its own."""
    assert len(native().cut([512] * 64, 64 * 512)) == 1


def test_rows_of_all_peers_fit_into_the_staging():
    """Without this, ``fits`` could state less memory than the carrier of many ranks takes."""
    for ranks in range(2, 73):
        assert row_bytes(ranks) % 256 == 0
        assert (ranks - 1) * row_bytes(ranks) * 4 == device_bytes(ranks) <= 2**27
    # A GPU of two ranks has the most.
    assert device_bytes(2) == 2**27


class Rank:
    """The streams, the staging and the contributions of one rank, whose contents are names of what was put there."""

    def __init__(self, shape, rank):
        world, self.slots, self.pulls = shape
        self.rank, self.world = rank, world
        self.queues = collections.defaultdict(collections.deque)
        self.staging = [None] * self.slots
        self.rows = collections.defaultdict(dict)  # of each portion, by rank, once they were staged
        self.sums = {}
        self.words = collections.Counter()
        self.records = collections.Counter()  # how often an event was queued to be recorded
        self.done = collections.Counter()  # how often it was
        self.posted = []

    def queue(self, first, portions):
        for step in native().schedule(self.world, self.rank, *self.shape(), first, portions):
            step["name"] = first + step["portion"]
            if step["act"] == "mark":
                self.records[step["event"]] += 1
            if step["act"] == "follow":
                # As a stream does: it waits for the record that is the last one now.
                step["awaited"] = self.records[step["event"]]
            self.queues[step["stream"]].append(step)
            self.posted.append(step)

    def shape(self):
        return self.slots, self.pulls

    def can_run(self, step, ranks):
        if step["act"] == "follow":
            return self.done[step["event"]] >= step["awaited"]
        if step["act"] == "wait":
            return ranks[step["peer"]].words[step["channel"]] >= step["number"]
        return True

    def run(self, step, ranks, is_end):
        """Runs the beginning of a step, or the end, between which other streams may run."""
        act, name = step["act"], step["name"]
        if not is_end and act in ("mark", "post"):
            return
        if act == "mark":
            self.done[step["event"]] += 1
        elif act == "post":
            assert self.words[step["channel"]] == step["number"] - 1
            self.words[step["channel"]] = step["number"]
        elif act == "stage":
            # What is staged must still be what this rank contributes.
            assert not self.rows[name]
            self.staging[step["slot"]] = name if is_end else "half"
            if is_end:
                self.rows[name][self.rank] = name
        elif act == "pull":
            found = ranks[step["peer"]].staging[step["slot"]]
            assert found == name and self.rank in self.rows[name]
            self.rows[name][step["peer"]] = found if is_end else "half"
        elif act == "add":
            self.sums[name] = dict(self.rows[name])
            # What is added must not change meanwhile.
            assert is_end or set(self.sums[name].values()) == {name}

    @property
    def idle(self):
        return not any(self.queues.values())


shapes = st.tuples(st.integers(2, 5), st.integers(1, 4), st.integers(1, 3))


def play(ranks, calls, pick, is_queued=lambda rank: True):
    """Runs steps in a random order that streams allow. A rank queues its next call at any time."""
    left = {rank: list(calls) for rank in range(len(ranks))}
    while True:
        choices = [("queue", rank, None) for rank in left if left[rank]]
        for rank in ranks:
            for queue in rank.queues.values():
                if queue and rank.can_run(queue[0], ranks):
                    choices.append(("run", rank.rank, queue))
        if not choices:
            return
        what, rank, queue = pick.choice(choices)
        if what == "queue":
            ranks[rank].queue(*left[rank].pop(0))
        else:
            is_end = queue[0].setdefault("has_begun", False)
            queue[0]["has_begun"] = True
            ranks[rank].run(queue[0], ranks, is_end)
            if is_end:
                queue.popleft()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(shapes, st.lists(st.integers(1, 7), min_size=1, max_size=3), st.integers())
def test_every_sum_has_the_rows_of_its_portion(shape, counts, seed):
    """Without this, a slot or a row could be written before all have read it, or streams could wait in a circle."""
    ranks = [Rank(shape, rank) for rank in range(shape[0])]
    calls, first = [], 0
    for count in counts:
        calls.append((first, count))
        first += count
    play(ranks, calls, random.Random(seed))
    for rank in ranks:
        assert rank.idle, f"rank {rank.rank} hangs"
        assert set(rank.sums) == set(range(first))
        for portion, rows in rank.sums.items():
            assert rows == dict.fromkeys(range(shape[0]), portion)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(shapes, st.integers(1, 9), st.integers())
def test_one_queue_for_all_streams_does_not_hang(shape, portions, seed):
    """Without this, ranks could hang where a GPU runs several streams through one queue, in the order of the host."""
    ranks = [Rank(shape, rank) for rank in range(shape[0])]
    for rank in ranks:
        rank.queue(0, portions)
        rank.queues.clear()
        rank.queues[0] = collections.deque(rank.posted)
    play(ranks, [], random.Random(seed))
    assert all(rank.idle for rank in ranks)


def test_each_rank_begins_with_another_peer():
    """Without this, all ranks could pull from one rank at a time, over one rank's links."""
    for world in (2, 3, 8):
        firsts = set()
        for rank in range(world):
            steps = native().schedule(world, rank, 4, 2, 0, 1)
            peers = [step["peer"] for step in steps if step["act"] == "pull"]
            assert sorted(peers) == [peer for peer in range(world) if peer != rank]
            firsts.add(peers[0])
        assert len(firsts) == world


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(1, 7), st.sampled_from([0.5, 1.0, 1 / 3, 0.25]), st.integers(0, 2**31))
def test_sums_are_rounded_once(dtype, peers, scale, seed):
    """Without this, sums could be rounded to the gradients' dtype after each rank."""
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn(peers + 1, 512, generator=generator).mul(3).to(dtype)
    # Rows of a portion lie apart.
    rows = torch.empty(len(parts), 640, dtype=dtype)[:, 64:576].copy_(parts)
    out = torch.full((512,), float("nan"), dtype=dtype)
    native().add_rows(out, rows, scale)
    exact = parts.double().sum(0) * scale
    size = parts.double().abs().sum(0) * scale
    bound = size * 2.0**-22 + exact.abs() * torch.finfo(dtype).eps * 0.5001 + torch.finfo(dtype).tiny
    assert bool(((out.double() - exact).abs() <= bound).all())


def test_fp16_averages_do_not_overflow():
    """Without this, a sum beyond fp16's range could become infinite before it is divided by the number of ranks."""
    for peers in (1, 3):
        parts = torch.full((peers + 1, 512), 60000.0, dtype=torch.float16)
        out = torch.empty(512, dtype=torch.float16)
        native().add_rows(out, parts, 1 / (peers + 1))
        assert torch.equal(out, parts[0])
