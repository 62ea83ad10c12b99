// Copyright (c) the authors of this fork of DeepSpeed.
// SPDX-License-Identifier: Apache-2.0

#include "deepcompile.h"

#include <shared_mutex>
#include <unordered_map>

namespace deepcompile {

namespace {

// A compiled graph may serve many layers and, through torch's caches, many engines. So each call tells the graph, by
// the engine's number, whose parameters it was given. This map, one for the process, leads from the number to the
// engine's reducer. It holds reducers weakly, because an engine owns its reducer.
std::shared_mutex& registry_mutex()
{
    static std::shared_mutex mutex;
    return mutex;
}

std::unordered_map<int64_t, std::weak_ptr<Reducer>>& registry()
{
    static std::unordered_map<int64_t, std::weak_ptr<Reducer>> reducers;
    return reducers;
}

// A process group matches messages by their order alone. Where one backward goes through two engines that share a
// group, ranks that differ may send the engines' buckets in another order, which neither engine could see by itself.
std::unordered_map<std::string, int64_t>& launches()
{
    static std::unordered_map<std::string, int64_t> counts;
    return counts;
}

}  // namespace

std::shared_ptr<Reducer> find_reducer(int64_t identity)
{
    std::shared_lock lock(registry_mutex());
    const auto found = registry().find(identity);
    return found == registry().end() ? nullptr : found->second.lock();
}

void add_reducer(int64_t identity, const std::shared_ptr<Reducer>& reducer)
{
    std::unique_lock lock(registry_mutex());
    registry()[identity] = reducer;
}

void remove_reducer(int64_t identity)
{
    std::unique_lock lock(registry_mutex());
    registry().erase(identity);
}

int64_t launches_over(const c10d::ProcessGroup& process_group)
{
    std::shared_lock lock(registry_mutex());
    const auto found = launches().find(process_group.getGroupName());
    return found == launches().end() ? 0 : found->second;
}

int64_t count_launch_over(const c10d::ProcessGroup& process_group)
{
    std::unique_lock lock(registry_mutex());
    return ++launches()[process_group.getGroupName()];
}

}  // namespace deepcompile
