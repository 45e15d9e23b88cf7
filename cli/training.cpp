#include "training.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>

#include "memory.h"
#include "names.h"
#include "text.h"

namespace scruple::cli {
namespace {

constexpr std::int64_t kLarge = std::int64_t{1} << 20;  // a recipe may leave small tensors in fp32
constexpr const char* kAccumulations[] = {"none", "momentum", "adama"};  // of scruple_accumulation

scruple_scaler scaler_of(const std::string& text, train::Precision activations) {
  if (text.empty()) return scaler_of(activations == train::Precision::fp16 ? "dynamic" : "off", activations);
  if (text == "off") return {};
  if (text == "dynamic") return scruple_scaler_dynamic();
  if (text.find_first_not_of("0123456789.eE+-") != std::string::npos)
    throw UsageError("--loss-scale is '" + text + "'; it must be off, dynamic or a number");
  const double scale = parse_number(text, "--loss-scale");
  if (!(scale > 0)) throw UsageError("--loss-scale is " + text + "; it must be off, dynamic or above 0");
  scruple_scaler scaler;
  check(scruple_scaler_static(static_cast<float>(scale), &scaler));
  return scaler;
}

void note_about(const train::Data& data, const train::Cutting& cutting, const char* token) {
  const auto note = [](bool is_so, const std::string& words) {
    if (is_so) std::cerr << "scruple: " << words << '\n';
  };
  note(cutting.isolate && data.layout() != train::Layout::packed,
       "--isolate changes nothing here: only packed documents see each other");
  note(data.cut() > 0, plural(data.cut(), "document") + " longer than --context: cut there, " +
                           grouped(data.cut_tokens()) + " " + token +
                           "s are not used; a longer --context, or --layout packed, keeps them");
  note(data.left_out() > 0,
       plural(data.left_out(), "document") + " with nothing to learn in the context: left out");
  note(data.replaced() > 0, replaced_words(data.replaced()));
}

}  // namespace

OptionTable ModelOptions::options(std::int64_t fewest_steps) {
  return {
      {kModel, "--model", "model", &model, "MODEL",
       "gpt: a new byte-level GPT-2 of these sizes; a Hugging Face folder: fine-tune it; a "
       "config.json: train it from new weights. They may be gpt2, llama, mistral, qwen2, qwen3"},
      {kModel, "--layers", "layers", &shape.layers, "N", "gpt: transformer blocks", whole_from(1)},
      {kModel, "--width", "width", &shape.width, "N", "gpt: size of a token's vector, a multiple of --heads",
       whole_from(1)},
      {kModel, "--heads", "heads", &shape.heads, "N", "gpt: attention heads", whole_from(1)},
      {kModel, "--context", "context", &context, "N",
       "tokens that the model sees (default: " + std::to_string(shape.context) +
           "; a folder's own, at most " + grouped(kUsualContext) + ")",
       whole_from(1)},
      recompute_option(recompute, "recompute"),
      offload_option(offload, "offload"),
      {kRun, "--steps", "steps", &steps, "N", "optimizer steps", whole_from(fewest_steps), kMayChange},
      {kRun, "--batch", "batch", &batch, "N", "windows of --context tokens in a micro-batch", whole_from(1)},
      {kRun, "--seed", "seed", &seed, "N", "of weights, batches and stochastic rounding", whole_from(0)},
      {kRun, "--device", "device", &device, "DEVICE", "cpu, cuda, auto: a GPU if there is one", a_device(),
       kMayChange, kDeviceVariable},
      {kRun, "--threads", "", &threads, "N", "CPU threads; 0: one per core; the result is always the same",
       whole_from(0, 1024)}};
}

bool is_offloaded(const std::string& offload, const std::string& what) {
  if (offload == "true") return what == kActivations;
  return ("," + offload + ",").find("," + what + ",") != std::string::npos;
}

Option recompute_option(std::string& recompute, const std::string& key) {
  std::vector<std::string> known(std::begin(train::kRecomputes), std::end(train::kRecomputes));
  known.emplace_back(kAuto);
  return {kMemory,
          "--recompute",
          key,
          &recompute,
          "WHAT",
          "what backward computes again: none, norms, mlp, keep-attention, block (each saves more memory) or "
          "auto (what fits)",
          one_of(known),
          kMayChange};
}

Option offload_option(std::string& offload, const std::string& key) {
  const Check known = {[](const std::string& text) {
    std::stringstream parts(text);
    int count = 0;
    for (std::string part; std::getline(parts, part, ','); ++count)
      if (part != kActivations && part != kState && text != "true" && text != "none" && text != kAuto)
        return "'" + part +
               "' is nothing that can be offloaded; use activations, state, activations,state, auto or none";
    return std::string(count > 0 ? "" : "nothing is named; use activations, state, auto or none");
  }};
  return {
      kMemory,
      "--offload",
      key,
      &offload,
      "[WHAT]",
      "on a GPU, keep in host memory: activations (those between layers), state (moments, and extra bits or "
      "fp32 copies), activations,state, none, or auto (what fits, the fastest first; state after --recompute "
      "auto); the name alone means activations",
      known,
      kMayChange,
      nullptr,
      false,
      kActivations};
}

Check a_device() {
  const Check known = one_of(kDevices);
  return {[known](const std::string& value) -> std::string {
            if (value == "gpu" || value == "GPU" || value == "nvidia")
              return "'" + value + "' is no device; a GPU is 'cuda' here";
            if (value.starts_with("cuda:"))
              return "'" + value +
                     "' is no device; a run takes the first visible GPU: use 'cuda', and set "
                     "CUDA_VISIBLE_DEVICES=" +
                     value.substr(5);
            return known.problem(value);
          },
          known.values};
}

std::string device_for(const std::string& asked) {
  return asked != kDevices[0] ? asked : train::has_cuda() ? "cuda" : "cpu";
}

void check_device(const std::string& device) {
  if (device != "cuda") return;
  for (int e = 0; e < scruple_engine_count(); ++e) {
    scruple_engine_info info;
    check(scruple_engine_at(e, &info));
    if (info.name == device && info.available == 0)
      throw std::runtime_error(std::string("there is no GPU that this build can use (") + info.reason +
                               "); use --device cpu");
  }
}

OptionTable GradientOptions::options() {
  return {
      {kMemory, "--gradients", "gradients", &policy, "POLICY",
       "stored: kept until the step; compressed: kept in 8 bits; released: stepped with, and freed, inside "
       "backward",
       one_of(kPolicies)},
      {kOptimizer, "--accumulate", "accumulate", &accumulate, "N", "micro-batches that make one step",
       whole_from(1, 4096)},
      {kOptimizer, "--accumulation", "accumulation", &accumulation, "MODE",
       "released: where micro-batches add up: none, momentum (sgd, sgdw), adama (adam, adamw)",
       one_of(kAccumulations)},
      {kOptimizer, "--clip", "clip", &clip, "NORM",
       "largest global norm of the gradient; 0: none (default: 1; released: 0)", not_negative()},
      {kOptimizer, "--clip-tensor", "clip-tensor", &clip_tensor, "NORM",
       "released: largest norm of each tensor's gradient; 0: none", not_negative()},
      {kOptimizer, "--adagc", "adagc", &adagc, "LAMBDA",
       "released: clip a tensor at LAMBDA (such as 1.05) times its own average norm; 0: off", not_negative()},
      {kOptimizer, "--loss-scale", "loss-scale", &loss_scale, "SCALE",
       "off, dynamic or a number (default: dynamic with fp16, else off)"}};
}

// What the policies cannot do, in the words of the command line; the library would say it in its own.
void GradientOptions::check() const {
  const bool released = policy == "released";
  if (released && clip > 0)
    throw UsageError(
        "--clip needs all gradients at once, and --gradients released frees each; use --clip-tensor, "
        "--adagc, or "
        "--gradients compressed");
  if (!released && (clip_tensor > 0 || adagc > 0))
    throw UsageError("--clip-tensor and --adagc are for --gradients released; with " + policy +
                     " use --clip");
  if (released && accumulate > 1 && accumulation == "none")
    throw UsageError(
        "--accumulate needs gradients that are kept, and --gradients released frees each; add --accumulation "
        "momentum or adama, or use --gradients compressed");
  if (!released && accumulation != "none")
    throw UsageError("--accumulation is for --gradients released; with " + policy + " leave it out");
}

train::Fill ChosenModel::initial() const {
  if (!has_weights()) return {};
  return [from = folder](int parameter, std::int64_t first, std::int64_t count, float* values) {
    from->read(parameter, first, count, values);
  };
}

void refuse_sizes(const ModelOptions& options, const CLI::App& command) {
  if (options.is_gpt()) return;
  for (const char* name : {"--layers", "--width", "--heads"})
    if (is_given(command, name))
      throw UsageError(std::string(name) + " is for --model gpt; leave it out: " + options.model +
                       " has its sizes in its config.json");
}

// Nothing is downloaded: of what looks like a name on Hugging Face's hub, how to fetch it.
std::string hub_hint(const std::string& name) {
  const bool is_name = std::count(name.begin(), name.end(), '/') == 1 && name.front() != '/' &&
                       name.front() != '.' && name.back() != '/';
  return is_name ? ". Fetch it first if it is on the hub: hf download " + name + " --local-dir " +
                       name.substr(name.find('/') + 1)
                 : "";
}

ChosenModel choose_model(const ModelOptions& options) {
  if (options.is_gpt()) {
    train::GptShape shape = options.shape;
    if (options.context > 0) shape.context = options.context;
    if (const std::string problem = problem_with(gpt2(shape)); !problem.empty()) throw UsageError(problem);
    return {gpt2_model(shape), nullptr};
  }
  std::error_code ignored;
  if (!std::filesystem::exists(options.model, ignored))
    throw UsageError(
        "--model is '" + options.model +
        "', and there is no such folder or file; give gpt, a Hugging Face folder, or a config.json" +
        hub_hint(options.model));
  auto folder = std::make_shared<const train::ModelFolder>(options.model, options.context);
  if (options.context == 0)
    if (const std::int64_t longest = folder->config().shape.context; longest > kUsualContext)
      folder = std::make_shared<const train::ModelFolder>(options.model, kUsualContext);
  return {folder->config(), folder};
}

std::string folder_of_tokenizer(const std::string& model) {
  std::error_code ignored;
  return model == kGpt || !std::filesystem::exists(model, ignored) ? "" : train::folder_of_model(model);
}

Vocabulary vocabulary_of(const std::string& folder) {
  if (folder.empty() || !train::has_tokenizer(folder)) return {};
  Vocabulary found = {train::read_tokenizer(folder), {}, {}};
  found.end = train::end_token(folder, *found.tokenizer);
  found.stops = train::stop_tokens(folder, *found.tokenizer);
  return found;
}

OptionTable CuttingOptions::options() {
  return {
      {kData, "--layout", "layout", &layout, "LAYOUT",
       "packed: documents end to end; whole: as many as fit, none cut (default of prompts); padded: one per "
       "window",
       one_of(train::kLayouts)},
      {kData, "--isolate", "isolate", &isolate, "", "packed documents do not see each other"},
      {kData, "--train-on", "train-on", &train_on, "WHAT",
       "of messages: all, the assistant's turns, or its last one; of prompts: all, or the completion",
       one_of(train::kTrainOn)},
      {kData, "--chat-date", "chat-date", &chat_date, "DATE",
       "today, such as 2026-11-19, for chat templates that ask for it", a_date()},
      {kData, "--validation", "validation", &validation, "SHARE",
       "share of the data for validation, from its end; 0: no validation", a_share_or_none()}};
}

Check a_date() {
  return {[](const std::string& value) {
    int year = 0;
    unsigned month = 0, day = 0;
    const bool has_form = value.size() == 10 && value[4] == '-' && value[7] == '-' &&
                          value.find_first_not_of("0123456789-") == value.npos &&
                          std::sscanf(value.c_str(), "%d-%u-%u", &year, &month, &day) == 3;
    return has_form && (std::chrono::year(year) / month / day).ok()
               ? ""
               : "'" + value + "' is no date such as 2026-11-19";
  }};
}

train::Cutting CuttingOptions::cutting(std::int64_t context) const {
  return {.context = context,
          .layout = value_named<train::Layout>(train::kLayouts, layout),
          .isolate = isolate,
          .validation_share = validation,
          .by_chance = by_chance};
}

std::string name_of(const std::vector<std::string>& data) {
  if (data.empty()) return "";
  const std::string first = data[0] == train::Data::kStandardInput ? "standard input" : data[0];
  return first +
         (data.size() > 1 ? " and " + grouped(static_cast<std::int64_t>(data.size()) - 1) + " more" : "");
}

bool reads_input(const std::vector<std::string>& data) {
  return std::find(data.begin(), data.end(), train::Data::kStandardInput) != data.end();
}

train::Data open_data(const std::vector<std::string>& arguments, const CuttingOptions& options,
                      const ChosenModel& model, const std::string& tokenizer) {
  const std::vector<train::Share> shares = train::shares_of(arguments);
  const train::Cutting cutting = options.cutting(model.config.shape.context);
  Vocabulary words = vocabulary_of(tokenizer);
  const bool of_tokens = train::are_tokens(shares);
  const std::int64_t vocabulary = model.config.shape.vocabulary;
  const bool unknown = !words.tokenizer && !of_tokens && !train::tokens_are_bytes(vocabulary);
  if (unknown && model.has_weights())
    throw std::runtime_error(tokenizer +
                             " has no tokenizer.json, so nothing says what tokens a text has; put it there, "
                             "or give a file of tokens (*.bin)");
  if (unknown)
    std::cerr << "scruple: " << (tokenizer.empty() ? "the model" : tokenizer)
              << " has no tokenizer.json: each byte of the text is a token, 256 of the model's "
              << grouped(vocabulary) << '\n';
  if (words.tokenizer && words.tokenizer->size() > vocabulary)
    throw std::runtime_error("the tokenizer of " + tokenizer + " knows " + grouped(words.tokenizer->size()) +
                             " tokens, and the model " + grouped(vocabulary) +
                             "; use the tokenizer.json that came with the model");
  if (words.tokenizer && !words.end && !of_tokens)
    std::cerr << "scruple: no file of " << tokenizer
              << " names an end token (eos_token in tokenizer_config.json); documents follow each other "
                 "without one\n";
  // What takes a while says so.
  const bool terminal = isatty(STDERR_FILENO) != 0;
  const auto start = std::chrono::steady_clock::now();
  std::size_t shown = 0;
  train::Data data(
      shares, cutting,
      {.tokenizer = words.tokenizer ? &*words.tokenizer : nullptr,
       .end = words.end,
       .vocabulary = vocabulary,
       .train_on = value_named<train::TrainOn>(train::kTrainOn, options.train_on).value(),
       .chat_folder = tokenizer,
       .chat_date = options.chat_date,
       .limit = free_memory(),
       .progress = [&](std::int64_t done, std::int64_t all) {
         if (!terminal || all == 0 || std::chrono::steady_clock::now() - start < std::chrono::seconds(1))
           return;
         const std::string line =
             "reading " + name_of(arguments) + ": " + std::to_string(100 * done / all) + " %";
         std::cerr << '\r' << line << std::flush;
         shown = line.size();
       }});
  if (shown > 0) std::cerr << '\r' << std::string(shown, ' ') << '\r' << std::flush;
  note_about(data, cutting, token_word(model.config.shape));
  return data;
}

std::string computed_in(const Choice& choice, const std::string& recipe) {
  const scruple_tensor tensor = choice.describe(choice.make_optimizer(), recipe, kLarge);
  const std::string format = train::visible_format(tensor.arrays[SCRUPLE_WEIGHT]);
  return precision_name(
      value_named<train::Precision>(train::kPrecisions, format).value_or(train::Precision::fp32));
}

train::Job make_job(const Choice& choice, const std::string& recipe, const ModelOptions& options,
                    const ChosenModel& model, const GradientOptions& gradients,
                    const std::string& activations) {
  gradients.check();
  constexpr std::int64_t kMostTokens = std::int64_t{1} << 40;  // so that no count of bytes overflows
  const train::Description& shape = model.config.shape;
  if (options.batch > kMostTokens / shape.context)
    throw UsageError("--batch is " + std::to_string(options.batch) + " windows of " +
                     std::to_string(shape.context) + " tokens; choose one with at most 2^40 tokens");
  const bool with_gpu = device_for(options.device) == "cuda";
  if (!with_gpu && (is_offloaded(options.offload, kActivations) || is_offloaded(options.offload, kState)))
    throw UsageError(
        "--offload is for a GPU, and this run is on the CPU; leave it out, or use --device cuda");
  if (gradients.accumulation != "none") {
    const Optimizer optimizer = choice.make_optimizer();
    const scruple_tensor tensor = choice.describe(optimizer, recipe, kLarge);
    for (const int a : used_arrays(tensor))
      if (a >= SCRUPLE_SLOT && a < SCRUPLE_GRADIENT && tensor.arrays[a].format != format_named("fp32"))
        throw UsageError("--accumulation " + gradients.accumulation +
                         " adds micro-batches up in the moments, and 8 bits would lose them; use "
                         "--moments fp32, or use --gradients compressed");
  }
  if (gradients.policy == "released" && !choice.gradient.empty())
    throw UsageError("--gradients released keeps no gradient to format; leave out --gradient-format");
  train::Job job;
  job.shape = shape;
  job.initial = model.initial();
  job.batch = options.batch;
  if (options.recompute != kAuto)
    job.recompute = value_named<train::Recompute>(train::kRecomputes, options.recompute).value();
  job.offloads = is_offloaded(options.offload, kActivations);
  job.offloads_state = is_offloaded(options.offload, kState);
  job.seed = options.seed;
  job.threads = options.threads;
  job.optimizer = [choice] { return choice.make_optimizer(); };
  job.describe = [choice, recipe, policy = gradients.policy](const Optimizer& optimizer, std::int64_t size) {
    return choice.for_policy(policy, recipe, size).describe(optimizer, recipe, size);
  };
  if (with_gpu) job.backend = train::cuda_backend;
  const std::string computed = computed_in(choice, recipe);
  const std::string usual = with_gpu && computed == "fp32" ? "bf16" : computed;
  job.activations =
      value_named<train::Precision>(train::kPrecisions, activations.empty() ? usual : activations).value();
  job.scaler = scaler_of(gradients.loss_scale, job.activations);
  job.gradients.policy = value_named<scruple_policy>(kPolicies, gradients.policy).value();
  job.gradients.accumulation =
      value_named<scruple_accumulation>(kAccumulations, gradients.accumulation).value();
  job.gradients.micro_batches = gradients.accumulate;
  job.gradients.max_norm = gradients.clip >= 0 ? gradients.clip : gradients.policy == "released" ? 0 : 1;
  job.gradients.tensor_norm = gradients.clip_tensor;
  job.gradients.adagc = gradients.adagc;
  return job;
}

std::string step_words(const train::Job& job, train::Layout layout) {
  const std::int64_t windows = job.batch * job.gradients.micro_batches;
  return layout == train::Layout::padded ? plural(windows, "document")
                                         : plural(windows * job.shape.context, token_word(job.shape));
}

const char* token_word(const train::Description& shape) {
  return train::tokens_are_bytes(shape.vocabulary) ? "byte" : "token";
}

std::string nats_per(const train::Description& shape) { return std::string("nats per ") + token_word(shape); }

std::string kind_words(const train::ModelConfig& model) {
  return nlohmann::json::parse(model.text).value("model_type", kGpt);
}

std::string shape_words(const train::Description& shape) {
  return plural(shape.layers, "layer") + ", width " + grouped(shape.width) + ", " +
         plural(shape.heads, "head") + ", context " + grouped(shape.context);
}

std::string recompute_name(const train::Job& job) {
  return train::kRecomputes[static_cast<int>(job.recompute)];
}

std::string offload_words(const train::Job& job) {
  if (job.offloads && job.offloads_state) return std::string(kActivations) + "," + kState;
  return job.offloads ? kActivations : job.offloads_state ? kState : "none";
}

std::string memory_words(const train::Job& job) {
  std::string words;
  if (job.recompute != train::Recompute::none) words += ", recompute " + recompute_name(job);
  if (job.offloads || job.offloads_state) words += ", offload " + offload_words(job);
  return words;
}

std::string gradient_words(const train::Job& job) {
  const scruple_sink_options& options = job.gradients;
  std::string text;
  if (options.max_norm > 0) text += ", clip " + shortest(options.max_norm);
  if (options.tensor_norm > 0) text += ", clip of each tensor " + shortest(options.tensor_norm);
  if (options.adagc > 0) text += ", AdaGC " + shortest(options.adagc);
  if (options.micro_batches > 1) text += ", " + grouped(options.micro_batches) + " micro-batches";
  if (job.scaler.scale > 0)
    text += std::string(job.scaler.growth > 1 ? ", dynamic" : ", static") + " loss scale " +
            shortest(job.scaler.scale);
  return text;
}

const char* precision_name(train::Precision precision) {
  return train::kPrecisions[static_cast<int>(precision)];
}

}  // namespace scruple::cli
