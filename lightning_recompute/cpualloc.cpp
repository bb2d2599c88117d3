// A CPU allocator for torch that counts: exact live and peak bytes of CPU tensors, from every thread.
//
// Counting happens in windows. A window counts the blocks allocated since it was opened and nothing older, so
// several users (a callback, a measurement inside a step) never disturb each other, and what a process did before
// does not show. Bytes that were there before can be added by hand (window_adjust).
//
// Each block has a header of 64 bytes in front of the data, which keeps torch's alignment. The header is needed
// because oneDNN calls raw_allocate, which demands that data pointer and deleter context are one and the same.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/alloc_cpu.h>

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <new>

namespace {

constexpr size_t kHeader = 64;
constexpr int kWindows = 8;
constexpr int64_t kClosed = INT64_MAX;
constexpr auto relaxed = std::memory_order_relaxed;

struct Header {
  int64_t size;
  int64_t serial;  // 1, 2, ... in order of allocation
  bool marked;     // allocated between mark(1) and mark(0)
};
static_assert(sizeof(Header) <= kHeader);

struct Window {
  std::atomic<int64_t> live{0}, marked{0};
  std::atomic<int64_t> peak{0}, peak_marked{0}, peak_serial{0};
  std::mutex rising;  // the three peak figures belong to one moment

  void grow(int64_t size, bool is_marked, int64_t serial) {
    const int64_t now = live.fetch_add(size, relaxed) + size;
    if (is_marked) marked.fetch_add(size, relaxed);
    if (now <= peak.load(relaxed)) return;
    const std::lock_guard<std::mutex> lock(rising);
    if (now > peak.load(relaxed)) set_peak(now, serial);
  }
  void shrink(int64_t size, bool is_marked) {
    live.fetch_sub(size, relaxed);
    if (is_marked) marked.fetch_sub(size, relaxed);
  }
  void set_peak(int64_t now, int64_t serial) {
    peak.store(now, relaxed);
    peak_marked.store(marked.load(relaxed), relaxed);
    peak_serial.store(serial, relaxed);
  }
};

Window windows[kWindows];
// first serial that each window counts
std::atomic<int64_t> starts[kWindows] = {kClosed, kClosed, kClosed, kClosed, kClosed, kClosed, kClosed, kClosed};
std::mutex opening;
std::atomic<int64_t> last_serial{0};
std::atomic<bool> marking{false};

// The allocator that was there before, when it is not torch's own; ours then sits on top of it.
c10::Allocator* base = nullptr;

Header* header_of(void* data) { return reinterpret_cast<Header*>(static_cast<char*>(data) - kHeader); }

void release(void* data) {
  if (data == nullptr) return;
  Header* header = header_of(data);
  for (int i = 0; i < kWindows; ++i) {
    if (header->serial >= starts[i].load(relaxed)) windows[i].shrink(header->size, header->marked);
  }
  c10::profiledCPUMemoryReporter().Delete(data);
  base != nullptr ? base->raw_deallocate(header) : c10::free_cpu(header);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (size == 0) return {nullptr, nullptr, &release, cpu};
    void* block = nullptr;
    try {
      block = base != nullptr ? base->raw_allocate(size + kHeader) : c10::alloc_cpu(size + kHeader);
    } catch (c10::Error&) {
      c10::profiledCPUMemoryReporter().OutOfMemory(size);
      throw;
    }
    auto* header = static_cast<Header*>(block);
    *header = {static_cast<int64_t>(size), last_serial.fetch_add(1, relaxed) + 1, marking.load(relaxed)};
    for (int i = 0; i < kWindows; ++i) {
      if (header->serial >= starts[i].load(relaxed)) windows[i].grow(header->size, header->marked, header->serial);
    }
    void* data = static_cast<char*>(block) + kHeader;
    c10::profiledCPUMemoryReporter().New(data, size);
    return {data, data, &release, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};

// Serial of the block that a c10::StorageImpl owns; 0 when it is not from here.
int64_t serial_of(const c10::StorageImpl* storage) {
  const c10::DataPtr& data = storage->data_ptr();
  return data && data.get_deleter() == &release ? header_of(data.get())->serial : 0;
}

// A process forked while another thread held a lock (loader workers are) would wait for it for ever.
void after_fork_in_child() {
  for (Window& window : windows) new (&window.rising) std::mutex;
  new (&opening) std::mutex;
}

}  // namespace

extern "C" {

// Makes the allocator torch's; again is as good as once. 0 when there is one already that cannot be built upon.
int install() {
  static auto* allocator = new CountingAllocator;  // outlives every tensor
  c10::Allocator* before = c10::GetCPUAllocator();
  if (before == allocator) return 1;
  if (base != nullptr) return 0;  // ours is beneath that of somebody else
  if (before != c10::GetDefaultCPUAllocator()) {
    if (before->raw_deleter() == nullptr) return 0;
    base = before;
  }
  pthread_atfork(nullptr, nullptr, &after_fork_in_child);
  c10::SetCPUAllocator(allocator, /*priority=*/255);
  return c10::GetCPUAllocator() == allocator;
}

// Opens a window and returns its number; -1 when all are taken.
int window_open() {
  const std::lock_guard<std::mutex> lock(opening);
  for (int i = 0; i < kWindows; ++i) {
    if (starts[i].load() != kClosed) continue;
    windows[i].live.store(0);
    windows[i].marked.store(0);
    windows[i].set_peak(0, last_serial.load());
    starts[i].store(last_serial.load() + 1);
    return i;
  }
  return -1;
}
void window_close(int i) { starts[i].store(kClosed); }
int64_t window_live(int i) { return windows[i].live.load(); }
int64_t window_marked(int i) { return windows[i].marked.load(); }
int64_t window_peak(int i) { return windows[i].peak.load(); }
int64_t window_peak_marked(int i) { return windows[i].peak_marked.load(); }
void window_reset_peak(int i) {
  const std::lock_guard<std::mutex> lock(windows[i].rising);
  windows[i].set_peak(windows[i].live.load(), last_serial.load());
}
// Adds (size > 0) or takes away (size < 0) bytes that the window does not count by itself.
void window_adjust(int i, int64_t size) {
  size > 0 ? windows[i].grow(size, false, last_serial.load()) : windows[i].shrink(-size, false);
}
// Whether the window counts the storage by itself.
int window_counts(int i, const void* storage) {
  return serial_of(static_cast<const c10::StorageImpl*>(storage)) >= starts[i].load();
}
// Whether the storage was there already when the peak was reached; true for one that is not from here.
int window_at_peak(int i, const void* storage) {
  return serial_of(static_cast<const c10::StorageImpl*>(storage)) <= windows[i].peak_serial.load();
}
// Blocks allocated from now on are marked, or not.
void mark(int on) { marking.store(on != 0); }

}  // extern "C"
