// The trainer on a GPU against the trainer on the CPU, and against itself: graphs, offloading and gradients that are handed
// over in several pieces give the same bits. What holds on every device is in trainer_test.cpp.
#include "tests/cuda_trainer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>

#include "tests/descriptions.h"
#include "train/cuda/inputs.h"
#include "train/cuda/outbox.h"
#include "train/cuda/products.h"
#include "train/run/trainer.h"

namespace scruple::train {
namespace {

// A batch of documents that begin anywhere, with targets that do not count.
struct Documents {
  explicit Documents(const Description& model, std::int64_t batch, int which = 0) {
    const std::int64_t rows = batch * model.context;
    std::int32_t start = 0;
    for (std::int64_t i = 0; i < rows; ++i) {
      const auto here = static_cast<std::int32_t>(i % model.context);
      if (here == 0 || (i + which) % 11 == 7 || i % 17 == 3) start = here;
      starts.push_back(start);
      tokens.push_back(static_cast<std::int32_t>((i * i + which) * 31 % 97 * 7919 % model.vocabulary));
      targets.push_back((i + which) % 5 == 0 ? -1
                                             : static_cast<std::int32_t>((i * 53 + 11) % model.vocabulary));
    }
  }
  Batch batch() const { return {tokens.data(), targets.data(), starts.data()}; }
  void let_only_last_count(std::int64_t count) {
    std::fill(targets.begin(), targets.end() - std::min(count, std::ssize(targets)), -1);
  }
  std::vector<std::int32_t> tokens, targets, starts;
};

Computed gradients_of(const Description& shape, OpenBackend open, Precision activations,
                      scruple_policy policy, std::int64_t batch = 3,
                      std::int64_t counting = std::numeric_limits<std::int64_t>::max()) {
  Job job = job_of(shape, open, "fp32", activations);
  job.batch = batch;
  job.threads = 0;
  job.initial = spread_values(shape);
  job.gradients.policy = policy;
  Documents documents(shape, batch);
  documents.let_only_last_count(counting);
  return computed_by(job, documents.batch());
}

double norm_of(const std::vector<float>& values) {
  double squares = 0;
  for (const float value : values) squares += static_cast<double>(value) * static_cast<double>(value);
  return std::sqrt(squares);
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  std::vector<float> apart(a);
  for (std::size_t i = 0; i < a.size(); ++i) apart[i] -= b[i];
  return norm_of(apart);
}

void expect_alike(const Computed& got, const Computed& want, const Description& shape, double loss,
                  double gradient, double small = 0) {
  EXPECT_NEAR(got.loss, want.loss, loss * want.loss);
  EXPECT_NEAR(got.loss, got.validated, 1e-12) << "validation and training compute the same loss";
  const std::vector<Parameter> parameters = parameters_of(shape);
  double largest = 0;
  for (const std::vector<float>& values : want.gradients) largest = std::max(largest, norm_of(values));
  for (std::size_t p = 0; p < parameters.size(); ++p)
    EXPECT_LT(distance(got.gradients[p], want.gradients[p]),
              gradient * (norm_of(want.gradients[p]) + small * largest) + 1e-12)
        << parameters[p].name;
}

// In 16 bits a gradient is also allowed a part of the largest: what a bias of keys gets nearly cancels, and what is left
// is rounding.
constexpr double kSmall = 0.05;

TEST_F(CudaTrainer, GradientsAreTheCpusInEveryFamily) {
  for (const SmallModel& family : small_models()) {
    SCOPED_TRACE(family.name);
    const Computed want = gradients_of(family.shape, cpu_backend, Precision::fp32, SCRUPLE_STORED);
    for (const scruple_policy policy : {SCRUPLE_STORED, SCRUPLE_RELEASED}) {
      expect_alike(gradients_of(family.shape, cuda_backend, Precision::fp32, policy), want, family.shape,
                   1e-6, 1e-4);
      expect_alike(gradients_of(family.shape, cuda_backend, Precision::bf16, policy), want, family.shape,
                   3e-3, 3e-2, kSmall);
    }
    expect_alike(gradients_of(family.shape, cuda_backend, Precision::fp16, SCRUPLE_STORED), want,
                 family.shape, 1e-3, 2e-2, kSmall);
  }
}

// Sizes that are no multiples of anything.
TEST_F(CudaTrainer, GradientsAreTheCpusForOddSizes) {
  const Description shape = other_parts({2, 66, 3, 37, 259}, 1, 22);
  expect_alike(gradients_of(shape, cuda_backend, Precision::fp32, SCRUPLE_RELEASED),
               gradients_of(shape, cpu_backend, Precision::fp32, SCRUPLE_STORED), shape, 1e-6, 1e-4);
}

// A vocabulary whose logits do not exist at once, and gradients that go in pieces.
TEST_F(CudaTrainer, GradientsAreTheCpusWhereTheyComeInParts) {
  for (const bool tied : {true, false}) {
    Description shape = llama(1);
    shape.vocabulary = 1 << 20, shape.width = 40, shape.head_width = 10, shape.tied = tied;
    const auto check = [&](Precision type, std::int64_t batch, double loss, double gradient, double small) {
      SCOPED_TRACE((tied ? "tied, " : "not tied, ") + std::to_string(batch));
      expect_alike(gradients_of(shape, cuda_backend, type, SCRUPLE_RELEASED, batch),
                   gradients_of(shape, cpu_backend, Precision::fp32, SCRUPLE_RELEASED, batch), shape, loss,
                   gradient, small);
    };
    // Of 40 rows each: at most one row for each column, or more; 128 rows of logits at once, or 256 where they are small.
    for (const std::int64_t batch : {1, 5}) check(Precision::fp32, batch, 1e-6, 1e-4, 0);
    check(Precision::bf16, 7, 3e-3, 3e-2, kSmall);
  }
}

// The head leaves rows without a target out: most, some, all or none; where its gradient is a sum and where not.
TEST_F(CudaTrainer, GradientsAreTheCpusForAnyNumberOfTargets) {
  for (const Description& shape : {gpt2({2, 64, 4, kFamilyContext, 257}), llama(2)})
    for (const std::int64_t rows : {0, 1, 9, 40, 3 * static_cast<int>(kFamilyContext)}) {
      SCOPED_TRACE(std::to_string(rows));
      const Computed want = gradients_of(shape, cpu_backend, Precision::fp32, SCRUPLE_STORED, 3, rows);
      expect_alike(gradients_of(shape, cuda_backend, Precision::fp32, SCRUPLE_STORED, 3, rows), want, shape,
                   1e-6, 1e-4);
      expect_alike(gradients_of(shape, cuda_backend, Precision::bf16, SCRUPLE_RELEASED, 3, rows), want, shape,
                   3e-3, 3e-2, kSmall);
    }
}

// Products have few shapes, with room for a row that counts for nothing.
TEST(CudaPlan, TheHeadHasAFewNumbersOfRows) {
  for (const std::int64_t rows : {1, 8, 24, 120, 1000, 16384}) {
    std::set<std::int64_t> shapes;
    for (std::int64_t counted = 0; counted <= rows; ++counted) {
      const std::int64_t found = cuda::Inputs::head_rows(rows, counted);
      EXPECT_TRUE(found == rows || (found > counted && found < rows && found % 8 == 0));
      EXPECT_LE(found, counted + (rows + 63) / 64 * 8);
      shapes.insert(found);
    }
    EXPECT_LE(shapes.size(), 8u);
  }
}

TEST_F(CudaTrainer, CurvesAreTheCpus) {
  const std::vector<double> cpu = take(job_of(llama(), cpu_backend), 50).losses;
  const std::vector<double> fp32 = take(job_of(llama(), cuda_backend), 50).losses;
  const std::vector<double> bf16 = take(job_of(llama(), cuda_backend, "fp32", Precision::bf16), 50).losses;
  for (std::size_t i = 0; i < cpu.size(); ++i) {
    EXPECT_NEAR(fp32[i], cpu[i], 1e-4 * cpu[i]) << "step " << i + 1;
    EXPECT_NEAR(bf16[i], cpu[i], 2e-2 * cpu[i]) << "step " << i + 1;
  }
  EXPECT_LT(cpu.back(), 0.8 * cpu.front()) << "curves that do not fall show nothing";
}

TEST_F(CudaTrainer, GraphsGiveTheSameBits) {
  for (const char* recipe : {"scruple", "lpmm"})
    for (const SmallModel& family : small_models())
      for (const scruple_policy policy : {SCRUPLE_STORED, SCRUPLE_RELEASED}) {
        Job job = job_of(family.shape, cuda_backend, recipe, Precision::bf16);
        job.gradients.policy = policy;
        const Taken with = take(job, 6);
        job.graphs = false;
        expect_same(take(job, 6), with,
                    std::string(recipe) + ", " + family.name + ", policy " + std::to_string(policy));
      }
}

// ---- Weights in codes ----

// lpmm with weights of this format in every tensor, the smallest too.
Describe all_coded(const std::string& weights) {
  return [weights](const Optimizer& optimizer, std::int64_t size) {
    scruple_tensor row = describe_by("lpmm")(optimizer, std::int64_t{1} << 20);
    row.size = size;
    check(scruple_tensor_set_format(&row, "weights", weights.c_str()));
    return row;
  };
}
// The same with plain weights of this type where they are coded, and all else in fp32.
Describe plain(const Describe& coded, Precision type) {
  return [=](const Optimizer& optimizer, std::int64_t size) {
    scruple_tensor row = coded(optimizer, size);
    for (const char* which : {"moments", "gradient"}) check(scruple_tensor_set_format(&row, which, "fp32"));
    if (info_of(row.arrays[SCRUPLE_WEIGHT].format).aux_is_scale != 0)
      check(scruple_tensor_set_format(&row, "weights", kPrecisions[static_cast<int>(type)]));
    check(scruple_tensor_set_rounding(&row, "weights", "nearest"));
    return row;
  };
}
const std::pair<const char*, Describe> kCoded[] = {{"lpmm", describe_by("lpmm")},
                                                   {"int12 everywhere", all_coded("int12")},
                                                   {"int8 everywhere", all_coded("int8")}};

// Loss and gradients are those of the decoded weights, to the bit; also where the head's table is padded.
TEST_F(CudaTrainer, CodedWeightsAreTheirValues) {
  std::vector<SmallModel> models = small_models();
  models.push_back({"257 tokens", gpt2({2, 64, 4, kFamilyContext, 257})});
  for (const SmallModel& family : models)
    for (const auto& [name, describe] : kCoded)
      for (const Precision type : {Precision::fp32, Precision::bf16, Precision::fp16})
        for (const scruple_policy policy : {SCRUPLE_STORED, SCRUPLE_RELEASED}) {
          SCOPED_TRACE(std::string(family.name) + ", " + name + ", " + kPrecisions[static_cast<int>(type)] +
                       ", policy " + std::to_string(policy));
          Job job = job_of(family.shape, cuda_backend, "lpmm", type);
          job.gradients.policy = policy;
          job.initial = spread_values(family.shape);
          job.describe = [coded = describe](const Optimizer& optimizer, std::int64_t size) {
            scruple_tensor row = plain(coded, Precision::fp32)(optimizer, size);
            row.arrays[SCRUPLE_WEIGHT] = coded(optimizer, size).arrays[SCRUPLE_WEIGHT];
            return row;
          };
          std::vector<std::vector<float>> values;
          {
            const Passes passes(job);
            for (std::size_t p = 0; p < passes.state.table().size(); ++p)
              values.push_back(passes.state.master(static_cast<int>(p)));
          }
          const Documents documents(family.shape, job.batch);
          const Computed got = computed_by(job, documents.batch());
          job.describe = plain(describe, type);
          job.initial = [&](int which, std::int64_t first, std::int64_t count, float* to) {
            std::copy_n(values[static_cast<std::size_t>(which)].begin() + first, count, to);
          };
          const Computed want = computed_by(job, documents.batch());
          EXPECT_EQ(got.loss, want.loss);
          EXPECT_EQ(got.validated, want.validated);
          EXPECT_TRUE(got.gradients == want.gradients);
          EXPECT_GT(want.loss, 1.0) << "a model that is nothing shows nothing";
        }
}

// A job's weights, moments and accumulators on its device, and a sink that is fed by hand.
struct Fed {
  explicit Fed(const Job& job)
      : backend(job.backend(job.threads)),
        optimizer(job.optimizer()),
        state(
            *backend, parameters_of(job.shape), [this](auto) -> const Optimizer& { return optimizer; },
            job.describe, ledger),
        rows(state.table()) {
    state.start(job.initial, ledger);
    std::int64_t largest = 0;
    for (scruple_tensor& row : rows) {
      largest = std::max(largest, row.size);
      if (job.gradients.policy == SCRUPLE_RELEASED) continue;
      scruple_array& gradient = row.arrays[SCRUPLE_GRADIENT];
      const PlaneBytes bytes = plane_bytes(gradient.format, row.size);
      gradient.codes = planes.emplace_back(ledger, "gradients", bytes.codes, backend->memory()).as<void>();
      if (bytes.aux > 0)
        gradient.aux = planes.emplace_back(ledger, "scales", bytes.aux, backend->memory()).as<void>();
    }
    incoming = Block(ledger, "gradients", largest * Index{sizeof(float)}, backend->memory());
    sink.emplace(backend->engine(), rows, job.gradients);
  }
  using Index = std::int64_t;

  // Gradients that depend on their number alone: in fp32, or their upper halves as bf16; whole, or in two pieces.
  void micro_batch(int number) {
    for (std::size_t p = 0; p < rows.size(); ++p) {
      const Index size = rows[p].size, cut = size > 256 && number % 2 == 1 ? size / 256 * 128 : size;
      std::vector<float> values(static_cast<std::size_t>(size));
      std::vector<std::uint16_t> halves(values.size());
      for (std::size_t i = 0; i < values.size(); ++i) {
        const auto mixed = (i + p * 7919 + static_cast<std::size_t>(number) * 104729) * 0x9e3779b97f4a7c15u;
        values[i] = (static_cast<float>(mixed >> 40) / (1 << 24) - 0.5f) * (i % 5 == 0 ? 1.0f : 0.01f);
        halves[i] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(values[i]) >> 16);
      }
      const bool wide = (static_cast<std::size_t>(number) + p) % 3 != 0;
      const Index each = wide ? 4 : 2;
      backend->engine().synchronize();  // what was there has been read
      backend->memory().write(incoming.as<void>(), wide ? static_cast<void*>(values.data()) : halves.data(),
                              size * each);
      for (const auto& [first, count] : {std::pair{Index{0}, cut}, std::pair{cut, size - cut}})
        if (count > 0)
          sink->add(static_cast<Index>(p), first, count, incoming.as<char>() + first * each,
                    wide ? "fp32" : "bf16");
    }
    sink->end();
  }
  std::vector<std::vector<char>> bytes() { return bytes_of(*backend, rows); }

  Ledger ledger;
  const std::unique_ptr<Backend> backend;
  const Optimizer optimizer;
  State state;
  std::vector<scruple_tensor> rows;
  std::vector<Block> planes;
  Block incoming;
  std::optional<Sink> sink;
};

// Of weights, momentum and accumulators, after every micro-batch.
TEST_F(CudaTrainer, TheSameGradientsGiveTheBitsOfTheCpu) {
  for (const SmallModel& family : small_models())
    for (const char* rule : {"sgd", "sgdw", "lion"})
      for (const scruple_policy policy : {SCRUPLE_STORED, SCRUPLE_RELEASED})
        for (const auto& [name, describe] : kCoded) {
          SCOPED_TRACE(std::string(family.name) + ", " + rule + ", " + name + ", policy " +
                       std::to_string(policy));
          Job job = job_of(family.shape, cpu_backend, "lpmm");
          job.describe = describe;
          job.initial = spread_values(family.shape);
          job.optimizer = [rule] {
            Optimizer optimizer(rule);
            optimizer.set("lr", 0.05);
            optimizer.set("weight_decay", 0.01);
            if (std::string(rule) != "lion") optimizer.set("momentum", 0.9);
            return optimizer;
          };
          job.gradients.policy = policy;
          if (policy == SCRUPLE_STORED) job.gradients.micro_batches = 3, job.gradients.max_norm = 1;
          Fed host(job);
          job.backend = cuda_backend;
          Fed gpu(job);
          const std::vector<std::vector<char>> first = host.bytes();
          ASSERT_TRUE(gpu.bytes() == first) << "first weights";
          for (int number = 0; number < 7; ++number) {
            host.micro_batch(number), gpu.micro_batch(number);
            ASSERT_TRUE(gpu.bytes() == host.bytes()) << "after micro-batch " << number;
          }
          EXPECT_FALSE(host.bytes() == first);
        }
}

// A model whose gradients fill the outbox's buffer several times in a pass.
class SeveralHandings : public CudaTrainer {
 protected:
  static constexpr int kSteps = 20;

  static Description shape_of(bool tied) {
    Description model = llama(3);
    model.width = 768, model.heads = 6, model.kv_heads = 2, model.head_width = 128, model.inner = 2048;
    model.tied = model.qkv_bias = model.head_norms = tied;
    return model;
  }
  static Job job_for(const Description& shape) {
    Job job = job_of(shape, cuda_backend, "scruple", Precision::bf16);
    job.initial = spread_values(shape);
    job.gradients.policy = SCRUPLE_RELEASED;
    return job;
  }
};

TEST_F(SeveralHandings, GiveTheGradientsOfTheCpu) {
  const Description shape = shape_of(true);
  const Computed want = gradients_of(shape, cpu_backend, Precision::fp32, SCRUPLE_STORED);
  for (const scruple_policy policy : {SCRUPLE_STORED, SCRUPLE_RELEASED})
    expect_alike(gradients_of(shape, cuda_backend, Precision::fp32, policy), want, shape, 1e-6, 1e-4);
}

TEST_F(SeveralHandings, GiveTheBitsOfStoredGradients) {
  for (const bool tied : {false, true}) {
    const Description shape = shape_of(tied);
    const std::vector<Parameter> parameters = parameters_of(shape);
    std::int64_t all = 0;
    for (const Parameter& parameter : parameters) all += 2 * parameter.size();
    ASSERT_GT(all, 2 * cuda_backend(0)->released_bytes(parameters, Precision::bf16))
        << "one handing shows nothing";
    Job job = job_for(shape);
    job.describe = describe_by("scruple", "fp32");
    Job other = job;
    other.gradients.policy = SCRUPLE_STORED;
    const Taken want = take(other, kSteps);
    const std::string name = tied ? "tied" : "not tied";
    expect_same(take(job, kSteps), want, name);
    other = job;
    other.graphs = false;
    expect_same(take(other, kSteps), want, name + ", no graphs");
    other.recompute = Recompute::block;  // reads weights again, between the steps of others
    expect_same(take(other, kSteps), want, name + ", no graphs, computed again");
  }
}

// What stored gradients cannot: clipped one by one, a loss scale that overflows, micro-batches in the moments.
TEST_F(SeveralHandings, GiveTheSameBitsWithoutGraphs) {
  const Job plain = job_for(shape_of(false));
  Job clipped = plain;
  clipped.gradients.tensor_norm = 1e-3;
  Job scaled = plain;
  scaled.activations = Precision::fp16;
  scaled.describe = describe_by("fp32");  // converted as it is read
  scaled.scaler = scruple_scaler_dynamic();
  scaled.scaler.scale = 0x1p30f;
  Job parts = plain;
  parts.describe = describe_by("fp32");
  parts.gradients.micro_batches = 2;
  parts.gradients.accumulation = SCRUPLE_ACCUMULATE_ADAMA;
  const std::pair<const char*, Job> jobs[] = {
      {"clipped", clipped}, {"scaled", scaled}, {"micro-batches", parts}};
  const Taken unchanged = take(plain, kSteps);
  for (const auto& [name, job] : jobs) {
    Job other = job;
    other.graphs = false;
    const Taken with = take(job, kSteps);
    expect_same(with, take(other, kSteps), name);
    EXPECT_FALSE(with.planes == unchanged.planes) << name << " changes nothing, and so shows nothing";
  }
}

// A sink that refuses a gradient: the next pass is none the worse.
TEST_F(SeveralHandings, ARefusalLeavesNothingBehind) {
  const Description shape = shape_of(true);
  const int norm = places_of(shape).last_norm.weight;  // whose gradient is the first that is there
  const auto run = [&](bool refused, bool offloads) {
    Job job = job_for(shape);
    job.optimizer = [] { return Optimizer("sgd", {{"momentum", 0.5}, {"lr", 0.1}}); };
    job.describe = describe_by("fp32");
    job.offloads = offloads;
    Passes passes(job);
    const auto train = [&](int which) {
      passes.network->train(passes.state.visible(), Documents(shape, job.batch, which).batch(), passes.sink,
                            1);
    };
    // A gradient that came already is refused, in the very first pass...
    const Block zeros(passes.ledger, "gradients", shape.width * 4, passes.backend->memory());
    passes.sink.add(norm, 0, shape.width, zeros.as<void>(), "fp32");
    if (refused) {
      EXPECT_THROW(train(0), Error);
    }
    passes.sink.end();
    for (int i = 0; i < 5; ++i) {
      train(i);
      // ...in one that is recorded, and in one that is replayed.
      if (refused && i % 3 == 0) {
        EXPECT_THROW(train(i), Error);
      }
      passes.sink.end();
    }
    std::vector<double> losses = passes.network->losses();
    losses.push_back(passes.loss(Documents(shape, job.batch, 9).batch()));
    return losses;
  };
  const std::vector<double> want = run(false, false);
  for (const bool offloads : {false, true}) EXPECT_EQ(run(true, offloads), want) << offloads;
}

// Every batch is another one, of few targets and many in turn, with validations between them, whole gradients and such that
// come in pieces, clipped one by one: what is replayed computes what is not.
TEST_F(CudaTrainer, ReplayedPassesAreThoseOfTheirBatch) {
  Description large = llama(1);
  large.vocabulary = 1 << 20, large.width = 40, large.head_width = 10;
  for (const Description& shape : {llama(), large})
    for (const double tensor_norm : {0.0, 1e-3}) {
      const auto run = [&](bool graphs) {
        Job job = job_of(shape, cuda_backend, "fp32", Precision::fp32);
        job.graphs = graphs;
        job.batch = 5;
        job.initial = spread_values(shape);
        job.optimizer = [] { return Optimizer("sgd", {{"momentum", 0.5}, {"lr", 0.5}}); };
        job.gradients.policy = SCRUPLE_RELEASED;
        job.gradients.tensor_norm = tensor_norm;
        Passes passes(job);
        std::vector<double> losses;
        for (int i = 0; i < 8; ++i) {
          Documents documents(shape, job.batch, i);
          if (i % 2 == 1) documents.let_only_last_count(30);
          Batch batch = documents.batch();
          if (i == 3) batch.starts = nullptr;
          passes.train(batch);
          if (i == 2) losses.push_back(passes.loss(Documents(shape, job.batch, 9).batch()));
        }
        for (const double loss : passes.network->losses()) losses.push_back(loss);
        losses.push_back(passes.loss(Documents(shape, job.batch, 10).batch()));
        return losses;
      };
      const std::vector<double> with = run(true), without = run(false);
      EXPECT_EQ(with.size(), 10u);
      EXPECT_EQ(with, without) << shape.vocabulary << ", " << tensor_norm;
      EXPECT_NE(with[1], with[2]) << "batches that are alike show nothing";
    }
}

void expect_curves_of_the_cpu(const std::function<void(Job&)>& change) {
  const auto losses = [&](OpenBackend backend) {
    Job job = job_of(llama(), backend);
    change(job);
    return take(job, 10).losses;
  };
  const std::vector<double> cpu = losses(cpu_backend), gpu = losses(cuda_backend);
  for (std::size_t i = 0; i < cpu.size(); ++i) EXPECT_NEAR(gpu[i], cpu[i], 1e-4 * cpu[i]);
}

// Clipping tensor by tensor, which measures a gradient before it is stepped.
TEST_F(CudaTrainer, ClippedTensorsAreTheCpus) {
  expect_curves_of_the_cpu([](Job& job) {
    job.gradients.policy = SCRUPLE_RELEASED;
    job.gradients.tensor_norm = 0.02;
  });
}

TEST_F(CudaTrainer, MicroBatchesAreTheCpus) {
  expect_curves_of_the_cpu([](Job& job) {
    job.gradients.micro_batches = 3;
    job.gradients.max_norm = 1;
  });
}

// fp16 that overflows: the step is skipped and the scale goes down, until it does not.
TEST_F(CudaTrainer, AScaleThatIsTooLargeGoesDown) {
  Job job = job_of(llama(), cuda_backend, "fp32", Precision::fp16);
  job.scaler = scruple_scaler_dynamic();
  job.scaler.scale = 0x1p30f;
  Training training(job);
  const Outcome first = training.step();
  EXPECT_TRUE(first.skipped);
  EXPECT_EQ(first.loss_scale, 0x1p30f);
  const Outcome last = training.take(30).back();
  EXPECT_FALSE(last.skipped);
  EXPECT_LT(last.loss_scale, 0x1p24f);
  EXPECT_GT(last.loss_scale, 1.0f);
}

// More micro-batches than losses that wait to be taken.
TEST_F(CudaTrainer, EveryLossOfManyMicroBatches) {
  const Description shape = llama(1);
  Job job = job_of(shape, cuda_backend);
  job.batch = 1;
  job.initial = spread_values(shape);
  job.optimizer = [] { return Optimizer("sgd"); };
  job.gradients.micro_batches = 1500;
  Passes passes(job);
  const double one = passes.loss(Documents(shape, 1, 0).batch());
  const double other = passes.loss(Documents(shape, 1, 1).batch());
  for (int i = 0; i < 1500; ++i) {
    passes.train(Documents(shape, 1, i % 2).batch());
    // A validation in between takes none of theirs; the second comes where no more can wait.
    if (i == 700 || i == 1023) {
      EXPECT_EQ(passes.loss(Documents(shape, 1, 1).batch()), other) << i;
    }
  }
  const std::vector<double> losses = passes.network->losses();
  ASSERT_EQ(losses.size(), 1500u);
  EXPECT_TRUE(passes.network->losses().empty());
  for (std::size_t i = 0; i < losses.size(); ++i) EXPECT_EQ(losses[i], i % 2 == 0 ? one : other) << i;
}

TEST_F(CudaTrainer, OffloadingGivesTheSameBits) {
  for (const std::int64_t layers : {1, 3, 6})
    for (const Recompute recompute : {Recompute::none, Recompute::mlp, Recompute::block}) {
      Job job = job_of(llama(layers), cuda_backend, "scruple", Precision::bf16);
      job.recompute = recompute;
      const Taken here = take(job, 4);
      job.offloads = true;
      expect_same(take(job, 4), here, std::to_string(layers));
    }
  Job job = job_of(llama(6), cuda_backend, "scruple", Precision::bf16);
  job.offloads = true;
  Training training(job);
  training.step();
  EXPECT_EQ(training.counted.host_peak("activations"), memory_of(job).host_peak()) << "as is planned";
}

TEST_F(CudaTrainer, OffloadedMomentsGiveTheSameBits) {
  for (const scruple_policy policy : {SCRUPLE_STORED, SCRUPLE_COMPRESSED, SCRUPLE_RELEASED})
    for (const int parts : {1, 2}) {
      if (policy == SCRUPLE_RELEASED && parts > 1) continue;  // moments of 8 bits do not add up
      Job job = with_large_matrices(policy);
      job.gradients.micro_batches = parts;
      if (policy != SCRUPLE_RELEASED) job.gradients.max_norm = 1;
      const Taken here = take(job, 5);
      job.offloads_state = true;
      expect_same(take(job, 5), here, std::to_string(policy) + ", " + std::to_string(parts));
    }
}

TEST(CudaPlan, OffloadedActivationsAreCountedApart) {
  for (const std::int64_t layers : {2, 6}) {
    Job job = job_of(llama(layers), cuda_backend, "scruple", Precision::bf16);
    const Ledger here = memory_of(job);
    job.offloads = true;
    const Ledger away = memory_of(job);
    EXPECT_EQ(here.host_peak(), 0);
    EXPECT_EQ(here.peak() - away.peak(), away.host_peak());
    EXPECT_EQ(away.host_peak("activations"), (layers - 2) * 3 * kFamilyContext * 64 * 2) << "three stay";
    job.offloads_state = true;
    EXPECT_EQ(memory_of(job).host_peak("activations"), away.host_peak()) << "beside moments";
  }
}

TEST(CudaPlan, OffloadedMomentsAreCountedApart) {
  Job job = with_large_matrices(SCRUPLE_RELEASED);
  const Ledger here = memory_of(job);
  job.offloads_state = true;
  const Ledger away = memory_of(job);
  EXPECT_EQ(here.host_peak(), 0);
  EXPECT_EQ(here.peak() - away.peak(), away.host_peak() - SCRUPLE_HOST_RING_BYTES);
  std::int64_t large = 0;
  for (const Parameter& parameter : parameters_of(job.shape))
    if (parameter.size() > 1 << 16) large += parameter.size();
  EXPECT_EQ(away.host_peak(), large * 3 + large / 64 * 2 * 4) << "extra bits, two moments, and their scales";
}

// What is told of a plan without its activations. Only counts: it needs no GPU.
TEST(CudaPlan, ReleasedBytesAreTheLedgers) {
  for (const Precision activations : {Precision::fp32, Precision::bf16}) {
    Job job = job_of(llama(), cuda_backend, "scruple", activations);
    job.gradients.policy = SCRUPLE_RELEASED;
    EXPECT_EQ(memory_of(job).peak("gradients"),
              cuda_backend(0)->released_bytes(parameters_of(job.shape), activations));
  }
}

// One scratch matrix, for the largest; a bias, where biases are of another type; two vectors where norms are coded.
TEST(CudaPlan, DecodedWeightsAreOneMatrix) {
  for (const Precision type : {Precision::bf16, Precision::fp32}) {
    Job job = job_of(llama(), cuda_backend, "lpmm", type);
    const std::int64_t each = type == Precision::fp32 ? 4 : 2, matrix = 256 * 64 * each;
    const auto workspace = [&](const Describe& describe) {
      job.describe = describe;
      return memory_of(job).peak("workspace");
    };
    const std::int64_t none = workspace(plain(all_coded("int10"), type));
    const std::int64_t bias = 64 * each, norms = 2 * 128 * each;
    EXPECT_EQ(workspace(describe_by("lpmm")) - none, matrix + (type == Precision::fp32 ? 0 : bias));
    EXPECT_EQ(workspace(all_coded("int10")) - none, matrix + bias + norms);
  }
}

// [out, in] of the largest matrices of GPT-2, Llama 3.x, Qwen 2.5 and 3, Mistral, Gemma; both ways round.
TEST(CudaPlan, PiecesAreWhatTensorCoresTake) {
  const std::int64_t matrices[][2] = {{50257, 1600},  {128256, 4096}, {14336, 4096},  {128256, 8192},
                                      {28672, 8192},  {53248, 16384}, {152064, 3584}, {18944, 3584},
                                      {13824, 5120},  {27648, 5120},  {151936, 2560}, {32768, 12288},
                                      {262144, 5376}, {21504, 5376},  {5120, 8192},   {257, 1000003}};
  for (const auto& [out, in] : matrices)
    for (const Precision type : {Precision::bf16, Precision::fp32})
      for (const Parameter& p :
           {Parameter{"", {out, in}, true, 0, 0}, Parameter{"", {in, out}, true, 0, 0}}) {
        const std::int64_t buffer = cuda::Outbox::buffer_bytes({p}, type), rows = p.shape[0];
        const std::int64_t piece = cuda::Outbox::piece_rows(buffer, p, type);
        EXPECT_LE(piece * p.shape[1] * cuda::bytes_of(type), buffer);
        if (piece == rows) continue;
        EXPECT_EQ(piece % 128, 0) << rows << " x " << p.shape[1];
        EXPECT_LE(buffer, std::max<std::int64_t>(128 << 20, 128 * p.shape[1] * cuda::bytes_of(type)));
        if (piece == 128) continue;  // the least there is; else the last is no sliver
        EXPECT_GE((rows - 1) % piece + 1, 128) << rows << " x " << p.shape[1] << " by " << piece;
      }
}

// Of a size at which several algorithms are tried.
TEST_F(CudaTrainer, TunedProductsHaveTheBitsOfTheFirstAlgorithm) {
  constexpr std::int64_t kSize = 1536;
  cuda::Stream stream;
  cuda::DeviceMemory memory(stream);
  Ledger ledger;
  std::vector<std::uint16_t> values(kSize * kSize);
  for (std::size_t i = 0; i < values.size(); ++i)  // bf16 of either sign, between 1/128 and 2
    values[i] = static_cast<std::uint16_t>(0x3c00 | (i * 2654435761u >> 7 & 0x83ff));
  const Block a(ledger, "a", kSize * kSize * 2, memory), d(ledger, "d", kSize * kSize * 4, memory);
  memory.write(a.as<void>(), values.data(), a.bytes());
  for (const bool wide : {false, true})
    for (const bool transposed : {false, true}) {
      const cuda::Product product = {.rows = kSize,
                                     .columns = kSize,
                                     .depth = kSize,
                                     .a = {a.as<void>(), kSize, transposed},
                                     .b = {a.as<void>(), kSize, !transposed},
                                     .d = d.as<void>(),
                                     .stride = kSize,
                                     .wide = wide};
      std::vector<std::uint32_t> outputs[2];
      for (const bool tunes : {false, true}) {
        cuda::Products(Precision::bf16, tunes, stream, memory, ledger).run(product);
        outputs[tunes].resize(kSize * kSize / (wide ? 1 : 2));
        memory.read(outputs[tunes].data(), d.as<void>(), kSize * kSize * (wide ? 4 : 2));
      }
      EXPECT_EQ(outputs[0], outputs[1]);
    }
}

// More than a GPU has, and more than is allowed: refused, and the next run is none the worse.
TEST_F(CudaTrainer, TooMuchMemoryIsRefused) {
  Job large = job_of(llama(), cuda_backend, "scruple", Precision::bf16);
  large.batch = 1'000'000;
  const std::int64_t needed = memory_of(large).peak();
  EXPECT_GT(needed, std::int64_t{160} << 30);
  EXPECT_THROW(Training{large}, std::bad_alloc);
  // Weights of the activations' type, weights that are converted, and weights that are decoded.
  for (const char* recipe : {"scruple", "fp32", "lpmm"})
    for (const Description& shape : {llama(), gpt2({2, 64, 4, kFamilyContext, 257})}) {
      const Job job = job_of(shape, cuda_backend, recipe, Precision::bf16);
      const std::int64_t enough = memory_of(job).peak();
      EXPECT_THROW(Training(job, nullptr, enough - 1), std::runtime_error);
      Training training(job, nullptr, enough);
      training.step();
      training.validate(4);
      EXPECT_EQ(training.counted.peak(), enough) << recipe << ": what was planned is what was taken";
    }
}

}  // namespace
}  // namespace scruple::train
