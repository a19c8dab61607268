//! The lab: the same link models in real time, between network namespaces.
