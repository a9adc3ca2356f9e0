"""From a configuration to a model runner that is ready to answer."""
