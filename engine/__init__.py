"""One device, or the ranks of several: the step loop, the model runner and the sampler; knows no client, no cluster and no role."""
