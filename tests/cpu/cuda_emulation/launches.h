// Kernels by name, each called with CUDA's own array of arguments.
#ifndef SUBTEN_LAUNCHES_H
#define SUBTEN_LAUNCHES_H

#include <functional>
#include <map>
#include <string>
#include <type_traits>
#include <utility>

namespace emulation {

using Launch = std::function<void(void**)>;

template <class... Args, size_t... I>
Launch unpack(void (*kernel)(Args...), std::index_sequence<I...>) {
    return [kernel](void** args) { kernel(*reinterpret_cast<std::decay_t<Args>*>(args[I])...); };
}

template <class... Args>
Launch unpack(void (*kernel)(Args...)) {
    return unpack(kernel, std::index_sequence_for<Args...>{});
}

}  // namespace emulation

#endif
