"""The command line: one module a verb, each a thin shell over the library."""
