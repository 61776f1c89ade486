"""How families of models write calls. Each family has a module; a model's chat template shows which family it has."""
