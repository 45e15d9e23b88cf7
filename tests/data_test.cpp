// Windows of every layout, to the token: which targets count, epochs, the share for validation.
#include "train/text/data.h"

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <set>
#include <vector>

#include "io/crc32.h"
#include "tests/windows.h"
#include "train/random.h"

namespace scruple_tests {
namespace {

namespace io = scruple::io;

// As "9-12 15-20".
std::string runs_of(const Document& document, const std::vector<Gap>& gaps) {
  std::string text;
  each_counted(document, gaps, [&](std::int64_t begin, std::int64_t end) {
    EXPECT_LT(begin, end);
    text += (text.empty() ? "" : " ") + std::to_string(begin) + "-" + std::to_string(end);
  });
  return text;
}

TEST(Targets, ADocumentCountsInSeveralRuns) {
  EXPECT_EQ(runs_of({4, 20, 4}, {}), "4-20");
  EXPECT_EQ(runs_of({4, 20, 9}, {}), "9-20");
  EXPECT_EQ(runs_of({4, 20, 20}, {}), "") << "an end alone";
  const std::vector<Gap> gaps = {{1, 3}, {12, 15}, {17, 18}, {25, 30}};
  EXPECT_EQ(runs_of({4, 20, 9}, gaps), "9-12 15-17 18-20") << "gaps of other documents pass it by";
  EXPECT_EQ(runs_of({4, 18, 12}, gaps), "15-17") << "one at its first token that counts, one at its end";
  EXPECT_EQ(runs_of({20, 25, 20}, gaps), "20-25");
  EXPECT_EQ(runs_of({25, 30, 25}, gaps), "");
}

// ---- Packed ----

TEST_F(DataTest, BytesOfAFileArePackedAsTheyAre) {
  std::string text(100, ' ');
  std::iota(text.begin(), text.end(), ' ');
  const Data data(put(text, "text"), {.context = 4});
  EXPECT_EQ(data.layout(), Layout::packed);
  EXPECT_EQ(data.size(), 100);
  EXPECT_EQ(data.memory(), static_cast<std::int64_t>(sizeof(Document)));  // the file is mapped
  EXPECT_EQ(data.crc32(), io::crc32(text));
  const Windows training = data.training(), validation = data.validation();
  EXPECT_EQ(training.places(), 95 - 4);   // a twentieth is held out
  EXPECT_EQ(training.count(), 22);        // that share no token
  EXPECT_EQ(validation.places(), 5 - 4);  // one window
  const Window first = read(training, 3), last = read(validation, 0);
  EXPECT_EQ(shown(first.tokens), "#$%&");
  EXPECT_EQ(shown(first.targets), "$%&'");
  EXPECT_EQ(first.starts, Numbers(4, 0));
  EXPECT_EQ(last.targets.back(), 32 + 99);
  // A run of an earlier version goes on with the windows that it has always drawn.
  const Data older(path("text"), {.context = 4, .by_chance = true});
  for (const std::uint64_t index : {0u, 1u, 1000u})
    EXPECT_EQ(older.training().drawn(5, index),
              static_cast<std::int64_t>(random_bits(5, kDataStream, index) % 91));
}

TEST_F(DataTest, EachEpochSeesEveryPackedTokenOnce) {
  const std::string text(1000, 'x');
  for (const std::int64_t context : {1, 2, 7, 13, 27, 28, 29, 100, 400, 475}) {
    const Windows windows = Data(put(text, "text"), packed(context)).training();
    const std::int64_t tokens = windows.places() + context;  // the last is a target alone
    std::vector<std::int64_t> seen(static_cast<std::size_t>(tokens));
    for (std::uint64_t epoch = 0; epoch < 60; ++epoch) {
      std::vector<std::int64_t> starts;
      for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(windows.count()); ++i)
        starts.push_back(windows.drawn(3, epoch * static_cast<std::uint64_t>(windows.count()) + i));
      std::sort(starts.begin(), starts.end());
      ASSERT_GE(starts.front(), 0);
      ASSERT_LE(starts.back() + context, tokens - 1);
      for (std::size_t i = 0; i < starts.size(); ++i) {
        if (i > 0) {
          ASSERT_GE(starts[i] - starts[i - 1], context);
        }
        for (std::int64_t t = 0; t < context; ++t) ++seen[static_cast<std::size_t>(starts[i] + t)];
      }
      const std::int64_t left_out = tokens - 1 - windows.count() * context;
      ASSERT_LE(left_out, tokens / 33 + 2 * context) << context;
    }
    // What an epoch leaves out, others have: all but what stands at the very ends.
    const auto never = std::count(seen.begin(), seen.end() - 1, 0);
    EXPECT_LT(static_cast<double>(never), 0.1 * static_cast<double>(tokens)) << context;
  }
}

TEST_F(DataTest, AFolderIsReadInTheOrderOfItsPaths) {
  std::filesystem::create_directories(path("texts/b"));
  put("DEF", "texts/b/second.md");
  put("ABC", "texts/a.txt");
  put("{\"text\": \"GHI\"}\n{\"text\": \"\"}\n{\"text\": \"JKL\"}", "texts/c.jsonl");
  put("no text", "texts/picture.png");
  put("", "texts/empty.txt");
  std::int64_t done = 0, all = 0;
  const Data data(path("texts"), {.context = 5},
                  {.end = kEnd, .progress = [&](std::int64_t d, std::int64_t a) { done = d, all = a; }});
  EXPECT_EQ(data.documents(), 4);
  EXPECT_EQ(data.left_out(), 2);
  EXPECT_EQ(data.size(), 16);
  EXPECT_EQ(done, all);
  EXPECT_EQ(all, 3 + 3 + 15 + 1 + 12 + 1 + 15);
  EXPECT_EQ(shown(read(data.training(), 0).tokens), "ABC|D");
  EXPECT_EQ(shown(read(data.training(), 3).targets), "DEF|G");
  EXPECT_EQ(shown(read(data.validation(), 0).tokens), "I|JKL");
  EXPECT_EQ(shown(read(data.validation(), 0).targets), "|JKL|");
}

TEST_F(DataTest, APackedWindowCountsCompletionsAlone) {
  const std::string file =
      put(line("AB", "cd") + line("efg") +
              R"({"completion": "i", "more": [{"completion": "x", "text": 1}], "prompt": "H"})"
              "\n" +
              line("jklmnopqrstuvwxyz"),
          "notes.jsonl");
  const Data data(file, packed(12), {.end = kEnd});  // ABcd|efg|Hi|jklmnopqrstuvwxyz|
  const Windows windows = data.training();
  // The last of a document predicts the first of the next one, which counts where that is a text.
  EXPECT_EQ(shown(read(windows, 0).tokens), "ABcd|efg|Hi|");
  EXPECT_EQ(shown(read(windows, 0).targets), ".cd|efg|.i|j");
  EXPECT_EQ(read(windows, 0).starts, Numbers(12, 0));
}

TEST_F(DataTest, IsolatedDocumentsKnowWhereTheyBegin) {
  const std::string file =
      put(line("ABC") + line("DE", "fg") + line("H") + line("IJKLMNOPQRSTUVW"), "notes.jsonl");
  const Data data(file, isolated(9), {.end = kEnd});  // ABC|DEfg|H|IJKLMNOPQRSTUVW|
  EXPECT_TRUE(data.training().isolates());
  const Window first = read(data.training(), 0), second = read(data.training(), 3);
  EXPECT_EQ(shown(first.tokens), "ABC|DEfg|");
  EXPECT_EQ(shown(first.targets), "BC|..fg|.");  // neither a prompt nor another document's begin counts
  EXPECT_EQ(first.starts, (Numbers{0, 0, 0, 0, 4, 4, 4, 4, 4}));
  EXPECT_EQ(shown(second.tokens), "|DEfg|H|I");
  EXPECT_EQ(shown(second.targets), "..fg|.|.J");
  EXPECT_EQ(second.starts, (Numbers{0, 1, 1, 1, 1, 1, 6, 6, 8}));
  // From the end of the text, where the document began before the window.
  const Window last = read(data.validation(), data.validation().places() - 1);
  EXPECT_EQ(shown(last.tokens), "OPQRSTUVW");
  EXPECT_EQ(shown(last.targets), "PQRSTUVW|");
  EXPECT_EQ(last.starts, Numbers(9, 0));
}

TEST_F(DataTest, AnEmptyFileIsNoDocument) {
  const auto window = [&](const std::vector<std::string>& files) {
    Cutting cutting = isolated(7);
    cutting.validation_share = 0;
    const Data data({{files}}, cutting);
    EXPECT_EQ(data.documents(), 3);
    EXPECT_EQ(data.left_out(), static_cast<std::int64_t>(files.size()) - 3);
    const Window found = read(data.training(), 0);
    EXPECT_EQ(found.starts, (Numbers{0, 0, 2, 2, 4, 4, 4}));
    return shown(found.targets);
  };
  const std::string a = put("AB", "a"), none = put("", "none"), b = put("CD", "b"), c = put("EFGH", "c");
  EXPECT_EQ(window({a, b, c}), "B.D.FGH");
  EXPECT_EQ(window({a, none, b, c}), "B.D.FGH");
  EXPECT_EQ(window({none, a, b, none, none, c, none}), "B.D.FGH");
}

// An isolated window says of each document what that document alone says.
TEST_F(DataTest, IsolatedAndPaddedCountTheSameTargets) {
  std::string lines;
  for (int i = 1; i < 30; ++i) {
    const std::string text(static_cast<std::size_t>(i % 7 + 1), static_cast<char>('A' + i % 26));
    lines += i % 3 == 0 ? line(text, "zz") : line(text);
  }
  const std::string file = put(lines, "notes.jsonl");
  const auto counting = [](const Windows& windows, std::int64_t from) {
    const Window window = read(windows, from);
    return std::count_if(window.targets.begin(), window.targets.end(), [](auto t) { return t != kNoTarget; });
  };
  const Data alone(file, padded(20), {.end = kEnd}), together(file, isolated(8), {.end = kEnd});
  std::int64_t one = 0, other = 0;
  for (std::int64_t d = 0; d < 28; ++d) one += counting(alone.training(), d);
  one += counting(alone.validation(), 0);
  EXPECT_EQ(alone.training().count(), 28);
  // Every token but the first of all is the target of one place in the windows that begin at each token.
  std::vector<bool> counts(static_cast<std::size_t>(together.size()));
  for (const bool is_training : {true, false}) {
    const Windows windows = is_training ? together.training() : together.validation();
    const std::int64_t begin = is_training ? 0 : together.size() - windows.places() - 8;
    for (std::int64_t at = 0; at < windows.places(); ++at) {
      const Window window = read(windows, at);
      for (std::size_t i = 0; i < 8; ++i)
        if (window.targets[i] != kNoTarget) counts[static_cast<std::size_t>(begin + at) + i + 1] = true;
    }
  }
  other = std::count(counts.begin(), counts.end(), true);
  EXPECT_GE(one, other);
  EXPECT_LE(one - other, 1);  // the target between training and validation is in no window
}

// ---- Padded ----

TEST_F(DataTest, PaddedWindowsHaveOneDocument) {
  const std::string file =
      put("{\"prompt\": \"AB\", \"completion\": \"cd\"}\r\n"     // fits
          "\r\n"                                                 // blank
          "{\"prompt\": \"ABCDE\", \"completion\": \"fghi\"}\n"  // its last prompt token predicts one more
          "{\"prompt\": \"ABCDEF\", \"completion\": \"ghi\"}\n"  // nothing counts
          "{\"prompt\": \"AB\", \"completion\": \"\"}\n"         // only its end counts
          "{\"prompt\": \"AB|\", \"completion\": \"\"}\n"
          "  \n"
          "{\"text\": \"klmnopqr\"}\n"  // cut
          "{\"text\": \"stuvw\"}",      // its end is the last target
          "notes.jsonl");
  const Data data(file, padded(5), {.end = kEnd});
  EXPECT_EQ(data.documents(), 6);
  EXPECT_EQ(data.left_out(), 1);
  EXPECT_EQ(data.cut(), 2);
  const Windows training = data.training();
  EXPECT_EQ(training.count(), 5);
  EXPECT_EQ(data.validation().count(), 1);
  const std::pair<const char*, const char*> expected[] = {
      {"ABcd|", ".cd|."}, {"ABCDE", "....f"}, {"AB|..", ".|..."}, {"AB||.", "..|.."}, {"klmno", "lmnop"}};
  for (std::int64_t d = 0; d < 5; ++d) {
    const Window window = read(training, d);
    EXPECT_EQ(shown(window.tokens), expected[d].first) << d;
    EXPECT_EQ(shown(window.targets), expected[d].second) << d;
    EXPECT_EQ(window.starts, Numbers(5, 0));
  }
  EXPECT_EQ(shown(read(data.validation(), 0).targets), "tuvw|");
  EXPECT_EQ(Data(file, packed(5), {.end = kEnd}).layout(), Layout::packed);
  EXPECT_EQ(Data(file, {.context = 5}, {.end = kEnd}).layout(), Layout::whole);
  EXPECT_EQ(Data(file, {.context = 5, .by_chance = true}, {.end = kEnd}).layout(), Layout::padded);
  EXPECT_EQ(Data(put("{\"text\": \"plain lines are packed\"}", "plain.jsonl"), {.context = 5}).layout(),
            Layout::packed);
}

TEST_F(DataTest, WithoutAnEndTokenTheCompletionAloneCounts) {
  const Data data(put(line("AB", "c") + line("A", "") + line("", "xyz"), "notes.jsonl"), {.context = 4});
  EXPECT_EQ(data.left_out(), 1);
  EXPECT_EQ(shown(read(data.training(), 0).targets), ".c..");
  EXPECT_EQ(shown(read(data.validation(), 0).targets), "yz..");
}

TEST_F(DataTest, EachEpochSeesEveryDocumentOnce) {
  for (const std::int64_t count : {1, 2, 3, 5, 16, 17, 100, 1000}) {
    std::string lines;
    for (std::int64_t i = 0; i <= count; ++i) lines += line("ab");
    Cutting cutting = padded(4);
    cutting.validation_share = 1e-9;  // one
    const Data data(put(lines, "notes.jsonl"), cutting);
    const Windows windows = data.training();
    ASSERT_EQ(windows.count(), count);
    std::set<std::vector<std::int64_t>> orders;
    for (const std::uint64_t seed : {1u, 2u})
      for (std::uint64_t epoch = 0; epoch < 3; ++epoch) {
        std::vector<std::int64_t> order;
        for (std::int64_t i = 0; i < count; ++i)
          order.push_back(
              windows.drawn(seed, epoch * static_cast<std::uint64_t>(count) + static_cast<std::uint64_t>(i)));
        orders.insert(order);
        std::sort(order.begin(), order.end());
        for (std::int64_t i = 0; i < count; ++i) ASSERT_EQ(order[static_cast<std::size_t>(i)], i) << count;
      }
    if (count >= 16) {
      EXPECT_EQ(orders.size(), 6u) << count;
    }  // of two seeds and three epochs, all different
  }
}

TEST_F(DataTest, EveryOrderOfThreeIsAsLikelyAsAnother) {
  const Data data(put(line("ab") + line("cd") + line("ef") + line("gh"), "notes.jsonl"), padded(4));
  const Windows windows = data.training();
  std::vector<int> seen(27);
  constexpr int kEpochs = 6000;
  for (std::uint64_t epoch = 0; epoch < kEpochs; ++epoch) {
    std::int64_t order = 0;
    for (std::uint64_t i = 0; i < 3; ++i) order = 3 * order + windows.drawn(7, 3 * epoch + i);
    ++seen[static_cast<std::size_t>(order)];
  }
  // Six orders; a fair count has a standard deviation of 29, and the draws are always these.
  EXPECT_EQ(std::count(seen.begin(), seen.end(), 0), 21);
  for (const int times : seen)
    if (times > 0) {
      EXPECT_NEAR(times, kEpochs / 6, 150);
    }
}

TEST_F(DataTest, TheOrderFollowsFromSeedAndIndexAlone) {
  std::string lines;
  for (int i = 0; i < 50; ++i) lines += line("ab");
  const Data data(put(lines, "notes.jsonl"), padded(4)), again(path("notes.jsonl"), padded(4));
  const Windows windows = data.training();
  std::vector<std::int64_t> forward, backward;
  for (std::uint64_t i = 0; i < 200; ++i) forward.push_back(windows.drawn(9, i));
  for (std::uint64_t i = 200; i-- > 0;) backward.push_back(again.training().drawn(9, i));
  std::reverse(backward.begin(), backward.end());
  EXPECT_EQ(forward, backward);
  // What a checkpoint of an earlier version goes on with.
  EXPECT_EQ(std::vector<std::int64_t>(forward.begin(), forward.begin() + 8),
            (std::vector<std::int64_t>{3, 8, 33, 23, 45, 4, 12, 15}));
}

// ---- Whole ----

// Of every window: what is shown, predicted, and where documents begin.
std::vector<std::string> all_of(const Windows& windows) {
  std::vector<std::string> found;
  for (std::int64_t w = 0; w < windows.count(); ++w) {
    const Window window = read(windows, w);
    std::string starts;
    for (const std::int32_t start : window.starts) starts += static_cast<char>('0' + start);
    found.push_back(shown(window.tokens) + " " + shown(window.targets) + " " + starts);
  }
  return found;
}

TEST_F(DataTest, WholeDocumentsShareWindows) {
  const Data data(put(line("AB", "cd") + line("efghijkl") + line("M", "n") + line("opq") +
                          line("ABCDEFGHIJ", "k") + line("v", "") + line("r", "stuvwxyz"),
                      "notes.jsonl"),
                  {.context = 8}, {.end = kEnd});
  EXPECT_EQ(data.layout(), Layout::whole);
  EXPECT_EQ(data.left_out(), 1);  // its completion is behind the context
  EXPECT_EQ(data.documents(), 6);
  EXPECT_TRUE(data.training().isolates());
  // The longest first, each where the least room is left: 8 alone; 4, 3 and 1 together; 2.
  EXPECT_EQ(all_of(data.training()),
            (std::vector<std::string>{"efghijkl fghijkl| 00000000", "ABcdopqv .cd|pq|| 00004447",
                                      "Mn...... n|...... 00222222"}));
  EXPECT_EQ(all_of(data.validation()), std::vector<std::string>{"rstuvwxy stuvwxyz 00000000"});
  EXPECT_EQ(data.cut(), 1);
  EXPECT_EQ(data.cut_tokens(), 1);
}

TEST_F(DataTest, ATextThatIsLongerThanAWindowGoesOnInTheNext) {
  const Data data(put(line("abcdefghijk") + line("XY"), "notes.jsonl"),
                  {.context = 4, .layout = Layout::whole}, {.end = kEnd});
  EXPECT_EQ(data.cut(), 0);
  std::vector<std::string> found = all_of(data.training());
  std::sort(found.begin(), found.end());
  EXPECT_EQ(found, (std::vector<std::string>{"abcd bcde 0000", "efgh fghi 0000", "ijk. jk|. 0003"}));
}

TEST_F(DataTest, WholeAndPaddedSayTheSameOfEveryDocument) {
  std::string lines;
  for (int i = 0; i < 400; ++i) {
    const std::string text(1 + random_bits(3, 0, static_cast<std::uint64_t>(i)) % 30,
                           static_cast<char>('A' + i % 26));
    lines += i % 3 == 0 ? line(text, "zz") : line(text);
  }
  put(lines, "notes.jsonl");
  // Each document as "tokens targets", in no order.
  const auto documents = [&](const Windows& windows) {
    std::multiset<std::string> found;
    for (std::int64_t w = 0; w < windows.count(); ++w) {
      const Window window = read(windows, w);
      for (std::size_t i = 0; i < window.tokens.size();) {
        std::size_t end = i + 1;
        while (end < window.tokens.size() && window.starts[end] == window.starts[i]) ++end;
        std::string tokens = shown({window.tokens.begin() + static_cast<std::ptrdiff_t>(i),
                                    window.tokens.begin() + static_cast<std::ptrdiff_t>(end)});
        std::string targets = shown({window.targets.begin() + static_cast<std::ptrdiff_t>(i),
                                     window.targets.begin() + static_cast<std::ptrdiff_t>(end)});
        const std::size_t last = tokens.find_last_not_of('.') + 1;  // padding
        if (last > 0) {
          tokens.resize(last), targets.resize(last);
          if (tokens.back() == '|') tokens.pop_back(), targets.pop_back();  // padded windows show the end too
          found.insert(tokens + " " + targets);
        }
        i = end;
      }
    }
    return found;
  };
  const Data whole(path("notes.jsonl"), {.context = 40, .layout = Layout::whole}, {.end = kEnd});
  const Data alone(path("notes.jsonl"), padded(40), {.end = kEnd});
  EXPECT_EQ(documents(whole.training()), documents(alone.training()));
  EXPECT_EQ(documents(whole.validation()), documents(alone.validation()));
  EXPECT_EQ(alone.training().count(), 380);
  std::int64_t places = 0;
  for (std::int64_t w = 0; w < whole.training().count(); ++w) {
    const Window window = read(whole.training(), w);
    places += std::count_if(window.tokens.begin(), window.tokens.end(), [](auto t) { return t != 0; });
  }
  EXPECT_GT(static_cast<double>(places) / (40.0 * static_cast<double>(whole.training().count())), 0.98);
}

// ---- Validation ----

TEST_F(DataTest, TheValidationShareIsTheLast) {
  const std::string text(1000, 'x');
  Cutting cutting = packed(10);
  cutting.validation_share = 0.3;
  EXPECT_EQ(Data(put(text, "text"), cutting).validation().places(), 300 - 10);
  cutting.validation_share = 0.001;
  EXPECT_EQ(Data(path("text"), cutting).validation().places(), 1);
  cutting.validation_share = 0.995;
  expect_refused("leaves 5 bytes to train on, and --context 10 takes at least 11", path("text"), cutting);
  for (const double share : {1.0, -1.0, std::nan("")}) {
    cutting.validation_share = share;
    expect_refused("is not 0 or more and below 1", path("text"), cutting);
  }
  cutting.validation_share = 0;  // then one window is enough
  EXPECT_EQ(Data(path("text"), cutting).training().places(), 1000 - 10);
  EXPECT_FALSE(Data(path("text"), cutting).has_validation());
  cutting.context = 999;
  EXPECT_EQ(Data(path("text"), cutting).training().count(), 1);
  cutting.context = 1000;
  expect_refused("text has 1000 bytes, and it takes at least 1001 at --context 1000", path("text"), cutting);
  // For every size the default is what it has always been.
  for (const int size : {22, 39, 40, 41, 219, 220, 221, 240, 1999, 2000})
    EXPECT_EQ(
        Data(put(std::string(static_cast<std::size_t>(size), 'x'), "text"), packed(10)).validation().places(),
        std::max(size / 20, 11) - 10)
        << size;
}

TEST_F(DataTest, TooLittleIsRefused) {
  expect_refused("text has 10 bytes, and training and validation take at least 12 at --context 5",
                 put("0123456789", "text"), {.context = 5});
  expect_refused("text has 0 bytes", put("", "text"), {.context = 5});
  expect_refused("empty.jsonl has 0 bytes", put("", "empty.jsonl"), {.context = 5});
  expect_refused(
      "one.jsonl has 1 document with something to learn at --context 5, and training and validation take at "
      "least one each",
      put("{\"prompt\": \"a\", \"completion\": \"b\"}", "one.jsonl"), {.context = 5});
  expect_refused(
      "none.jsonl has 0 documents with something to learn at --context 2 (1 were left out), and training and "
      "validation take at least one each; give more documents or a larger --context",
      put("{\"prompt\": \"long\", \"completion\": \"b\"}\n", "none.jsonl"), {.context = 2});
  std::filesystem::create_directory(path("bare"));
  expect_refused("bare has no *.txt, *.md, *.jsonl or *.ndjson file", path("bare"), {.context = 5});
  expect_refused("missing", path("missing"), {.context = 5});
  expect_refused("missing.jsonl", path("missing.jsonl"), {.context = 5});
  expect_refused("missing.bin", path("missing.bin"), {.context = 5});
}

}  // namespace
}  // namespace scruple_tests
