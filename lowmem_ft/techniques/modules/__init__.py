"""Finding a model's decoder layers, and patching live modules reversibly."""
