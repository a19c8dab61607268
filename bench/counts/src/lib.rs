//! An empty library: the package exists for its benches.
