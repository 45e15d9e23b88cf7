#include "train/text/stream.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "train/text/utf8.h"

namespace scruple::train {
namespace {

constexpr std::size_t kPart = std::size_t{1} << 20, kBlock = std::size_t{1} << 16;
constexpr std::size_t kAround =
    2048;  // bytes on each side of a place that are looked at before a text is cut there
constexpr std::int64_t kPartsPerThread = 4;  // that are read and not yet written

struct Part {
  std::string text, path;
  std::int64_t lines_before = 0;
  bool are_lines = false, begins = true, ends = true;  // of a text
};

bool is_word(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
         static_cast<signed char>(c) < 0;
}

// Whether what stands around a place has the same tokens when it is cut there.
bool cuts_well(Tokenizer& tokenizer, std::string_view text, std::size_t place) {
  std::size_t begin = place - kAround, end = place + kAround;
  while (begin < place && !begins_character(text[begin])) ++begin;
  while (end > place && !begins_character(text[end])) --end;
  const auto tokens_of = [&](std::size_t from, std::size_t to) {
    std::int64_t replaced = 0;
    return tokenizer.encode(valid_utf8(text.substr(from, to - from), replaced), Tokenizer::Part::completion);
  };
  std::vector<Token> apart = tokens_of(begin, place);
  const std::vector<Token> behind = tokens_of(place, end);
  apart.insert(apart.end(), behind.begin(), behind.end());
  return apart == tokens_of(begin, end);
}

// Where a text may be cut: behind a line's end or before a space, a word on either side. 0: nowhere.
std::size_t place_to_cut(Tokenizer& tokenizer, std::string_view text) {
  constexpr int kTries = 64;
  for (const char mark : {'\n', ' '})
    for (std::size_t at = text.size() - kAround - 1, tries = 0; at > kAround && tries < kTries; --at) {
      if (text[at] != mark || !is_word(text[at + 1]) || text[at - 1] == mark) continue;
      const std::size_t place = mark == '\n' ? at + 1 : at;
      if (cuts_well(tokenizer, text, place)) return place;
      ++tries;
    }
  return 0;
}

// ---- Reading ----

class Parts {
 public:
  Parts(const std::vector<std::string>& paths, bool are_lines, std::int64_t limit)
      : paths_(paths), are_lines_(are_lines), limit_(limit) {}

  // False: there are no more. The tokenizer says where a text may be cut.
  bool next(Part& part, Tokenizer& tokenizer) {
    if (file_ == nullptr && which_ == paths_.size()) return false;
    if (file_ == nullptr) open();
    const bool are_lines = are_lines_ || is_json_lines(paths_[which_]);
    std::size_t end = 0;
    for (std::size_t wanted = kPart + 2 * kAround; end == 0; wanted *= 2) {
      fill(wanted);
      if (is_at_end_)
        end = buffer_.size();
      else
        end = are_lines ? buffer_.rfind('\n') + 1 : place_to_cut(tokenizer, buffer_);
      if (buffer_.empty()) break;
    }
    part = {buffer_.substr(0, end), name(), lines_, are_lines, begins_, end == buffer_.size() && is_at_end_};
    buffer_.erase(0, end);
    begins_ = false;
    if (are_lines) lines_ += std::count(part.text.begin(), part.text.end(), '\n');
    if (part.ends) file_.reset(), ++which_;
    return true;
  }

 private:
  struct Close {
    void operator()(std::FILE* file) const {
      if (file != stdin) std::fclose(file);
    }
  };

  std::string name() const {
    return paths_[which_] == Documents::kStandardInput ? "standard input" : paths_[which_];
  }

  [[noreturn]] void fail(const char* doing, int error) const {
    io::fail("cannot ", doing, " ", name(), ": ", std::generic_category().message(error),
             "; nothing was written");
  }

  void open() {
    const std::string& path = paths_[which_];
    file_.reset(path == Documents::kStandardInput ? stdin : std::fopen(path.c_str(), "rbe"));
    if (file_ == nullptr) fail("open", errno);
    struct stat status {};
    const bool is_file = ::fstat(::fileno(file_.get()), &status) == 0 && S_ISREG(status.st_mode);
    size_ = is_file ? status.st_size - ::ftello(file_.get()) : 0;  // who gave it may have read its beginning
    buffer_.clear();
    is_at_end_ = false, begins_ = true, lines_ = 0, read_ = 0;
    fill(kBlock);
    if (path != Documents::kStandardInput) check_is_text(buffer_, path, /*bytes_are_tokens=*/false);
  }

  void fill(std::size_t wanted) {
    if (static_cast<std::int64_t>(wanted) > limit_)
      io::fail(name(), ": ", buffer_.size() >> 20, " MiB of it are one ",
               are_lines_ || is_json_lines(paths_[which_]) ? "line" : "word",
               ", and more does not fit into memory; ", "give a file with shorter ones");
    while (!is_at_end_ && buffer_.size() < wanted) {
      const std::size_t before = buffer_.size();
      buffer_.resize(before + kBlock);
      const std::size_t got = std::fread(buffer_.data() + before, 1, kBlock, file_.get());
      buffer_.resize(before + got);
      read_ += static_cast<std::int64_t>(got);
      if (got == kBlock) continue;
      if (std::ferror(file_.get()) != 0) fail("read", errno);
      is_at_end_ = std::feof(file_.get()) != 0;
      if (is_at_end_ && read_ < size_)
        io::fail(name(), " was shortened while it was read: it had ", size_, " bytes, and ends after ", read_,
                 "; nothing was written");
    }
  }

  const std::vector<std::string>& paths_;
  const bool are_lines_;
  const std::int64_t limit_;
  std::size_t which_ = 0;
  std::unique_ptr<std::FILE, Close> file_;
  std::string buffer_;
  bool is_at_end_ = false, begins_ = true;
  std::int64_t lines_ = 0, read_ = 0, size_ = 0;
};

// ---- Encoding ----

struct Result {
  std::vector<Token> tokens;
  std::vector<std::uint8_t> flags;
  Encoded more;
  std::exception_ptr error;
};

void encode(Part& part, Documents& documents, Result& result) {
  const std::int64_t empty = documents.empty(), replaced = documents.replaced();
  if (part.are_lines)
    documents.add_lines(part.text, part.path, part.lines_before);
  else
    documents.add_text(part.text, part.path, part.begins, part.ends);
  const bool has_prompts = documents.has_prompts();
  documents.take(result.tokens, result.flags);
  if (!part.begins && !part.are_lines && !result.flags.empty())
    result.flags[0] = static_cast<std::uint8_t>(result.flags[0] & ~kBegins);
  result.more = {static_cast<std::int64_t>(part.text.size()), static_cast<std::int64_t>(result.tokens.size()),
                 documents.empty() - empty, documents.replaced() - replaced, has_prompts};
}

// Every thread reads a part, encodes it, and writes what is next, if nobody else is writing.
class Encoders {
 public:
  Encoders(Parts& parts, std::int64_t threads, TokenWriter& writer,
           const std::function<void(const Encoded&)>& written)
      : parts_(parts), most_(kPartsPerThread * threads), writer_(writer), written_(written) {}

  void work(const Reading& reading) {
    try {
      Documents documents(reading);
      Part part;
      for (std::int64_t number = 0; take(part, *reading.tokenizer, number);) {
        Result result;
        try {
          encode(part, documents, result);
        } catch (...) {
          result.error = std::current_exception();
        }
        put(number, std::move(result));
      }
    } catch (...) {
      stop(std::current_exception());
    }
  }
  void stop(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::move(error);
    changed_.notify_all();
  }
  const Encoded& finish() const {
    if (error_) std::rethrow_exception(error_);
    return encoded_;
  }

 private:
  bool take(Part& part, Tokenizer& tokenizer, std::int64_t& number) {
    const std::lock_guard input(input_);
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return error_ || taken_ < next_ + most_; });
      if (error_ || is_at_end_) return false;
    }
    number = taken_++;
    try {
      is_at_end_ = !parts_.next(part, tokenizer);
    } catch (...) {  // told after what stands before it
      is_at_end_ = true;
      Result result;
      result.error = std::current_exception();
      put(number, std::move(result));
    }
    return !is_at_end_;
  }

  void put(std::int64_t number, Result result) {
    std::unique_lock lock(mutex_);
    results_.emplace(number, std::move(result));
    if (std::exchange(is_writing_, true)) return;
    for (auto found = results_.find(next_); found != results_.end() && !error_;
         found = results_.find(next_)) {
      const Result done = std::move(found->second);
      results_.erase(found);
      lock.unlock();
      std::exception_ptr error = done.error;
      try {
        if (!error) write(done);
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      ++next_;
      if (error && !error_) error_ = error;
      changed_.notify_all();
    }
    is_writing_ = false;
  }

  void write(const Result& result) {
    writer_.write(result.tokens, result.flags, result.more.has_prompts);
    encoded_.bytes += result.more.bytes;
    encoded_.tokens += result.more.tokens;
    encoded_.empty += result.more.empty;
    encoded_.replaced += result.more.replaced;
    encoded_.has_prompts |= result.more.has_prompts;
    written_(encoded_);
  }

  Parts& parts_;
  const std::int64_t most_;
  TokenWriter& writer_;
  const std::function<void(const Encoded&)>& written_;
  std::mutex input_;  // of parts_, taken_ and is_at_end_
  std::int64_t taken_ = 0;
  bool is_at_end_ = false;
  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::map<std::int64_t, Result> results_;
  std::int64_t next_ = 0;  // to be written
  bool is_writing_ = false;
  std::exception_ptr error_;
  Encoded encoded_;  // of who is writing
};

}  // namespace

Encoded encode_texts(const std::vector<std::string>& paths, bool are_lines, const Reading& reading,
                     const std::function<Tokenizer()>& another, int threads, TokenWriter& writer,
                     const std::function<void(const Encoded&)>& written) {
  Parts parts(paths, are_lines, reading.limit / 8);  // a part is copied a few times while it becomes tokens
  Encoders encoders(parts, threads, writer, written);
  // A thread that gets no part would read its tokenizer for nothing.
  std::uintmax_t most = 0;
  for (const std::string& path : paths) {
    std::error_code unknown;
    const std::uintmax_t bytes = std::filesystem::file_size(path, unknown);
    most += unknown ? static_cast<std::uintmax_t>(threads) : bytes / kPart + 1;
  }
  threads = static_cast<int>(std::min<std::uintmax_t>(most, static_cast<std::uintmax_t>(threads)));
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i)
    others.emplace_back([&] {
      try {
        Tokenizer tokenizer = another();
        Reading own = reading;
        own.tokenizer = &tokenizer;
        encoders.work(own);
      } catch (...) {
        encoders.stop(std::current_exception());
      }
    });
  encoders.work(reading);
  for (std::thread& other : others) other.join();
  return encoders.finish();
}

}  // namespace scruple::train
