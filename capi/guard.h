// What every function of scruple.h begins and ends with: nothing is thrown across it, nothing null is followed.
#pragma once

#include <exception>
#include <new>

#include "engine/failure.h"
#include "engine/float_environment.h"

namespace scruple {

// Keeps the message for scruple_last_error().
scruple_status failed(scruple_status status, const char* message) noexcept;

// Runs body in the default floating-point environment; turns whatever it throws into a status and a message.
template <class Body>
scruple_status guarded(const Body& body) noexcept {
  const DefaultFloatEnvironment environment;
  try {
    body();
    return SCRUPLE_OK;
  } catch (const Failure& failure) {
    return failed(failure.status, failure.what());
  } catch (const std::bad_alloc&) {
    return failed(SCRUPLE_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& error) {
    return failed(SCRUPLE_INTERNAL, error.what());
  }
}

template <class T>
T& required(T* pointer, const char* what) {
  if (pointer == nullptr) fail(SCRUPLE_INVALID, what, " is null");
  return *pointer;
}

}  // namespace scruple
