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

}  // namespace deepcompile
