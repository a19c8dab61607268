//! D2Sched: which flow goes over which link now, or waits, and why.
