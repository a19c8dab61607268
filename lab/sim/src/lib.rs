//! The simulator: virtual time around the real protocol core.
