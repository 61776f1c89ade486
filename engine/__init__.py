"""One device, or the ranks of several: step plans to tensors to tokens; knows no client, no role and no scheduling."""
