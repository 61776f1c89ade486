"""How families of models write calls: one module each, chosen by a model's chat template."""
