//! Scenario files and the report of a run: what the lab and the simulator have in common.
