"""The kernels' codes of data types, as in vectors.h."""

import torch

TYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3}
