// adapted_model.cpp: the model's layers with the adapter in them.
#include "model/instances.h"
#include "model/options.h"
#include "server/engine/adapted_model.h"

namespace server {

template <class T>
AdaptedModel<T>::AdaptedModel(Context ctx, const Weights<T>& w, const AdapterFile& file, const std::string& name,
                              int tokens)
    : LoadedAdapter(name, file.path, adapter_hash(file, 1), file.map.size), layers(w.layers),
      attached(ctx, *this, file, tokens) {
    if (!ctx.gpu) return;
    std::vector<Adapter<T>> all;
    for (auto& layer : layers)
        for (const Linear<T>* product : products_of(layer)) all.push_back(product->adapter);
    table.gpu = true;
    table.take<Adapter<T>>(all.size());
    table.allocate("the adapter");
    on_gpu = table.take<Adapter<T>>(all.size());
    copy_in(ctx, on_gpu, all.data(), all.size());
}

#define INSTANTIATE(T) template struct AdaptedModel<T>;
QWEN3_INSTANCES(INSTANTIATE)
#undef INSTANTIATE

} // namespace server
