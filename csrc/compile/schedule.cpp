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
    // Events: when a portion is staged, and when each stream has pulled its rows of it.
    constexpr int64_t is_staged = 0;
    const auto is_pulled = [](int64_t stream) { return 1 + stream; };
    std::vector<Step> steps;
    const auto on = [&](int64_t stream, Step::Act act) -> Step& {
        steps.push_back({act, stream});
        return steps.back();
    };
    for (int64_t portion = 0; portion < portions; ++portion) {
        const int64_t number = first + portion;
        const int64_t slot = number % shape.slots;
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
        on(Step::staging, Step::mark).event = is_staged;
        auto& staged = on(Step::staging, Step::post);
        staged.channel = Channel::staged;
        staged.number = numbered;

        for (int64_t stream = 0; stream < pulls; ++stream) {
            on(Step::pulling + stream, Step::follow).event = is_staged;
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
        }
        for (int64_t stream = 0; stream < pulls; ++stream) {
            on(Step::pulling + stream, Step::mark).event = is_pulled(stream);
            if (stream > 0) { on(Step::pulling, Step::follow).event = is_pulled(stream); }
            on(Step::adding, Step::follow).event = is_pulled(stream);
        }
        auto& pulled = on(Step::pulling, Step::post);
        pulled.channel = Channel::pulled;
        pulled.number = numbered;

        on(Step::adding, Step::add).portion = portion;
    }
    return steps;
}

void add_rows(const at::Tensor& out, const at::Tensor& rows, double scale)
{
    auto into = out;
    const auto count = rows.size(0);
    // Where one kernel of torch can, it goes through memory once, computes in fp32 and rounds once. On a CPU a mean of
    // bf16 is rounded before it is divided.
    if (count == 2 && scale == 0.5) {
        at::lerp_out(into, rows[0], rows[1], 0.5);
    } else if (count == 2 && scale == 1) {
        at::add_out(into, rows[0], rows[1]);
    } else if (!out.is_cpu() && scale == 1.0 / static_cast<double>(count)) {
        at::mean_out(into, rows, {0});
    } else if (!out.is_cpu() && scale == 1) {
        at::sum_out(into, rows, {0});
    } else {
        at::mul_out(into, at::sum(rows, {0}, /*keepdim=*/false, at::kFloat), c10::scalar_to_tensor(scale));
    }
}

}  // namespace deepcompile
