// Copyright (c) the authors of this fork of DeepSpeed.
// SPDX-License-Identifier: Apache-2.0

#include "deepcompile_copy_engines.h"

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <utility>

// The carrier of copy engines: it puts what schedule() says on streams.

namespace deepcompile {

namespace {

constexpr int64_t page = 4096;  // bytes

uint64_t address_of(const at::Tensor& tensor)
{
    return reinterpret_cast<uint64_t>(tensor.const_data_ptr());
}

/// What was put on the streams of copy engines, up to an event.
class Carried : public c10d::Work {
public:
    Carried(c10::Event done, c10::Device device, std::shared_ptr<Signals> signals)
        : done_(std::move(done)), device_(device), signals_(std::move(signals))
    {
    }

    bool isCompleted() override { return done_.query(); }
    bool isSuccess() const override { return true; }
    void synchronize() override { done_.block(current_stream(device_)); }

    /// Makes the current stream wait, also where it raises: whoever drops the memory calls it for that.
    bool wait(std::chrono::milliseconds) override
    {
        synchronize();
        signals_->check();
        return true;
    }

private:
    c10::Event done_;
    c10::Device device_;
    std::shared_ptr<Signals> signals_;
};

}  // namespace

CopyEngines::CopyEngines(std::shared_ptr<Signals> signals,
                         int64_t rank,
                         std::vector<OwnStream> streams,
                         MappedMemory staging,
                         int64_t slots,
                         int64_t row_bytes,
                         c10::Device device)
    : signals_(std::move(signals)),
      driver_(Driver::get()),
      context_(driver_.context()),
      streams_(streams.begin(), streams.end() - 1),
      gathers_(streams.back()),
      staging_(std::move(staging)),
      shape_{signals_->world(), rank, slots, static_cast<int64_t>(streams.size()) - 3},
      row_bytes_(row_bytes),
      device_(device)
{
    TORCH_CHECK_VALUE(shape_.pulls > 0, "copy engines need a stream that pulls");
    TORCH_CHECK_VALUE(static_cast<int64_t>(staging_.addresses.size()) == shape_.world &&
                          staging_.bytes >= slots * (shape_.world - 1) * row_bytes_,
                      "the staging must have all slots, on every rank");
    TORCH_CHECK(context_, "the calling thread has no CUDA context");
    const auto& words = signals_->words();
    // The driver maps whole pages.
    words_ = driver_.map(words.data_ptr(), (bytes_of(words) + page - 1) / page * page);
}

CopyEngines::~CopyEngines()
{
    try {
        close();
    } catch (const std::exception& error) {
        TORCH_WARN(std::string("DeepCompile could not let go of its signals: ") + error.what());
    }
}

void CopyEngines::close()
{
    std::lock_guard lock(mutex_);
    if (words_ == 0) { return; }
    // The watcher bounds the waits on these streams.
    for (const auto& own : streams_) { own.stream.synchronize(); }
    gathers_.stream.synchronize();
    use_context();
    driver_.unmap(signals_->words().data_ptr());
    words_ = 0;
}

void CopyEngines::use_context() const
{
    // One of autograd's threads may not have used its device yet.
    if (!driver_.context()) { driver_.use(context_); }
}

c10::Event& CopyEngines::event(int64_t index)
{
    if (index >= static_cast<int64_t>(events_.size())) { events_.resize(index + 1); }
    auto& found = events_[index];
    if (!found) { found.emplace(device_.type()); }
    return *found;
}

void CopyEngines::post(const OwnStream& on, Channel channel, uint32_t number)
{
    driver_.write(on.handle, words_ + signals_->offset(shape_.rank, channel), number);
}

void CopyEngines::wait(const OwnStream& on, int64_t peer, Channel channel, uint32_t number)
{
    driver_.wait(on.handle, words_ + signals_->offset(peer, channel), number);
}

// Gradients.

void CopyEngines::reduce(std::vector<Message>& messages, double divisor, Works& works)
{
    RECORD_USER_SCOPE("deepcompile::copy_engines");
    std::lock_guard lock(mutex_);
    at::NoGradGuard no_grad;
    signals_->check();
    TORCH_CHECK(words_, "the copy engines of this group were closed");
    use_context();
    std::vector<int64_t> shard_bytes;
    for (const auto& message : messages) {
        TORCH_CHECK_VALUE(message.contribution.is_contiguous() && message.shard.is_contiguous() &&
                              message.contribution.numel() == shape_.world * message.shard.numel() &&
                              message.contribution.scalar_type() == message.shard.scalar_type(),
                          "a message needs as many contiguous elements of one dtype for each rank");
        shard_bytes.push_back(bytes_of(message.shard));
    }
    const auto portions = cut(shard_bytes, row_bytes_);
    const auto count = static_cast<int64_t>(portions.size());
    const auto first = std::exchange(portions_, portions_ + static_cast<uint32_t>(count));

    const auto ready = record_event(current_stream(device_));
    const auto& adding = streams_[Step::adding].stream;
    ready.block(streams_[Step::staging].stream);
    ready.block(adding);
    // Before a stream waits for them: the watcher bounds these waits also if what follows raises.
    signals_->expect(Channel::staged, portions_);
    if (portions_ > shape_.slots) {
        signals_->expect(Channel::pulled, portions_ - static_cast<uint32_t>(shape_.slots));
    }
    const auto add_work = [&] {
        // Also where a step raised, the caller must wait for all that was put on streams, because it uses the memory of
        // the contributions.
        for (const auto& own : streams_) { record_event(own.stream).block(adding); }
        works.push_back(c10::make_intrusive<Carried>(record_event(adding), device_, signals_));
    };
    try {
        for (const auto& step : schedule(shape_, first, count)) { run(step, portions, messages, 1 / divisor); }
    } catch (...) {
        add_work();
        throw;
    }
    add_work();
}

void CopyEngines::run(const Step& step,
                      const std::vector<Portion>& portions,
                      const std::vector<Message>& messages,
                      double scale)
{
    const auto& on = streams_[step.stream];
    switch (step.act) {
        case Step::mark:
            event(step.event).record(on.stream);
            return;
        case Step::follow:
            event(step.event).block(on.stream);
            return;
        case Step::wait:
            wait(on, step.peer, step.channel, step.number);
            return;
        case Step::post:
            post(on, step.channel, step.number);
            return;
        case Step::stage:
            stage(portions[step.portion], step.slot, messages);
            return;
        case Step::pull:
            pull(on, portions[step.portion], step.peer, step.slot, messages);
            return;
        case Step::add:
            add(portions[step.portion], messages, scale);
            return;
    }
}

void CopyEngines::stage(const Portion& portion, int64_t slot, const std::vector<Message>& messages)
{
    const auto& on = streams_[Step::staging];
    for (const auto& span : portion) {
        const auto from = address_of(messages[span.message].contribution);
        const auto shard_bytes = bytes_of(messages[span.message].shard);
        for (const auto peer : shape_.peers()) {
            const auto row = slot * (shape_.world - 1) + Shape::row(peer, shape_.rank);
            driver_.copy(on.handle,
                         staging_.addresses[shape_.rank] + row * row_bytes_ + span.offset,
                         from + peer * shard_bytes + span.first,
                         span.bytes);
        }
    }
}

void CopyEngines::pull(
    const OwnStream& on, const Portion& portion, int64_t peer, int64_t slot, const std::vector<Message>& messages)
{
    const auto row = slot * (shape_.world - 1) + Shape::row(shape_.rank, peer);
    for (const auto& span : portion) {
        const auto& [contribution, shard] = messages[span.message];
        driver_.copy(on.handle,
                     address_of(contribution) + peer * bytes_of(shard) + span.first,
                     staging_.addresses[peer] + row * row_bytes_ + span.offset,
                     span.bytes);
    }
}

void CopyEngines::add(const Portion& portion, const std::vector<Message>& messages, double scale)
{
    const c10::StreamGuard on_adding(streams_[Step::adding].stream);
    for (const auto& span : portion) {
        const auto& [contribution, shard] = messages[span.message];
        const auto first = span.first / shard.element_size(), numel = span.bytes / shard.element_size();
        add_rows(shard.narrow(0, first, numel), contribution.view({shape_.world, -1}).narrow(1, first, numel), scale);
    }
}

// Parameters.

void CopyEngines::add_flat(MappedMemory flat)
{
    TORCH_CHECK_VALUE(static_cast<int64_t>(flat.addresses.size()) == shape_.world, "each rank has such a memory");
    std::lock_guard lock(mutex_);
    flats_.push_back(std::move(flat));
}

void CopyEngines::forget_flats()
{
    std::lock_guard lock(mutex_);
    flats_.clear();
}

const MappedMemory& CopyEngines::flat_with(uint64_t begin, int64_t bytes) const
{
    const auto found = std::find_if(flats_.begin(), flats_.end(), [&](const MappedMemory& flat) {
        const auto own = flat.addresses[shape_.rank];
        return begin >= own && begin + bytes <= own + flat.bytes;
    });
    TORCH_CHECK_VALUE(found != flats_.end(),
                      "shards that copy engines carry must lie in memory that all ranks have mapped");
    return *found;
}

c10::intrusive_ptr<c10d::Work> CopyEngines::gather(const std::vector<at::Tensor>& runs,
                                                   const std::vector<at::Tensor>& shards)
{
    RECORD_USER_SCOPE("deepcompile::copy_engines_gather");
    std::lock_guard lock(mutex_);
    signals_->check();
    TORCH_CHECK(words_, "the copy engines of this group were closed");
    TORCH_CHECK_VALUE(shards.empty() || shards.size() == runs.size(), "each run needs this rank's shard");
    use_context();
    record_event(current_stream(device_)).block(gathers_.stream);
    const uint32_t number = ++gathers_begun_;
    signals_->expect(Channel::updated, number);
    signals_->expect(Channel::gathered, number);
    post(gathers_, Channel::updated, number);
    for (size_t index = 0; index < shards.size(); ++index) {
        const auto bytes = bytes_of(shards[index]);
        driver_.copy(gathers_.handle, address_of(runs[index]) + shape_.rank * bytes, address_of(shards[index]), bytes);
    }
    for (const auto peer : shape_.peers()) {
        wait(gathers_, peer, Channel::updated, number);
        for (size_t index = 0; index < runs.size(); ++index) {
            const auto& run = runs[index];
            const auto shard = bytes_of(run) / shape_.world;
            TORCH_CHECK_VALUE(run.is_contiguous() && shard * shape_.world == bytes_of(run) &&
                                  (shards.empty() || bytes_of(shards[index]) == shard),
                              "a run must have one equal shard for each rank");
            const auto there = address_of(run) + peer * shard;
            // A peer's shard lies where this rank's memory has room for it, or where this rank's own shard lies.
            const auto like = shards.empty() ? there : address_of(shards[index]);
            const auto& flat = flat_with(like, shard);
            driver_.copy(gathers_.handle, there, flat.addresses[peer] + (like - flat.addresses[shape_.rank]), shard);
        }
    }
    post(gathers_, Channel::gathered, number);
    // Whoever has waited may write this rank's shards next: a hook of the caller's, or code that the caller compiled.
    for (const auto peer : shape_.peers()) { wait(gathers_, peer, Channel::gathered, number); }
    return c10::make_intrusive<Carried>(record_event(gathers_.stream), device_, signals_);
}

void CopyEngines::before_write()
{
    std::lock_guard lock(mutex_);
    signals_->check();
    use_context();
    record_event(gathers_.stream).block(current_stream(device_));
}

}  // namespace deepcompile
