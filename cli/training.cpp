#include "training.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "names.h"
#include "text.h"

namespace scruple::cli {
namespace {

volatile std::sig_atomic_t interrupted = 0;  // by this signal
constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};

extern "C" void note_interrupt(int signal) {
  interrupted = signal;
  std::signal(signal, SIG_DFL);
  constexpr char kSaid[] = "\nscruple: stopping after this step; once more to stop at once\n";
  (void)!write(STDERR_FILENO, kSaid, sizeof kSaid - 1);
}

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

// Of the terminal that stderr is. A line of all its columns would make some terminals go to the next.
std::size_t columns_for_a_line() {
  winsize window{};
  long columns = ioctl(STDERR_FILENO, TIOCGWINSZ, &window) == 0 ? window.ws_col : 0;
  const char* const set = std::getenv("COLUMNS");
  if (columns == 0 && set != nullptr) columns = std::strtol(set, nullptr, 10);
  constexpr long kUsual = 80;
  return static_cast<std::size_t>(std::max(columns > 0 ? columns : kUsual, 2L) - 1);
}

void note_about(const train::Data& data, const train::Cutting& cutting, const char* token) {
  const auto note = [](bool is_so, const std::string& words) {
    if (is_so) std::cerr << "scruple: " << words << '\n';
  };
  note(cutting.isolate && data.layout() == train::Layout::padded,
       "--isolate changes nothing here: a padded window has one document");
  note(data.cut() > 0, plural(data.cut(), "document") + " longer than the context: cut there, " +
                           grouped(data.cut_tokens()) + " " + token +
                           "s are not used; --layout packed keeps them");
  note(data.left_out() > 0, plural(data.left_out(), "document") + " without a target that counts: left out");
  note(data.replaced() > 0, replaced_words(data.replaced()));
}

// Kinds that no plan of weights, moments and gradients counts.
bool is_state(const std::string& kind) { return kind != "activations" && kind != "workspace"; }

}  // namespace

namespace {

CLI::Validator a_number(bool (*serves)(double), const std::string& wanted) {
  return {[=](const std::string& text) {
            try {
              if (serves(parse_number(text, ""))) return std::string();
            } catch (const UsageError&) {  // what follows says it with the option's name
            }
            return "is " + text + "; it must be a number " + wanted;
          },
          ""};
}

}  // namespace

CLI::Validator above_zero() {
  return a_number([](double value) { return value > 0 && std::isfinite(value); }, "above 0, and finite");
}

CLI::Validator not_negative() {
  return a_number([](double value) { return value >= 0 && std::isfinite(value); },
                  "that is 0 or more, and finite");
}

CLI::Validator a_share() {
  return a_number([](double value) { return value > 0 && value < 1; }, "above 0 and below 1, such as 0.05");
}

CLI::Validator whole_from(std::int64_t fewest) {
  return {[fewest](const std::string& text) {
            std::int64_t value = 0;
            const char* const end = text.data() + text.size();
            const auto [stop, problem] = std::from_chars(text.data(), end, value);
            return problem == std::errc() && stop == end && value >= fewest
                       ? std::string()
                       : "is " + text + "; it must be a whole number from " + std::to_string(fewest) +
                             " to 2^63 - 1, in digits";
          },
          ""};
}

void ModelOptions::add_options(CLI::App& command, std::int64_t fewest_steps) {
  const auto add = [&](const char* name, auto& value, const char* doc) {
    command.add_option(name, value, doc)->type_name("N")->capture_default_str()->check(whole_from(1));
  };
  command
      .add_option("--model", model,
                  "gpt: a byte-level GPT-2 of the sizes below; or a Hugging Face folder (gpt2, llama, "
                  "mistral, qwen2, qwen3) to go on from, or a config.json to begin from")
      ->type_name("MODEL")
      ->capture_default_str();
  for (const SizeOption& option : kSizeOptions) add(option.name, shape.*option.size, option.doc);
  command
      .add_option("--context", context,
                  "tokens that the model sees at once (default: " + std::to_string(shape.context) +
                      "; of a folder's model all that it can, at most " + grouped(kUsualContext) + ")")
      ->type_name("N")
      ->check(whole_from(1));
  add("--batch", batch, "windows in a micro-batch");
  command
      .add_option(
          "--recompute", recompute,
          "what backward computes again to save activations: none, mlp, or block (all but a layer's input)")
      ->capture_default_str()
      ->check(one_of(train::kRecomputes));
  command.add_flag("--offload", offload,
                   "on a GPU: what goes from layer to layer waits in host memory for the backward pass");
  command.add_option("--steps", steps, "optimizer steps")
      ->type_name("N")
      ->capture_default_str()
      ->check(whole_from(fewest_steps));
  command.add_option("--seed", seed, "of weights, batches and stochastic rounding")
      ->type_name("N")
      ->capture_default_str()
      ->check(whole_from(0));
  command
      .add_option("--device", device,
                  "cuda: an NVIDIA GPU; cpu; auto: a GPU where this build and this machine have one")
      ->capture_default_str()
      ->envname(kDeviceVariable)
      ->check(a_device());
  command
      .add_option("--threads", threads, "of the CPU; 0: one per core; the result is the same for any number")
      ->type_name("N")
      ->capture_default_str()
      ->check(CLI::Range(0, 1024));
}

CLI::Validator a_device() {
  const CLI::Validator known = one_of(kDevices);
  return {[known](std::string value) {
            if (value == "gpu" || value == "GPU" || value == "nvidia")
              return "'" + value + "': a GPU is 'cuda' here";
            if (value.starts_with("cuda:"))
              return "'" + value +
                     "': a run takes the first GPU that it sees; CUDA_VISIBLE_DEVICES=" + value.substr(5) +
                     " beside 'cuda' gives it another";
            return known(value);
          },
          known.get_description()};
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
                               "); train with --device cpu");
  }
}

void GradientOptions::add_options(CLI::App& command) {
  command
      .add_option("--gradients", policy, "stored, released (stepped inside backward) or compressed (8-bit)")
      ->type_name("POLICY")
      ->capture_default_str()
      ->check(one_of(kPolicies));
  command.add_option("--accumulate", accumulate, "micro-batches that make one step")
      ->type_name("N")
      ->capture_default_str()
      ->check(CLI::Range(1, 4096));
  command
      .add_option("--accumulation", accumulation,
                  "how 'released' adds up micro-batches: momentum (sgd, sgdw) or adama (adam, adamw)")
      ->type_name("MODE")
      ->check(one_of(kAccumulations));
  command
      .add_option("--clip", clip, "largest global norm of the gradient; 0: none (default: 1; released: 0)")
      ->type_name("NORM")
      ->check(not_negative());
  command
      .add_option("--clip-tensor", clip_tensor, "released: largest norm of each tensor's gradient; 0: none")
      ->type_name("NORM")
      ->check(not_negative());
  command
      .add_option("--adagc", adagc, "released: clip each tensor by LAMBDA times its own average norm (1.05)")
      ->type_name("LAMBDA")
      ->check(not_negative());
  command
      .add_option("--loss-scale", loss_scale,
                  "off, dynamic or a number (default: dynamic with fp16, else off)")
      ->type_name("SCALE");
}

// What the policies cannot do, in the words of the command line; the library would say it in its own.
void GradientOptions::check() const {
  const bool released = policy == "released";
  if (released && clip > 0)
    throw UsageError(
        "--gradients released cannot --clip by the global norm: the first weight is stepped before the last "
        "gradient exists; use --clip-tensor or --adagc, or --gradients compressed");
  if (!released && (clip_tensor > 0 || adagc > 0))
    throw UsageError("--clip-tensor and --adagc are for --gradients released; with " + policy +
                     " use --clip");
  if (released && accumulate > 1 && accumulation == "none")
    throw UsageError(
        "--gradients released keeps no gradient to accumulate in; name an --accumulation (momentum or "
        "adama), or use --gradients compressed");
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
  for (const SizeOption& option : kSizeOptions)
    if (command.count(option.name) > 0)
      throw UsageError(std::string(option.name) + " is for --model gpt; " + options.model +
                       " says its sizes in its config.json");
}

// Nothing is downloaded: of what looks like a name on Hugging Face's hub, how to fetch it.
std::string hub_hint(const std::string& name) {
  const bool is_name = std::count(name.begin(), name.end(), '/') == 1 && name.front() != '/' &&
                       name.front() != '.' && name.back() != '/';
  return is_name ? ". If it is meant on the hub, fetch it first: hf download " + name + " --local-dir " +
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
        "', and there is no such folder or file; it is gpt, a Hugging Face folder, or a config.json" +
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

void CuttingOptions::add_options(CLI::App& command) {
  command
      .add_option("--layout", layout,
                  "packed: documents one after another; padded: one to a window (default: padded where there "
                  "are prompts)")
      ->check(one_of(train::kLayouts));
  command.add_flag("--isolate", isolate, "packed documents do not see each other");
  command.add_option("--validation", validation, "the share that is kept for validation, from the end")
      ->type_name("SHARE")
      ->capture_default_str()
      ->check(a_share());
}

train::Cutting CuttingOptions::cutting(std::int64_t context) const {
  return {.context = context,
          .layout = value_named<train::Layout>(train::kLayouts, layout),
          .isolate = isolate,
          .validation_share = validation};
}

std::string name_of(const std::string& data) {
  return data == train::Data::kStandardInput ? "standard input" : data;
}

train::Data open_data(const std::string& path, const train::Cutting& cutting, const ChosenModel& model,
                      const std::string& tokenizer) {
  Vocabulary words = vocabulary_of(tokenizer);
  const bool of_tokens = path.ends_with(".bin");
  const std::int64_t vocabulary = model.config.shape.vocabulary;
  const bool unknown = !words.tokenizer && !of_tokens && !train::tokens_are_bytes(vocabulary);
  if (unknown && model.has_weights())
    throw std::runtime_error(tokenizer +
                             " has no tokenizer.json, so nothing says what tokens a text has; put it there, "
                             "or give a file of tokens (*.bin, which 'scruple tokenize' writes)");
  if (unknown)
    std::cerr << "scruple: " << (tokenizer.empty() ? "the model" : tokenizer)
              << " has no tokenizer.json: each byte of the text is a token, 256 of the model's "
              << grouped(vocabulary) << '\n';
  if (words.tokenizer && words.tokenizer->size() > vocabulary)
    throw std::runtime_error("the tokenizer of " + tokenizer + " knows " + grouped(words.tokenizer->size()) +
                             " tokens, and the model " + grouped(vocabulary) +
                             "; they do not belong together");
  if (words.tokenizer && !words.end && !of_tokens)
    std::cerr
        << "scruple: no file of " << tokenizer
        << " names an end token (eos_token in tokenizer_config.json); documents have none behind them\n";
  // What takes a while says so.
  const bool terminal = isatty(STDERR_FILENO) != 0;
  const auto start = std::chrono::steady_clock::now();
  std::size_t shown = 0;
  train::Data data(
      path, cutting,
      {.tokenizer = words.tokenizer ? &*words.tokenizer : nullptr,
       .end = words.end,
       .vocabulary = vocabulary,
       .limit = free_memory(),
       .progress = [&](std::int64_t done, std::int64_t all) {
         if (!terminal || all == 0 || std::chrono::steady_clock::now() - start < std::chrono::seconds(1))
           return;
         const std::string line = "reading " + name_of(path) + ": " + std::to_string(100 * done / all) + " %";
         std::cerr << '\r' << line << std::flush;
         shown = line.size();
       }});
  if (shown > 0) std::cerr << '\r' << std::string(shown, ' ') << '\r' << std::flush;
  note_about(data, cutting, token_word(model.config.shape));
  return data;
}

namespace {

constexpr std::int64_t kLarge = std::int64_t{1} << 20;  // a recipe may leave small tensors in fp32

// The format that a model computes with; none of train::kPrecisions: it is decoded, which the CPU alone does.
std::string visible_weights(const Choice& choice, const std::string& recipe) {
  const scruple_tensor tensor = choice.describe(choice.make_optimizer(), recipe, kLarge);
  return train::visible_format(tensor.arrays[SCRUPLE_WEIGHT]);
}

}  // namespace

std::string computed_in(const Choice& choice, const std::string& recipe) {
  const std::string format = visible_weights(choice, recipe);
  return precision_name(
      value_named<train::Precision>(train::kPrecisions, format).value_or(train::Precision::fp32));
}

bool serves_gpu(const Choice& choice, const std::string& recipe) {
  return value_named<train::Precision>(train::kPrecisions, visible_weights(choice, recipe)).has_value();
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
  if (options.offload && !with_gpu)
    throw UsageError(
        "--offload is for a GPU, and this run is on the CPU; leave it out, or say --device cuda");
  if (with_gpu && !serves_gpu(choice, recipe))
    throw Error(
        SCRUPLE_UNSUPPORTED,
        "weights of " + visible_weights(choice, recipe) +
            " are computed with on the CPU alone; choose --device cpu, or a --recipe or --weights of " +
            either(train::kPrecisions));
  if (gradients.accumulation != "none") {
    const Optimizer optimizer = choice.make_optimizer();
    const scruple_tensor tensor = choice.describe(optimizer, recipe, kLarge);
    for (const int a : used_arrays(tensor))
      if (a >= SCRUPLE_SLOT && a < SCRUPLE_GRADIENT && tensor.arrays[a].format != format_named("fp32"))
        throw UsageError("--accumulation " + gradients.accumulation +
                         " adds up micro-batches in the moments, in which 8 bits would lose them; say "
                         "--moments fp32, or use --gradients compressed");
  }
  if (gradients.policy == "released" && !choice.gradient.empty())
    throw UsageError("--gradients released keeps no gradient, so --gradient-format has nothing to format");
  train::Job job;
  job.shape = shape;
  job.initial = model.initial();
  job.batch = options.batch;
  job.recompute = value_named<train::Recompute>(train::kRecomputes, options.recompute).value();
  job.offloads = options.offload;
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

std::int64_t tokens_per_step(const train::Job& job) {
  return job.batch * job.gradients.micro_batches * job.shape.context;
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

Memory plan_of(const Choice& choice, const std::string& recipe, const train::Job& job,
               const std::string& policy) {
  const std::vector<train::Parameter> parameters = train::parameters_of(job.shape);
  Model model;
  for (const train::Parameter& parameter : parameters) model.add(parameter.size());
  Memory memory = measure(choice, choice.make_optimizer(), recipe, model, policy);
  if (policy == "released") memory.gradients = job.backend(1)->released_bytes(parameters, job.activations);
  return memory;
}

std::int64_t free_memory(const train::Job& job) {
  const std::unique_ptr<train::Backend> backend = job.backend(job.threads);
  return backend->memory().is_host() ? free_memory() : backend->free_bytes();
}

bool on_gpu(const train::Job& job) { return job.backend == train::cuda_backend; }

namespace {

// What takes less memory in the passes, and the job does not have.
std::vector<std::string> options_of_passes(const train::Job& job) {
  std::vector<std::string> names;
  if (job.recompute != train::Recompute::block) names.emplace_back("--recompute block");
  if (on_gpu(job) && !job.offloads) names.emplace_back("--offload");
  return names;
}

}  // namespace

std::string savings(const train::Job& job, bool chooses_recipe) {
  std::vector<std::string> smaller = {"model"}, names = options_of_passes(job);
  if (job.batch > 1) smaller.emplace_back("--batch");
  smaller.emplace_back("--context");
  if (chooses_recipe) smaller.emplace_back("--recipe");
  if (job.gradients.policy == SCRUPLE_STORED) names.emplace_back("--gradients released or compressed");
  if (job.gradients.policy == SCRUPLE_COMPRESSED) names.emplace_back("--gradients released");
  return "choose a smaller " + either(smaller) + (names.empty() ? "" : ", or " + joined(names, ", or "));
}

std::string savings_of_passes(const train::Job& job) {
  std::vector<std::string> names = options_of_passes(job);
  names.emplace_back(on_gpu(job) ? "--device cpu, or a GPU with more memory" : "a machine with more memory");
  return "a run that goes on keeps its sizes and formats; choose " + joined(names, ", or ");
}

void rethrow_shortage(const train::Job& job, const std::string& advice) {
  if (!on_gpu(job)) throw;
  throw std::runtime_error("out of memory, the GPU's or the host's; " + advice);
}

Table checked_memory(const std::string& what, const train::Job& job, const Memory& plan,
                     const std::string& advice, std::int64_t limit) {
  const train::Ledger needed = train::memory_of(job);
  const Unit unit = unit_for(needed.peak(), 1);
  const auto params = static_cast<double>(train::parameter_count(job.shape));
  Table table;
  table.rows = {{"memory", unit.name, "B/param"}};
  std::int64_t sum = 0;
  const auto add = [&](const std::string& name, std::int64_t bytes) {
    sum += bytes;
    const auto size = static_cast<double>(bytes);
    if (bytes > 0) table.rows.push_back({name, fixed(size / unit.bytes, 2), fixed(size / params, 3)});
  };
  for (const auto& [name, bytes] : measured_parts(needed, plan)) add(name, bytes);
  add("activations", needed.peak("activations"));
  add("workspace", needed.peak("workspace"));
  add("total", std::exchange(sum, 0));
  const std::int64_t free = free_memory(job);
  if (needed.peak() <= std::min(free, limit)) return table;
  std::ostringstream text;
  table.print(text);
  throw std::runtime_error(what + " needs " + size_words(needed.peak()) + ", and " +
                           (free < limit ? size_words(free) + " are free" + (on_gpu(job) ? " on the GPU" : "")
                                         : "--memory-limit is " + size_words(limit)) +
                           "; " + advice + "\n\n" + text.str());
}

std::vector<std::pair<std::string, std::int64_t>> measured_parts(const train::Ledger& ledger,
                                                                 const Memory& plan) {
  std::vector<std::pair<std::string, std::int64_t>> parts;
  for (const auto& [name, bytes] : plan.parts()) parts.emplace_back(name, ledger.peak(name));
  return parts;
}

std::int64_t measured_total(const train::Ledger& ledger) {
  std::int64_t sum = 0;
  for (const train::Ledger::Entry& entry : ledger.entries())
    if (is_state(entry.kind)) sum += entry.peak;
  return sum;
}

train::Span span_of(std::int64_t steps, std::int64_t validate_every) {
  train::Span span;
  span.steps = steps;
  span.validate_every = validate_every > 0 ? validate_every : std::max<std::int64_t>(steps / 20, 1);
  span.go_on = [] { return !Interrupts::asked(); };
  return span;
}

double most_tokens(const train::Trainer& trainer, const train::Job& job) {
  if (job.activations == train::Precision::fp32) return 0;
  return trainer.backend().peak_flops() / train::flops_per_token(job.shape);
}

double tokens_per_second(const train::Record& record, std::int64_t tokens) {
  return 1e3 * static_cast<double>(tokens) / record.ms_per_step();
}

std::string mfu_words(double rate, double most) { return most > 0 ? fixed(100 * rate / most, 1) + " %" : ""; }

Progress::Progress(std::string label, const train::Job& job, const train::Trainer& trainer,
                   const train::Ledger& ledger)
    : label_(std::move(label)),
      steps_(job.schedule.steps),
      tokens_(tokens_per_step(job)),
      most_tokens_(most_tokens(trainer, job)),
      ledger_(ledger),
      terminal_(isatty(STDERR_FILENO) != 0),
      last_(Clock::now()) {}

Progress::~Progress() { clear(); }

void Progress::clear() {
  if (terminal_ && width_ > 0)
    std::cerr << '\r' << std::string(std::min(width_, columns_for_a_line()), ' ') << '\r' << std::flush;
  width_ = 0;
}

void Progress::warn(const std::string& message) {
  clear();
  std::cerr << "scruple: " << message << std::endl;
}

std::string Progress::line(const train::Record& record, double seconds_left) const {
  const auto done = static_cast<std::int64_t>(record.steps.size());
  const double rate = tokens_per_second(record, tokens_);
  const train::Outcome& last = record.steps.back();
  std::string text = label_ + "  step " + grouped(done) + "/" + grouped(steps_) + "  loss " +
                     fixed(last.loss, 4) + "  " + grouped(std::llround(rate)) + " tokens/s  ";
  if (const std::string mfu = mfu_words(rate, most_tokens_); !mfu.empty()) text += "MFU " + mfu + "  ";
  text += duration(seconds_left) + " left  peak " + size_words(ledger_.peak());
  if (last.loss_scale != 1) text += "  scale " + shortest(last.loss_scale);
  if (last.skipped) text += "  skipped";
  return text;
}

bool Progress::is_due(bool in_any_case) {
  const auto pause = terminal_ ? std::chrono::milliseconds(100) : std::chrono::seconds(10);
  if (Clock::now() - last_ < pause && !in_any_case) return false;
  last_ = Clock::now();
  return true;
}

void Progress::put(std::string text) {
  if (!terminal_) {
    std::cerr << text << std::endl;
    return;
  }
  const std::size_t columns = columns_for_a_line();
  text.resize(std::min(text.size(), columns));
  width_ = std::min(width_, columns);  // the window may have become narrower
  std::cerr << '\r' << text << std::string(width_ > text.size() ? width_ - text.size() : 0, ' ')
            << std::flush;
  width_ = text.size();
}

void Progress::show(const train::Record& record, double seconds_left) {
  const bool last = static_cast<std::int64_t>(record.steps.size()) == steps_;
  if (is_due(last && !terminal_)) put(line(record, seconds_left));
}

void Progress::validating(std::int64_t done, std::int64_t all) {
  if (is_due(false)) put(label_ + "  validating, " + std::to_string(100 * done / all) + " %");
}

std::string duration(double seconds) {
  const std::int64_t whole = std::llround(seconds);
  char text[64];
  if (whole < 3600)
    std::snprintf(text, sizeof text, "%d:%02d", static_cast<int>(whole / 60), static_cast<int>(whole % 60));
  else
    std::snprintf(text, sizeof text, "%lld:%02d:%02d", static_cast<long long>(whole / 3600),
                  static_cast<int>(whole / 60 % 60), static_cast<int>(whole % 60));
  return text;
}

void make_folder(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) throw std::runtime_error("cannot make the folder " + path + ": " + error.message());
}

Interrupts::Interrupts() {
  interrupted = 0;
  for (std::size_t i = 0; i < std::size(kSignals); ++i) {
    before_[i] = std::signal(kSignals[i], note_interrupt);
    if (before_[i] == SIG_IGN) std::signal(kSignals[i], SIG_IGN);
  }
}

Interrupts::~Interrupts() {
  for (std::size_t i = 0; i < std::size(kSignals); ++i) std::signal(kSignals[i], before_[i]);
}

int Interrupts::signal() { return interrupted; }

const char* Interrupts::name() {
  return interrupted == SIGINT ? "Ctrl-C (SIGINT)" : interrupted == SIGTERM ? "SIGTERM" : "SIGHUP";
}

}  // namespace scruple::cli
