"""One device, or the ranks of several: the step loop, model and sampler; knows no client, no cluster and no role."""
