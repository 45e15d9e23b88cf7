// A run's folder: what a new run may replace, and what is known of an earlier one.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/files.h"
#include "train/run/folder.h"

namespace scruple_tests {
namespace {

namespace fs = std::filesystem;
using namespace scruple::train;

class RunFolders : public Files {};

// Else the new run would write its metrics beside what is left of the old one.
TEST_F(RunFolders, WhatCannotBeReplacedOnceIsNotReplacedTheSecondTime) {
  put("{\"step\":1,\"loss\":2}\n", "metrics.jsonl");
  put("page", "report.html");
  RunFolder run(path(""));
  run.claim(/*replace=*/true);
  fs::remove(path("report.html"));
  fs::create_directories(path("report.html/full"));
  EXPECT_ANY_THROW(run.begin());
  EXPECT_ANY_THROW(run.begin());
  fs::remove_all(path("report.html"));
  EXPECT_NO_THROW(run.begin());
}

// It is a log: what of it cannot be read is not known, and keeps no run from going on.
TEST_F(RunFolders, AnotherTypeInALineIsNotKnown) {
  put(R"({"step":1,"loss":2,"lr":1,"skipped":null,"outlier":"yes","skipped_tensors":"3"})"
      "\n"
      R"({"step":2,"loss":3,"lr":1,"skipped":true,"unmoved":0.5,"unmoved_most":0.6,"unmoved_tensor":7})"
      "\n",
      "metrics.jsonl");
  const Record record = read_metrics(path(""), 2);
  ASSERT_EQ(record.steps.size(), 2u);
  EXPECT_EQ(record.steps[0].loss, 2);
  EXPECT_FALSE(record.steps[0].skipped || record.steps[0].outlier);
  EXPECT_EQ(record.steps[0].tensors, 0);
  EXPECT_TRUE(record.steps[1].skipped);
  ASSERT_EQ(record.unmoved.size(), 1u);
  EXPECT_EQ(record.unmoved[0].second.tensor, "");
}

}  // namespace
}  // namespace scruple_tests
