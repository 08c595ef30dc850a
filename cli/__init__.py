"""The command line: options, a config, a call of a stage. No logic."""
