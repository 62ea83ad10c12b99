// Copyright (c) the authors of this fork of DeepSpeed.
// SPDX-License-Identifier: Apache-2.0

#include "deepcompile_memory.h"

#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>
#include <vector>

// Gradient memory: how much of it there is, who may keep it, and which stream used it last.

namespace deepcompile {

std::map<std::string, int64_t> Counters::values() const
{
    std::map<std::string, int64_t> values{{"registered", registered},
                                          {"from_graphs", from_graphs},
                                          {"from_autograd", from_autograd},
                                          {"out_of_turn", out_of_turn},
                                          {"buckets_sent", buckets_sent},
                                          {"messages_sent", messages_sent}};
    const std::pair<const char*, const ByteCount*> counts[] = {{"bound", &bound},
                                                               {"on_host", &on_host},
                                                               {"pending", &pending},
                                                               {"bucket", &bucket},
                                                               {"unreduced", &unreduced}};
    for (const auto& [name, count] : counts) {
        values[name] = count->now();
        values[std::string("peak_") + name] = count->peak();
    }
    return values;
}

void Counters::reset()
{
    for (auto* count : {&bound, &on_host, &pending, &bucket, &unreduced}) { count->reset_peak(); }
    for (auto* count : {&from_graphs, &from_autograd, &out_of_turn, &buckets_sent, &messages_sent}) { *count = 0; }
}

int64_t bytes_of(const at::Tensor& tensor)
{
    return tensor.numel() * static_cast<int64_t>(tensor.element_size());
}

void mark_stage(const char* stage, const at::Tensor& tensor)
{
    RECORD_FUNCTION(stage, std::vector<c10::IValue>{tensor});
}

// Messages are put together without streams of the C++ library. Some compilers link their own copy of that library,
// whose locales are not the ones torch uses, and there formatting a number through a stream crashes.
std::string shape_of(const at::Tensor& tensor)
{
    std::string text = "[";
    for (const auto size : tensor.sizes()) { text += (text.size() > 1 ? ", " : "") + std::to_string(size); }
    return text + "]";
}

bool fills_its_storage(const at::Tensor& tensor)
{
    return tensor.is_contiguous() && static_cast<int64_t>(tensor.storage().nbytes()) == bytes_of(tensor) &&
           tensor.storage().allocator();
}

at::Tensor in_shape(const at::Tensor& tensor, at::IntArrayRef sizes)
{
    // Nobody differentiates gradients here, and a view of autograd's takes several times as long.
    auto impl = tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(
        /*version_counter=*/0, /*allow_tensor_metadata_change=*/true);
    impl->set_sizes_contiguous(sizes);
    return at::Tensor(std::move(impl));
}

at::Tensor keep_or_copy(const at::Tensor& tensor, at::ScalarType dtype, bool donated)
{
    // A view of autograd's would keep this memory when the caller gives the tensor other memory.
    if (donated && tensor.scalar_type() == dtype && fills_its_storage(tensor)) {
        return in_shape(tensor, tensor.sizes());
    }
    return tensor.to(tensor.options().dtype(dtype),
                     /*non_blocking=*/false,
                     /*copy=*/true,
                     at::MemoryFormat::Contiguous);
}

void record_on_current_stream(const at::Tensor& tensor)
{
    if (!tensor.is_cpu()) { tensor.record_stream(current_stream(tensor.device())); }
}

c10::Stream current_stream(c10::Device device)
{
    return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

c10::Event record_event(const c10::Stream& stream)
{
    c10::Event event(stream.device_type());
    event.record(stream);
    return event;
}

c10::Stream StreamOrder::current() const
{
    return current_stream(device_);
}

void StreamOrder::synchronize_device() const
{
    if (!on_cpu()) { c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index()); }
}

void StreamOrder::wait_on_host() const
{
    if (last_) { last_->synchronize(); }
}

c10::Stream StreamOrder::copies()
{
    if (!copies_) { copies_ = c10::impl::VirtualGuardImpl(device_.type()).getStreamFromGlobalPool(device_); }
    return *copies_;
}

void StreamOrder::order_after_last_use()
{
    if (on_cpu()) { return; }
    const auto stream = current();
    if (last_ && *last_ != stream) {
        record_event(*last_).block(stream);
        several_ = true;
    }
    last_ = stream;
}

void StreamOrder::let_wait(const c10::Stream& stream) const
{
    if (last_ && *last_ != stream) { record_event(*last_).block(stream); }
}

void StreamOrder::let_last_wait(const c10::Stream& stream) const
{
    if (last_ && *last_ != stream) { record_event(stream).block(*last_); }
}

void StreamOrder::record_on_last(const at::Tensor& tensor) const
{
    if (several_ && !tensor.is_cpu()) { tensor.record_stream(*last_); }
}

void StreamOrder::record_on_last(const at::Tensor& tensor, const c10::Stream& allocated_on) const
{
    if (!tensor.is_cpu() && last_ && allocated_on != *last_) { tensor.record_stream(*last_); }
}

}  // namespace deepcompile
