// What train and compare share: the options of a model, its data and its gradients, and a job made from them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "choice.h"
#include "options.h"
#include "text.h"
#include "train/model/model.h"
#include "train/run/trainer.h"
#include "train/text/data.h"
#include "train/text/vocabulary.h"

namespace scruple::cli {

inline constexpr const char* kGpt = "gpt";

// Where a model is trained. auto: on a GPU where there is one.
inline constexpr const char* kDevices[] = {"auto", "cuda", "cpu"};
Check a_device();  // one of them; says what is meant by other names of a GPU
inline constexpr const char* kDeviceVariable = "SCRUPLE_DEVICE";  // of the environment
std::string device_for(const std::string& asked);                 // cuda or cpu
// Throws where nothing can be trained on this one, cuda or cpu; what only counts can do without.
void check_device(const std::string& device);

// Of --recompute and --offload: what takes least time of all that fits (room.h).
inline constexpr const char* kAuto = "auto";

struct ModelOptions {
  std::string model = kGpt;  // or the path of a folder, or of a config.json
  train::GptShape shape;     // of a gpt; a folder's model has its own sizes
  std::int64_t context = 0;  // 0: the shape's, or that of the folder's model, at most kUsualContext
  std::int64_t batch = 16, steps = 1000;
  std::string recompute = train::kRecomputes[0];
  std::uint64_t seed = 1;
  int threads = 0;
  std::string device = kDevices[0];
  std::string offload;  // "", kAuto, or what: see is_offloaded()

  OptionTable options(std::int64_t fewest_steps = 1);
  bool is_gpt() const { return model == kGpt; }
};
// What --offload takes, joined by commas. Earlier versions noted "true" for the first.
inline constexpr const char *kActivations = "activations", *kState = "state";
bool is_offloaded(const std::string& offload, const std::string& what);
Option offload_option(std::string& offload, const std::string& key);
Option recompute_option(std::string& recompute, const std::string& key);
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
  bool by_chance = false;  // of a run that an earlier version began
  std::string train_on = train::kTrainOn[static_cast<int>(train::Reading().train_on)], chat_date;

  OptionTable options();
  train::Cutting cutting(std::int64_t context) const;
};

std::string name_of(const std::vector<std::string>& data);  // what is read, for people
bool reads_input(const std::vector<std::string>& data);     // standard input is among it
// What --data names (train::shares_of), in the tokens of the model, whose tokenizer is in the folder `tokenizer` ("": none). What takes a
// while says so on a terminal; what is not used as it is, or has no effect, is said on stderr.
train::Data open_data(const std::vector<std::string>& arguments, const CuttingOptions& options,
                      const ChosenModel& model, const std::string& tokenizer);
Check a_date();

struct GradientOptions {
  std::string policy = "stored", accumulation = "none", loss_scale;
  int accumulate = 1;
  double clip = -1;  // below 0: 1, where the policy can
  double clip_tensor = 0, adagc = 0;

  OptionTable options();
  void check() const;
};

// The type, of train::kPrecisions, that the weights of a recipe are computed in; fp32 where they are decoded.
std::string computed_in(const Choice& choice, const std::string& recipe);
// A job with everything but its schedule. `activations`: "" takes the type that the weights are computed in; on a GPU
// bf16 where that has not 16 bits.
train::Job make_job(const Choice& choice, const std::string& recipe, const ModelOptions& options,
                    const ChosenModel& model, const GradientOptions& gradients,
                    const std::string& activations);
// What a step sees: "2,048 bytes"; "16 documents" where each is padded to a window.
std::string step_words(const train::Job& job, train::Layout layout);
const char* precision_name(train::Precision precision);
const char* token_word(const train::Description& shape);   // byte, or token
std::string nats_per(const train::Description& shape);     // nats per byte
std::string kind_words(const train::ModelConfig& model);   // gpt2, llama...
std::string shape_words(const train::Description& shape);  // 2 layers, width 64, 4 heads, context 128
std::string recompute_name(const train::Job& job);         // none, norms...
std::string offload_words(const train::Job& job);          // none, activations, state, or activations,state
std::string memory_words(const train::Job& job);           // ", recompute mlp, offload state", or nothing
// What is done to gradients, where anything is: ", clip 1, 4 micro-batches, dynamic loss scale 65536".
std::string gradient_words(const train::Job& job);

}  // namespace scruple::cli
