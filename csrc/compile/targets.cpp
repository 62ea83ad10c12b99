// Copyright (c) the authors of this fork of DeepSpeed.
// SPDX-License-Identifier: Apache-2.0

#include "deepcompile.h"

#include <ATen/Functions.h>
#include <ATen/record_function.h>

#include <algorithm>

// Where parameters lie in the partitions, and the averaged gradients of this rank's partition.

namespace deepcompile {

namespace {

// Elements of host memory that are copied or added at once, so that what the device needs for a cast or for a sum is
// bounded.
constexpr int64_t part_numel = int64_t(1) << 23;

void fill_host_target(const at::Tensor& target, const at::Tensor& arrived)
{
    for (int64_t first = 0; first < target.numel(); first += part_numel) {
        const int64_t numel = std::min(part_numel, target.numel() - first);
        target.narrow(0, first, numel).copy_(arrived.narrow(0, first, numel), /*non_blocking=*/true);
    }
}

/// Adds to a target in host memory. The sum is made on the device: the host would have to wait for what has arrived.
void add_to_host_target(const at::Tensor& target, const at::Tensor& arrived)
{
    for (int64_t first = 0; first < target.numel(); first += part_numel) {
        const int64_t numel = std::min(part_numel, target.numel() - first);
        const auto part = target.narrow(0, first, numel);
        auto sum = part.to(arrived.device(), part.scalar_type(), /*non_blocking=*/true);
        part.copy_(sum.add_(arrived.narrow(0, first, numel)), /*non_blocking=*/true);
    }
}

}  // namespace

std::vector<Piece> cut_at_partitions(int64_t offset, int64_t numel, int64_t partition_numel)
{
    std::vector<Piece> pieces;
    int64_t done = 0;
    while (done < numel) {
        const int64_t position = offset + done;
        const int64_t owner = position / partition_numel;
        const int64_t target_offset = position - owner * partition_numel;
        const int64_t length = std::min(numel - done, partition_numel - target_offset);
        pieces.push_back({owner, done, target_offset, length});
        done += length;
    }
    return pieces;
}

PartitionGroup::PartitionGroup(c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                               int64_t partition_numel,
                               at::ScalarType target_dtype,
                               at::Device device,
                               bool flat,
                               std::optional<at::Tensor> host,
                               Counters& counters)
    : process_group(std::move(process_group)),
      partition_numel(partition_numel),
      target_dtype(target_dtype),
      device(device),
      flat(flat),
      host(std::move(host)),
      counters_(counters)
{
}

void PartitionGroup::bind(int64_t offset, const at::Tensor& arrived, bool donated)
{
    RECORD_USER_SCOPE("deepcompile::bind");
    const auto bound = targets_.find(offset);
    if (bound != targets_.end()) {
        if (host) {
            add_to_host_target(bound->second, arrived);
        } else {
            bound->second.add_(arrived);
        }
        return;
    }
    at::Tensor target;
    if (host) {
        target = host->narrow(0, offset, arrived.numel());
        fill_host_target(target, arrived);
    } else if (flat) {
        allocate_flat_partition();
        target = flat_partition_.narrow(0, offset, arrived.numel());
        target.copy_(arrived);
    } else {
        target = keep_or_copy(arrived, target_dtype, donated);
        mark_stage("deepcompile::bound", target);
    }
    if (!flat) { bound_count().add(bytes_of(target)); }
    targets_.emplace(offset, std::move(target));
}

void PartitionGroup::bind_to_zeros(const std::vector<Piece>& pieces)
{
    const auto options = at::TensorOptions().dtype(target_dtype).device(device);
    for (const auto& piece : pieces) {
        if (piece.owner != rank() || targets_.count(piece.target_offset)) { continue; }
        // Where the zeros are only copied, one zero serves for all elements. They are copied to host memory from the
        // device too, which may still be reading parameters there that the previous step wrote.
        const bool copied = flat || host;
        const auto zeros = at::zeros({copied ? 1 : piece.numel}, options).expand({piece.numel});
        bind(piece.target_offset, zeros, /*donated=*/true);
    }
}

void PartitionGroup::allocate_flat_partition()
{
    if (!flat || flat_partition_.defined()) { return; }
    flat_partition_ = at::zeros({partition_numel}, at::TensorOptions().dtype(target_dtype).device(device));
    counters_.bound.add(bytes_of(flat_partition_));
    mark_stage("deepcompile::bound", flat_partition_);
}

void PartitionGroup::release()
{
    bound_count().remove(bound_bytes());
    flat_partition_ = at::Tensor();
    targets_.clear();
}

int64_t PartitionGroup::bound_bytes() const
{
    if (flat) { return flat_partition_.defined() ? bytes_of(flat_partition_) : 0; }
    int64_t bytes = 0;
    for (const auto& [offset, target] : targets_) { bytes += bytes_of(target); }
    return bytes;
}

}  // namespace deepcompile
