#include "streams.h"

#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <thread>
#include <vector>

namespace emulated {
namespace {

struct FirstError {
  std::mutex mutex;
  std::exception_ptr error;
};

FirstError& first_error() {
  static auto* first = new FirstError;
  return *first;
}

void keep_first_error(std::exception_ptr error) {
  std::lock_guard<std::mutex> lock(first_error().mutex);
  if (!first_error().error) first_error().error = error;
}

void raise_first_error() {
  std::exception_ptr error;
  {
    std::lock_guard<std::mutex> lock(first_error().mutex);
    std::swap(error, first_error().error);
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace

void Mark::set() {
  std::lock_guard<std::mutex> lock(mutex_);
  time_ = Clock::now();
  done_ = true;
  changed_.notify_all();
}

void Mark::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return done_; });
}

bool Mark::done() {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_;
}

Clock::time_point Mark::time() {
  std::lock_guard<std::mutex> lock(mutex_);
  return time_;
}

Queue::Queue(c10::Stream stream) : stream_(stream) {
  std::thread([this] { run(); }).detach();  // queues live as long as the process
}

void Queue::launch(Task task) {
  std::lock_guard<std::mutex> lock(mutex_);
  tasks_.push_back(std::move(task));
  changed_.notify_all();
}

std::shared_ptr<Mark> Queue::mark() {
  auto mark = std::make_shared<Mark>();
  launch([mark] { mark->set(); });
  return mark;
}

void Queue::await(std::shared_ptr<Mark> mark) {
  launch([mark] { mark->wait(); });
}

bool Queue::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return tasks_.empty() && !busy_;
}

void Queue::synchronize() {
  wait_without_gil([&] {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return tasks_.empty() && !busy_; });
  });
  raise_first_error();
}

void Queue::delay(const Delays& delays) {
  std::lock_guard<std::mutex> lock(mutex_);
  delays_ = delays;
  random_.seed(delays.seed * 1000003 + stream_.device_index() * 1009 + static_cast<uint64_t>(stream_.id()));
}

void Queue::run() {
  at::init_num_threads();
  at::set_num_threads(1);
  c10::GradMode::set_enabled(false);
  exchange_device(stream_.device_index());
  exchange_stream(stream_);
  while (true) {
    Task task;
    int pause = 0;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      busy_ = false;
      changed_.notify_all();
      changed_.wait(lock, [this] { return !tasks_.empty(); });
      task = std::move(tasks_.front());
      tasks_.pop_front();
      busy_ = true;
      if (delays_.share > 0 && std::uniform_real_distribution<>(0, 1)(random_) < delays_.share)
        pause = std::uniform_int_distribution<>(0, delays_.microseconds)(random_);
    }
    if (pause > 0) std::this_thread::sleep_for(std::chrono::microseconds(pause));
    try {
      task();
    } catch (...) {
      keep_first_error(std::current_exception());
    }
  }
}

namespace {

struct Streams {
  std::mutex mutex;
  std::map<std::pair<int, int64_t>, Queue*> queues;  // never deleted: their threads run until the process ends
  int64_t next = 1;
  Delays delays;
};

Streams& streams() {
  static Streams* all = new Streams;
  return *all;
}

thread_local c10::DeviceIndex device_here = 0;
thread_local int64_t stream_here[DEVICES] = {};

c10::Stream stream(c10::DeviceIndex device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::PrivateUse1, device), id);
}

}  // namespace

c10::DeviceIndex current_device() { return device_here; }

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  TORCH_CHECK(device < DEVICES, "invalid device ordinal");
  auto old = device_here;
  if (device >= 0) device_here = device;
  return old;
}

c10::Stream current_stream(c10::DeviceIndex device) {
  if (device < 0) device = device_here;
  return stream(device, stream_here[device]);
}

c10::Stream exchange_stream(c10::Stream next) {
  auto old = current_stream(next.device_index());
  stream_here[next.device_index()] = next.id();
  return old;
}

c10::Stream new_stream(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(streams().mutex);
  return stream(device < 0 ? device_here : device, streams().next++);
}

Queue& queue_of(c10::Stream of) {
  std::lock_guard<std::mutex> lock(streams().mutex);
  auto& found = streams().queues[{of.device_index(), of.id()}];
  if (found == nullptr) {
    found = new Queue(of);
    found->delay(streams().delays);
  }
  return *found;
}

Queue& current_queue(c10::DeviceIndex device) { return queue_of(current_stream(device)); }

void synchronize_device(c10::DeviceIndex device) {
  std::vector<Queue*> found;
  {
    std::lock_guard<std::mutex> lock(streams().mutex);
    for (auto& [key, queue] : streams().queues)
      if (key.first == (device < 0 ? device_here : device)) found.push_back(queue);
  }
  for (auto* queue : found) queue->synchronize();
}

void delay_all(const Delays& delays) {
  std::lock_guard<std::mutex> lock(streams().mutex);
  streams().delays = delays;
  for (auto& [key, queue] : streams().queues) queue->delay(delays);
}

void wait_without_gil(const std::function<void()>& wait) {
  if (Py_IsInitialized() && PyGILState_Check()) {
    pybind11::gil_scoped_release released;
    wait();
  } else {
    wait();
  }
}

}  // namespace emulated
