//! Nothing: the benches are what this package is for.
