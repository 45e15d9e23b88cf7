// GPT-2's loss as one scalar function, templated on the number type and written from the papers, not from train/. With
// std::complex<double> one evaluation also gives an exact derivative (Squire & Trapp, "Using complex variables to
// estimate derivatives of real functions", 1998): nothing is subtracted, so a step of 1e-100 costs no digits.
#pragma once

#include <cmath>
#include <complex>
#include <cstdint>
#include <vector>

namespace gpt_reference {

struct Shape {
  int layers, width, heads, context, vocabulary;
};

// Parameters in Hugging Face's order, values by row.
template <class T>
using Parameters = std::vector<std::vector<T>>;
template <class T>
using Rows = std::vector<std::vector<T>>;

inline double real_part(double x) { return x; }
inline double real_part(const std::complex<double>& x) { return x.real(); }

template <class T>
struct Model {
  const Shape& shape;
  const Parameters<T>& p;

  // Ba et al., 1607.06450, eq. 4
  Rows<T> norm(const Rows<T>& x, std::size_t weight) const {
    Rows<T> y = x;
    for (std::vector<T>& row : y) {
      T mean = 0, variance = 0;
      for (const T& value : row) mean += value / T(double(row.size()));
      for (const T& value : row) variance += (value - mean) * (value - mean) / T(double(row.size()));
      for (std::size_t i = 0; i < row.size(); ++i)
        row[i] = (row[i] - mean) / std::sqrt(variance + T(1e-5)) * p[weight][i] + p[weight + 1][i];
    }
    return y;
  }

  Rows<T> linear(const Rows<T>& x, std::size_t weight) const {
    const std::size_t out = p[weight + 1].size();
    Rows<T> y;
    for (const std::vector<T>& row : x) {
      std::vector<T> sums = p[weight + 1];
      for (std::size_t i = 0; i < row.size(); ++i)
        for (std::size_t o = 0; o < out; ++o) sums[o] += row[i] * p[weight][i * out + o];
      y.push_back(sums);
    }
    return y;
  }

  static void softmax(std::vector<T>& row) {
    double top = real_part(row[0]);
    for (const T& value : row) top = std::max(top, real_part(value));
    T sum = 0;
    for (T& value : row) sum += value = std::exp(value - T(top));
    for (T& value : row) value /= sum;
  }

  // Vaswani et al., 1706.03762, section 3.2; a position sees itself and those before it.
  Rows<T> attention(const Rows<T>& qkv) const {
    const std::size_t width = std::size_t(shape.width), d = width / std::size_t(shape.heads);
    Rows<T> y(qkv.size(), std::vector<T>(width, T(0)));
    for (std::size_t h = 0; h < width; h += d)
      for (std::size_t t = 0; t < qkv.size(); ++t) {
        std::vector<T> weights(t + 1, T(0));
        for (std::size_t s = 0; s <= t; ++s)
          for (std::size_t i = h; i < h + d; ++i)
            weights[s] += qkv[t][i] * qkv[s][width + i] / T(std::sqrt(double(d)));
        softmax(weights);
        for (std::size_t s = 0; s <= t; ++s)
          for (std::size_t i = h; i < h + d; ++i) y[t][i] += weights[s] * qkv[s][2 * width + i];
      }
    return y;
  }

  // Hendrycks & Gimpel, 1606.08415, the tanh form
  static void gelu(Rows<T>& x) {
    for (std::vector<T>& row : x)
      for (T& v : row)
        v = T(0.5) * v *
            (T(1) + std::tanh(T(std::sqrt(2 / std::acos(-1.0))) * (v + T(0.044715) * v * v * v)));
  }

  static void add(Rows<T>& x, const Rows<T>& y) {
    for (std::size_t t = 0; t < x.size(); ++t)
      for (std::size_t i = 0; i < x[t].size(); ++i) x[t][i] += y[t][i];
  }

  Rows<T> logits(const std::int32_t* tokens, int count) const {
    const std::size_t width = std::size_t(shape.width);
    Rows<T> x;
    for (int t = 0; t < count; ++t) {
      std::vector<T> row;
      for (std::size_t i = 0; i < width; ++i)
        row.push_back(p[0][std::size_t(tokens[t]) * width + i] + p[1][std::size_t(t) * width + i]);
      x.push_back(row);
    }
    for (int l = 0; l < shape.layers; ++l) {
      const std::size_t first = 2 + 12 * std::size_t(l);
      add(x, linear(attention(linear(norm(x, first), first + 2)), first + 4));
      Rows<T> inner = linear(norm(x, first + 6), first + 8);
      gelu(inner);
      add(x, linear(inner, first + 10));
    }
    x = norm(x, 2 + 12 * std::size_t(shape.layers));
    Rows<T> out(x.size(), std::vector<T>(std::size_t(shape.vocabulary), T(0)));
    for (std::size_t t = 0; t < x.size(); ++t)
      for (std::size_t v = 0; v < out[t].size(); ++v)
        for (std::size_t i = 0; i < width; ++i) out[t][v] += x[t][i] * p[0][v * width + i];
    return out;
  }

  // The mean of -log p(target) over the targets that are not below 0.
  T loss(const std::vector<std::int32_t>& tokens, const std::vector<std::int32_t>& targets) const {
    const std::size_t length = std::size_t(shape.context);
    T total = 0;
    double counted = 0;
    for (std::size_t at = 0; at < tokens.size(); at += length) {
      Rows<T> rows = logits(tokens.data() + at, shape.context);
      for (std::size_t t = 0; t < length; ++t) {
        if (targets[at + t] < 0) continue;
        ++counted;
        softmax(rows[t]);
        total -= std::log(rows[t][std::size_t(targets[at + t])]);
      }
    }
    return total / T(counted);
  }
};

inline double loss(const Shape& shape, const Parameters<double>& p, const std::vector<std::int32_t>& tokens,
                   const std::vector<std::int32_t>& targets) {
  return Model<double>{shape, p}.loss(tokens, targets);
}

// Every derivative of the loss, one evaluation each.
inline Parameters<double> gradients(const Shape& shape, const Parameters<double>& p,
                                    const std::vector<std::int32_t>& tokens,
                                    const std::vector<std::int32_t>& targets) {
  constexpr double kStep = 1e-100;
  Parameters<std::complex<double>> z;
  for (const std::vector<double>& values : p) z.emplace_back(values.begin(), values.end());
  Parameters<double> all;
  for (std::vector<std::complex<double>>& values : z) {
    std::vector<double>& gradient = all.emplace_back();
    for (std::complex<double>& value : values) {
      value.imag(kStep);
      gradient.push_back(Model<std::complex<double>>{shape, z}.loss(tokens, targets).imag() / kStep);
      value.imag(0);
    }
  }
  return all;
}

}  // namespace gpt_reference
