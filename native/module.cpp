// Python bindings of the engine. Calls that can block release the GIL. The ring's thread never
// takes the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <memory>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "request.hpp"
#include "uring_engine.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using tierstore::Outcome;
using tierstore::Request;
using tierstore::Transfer;
using tierstore::UringEngine;
using tierstore::Verdict;

namespace {

// A transfer as seen by Python. A std::shared_ptr converted from a Python object takes the GIL
// when its last copy is destroyed, which may happen on the ring's thread; this one does not.
struct Ticket {
  std::shared_ptr<Transfer> transfer = std::make_shared<Transfer>();
};

void submit(UringEngine& engine, const Ticket& ticket, bool is_write, int fd, uint64_t address,
            uint64_t nbytes, uint64_t offset) {
  engine.submit(ticket.transfer, is_write, fd, address, nbytes, offset);
}

void submit_sync(UringEngine& engine, const Ticket& ticket, std::vector<int> fds) {
  engine.submit_sync(ticket.transfer, std::move(fds));
}

void submit_register(UringEngine& engine, const Ticket& ticket, uint64_t address,
                     uint64_t nbytes) {
  engine.submit_register(ticket.transfer, address, nbytes);
}

// Signals are handled between two slices of a wait: Ctrl-C ends the wait, not the transfer.
constexpr std::chrono::milliseconds kSlice{100};

void check_signals() {
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

nb::tuple wait_for_ticket(UringEngine& engine, const Ticket& ticket) {
  for (;;) {
    std::optional<Outcome> outcome;
    {
      const nb::gil_scoped_release released;
      outcome = engine.wait(ticket.transfer, kSlice);
    }
    if (outcome) return nb::make_tuple(outcome->error, outcome->failed_at);
    check_signals();
  }
}

void close_engine(UringEngine& engine) {
  for (;;) {
    {
      const nb::gil_scoped_release released;
      if (engine.close(kSlice)) return;
    }
    check_signals();
  }
}

}  // namespace

NB_MODULE(_native, m) {
  // A program may end with a storage still open: that is not a leak to report.
  nb::set_leak_warnings(false);
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const std::system_error& error) {
      const nb::object arguments = nb::make_tuple(error.code().value(), error.what());
      PyErr_SetObject(PyExc_OSError, arguments.ptr());
    }
  });

  m.attr("RETRIES_MAX") = tierstore::kRetriesMax;

  nb::enum_<Verdict>(m, "Verdict")
      .value("DONE", Verdict::kDone)
      .value("RESUBMIT", Verdict::kResubmit)
      .value("FAILED", Verdict::kFailed);

  nb::class_<Request>(m, "Request")
      .def(nb::init<uint64_t, uint64_t>(), "offset"_a, "nbytes"_a)
      .def("complete", &Request::complete, "result"_a)
      .def_prop_ro("offset", &Request::offset)
      .def_prop_ro("bytes_remaining", &Request::bytes_remaining)
      .def_prop_ro("error", &Request::error);

  nb::class_<Ticket>(m, "Ticket")
      .def(nb::init<>())
      .def_prop_ro("ended", [](const Ticket& self) { return self.transfer->ended.load(); });

  nb::class_<UringEngine>(m, "UringEngine")
      .def(nb::init<unsigned, uint64_t>(), "queue_depth"_a, "request_bytes"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("submit", &submit, "ticket"_a, "is_write"_a, "fd"_a, "address"_a, "nbytes"_a,
           "offset"_a)
      .def("submit_sync", &submit_sync, "ticket"_a, "fds"_a)
      .def("submit_register", &submit_register, "ticket"_a, "address"_a, "nbytes"_a)
      .def("wait", &wait_for_ticket, "ticket"_a)
      .def("close", &close_engine)
      .def("abandon", &UringEngine::abandon);
}
