// Averages of parameters that no update of ours moves. Bytes an element, fp32: 12.
#include "launch.h"
#include "packs.h"
#include "update.h"
#include "weights.h"

namespace stepclock {
namespace cuda {
namespace {

template <typename W>
__global__ void __launch_bounds__(kUpdateThreads)
    move_average_kernel(TableView table, int64_t first_chunk, const double* stats,
                        Companions companions) {
  if (is_shut(companions, stats)) return;
  using C = typename W::C;
  const Span span = find_span(table, first_chunk, kUpdateParts);
  const WeightColumns w = find_weights(table, span.row, companions);
  const C weight = static_cast<C>(companions.average_weight);
  for_each_pack<kPackOf<typename W::Param>>(span, are_aligned(w), [&](int64_t i, auto count) {
    C values[decltype(count)::value];
    W::load(w, i, values);
    move_average_pack(w.average, i, values, weight);
  });
}

template <typename W>
cudaError_t launch_average(const Run& run, const Companions& companions) {
  return launch(move_average_kernel<W>, run.section.num_chunks * kUpdateParts, kUpdateThreads,
                run.target.stream, run.target.table, run.section.first_chunk, run.stats,
                companions);
}

cudaError_t average_section(const Run& run, const Companions& companions) {
  switch (run.section.param) {
    case DType::kFloat64:
      return launch_average<PlainWeights<double>>(run, companions);
    case DType::kBFloat16:
      return companions.has_masters ? launch_average<RemainderWeights>(run, companions)
                                    : launch_average<PlainWeights<BFloat16>>(run, companions);
    case DType::kFloat16:
      return companions.has_masters ? launch_average<CopyWeights>(run, companions)
                                    : launch_average<PlainWeights<Float16>>(run, companions);
    case DType::kFloat32:
      break;
  }
  return launch_average<PlainWeights<float>>(run, companions);
}

}  // namespace

cudaError_t move_average(const double* stats, const Companions& companions, const Target& target) {
  for (int k = 0; k < target.num_sections; ++k) {
    const Section& section = target.sections[k];
    const cudaError_t error =
        average_section(Run{section, target, stats}, narrowed(companions, section));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace stepclock
