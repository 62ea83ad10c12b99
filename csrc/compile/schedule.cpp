// Copyright (c) the authors of this fork of DeepSpeed.
// SPDX-License-Identifier: Apache-2.0

#include "deepcompile_copy_engines.h"

#include <ATen/Functions.h>
#include <ATen/ScalarOps.h>

#include <algorithm>

// What copy engines carry in which order, and the sum of what they have brought. Nothing here needs a GPU.

namespace deepcompile {

namespace {

constexpr int64_t alignment = 256;  // bytes

int64_t aligned(int64_t bytes)
{
    return (bytes + alignment - 1) / alignment * alignment;
}

}  // namespace

std::vector<Portion> cut(const std::vector<int64_t>& shard_bytes, int64_t row_bytes)
{
    TORCH_CHECK_VALUE(row_bytes > 0 && row_bytes % alignment == 0, "a row must have a multiple of 256 bytes");
    std::vector<Portion> portions;
    int64_t used = row_bytes;
    for (size_t message = 0; message < shard_bytes.size(); ++message) {
        for (int64_t first = 0; first < shard_bytes[message];) {
            const int64_t rest = shard_bytes[message] - first;
            // Rather than a small part of a shard, leave a small part of the row empty.
            if (used >= row_bytes || (rest > row_bytes - used && row_bytes - used < row_bytes / 8)) {
                portions.emplace_back();
                used = 0;
            }
            const int64_t bytes = std::min(rest, row_bytes - used);
            portions.back().push_back({static_cast<int64_t>(message), first, bytes, used});
            first += bytes;
            used = aligned(used + bytes);
        }
    }
    return portions;
}

std::vector<int64_t> Shape::peers() const
{
    std::vector<int64_t> peers;
    for (int64_t step = 1; step < world; ++step) { peers.push_back((rank + step) % world); }
    return peers;
}

std::vector<Step> schedule(const Shape& shape, int64_t first, int64_t portions)
{
    const auto peers = shape.peers();
    const int64_t pulls = std::min<int64_t>(shape.pulls, static_cast<int64_t>(peers.size()));
    // Events: when a buffer may be written again, and when each stream has pulled into it.
    const auto is_free = [&](int64_t receive) { return receive * (1 + shape.pulls); };
    const auto is_pulled = [&](int64_t receive, int64_t stream) { return is_free(receive) + 1 + stream; };
    std::vector<Step> steps;
    const auto on = [&](int64_t stream, Step::Act act) -> Step& {
        steps.push_back({act, stream});
        return steps.back();
    };
    for (int64_t portion = 0; portion < portions; ++portion) {
        const int64_t number = first + portion;
        const int64_t slot = number % shape.slots, receive = number % shape.receives;
        const auto numbered = static_cast<uint32_t>(number + 1);

        if (number >= shape.slots) {
            for (const auto peer : peers) {
                auto& step = on(Step::staging, Step::wait);
                step.peer = peer;
                step.channel = Channel::pulled;
                step.number = static_cast<uint32_t>(numbered - shape.slots);
            }
        }
        auto& stage = on(Step::staging, Step::stage);
        stage.portion = portion;
        stage.slot = slot;
        auto& staged = on(Step::staging, Step::post);
        staged.channel = Channel::staged;
        staged.number = numbered;

        for (int64_t stream = 0; stream < pulls; ++stream) {
            on(Step::pulling + stream, Step::follow).event = is_free(receive);
        }
        for (size_t index = 0; index < peers.size(); ++index) {
            const int64_t stream = Step::pulling + static_cast<int64_t>(index) % pulls;
            auto& wait = on(stream, Step::wait);
            wait.peer = peers[index];
            wait.channel = Channel::staged;
            wait.number = numbered;
            auto& pull = on(stream, Step::pull);
            pull.peer = peers[index];
            pull.portion = portion;
            pull.slot = slot;
            pull.receive = receive;
        }
        for (int64_t stream = 0; stream < pulls; ++stream) {
            on(Step::pulling + stream, Step::mark).event = is_pulled(receive, stream);
            if (stream > 0) { on(Step::pulling, Step::follow).event = is_pulled(receive, stream); }
            on(Step::adding, Step::follow).event = is_pulled(receive, stream);
        }
        auto& pulled = on(Step::pulling, Step::post);
        pulled.channel = Channel::pulled;
        pulled.number = numbered;

        auto& add = on(Step::adding, Step::add);
        add.portion = portion;
        add.receive = receive;
        on(Step::adding, Step::mark).event = is_free(receive);
    }
    return steps;
}

void add_rows(const at::Tensor& out, const at::Tensor& own, const at::Tensor& rows, double scale)
{
    auto into = out;
    const auto times = c10::scalar_to_tensor(scale);
    if (rows.size(0) == 1) {
        // One pass over memory, computed in fp32 and rounded once.
        const auto row = rows[0];
        if (scale == 0.5) {
            at::lerp_out(into, own, row, 0.5);
            return;
        }
        if (scale == 1) {
            at::add_out(into, own, row);
            return;
        }
    }
    auto sum = rows.size(0) == 1 ? rows[0].to(at::kFloat, /*non_blocking=*/false, /*copy=*/true)
                                 : at::sum(rows, {0}, /*keepdim=*/false, at::kFloat);
    sum.add_(own);
    at::mul_out(into, sum, times);
}

}  // namespace deepcompile
