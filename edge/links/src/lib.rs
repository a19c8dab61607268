//! The links of this machine as they come and go: addresses, routes, type and class.
