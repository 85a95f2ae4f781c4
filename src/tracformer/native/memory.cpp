// Moves existing weights to large pages. A step of generation reads all of them in order; with
// small pages it waits for page tables every few microseconds, and prefetching stops at each page's
// end.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace tracformer {
namespace {

constexpr uintptr_t kSmall = 1 << 12, kLarge = 1 << 21;

#if defined(__linux__)
#if !defined(MADV_COLLAPSE)
#define MADV_COLLAPSE 25  // Linux 6.1
#endif

void ask(uintptr_t from, uintptr_t to) {
  void* start = reinterpret_cast<void*>(from);
  if (madvise(start, to - from, MADV_HUGEPAGE) == 0) madvise(start, to - from, MADV_COLLAPSE);  // only advice: a refusal changes nothing
}
#else
void ask(uintptr_t, uintptr_t) {}
#endif

// Called once for each range: the call is slow even if the pages are already large.
void large_pages(at::TensorList tensors) {
  std::vector<std::pair<uintptr_t, uintptr_t>> ranges;
  for (const at::Tensor& each : tensors)
    if (each.is_contiguous()) {
      const auto start = reinterpret_cast<uintptr_t>(each.const_data_ptr());
      ranges.emplace_back(start, start + each.nbytes());
    }
  std::sort(ranges.begin(), ranges.end());
  std::vector<std::pair<uintptr_t, uintptr_t>> joined;  // neighbouring ranges share pages
  for (const auto& range : ranges)
    if (!joined.empty() && range.first <= joined.back().second + kSmall)
      joined.back().second = std::max(joined.back().second, range.second);
    else
      joined.push_back(range);
  static std::mutex lock;
  static std::set<std::pair<uintptr_t, uintptr_t>> asked;
  const std::lock_guard<std::mutex> guard(lock);
  for (const auto& [begin, end] : joined) {
    const uintptr_t from = (begin + kLarge - 1) / kLarge * kLarge, to = end / kLarge * kLarge;
    if (from < to && asked.emplace(from, to).second) ask(from, to);
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tracformer, m) { m.def("large_pages(Tensor[] tensors) -> ()"); }

TORCH_LIBRARY_IMPL(tracformer, CPU, m) { m.impl("large_pages", large_pages); }

}  // namespace tracformer
