// Streams of the emulated accelerator. A stream is a queue of tasks with a thread of its own: the host launches a task
// and goes on, and the task runs later, after all that was launched on the stream before it.
#pragma once

#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <random>

namespace emulated {

constexpr int DEVICES = 8;
using Task = std::function<void()>;
using Clock = std::chrono::steady_clock;

// A point in a queue. Done when everything launched before it has run.
class Mark {
 public:
  void set();
  void wait();  // blocks the calling thread
  bool done();
  Clock::time_point time();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  Clock::time_point time_;
};

// How long tasks are delayed: with probability `share`, up to `microseconds`, drawn from `seed`.
struct Delays {
  uint64_t seed = 0;
  double share = 0;
  int microseconds = 0;
};

class Queue {
 public:
  explicit Queue(c10::Stream stream);
  void launch(Task task);
  std::shared_ptr<Mark> mark();
  void await(std::shared_ptr<Mark> mark);  // what is launched from now on runs after `mark`
  bool idle();
  void synchronize();  // the host waits; the first error of any stream's task is raised here
  void delay(const Delays& delays);

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool busy_ = false;
  Delays delays_;
  std::mt19937_64 random_;
  const c10::Stream stream_;
};

c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream new_stream(c10::DeviceIndex device);
Queue& queue_of(c10::Stream stream);
Queue& current_queue(c10::DeviceIndex device);
void synchronize_device(c10::DeviceIndex device);
void delay_all(const Delays& delays);
void wait_without_gil(const std::function<void()>& wait);  // tasks may need Python's lock

}  // namespace emulated
