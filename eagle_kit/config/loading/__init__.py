"""Reading configs: YAML file, command-line overrides, unknown keys, validation."""
