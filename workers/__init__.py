"""Workers: device, weights, KV cache, model runner, sampler. `protocol` is torch-free."""
