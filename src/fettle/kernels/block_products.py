# mypy: disable-error-code="no-untyped-call,untyped-decorator"
"""Products with weights in 8 or 4 bits, in blocks of 32 inputs, for CPUs with AVX-512 VNNI or AVX2: one kernel in C++.

Each block of 32 inputs of a row has its own scale, with 4 bits its own lowest value too, in float16 (as llama.cpp's
formats Q8_0 and Q4_1 have it). What comes in is rounded to 8 bits block by block as well, so that an outlier costs its
block alone and all products are of whole numbers, summed up exactly within a block.

Weights lie in the order in which they are read: of 16 outputs, 4 inputs each, 64 bytes at a time. One instruction
multiplies them with the same 4 inputs for all 16 outputs. A step of decoding then takes as long as reading the weights;
for the many tokens of a prompt a stripe of them stays in the cache.
"""

from typing import Any

import torch


def packed_blocks(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [out, in] as the kernel reads them, and their scales, float16 held as int16 (a cast of the model must not
    round them). `in` must be a multiple of 32."""
    weight = torch.nn.functional.pad(weight.detach().float(), (0, 0, 0, -len(weight) % 16))
    blocks = weight.reshape(len(weight) // 16, 16, -1, 32)  # outputs by 16, and inputs by 32
    if bits == 8:
        scales = (blocks.abs().amax(-1) / 127).clamp(min=6e-8, max=65504).half()
        codes = (blocks / scales.float()[..., None]).round().clamp(-127, 127) + 128
        parts = codes.to(torch.uint8).unflatten(-1, (8, 4))
        return parts.permute(0, 2, 3, 1, 4).contiguous(), scales.transpose(1, 2).contiguous().view(torch.int16)
    low = blocks.amin(-1).clamp(-65504, 65504).half()
    steps = ((blocks.amax(-1) - low.float()) / 15).clamp(min=6e-8, max=65504).half()
    codes = ((blocks - low.float()[..., None]) / steps.float()[..., None]).round().clamp(0, 15)
    parts = codes.to(torch.uint8).unflatten(-1, (8, 4))
    packed = parts[..., :4, :] | parts[..., 4:, :] << 4  # the first half of a block in the low bits
    scales = torch.stack([steps, low], -1).permute(0, 2, 3, 1)
    return packed.permute(0, 2, 3, 1, 4).contiguous(), scales.contiguous().view(torch.int16)


def unpacked_blocks(packed: torch.Tensor, scales: torch.Tensor, size: int) -> torch.Tensor:
    """The weights [out, in] in float32 of what `packed_blocks` made of `size` rows."""
    parts = packed.permute(0, 3, 1, 2, 4)  # 16 outputs before the blocks
    known = scales.view(torch.float16).float()
    if packed.shape[2] == 8:
        blocks = (parts.flatten(-2).float() - 128) * known.transpose(1, 2)[..., None]
    else:
        steps, low = known.permute(2, 0, 3, 1)[..., None]
        blocks = torch.cat([parts & 15, parts >> 4], -2).flatten(-2).float() * steps + low
    return blocks.flatten(2).flatten(0, 1)[:size]


def block_product_reference(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, size: int) -> torch.Tensor:
    """What the kernel computes of x [rows, in]: [rows, size], in eager PyTorch."""
    blocks = x.float().unflatten(-1, (-1, 32))
    steps = (blocks.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
    rounded = ((blocks / steps).round() * steps).flatten(1)
    found: torch.Tensor = rounded @ unpacked_blocks(packed, scales, size).T
    return found.to(x.dtype)


def block_products() -> Any:
    """The operator ``(x [rows, in], packed, scales, size) -> [rows, size]``, compiled when it is first asked for and
    kept in torch's folder of extensions. ImportError in one line where there is no compiler."""
    if hasattr(torch.ops.block_products, "multiply"):
        return torch.ops.block_products.multiply
    import hashlib
    import os
    import subprocess
    import tempfile
    from pathlib import Path

    from torch import library
    from torch.utils.cpp_extension import get_cxx_compiler, get_default_build_root, include_paths, library_paths

    source = r"""
    #include <ATen/Parallel.h>
    #include <ATen/ops/empty.h>
    #include <immintrin.h>
    #include <torch/library.h>
    #include <algorithm>
    #include <cmath>
    #include <cstring>
    #include <type_traits>
    #include <vector>

    namespace {

    constexpr int64_t BLOCK = 32;  // inputs with a scale of their own
    constexpr int64_t LANES = 16;  // outputs that are computed at a time

    struct Rounded {  // what comes in: 8 bits of each number, and of each block its scale and its sum
      std::vector<int8_t> values;
      std::vector<float> scales;
      std::vector<int32_t> sums;
    };

    // Sixteen floats, sixteen whole numbers or 64 bytes, and what is done with them.
    #ifdef __AVX512VNNI__
    using Floats = __m512;
    using Ints = __m512i;
    constexpr int MOST_ROWS = 6, MOST_STRIPES = 2;  // that fit into the registers

    inline Floats same(float x) { return _mm512_set1_ps(x); }
    inline Ints same(int32_t x) { return _mm512_set1_epi32(x); }
    inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    inline Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    inline Floats as_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
    inline Floats half16(const int16_t* x) {
      return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
    }
    inline Floats read16(const float* x) { return _mm512_loadu_ps(x); }
    inline Floats read16(const at::BFloat16* x) {
      const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    }
    inline void write16(float* out, Floats x) { _mm512_storeu_ps(out, x); }
    inline void write16(at::BFloat16* out, Floats x) {  // to the nearest, of two the even one
      const Ints bits = _mm512_castps_si512(x);
      const Ints odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), same(1));
      const Ints whole = _mm512_add_epi32(bits, _mm512_add_epi32(odd, same(0x7fff)));
      const Ints quiet = _mm512_or_si512(bits, same(0x400000));  // what is no number stays none
      const Ints kept = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), whole, quiet);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
    }
    inline void write16(int8_t* out, Ints x) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtsepi32_epi8(x));
    }
    inline float most(Floats a, Floats b) {
      return _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
    }
    inline bool has_none(Floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
    inline int32_t sum(Ints a, Ints b) { return _mm512_reduce_add_epi32(_mm512_add_epi32(a, b)); }
    inline Ints bytes64(const uint8_t* x) { return _mm512_loadu_si512(x); }
    inline Ints low_bits(Ints x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
    inline Ints high_bits(Ints x) { return low_bits(_mm512_srli_epi16(x, 4)); }
    inline Ints nearest(Floats x) { return _mm512_cvtps_epi32(x); }
    // Sums of 4 products each. Of 8 bits the weights are 128 more than what they stand for, which `begin8` takes off.
    inline Ints begin8(int32_t sum) { return same(-128 * sum); }
    inline Ints add8(Ints sum, Ints weights, Ints x) { return _mm512_dpbusd_epi32(sum, weights, x); }
    inline Ints add4(Ints sum, Ints weights, Ints x) { return _mm512_dpbusd_epi32(sum, weights, x); }
    inline Ints end4(Ints sum) { return sum; }
    #else
    struct Floats { __m256 low, high; };
    struct Ints { __m256i low, high; };
    constexpr int MOST_ROWS = 3, MOST_STRIPES = 1;

    inline Floats same(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
    inline Ints same(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
    inline Floats multiply_add(Floats a, Floats b, Floats c) {
      return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
    }
    inline Floats times(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
    inline Floats as_floats(Ints x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
    inline Floats half16(const int16_t* x) {
      const __m128i* halves = reinterpret_cast<const __m128i*>(x);
      return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
    }
    inline Floats read16(const float* x) { return {_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)}; }
    inline Floats read16(const at::BFloat16* x) {
      const auto wide = [](const at::BFloat16* from) {
        const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
      };
      return {wide(x), wide(x + 8)};
    }
    inline void write16(float* out, Floats x) { _mm256_storeu_ps(out, x.low), _mm256_storeu_ps(out + 8, x.high); }
    inline void write16(at::BFloat16* out, Floats x) {
      float found[LANES];
      write16(found, x);
      for (int64_t i = 0; i < LANES; ++i) out[i] = static_cast<at::BFloat16>(found[i]);
    }
    inline void write16(int8_t* out, Ints x) {
      const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.low, x.high), 0xd8);
      const __m128i first = _mm256_castsi256_si128(words), last = _mm256_extracti128_si256(words, 1);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_packs_epi16(first, last));
    }
    inline float most(Floats a, Floats b) {
      const auto larger = [](Floats x) {
        const __m256 sign = _mm256_set1_ps(-0.0f);
        return _mm256_max_ps(_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high));
      };
      const __m256 eight = _mm256_max_ps(larger(a), larger(b));
      __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
      four = _mm_max_ps(four, _mm_movehl_ps(four, four));
      return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
    }
    inline bool has_none(Floats x) {
      return _mm256_movemask_ps(_mm256_cmp_ps(x.low, x.high, _CMP_UNORD_Q));  // of either
    }
    inline int32_t sum(Ints a, Ints b) {
      const __m256i eight = _mm256_add_epi32(_mm256_add_epi32(a.low, a.high), _mm256_add_epi32(b.low, b.high));
      __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
      four = _mm_hadd_epi32(four, four);
      return _mm_cvtsi128_si32(_mm_hadd_epi32(four, four));
    }
    inline Ints bytes64(const uint8_t* x) {
      const __m256i* halves = reinterpret_cast<const __m256i*>(x);
      return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
    }
    inline __m256i low_bits(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
    inline Ints low_bits(Ints x) { return {low_bits(x.low), low_bits(x.high)}; }
    inline Ints high_bits(Ints x) {
      return {low_bits(_mm256_srli_epi16(x.low, 4)), low_bits(_mm256_srli_epi16(x.high, 4))};
    }
    inline Ints nearest(Floats x) { return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)}; }
    // There is a product of bytes without and with a sign, and sums of two of them have 16 bits: with 8 bits the weight
    // gives its sign to what comes in, with 4 the sums of a whole block fit.
    inline __m256i pairs(__m256i sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
    inline __m256i add8(__m256i sum, __m256i weights, __m256i x) {
      const __m256i signs = _mm256_xor_si256(weights, _mm256_set1_epi8(-128));
      const __m256i two = _mm256_maddubs_epi16(_mm256_abs_epi8(signs), _mm256_sign_epi8(x, signs));
      return _mm256_add_epi32(sum, pairs(two));
    }
    inline Ints begin8(int32_t) { return same(0); }
    inline Ints add8(Ints sum, Ints weights, Ints x) {
      return {add8(sum.low, weights.low, x.low), add8(sum.high, weights.high, x.low)};
    }
    inline Ints add4(Ints sum, Ints weights, Ints x) {
      return {_mm256_add_epi16(sum.low, _mm256_maddubs_epi16(weights.low, x.low)),
              _mm256_add_epi16(sum.high, _mm256_maddubs_epi16(weights.high, x.low))};
    }
    inline Ints end4(Ints sum) { return {pairs(sum.low), pairs(sum.high)}; }
    #endif

    template <typename T>
    inline void write16(T* out, Floats x, int64_t count) {
      if (count >= LANES) return write16(out, x);
      T found[LANES];
      write16(found, x);
      std::copy_n(found, count, out);
    }

    template <typename T>
    void round_row(const T* x, int64_t blocks, int8_t* values, float* scales, int32_t* sums) {
      for (int64_t b = 0; b < blocks; ++b, x += BLOCK, values += BLOCK) {
        const Floats first = read16(x), last = read16(x + LANES);
        const bool none = has_none(first) || has_none(last);
        const float scale = none ? NAN : most(first, last) / 127.0f;  // what is no number makes everything none
        const Floats inverse = same(scale > 1e-30f ? 1.0f / scale : 0.0f);  // of tiny numbers nothing is left
        const Ints low = nearest(times(first, inverse)), high = nearest(times(last, inverse));
        write16(values, low), write16(values + LANES, high);
        scales[b] = scale;
        sums[b] = sum(low, high);
      }
    }

    inline Ints four(const int8_t* values) {  // the same 4 inputs for all 16 outputs
      int32_t word;
      std::memcpy(&word, values, sizeof word);
      return same(word);
    }

    // 16 outputs each of STRIPES neighbours, for ROWS rows of what comes in.
    template <int BITS, int ROWS, int STRIPES, typename T>
    inline void tile(const uint8_t* weights, const int16_t* scales, const Rounded& x, int64_t row, int64_t blocks,
                     T* out, int64_t size, int64_t column) {
      constexpr int64_t KINDS = BITS == 8 ? 1 : 2;  // a scale, and with 4 bits a lowest value
      const int64_t stripe = blocks * BLOCK * LANES * BITS / 8, scale_stripe = blocks * LANES * KINDS;
      const int8_t* values = x.values.data() + row * blocks * BLOCK;
      const float* steps = x.scales.data() + row * blocks;
      const int32_t* sums = x.sums.data() + row * blocks;
      Floats total[ROWS][STRIPES];
      for (auto& of_row : total)
        for (auto& one : of_row) one = same(0.0f);
      for (int64_t b = 0; b < blocks; ++b) {
        Ints found[ROWS][STRIPES];
        for (int r = 0; r < ROWS; ++r)
          for (auto& one : found[r]) one = BITS == 8 ? begin8(sums[r * blocks + b]) : same(0);
        for (int k = 0; k < BITS; ++k) {
          Ints weight[STRIPES];
          if (ROWS == 1) _mm_prefetch(weights + (b * BITS + k) * 64 + 8192, _MM_HINT_T1);  // one row waits for memory
          for (int s = 0; s < STRIPES; ++s) weight[s] = bytes64(weights + s * stripe + (b * BITS + k) * 64);
          for (int r = 0; r < ROWS; ++r) {
            const int8_t* own = values + (r * blocks + b) * BLOCK + 4 * k;
            const Ints before = four(own), after = BITS == 4 ? four(own + BLOCK / 2) : before;
            for (int s = 0; s < STRIPES; ++s) {
              if constexpr (BITS == 8) {
                found[r][s] = add8(found[r][s], weight[s], before);
              } else {
                found[r][s] = add4(add4(found[r][s], low_bits(weight[s]), before), high_bits(weight[s]), after);
              }
            }
          }
        }
        for (int s = 0; s < STRIPES; ++s) {
          const int16_t* known = scales + s * scale_stripe + b * LANES * KINDS;
          const Floats scale = half16(known);
          for (int r = 0; r < ROWS; ++r) {
            const Floats step = same(steps[r * blocks + b]);
            if constexpr (BITS == 8) {
              total[r][s] = multiply_add(as_floats(found[r][s]), times(scale, step), total[r][s]);
            } else {
              const Floats lowest = times(half16(known + LANES), same(static_cast<float>(sums[r * blocks + b])));
              const Floats value = multiply_add(scale, as_floats(end4(found[r][s])), lowest);
              total[r][s] = multiply_add(value, step, total[r][s]);
            }
          }
        }
      }
      for (int s = 0; s < STRIPES; ++s) {
        const int64_t first = column + s * LANES;
        for (int r = 0; r < ROWS; ++r) write16(out + (row + r) * size + first, total[r][s], size - first);
      }
    }

    template <int BITS, int STRIPES, typename T>
    void stripes(const uint8_t* weights, const int16_t* scales, const Rounded& x, int64_t rows, int64_t blocks, T* out,
                 int64_t size, int64_t column) {
      int64_t r = 0;
      for (; r + MOST_ROWS <= rows; r += MOST_ROWS)
        tile<BITS, MOST_ROWS, STRIPES>(weights, scales, x, r, blocks, out, size, column);
      for (; r + 3 <= rows; r += 3) tile<BITS, 3, STRIPES>(weights, scales, x, r, blocks, out, size, column);
      for (; r < rows; ++r) tile<BITS, 1, STRIPES>(weights, scales, x, r, blocks, out, size, column);
    }

    template <int BITS, typename T>
    void product(const T* x, int64_t rows, int64_t blocks, const uint8_t* weights, const int16_t* scales, int64_t size,
                 T* out) {
      if (rows == 0) return;
      Rounded rounded{std::vector<int8_t>(rows * blocks * BLOCK), std::vector<float>(rows * blocks),
                      std::vector<int32_t>(rows * blocks)};
      at::parallel_for(0, rows, 4, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r)
          round_row(x + r * blocks * BLOCK, blocks, rounded.values.data() + r * blocks * BLOCK,
                    rounded.scales.data() + r * blocks, rounded.sums.data() + r * blocks);
      });
      const int64_t stripe = blocks * BLOCK * LANES * BITS / 8, scale_stripe = blocks * LANES * (BITS == 8 ? 1 : 2);
      const int64_t grain = std::max<int64_t>(1, 16384 / (stripe * rows));
      at::parallel_for(0, (size + LANES - 1) / LANES, grain, [&](int64_t begin, int64_t end) {
        int64_t g = begin;
        const auto go = [&](auto count) {
          stripes<BITS, count.value>(weights + g * stripe, scales + g * scale_stripe, rounded, rows, blocks, out, size,
                                     g * LANES);
          g += count.value;
        };
        while (rows >= 3 && g + MOST_STRIPES <= end) go(std::integral_constant<int, MOST_STRIPES>());
        while (g < end) go(std::integral_constant<int, 1>());  // few rows wait for memory, which is read in order
      });
    }

    at::Tensor multiply(const at::Tensor& given, const at::Tensor& packed, const at::Tensor& scales, int64_t size) {
      const at::Tensor x = given.contiguous();
      const int64_t rows = x.size(0), blocks = packed.size(1), bits = packed.size(2);
      TORCH_CHECK(x.dim() == 2 && x.size(1) == blocks * BLOCK, "what comes in does not fit the weights");
      TORCH_CHECK(packed.is_contiguous() && packed.scalar_type() == at::kByte, "the weights are not packed");
      TORCH_CHECK(scales.is_contiguous() && scales.scalar_type() == at::kShort, "the scales are not packed");
      TORCH_CHECK(size <= packed.size(0) * LANES && (bits == 8 || bits == 4), "the weights are not packed");
      const at::Tensor out = at::empty({rows, size}, x.options());
      const uint8_t* weights = packed.const_data_ptr<uint8_t>();
      const int16_t* known = scales.const_data_ptr<int16_t>();
      if (x.scalar_type() == at::kFloat) {
        const auto run = bits == 8 ? product<8, float> : product<4, float>;
        run(x.const_data_ptr<float>(), rows, blocks, weights, known, size, out.mutable_data_ptr<float>());
      } else {
        TORCH_CHECK(x.scalar_type() == at::kBFloat16, "products in blocks are of float32 or bfloat16");
        const auto run = bits == 8 ? product<8, at::BFloat16> : product<4, at::BFloat16>;
        run(x.const_data_ptr<at::BFloat16>(), rows, blocks, weights, known, size,
            out.mutable_data_ptr<at::BFloat16>());
      }
      return out;
    }

    }  // namespace

    TORCH_LIBRARY(block_products, m) {
      m.def("multiply(Tensor x, Tensor packed, Tensor scales, SymInt size) -> Tensor");
    }
    TORCH_LIBRARY_IMPL(block_products, CPU, m) { m.impl("multiply", &multiply); }
    """
    if not torch.cpu._is_avx2_supported():
        raise ImportError("products in blocks need a CPU with AVX2 or AVX-512 VNNI")
    flags = "-std=c++20 -O3 -fPIC -shared -fopenmp -mfma -mf16c -mavx2"
    if torch.cpu._is_vnni_supported():
        flags += " -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni"
    made = hashlib.sha256(f"{source}{flags}{torch.__version__}".encode()).hexdigest()[:16]
    built = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()) / f"block_products_{made}.so"
    if not built.is_file():
        built.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:  # one that is killed leaves nothing half done
            file, part = Path(folder) / "block_products.cpp", Path(folder) / built.name
            file.write_text(source)
            folders = [f"-isystem{path}" for path in include_paths()]
            folders += [f"-L{path}" for path in library_paths()]
            command = [get_cxx_compiler(), *flags.split(), str(file), "-o", str(part), *folders]
            try:
                subprocess.run([*command, "-lc10", "-ltorch_cpu"], check=True, capture_output=True, text=True)
            except OSError as error:
                raise ImportError(f"products in blocks need a C++ compiler: {error.strerror or error}") from error
            except subprocess.CalledProcessError as error:
                said = [line for line in error.stderr.splitlines() if "error" in line] or [error.stderr[:200]]
                raise ImportError(f"products in blocks were not compiled: {said[0]}") from error
            part.replace(built)
    torch.ops.load_library(built)

    @library.register_fake("block_products::multiply")
    def shape(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, size: int) -> torch.Tensor:
        return x.new_empty(x.shape[0], size)

    return torch.ops.block_products.multiply


BLOCK_PRODUCTS = (packed_blocks, unpacked_blocks, block_products)
"""What a technique copies into ``optimized.py``."""
