// What the functions that Python calls have in common: no exception leaves them.
#pragma once

#define TRIMTAB_EXPORT extern "C" __attribute__((visibility("default")))

namespace trimtab {

// 0 is success, 1 that memory or threads are lacking: nothing else throws.
template <class Function>
int guarded(Function function) noexcept {
  try {
    function();
    return 0;
  } catch (...) {
    return 1;
  }
}

}  // namespace trimtab
