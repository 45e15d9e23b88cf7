// What train and compare share: the options of a model and of a run, a job made from them, its memory against
// the plan, the progress line, and Ctrl-C.
#pragma once

#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "choice.h"
#include "memory.h"
#include "text.h"
#include "train/model/model.h"
#include "train/run/run.h"
#include "train/run/trainer.h"
#include "train/text/data.h"
#include "train/text/vocabulary.h"

namespace scruple::cli {

inline constexpr std::int64_t kNoLimit = std::numeric_limits<std::int64_t>::max();

// CLI11's own ranges let NaN through, print 309 digits, and take the nearest whole number that there is.
CLI::Validator above_zero();
CLI::Validator not_negative();
CLI::Validator a_share();                        // above 0, below 1
CLI::Validator whole_from(std::int64_t fewest);  // up to 2^63 - 1

inline constexpr const char* kGpt = "gpt";

// Where a model is trained. auto: on a GPU where there is one.
inline constexpr const char* kDevices[] = {"auto", "cuda", "cpu"};
CLI::Validator a_device();  // one of them; says what is meant by other names of a GPU
inline constexpr const char* kDeviceVariable = "SCRUPLE_DEVICE";  // of the environment
std::string device_for(const std::string& asked);                 // cuda or cpu
// Throws where nothing can be trained on this one, cuda or cpu; what only counts can do without.
void check_device(const std::string& device);

// The sizes of a gpt that have an option. A folder's model has its own.
struct SizeOption {
  const char* name;
  std::int64_t train::GptShape::*size;
  const char* doc;
};
inline constexpr SizeOption kSizeOptions[] = {
    {"--layers", &train::GptShape::layers, "transformer blocks"},
    {"--width", &train::GptShape::width, "size of a token's vector; a multiple of --heads"},
    {"--heads", &train::GptShape::heads, "attention heads"}};

struct ModelOptions {
  std::string model = kGpt;  // or the path of a folder, or of a config.json
  train::GptShape shape;     // of a gpt
  std::int64_t context = 0;  // 0: the shape's, or that of the folder's model, at most kUsualContext
  std::int64_t batch = 16, steps = 1000;
  std::string recompute = train::kRecomputes[0];
  std::uint64_t seed = 1;
  int threads = 0;
  std::string device = kDevices[0];
  bool offload = false;

  void add_options(CLI::App& command, std::int64_t fewest_steps = 1);
  bool is_gpt() const { return model == kGpt; }
};
inline constexpr std::int64_t kUsualContext = 1024;
// Peak learning rates for weights that were trained before.
inline constexpr double kTuningLr = 1e-5, kTuningSgdLr = 1e-3;

// What --model names.
struct ChosenModel {
  train::ModelConfig config;
  std::shared_ptr<const train::ModelFolder> folder;  // none: made of sizes

  bool has_weights() const { return folder != nullptr && folder->has_weights(); }
  train::Fill initial() const;  // none: drawn from the seed
};
ChosenModel choose_model(const ModelOptions& options);
// Throws where sizes were given beside a folder, which has its own.
void refuse_sizes(const ModelOptions& options, const CLI::App& command);

// How a model's texts become tokens: by the tokenizer of its folder, or each byte is one.
struct Vocabulary {
  std::optional<train::Tokenizer> tokenizer;
  std::optional<train::Token> end;  // comes after a document
  std::vector<train::Token> stops;  // end an answer
};
Vocabulary vocabulary_of(const std::string& folder);
// The folder that --model says the tokenizer is in: a folder itself, that of a config.json; "" for a gpt, and where it is
// no longer there.
std::string folder_of_tokenizer(const std::string& model);

// How what --data names becomes windows.
struct CuttingOptions {
  std::string layout;  // "": by what is read
  bool isolate = false;
  double validation = train::Cutting().validation_share;

  void add_options(CLI::App& command);
  train::Cutting cutting(std::int64_t context) const;
};

std::string name_of(const std::string& data);  // what is read, for people
// What --data names, in the tokens of the model, whose tokenizer is in the folder `tokenizer` ("": none). What takes a
// while says so on a terminal; what is not used as it is, or has no effect, is said on stderr.
train::Data open_data(const std::string& path, const train::Cutting& cutting, const ChosenModel& model,
                      const std::string& tokenizer);

struct GradientOptions {
  std::string policy = "stored", accumulation = "none", loss_scale;
  int accumulate = 1;
  double clip = -1;  // below 0: 1, where the policy can
  double clip_tensor = 0, adagc = 0;

  void add_options(CLI::App& command);
  void check() const;
};

// The type, of train::kPrecisions, that the weights of a recipe are computed in.
std::string computed_in(const Choice& choice, const std::string& recipe);
bool serves_gpu(const Choice& choice, const std::string& recipe);  // such weights need no decoding
// A job with everything but its schedule. `activations`: "" takes the type that the weights are computed in; on a GPU
// bf16 where that has not 16 bits.
train::Job make_job(const Choice& choice, const std::string& recipe, const ModelOptions& options,
                    const ChosenModel& model, const GradientOptions& gradients,
                    const std::string& activations);
std::int64_t tokens_per_step(const train::Job& job);
const char* precision_name(train::Precision precision);
const char* token_word(const train::Description& shape);   // byte, or token
std::string nats_per(const train::Description& shape);     // nats per byte
std::string kind_words(const train::ModelConfig& model);   // gpt2, llama...
std::string shape_words(const train::Description& shape);  // 2 layers, width 64, 4 heads, context 128
// What is done to gradients, where anything is: ", clip 1, 4 micro-batches, dynamic loss scale 65536".
std::string gradient_words(const train::Job& job);

// What weights, moments and gradients will take: as `scruple plan` says it, and the tile that released gradients
// pass through.
Memory plan_of(const Choice& choice, const std::string& recipe, const train::Job& job,
               const std::string& policy);
// What the job's device can still give.
std::int64_t free_memory(const train::Job& job);
bool on_gpu(const train::Job& job);
// What would take less memory, in options that the job does not have: "choose a smaller model, --batch or --context, or
// --recompute block, or --offload".
std::string savings(const train::Job& job, bool chooses_recipe);
// The same of what changes no bit, for a run that goes on.
std::string savings_of_passes(const train::Job& job);
// In a handler of std::bad_alloc: on a GPU throws what says more, on the CPU the same again.
[[noreturn]] void rethrow_shortage(const train::Job& job, const std::string& advice);
// Where every byte of a run will go, counted before any is taken. Where it is more than is free, or than `limit`, throws:
// "WHAT needs 1.1 TiB, and 20.1 GiB are free; ADVICE".
Table checked_memory(const std::string& what, const train::Job& job, const Memory& plan,
                     const std::string& advice, std::int64_t limit = kNoLimit);
// What the ledger saw of weights, moments and gradients at their peaks, in the plan's order.
std::vector<std::pair<std::string, std::int64_t>> measured_parts(const train::Ledger& ledger,
                                                                 const Memory& plan);
std::int64_t measured_total(const train::Ledger& ledger);

// A run that validates every so many steps (0: twenty times) and ends early where Interrupts says so.
train::Span span_of(std::int64_t steps, std::int64_t validate_every = 0);

// The tokens per second at which all of the device's peak would go into the model's products (an MFU of 1: Chowdhery et
// al., 2204.02311, section 4.1); 0: not known, as for fp32.
double most_tokens(const train::Trainer& trainer, const train::Job& job);
// Over a session's steps, of so many tokens each.
double tokens_per_second(const train::Record& record, std::int64_t tokens);
std::string mfu_words(double rate, double most);  // 41.2 %; "" where the most is not known

// A line on stderr that rewrites itself on a terminal, cut to its width, and comes every few seconds elsewhere.
class Progress {
 public:
  Progress(std::string label, const train::Job& job, const train::Trainer& trainer,
           const train::Ledger& ledger);
  ~Progress();
  void show(const train::Record& record, double seconds_left);
  void validating(std::int64_t done, std::int64_t all);  // batches
  void warn(const std::string& message);                 // on a line of its own

 private:
  using Clock = std::chrono::steady_clock;
  bool is_due(bool in_any_case);
  std::string line(const train::Record& record, double seconds_left) const;
  void put(std::string text);
  void clear();

  std::string label_;
  std::int64_t steps_, tokens_;
  double most_tokens_;
  const train::Ledger& ledger_;
  bool terminal_;
  std::size_t width_ = 0;
  Clock::time_point last_;
};

std::string duration(double seconds);       // 0:07, 12:30, 3:05:00
void make_folder(const std::string& path);  // and those above it

// While one exists, Ctrl-C (and SIGTERM, SIGHUP) only sets a flag; a second one ends the program as usual. A signal that
// the program was started to ignore stays ignored.
class Interrupts {
 public:
  Interrupts();
  ~Interrupts();
  static bool asked() { return signal() != 0; }
  static int signal();        // the one that came; 0: none
  static const char* name();  // its name

 private:
  void (*before_[3])(int);
};

}  // namespace scruple::cli
